"""The grounds on which a candidate is taken for a false negative: one small class a layer; and what layers compare.

`check` says what speaks against each candidate of one query, the same wherever it runs and whatever ran before;
`reason` what a value means, in a DROPPED row. A new layer is a class here and a name in `Layer` (CONTRIBUTING.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Float64, Shaped
from pydantic import Field, field_validator, model_validator

from skilltrain.config import Config
from skilltrain.data.near_duplicates import (
    MAX_NAMES,
    MaxNames,
    Positions,
    TrigramSets,
    jaccard,
    numbered,
    read_clusters,
    trigram_sets,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, encode_chunks, encode_queries, open_encoder
from skilltrain.retrieval.nearest import ChunkVectors, starts_of
from skilltrain.texts import name_key
from skilltrain.workers import WorkersConfig

CANDIDATE = np.dtype([("row", "i8"), ("skill", "i8"), ("rank", "i8"), ("source", "O")])
"""A candidate: its row in the RANKINGS, its place in the pool, its rank in its source."""
Values = Float64[np.ndarray, " candidate"]
"""NaN to keep a candidate, else the value that speaks against it."""


@dataclass(frozen=True)
class Candidates:
    """One query's candidates that are `left`, and those that are its gold skills, whose places in the pool are `golds`.

    `query` is the query's place among all.
    """

    query: int
    golds: Positions
    left: Shaped[np.ndarray, " candidate"]
    ranked_golds: Shaped[np.ndarray, " gold_candidate"]


@dataclass
class FilterPool:
    """What layers may ask of skills and queries; each fact is computed when a layer first asks for it."""

    skills: Sequence[Skill]
    candidates: Sequence[Candidates]
    query_texts: Sequence[str]
    encoder_source: EncoderSource | None
    clusters_path: Path | None
    workers: WorkersConfig
    _trigrams: TrigramSets | None = None

    @cached_property
    def in_use(self) -> Positions:
        """The skills that are candidates or golds, in the order of the pool: only these are encoded."""
        places = [places for one in self.candidates for places in (one.left["skill"], one.golds)]
        return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *places]))

    @cached_property
    def sources(self) -> frozenset[str]:
        """All sources of candidates."""
        return frozenset(source for one in self.candidates for source in one.left["source"])

    @cached_property
    def names(self) -> Positions:
        """Equal numbers for names that `name_key` takes for one; -1 for a name of separators only."""
        return numbered(name_key(skill.name) for skill in self.skills)

    def trigrams(self, max_names: int | None) -> TrigramSets:
        """Body trigrams, as the one layer that compares them wants them."""
        if self._trigrams is None:
            self._trigrams = trigram_sets(self.skills, max_names, self.workers)
        return self._trigrams

    @cached_property
    def chunks(self) -> ChunkVectors:
        """Unit vectors of the skills' chunks; skills that no query is concerned with have none."""
        found = encode_chunks(self._encoder, [self.skills[place] for place in self.in_use])
        counts = np.zeros(len(self.skills), dtype=np.int64)
        counts[self.in_use] = np.diff(found.starts)
        return replace(found, starts=starts_of(counts))

    def vectors(self, skills: Positions) -> Float32[np.ndarray, "skill dim"]:
        """Unit vectors of the first windows of skills in use."""
        return self.chunks.vectors[self.chunks.starts[skills]]

    def answers(self, skills: Positions, query: int) -> Float64[np.ndarray, " skill"]:
        """The score of each of `skills` for a query, as retrieval has it."""
        of_query = self._query_vectors[query : query + 1]
        return self.chunks.scores(of_query, np.zeros(len(skills), np.int64), skills).astype(np.float64)

    @cached_property
    def clusters(self) -> Positions:
        """Near-duplicate clusters. Raises SkilltrainError for a skill in use that is in none."""
        assert self.clusters_path is not None  # the settings see to it
        of = read_clusters(self.clusters_path, (self.skills[place].skill_id for place in self.in_use))
        return np.array([of.get(skill.skill_id, -1) for skill in self.skills], dtype=np.int64)

    @cached_property
    def _query_vectors(self) -> Float32[np.ndarray, "query dim"]:
        return encode_queries(self._encoder, self.query_texts)

    @cached_property
    def _encoder(self) -> SkillEncoder:
        assert self.encoder_source is not None  # the settings see to it
        return open_encoder(self.encoder_source)


Against = Iterator[tuple[int, Values]]
"""A gold skill (-1: none in particular), and what is held against the candidates beside it; the first value counts."""


class NameLayer(Config):
    """Drops a candidate that bears a gold skill's name (SkillRouter, section 4.2, layer 1); the value is 1."""

    name: Literal["name"] = "name"
    reason: ClassVar = "same name as a gold skill"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        names = pool.names[candidates.left["skill"]]
        for gold in candidates.golds.tolist():
            yield gold, np.where((names == pool.names[gold]) & (names >= 0), 1.0, np.nan)


class JaccardLayer(Config):
    """Drops a candidate whose body shares most word trigrams with a gold skill's (layer 2).

    On 26,377 real skills and 1,146 queries plain trigrams (the paper's) dropped 1,020 pairs, most of them siblings of
    a template with another function: of 50 read by eye, 2 had the gold skill's function. Without templates 31 pairs
    are dropped (those of a trained encoder's candidates included), and 23 of them had it.
    """

    name: Literal["jaccard"] = "jaccard"
    above: float = Field(default=0.6, ge=0, le=1, description="drop above this Jaccard index of body trigrams")
    max_names: MaxNames = Field(default=5, description=f"{MAX_NAMES} (SkillRouter)")
    reason: ClassVar = "body overlap {value:.3f} > {layer.above:g} with a gold skill"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Exact; sets whose sizes alone keep them below the threshold are not intersected."""
        trigrams = pool.trigrams(self.max_names)
        skills = candidates.left["skill"]
        sizes = trigrams.starts[skills + 1] - trigrams.starts[skills]
        for gold in candidates.golds.tolist():
            own, values = trigrams[gold], np.full(len(sizes), np.nan)
            close = np.minimum(sizes, len(own)) > self.above * np.maximum(sizes, len(own))
            for place in np.flatnonzero(close):
                value = jaccard(own, trigrams[skills[place]])
                if value > self.above:
                    values[place] = value
            yield gold, values


class CosineLayer(Config):
    """Drops a candidate whose vector is all but a gold skill's (layer 3); the encoder is the stage's `encoder`."""

    name: Literal["cosine"] = "cosine"
    above: float = Field(default=0.92, ge=-1, le=1, description="drop above this cosine to a gold skill")
    reason: ClassVar = "cosine {value:.3f} > {layer.above:g} to a gold skill"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        vectors = pool.vectors(candidates.left["skill"])
        for gold, own in zip(candidates.golds.tolist(), pool.vectors(candidates.golds), strict=True):
            # No matrix product: its last bits depend on what else is multiplied.
            values = np.einsum("sd,d->s", vectors, own, optimize=False).astype(np.float64)
            yield gold, np.where(values > self.above, values, np.nan)


class ClusterLayer(Config):
    """Drops a candidate of a gold skill's near-duplicate cluster, a copy of a copy too; the value is 1.

    The clusters are the stage's `clusters`.
    """

    name: Literal["cluster"] = "cluster"
    reason: ClassVar = "in one near-duplicate cluster with a gold skill"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        clusters = pool.clusters[candidates.left["skill"]]
        for gold in candidates.golds.tolist():
            yield gold, np.where(clusters == pool.clusters[gold], 1.0, np.nan)


class CeilingLayer(Config):
    """Drops a candidate that the encoder finds about as near to the query as a gold skill; the value is its score.

    NV-Retriever (Moreira et al. 2024) calls the relative margin TopK-PercPos (its 95% is a `relative_margin` of .05)
    and the absolute one TopK-MarginPos. Both margins mean what they do in sentence-transformers' mine_hard_negatives:
    of several golds the one with the lowest score counts, for a list takes every gold for a positive. It is as good as
    its scores: read by eye, 1 of 50 pairs dropped by an untrained MiniLM would have answered the query, and 7 of 50
    dropped by the same model after training; the others were hard negatives.
    """

    name: Literal["ceiling"] = "ceiling"
    relative_margin: float | None = Field(
        default=0.05, ge=0, description="drop above the gold skill's score minus this share of it; null: no such limit"
    )
    absolute_margin: float | None = Field(
        default=None, ge=0, description="drop above the gold skill's score minus this much; null: no such limit"
    )
    reason: ClassVar = "score {value:.3f} for the query too close to that of a gold skill"

    @model_validator(mode="after")
    def _limits_something(self) -> "CeilingLayer":
        if self.relative_margin is None and self.absolute_margin is None:
            raise ValueError("the layer 'ceiling' needs relative_margin or absolute_margin")
        return self

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        if len(candidates.golds):
            of_golds = pool.answers(candidates.golds, candidates.query)
            scores, least = pool.answers(candidates.left["skill"], candidates.query), of_golds.min()
            margins = self.absolute_margin, self.relative_margin and self.relative_margin * abs(least)
            limit = least - max(margin for margin in margins if margin is not None)
            yield int(candidates.golds[of_golds.argmin()]), np.where(scores > limit, scores, np.nan)


class RankWindowLayer(Config):
    """Keeps, of each source named, only the candidates of a window of ranks; the value is the rank."""

    name: Literal["rank_window"] = "rank_window"
    ranks: dict[str, tuple[int, int | None]] = Field(
        description="source: [first, last] rank to keep, counted from 1; last null: to the end"
    )
    reason: ClassVar = "rank {value:.0f} outside the window of its source"

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: dict[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
        for source, (first, last) in ranks.items():
            if first < 1 or (last is not None and last < first):
                raise ValueError(f"the ranks of '{source}' must be [first, last] with 1 <= first <= last")
        return ranks

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Ranks are the source's own, before any layer. Raises SkilltrainError for a source that ranks nothing here."""
        if unknown := sorted(self.ranks.keys() - pool.sources):
            fix = f"sources: {', '.join(sorted(pool.sources))}"
            raise SkilltrainError(
                f"no candidate is of source '{unknown[0]}'", where="layers.rank_window.ranks", fix=fix
            )
        for source, (first, last) in self.ranks.items():
            ranks, is_its = candidates.left["rank"], candidates.left["source"] == source
            outside = (ranks < first) | (ranks > (np.inf if last is None else last))
            yield -1, np.where(outside & is_its, ranks, np.nan)


Layer = Annotated[
    NameLayer | JaccardLayer | CosineLayer | ClusterLayer | CeilingLayer | RankWindowLayer, Field(discriminator="name")
]
