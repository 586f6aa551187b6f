"""The report of an evaluation: all values, and the sentences that sum them up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from pydantic_core import to_jsonable_python

from skilltrain.evaluation.page import counted
from skilltrain.metrics.benchmarks.benchmark import Benchmark, Task
from skilltrain.metrics.bootstrap import RESAMPLES, Interval
from skilltrain.metrics.comparison import Comparison, SystemResult, compare
from skilltrain.metrics.measures import COPIES, JUDGED, Measure, Relevance, resolve_alternatives
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
# Measures whose comparisons share one Holm correction. If a report has none of them, its first
# measure takes their place.
_MAIN_MEASURES = (HEADLINE, HEADLINE + COPIES, HEADLINE + JUDGED, "MRR@10")
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
    """Means, intervals and paired comparisons, and the values that they are computed from.

    Attributes:
        skills: Skills by id. A skill that is missing is shown by its id.
        measures: Names of the measures.
        results: Rankings and values of each system.
        slices: Means over groups of queries. The first group is all queries.
        comparisons: Differences between pairs of systems.
        gaps: Differences between groups of queries.
        notes: Sentences that a reader must know.
        provenance: What was evaluated, by title.
        analysis: Rows of each analysis by its kind.
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
    def overall(self) -> SliceMeans:
        """Means over all queries."""
        return self.slices[0]

    @property
    def systems(self) -> list[str]:
        """Names of the systems."""
        return [result.name for result in self.results]

    @property
    def seed(self) -> int:
        """Seed of the bootstrap."""
        return self.results[0].seed

    @property
    def labels(self) -> dict[str, list[SliceMeans]]:
        """Slices by label, the kind of query first. Labels that all queries share are left out."""
        slices_by_label = {KIND: []}
        for query_slice in distinct_slices(self.slices)[1:]:  # without the slice of all queries
            slices_by_label.setdefault(query_slice.label, []).append(query_slice)
        return {label: slices for label, slices in slices_by_label.items() if slices}

    @property
    def chief_measure(self) -> str:
        """Measure of the first sentence and of the latency plot: Hit@1 if there is one."""
        return HEADLINE if HEADLINE in self.measures else self.measures[0]

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Tasks by query id."""
        return {task.query.query_id: task for task in self.benchmark.tasks}

    @cached_property
    def first_ranks(self) -> dict[str, dict[str, int | None]]:
        """Rank of the first gold skill of each query, by system and query id.

        A gold skill is a skill that the query needs. Ranks count from 1. The rank is None if the
        ranking has no gold skill.
        """
        ranks = {}
        for result in self.results:
            ranks[result.name] = {}
            for query_id in self.tasks:
                # A query without an answer has an empty ranking.
                ranking = result.rankings.get(query_id, ())
                # Some gold skills have alternatives. An alternative that is ranked higher than the
                # gold skill replaces the gold skill.
                gold = self.relevance_for(query_id, ranking).gold
                gold_ranks = [rank for rank, skill_id in enumerate(ranking, 1) if skill_id in gold]
                ranks[result.name][query_id] = gold_ranks[0] if gold_ranks else None
        return ranks

    def relevance_for(self, query_id: str, ranking: Sequence[str]) -> Relevance:
        """Return the relevance for one ranking of a query.

        If an alternative is ranked above the gold skill that it stands for, it is gold instead.
        """
        return resolve_alternatives(ranking, self.tasks[query_id].relevance)

    def name(self, skill_id: str) -> str:
        """Return the name of a skill, or its id if it has none."""
        skill = self.skills.get(skill_id)
        name = skill.name.strip() if skill else ""
        return name or skill_id

    def title(self) -> str:
        """Return a title with the number of queries and the systems; of many only their number."""
        systems = " and ".join(self.systems)
        if len(self.systems) > 2:
            systems = counted(len(self.systems), "system")
        return f"{systems} on {counted(len(self.tasks), 'query')}"

    def headline(self) -> str:
        """Return a sentence that names the system with the highest mean.

        It also names the systems whose difference to this system is not significant.
        """
        measure = self.chief_measure
        # The mean of each system: by the chief measure, over all queries.
        means = {name: row[measure] for name, row in self.overall.means.items() if measure in row}
        if not means:
            return f"No query has a value of {measure}."
        # Of systems with equal means, the first system counts as the best.
        best = max(means, key=lambda name: means[name].mean)
        if len(means) == 1:
            return f"{best}: {measure} {means[best]}."
        if not self.overall.best(measure):  # all means are equal
            return f"All systems have the same {measure}, {means[best]}."

        # A reading says whether the difference to another system is significant. Only some pairs of
        # systems are compared.
        readings = self._readings(best, measure)
        similar = [system for system, reading in readings.items() if reading == "not told apart"]
        sentence = f"{best} has the highest mean {measure}, {means[best]}"
        if similar:
            return f"{sentence}, but its difference to {', '.join(similar)} may be chance."
        if readings:
            return f"{sentence}, significantly more than {', '.join(readings)}."
        return f"{sentence}."

    def _readings(self, system: str, measure: str) -> dict[str, str]:
        """Return the readings of all comparisons with one system, by the other system.

        A reading is `above`, `below` or `not told apart`.

        Args:
            system: Name of the system.
            measure: Name of the measure.
        """
        readings = {}
        for comparison in self.comparisons:
            pair = {comparison.system, comparison.baseline}
            if comparison.measure == measure and system in pair:
                (other_system,) = pair - {system}
                readings[other_system] = comparison.reading
        return readings

    def sections(self, system: str) -> dict[str, Mapping[str, Interval]]:
        """Return a system's means by measure, over all queries and over each kind of query.

        The keys are `all` and the kinds, such as `single` and `multi`.
        """
        slices = [item for item in self.slices if item.label in (ALL, KIND)]
        return {item.value: item.means[system] for item in slices}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without the values of single queries."""
        # Every kind of analysis is a key. A kind that was not computed has an empty list.
        analysis = {kind: [] for kind in ANALYSES} | {**self.analysis}
        slices = []
        for query_slice in self.slices:
            slices.append(
                {
                    "label": query_slice.label,
                    "value": query_slice.value,
                    "num_queries": len(query_slice.query_ids),
                    "systems": query_slice.means,
                }
            )
        return to_jsonable_python(
            {
                "benchmark": self.benchmark.name,
                "seed": self.seed,
                "resamples": RESAMPLES,
                "systems": [self._system(name) for name in self.systems],
                "slices": slices,
                "differences": self.comparisons,
                "gaps": self.gaps,
                "analysis": analysis,
                "notes": self.notes,
            }
        )

    def _system(self, name: str) -> dict[str, Any]:
        """Return a system's means over all queries as `metrics`, and those of each kind."""
        sections = self.sections(name)
        return {"name": name, "metrics": sections.pop(ALL), **sections}


def main_measures(measures: Sequence[str]) -> list[str]:
    """Return the measures whose comparisons share one Holm correction.

    The comparisons by each other measure have a correction of their own.
    """
    return [name for name in measures if name in _MAIN_MEASURES] or [measures[0]]


def build_report(
    benchmark: Benchmark,
    results: Sequence[SystemResult],
    measures: Sequence[Measure],
    skills: Mapping[str, Skill],
    notes: Sequence[str] = (),
    provenance: Mapping[str, str] | None = None,
    planned: Sequence[str] = (),
) -> Report:
    """Compute the means with 95% intervals, overall and by slice, and compare the systems.

    Each system is compared with the first system and with its predecessor, by each measure.

    Args:
        benchmark: Tasks that were scored.
        results: Rankings and values of each system.
        measures: Measures that the report shows.
        skills: Skills by id, for their names.
        notes: Sentences that a reader must know.
        provenance: What was evaluated, by title.
        planned: Names of all systems of the table, if only some of them have results. P-values are
            corrected as if all had some.
    """
    names = tuple(map(str, measures))
    labels = labels_of(benchmark.tasks, skills)
    # A slice is the queries with the same value of a label, such as the kind `multi`.
    slices = means_by_slice(results, labels, names)
    systems = [result.name for result in results]
    planned_pairs = _compared_pairs(planned or systems)
    # Only systems with results can be compared.
    pairs = [pair for pair in planned_pairs if set(pair) <= set(systems)]
    # A family is measures that share a Holm correction: the main measures, or one other measure.
    main = main_measures(names)
    families = [main]
    families += [[name] for name in names if name not in main]
    comparisons = []
    for family in families:
        # `compare` corrects for all comparisons of one call.
        comparisons += compare(results, pairs, family, num_pairs=len(planned_pairs))
    # Put the measures of one pair together. The sort keeps the order of the measures.
    comparisons.sort(key=lambda row: pairs.index((row.baseline, row.system)))
    return Report(
        benchmark,
        skills,
        names,
        tuple(results),
        slices,
        comparisons=tuple(comparisons),
        gaps=description_length_gaps(results, slices, main[0]),
        notes=tuple(notes),
        provenance=provenance or {},
    )


def _compared_pairs(systems: Sequence[str]) -> list[tuple[str, str]]:
    """Pair each system with the first system and with its predecessor."""
    pairs = [(systems[0], system) for system in systems[1:]]
    return pairs + [pair for pair in pairwise(systems) if pair not in pairs]
