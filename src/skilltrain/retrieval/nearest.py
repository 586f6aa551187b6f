"""The nearest skills of a query by inner product: exact, or by an index that looks at a part of the pool (faiss)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32, Int64
from pydantic import Field

from skilltrain.config import Config
from skilltrain.records import Query, Ranking, Rankings

Found = tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]
"""Positions of skills in the pool and their scores, best first; where too few were found, -1 and NaN."""

_SPARE = 16  # skills found beyond k, among which rounding may have put one in the wrong place
_PAIRS = 4096  # pairs whose products are taken at once: 25 MB at 384 dimensions
_ON_GPU = 2048  # what faiss finds on a GPU at most


class ExactIndex(Config):
    """Every skill is looked at."""

    kind: Literal["exact"] = "exact"


class HNSWIndex(Config):
    """A graph of near skills is walked: fast to search, slow to build (Malkov and Yashunin, arXiv 1603.09320)."""

    kind: Literal["hnsw"]
    num_links: int = Field(default=32, ge=4, description="skills that each skill is linked to")
    build_effort: int = Field(default=100, ge=8, description="skills looked at to link one")
    search_effort: int = Field(default=256, ge=8, description="skills kept while a query walks; k where that is more")


class IVFIndex(Config):
    """The pool is cut into cells by k-means, and only the cells nearest to a query are looked at."""

    kind: Literal["ivf"]
    num_cells: int | None = Field(default=None, ge=1, description="null: 4 x the square root of the pool's size")
    num_probes: int = Field(default=64, ge=1, description="cells that are looked at for a query")


IndexConfig = Annotated[ExactIndex | HNSWIndex | IVFIndex, Field(discriminator="kind")]


def nearest(queries: Float32[np.ndarray, "query dim"], pool: Float32[np.ndarray, "skill dim"], k: int) -> Found:
    """The `k` nearest skills of each query, exact; ties go to the lower position.

    faiss's own float32 products depend in their last bits on the number of queries, the threads and the hardware. So
    they only choose: skills are ordered by products in double precision, and if one left out could by rounding belong
    to the k, the query is asked again for more. Hence the same answer in any company and on a GPU.
    """
    return _nearest(queries, pool, k, _longest(pool))


def _nearest(queries: np.ndarray, pool: np.ndarray, k: int, longest: float) -> Found:
    """`nearest`, told the norm of the pool's longest vector."""
    width, k = min(k + _SPARE, len(pool)), min(k, len(pool))
    positions = np.empty((len(queries), k), dtype=np.int64)
    scores = np.empty((len(queries), k), dtype=np.float32)
    if k == 0:
        return positions, scores
    # Twice the bound on the rounding error of a float32 inner product (Higham, 2002, section 3.1).
    errors = (pool.shape[1] + 2) * 2.0**-23 * longest * np.linalg.norm(queries, axis=1)
    asked = np.arange(len(queries))
    while len(asked):
        rough, found = _knn(queries[asked], pool, width)
        ordered, exact = _ordered(queries[asked], pool, found, k)
        positions[asked], scores[asked] = ordered, exact
        sure = (exact[:, -1] > rough[:, -1] + errors[asked]) | (width == len(pool))
        asked, width = asked[~sure], min(4 * width, len(pool))
    return positions, scores


def cosines(
    queries: Float32[np.ndarray, "query dim"],
    pool: Float32[np.ndarray, "skill dim"],
    rows: Int64[np.ndarray, " pair"],
    positions: Int64[np.ndarray, " pair"],
) -> Float32[np.ndarray, " pair"]:
    """The inner product of each (row of `queries`, position in `pool`), in double precision and then rounded.

    A pair's result does not depend on the pairs beside it, which cannot be said of a matrix product.
    """
    result = np.empty(len(rows), dtype=np.float32)
    for start in _steps(len(rows)):
        part = slice(start, start + _PAIRS)
        products = queries[rows[part]].astype(np.float64)
        products *= pool[positions[part]]
        result[part] = products.sum(axis=1)
    return result


def _ordered(queries: np.ndarray, pool: np.ndarray, found: np.ndarray, k: int) -> Found:
    """The `k` best of what was `found` for each query (-1: nothing), by exact score and then by position."""
    rows = np.repeat(np.arange(len(queries)), found.shape[1])
    scores = cosines(queries, pool, rows, np.maximum(found.ravel(), 0)).reshape(found.shape)
    scores[found < 0] = -np.inf
    order = np.lexsort((found, -scores), axis=1)[:, :k]
    positions, scores = np.take_along_axis(found, order, 1), np.take_along_axis(scores, order, 1)
    scores[positions < 0] = np.nan
    return positions, scores


def _knn(queries: np.ndarray, pool: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, positions) of the best by float32 products, on a GPU where faiss finds one."""
    import faiss

    queries, pool = (np.ascontiguousarray(vectors, dtype=np.float32) for vectors in (queries, pool))
    # The CPU build of faiss counts GPUs too, and always finds none.
    if faiss.get_num_gpus() and k <= _ON_GPU:
        return faiss.knn_gpu(faiss.StandardGpuResources(), queries, pool, k, metric=faiss.METRIC_INNER_PRODUCT)
    return faiss.knn(queries, pool, k, metric=faiss.METRIC_INNER_PRODUCT)


def _longest(pool: np.ndarray) -> float:
    norms = (float(np.linalg.norm(pool[start : start + _PAIRS], axis=1).max()) for start in _steps(len(pool)))
    return max(norms, default=0.0)


def _steps(count: int) -> range:
    return range(0, count, _PAIRS)


def build_index(config: IndexConfig, pool: Float32[np.ndarray, "skill dim"], seed: int, file: Path) -> None:
    """Write the index that `config` names to `file`; an exact one needs none.

    One thread builds it: several link an HNSW graph in the order of chance.
    """
    if isinstance(config, ExactIndex):
        return
    import faiss

    with _one_thread():
        index = _hnsw(config, pool, seed) if isinstance(config, HNSWIndex) else _ivf(config, pool, seed)
        faiss.write_index(index, str(file))


def _hnsw(config: HNSWIndex, pool: np.ndarray, seed: int) -> Any:
    import faiss

    index: Any = faiss.IndexHNSWFlat(pool.shape[1], config.num_links, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = config.build_effort
    index.hnsw.rng = faiss.RandomGenerator(seed)  # pyright: ignore[reportAttributeAccessIssue]
    index.add(pool)
    return index


def _ivf(config: IVFIndex, pool: np.ndarray, seed: int) -> Any:
    import faiss

    num_cells = min(config.num_cells or round(4 * len(pool) ** 0.5), len(pool))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(pool.shape[1]), pool.shape[1], num_cells, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = seed
    index.cp.min_points_per_centroid = 1  # faiss warns where cells are small; the recall says what that costs
    index.train(pool)
    index.add(pool)
    return index


@contextmanager
def _one_thread() -> Iterator[None]:
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


@dataclass(frozen=True)
class Searcher:
    """What answers for the nearest skills: the vectors, and the index where there is one."""

    config: IndexConfig
    pool: Float32[np.ndarray, "skill dim"]
    longest: float
    index: Any

    @classmethod
    def open(cls, config: IndexConfig, pool: Float32[np.ndarray, "skill dim"], file: Path) -> "Searcher":
        """The searcher over `pool` with the index that `build_index` wrote to `file`."""
        if isinstance(config, ExactIndex):
            return cls(config, pool, _longest(pool), None)
        import faiss

        index: Any = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)  # vectors stay in the file
        if isinstance(config, HNSWIndex):
            index.hnsw.efSearch = config.search_effort
        return cls(config, pool, _longest(pool), index)

    def search(self, queries: Float32[np.ndarray, "query dim"], k: int) -> Found:
        """About the `k` nearest skills of each query, exactly scored; the same in any company of queries."""
        if isinstance(self.config, ExactIndex):
            return _nearest(queries, self.pool, k, self.longest)
        k = min(k, len(self.pool))
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if isinstance(self.config, HNSWIndex):
            _, found = self.index.search(queries, k)
        else:
            found = self._in_cells(queries, k, self.config.num_probes)
        return _ordered(queries, self.pool, found, k)

    def _in_cells(self, queries: np.ndarray, k: int, num_probes: int) -> np.ndarray:
        """Positions of the best in the cells nearest to each query; faiss's own choice of cells feels rounding."""
        self.index.nprobe = min(num_probes, self.index.nlist)
        centroids = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        cells, closeness = nearest(queries, centroids, self.index.nprobe)
        _, found = self.index.search_preassigned(queries, k, cells, closeness)
        return found


@dataclass(frozen=True)
class VectorRanker:
    """Ranks skills by the inner product of their vectors with a query's, which `encode` gives."""

    skill_ids: Sequence[str]
    vectors: Float32[np.ndarray, "skill dim"]
    encode: Callable[[Sequence[str]], Float32[np.ndarray, "query dim"]]

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` nearest skills of each query, of its candidates alone where there are some."""
        vectors = self.encode([query.text for query in queries])
        if candidates is None:
            found = zip(queries, *nearest(vectors, self.vectors, keep), strict=True)
            return {query.query_id: ranking_of(self.skill_ids, *row) for query, *row in found}
        places = {skill_id: place for place, skill_id in enumerate(self.skill_ids)}
        rankings: Rankings = {}
        for row, query in enumerate(queries):
            positions = np.array([places[skill_id] for skill_id, _ in candidates[query.query_id]], dtype=np.int64)
            scores = cosines(vectors, self.vectors, np.full(len(positions), row), positions)
            rankings[query.query_id] = ranking_of(self.skill_ids, positions, scores)[:keep]
        return rankings


def ranking_of(skill_ids: Sequence[str], positions: np.ndarray, scores: np.ndarray) -> Ranking:
    """The skills at `positions` of the pool, best first; equal scores keep their order."""
    pairs = [(skill_ids[int(place)], float(score)) for place, score in zip(positions, scores, strict=True)]
    return sorted(pairs, key=lambda pair: -pair[1])


def recall(found: Int64[np.ndarray, "query k"], exact: Int64[np.ndarray, "query k"]) -> float:
    """The share of the exact nearest that were found."""
    hits: Sequence[int] = [len(np.intersect1d(*pair)) for pair in zip(found, exact, strict=True)]
    return sum(hits) / max(1, exact.size)
