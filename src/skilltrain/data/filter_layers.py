"""Layers of the stage `filter`: each is a class that finds false negatives among mined candidates.

A layer is a plug-in of the kind `filter` (CONTRIBUTING.md).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Float64, Shaped
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from skilltrain.config import Config
from skilltrain.data.near_duplicates import (
    MAX_NAMES,
    MaxNames,
    Positions,
    jaccard,
    numbered,
    read_clusters,
    trigram_sets,
)
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import OneOf
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, open_encoder
from skilltrain.retrieval.nearest import ChunkVectors, starts_of
from skilltrain.terminal import track
from skilltrain.texts import name_key
from skilltrain.workers import WorkersConfig

PAIR = np.dtype([(name, "i4") for name in ("row", "query", "skill", "gold", "rank")])
"""A candidate (its row in the RANKINGS, the places of query and skill, its rank) and a gold skill's place, or -1."""
Pairs = Shaped[np.ndarray, " pair"]
Values = Float64[np.ndarray, " pair"]
_BLOCK = 4096  # pairs whose vectors are multiplied at once


@dataclass
class FilterPool:
    """What layers may ask of skills and queries; each fact is computed when a layer first asks for it.

    `sources` are those of all rows of the RANKINGS.
    """

    skills: Sequence[Skill]
    pairs: Pairs
    sources: Sequence[str]
    query_texts: Sequence[str]
    encoder_source: EncoderSource | None
    clusters_path: Path | None
    workers: WorkersConfig

    @cached_property
    def in_use(self) -> Positions:
        """The skills that are candidates or golds, in the order of the pool: only these are encoded."""
        used = np.unique(np.concatenate([self.pairs["skill"], self.pairs["gold"]]))
        return used[used >= 0].astype(np.int64)

    @cached_property
    def names(self) -> Positions:
        """Equal numbers for names that `name_key` takes for one; -1 for a name of separators only."""
        return numbered(name_key(skill.name) for skill in self.skills)

    @cached_property
    def chunks(self) -> ChunkVectors:
        """Unit vectors of the skills' chunks; skills that no query is concerned with have none."""
        found = self._encoder.encode_chunks([self.skills[place] for place in self.in_use])
        counts = np.zeros(len(self.skills), dtype=np.int64)
        counts[self.in_use] = np.diff(found.starts)
        return replace(found, starts=starts_of(counts))

    def answers(self, queries: Positions, skills: Positions) -> Values:
        """The score of each skill for the query beside it, as retrieval has it."""
        return self.chunks.scores(self._query_vectors, queries, skills).astype(np.float64)

    @cached_property
    def clusters(self) -> Positions:
        """Near-duplicate clusters. Raises SkilltrainError for a skill in use that is in none."""
        assert self.clusters_path is not None  # the settings see to it
        of = read_clusters(
            self.clusters_path, (self.skills[place].skill_id for place in self.in_use)
        )
        return np.array([of.get(skill.skill_id, -1) for skill in self.skills], dtype=np.int64)

    @cached_property
    def _query_vectors(self) -> Float32[np.ndarray, "query dim"]:
        return self._encoder.encode_queries(self.query_texts)

    @cached_property
    def _encoder(self) -> SkillEncoder:
        assert self.encoder_source is not None  # the settings see to it
        return open_encoder(self.encoder_source)


class FilterLayer(Config):
    """Base of a layer: settings, and the check of pairs of a candidate and a gold skill of its query.

    Attributes:
        reason: Meaning of a value in a DROPPED row; may use `{value}` and `{layer.SETTING}`.
        needs: Settings of the stage that the layer cannot do without, `encoder` or `clusters`.
        needs_gold: Whether the layer compares with gold skills. If not, it also gets candidates of
            queries without one, whose `gold` is -1.
    """

    name: Any  # a Literal in each layer
    reason: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    needs_gold: ClassVar[bool] = True

    @abstractmethod
    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Return NaN for each pair to keep, else the value that speaks against the candidate.

        A value depends only on its own pair, never on the other pairs of the call.
        """


Layer = Annotated[SerializeAsAny[FilterLayer], OneOf("filter", tag="name")]
"""A layer as a setting."""


class NameLayer(FilterLayer):
    """Drops a candidate that bears a gold skill's name (SkillRouter, section 4.2, layer 1); the value is 1."""

    name: Literal["name"] = "name"
    reason = "same name as a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        names = pool.names[pairs["skill"]]
        return np.where((names == pool.names[pairs["gold"]]) & (names >= 0), 1.0, np.nan)


class JaccardLayer(FilterLayer):
    """Drops a candidate whose body shares most word trigrams with a gold skill's (layer 2).

    On 26,377 real skills and 1,146 queries plain trigrams (the paper's) dropped 1,020 pairs, most of them siblings of
    a template with another function: of 50 read by eye, 2 had the gold skill's function. Without templates 31 pairs
    are dropped (those of a trained encoder's candidates included), and 23 of them had it.
    """

    name: Literal["jaccard"] = "jaccard"
    above: float = Field(
        default=0.6, ge=0, le=1, description="drop above this Jaccard index of body trigrams"
    )
    max_names: MaxNames = Field(default=5, description=f"{MAX_NAMES} (SkillRouter)")
    reason = "body overlap {value:.3f} > {layer.above:g} with a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Exact; sets whose sizes alone keep them below the threshold are not intersected."""
        trigrams = trigram_sets(pool.skills, self.max_names, pool.workers)
        own, of_gold = trigrams.sizes[pairs["skill"]], trigrams.sizes[pairs["gold"]]
        close = np.flatnonzero(np.minimum(own, of_gold) > self.above * np.maximum(own, of_gold))
        values = np.full(len(pairs), np.nan)
        for place in track(close.tolist(), "comparing bodies", len(close)):
            value = jaccard(trigrams[pairs["gold"][place]], trigrams[pairs["skill"][place]])
            if value > self.above:
                values[place] = value
        return values


class CosineLayer(FilterLayer):
    """Drops a candidate whose vector is all but a gold skill's (layer 3); the encoder is the stage's `encoder`."""

    name: Literal["cosine"] = "cosine"
    above: float = Field(
        default=0.92, ge=-1, le=1, description="drop above this cosine to a gold skill"
    )
    needs = ("encoder",)
    reason = "cosine {value:.3f} > {layer.above:g} to a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """By the vectors of first windows."""
        vectors, first, values = pool.chunks.vectors, pool.chunks.starts, np.empty(len(pairs))
        for start in range(0, len(pairs), _BLOCK):
            part = pairs[start : start + _BLOCK]
            skills, golds = (vectors[first[part[name]]] for name in ("skill", "gold"))
            # No matrix product: its last bits depend on what else is multiplied.
            values[start : start + _BLOCK] = np.einsum("pd,pd->p", skills, golds, optimize=False)
        return np.where(values > self.above, values, np.nan)


class ClusterLayer(FilterLayer):
    """Drops a candidate of a gold skill's near-duplicate cluster, a copy of a copy too; the value is 1.

    The clusters are the stage's `clusters`.
    """

    name: Literal["cluster"] = "cluster"
    needs = ("clusters",)
    reason = "in one near-duplicate cluster with a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        return np.where(pool.clusters[pairs["skill"]] == pool.clusters[pairs["gold"]], 1.0, np.nan)


class CeilingLayer(FilterLayer):
    """Drops a candidate that the encoder finds about as near to the query as a gold skill; the value is its score.

    NV-Retriever (Moreira et al. 2024) calls the relative margin TopK-PercPos (its 95% is a `relative_margin` of .05)
    and the absolute one TopK-MarginPos. Both margins mean what they do in sentence-transformers' mine_hard_negatives:
    of several golds the one with the lowest score counts, for a list takes every gold for a positive. It is as good as
    its scores: read by eye, 1 of 50 pairs dropped by an untrained MiniLM would have answered the query, and 7 of 50
    dropped by the same model after training; the others were hard negatives.
    """

    name: Literal["ceiling"] = "ceiling"
    relative_margin: float | None = Field(
        default=0.05,
        ge=0,
        description="drop above the gold skill's score minus this share of it; null: no such limit",
    )
    absolute_margin: float | None = Field(
        default=None,
        ge=0,
        description="drop above the gold skill's score minus this much; null: no such limit",
    )
    needs = ("encoder",)
    reason = "score {value:.3f} for the query too close to that of a gold skill"

    @model_validator(mode="after")
    def _limits_something(self) -> "CeilingLayer":
        if self.relative_margin is None and self.absolute_margin is None:
            raise ValueError("the layer 'ceiling' needs relative_margin or absolute_margin")
        return self

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        queries = pairs["query"].astype(np.int64)
        golds, which = np.unique(queries * len(pool.skills) + pairs["gold"], return_inverse=True)
        of_golds = pool.answers(*np.divmod(golds, len(pool.skills)))[which]
        least = np.full(len(pool.query_texts), np.inf)
        np.minimum.at(least, queries, of_golds)
        least, scores = least[queries], pool.answers(queries, pairs["skill"].astype(np.int64))
        margin = np.maximum(
            self.absolute_margin or 0.0, (self.relative_margin or 0.0) * np.abs(least)
        )
        return np.where((of_golds == least) & (scores > least - margin), scores, np.nan)


class RankWindowLayer(FilterLayer):
    """Keeps, of each source named, only the candidates of a window of ranks; the value is the rank."""

    name: Literal["rank_window"] = "rank_window"
    ranks: dict[str, tuple[int, int | None]] = Field(
        description="source: [first, last] rank to keep, counted from 1; last null: to the end"
    )
    needs_gold = False
    reason = "rank {value:.0f} outside the window of its source"

    @field_validator("ranks")
    @classmethod
    def _in_order(
        cls, ranks: dict[str, tuple[int, int | None]]
    ) -> dict[str, tuple[int, int | None]]:
        for source, (first, last) in ranks.items():
            if first < 1 or (last is not None and last < first):
                raise ValueError(
                    f"the ranks of '{source}' must be [first, last] with 1 <= first <= last"
                )
        return ranks

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Ranks are the source's own, before any layer. Raises SkilltrainError for a source that ranks nothing here."""
        if unknown := sorted(self.ranks.keys() - {*pool.sources}):
            what, fix = (
                f"no candidate is of source '{unknown[0]}'",
                f"sources: {', '.join(sorted({*pool.sources}))}",
            )
            raise SkilltrainError("unknown-source", what, where="layers.rank_window.ranks", fix=fix)
        sources, outside = (
            np.array(pool.sources, dtype=object)[pairs["row"]],
            np.zeros(len(pairs), dtype=bool),
        )
        for source, (first, last) in self.ranks.items():
            beyond = (pairs["rank"] < first) | (pairs["rank"] > (np.inf if last is None else last))
            outside |= beyond & (sources == source)
        return np.where(outside, pairs["rank"], np.nan)
