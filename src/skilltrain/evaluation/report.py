"""The report of an evaluation: everything a reader needs to trust a table, and what is said of it in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from pydantic_core import to_jsonable_python

from skilltrain.evaluation.page import counted, p_equals
from skilltrain.metrics.benchmarks.benchmark import Benchmark, Task
from skilltrain.metrics.bootstrap import RESAMPLES, SEED, Interval
from skilltrain.metrics.comparison import Comparison, SystemResult, compare
from skilltrain.metrics.measures import COPIES, Measure, Relevance, resolve_alternatives
from skilltrain.metrics.slices import (
    ALL,
    KIND,
    Row,
    SliceMeans,
    description_length_gaps,
    distinct_slices,
    labels_of,
    means_by_slice,
)
from skilltrain.records import Skill

HEADLINE = "Hit@1"
COMPARED = (
    HEADLINE,
    HEADLINE + COPIES,
    "MRR@10",
)  # the measures by which systems are compared in pairs
ANALYSES = (
    "outcomes",
    "pass_rates",
    "stages",
    "unserved",
    "truncation",
    "latencies",
    "structure",
    "attention",
)


@dataclass(frozen=True)
class Report:
    """Means, intervals, paired comparisons, and the values behind them.

    `skills` maps skill_id → skill; ids stand in for names that it lacks. The first of `slices` are all queries.
    `notes` are sentences that a reader must know, `provenance` says what was evaluated (title → words). `analysis` has,
    by a name of ANALYSES, the rows of what was asked for and could be computed (of `unserved` a mapping).
    """

    benchmark: Benchmark
    skills: Mapping[str, Skill]
    measures: tuple[str, ...]
    results: tuple[SystemResult, ...]
    slices: tuple[SliceMeans, ...]
    comparisons: tuple[Comparison, ...]
    gaps: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    analysis: Mapping[str, Any] = field(default_factory=dict)

    @property
    def every(self) -> SliceMeans:
        """The means over all queries."""
        return self.slices[0]

    @property
    def systems(self) -> list[str]:
        """The systems' names, in their order."""
        return [result.name for result in self.results]

    @property
    def labels(self) -> dict[str, list[SliceMeans]]:
        """Every label that tells queries apart, the kind first, with its slices."""
        found: dict[str, list[SliceMeans]] = {}
        for part in sorted(distinct_slices(self.slices)[1:], key=lambda part: part.label != KIND):
            found.setdefault(part.label, []).append(part)
        return found

    @property
    def chief_measure(self) -> str:
        """What the first sentence and the latency plot are about: Hit@1, where it was asked for."""
        return HEADLINE if HEADLINE in self.measures else self.measures[0]

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """query_id → its task."""
        return {task.query.query_id: task for task in self.benchmark.tasks}

    @cached_property
    def first_ranks(self) -> dict[str, dict[str, int | None]]:
        """System → query_id → the rank of the first gold skill; None where the ranking ends before one."""
        ranks: dict[str, dict[str, int | None]] = {}
        for result in self.results:
            own = ranks[result.name] = {}
            for query_id in self.tasks:
                ranking = result.rankings.get(query_id, ())
                gold = self.found(query_id, ranking).gold
                own[query_id] = next(
                    (rank for rank, skill_id in enumerate(ranking, 1) if skill_id in gold), None
                )
        return ranks

    def found(self, query_id: str, ranking: Sequence[str]) -> Relevance:
        """What counts as gold for this ranking of a query: an alternative that stands first does."""
        return resolve_alternatives(ranking, self.tasks[query_id].relevance)

    def name(self, skill_id: str) -> str:
        """A skill's name; its id where it has none."""
        return (self.skills[skill_id].name.strip() if skill_id in self.skills else "") or skill_id

    def title(self) -> str:
        """What was evaluated on how much."""
        num = len(self.systems)
        what = counted(num, "system") if num > 2 else " and ".join(self.systems)
        return f"{what} on {counted(len(self.tasks), 'query')}"

    def headline(self) -> str:
        """One or two sentences for readers who read no more: the best system, and whether it is above the first."""
        measure = self.chief_measure
        rows = {name: row[measure] for name, row in self.every.means.items() if measure in row}
        if not rows:
            return f"No query has a value of {measure}."
        best = max(rows, key=lambda name: rows[name].mean)
        if len(rows) == 1:
            return f"{best}: {measure} {rows[best]}."
        if not self.every.best(measure):
            return f"All systems have the same {measure}, {rows[best]}."
        said = f"{best} has the highest {measure}, {rows[best]}"
        for c in self.comparisons:
            if (c.system, c.baseline, c.measure) == (best, self.systems[0], measure):
                words = c.reading + (" from" if c.reading == "not told apart" else "")
                return f"{said}: {words} {c.baseline} (difference {c.difference}, {p_equals(c.p_holm)} after Holm)."
        return f"{said}."

    def sections(self, system: str) -> dict[str, Mapping[str, Interval]]:
        """Return the means by measure of `all`, `single` and `multi`. A kind without queries is left out."""
        return {part.value: part.means[system] for part in self.slices if part.label in (ALL, KIND)}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without the values of single queries."""
        analysis = {key: [] for key in ANALYSES} | {"unserved": {}} | dict(self.analysis)
        return to_jsonable_python(
            {
                "benchmark": self.benchmark.name,
                "seed": SEED,
                "resamples": RESAMPLES,
                "systems": [self._system(name) for name in self.systems],
                "slices": [
                    {
                        "label": part.label,
                        "value": part.value,
                        "num_queries": len(part.query_ids),
                        "systems": part.means,
                    }
                    for part in self.slices
                ],
                "differences": self.comparisons,
                "gaps": self.gaps,
                "analysis": analysis,
                "notes": self.notes,
            }
        )

    def _system(self, name: str) -> dict[str, Any]:
        sections = self.sections(name)
        return {"name": name, "metrics": sections.pop(ALL), **sections}


def build_report(
    benchmark: Benchmark,
    results: Sequence[SystemResult],
    measures: Sequence[Measure],
    skills: Mapping[str, Skill],
    notes: Sequence[str] = (),
    provenance: Mapping[str, str] | None = None,
) -> Report:
    """The systems' means with 95% intervals, for all queries and each slice, and the differences between systems.

    Each system is compared with the first and with the one before it, by Hit@1, strict and with copies, and MRR@10 (by
    the first measure, where none was asked for), over the queries that have a value.
    Raises SkilltrainError where a system does not hold exactly these queries, or a measure where another does.
    """
    names = tuple(map(str, measures))
    labels = labels_of(benchmark.tasks, skills)
    slices = means_by_slice(results, labels, names)
    systems = [result.name for result in results]
    pairs = list(
        dict.fromkeys([*((systems[0], system) for system in systems[1:]), *pairwise(systems)])
    )
    compared = [name for name in names if name in COMPARED] or [names[0]]
    return Report(
        benchmark,
        skills,
        names,
        tuple(results),
        slices,
        comparisons=compare(results, pairs, compared),
        gaps=description_length_gaps(results, slices, compared[0]),
        notes=tuple(notes),
        provenance=provenance or {},
    )
