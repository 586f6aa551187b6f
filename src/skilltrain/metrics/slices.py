"""Mean scores by slice: over all queries, and over those that share a label, such as their kind.

A benchmark may give labels. Four labels are computed, of which the benchmark's own `direction` and
`domain` have precedence:

- `direction`: from the query's language to those of its gold skills, such as `zh2en`.
- `domain`: the super-domains of the gold skills' categories (domains.yaml).
- `query length`: terse or long, by words. A CJK character counts as a word.
- `description length`: from `Q1`, the quarter of the tasks whose gold skills have the shortest
  descriptions, to `Q4` (see `quartiles`). It is left out if the pool has no gold skill.

Notes:
    - Measures that are defined for the same queries share bootstrap draws.
    - Slices of several labels often have the same queries, so their means are computed once.
    - SkillRouter reports the gap by description length between a system that sees names and
      descriptions, and a system that sees whole skills.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from skilltrain.config import parse_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Labels, Task, gold_in_pool
from skilltrain.metrics.bootstrap import Interval, intervals
from skilltrain.metrics.comparison import (
    SystemResult,
    defined_queries,
    shared_query_ids,
    values_of,
)
from skilltrain.records import Skill
from skilltrain.texts import language_of, num_words, words_of

Row = dict[str, Any]
"""One row of a report: names, numbers and intervals by their key in metrics.json."""
ALL = "all"
KIND = "kind"
QUERY_LENGTH = "query length"
DESCRIPTION_LENGTH = "description length"
_MAX_VALUES = 12  # a table by a label with more values, such as an id, would be too long to read
_MAX_TERSE_WORDS = 20  # a terse query is as short as what people type into a prompt
_HALF_RANK = 0.5  # rank r covers the stretch from r - 1 to r, and its middle decides the quarter
# Values that are listed first, in this order. All others follow in alphabetical order.
_VALUE_ORDER = ("single", "multi", "easy", "medium", "hard", "terse", "long")


@dataclass(frozen=True, slots=True)
class SliceMeans:
    """Mean scores on the queries whose `label` has this `value`.

    The slice of all queries has the label and the value `all`.

    Attributes:
        label: Name of the label.
        value: Value of the label.
        query_ids: All queries of the slice.
        means: Means by system and measure. A mean is over the queries that have a value of the
            measure. If none has one, the measure is left out.
    """

    label: str
    value: str
    query_ids: tuple[str, ...]
    means: Mapping[str, Mapping[str, Interval]]

    def partly_defined(self) -> dict[str, int]:
        """Return the number of queries with a value, for each measure that some queries lack."""
        means = next(iter(self.means.values()))  # all systems have values for the same queries
        return {measure: mean.n for measure, mean in means.items() if mean.n < len(self.query_ids)}

    def best(self, measure: str) -> frozenset[str]:
        """Return the systems with the highest mean, or none if all means are equal.

        A report prints the best means in bold. If all are equal, none stands out.
        """
        means = {}  # by system
        for system, mean_by_measure in self.means.items():
            if measure in mean_by_measure:
                means[system] = mean_by_measure[measure].mean
        highest = max(means.values(), default=0.0)
        best = frozenset(system for system, mean in means.items() if mean == highest)
        return best if len(best) < len(means) else frozenset()


def means_by_slice(
    results: Sequence[SystemResult],
    labels: Mapping[str, Labels],
    measures: Sequence[str],
    max_values: int = _MAX_VALUES,
) -> tuple[SliceMeans, ...]:
    """Compute the means of each slice: the queries with the same value of a label.

    The first slice holds all queries.

    Args:
        results: Scores of each system, on the same queries.
        labels: Labels of each query, such as its kind or its difficulty.
        measures: Names of the measures.
        max_values: A label with more values has no slices.

    Raises:
        SkilltrainError: There is no system, query or measure, or the systems have other queries.
    """
    if not results or not labels or not measures:
        raise SkilltrainError(
            "nothing-to-score", "a report needs at least one system, one query and one measure"
        )
    shared_query_ids(results)  # checks the queries

    # Slices of several labels often have the same queries, so compute their means only once.
    means_by_queries = {}
    slices = []
    for label, queries_by_value in _queries_by_label(labels).items():
        if len(queries_by_value) > max_values:
            continue
        for value in sorted(queries_by_value, key=_value_rank):
            query_ids = tuple(queries_by_value[value])
            if query_ids not in means_by_queries:
                means_by_queries[query_ids] = means_of(results, query_ids, measures)
            slices.append(SliceMeans(label, value, query_ids, means_by_queries[query_ids]))
    return tuple(slices)


def _queries_by_label(labels: Mapping[str, Labels]) -> dict[str, dict[str, list[str]]]:
    """Return the query ids by label and value. A query may have several values of a label.

    The first label is `all`. All queries have its only value.

    Args:
        labels: Labels of each query by query id. Several values of a label are a tuple.
    """
    queries = {ALL: {ALL: [*labels]}}
    for query_id, query_labels in labels.items():
        for label, values in query_labels.items():
            if isinstance(values, str):
                values = (values,)
            for value in values:
                queries.setdefault(label, {}).setdefault(value, []).append(query_id)
    return queries


def _value_rank(value: str) -> tuple[int, str]:
    position = _VALUE_ORDER.index(value) if value in _VALUE_ORDER else len(_VALUE_ORDER)
    return position, value


def means_of(
    results: Sequence[SystemResult], query_ids: Sequence[str], measures: Sequence[str]
) -> dict[str, dict[str, Interval]]:
    """Return the means over some queries, by system and measure.

    A mean is over the queries that have a value. Measures without any value are left out.

    Args:
        results: Scores of each system.
        query_ids: Ids of the queries.
        measures: Names of the measures.
    """
    means = {result.name: {} for result in results}
    # Measures with values for the same queries can share the random draws of the bootstrap.
    measures_by_queries = {}
    for measure in measures:
        defined_ids = defined_queries(results, query_ids, measure)
        if defined_ids:
            measures_by_queries.setdefault(defined_ids, []).append(measure)
    for defined_ids, group in measures_by_queries.items():
        # One table for each system, side by side: a column is a measure of a system.
        values = [values_of(result, defined_ids, group) for result in results]
        clusters = results[0].clusters_of(defined_ids)
        all_values = np.concatenate(values, axis=1)  # [query, column]
        columns = product(results, group)
        column_means = intervals(all_values, clusters, results[0].seed)
        for (result, measure), mean in zip(columns, column_means, strict=True):
            means[result.name][measure] = mean

    # In the order of `measures`.
    for name, values in means.items():
        means[name] = {measure: values[measure] for measure in measures if measure in values}
    return means


def description_length_gaps(
    results: Sequence[SystemResult], slices: Sequence[SliceMeans], measure: str
) -> tuple[Row, ...]:
    """Compare each system with the system before it, on each slice by description length.

    A slice by description length holds the queries whose gold skills (the skills that they need)
    have descriptions of a similar length. Queries without a value of the measure are left out.

    Args:
        results: Scores of each system.
        slices: All slices. Those by other labels are ignored.
        measure: Name of the measure.

    Returns:
        One row for each two systems and each slice, with the mean difference and its interval.
    """
    length_slices = [part for part in slices if part.label == DESCRIPTION_LENGTH]
    rows = []
    for baseline, system in pairwise(results):
        for part in length_slices:
            query_ids = defined_queries([baseline], part.query_ids, measure)
            if not query_ids:
                continue
            baseline_values = values_of(baseline, query_ids, [measure])
            differences = values_of(system, query_ids, [measure]) - baseline_values
            clusters = baseline.clusters_of(query_ids)
            (gap,) = intervals(differences, clusters, baseline.seed)
            row = {"baseline": baseline.name, "system": system.name, "measure": measure}
            rows.append(row | {"value": part.value, "difference": gap})
    return tuple(rows)


def distinct_slices(slices: Sequence[SliceMeans]) -> tuple[SliceMeans, ...]:
    """Return the slice of all queries, and all slices that have fewer queries."""
    num_queries = len(slices[0].query_ids)
    return tuple(part for part in slices if part.label == ALL or len(part.query_ids) < num_queries)


def labels_of(tasks: Sequence[Task], skills: Mapping[str, Skill]) -> dict[str, Labels]:
    """Return the labels of each query: those of the benchmark, and four computed ones.

    Gold skills are the skills that a query needs.

    Args:
        tasks: Tasks of a benchmark. A task is a query with its gold skills.
        skills: Skills of the pool by id.
    """
    gold_by_query = {}
    # For each query, the mean number of words in the descriptions of its gold skills.
    description_lengths = {}
    for task in tasks:
        query_id = task.query.query_id
        gold = [skills[skill_id] for skill_id in gold_in_pool(task.relevance, skills)]
        gold_by_query[query_id] = gold
        if gold:
            description_lengths[query_id] = fmean(num_words(skill.description) for skill in gold)
    # From `Q1`, the quarter of the queries with the shortest descriptions, to `Q4`.
    length_quarters = quartiles(description_lengths)

    labels = {}
    for task in tasks:
        query_id = task.query.query_id
        length_quarter = length_quarters.get(query_id, "")
        all_labels = _labels_of_query(task, gold_by_query[query_id], length_quarter)
        # An empty value means that the query has no such label.
        labels[query_id] = {label: value for label, value in all_labels.items() if value}
    return labels


def _labels_of_query(task: Task, gold: Sequence[Skill], length_quarter: str) -> Labels:
    """Return the labels of one query. Labels of the task replace computed labels.

    Args:
        task: The query with the labels that the benchmark gives.
        gold: Gold skills of the query that are in the pool.
        length_quarter: Quarter by description length, such as `Q1, 4–11 words`.
    """
    text = task.query.text
    # `language_of` may find no language in a short text. ASCII letters alone are probably English.
    language = language_of(text)
    if not language and text.isascii():
        language = "en"
    directions = set()
    domains = set()
    for skill in gold:
        if language and skill.lang:
            # From the language of the query to that of the skill, such as `zh2en`.
            directions.add(f"{language}2{skill.lang}")
        if skill.category in _domain_by_category():
            domains.add(_domain_by_category()[skill.category])
    return {
        "direction": tuple(sorted(directions)),
        "domain": tuple(sorted(domains)),
        **task.labels,
        QUERY_LENGTH: "terse" if len(words_of(text)) <= _MAX_TERSE_WORDS else "long",
        DESCRIPTION_LENGTH: length_quarter,
    }


@cache
def _domain_by_category() -> dict[str, str]:
    """Read the super-domain of each category that the stage `pool` assigns.

    The file domains.yaml lists the categories of each super-domain.

    R3 has eight super-domains too, without published names. These names are ours.
    """
    text = Path(__file__).with_name("domains.yaml").read_text(encoding="utf-8")
    domains = {}
    for domain, categories in parse_yaml(text, "domains.yaml").items():
        domains |= dict.fromkeys(categories, domain)
    return domains


def quartiles(lengths: Mapping[str, float]) -> dict[str, str]:
    """Return the quarter of each query by length, such as `Q1, 4–11 words`, short queries first.

    Queries of equal length share a quarter. Some quarters may be empty then.

    Args:
        lengths: Length of each query in words.
    """
    from scipy.stats import rankdata

    # Ranks from 1, by length. Queries of equal length share the mean of their ranks.
    ranks = rankdata(list(lengths.values()))
    queries_by_quarter = {}
    for query_id, rank in zip(lengths, ranks.tolist(), strict=True):
        # Rank 1 covers the stretch from 0 to 1. Its middle lies in exactly one quarter.
        middle = rank - _HALF_RANK
        quarter = 1 + int(4 * middle // len(lengths))  # 1 to 4
        queries_by_quarter.setdefault(quarter, []).append(query_id)

    # Name each quarter by its number, and by its shortest and its longest query.
    names = {}
    for quarter, query_ids in queries_by_quarter.items():
        quarter_lengths = [lengths[query_id] for query_id in query_ids]
        word_range = f"{min(quarter_lengths):.0f}–{max(quarter_lengths):.0f} words"
        for query_id in query_ids:
            names[query_id] = f"Q{quarter}, {word_range}"
    return names
