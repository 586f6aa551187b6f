"""Checks for authors of plug-ins. Each raises AssertionError that says what a plug-in must do.

Example:
    def test_my_loss():
        check_loss(MyLoss(margin=0.2))
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skilltrain.data.filter_layers import FilterLayer, FilterPool
from skilltrain.data.sources import Mining, NegativeSource
from skilltrain.files import fingerprint
from skilltrain.losses.scored_batch import Loss, ScoredBatch
from skilltrain.metrics.benchmarks.benchmark import BenchmarkReader
from skilltrain.metrics.measures import Relevance, evaluate_query, parse_measure
from skilltrain.records import Query, Ranker, Rankings, Skill


def check_loss(loss: Loss) -> None:
    """Check a loss on scores, gains and teacher scores: finite, summed over queries, no gradient of
    invalid candidates.
    """
    scores, teacher_scores = torch.randn(
        2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    scores.requires_grad_()
    gains = torch.tensor([1, 0.5, 0, 0, 0], dtype=torch.float64).repeat(3, 1)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    total = loss(ScoredBatch(scores, gains, valid, teacher_scores))
    assert total.shape == (), f"the loss has the shape {[*total.shape]}; sum over queries"
    total.backward()
    gradient = scores.grad
    assert gradient is not None, "no gradient reaches the scores"
    assert total.isfinite() and gradient.isfinite().all(), "the loss or its gradient is not finite"
    assert not gradient[~valid].any(), "an invalid candidate has a gradient; use batch.valid"
    rows = [slice(row, row + 1) for row in range(3)]
    parts = [
        loss(ScoredBatch(scores[row], gains[row], valid[row], teacher_scores[row])) for row in rows
    ]
    assert torch.isclose(total, torch.stack(parts).sum()), (
        "the loss of a batch is not the sum of the losses of its queries"
    )


def check_ranker(
    ranker: Ranker,
    queries: Sequence[Query],
    skills: Sequence[Skill],
    candidates: Rankings | None = None,
) -> None:
    """Check the rankings of a ranker over a pool, or over the candidates that it needs."""
    rankings = ranker.rank(queries, candidates, len(skills))
    pool = [skill.skill_id for skill in skills]
    for query in queries:
        place = f"query {query.query_id}"
        assert query.query_id in rankings, f"{place} has no ranking; it may be empty"
        allowed = pool
        if candidates is not None:
            allowed = [skill_id for skill_id, _ in candidates[query.query_id]]
        ranking = rankings[query.query_id]
        skill_ids = [skill_id for skill_id, _ in ranking]
        assert set(skill_ids) <= set(allowed), f"{place}: a skill is not in the pool or candidates"
        assert len(set(skill_ids)) == len(skill_ids), f"{place}: a skill is ranked twice"
        assert np.isfinite([score for _, score in ranking]).all(), f"{place}: a score is not finite"
        for (skill_id, score), (next_id, next_score) in pairwise(ranking):
            assert score >= next_score, f"{place}: the scores do not descend"
            is_in_order = allowed.index(skill_id) < allowed.index(next_id)
            assert score > next_score or is_in_order, f"{place}: equal scores change the order"


def check_filter(layer: FilterLayer, pool: FilterPool) -> None:
    """Check the values of a layer for all pairs of a pool."""
    pairs = pool.pairs
    values = layer.check(pool, pairs)
    assert values.shape == pairs.shape, "a layer returns one value per pair"
    assert not np.isinf(values).any(), "a value is infinite; NaN keeps a candidate"
    backwards = layer.check(pool, pairs[::-1])[::-1]
    assert np.array_equal(values, backwards, equal_nan=True), "a value depends on other pairs"
    layer.reason.format(value=1.0, layer=layer)


def check_measure(name: str) -> None:
    """Check a measure, such as `Hit@3`: 1 for the best ranking, 0 for none, the same for equals."""
    measure = parse_measure(name)
    gold = [f"gold {number}" for number in range(measure.cutoff or 2)]
    relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))

    def value(ranking: Sequence[str]) -> float | None:
        return evaluate_query(ranking, relevance, [measure]).get(name)

    assert value([*gold, "other"]) == 1, f"{name} is not 1 if all gold skills come first"
    assert value(gold[::-1]) == 1, f"{name} depends on the order of equal gold skills"
    assert value([]) == 0, f"{name} is not 0 for an empty ranking"


def check_source(source: NegativeSource, mining: Mining, limit: int) -> None:
    """Check the candidates of a source for all queries."""
    for row, positives in enumerate(mining.positives):
        positions, scores = source.find(mining, row, limit)
        place = f"query {mining.queries[row].query_id}"
        assert len(positions) == len(scores) <= limit, f"{place}: more than {limit} candidates"
        assert len(np.unique(positions)) == len(positions), f"{place}: a skill is found twice"
        assert np.isin(positions, np.arange(len(mining.skills))).all(), f"{place}: no such position"
        assert not np.isin(positions, positives).any(), f"{place}: a positive is a candidate"
        assert np.isfinite(scores).all(), f"{place}: a score is not finite"
        assert (np.diff(scores) <= 0).all(), f"{place}: the scores do not descend"
        again, _ = source.find(mining, row, limit)
        assert np.array_equal(positions, again), f"{place}: a second call finds other skills"


def check_benchmark(reader: BenchmarkReader, folder: Path) -> None:
    """Check that a reader reads the benchmark in a folder, whole and split by split."""
    assert (folder / reader.marker).exists(), f"{folder} has no {reader.marker}"
    whole = {task.query.query_id for task in reader.read(folder, None).tasks}
    splits = {task.query.split for task in reader.read(folder, None).tasks}
    parts = [task.query.query_id for split in splits for task in reader.read(folder, split).tasks]
    assert sorted(parts) == sorted(whole), "the splits do not add up to the whole benchmark"


def check_stage(run: Callable[[Path], dict[str, Any]], folder: Path) -> None:
    """Check that a stage writes the same files whenever it runs. `run` writes into a folder."""
    written: list[str] = []
    for number in (1, 2):
        out = folder / str(number)
        out.mkdir()
        run(out)
        assert any(out.iterdir()), "the stage writes nothing"
        written.append(fingerprint(out))
    assert written[0] == written[1], "a second run of the stage writes other files"
