import numpy as np
import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.nearest import ChunkVectors, build_index, recall


def unit_vectors(count, dim=16, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries, pool, k, index=None):
    return ChunkVectors.one_each(pool).nearest(queries, k, index)


def full_sort(queries, pool, k):
    """The k best of every query from the whole matrix of products, in double precision, rounded like a score."""
    scores = (queries.astype(np.float64) @ pool.astype(np.float64).T).astype(np.float32)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def test_nearest_by_hand_with_ties_by_position():
    pool = np.array([[0, 1], [1, 0], [0.6, 0.8], [1, 0], [1, 0]], dtype=np.float32)
    positions, scores = nearest(np.array([[1, 0], [0, 1]], dtype=np.float32), pool, 4)
    assert positions.tolist() == [[1, 3, 4, 2], [0, 2, 1, 3]]
    np.testing.assert_allclose(scores, [[1, 1, 1, 0.6], [1, 0.8, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 30])
@pytest.mark.parametrize("num_skills", [50, 900])
def test_a_tie_at_the_cut_keeps_the_lower_positions(num_queries, num_skills):
    pool = np.tile(unit_vectors(1), (num_skills, 1))
    positions, _ = nearest(pool[:num_queries], pool, 3)
    assert positions.tolist() == [[0, 1, 2]] * num_queries


def test_nearest_equals_a_full_sort_whatever_the_lengths_of_vectors():
    generator = np.random.default_rng(0)
    pool, queries = generator.normal(size=(2, 300, 8)).astype(np.float32)
    positions, scores = nearest(queries * 40, pool * 7, 7)
    assert (positions == full_sort(queries, pool, 7)).all()
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ pool.T, positions, 1) * 280, rtol=1e-5)


def test_more_than_there_are_gives_all_and_nothing_gives_nothing():
    pool = unit_vectors(3)
    assert nearest(pool, pool, 9)[0].shape == (3, 3)
    assert nearest(pool, pool, 0)[0].shape == (3, 0)
    assert nearest(pool[:0], pool, 2)[0].shape == (0, 2)
    assert nearest(pool, pool[:0], 2)[0].shape == (3, 0)


@pytest.mark.parametrize("size", [1, 7, 25])
def test_a_query_is_answered_alike_in_any_company(size):
    pool, queries = unit_vectors(2000), unit_vectors(60, seed=1)
    pool[500:530] = pool[0]
    together = nearest(queries, pool, 20)
    parts = [nearest(queries[start : start + size], pool, 20) for start in range(0, 60, size)]
    for part, whole in zip(zip(*parts, strict=True), together, strict=True):
        assert (np.concatenate(part) == whole).all()


@pytest.mark.parametrize(
    ("index", "at_least"), [("Flat", 1.0), ("HNSW32 efSearch=256", 0.95), ("IVF64,Flat nprobe=8", 0.2)]
)
def test_an_index_finds_most_of_the_nearest_and_scores_them_exactly(index, at_least):
    pool, queries = unit_vectors(2000), unit_vectors(50, seed=1)
    found = [nearest(queries, pool, 10, build_index(index, pool, seed)) for seed in (0, 0)]
    positions, scores = found[0]
    assert all((one == again).all() for one, again in zip(*found, strict=True)), "the same seed, the same index"
    assert recall(positions, nearest(queries, pool, 10)[0]) >= at_least
    pairs = ChunkVectors.one_each(pool).scores(queries, np.repeat(np.arange(50), 10), positions.ravel())
    assert (scores.ravel() == pairs).all() and (np.diff(scores, axis=1) <= 0).all()


def test_all_cells_are_exact_and_few_cells_leave_places_empty():
    pool, queries = unit_vectors(40), unit_vectors(6, seed=1)
    for num_probes, full in ((20, True), (1, False)):
        positions, scores = nearest(queries, pool, 30, build_index(f"IVF20,Flat nprobe={num_probes}", pool, 0))
        assert (positions >= 0).all() == full
        assert (np.isnan(scores) == (positions < 0)).all()
        assert not full or (positions == nearest(queries, pool, 30)[0]).all()


@pytest.mark.parametrize("index", ["", "HNWS32", "IVF9,Flat nprobe", "IVF50,Flat"])
def test_an_index_that_cannot_be_built_is_one_line(index):
    with pytest.raises(SkilltrainError, match=f"index {index}: faiss cannot build this index"):
        build_index(index, unit_vectors(20), 0)


def test_recall_by_hand():
    assert recall(np.array([[1, 2], [3, -1]]), np.array([[2, 1], [3, 4]])) == 0.75
    assert recall(np.empty((0, 3), np.int64), np.empty((0, 3), np.int64)) == 0
