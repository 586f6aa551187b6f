"""Search of the nearest skills by the vectors of their chunks equals a full sort."""

import inspect

import faiss
import numpy as np
import pytest

from skilltrain.retrieval.nearest import ChunkVectors, VectorIndex, pool_chunks, starts_of


def unit_vectors(count, dim=16, seed=0):
    """Return random unit vectors, shape (count, dim)."""
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries, pool, k):
    return ChunkVectors.one_each(pool).nearest(queries, k)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("max", [0.5, 0.75, -0.5, 0.5]),
        ("top2", [0.5, 0.625, -0.5, 0.5]),  # a single chunk counts alone, equal ones count twice
    ],
)
def test_chunk_scores_are_pooled(pooling, expected):
    scores = np.array([[0.5, 0.25, 0.75, 0.5, -0.5, 0.5, 0.5, 0.25]], dtype=np.float32)
    starts = starts_of([1, 3, 1, 3])

    assert pool_chunks(scores, starts, pooling).tolist() == [expected]


def random_chunks(max_chunks, pooling):
    """Return 300 skills of up to `max_chunks` chunks, and 70 queries. Their lengths differ."""
    generator = np.random.default_rng(0)
    counts = generator.integers(1, max_chunks + 1, size=300)
    vectors = generator.normal(size=(counts.sum(), 8)).astype(np.float32)
    queries = generator.normal(size=(70, 8)).astype(np.float32)
    return ChunkVectors(vectors * 7, starts_of(counts), pooling), queries


@pytest.mark.parametrize(("max_chunks", "pooling"), [(1, "max"), (4, "max"), (4, "top2")])
def test_nearest_skills_equal_full_sort(max_chunks, pooling):
    chunks, queries = random_chunks(max_chunks, pooling)
    num_best = 1 if pooling == "max" else 2
    products = queries.astype(np.float64) @ chunks.vectors.astype(np.float64).T
    expected = np.empty((70, 300))
    for skill in range(300):
        skill_products = products[:, chunks.starts[skill] : chunks.starts[skill + 1]]
        best_products = np.sort(skill_products)[:, ::-1][:, :num_best]
        expected[:, skill] = best_products.mean(axis=1)

    positions, scores = chunks.nearest(queries, 7)

    assert (positions == np.argsort(-expected, axis=1, kind="stable")[:, :7]).all()
    np.testing.assert_allclose(scores, np.take_along_axis(expected, positions, 1), rtol=1e-5)
    rows = np.repeat(np.arange(70), 7)
    assert (chunks.scores(queries, rows, positions.ravel()) == scores.ravel()).all()


@pytest.mark.parametrize(("num_queries", "k", "shape"), [(0, 7, (0, 7)), (70, 0, (70, 0))])
def test_empty_search_has_empty_result(num_queries, k, shape):
    chunks, queries = random_chunks(1, "max")

    positions, _ = chunks.nearest(queries[:num_queries], k)

    assert positions.shape == shape


def test_search_returns_at_most_all_skills():
    chunks, queries = random_chunks(1, "max")

    positions, _ = chunks.nearest(queries, 999)

    assert positions.shape == (70, 300)


@pytest.mark.parametrize(("num_queries", "num_skills"), [(1, 900), (30, 50)])
def test_tie_at_cut_keeps_lower_positions(num_queries, num_skills):
    pool = np.tile(unit_vectors(1), (num_skills, 1))

    positions, _ = nearest(pool[:num_queries], pool, 3)

    assert positions.tolist() == [[0, 1, 2]] * num_queries


@pytest.mark.parametrize("num_queries", [1, 30])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_rounding_cannot_hide_a_tie(num_queries, num_chunks):
    """Permutations of a vector are equally near to a constant one, but not in float32."""
    generator = np.random.default_rng(0)
    vector = generator.uniform(size=64).astype(np.float32)
    vectors = np.stack([generator.permutation(vector) for _ in range(900 * num_chunks)])
    chunks = ChunkVectors(vectors / np.linalg.norm(vector), np.arange(901) * num_chunks)
    queries = np.full((num_queries, 64), 1 / 8, np.float32)

    positions, scores = chunks.nearest(queries, 3)

    assert positions.tolist() == [[0, 1, 2]] * num_queries
    assert len(np.unique(scores)) == 1


def test_first_of_equal_chunks_is_best():
    vectors = np.tile(unit_vectors(1, dim=384), (9, 1))
    index = VectorIndex(ChunkVectors(vectors, np.array([0, 9])), lambda texts: vectors[:1])

    assert index.best_chunk("query", 0) == 0


@pytest.mark.parametrize("size", [1, 25])
def test_batch_size_changes_no_result(size):
    pool = unit_vectors(2000)
    pool[500:530] = pool[0]
    queries = unit_vectors(60, seed=1)
    positions, scores = nearest(queries, pool, 20)

    for start in range(0, 60, size):
        batch = slice(start, start + size)
        batch_positions, batch_scores = nearest(queries[batch], pool, 20)
        assert (batch_positions == positions[batch]).all()
        assert (batch_scores == scores[batch]).all()


# faiss on a GPU ---------------------------------------------------------------


@pytest.fixture
def gpu_searches(monkeypatch):
    """Let faiss have one GPU, whose search the CPU does. Return the arguments of all searches."""
    signature = inspect.signature(faiss.knn_gpu)
    searches = []

    def search(*args, **kwargs):
        """Search as faiss.knn_gpu does. Wrong arguments raise TypeError."""
        arguments = signature.bind(*args, **kwargs).arguments
        searches.append(arguments)
        names = ("xq", "xb", "k", "metric")
        return faiss.knn(*(arguments[name] for name in names))

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    # The CPU build has no such class.
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", search)
    return searches


def test_gpu_searches_many_queries(gpu_searches):
    chunks, queries = random_chunks(1, "max")

    positions, scores = chunks.nearest(queries, 7)

    assert [len(search["xq"]) for search in gpu_searches] == [70]
    products = queries.astype(np.float64) @ chunks.vectors.T.astype(np.float64)
    assert (positions == np.argsort(-products, axis=1, kind="stable")[:, :7]).all()
    np.testing.assert_allclose(scores, np.take_along_axis(products, positions, 1), rtol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_skills", "k"), [(63, 300, 7), (64, 3000, 2049)])
def test_cpu_searches_few_queries_or_many_skills(gpu_searches, num_queries, num_skills, k):
    chunks = ChunkVectors.one_each(unit_vectors(num_skills))

    positions, _ = chunks.nearest(unit_vectors(num_queries, seed=1), k)

    assert gpu_searches == []
    assert positions.shape == (num_queries, k)
