"""Exact nearest-skill search by inner product (faiss)."""

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
_MIN_QUERIES_ON_GPU = 64  # a search for fewer takes less time than copying the pool to a GPU


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

        A skill has one or more chunks (parts of its text), each with a vector. The score is made
        from the cosines of the query with these chunks.

        The cosine of each chunk is a sum of its own, not part of a matrix product, whose rounding
        errors depend on the position in the matrix. So equal skills have equal scores on every
        processor.

        Args:
            queries: Unit vectors of the queries: [query, dim].
            query_rows: For each pair, the row of its query in `queries`.
            skill_positions: For each pair, the position of its skill in the pool.
        """
        # `self.starts` holds the first chunk of each skill. List the chunks of all pairs, pair
        # after pair. For example, two pairs have skills with 2 chunks and 1 chunk. Then
        # `num_chunks` is [2, 1], `pair_starts` is [0, 2, 3], `pair_of_chunk` is [0, 0, 1], and
        # `numbers_in_pair` is [0, 1, 0].
        num_chunks = np.diff(self.starts)[skill_positions]  # [pair]
        pair_starts = starts_of(num_chunks)  # [pair and end]
        pair_of_chunk = np.repeat(np.arange(len(skill_positions)), num_chunks)  # [listed chunk]

        # The row in `self.vectors` of each listed chunk: the row of its skill's first chunk, plus
        # the number of the chunk in its pair.
        numbers_in_pair = np.arange(len(pair_of_chunk)) - pair_starts[pair_of_chunk]
        first_chunks = self.starts[skill_positions]  # [pair]
        vector_rows = first_chunks[pair_of_chunk] + numbers_in_pair  # [listed chunk]

        # Compute the cosines block by block, because the products of all chunks take much memory.
        cosines = np.empty(len(vector_rows), dtype=np.float32)
        for start in range(0, len(vector_rows), _CHUNKS_AT_ONCE):
            block = slice(start, start + _CHUNKS_AT_ONCE)
            products = queries[query_rows[pair_of_chunk[block]]].astype(np.float64)  # [chunk, dim]
            products *= self.vectors[vector_rows[block]]
            cosines[block] = products.sum(axis=1)
        pooling = self.pool  # how the scores of chunks become the score of a skill
        # pool_chunks wants a row per query. Here a single row holds all pairs.
        return pool_chunks(cosines[None], pair_starts, pooling)[0]

    def nearest(self, queries: Vectors, k: int) -> SearchResult:
        """Return the `k` best skills of each query. Ties go to the lower position.

        A single-precision search selects more than k skills, and the method `scores` orders them in
        double precision. Rounding in the search depends on the processor and on the other queries.
        So if the worst selected skill is nearly as good as the k-th, the search is repeated with
        more skills.
        """
        k = min(k, self.num_skills)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        positions = np.empty((len(queries), k), np.int64)
        best_scores = np.empty((len(queries), k), np.float32)
        if k == 0:
            return positions, best_scores

        unsure = np.arange(len(queries))  # rows of queries that are still to be searched
        num_spare = _NUM_SPARE
        while len(unsure):
            width = min(k + num_spare, self.num_skills)
            selected = self._search(queries[unsure], width)  # [unsure query, width]
            rows = np.repeat(unsure, width)
            exact = self.scores(queries, rows, selected.ravel()).reshape(selected.shape)
            # Sort by score, high scores first, and equal scores by position.
            order = np.lexsort((selected, -exact), axis=1)[:, :k]
            positions[unsure] = np.take_along_axis(selected, order, axis=1)
            best_scores[unsure] = np.take_along_axis(exact, order, axis=1)

            if width == self.num_skills:  # the search selected all skills
                break
            # The search ranked the skills that it did not select below the worst selected one. Only
            # if that one is nearly as good as the k-th, rounding may have hidden a better skill.
            worst_selected = exact.min(axis=1)  # [unsure query]
            kth_best = best_scores[unsure, -1]  # [unsure query]
            may_miss_one = worst_selected >= kth_best - _ROUNDING
            unsure = unsure[may_miss_one]
            num_spare *= 4
        return positions, best_scores

    def _search(self, queries: Vectors, k: int) -> Int64[np.ndarray, "query k"]:
        """Return the positions of the `k` best skills by single-precision products.

        If every skill has one chunk, faiss does the search, on a GPU if there are many queries. If
        a skill has several chunks, numpy computes the scores of all chunks. The score of a skill is
        then computed from the scores of its chunks.

        Args:
            queries: Vectors of the queries: [query, dim].
            k: Number of skills to return for each query.
        """
        has_one_chunk_each = len(self.vectors) == self.num_skills
        if has_one_chunk_each:
            import faiss

            skills = np.ascontiguousarray(self.vectors, np.float32)
            metric = faiss.METRIC_INNER_PRODUCT
            # For few queries, copying the pool to a GPU takes longer than a search on the CPU. A
            # search on a GPU also has a limit for k.
            is_worth_copying = len(queries) >= _MIN_QUERIES_ON_GPU and k <= _MAX_K_ON_GPU
            # The package faiss-cpu always reports 0 GPUs. Only faiss-gpu can report more.
            if is_worth_copying and faiss.get_num_gpus():
                resources = faiss.StandardGpuResources()
                # faiss returns scores and positions. Only the positions are needed.
                return faiss.knn_gpu(resources, queries, skills, k, metric=metric)[1]
            return faiss.knn(queries, skills, k, metric=metric)[1]

        pooling = self.pool  # how the scores of chunks become the score of a skill
        positions = np.empty((len(queries), k), dtype=np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            block = slice(start, start + _QUERIES_AT_ONCE)
            # Products of the queries with all chunks, and from them the scores: [query, skill].
            scores = pool_chunks(queries[block] @ self.vectors.T, self.starts, pooling)
            positions[block] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return positions


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

    A long skill is divided into chunks, each with a vector. For example, two skills with 2 chunks
    and 1 chunk have `starts` [0, 2, 3]. From the scores [0.2, 0.6, 0.5], `max` gives [0.6, 0.5],
    and `top2` gives [0.4, 0.5].

    Args:
        scores: Score of each chunk, the chunks of a skill one after another.
        starts: First chunk of each skill, and the number of chunks. A skill has at least one.
        pool: `max` takes the best chunk, `top2` the mean of the best two. A skill with one chunk
            has the score of this chunk.
    """
    counts = np.diff(starts)  # [skill]; number of chunks
    if (counts == 1).all():
        return scores
    # reduceat takes the maximum of each skill's columns.
    best = np.maximum.reduceat(scores, starts[:-1], axis=1)  # [query, skill]
    if pool == "max":
        return best

    # Find the second best score: the maximum without the best chunks. If several chunks have the
    # best score, or the skill has one chunk, the best score is the second best as well.
    is_best = scores == np.repeat(best, counts, axis=1)  # [query, chunk]
    # Best chunks of each skill: [query, skill].
    num_best = np.add.reduceat(is_best, starts[:-1], axis=1, dtype=np.int64)
    second = np.maximum.reduceat(np.where(is_best, -np.inf, scores), starts[:-1], axis=1)
    second = np.where((num_best > 1) | (counts == 1), best, second)
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
        """Return the `keep` best skills for each query, among all skills or the query's candidates.

        Skills with equal scores keep the order of the pool, or of the candidates.

        Args:
            queries: Queries to rank skills for.
            candidates: Candidates by query id, from an earlier ranker; None to search all skills.
            keep: Number of skills of each ranking.

        Returns:
            Ranking by query id: pairs of a skill id and its score, best first.
        """
        # For each query, the positions of skills in the pool, and their scores: [skill] each.
        positions: Iterable[Positions]
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
            # The sort is stable. The minus puts high scores first without reversing ties.
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
        """Return the number of the skill's chunk nearest to a query; None for a single chunk.

        Args:
            query: The query.
            position: Position of the skill in the pool.
        """
        # The chunks of all skills follow each other, so the next skill's first chunk is the end.
        first, end = self.chunks.starts[position : position + 2].tolist()
        if end - first < 2:
            return None
        products = self.chunks.vectors[first:end] * self.encode([query])
        return int(products.sum(axis=1).argmax())
