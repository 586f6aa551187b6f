"""Exact nearest-skill search by inner product (faiss)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.files import read_json, write_json
from skilltrain.records import Query, Rankings
from skilltrain.retrieval.vectors import Positions, Vectors
from skilltrain.templates import ChunkPool

Found = tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]
"""Positions of skills in the pool and their scores, best first."""

_NUM_SPARE = 16  # skills searched beyond k, for single precision may order close scores wrongly
_ROUNDING = 1e-5  # bounds the rounding of a single-precision product of unit vectors
_PAIRS_AT_ONCE = 4096  # 25 MB of products at 384 dimensions
_QUERIES_AT_ONCE = 64  # 27 MB of products at 100,000 chunks
_MAX_K_ON_GPU = 2048  # limit of faiss


@dataclass(frozen=True)
class ChunkVectors:
    """Unit vectors of the skills' chunks, skill after skill. Those of skill i begin at `starts[i]`.

    The score of a skill is, by `pool`, that of its best chunk (MaxP; Dai and Callan, 2019) or the
    mean of its best two.
    """

    vectors: Vectors
    starts: Int64[np.ndarray, " skill_and_end"]
    pool: ChunkPool = "max"

    @classmethod
    def one_each(cls, vectors: Vectors) -> "ChunkVectors":
        return cls(np.ascontiguousarray(vectors, dtype=np.float32), np.arange(len(vectors) + 1))

    def save(self, folder: Path) -> None:
        np.save(folder / "vectors.npy", self.vectors)
        np.save(folder / "starts.npy", self.starts)
        write_json(folder / "pool.json", self.pool)

    @classmethod
    def load(cls, folder: Path) -> "ChunkVectors":
        """What `save` wrote into `folder`."""
        vectors, starts = (np.load(folder / f"{name}.npy") for name in ("vectors", "starts"))
        return cls(vectors, starts, read_json(folder / "pool.json"))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    @property
    def is_one_each(self) -> bool:
        return len(self.vectors) == self.num_skills

    def scores(
        self, queries: Vectors, rows: Positions, positions: Positions
    ) -> Float32[np.ndarray, " pair"]:
        """Score each (row of `queries`, position of a skill) by products in double precision.

        Each product is summed by itself, so equal skills have equal scores on every processor.
        """
        counts = np.diff(self.starts)[positions]
        starts = starts_of(counts)
        pairs = np.repeat(np.arange(len(positions)), counts)
        chunks = np.arange(len(pairs)) + (self.starts[positions] - starts[:-1])[pairs]
        cosines = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            part = slice(start, start + _PAIRS_AT_ONCE)
            products = queries[rows[pairs[part]]].astype(np.float64)
            products *= self.vectors[chunks[part]]
            cosines[part] = products.sum(axis=1)
        return pooled(cosines[None], starts, self.pool)[0]

    def nearest(self, queries: Vectors, k: int) -> Found:
        """Return the `k` best skills of each query. Ties go to the lower position.

        The last bits of single-precision products depend on the processor and on what else is
        multiplied. So they only select more than k skills, which `scores` then orders. A query
        whose last selected skill is as close as its k-th is searched again, with more skills.
        """
        k = min(k, self.num_skills)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        positions = np.empty((len(queries), k), np.int64)
        scores = np.empty((len(queries), k), np.float32)
        unsure = np.arange(len(queries) if k else 0)
        num_spare = _NUM_SPARE
        while len(unsure):
            width = min(k + num_spare, self.num_skills)
            found = self._search(queries[unsure], width)
            rows = np.repeat(unsure, width)
            exact = self.scores(queries, rows, found.ravel()).reshape(found.shape)
            order = np.lexsort((found, -exact), axis=1)[:, :k]
            positions[unsure] = np.take_along_axis(found, order, axis=1)
            scores[unsure] = np.take_along_axis(exact, order, axis=1)
            may_miss = exact.min(axis=1) >= scores[unsure, -1] - _ROUNDING
            unsure = unsure[may_miss & (width < self.num_skills)]
            num_spare *= 4
        return positions, scores

    def _search(self, queries: Vectors, k: int) -> Int64[np.ndarray, "query k"]:
        """Select the `k` best by single-precision products, on a GPU if faiss can use one."""
        if self.is_one_each:
            import faiss

            pool = np.ascontiguousarray(self.vectors, np.float32)
            metric = faiss.METRIC_INNER_PRODUCT
            # The CPU build also has this function, and always returns 0.
            if faiss.get_num_gpus() and k <= _MAX_K_ON_GPU:
                resources = faiss.StandardGpuResources()
                return faiss.knn_gpu(resources, queries, pool, k, metric=metric)[1]
            return faiss.knn(queries, pool, k, metric=metric)[1]
        found = np.empty((len(queries), k), dtype=np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
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
        """Position of each skill in the pool."""
        return {skill_id: position for position, skill_id in enumerate(self.skill_ids)}

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the `keep` best skills of each query, or of its candidates. Ties keep their order."""
        texts = [query.text for query in queries]
        if candidates is None:
            scored = zip(*self.index.search(texts, keep), strict=True)
        else:
            positions: list[Positions] = []
            for query in queries:
                row = [self.places[skill_id] for skill_id, _ in candidates[query.query_id]]
                positions.append(np.array(row, dtype=np.int64))
            scored = zip(positions, self.index.among(texts, positions), strict=True)
        rankings: Rankings = {}
        for query, (row, scores) in zip(queries, scored, strict=True):
            pairs = zip(row.tolist(), scores.tolist(), strict=True)
            ranking = [(self.skill_ids[int(position)], score) for position, score in pairs]
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings


@dataclass(frozen=True)
class VectorIndex:
    """The vectors of a pool, and `encode`, which returns those of queries."""

    chunks: ChunkVectors
    encode: Callable[[Sequence[str]], Vectors]

    def search(self, texts: Sequence[str], k: int) -> Found:
        return self.chunks.nearest(self.encode(texts), k)

    def among(self, texts: Sequence[str], positions: Sequence[Positions]) -> Iterable[np.ndarray]:
        queries = self.encode(texts)
        for row, some in enumerate(positions):
            yield self.chunks.scores(queries, np.full(len(some), row), some)

    def best_chunk(self, query: str, position: int) -> int | None:
        """Return the number of the skill's chunk nearest to a query, None if it has only one."""
        first, end = self.chunks.starts[position : position + 2].tolist()
        if end - first < 2:
            return None
        products = self.chunks.vectors[first:end] * self.encode([query])
        return int(products.sum(axis=1).argmax())
