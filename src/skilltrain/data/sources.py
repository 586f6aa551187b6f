"""Sources of the stage `mine`: each is a class that ranks hard-negative candidates for one query.

A source is a plug-in of the kind `source` (CONTRIBUTING.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32

from skilltrain.data.near_duplicates import Positions, number_values
from skilltrain.data.sampling import draw
from skilltrain.records import Query, Skill
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import ChunkVectors, SearchResult
from skilltrain.texts import name_key

Ranked = tuple[Positions, Float32[np.ndarray, " candidate"]]
"""Candidates of one query, best first: positions in the pool, and scores."""


@dataclass
class Mining:
    """The data that sources may use. Searches and indexes are computed when a source needs them.

    Attributes:
        positives: Positions in `skills` of each query's positives.
        query_vectors: One unit vector per query.
        chunks: Vectors of the skills.
        depth: Number of candidates that a search returns in addition to the positives.
        lexical_among: Skills that BM25 ranks: the pool, or the semantic candidates of a query.
        seed: Seed of all samples.
    """

    skills: Sequence[Skill]
    queries: Sequence[Query]
    positives: Sequence[Positions]
    query_vectors: Float32[np.ndarray, "query dim"]
    chunks: ChunkVectors
    depth: int
    lexical_among: Literal["pool", "semantic"]
    seed: int

    @cached_property
    def nearest(self) -> SearchResult:
        """The nearest skills of each query by the encoder, positives included."""
        return self.chunks.nearest(self.query_vectors, self._num_searched)

    @cached_property
    def bm25(self) -> BM25Index:
        """The BM25 index of the pool."""
        return BM25Index([bm25_text(skill) for skill in self.skills])

    @cached_property
    def best_by_bm25(self) -> SearchResult:
        """The best skills of each query by BM25, with positives; NaN if no term is shared."""
        positions, scores = self.bm25.search(
            [query.text for query in self.queries], self._num_searched
        )
        return positions, np.where(scores > 0, scores, np.float32(np.nan))

    @property
    def _num_searched(self) -> int:
        """Number of skills to search for: `without_positives` removes the positives again."""
        return self.depth + max(map(len, self.positives))

    @cached_property
    def name_numbers(self) -> Positions:
        """A number per skill, equal for equal `name_key`; -1 for an empty key."""
        return number_values(name_key(skill.name) for skill in self.skills)

    @cached_property
    def category_numbers(self) -> Positions:
        """A number per skill, equal for equal categories; -1 for a skill without a category."""
        return number_values((skill.category or "").strip() for skill in self.skills)

    def has_category_of_positive(self, row: int) -> Bool[np.ndarray, " skill"]:
        """Return a mask of the skills in a category of the positives of the query at `row`."""
        categories = self.category_numbers
        return np.isin(categories, categories[self.positives[row]]) & (categories >= 0)

    def without_positives(self, row: int, results: SearchResult, limit: int) -> Ranked:
        """Return the `limit` best skills of the query at `row`, without its positives.

        Args:
            row: Index of the query.
            results: Positions and scores of a search, best first, with one row per query. Results
                with a NaN score are left out.
            limit: Number of skills.
        """
        positions = results[0][row]
        scores = results[1][row]
        is_candidate = ~np.isin(positions, self.positives[row]) & ~np.isnan(scores)
        return positions[is_candidate][:limit], scores[is_candidate][:limit]

    def sample(self, source: str, row: int, allowed: Positions, limit: int) -> Ranked:
        """Sample skills for the query at `row`, and rank them by their cosine to the query.

        Args:
            source: Name of the source. Each source and query has its own random stream.
            row: Index of the query.
            allowed: Positions of the skills to choose from.
            limit: Number of skills.
        """
        seed = f"{self.seed}/{self.queries[row].query_id}/{source}"
        positions = draw(allowed, limit, seed)
        query_rows = np.full(len(positions), row)
        scores = self.chunks.scores(self.query_vectors, query_rows, positions)
        return best_first(positions, scores)


def best_first(positions: Positions, scores: Float32[np.ndarray, " candidate"]) -> Ranked:
    """Order skills by score; equal scores by position."""
    order = np.lexsort((positions, -scores))
    return positions[order], scores[order]


class NegativeSource(ABC):
    """Base of a source.

    `limit` is the setting `depth` of the stage `mine`. For the source `taxonomy` it is
    `num_taxonomy`, for `random` `num_random`.
    """

    @abstractmethod
    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        """Return at most `limit` distinct candidates, without positives, of the query at `row`.

        Candidates must not depend on the other queries.
        """


class SemanticSource(NegativeSource):
    """The nearest skills by the encoder."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        return mining.without_positives(row, mining.nearest, limit)


class LexicalSource(NegativeSource):
    """The best skills by BM25: of the pool, or of the semantic candidates."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        if mining.lexical_among == "pool":
            return mining.without_positives(row, mining.best_by_bm25, limit)
        positions, _ = mining.without_positives(row, mining.nearest, limit)
        scores = mining.bm25.scores(mining.queries[row].text)[positions]
        shares_term = scores > 0
        return best_first(positions[shares_term], scores[shares_term])


class TaxonomySource(NegativeSource):
    """A sample of the skills with the category of a positive, but not the name of one."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        related = np.flatnonzero(mining.has_category_of_positive(row))
        positive_names = mining.name_numbers[mining.positives[row]]
        allowed = related[~np.isin(mining.name_numbers[related], positive_names)]
        return mining.sample("taxonomy", row, allowed, limit)


class RandomSource(NegativeSource):
    """A sample of the skills that do not have the category of any positive."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        is_unrelated = ~mining.has_category_of_positive(row)
        is_unrelated[mining.positives[row]] = False
        return mining.sample("random", row, np.flatnonzero(is_unrelated), limit)
