"""Checks for authors of plug-ins. A failed check raises an AssertionError that says what is wrong.

Example:
    def test_my_loss():
        check_loss(MyLoss(margin=0.2))
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skilltrain.data.filter_layers import FilterLayer, FilterPool
from skilltrain.data.sources import Mining, NegativeSource
from skilltrain.files import fingerprint
from skilltrain.losses.scored_batch import Loss, ScoredBatch
from skilltrain.metrics.benchmarks.benchmark import BenchmarkReader
from skilltrain.metrics.measures import Relevance, parse_measure
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill


def check_loss(loss: Loss) -> None:
    """Check a loss that reads scores, gains and teacher scores.

    The gradient must be finite, and zero for invalid candidates. The loss of a batch is the sum of
    its queries' losses, for any order of candidates.
    """
    tensors = _make_tensors()
    all_queries = slice(3)
    total = loss(_make_batch(tensors, all_queries))
    assert total.ndim == 0, "the loss is not a single number; return the sum over queries"
    scores, _, valid, _ = tensors
    (gradient,) = torch.autograd.grad(total, scores)
    assert gradient.isfinite().all(), "the loss or its gradient is not finite"
    assert not gradient[~valid].any(), "an invalid candidate has a gradient; use batch.valid"

    query_losses = [loss(_make_batch(tensors, slice(row, row + 1))) for row in range(3)]
    is_sum = torch.isclose(total, torch.stack(query_losses).sum())
    assert is_sum, "the loss is not the sum of its queries' losses"
    reordered_candidates = (all_queries, [4, 2, 0, 3, 1])
    reordered = loss(_make_batch(tensors, reordered_candidates))
    assert torch.isclose(total, reordered), "the loss depends on the order of the candidates"


def _make_tensors() -> Sequence[Tensor]:
    """Make scores, gains, validity and teacher scores of 3 queries with 5 candidates each."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, generator=generator).requires_grad_()  # [query, candidate]
    gains = torch.tensor([1, 0.5, 0, 0, 0]).repeat(3, 1)  # [query, candidate]
    num_valid = torch.tensor([[5], [3], [4]])
    valid = torch.arange(5) < num_valid  # [query, candidate]
    teacher_scores = torch.randn(3, 5, generator=generator)  # [query, candidate]
    return scores, gains, valid, teacher_scores


def _make_batch(tensors: Sequence[Tensor], index: Any) -> ScoredBatch:
    """Make a batch of the queries and candidates that `index` selects."""
    scores, gains, valid, teacher_scores = [tensor[index] for tensor in tensors]
    return ScoredBatch(scores, gains, valid, teacher_scores)


def check_ranker(
    ranker: Ranker,
    queries: Sequence[Query],
    skills: Sequence[Skill],
    candidates: Rankings | None = None,
) -> None:
    """Check the rankings of a ranker: their skills, their scores and their order.

    Args:
        ranker: The ranker.
        queries: Queries to rank skills for.
        skills: Skills of the pool.
        candidates: Candidates that the ranker needs, by query id. None: it ranks the pool.
    """
    rankings = ranker.rank(queries, candidates, len(skills))
    for query in queries:
        allowed_ids = [skill.skill_id for skill in skills]
        if candidates is not None:
            allowed_ids = [skill_id for skill_id, _ in candidates[query.query_id]]
        _check_ranking(rankings[query.query_id], allowed_ids, f"query {query.query_id}")


def _check_ranking(ranking: Ranking, allowed_ids: Sequence[str], label: str) -> None:
    """Check one ranking of the skills `allowed_ids`. Equal scores must keep their order."""
    ids = {skill_id for skill_id, _ in ranking}
    assert ids <= set(allowed_ids), f"{label}: a skill is not in the pool or candidates"
    assert len(ids) == len(ranking), f"{label}: a skill is ranked twice"

    sort_keys = [(-score, allowed_ids.index(skill_id)) for skill_id, score in ranking]
    assert np.isfinite(sort_keys).all(), f"{label}: a score is not finite"
    is_sorted = sort_keys == sorted(sort_keys)
    assert is_sorted, f"{label}: scores must descend, and equal ones keep the order"


def check_filter(layer: FilterLayer, pool: FilterPool) -> None:
    """Check the values that a filter layer returns for all pairs of query and candidate in a pool.

    There must be one value per pair. It must not depend on the other pairs.
    """
    values = layer.check(pool, pool.pairs)
    assert values.shape == pool.pairs.shape, "a layer returns one value per pair"
    assert not np.isinf(values).any(), "a value is infinite; NaN keeps a candidate"
    reversed_values = layer.check(pool, pool.pairs[::-1])
    is_same = np.array_equal(values, reversed_values[::-1], equal_nan=True)
    assert is_same, "a value depends on other pairs"


def check_measure(name: str) -> None:
    """Check a measure, such as `Hit@3`.

    It must be 1 if all gold skills come first, in any order, and 0 for an empty ranking.
    """
    measure = parse_measure(name)
    gold_ids = [f"gold {number}" for number in range(measure.cutoff or 2)]
    relevance = Relevance(frozenset(gold_ids), dict.fromkeys(gold_ids, 1.0))
    assert measure([*gold_ids, "other"], relevance) == 1, f"{name} is not 1 for the best ranking"
    reversed_value = measure(gold_ids[::-1], relevance)
    assert reversed_value == 1, f"{name} depends on the order of equal gold skills"
    assert measure([], relevance) == 0, f"{name} is not 0 for an empty ranking"


def check_source(source: NegativeSource, mining: Mining, limit: int) -> None:
    """Check the candidates that a source of negatives finds for each query.

    Args:
        source: The source.
        mining: Queries with their positives, and the skills of the pool.
        limit: Largest number of candidates to ask for.
    """
    for row, positives in enumerate(mining.positives):
        positions, scores = source.find(mining, row, limit)
        label = f"query {mining.queries[row].query_id}"
        allowed_positions = np.setdiff1d(np.arange(len(mining.skills)), positives)
        is_allowed = np.isin(positions, allowed_positions)
        assert len(positions) == len(scores) <= limit, f"{label}: more than {limit} candidates"
        assert is_allowed.all(), f"{label}: a candidate is a positive or no skill"
        assert len(np.unique(positions)) == len(positions), f"{label}: a skill is found twice"
        assert (np.diff(scores) <= 0).all(), f"{label}: the scores do not descend"


def check_benchmark(reader: BenchmarkReader, folder: Path) -> None:
    """Check that a reader reads the same tasks from a folder as a whole and split by split."""
    assert (folder / reader.marker).exists(), f"{folder} has no {reader.marker}"
    tasks = reader.read(folder, None).tasks
    for split in {task.query.split for task in tasks}:
        expected = tuple(task for task in tasks if task.query.split == split)
        assert reader.read(folder, split).tasks == expected, f"split {split} has other tasks"


def check_stage(run: Callable[[Path], object], folder: Path) -> None:
    """Check that a stage writes the same files in every run.

    Args:
        run: Runs the stage. It is called with an empty folder to write to.
        folder: Folder for the output of two runs.
    """
    first = folder / "1"
    second = folder / "2"
    for out in (first, second):
        out.mkdir()
        run(out)
    assert any(first.iterdir()), "the stage writes nothing"
    assert fingerprint(first) == fingerprint(second), "a second run writes other files"
