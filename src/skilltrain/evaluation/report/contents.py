"""What a report holds, before it is shown anywhere: means, intervals, comparisons, analyses, and the values behind."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.benchmarks.benchmark import Slice
from skilltrain.evaluation.metrics import Relevance, as_found
from skilltrain.evaluation.report.numbers import p_equals, reading
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import RESAMPLES, Interval, normal_interval
from skilltrain.evaluation.statistics.comparison import Comparison

SECTIONS = ("all", "single", "multi")
HEADLINE = "Hit@1"


@dataclass(frozen=True)
class ReportTexts:
    """What the HTML page may show beyond numbers; all of it untrusted.

    query_id → text, skill_id → name, query_id → gold skill ids, query_id → alternatives (Relevance.alternatives; a
    query without any may be left out).
    """

    queries: Mapping[str, str]
    skill_names: Mapping[str, str]
    gold: Mapping[str, frozenset[str]]
    alternatives: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def found(self, query_id: str, ranking: Sequence[str]) -> Relevance:
        """What counts as gold for this ranking of a query: an alternative that stands first does."""
        gold = self.gold[query_id]
        if query_id not in self.alternatives:
            return Relevance(gold, {})
        return as_found(ranking, Relevance(gold, {}, self.alternatives[query_id]))

    def first_rank(self, result: SystemResult, query_id: str) -> int | None:
        """The rank of the first gold skill in a system's ranking; None where it ends before one."""
        ranking = result.rankings.get(query_id, ())
        gold = self.found(query_id, ranking).gold
        return next((rank for rank, skill_id in enumerate(ranking, 1) if skill_id in gold), None)

    def name(self, skill_id: str) -> str:
        """A skill's name; its id where it has none."""
        return self.skill_names.get(skill_id, "").strip() or skill_id


@dataclass(frozen=True)
class Report:
    """Everything a reader needs to trust a table: means, intervals, paired comparisons, and the values behind them.

    `summaries` maps system → section (all, single, multi; an empty section is left out) → measure → interval. A
    measure that no query of a section has a value of (Set-Compat among single-skill queries) is left out there, and
    the interval's `n` says how many queries have one. `comparisons` are over all queries that have a value. `notes`
    say what the figures do not: queries that are not scored, answers that a judge did not give.
    """

    benchmark: str
    seed: int
    measures: tuple[str, ...]
    slices: Mapping[str, Slice]
    results: tuple[SystemResult, ...]
    summaries: Mapping[str, Mapping[str, Mapping[str, Interval]]]
    comparisons: tuple[Comparison, ...]
    analysis: Analysis
    notes: tuple[str, ...] = ()

    def sections(self) -> dict[str, int]:
        """What is shown, and of how many queries: all, and the slices, unless one of them holds all."""
        held = {section: len(self.query_ids(section)) for section in SECTIONS}
        return {section: count for section, count in held.items() if section == "all" or 0 < count < held["all"]}

    def query_ids(self, section: str) -> list[str]:
        """The queries of a section, in the benchmark's order."""
        return [query_id for query_id, part in self.slices.items() if section in ("all", part)]

    def num_queries(self, section: str, measure: str) -> int:
        """How many queries of a section have a value of the measure."""
        row = next(iter(self.summaries.values()))[section]
        return row[measure].n if measure in row else 0

    def partial(self, section: str) -> dict[str, int]:
        """The measures that not every query of the section has a value of, and how many have one."""
        every = len(self.query_ids(section))
        counts = {measure: self.num_queries(section, measure) for measure in self.measures}
        return {measure: count for measure, count in counts.items() if count < every}

    def is_best(self, section: str, system: str, measure: str) -> bool:
        """Whether the system has the section's highest mean, alone or tied; nobody has where all are equal."""
        means = {name: rows[section][measure].mean for name, rows in self.summaries.items()}
        return means[system] == max(means.values()) > min(means.values())

    @property
    def chief_measure(self) -> str:
        """What the first sentence and the latency plot are about: Hit@1, where it was asked for."""
        return HEADLINE if HEADLINE in self.measures else self.measures[0]

    def headline(self) -> str:
        """One or two sentences for readers who read no more: the best system, and whether it is above the first."""
        measure = self.chief_measure
        rows = {name: found["all"][measure] for name, found in self.summaries.items() if measure in found["all"]}
        if not rows:
            return f"No query has a value of {measure}."
        best = max(rows, key=lambda name: rows[name].mean)
        if len(rows) == 1:
            return f"{best}: {measure} {rows[best]}."
        if not self.is_best("all", best, measure):
            return f"All systems have the same {measure}, {rows[best]}."
        said = f"{best} has the highest {measure}, {rows[best]}"
        for c in self.comparisons:
            if (c.system, c.baseline, c.measure) == (best, next(iter(rows)), measure):
                words = reading(c) + (" from" if reading(c) == "not told apart" else "")
                return f"{said}: {words} {c.baseline} (difference {c.difference}, {p_equals(c.p_holm)} after Holm)."
        return f"{said}."

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, without the values of single queries.

        Beside each bootstrap interval stands `normal`, the ends of the normal approximation that papers print.
        """
        systems = [
            {"name": system.name}
            | {
                "metrics" if section == "all" else section: {
                    measure: asdict(value) | {"normal": self._normal(system, section, measure)}
                    for measure, value in row.items()
                }
                for section, row in self.summaries[system.name].items()
            }
            for system in self.results
        ]
        return {
            "benchmark": self.benchmark,
            "seed": self.seed,
            "resamples": RESAMPLES,
            "systems": systems,
            "differences": [_comparison(c) for c in self.comparisons],
            "analysis": asdict(self.analysis),
            "notes": list(self.notes),
        }

    def _normal(self, system: SystemResult, section: str, measure: str) -> list[float]:
        rows = (system.per_query[query_id] for query_id in self.query_ids(section))
        approximation = normal_interval([row[measure] for row in rows if measure in row])
        return [approximation.low, approximation.high]

    def predictions_json(self) -> dict[str, dict[str, dict[str, float]]]:
        """Section → measure → {mean, low, high, n} of a report of one system; sections without a query are left out.

        Raises SkilltrainError where the report holds several systems.
        """
        if len(self.summaries) > 1:
            raise SkilltrainError(f"holds {len(self.summaries)} systems, where the means of one are asked for")
        (rows,) = self.summaries.values()
        return {section: {name: asdict(value) for name, value in row.items()} for section, row in rows.items()}


def _comparison(c: Comparison) -> dict[str, Any]:
    tests = {"p": c.p, "p_holm": c.p_holm, "wilcoxon_p": c.wilcoxon_p, "mcnemar_p": c.mcnemar_p}
    names = {"system": c.system, "baseline": c.baseline, "measure": c.measure}
    return names | asdict(c.difference) | tests | {"cohens_h": c.cohens_h, "reading": reading(c)}
