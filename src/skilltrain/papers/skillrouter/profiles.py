"""Profiles of a benchmark: variety of its queries, and correlation of scores with body lengths.

Sources: SkillRouter's fourth version, table 8 (variety). The correlation with length is ours.

Notes:
    - A benchmark with tiers ranks each task over several pools. Such a task counts once, with the
      mean of its scores.
    - Resamples in which all scores or all lengths are equal have no correlation, and are left out
      of the interval.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from skilltrain.evaluation.analyse import Analysis, Inputs
from skilltrain.evaluation.report import Report
from skilltrain.metrics.benchmarks.benchmark import Task, gold_in_pool
from skilltrain.metrics.bootstrap import QUANTILES, Interval, cluster_sums
from skilltrain.metrics.comparison import SystemResult, defined_queries, values_of
from skilltrain.metrics.slices import Row
from skilltrain.records import Skill
from skilltrain.texts import num_words

_CORRELATED = ("Hit@1", "MRR@10")
_NUM_RESAMPLES = 2_000  # fewer than for means, because each resample is ranked anew
_RESAMPLES_AT_ONCE = 100
_MAX_COUNTED_VALUES = 3  # of a label; the most frequent ones


class Diversity(Analysis):
    """Variety of a benchmark's queries (SkillRouter's fourth version, table 8)."""

    kind: Literal["diversity"] = "diversity"

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        """Describe the labels, gold skills and lengths of the queries, in a row for each."""
        # The tiers of a benchmark have the same tasks, so the first tier has them all.
        return diversity(inputs.benchmark.tiers_or_self[0].tasks)


class BodyLength(Analysis):
    """Correlation of a query's scores with the length of its gold skills' bodies."""

    kind: Literal["body_length"] = "body_length"

    def analyse_results(self, report: Report) -> list[Row]:
        """Correlate Hit@1 and MRR@10 of each system with the length of the gold bodies.

        There is no row if all scores or all lengths are equal.
        """
        lengths = gold_body_lengths(report.benchmark.tasks, report.skills)
        rows = []
        for result in report.results:
            for measure in _CORRELATED:
                correlation = length_correlation(result, measure, lengths)
                if correlation:
                    row = {"system": result.name, "measure": measure, "n": correlation.n}
                    rows.append(row | {"Spearman's rho": correlation})
        return rows


def diversity(tasks: Sequence[Task]) -> list[Row]:
    """Describe the queries of a benchmark by their labels, gold skills and lengths.

    Args:
        tasks: Queries with their gold skills and labels. There is at least one.

    Returns:
        A row for each label that differs between queries, such as `difficulty`, and one each for
        the gold skills and the words of a query. A row has the name of the `dimension`, the number
        of `distinct` values, and a `summary`: the most frequent values with their number of
        queries, or range, mean and median.
    """
    counts_by_label: dict[str, Counter[str]] = {}
    for task in tasks:
        for label, values in task.labels.items():
            values = (values,) if isinstance(values, str) else values
            # A query counts once for each of its distinct values.
            counts_by_label.setdefault(label, Counter()).update(set(values))

    rows = []
    for label, counts in counts_by_label.items():
        if len(counts) > 1:
            # Values with equal counts are in alphabetical order.
            common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            texts = [f"{value} {count}" for value, count in common[:_MAX_COUNTED_VALUES]]
            row = {"dimension": label, "distinct": len(counts), "summary": ", ".join(texts)}
            rows.append(row)
    numbers_by_dimension = {
        "gold skills per query": [len(task.relevance.gold) for task in tasks],
        "words per query": [num_words(task.query.text) for task in tasks],
    }
    for dimension, numbers in numbers_by_dimension.items():
        averages = f"mean {fmean(numbers):.2f}, median {median(numbers):g}"
        summary = f"{min(numbers)} to {max(numbers)}, {averages}"
        rows.append({"dimension": dimension, "distinct": len(set(numbers)), "summary": summary})
    return rows


def gold_body_lengths(tasks: Sequence[Task], skills: Mapping[str, Skill]) -> dict[str, float]:
    """Return the mean length of the gold skills' bodies in words, by query id.

    Args:
        tasks: Queries with their gold skills.
        skills: Skills of the pool by id. A query without a gold skill in the pool is left out.
    """
    lengths = {}
    for task in tasks:
        gold = gold_in_pool(task.relevance, skills)
        if gold:
            body_lengths = [num_words(skills[skill_id].body) for skill_id in gold]
            lengths[task.query.query_id] = fmean(body_lengths)
    return lengths


def length_correlation(
    result: SystemResult, measure: str, lengths: Mapping[str, float]
) -> Interval | None:
    """Return Spearman's rank correlation of a system's scores with lengths.

    Args:
        result: Scores of the system. Queries of one cluster count as one row with their mean score.
        measure: Name of the measure.
        lengths: Length by query id.

    Returns:
        The correlation with its interval. None if all scores or all lengths are equal.
    """
    query_ids = defined_queries([result], [*lengths], measure)
    if not query_ids:
        return None
    scores = values_of(result, query_ids, [measure])  # [query, 1]
    query_lengths = np.array([[lengths[query_id]] for query_id in query_ids])  # [query, 1]
    columns = np.concatenate([scores, query_lengths], axis=1)
    sums, cluster_sizes = cluster_sums(columns, result.clusters_of(query_ids))
    cluster_means = sums / cluster_sizes[:, None]  # [cluster, 2]
    return rank_correlation(cluster_means, result.seed)


def rank_correlation(columns: Float[np.ndarray, "row 2"], seed: int) -> Interval | None:
    """Return Spearman's rank correlation of two columns with a bootstrap interval of 95%.

    Args:
        columns: Two values in each row. Rows are drawn with replacement.
        seed: Seed of the random draws.

    Returns:
        The correlation. None if a column has equal values only.
    """
    from scipy.stats import rankdata, spearmanr

    if not np.ptp(columns, axis=0).all():
        return None
    num_rows = len(columns)
    rng = np.random.default_rng(seed)
    correlations: list[float] = []
    # All resamples at once would take much memory.
    for _ in range(_NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        draws = rng.integers(num_rows, size=(_RESAMPLES_AT_ONCE, num_rows))
        ranks = rankdata(columns[draws], axis=1)  # [resample, row, 2]
        ranks -= ranks.mean(1, keepdims=True)
        # Spearman's correlation is Pearson's correlation of the ranks.
        first = ranks[..., 0]  # [resample, row]
        second = ranks[..., 1]  # [resample, row]
        dot_products = (first * second).sum(1)  # [resample]
        norm_products = np.sqrt((first**2).sum(1) * (second**2).sum(1))  # [resample]
        is_defined = norm_products > 0
        correlations += (dot_products[is_defined] / norm_products[is_defined]).tolist()
    low, high = np.quantile(correlations, QUANTILES).tolist()
    result: Any = spearmanr(columns)
    return Interval(float(result.statistic), low, high, num_rows)
