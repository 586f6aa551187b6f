"""The nearest skills of a query by inner product: exact, or by an index that looks at a part of the pool (faiss)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.records import Query, Rankings
from skilltrain.templates import ChunkPool

Found = tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]
"""Positions of skills in the pool and their scores, best first; where too few were found, -1 and NaN."""

Positions = Int64[np.ndarray, " pair"]

_SPARE = 16  # skills found beyond k, among which rounding may have put one in the wrong place
_PAIRS = 4096  # pairs whose products are taken at once: 25 MB at 384 dimensions
_QUERIES = 64  # queries whose products with all chunks are taken at once: 27 MB at 100,000 chunks
_ON_GPU = 2048  # what faiss finds on a GPU at most


@dataclass(frozen=True)
class ChunkVectors:
    """The unit vectors of the skills' chunks, skill after skill; `starts` says where each skill's begin, and ends.

    A skill's score for a query is, by `pool`, that of its best chunk (MaxP; Dai and Callan, 2019) or the mean of its
    best two. A skill of one chunk has that chunk's.
    """

    vectors: Float32[np.ndarray, "chunk dim"]
    starts: Int64[np.ndarray, " skill_and_end"]
    pool: ChunkPool = "max"

    @classmethod
    def one_each(cls, vectors: Float32[np.ndarray, "skill dim"]) -> "ChunkVectors":
        return cls(np.ascontiguousarray(vectors, dtype=np.float32), np.arange(len(vectors) + 1))

    def save(self, folder: Path) -> None:
        np.save(folder / "vectors.npy", self.vectors)
        np.save(folder / "starts.npy", self.starts)
        write_json(folder / "pool.json", self.pool)

    @classmethod
    def load(cls, folder: Path) -> "ChunkVectors":
        """What `save` wrote into `folder`, memory-mapped."""
        vectors, starts = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("vectors", "starts")
        )
        return cls(vectors, starts, read_json(folder / "pool.json"))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    @property
    def is_one_each(self) -> bool:
        return len(self.vectors) == self.num_skills

    def scores(
        self, queries: Float32[np.ndarray, "query dim"], rows: Positions, positions: Positions
    ) -> Float32[np.ndarray, " pair"]:
        """The score of each (row of `queries`, position of a skill), from products in double precision."""
        counts = np.diff(self.starts)[positions]
        starts = starts_of(counts)
        pairs = np.repeat(np.arange(len(positions)), counts)
        chunks = np.arange(len(pairs)) + (self.starts[positions] - starts[:-1])[pairs]
        cosines = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), _PAIRS):
            part = slice(start, start + _PAIRS)
            products = queries[rows[pairs[part]]].astype(np.float64)
            products *= self.vectors[chunks[part]]
            cosines[part] = products.sum(axis=1)
        return pooled(cosines[None], starts, self.pool)[0]

    def nearest(
        self, queries: Float32[np.ndarray, "query dim"], k: int, index: Any = None
    ) -> Found:
        """The `k` best skills of each query, exact unless an `index` finds them; ties go to the lower position.

        The last bits of single-precision products depend on what else is multiplied. So they only choose k and a few
        more, which `scores` then orders.
        """
        k, width = min(k, self.num_skills), min(k + _SPARE, self.num_skills)
        if k == 0 or not len(queries):
            return np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        found = self._search(queries, width) if index is None else index.search(queries, width)[1]
        rows = np.repeat(np.arange(len(queries)), found.shape[1])
        scores = self.scores(queries, rows, np.maximum(found.ravel(), 0)).reshape(found.shape)
        scores[found < 0] = -np.inf
        order = np.lexsort((found, -scores), axis=1)[:, :k]
        positions, scores = (
            np.take_along_axis(found, order, 1),
            np.take_along_axis(scores, order, 1),
        )
        scores[positions < 0] = np.nan
        return positions, scores

    def _search(self, queries: np.ndarray, k: int) -> Int64[np.ndarray, "query k"]:
        """The best by products in single precision, on a GPU where faiss finds one."""
        if self.is_one_each:
            import faiss

            pool, metric = (
                np.ascontiguousarray(self.vectors, np.float32),
                faiss.METRIC_INNER_PRODUCT,
            )
            if (
                faiss.get_num_gpus() and k <= _ON_GPU
            ):  # the CPU build counts GPUs too, and always finds none
                return faiss.knn_gpu(faiss.StandardGpuResources(), queries, pool, k, metric=metric)[
                    1
                ]
            return faiss.knn(queries, pool, k, metric=metric)[1]
        found = np.empty((len(queries), k), dtype=np.int64)
        for start in range(0, len(queries), _QUERIES):
            part = slice(start, start + _QUERIES)
            scores = pooled(queries[part] @ self.vectors.T, self.starts, self.pool)
            found[part] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return found


def starts_of(
    counts: Sequence[int] | Int64[np.ndarray, " part"],
) -> Int64[np.ndarray, " part_and_end"]:
    """Where parts of these lengths begin that stand one behind the other, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def pooled(
    scores: Float32[np.ndarray, "query chunk"],
    starts: Int64[np.ndarray, " skill_and_end"],
    pool: ChunkPool,
) -> Float32[np.ndarray, "query skill"]:
    """The score of each skill by those of its chunks, of which it has at least one."""
    counts = np.diff(starts)
    if (counts == 1).all():
        return scores
    best = np.maximum.reduceat(scores, starts[:-1], axis=1)
    if pool == "max":
        return best
    is_best = scores == np.repeat(best, counts, axis=1)
    second = np.maximum.reduceat(np.where(is_best, -np.inf, scores), starts[:-1], axis=1)
    is_level = (np.add.reduceat(is_best, starts[:-1], axis=1, dtype=np.int64) > 1) | (counts == 1)
    return ((best + np.where(is_level, best, second)) / 2).astype(np.float32)


def build_index(description: str, pool: Float32[np.ndarray, "skill dim"], seed: int) -> Any:
    """The faiss index that `description` names, over `pool`: `Flat`, `HNSW32`, or `IVF1024,Flat nprobe=64`.

    After a blank stand settings of the search, as faiss names them (nprobe, efSearch, efConstruction). One thread
    builds it: several link an HNSW graph in the order of chance. Raises SkilltrainError for what faiss does not know.
    """
    import faiss

    factory, *settings = description.split() or [""]
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        index: Any = faiss.index_factory(pool.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexIVF):
            index.cp.seed = seed
            index.cp.min_points_per_centroid = (
                1  # faiss warns where cells are small; the recall says what that costs
            )
        elif isinstance(index, faiss.IndexHNSW):
            index.hnsw.rng = faiss.RandomGenerator(seed)  # pyright: ignore[reportAttributeAccessIssue]
        for setting in settings:
            faiss.ParameterSpace().set_index_parameters(index, setting)
        index.train(pool)
        index.add(pool)
        return index
    except RuntimeError as error:
        raise SkilltrainError(
            f"faiss cannot build this index: {error}", where=f"index {description}"
        ) from error
    finally:
        faiss.omp_set_num_threads(threads)


def recall(found: Int64[np.ndarray, "query k"], exact: Int64[np.ndarray, "query k"]) -> float:
    return sum(len(np.intersect1d(*pair)) for pair in zip(found, exact, strict=True)) / max(
        1, exact.size
    )


class PoolIndex(Protocol):
    """What gives skills scores for a text, by their positions in the pool."""

    def search(self, texts: Sequence[str], k: int) -> Found:
        """Each text's `k` best, as many as there are."""
        ...

    def among(self, texts: Sequence[str], positions: Sequence[Positions]) -> Iterable[np.ndarray]:
        """Yield the scores of each text's own positions."""
        ...


@dataclass(frozen=True)
class PoolRanker:
    """Ranks the skills of a pool, or candidates among them, by an index."""

    skill_ids: Sequence[str]
    index: PoolIndex

    @cached_property
    def places(self) -> dict[str, int]:
        return {skill_id: place for place, skill_id in enumerate(self.skill_ids)}

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best skills of each query, of its candidates alone where there are some; ties keep their order."""
        texts = [query.text for query in queries]
        if candidates is None:
            found = zip(*self.index.search(texts, keep), strict=True)
        else:
            rows = (
                [self.places[skill_id] for skill_id, _ in candidates[query.query_id]]
                for query in queries
            )
            positions = [np.array(row, dtype=np.int64) for row in rows]
            found = zip(positions, self.index.among(texts, positions), strict=True)
        rankings: Rankings = {}
        for query, (some, scores) in zip(queries, found, strict=True):
            pairs = [
                (self.skill_ids[int(place)], float(score))
                for place, score in zip(some, scores, strict=True)
            ]
            rankings[query.query_id] = sorted(pairs, key=lambda pair: -pair[1])[:keep]
        return rankings


@dataclass(frozen=True)
class VectorIndex:
    """The vectors of a pool, and `encode`, which gives those of queries."""

    chunks: ChunkVectors
    encode: Callable[[Sequence[str]], Float32[np.ndarray, "query dim"]]

    def search(self, texts: Sequence[str], k: int) -> Found:
        return self.chunks.nearest(self.encode(texts), k)

    def among(self, texts: Sequence[str], positions: Sequence[Positions]) -> Iterable[np.ndarray]:
        vectors = self.encode(texts)
        return (
            self.chunks.scores(vectors, np.full(len(some), row), some)
            for row, some in enumerate(positions)
        )

    def best_chunk(self, query: str, position: int) -> int | None:
        """The number of the skill's chunk that is nearest to a query; None where it has but one."""
        first, end = self.chunks.starts[position : position + 2].tolist()
        if end - first < 2:
            return None
        return int((self.chunks.vectors[first:end] @ self.encode([query])[0]).argmax())
