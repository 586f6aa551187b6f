"""Checks for authors of plug-ins. Each raises AssertionError that says what a plug-in must do.

Example:
    def test_my_loss():
        check_loss(MyLoss(margin=0.2))
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from skilltrain.data.filter_layers import FilterLayer, FilterPool
from skilltrain.data.sources import Mining, NegativeSource
from skilltrain.files import fingerprint
from skilltrain.losses.scored_batch import Loss, ScoredBatch
from skilltrain.metrics.benchmarks.benchmark import BenchmarkReader
from skilltrain.metrics.measures import Relevance, parse_measure
from skilltrain.records import Query, Ranker, Rankings, Skill


def check_loss(loss: Loss) -> None:
    """Check a loss that reads scores, gains and teacher scores: it is finite and summed over
    queries, and invalid candidates have no gradient.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, generator=generator).requires_grad_()
    gains = torch.tensor([1, 0.5, 0, 0, 0]).repeat(3, 1)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    teacher_scores = torch.randn(3, 5, generator=generator)

    def loss_of(rows: slice) -> Tensor:
        return loss(ScoredBatch(scores[rows], gains[rows], valid[rows], teacher_scores[rows]))

    total = loss_of(slice(3))
    (gradient,) = torch.autograd.grad(total, scores)
    assert gradient.isfinite().all(), "the loss or its gradient is not finite"
    assert not gradient[~valid].any(), "an invalid candidate has a gradient; use batch.valid"
    separate = torch.stack([loss_of(slice(row, row + 1)) for row in range(3)]).sum()
    assert torch.isclose(total, separate), "the loss is not the sum of its queries' losses"


def check_ranker(
    ranker: Ranker,
    queries: Sequence[Query],
    skills: Sequence[Skill],
    candidates: Rankings | None = None,
) -> None:
    """Check the rankings of a ranker over a pool, or over the candidates that it needs."""
    rankings = ranker.rank(queries, candidates, len(skills))
    for query in queries:
        place = f"query {query.query_id}"
        allowed = [skill.skill_id for skill in skills]
        if candidates is not None:
            allowed = [skill_id for skill_id, _ in candidates[query.query_id]]
        skill_ids = [skill_id for skill_id, _ in rankings[query.query_id]]
        assert set(skill_ids) <= set(allowed), f"{place}: a skill is not in the pool or candidates"
        assert len(set(skill_ids)) == len(skill_ids), f"{place}: a skill is ranked twice"
        keys = [(-score, allowed.index(skill_id)) for skill_id, score in rankings[query.query_id]]
        assert np.isfinite(keys).all(), f"{place}: a score is not finite"
        assert keys == sorted(keys), f"{place}: scores must descend, and equal ones keep the order"


def check_filter(layer: FilterLayer, pool: FilterPool) -> None:
    """Check the values of a layer for all pairs of a pool."""
    values = layer.check(pool, pool.pairs)
    assert values.shape == pool.pairs.shape, "a layer returns one value per pair"
    assert not np.isinf(values).any(), "a value is infinite; NaN keeps a candidate"
    backwards = layer.check(pool, pool.pairs[::-1])[::-1]
    assert np.array_equal(values, backwards, equal_nan=True), "a value depends on other pairs"


def check_measure(name: str) -> None:
    """Check a measure, such as `Hit@3`: 1 for gold skills in any order, 0 for an empty ranking."""
    measure = parse_measure(name)
    gold = [f"gold {number}" for number in range(measure.cutoff or 2)]
    relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))
    assert measure([*gold, "other"], relevance) == 1, f"{name} is not 1 for the best ranking"
    assert measure(gold[::-1], relevance) == 1, f"{name} depends on the order of equal gold skills"
    assert measure([], relevance) == 0, f"{name} is not 0 for an empty ranking"


def check_source(source: NegativeSource, mining: Mining, limit: int) -> None:
    """Check the candidates of a source for all queries."""
    for row, positives in enumerate(mining.positives):
        positions, scores = source.find(mining, row, limit)
        place = f"query {mining.queries[row].query_id}"
        allowed = np.setdiff1d(np.arange(len(mining.skills)), positives)
        assert len(positions) == len(scores) <= limit, f"{place}: more than {limit} candidates"
        assert np.isin(positions, allowed).all(), f"{place}: a candidate is a positive or no skill"
        assert len(np.unique(positions)) == len(positions), f"{place}: a skill is found twice"
        assert (np.diff(scores) <= 0).all(), f"{place}: the scores do not descend"


def check_benchmark(reader: BenchmarkReader, folder: Path) -> None:
    """Check that a reader reads the benchmark in a folder, whole and split by split."""
    assert (folder / reader.marker).exists(), f"{folder} has no {reader.marker}"
    tasks = reader.read(folder, None).tasks
    for split in {task.query.split for task in tasks}:
        expected = tuple(task for task in tasks if task.query.split == split)
        assert reader.read(folder, split).tasks == expected, f"split {split} has other tasks"


def check_stage(run: Callable[[Path], object], folder: Path) -> None:
    """Check that a stage writes the same files whenever it runs. `run` writes into a folder."""
    outs = [folder / "1", folder / "2"]
    for out in outs:
        out.mkdir()
        run(out)
    assert any(outs[0].iterdir()), "the stage writes nothing"
    assert fingerprint(outs[0]) == fingerprint(outs[1]), "a second run writes other files"
