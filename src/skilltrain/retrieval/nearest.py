"""Exact nearest-skill search by inner product (faiss).

Notes:
    - Equal skills have equal scores on every processor, because the products of each chunk are
      summed on their own, without a matrix product.
    - Rounding in a single-precision search depends on the processor and on the other queries. So
      the search selects more skills than needed, and double precision orders them. If the worst
      selected skill is nearly as good as the k-th, the search is repeated with more skills.
    - The CPU build of faiss reports 0 GPUs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.files import read_json, write_json
from skilltrain.records import Query, Ranking, Rankings
from skilltrain.retrieval.vectors import Positions, Vectors
from skilltrain.templates import ChunkPool

SearchResult = tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]
"""Positions of skills in the pool and their scores, best first."""

_NUM_SPARE = 16  # more skills than k, because single precision may order close scores wrongly
_ROUNDING = 1e-5  # bounds the rounding of a single-precision product of unit vectors
_CHUNKS_AT_ONCE = 4096  # 25 MB of products at 384 dimensions
_QUERIES_AT_ONCE = 64  # 27 MB of products at 100,000 chunks
_MAX_K_ON_GPU = 2048  # limit of faiss


@dataclass(frozen=True)
class ChunkVectors:
    """Unit vectors of the skills' chunks, skill after skill.

    Attributes:
        vectors: Vectors of all chunks.
        starts: First chunk of each skill, and the number of chunks.
        pool: How the score of a skill is made from the scores of its chunks. `max` is the best one
            (MaxP; Dai and Callan, 2019), `top2` the mean of the best two.
    """

    vectors: Vectors
    starts: Int64[np.ndarray, " skill_and_end"]
    pool: ChunkPool = "max"

    @classmethod
    def one_each(cls, vectors: Vectors) -> "ChunkVectors":
        """Return the vectors of skills with one chunk each."""
        return cls(np.ascontiguousarray(vectors, dtype=np.float32), np.arange(len(vectors) + 1))

    def save(self, folder: Path) -> None:
        np.save(folder / "vectors.npy", self.vectors)
        np.save(folder / "starts.npy", self.starts)
        write_json(folder / "pool.json", self.pool)

    @classmethod
    def load(cls, folder: Path) -> "ChunkVectors":
        """Read what `save` wrote into `folder`."""
        vectors = np.load(folder / "vectors.npy")
        starts = np.load(folder / "starts.npy")
        return cls(vectors, starts, read_json(folder / "pool.json"))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def scores(
        self, queries: Vectors, query_rows: Positions, skill_positions: Positions
    ) -> Float32[np.ndarray, " pair"]:
        """Score pairs of a query and a skill in double precision.

        Args:
            queries: Vectors of the queries.
            query_rows: Row in `queries` of each pair's query.
            skill_positions: Position of each pair's skill.
        """
        num_chunks = np.diff(self.starts)[skill_positions]  # [pair]
        chunk_rows = _concatenate_ranges(self.starts[skill_positions], num_chunks)  # [chunk]
        chunk_query_rows = np.repeat(query_rows, num_chunks)  # [chunk]

        cosines = np.empty(len(chunk_rows), dtype=np.float32)
        for start in range(0, len(chunk_rows), _CHUNKS_AT_ONCE):
            block = slice(start, start + _CHUNKS_AT_ONCE)
            products = queries[chunk_query_rows[block]].astype(np.float64)  # [chunk, dim]
            products *= self.vectors[chunk_rows[block]]
            cosines[block] = products.sum(axis=1)
        return pool_chunks(cosines[None], starts_of(num_chunks), self.pool)[0]

    def nearest(self, queries: Vectors, k: int) -> SearchResult:
        """Return the `k` best skills of each query. Ties go to the lower position."""
        k = min(k, self.num_skills)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        positions = np.empty((len(queries), k), np.int64)
        best_scores = np.empty((len(queries), k), np.float32)
        if k == 0:
            return positions, best_scores

        rows = np.arange(len(queries))  # queries to search
        num_spare = _NUM_SPARE
        while len(rows):
            width = min(k + num_spare, self.num_skills)
            selected, scores = self._select(queries[rows], width)  # [row, width]
            positions[rows] = selected[:, :k]
            best_scores[rows] = scores[:, :k]
            if width == self.num_skills:
                break
            worst_selected = scores[:, -1]
            kth_best = scores[:, k - 1]
            may_miss_one = worst_selected >= kth_best - _ROUNDING
            rows = rows[may_miss_one]
            num_spare *= 4
        return positions, best_scores

    def _select(self, queries: Vectors, k: int) -> SearchResult:
        """Find `k` skills in single precision, and order them in double precision."""
        selected = self._search(queries, k)  # [query, k]
        query_rows = np.repeat(np.arange(len(queries)), k)
        scores = self.scores(queries, query_rows, selected.ravel()).reshape(selected.shape)
        order = np.lexsort((selected, -scores), axis=1)
        selected = np.take_along_axis(selected, order, axis=1)
        return selected, np.take_along_axis(scores, order, axis=1)

    def _search(self, queries: Vectors, k: int) -> Int64[np.ndarray, "query k"]:
        """Return the `k` best skills of each query by single-precision products."""
        has_one_chunk_each = len(self.vectors) == self.num_skills
        if has_one_chunk_each:
            import faiss

            skills = np.ascontiguousarray(self.vectors, np.float32)
            metric = faiss.METRIC_INNER_PRODUCT
            if faiss.get_num_gpus() and k <= _MAX_K_ON_GPU:
                resources = faiss.StandardGpuResources()
                return faiss.knn_gpu(resources, queries, skills, k, metric=metric)[1]
            return faiss.knn(queries, skills, k, metric=metric)[1]
        positions = np.empty((len(queries), k), dtype=np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            block = slice(start, start + _QUERIES_AT_ONCE)
            cosines = queries[block] @ self.vectors.T  # [query, chunk]
            scores = pool_chunks(cosines, self.starts, self.pool)  # [query, skill]
            positions[block] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return positions


def _concatenate_ranges(starts: Positions, lengths: Positions) -> Positions:
    """Return the numbers of several ranges, one range after the other.

    Example: starts `[5, 2]` and lengths `[2, 1]` give `[5, 6, 2]`.
    """
    offsets = starts - starts_of(lengths)[:-1]  # [range]
    repeated_offsets = np.repeat(offsets, lengths)  # [number]
    return np.arange(len(repeated_offsets)) + repeated_offsets


def starts_of(
    counts: Sequence[int] | Int64[np.ndarray, " group"],
) -> Int64[np.ndarray, " group_and_end"]:
    """Return the cumulative sums of `counts`, beginning with 0.

    These are the start of each group, and the end of the last one.
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def pool_chunks(
    scores: Float32[np.ndarray, "query chunk"],
    starts: Int64[np.ndarray, " skill_and_end"],
    pool: ChunkPool,
) -> Float32[np.ndarray, "query skill"]:
    """Return the score of each skill from the scores of its chunks.

    Args:
        starts: First chunk of each skill, and the number of chunks.
        pool: `max`: the best chunk; `top2`: the mean of the best two.
    """
    counts = np.diff(starts)
    if (counts == 1).all():
        return scores
    best = np.maximum.reduceat(scores, starts[:-1], axis=1)
    if pool == "max":
        return best

    is_best = scores == np.repeat(best, counts, axis=1)
    num_best = np.add.reduceat(is_best, starts[:-1], axis=1, dtype=np.int64)
    second = np.maximum.reduceat(np.where(is_best, -np.inf, scores), starts[:-1], axis=1)
    equals_best = (num_best > 1) | (counts == 1)
    second = np.where(equals_best, best, second)
    return ((best + second) / 2).astype(np.float32)


class PoolIndex(Protocol):
    """An index that scores the skills of a pool for queries. Skills are given by position."""

    def search(self, queries: Sequence[str], k: int) -> SearchResult:
        """Return the `k` best skills of each query, or all if there are fewer."""
        ...

    def candidate_scores(
        self, queries: Sequence[str], positions: Sequence[Positions]
    ) -> Iterable[np.ndarray]:
        """Yield the scores of each query's candidates."""
        ...


@dataclass(frozen=True)
class PoolRanker:
    """Ranker of a pool, or of candidates in it, by an index."""

    skill_ids: Sequence[str]
    index: PoolIndex

    @cached_property
    def position_by_id(self) -> dict[str, int]:
        """Position of each skill in the pool."""
        return {skill_id: position for position, skill_id in enumerate(self.skill_ids)}

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the `keep` best skills for each query, among all skills or its candidates.

        Ties keep the order of the pool, or of the candidates.
        """
        positions: Iterable[Positions]  # one array per query
        scores: Iterable[np.ndarray]
        texts = [query.text for query in queries]
        if candidates is None:
            positions, scores = self.index.search(texts, keep)
        else:
            positions = [self._positions_of(candidates[query.query_id]) for query in queries]
            scores = self.index.candidate_scores(texts, positions)

        rankings = {}
        for query, query_positions, query_scores in zip(queries, positions, scores, strict=True):
            skill_ids = [self.skill_ids[position] for position in query_positions.tolist()]
            ranking = list(zip(skill_ids, query_scores.tolist(), strict=True))
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

    def _positions_of(self, ranking: Ranking) -> Positions:
        positions = [self.position_by_id[skill_id] for skill_id, _ in ranking]
        return np.array(positions, dtype=np.int64)


@dataclass(frozen=True)
class VectorIndex:
    """Index of the vectors of a pool. `encode` returns the vectors of queries."""

    chunks: ChunkVectors
    encode: Callable[[Sequence[str]], Vectors]

    def search(self, queries: Sequence[str], k: int) -> SearchResult:
        return self.chunks.nearest(self.encode(queries), k)

    def candidate_scores(
        self, queries: Sequence[str], positions: Sequence[Positions]
    ) -> Iterable[np.ndarray]:
        vectors = self.encode(queries)
        for row, candidates in enumerate(positions):
            yield self.chunks.scores(vectors, np.full(len(candidates), row), candidates)

    def best_chunk(self, query: str, position: int) -> int | None:
        """Return the number of the skill's chunk nearest to a query; None if it has only one."""
        first, end = self.chunks.starts[position : position + 2].tolist()
        if end - first < 2:
            return None
        products = self.chunks.vectors[first:end] * self.encode([query])
        return int(products.sum(axis=1).argmax())
