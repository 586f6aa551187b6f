"""The nearest skills by their chunks' vectors: those of a full sort, whatever else is searched."""

import numpy as np
import pytest

from skilltrain.retrieval.nearest import ChunkVectors, VectorIndex, pool_chunks, starts_of


def unit_vectors(count, dim=16, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries, pool, k):
    return ChunkVectors.one_each(pool).nearest(queries, k)


def test_a_skills_score_by_hand():
    scores = np.array([[0.5, 0.25, 0.75, 0.5, -0.5, 0.5, 0.5, 0.25]], dtype=np.float32)
    starts = starts_of([1, 3, 1, 3])
    assert pool_chunks(scores, starts, "max").tolist() == [[0.5, 0.75, -0.5, 0.5]]
    assert pool_chunks(scores, starts, "top2").tolist() == [
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


@pytest.mark.parametrize("num_queries", [1, 30])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_rounding_cannot_hide_a_tie(num_queries, num_chunks):
    """Permutations of one vector are equally near to a constant one, but not in single precision."""
    generator = np.random.default_rng(0)
    vector = generator.uniform(size=64).astype(np.float32)
    vectors = np.stack([generator.permutation(vector) for _ in range(900 * num_chunks)])
    chunks = ChunkVectors(vectors / np.linalg.norm(vector), np.arange(901) * num_chunks)
    queries = np.full((num_queries, 64), 1 / 8, np.float32)

    positions, scores = chunks.nearest(queries, 3)

    assert positions.tolist() == [[0, 1, 2]] * num_queries
    assert len(np.unique(scores)) == 1


def test_the_first_of_equal_chunks_is_the_best():
    vectors = np.tile(unit_vectors(1, dim=384), (9, 1))
    index = VectorIndex(ChunkVectors(vectors, np.array([0, 9])), lambda texts: vectors[:1])

    assert index.best_chunk("query", 0) == 0


@pytest.mark.parametrize("size", [1, 25])
def test_a_query_is_answered_alike_in_any_company(size):
    pool, queries = unit_vectors(2000), unit_vectors(60, seed=1)
    pool[500:530] = pool[0]
    together = nearest(queries, pool, 20)
    parts = [nearest(queries[start : start + size], pool, 20) for start in range(0, 60, size)]
    for part, whole in zip(zip(*parts, strict=True), together, strict=True):
        assert (np.concatenate(part) == whole).all()
