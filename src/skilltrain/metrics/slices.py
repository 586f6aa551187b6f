"""Results by slice: of all queries, and of those that share the value of a label (kind, tier, difficulty, length …)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from skilltrain.config import parse_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Labels, Task, wanted_skills
from skilltrain.metrics.bootstrap import Interval, intervals
from skilltrain.metrics.comparison import (
    SystemResult,
    defined_queries,
    same_queries,
    values_of,
)
from skilltrain.records import Skill
from skilltrain.texts import language_of, num_words, words_of

Row = dict[str, Any]
"""One row of a report: names, numbers and intervals by their key in metrics.json."""
ALL, KIND, LENGTH, DESCRIPTION = "all", "kind", "query length", "description length"
MOST_VALUES = 12  # a label of more values (an id, a tag) makes no table that anybody reads
MOST_TERSE = 20  # words up to which a query is terse, as typed into a prompt
_ORDER = (
    "single",
    "multi",
    "easy",
    "medium",
    "hard",
    "terse",
    "long",
)  # all other values stand in alphabetical order


@dataclass(frozen=True, slots=True)
class SliceMeans:
    """What systems score (`means`: system → measure → mean) on the queries whose `label` has this `value`.

    All queries are label and value `all`. A mean is over the `n` queries that have a value; left out where none has.
    """

    label: str
    value: str
    query_ids: tuple[str, ...]
    means: Mapping[str, Mapping[str, Interval]]

    def partial(self) -> dict[str, int]:
        """The measures that not every query of the slice has a value of, and how many have one."""
        first = next(iter(self.means.values()))
        return {measure: mean.n for measure, mean in first.items() if mean.n < len(self.query_ids)}

    def best(self, measure: str) -> frozenset[str]:
        """The systems with the highest mean; none where all are equal."""
        means = {name: row[measure].mean for name, row in self.means.items() if measure in row}
        best = frozenset(name for name, mean in means.items() if mean == max(means.values()))
        return best if len(best) < len(means) else frozenset()


def means_by_slice(
    results: Sequence[SystemResult],
    labels: Mapping[str, Labels],
    measures: Sequence[str],
    most_values: int = MOST_VALUES,
) -> tuple[SliceMeans, ...]:
    """The means of all queries, and then of every slice, by label and value; systems share their draws.

    `labels` maps every query to what is known of it (`labels_of`); a label of more than `most_values` values makes no
    slices. Raises SkilltrainError where systems hold different queries, or one lacks a value of a measure where another
    has one.
    """
    if not results or not labels or not measures:
        raise SkilltrainError("a report needs at least one system, one query and one measure")
    same_queries(results)
    parts: dict[str, dict[str, list[str]]] = {ALL: {ALL: [*labels]}}
    for query_id, known in labels.items():
        for label, value in known.items():
            for one in (value,) if isinstance(value, str) else value:
                parts.setdefault(label, {}).setdefault(one, []).append(query_id)
    kept = {
        (label, value): tuple(values[value])
        for label, values in parts.items()
        if len(values) <= most_values
        for value in sorted(
            values,
            key=lambda value: (_ORDER.index(value) if value in _ORDER else len(_ORDER), value),
        )
    }
    # of many a label one value holds all queries
    means = {ids: means_of(results, ids, measures) for ids in dict.fromkeys(kept.values())}
    return tuple(SliceMeans(label, value, ids, means[ids]) for (label, value), ids in kept.items())


def means_of(
    results: Sequence[SystemResult], query_ids: Sequence[str], measures: Sequence[str]
) -> dict[str, dict[str, Interval]]:
    """System → measure → mean over these queries. Measures of the same queries share draws; one of none is left out."""
    together: dict[tuple[str, ...], list[str]] = {}
    for measure in measures:
        if having := defined_queries(results, query_ids, measure):
            together.setdefault(having, []).append(measure)
    found: dict[str, dict[str, Interval]] = {result.name: {} for result in results}
    for having, of_these in together.items():
        columns = np.concatenate(
            [values_of(result, having, of_these) for result in results], axis=1
        )
        means = iter(intervals(columns, results[0].clusters_of(having)))
        for result in results:
            found[result.name] |= {measure: next(means) for measure in of_these}
    return {
        name: {measure: row[measure] for measure in measures if measure in row}
        for name, row in found.items()
    }


def gaps(
    results: Sequence[SystemResult], slices: Sequence[SliceMeans], measure: str
) -> tuple[Row, ...]:
    """How far each system is above the one before it in each part of `description length`.

    Of two systems that see name and description alone (nd) and all of a skill (full), in this order, these are
    SkillRouter's gaps. Queries without a value of the measure are left out.
    """
    found: list[Row] = []
    for before, after in pairwise(results):
        for part in (part for part in slices if part.label == DESCRIPTION):
            if having := defined_queries([before], part.query_ids, measure):
                scores = values_of(before, having, [measure])
                difference = values_of(after, having, [measure]) - scores
                (gap,) = intervals(difference, before.clusters_of(having))
                names = {"baseline": before.name, "system": after.name, "measure": measure}
                found.append(names | {"value": part.value, "difference": gap})
    return tuple(found)


def shown(slices: Sequence[SliceMeans]) -> tuple[SliceMeans, ...]:
    """All queries, and the slices that are not all queries once more."""
    every = slices[0].query_ids
    return tuple(part for part in slices if part.label == ALL or len(part.query_ids) < len(every))


def labels_of(tasks: Sequence[Task], skills: Mapping[str, Skill]) -> dict[str, Labels]:
    """query_id → its labels: those of the benchmark, and those computed here.

    `direction` is from the query's language to those of its gold skills (`zh2en`), `domain` the super-domains of their
    categories. `query length` counts words, a CJK character as one. `description length` is one of four parts of the
    tasks by the mean words of their gold skills' descriptions in the pool `skills`, left out where these are unknown.
    """
    golds = {
        task.query.query_id: [skills[s] for s in wanted_skills(task.relevance, skills)]
        for task in tasks
    }
    words = {
        q: fmean(num_words(skill.description) for skill in wanted)
        for q, wanted in golds.items()
        if wanted
    }
    parts = quartiles(words)
    labels: dict[str, Labels] = {}
    for task in tasks:
        query_id = task.query.query_id
        text = task.query.text
        gold = golds[query_id]
        language = language_of(text) or ("en" if text.isascii() else None)
        directions = {f"{language}2{skill.lang}" for skill in gold if language and skill.lang}
        domains = {_domains().get(skill.category or "", "") for skill in gold} - {""}
        known = {
            "direction": tuple(sorted(directions)),
            "domain": tuple(sorted(domains)),
            **task.labels,
            LENGTH: "terse" if len(words_of(text)) <= MOST_TERSE else "long",
            DESCRIPTION: parts.get(query_id, ""),
        }
        labels[query_id] = {label: value for label, value in known.items() if value}
    return labels


@cache
def _domains() -> dict[str, str]:
    """Category → its super-domain, of the categories that the stage pool gives; R3 has eight, their names are ours."""
    text = Path(__file__).with_name("domains.yaml").read_text(encoding="utf-8")
    return {
        category: domain
        for domain, of in parse_yaml(text, "domains.yaml").items()
        for category in of
    }


def quartiles(lengths: Mapping[str, float]) -> dict[str, str]:
    """query_id → its part of four, like `Q1, 4–11 words`, cut by rank from short to long.

    Equal lengths stay together, in the part where the middle of them falls; parts that are empty are left out.
    """
    from scipy.stats import rankdata

    ranks = rankdata(list(lengths.values()))  # equal lengths share the middle of their ranks
    parts: dict[int, list[str]] = {}
    for query_id, rank in zip(lengths, ranks.tolist(), strict=True):
        parts.setdefault(int(2 * (2 * rank - 1) // len(lengths)), []).append(query_id)
    names: dict[str, str] = {}
    for number, (_, part) in enumerate(sorted(parts.items()), 1):
        own = [lengths[query_id] for query_id in part]
        names |= dict.fromkeys(part, f"Q{number}, {min(own):.0f}–{max(own):.0f} words")
    return names
