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

from skilltrain.data.near_duplicates import Positions, numbered
from skilltrain.data.sampling import draw
from skilltrain.records import Query, Skill
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import ChunkVectors, Found
from skilltrain.texts import name_key

Ranked = tuple[Positions, Float32[np.ndarray, " candidate"]]
"""Positions in the pool and their scores, best first."""


@dataclass
class Mining:
    """What sources may use. Searches and indexes are computed when a source first needs them.

    Attributes:
        positives: Positions of each query's positives in `skills`.
        query_vectors: One unit vector per query.
        chunks: Vectors of the skills.
        depth: Number of candidates that a search returns beside the positives.
        lexical_among: What BM25 ranks: the pool, or the semantic candidates of a query.
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
    def nearest(self) -> Found:
        """The nearest skills of each query by the encoder, positives included."""
        return self.chunks.nearest(self.query_vectors, self._num_searched)

    @cached_property
    def bm25(self) -> BM25Index:
        """The BM25 index of the pool."""
        return BM25Index([bm25_text(skill) for skill in self.skills])

    @cached_property
    def best_by_bm25(self) -> Found:
        """The best skills of each query by BM25, positives included; NaN where no term is shared."""
        positions, scores = self.bm25.search(
            [query.text for query in self.queries], self._num_searched
        )
        return positions, np.where(scores > 0, scores, np.float32(np.nan))

    @property
    def _num_searched(self) -> int:
        return self.depth + max(map(len, self.positives))

    @cached_property
    def names(self) -> Positions:
        """Equal numbers for equal names (`name_key`); -1 for a name of separators only."""
        return numbered(name_key(skill.name) for skill in self.skills)

    @cached_property
    def categories(self) -> Positions:
        """Equal numbers for equal categories; -1 for a skill without one."""
        return numbered((skill.category or "").strip() for skill in self.skills)

    def has_category_of_positive(self, row: int) -> Bool[np.ndarray, " skill"]:
        """Return which skills share a category with a positive of the query."""
        categories = self.categories
        return np.isin(categories, categories[self.positives[row]]) & (categories >= 0)

    def without_positives(self, row: int, found: Found, limit: int) -> Ranked:
        """Return the best skills of the query that have a score and are no positives."""
        positions = found[0][row]
        scores = found[1][row]
        is_candidate = ~np.isin(positions, self.positives[row]) & ~np.isnan(scores)
        return positions[is_candidate][:limit], scores[is_candidate][:limit]

    def sample(self, source: str, row: int, allowed: Positions, limit: int) -> Ranked:
        """Sample skills for the query, and rank them by cosine. Each source has its own stream."""
        key = f"{self.seed}/{self.queries[row].query_id}/{source}"
        positions = draw(allowed, limit, key)
        vector = self.query_vectors[row : row + 1]
        scores = self.chunks.scores(vector, np.zeros(len(positions), np.int64), positions)
        return best_first(positions, scores)


def best_first(positions: Positions, scores: Float32[np.ndarray, " candidate"]) -> Ranked:
    """Order skills by score; equal scores by position."""
    order = np.lexsort((positions, -scores))
    return positions[order], scores[order]


class NegativeSource(ABC):
    """Base of a source. `limit` is the setting `depth` of the stage, for taxonomy and random another."""

    @abstractmethod
    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        """Return at most `limit` distinct candidates of the query in this row, no positives.

        They do not depend on the other queries.
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
        return best_first(positions[scores > 0], scores[scores > 0])


class TaxonomySource(NegativeSource):
    """A sample of the skills that share a category with a positive, and a name with none."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        related = np.flatnonzero(mining.has_category_of_positive(row))
        positive_names = mining.names[mining.positives[row]]
        allowed = related[~np.isin(mining.names[related], positive_names)]
        return mining.sample("taxonomy", row, allowed, limit)


class RandomSource(NegativeSource):
    """A sample of the skills that share a category with no positive."""

    def find(self, mining: Mining, row: int, limit: int) -> Ranked:
        is_unrelated = ~mining.has_category_of_positive(row)
        is_unrelated[mining.positives[row]] = False
        return mining.sample("random", row, np.flatnonzero(is_unrelated), limit)
