"""The nearest skills by their chunks' vectors: those of a full sort, alike in any company; and by an index of faiss."""

import numpy as np
import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.nearest import ChunkVectors, build_index, pooled, recall, starts_of


def unit_vectors(count, dim=16, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries, pool, k, index=None):
    return ChunkVectors.one_each(pool).nearest(queries, k, index)


def test_a_skills_score_by_hand():
    scores = np.array([[0.5, 0.25, 0.75, 0.5, -0.5, 0.5, 0.5, 0.25]], dtype=np.float32)
    starts = starts_of([1, 3, 1, 3])
    assert pooled(scores, starts, "max").tolist() == [[0.5, 0.75, -0.5, 0.5]]
    assert pooled(scores, starts, "top2").tolist() == [
        [0.5, 0.625, -0.5, 0.5]
    ]  # alone: its own; level: both count


@pytest.mark.parametrize(("most", "pool"), [(1, "max"), (4, "max"), (4, "top2")])
def test_nearest_skills_are_those_of_a_full_sort_whatever_the_lengths_of_vectors(most, pool):
    generator = np.random.default_rng(0)
    counts = generator.integers(1, most + 1, size=300)
    vectors, queries = (
        generator.normal(size=(num, 8)).astype(np.float32) for num in (counts.sum(), 70)
    )
    vectors *= 7
    chunks = ChunkVectors(vectors, starts_of(counts), pool)
    products = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = [
        np.sort(row[a:b])[::-1]
        for row in products
        for a, b in zip(chunks.starts, chunks.starts[1:], strict=False)
    ]
    wanted = np.array([row[0] if pool == "max" else row[:2].mean() for row in rows]).reshape(
        70, 300
    )
    positions, scores = chunks.nearest(queries, 7)
    assert (positions == np.argsort(-wanted, axis=1, kind="stable")[:, :7]).all()
    np.testing.assert_allclose(scores, np.take_along_axis(wanted, positions, 1), rtol=1e-5)
    assert (
        chunks.scores(queries, np.repeat(np.arange(70), 7), positions.ravel()) == scores.ravel()
    ).all()
    assert chunks.nearest(queries[:0], 7)[0].shape == (0, 7) and chunks.nearest(queries, 0)[
        0
    ].shape == (70, 0)
    assert chunks.nearest(queries, 999)[0].shape == (70, 300)


@pytest.mark.parametrize(("num_queries", "num_skills"), [(1, 900), (30, 50)])
def test_a_tie_at_the_cut_keeps_the_lower_positions(num_queries, num_skills):
    pool = np.tile(unit_vectors(1), (num_skills, 1))
    positions, _ = nearest(pool[:num_queries], pool, 3)
    assert positions.tolist() == [[0, 1, 2]] * num_queries


@pytest.mark.parametrize("size", [1, 25])
def test_a_query_is_answered_alike_in_any_company(size):
    pool, queries = unit_vectors(2000), unit_vectors(60, seed=1)
    pool[500:530] = pool[0]
    together = nearest(queries, pool, 20)
    parts = [nearest(queries[start : start + size], pool, 20) for start in range(0, 60, size)]
    for part, whole in zip(zip(*parts, strict=True), together, strict=True):
        assert (np.concatenate(part) == whole).all()


@pytest.mark.parametrize(
    ("index", "at_least"),
    [("Flat", 1.0), ("HNSW32 efSearch=256", 0.95), ("IVF64,Flat nprobe=8", 0.2)],
)
def test_an_index_finds_most_of_the_nearest_and_scores_them_exactly(index, at_least):
    pool, queries = unit_vectors(2000), unit_vectors(50, seed=1)
    found = [nearest(queries, pool, 10, build_index(index, pool, seed)) for seed in (0, 0)]
    positions, scores = found[0]
    assert all((one == again).all() for one, again in zip(*found, strict=True)), (
        "the same seed, the same index"
    )
    assert recall(positions, nearest(queries, pool, 10)[0]) >= at_least
    pairs = ChunkVectors.one_each(pool).scores(
        queries, np.repeat(np.arange(50), 10), positions.ravel()
    )
    assert (scores.ravel() == pairs).all() and (np.diff(scores, axis=1) <= 0).all()


def test_all_cells_are_exact_and_few_cells_leave_places_empty():
    pool, queries = unit_vectors(40), unit_vectors(6, seed=1)
    exact = nearest(queries, pool, 30)[0]
    for num_probes, full in ((20, True), (1, False)):
        positions, scores = nearest(
            queries, pool, 30, build_index(f"IVF20,Flat nprobe={num_probes}", pool, 0)
        )
        assert (positions >= 0).all() == (positions == exact).all() == full
        assert (np.isnan(scores) == (positions < 0)).all()
    assert recall(np.array([[1, 2], [3, -1]]), np.array([[2, 1], [3, 4]])) == 0.75
    assert recall(np.empty((0, 3), np.int64), np.empty((0, 3), np.int64)) == 0


@pytest.mark.parametrize("index", ["", "HNWS32", "IVF9,Flat nprobe", "IVF50,Flat"])
def test_an_index_that_cannot_be_built_is_one_line(index):
    with pytest.raises(SkilltrainError, match=f"index {index}: faiss cannot build this index"):
        build_index(index, unit_vectors(20), 0)
