"""Layers of the stage `filter`: each is a class that finds false negatives among candidates.

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
    MAX_NAMES_DESCRIPTION,
    MaxNames,
    Positions,
    jaccard,
    number_values,
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
"""A candidate beside one gold skill of its query.

`row` is the candidate's row in RANKINGS, `rank` its rank there. `query`, `skill` and `gold` are the
positions of its query, its skill and the gold skill; `gold` is -1 for a query without gold skill.
"""
Pairs = Shaped[np.ndarray, " pair"]
Values = Float64[np.ndarray, " pair"]
_PAIRS_AT_ONCE = 4096  # pairs whose vectors are multiplied at once


@dataclass
class FilterPool:
    """The data that layers may use. Derived data are computed when a layer first needs them.

    Attributes:
        skills: The pool.
        pairs: All pairs of a candidate and a gold skill.
        sources: Source of each row of RANKINGS.
        query_texts: Text of each query, by the position that pairs have in `query`.
    """

    skills: Sequence[Skill]
    pairs: Pairs
    sources: Sequence[str]
    query_texts: Sequence[str]
    encoder_source: EncoderSource | None
    clusters_path: Path | None
    workers: WorkersConfig

    @cached_property
    def used_skills(self) -> Positions:
        """Positions of the candidates and gold skills, ascending. Only these skills are encoded."""
        used = np.unique(np.concatenate([self.pairs["skill"], self.pairs["gold"]]))
        return used[used >= 0].astype(np.int64)

    @cached_property
    def name_numbers(self) -> Positions:
        """A number per skill, equal for equal `name_key`; -1 for an empty key."""
        return number_values(name_key(skill.name) for skill in self.skills)

    @cached_property
    def chunks(self) -> ChunkVectors:
        """Unit vectors of the skills' chunks. Skills outside `used_skills` have none."""
        chunks = self._encoder.encode_chunks([self.skills[i] for i in self.used_skills])
        # `chunks.starts` counts only the used skills. Layers look up a skill by its position in the
        # pool, so make an entry for each skill of the pool. Unused skills have 0 chunks.
        num_chunks = np.zeros(len(self.skills), dtype=np.int64)  # [skill]
        num_chunks[self.used_skills] = np.diff(chunks.starts)
        return replace(chunks, starts=starts_of(num_chunks))

    def query_scores(self, queries: Positions, skills: Positions) -> Values:
        """Return the retrieval score of each skill for the query at the same index of `queries`."""
        return self.chunks.scores(self._query_vectors, queries, skills).astype(np.float64)

    @cached_property
    def clusters(self) -> Positions:
        """The near-duplicate cluster of each skill; -1 for an unused skill without one.

        Raises:
            SkilltrainError: A used skill is in no cluster.
        """
        assert self.clusters_path is not None, "checked by Filter"
        # `read_clusters` raises an error if a used skill is in no cluster.
        used_ids = [self.skills[i].skill_id for i in self.used_skills]
        cluster_of = read_clusters(self.clusters_path, used_ids)
        clusters = [cluster_of.get(skill.skill_id, -1) for skill in self.skills]
        return np.array(clusters, dtype=np.int64)

    @cached_property
    def _query_vectors(self) -> Float32[np.ndarray, "query dim"]:
        return self._encoder.encode_queries(self.query_texts)

    @cached_property
    def _encoder(self) -> SkillEncoder:
        assert self.encoder_source is not None, "checked by Filter"
        return open_encoder(self.encoder_source)


class FilterLayer(Config):
    """Base of a layer: its settings, and a check of candidates against gold skills.

    Attributes:
        reason: Meaning of a value in a DROPPED row; may use `{value}` and `{layer.SETTING}`.
        needs: Settings of the stage that the layer requires: `encoder`, `clusters` or both.
        needs_gold: Whether the layer compares with gold skills. If not, it also gets candidates of
            queries without gold skill; their `gold` is -1.
    """

    name: Any  # a Literal in each layer
    reason: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    needs_gold: ClassVar[bool] = True

    @abstractmethod
    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Return one value per pair: NaN to keep the candidate, else the reason's value.

        A value depends only on its own pair, never on the other pairs of the call.
        """


Layer = Annotated[SerializeAsAny[FilterLayer], OneOf("filter", tag="name")]
"""A layer as a setting."""


class NameLayer(FilterLayer):
    """Drops a candidate with the name of a gold skill (SkillRouter, section 4.2, layer 1).

    The value is 1.
    """

    name: Literal["name"] = "name"
    reason = "same name as a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        names = pool.name_numbers[pairs["skill"]]
        has_gold_name = (names == pool.name_numbers[pairs["gold"]]) & (names >= 0)  # [pair]
        return np.where(has_gold_name, 1.0, np.nan)


class JaccardLayer(FilterLayer):
    """Drops a candidate whose body shares most word trigrams with a gold skill's (layer 2).

    Measured on 26,377 real skills and 1,146 queries: plain trigrams, as in the paper, dropped 1,020
    pairs. Most were skills of one template with different functions: of 50 pairs read by a person,
    2 had the same function. Without the trigrams of templates, 31 pairs were dropped, candidates
    of a trained encoder included, and 23 of these had the same function.
    """

    name: Literal["jaccard"] = "jaccard"
    above: float = Field(
        default=0.6, ge=0, le=1, description="drop above this Jaccard index of body trigrams"
    )
    max_names: MaxNames = Field(default=5, description=f"{MAX_NAMES_DESCRIPTION} (SkillRouter)")
    reason = "body overlap {value:.3f} > {layer.above:g} with a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Compare the bodies of each candidate and its gold skill.

        Returns:
            The Jaccard index of each pair above the threshold; NaN for all other pairs.
        """
        trigrams = trigram_sets(pool.skills, self.max_names, pool.workers)
        candidates = pairs["skill"]  # [pair]
        golds = pairs["gold"]  # [pair]

        # Compare only pairs whose sets have similar sizes. The Jaccard index is at most the size of
        # the smaller set, divided by that of the larger set.
        candidate_sizes = trigrams.sizes[candidates]  # [pair], numbers of trigrams
        gold_sizes = trigrams.sizes[golds]  # [pair]
        smaller = np.minimum(candidate_sizes, gold_sizes)
        larger = np.maximum(candidate_sizes, gold_sizes)
        possible = np.flatnonzero(smaller > self.above * larger)  # positions of pairs

        values = np.full(len(pairs), np.nan)
        for position in track(possible.tolist(), "comparing bodies", len(possible)):
            value = jaccard(trigrams[golds[position]], trigrams[candidates[position]])
            if value > self.above:
                values[position] = value
        return values


class CosineLayer(FilterLayer):
    """Drops a candidate whose vector is nearly that of a gold skill (layer 3).

    The vectors are those of the stage's `encoder`.
    """

    name: Literal["cosine"] = "cosine"
    above: float = Field(
        default=0.92, ge=-1, le=1, description="drop above this cosine to a gold skill"
    )
    needs = ("encoder",)
    reason = "cosine {value:.3f} > {layer.above:g} to a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Compare the vectors of the first chunks of each candidate and its gold skill.

        Returns:
            The cosine of each pair above the threshold; NaN for all other pairs.
        """
        vectors = pool.chunks.vectors  # [chunk, dim]
        first_chunks = pool.chunks.starts  # [skill], position of its first chunk in `vectors`
        cosines = np.empty(len(pairs))  # [pair]
        for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
            block = pairs[begin : begin + _PAIRS_AT_ONCE]
            candidates = vectors[first_chunks[block["skill"]]]  # [pair, dim]
            golds = vectors[first_chunks[block["gold"]]]  # [pair, dim]
            # Multiply pair by pair. The last bits of a matrix product would depend on the other
            # pairs of the block.
            products = np.einsum("pd,pd->p", candidates, golds, optimize=False)  # [pair]
            cosines[begin : begin + len(block)] = products
        return np.where(cosines > self.above, cosines, np.nan)


class ClusterLayer(FilterLayer):
    """Drops a candidate in the near-duplicate cluster of a gold skill, so also a copy of a copy.

    The clusters are the stage's `clusters`. The value is 1.
    """

    name: Literal["cluster"] = "cluster"
    needs = ("clusters",)
    reason = "in one near-duplicate cluster with a gold skill"

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        is_same_cluster = pool.clusters[pairs["skill"]] == pool.clusters[pairs["gold"]]
        return np.where(is_same_cluster, 1.0, np.nan)


class CeilingLayer(FilterLayer):
    """Drops a candidate that scores about as high for the query as a gold skill.

    The value is the candidate's score. NV-Retriever (Moreira et al. 2024) calls the relative margin
    TopK-PercPos (its 95% is a `relative_margin` of .05) and the absolute one TopK-MarginPos. Both
    margins work as in `mine_hard_negatives` of sentence-transformers. Of several gold skills
    the one with the lowest score is compared, because each gold skill of a list is a positive.

    The layer is as good as the scores. Of 50 dropped pairs read by a person, 1 candidate answered
    the query with an untrained MiniLM and 7 with the same model after training. The others were
    hard negatives.
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
    def _check_margins(self) -> "CeilingLayer":
        if self.relative_margin is None and self.absolute_margin is None:
            raise ValueError("the layer 'ceiling' needs relative_margin or absolute_margin")
        return self

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Compare each candidate's score with that of the query's lowest-scored gold skill.

        Returns:
            For each pair, the candidate's score or NaN. Only a candidate that scores too high has
            its score here, at its pair with the query's lowest-scored gold skill.
        """
        num_skills = len(pool.skills)
        queries = pairs["query"].astype(np.int64)  # [pair]
        candidates = pairs["skill"].astype(np.int64)  # [pair]

        # Many pairs have the same query and gold skill, which are scored only once. One code stands
        # for a query and a gold skill.
        codes = queries * num_skills + pairs["gold"]  # [pair]
        distinct_codes, code_positions = np.unique(codes, return_inverse=True)
        distinct_scores = pool.query_scores(
            distinct_codes // num_skills, distinct_codes % num_skills
        )
        gold_scores = distinct_scores[code_positions]  # [pair]

        # Find the lowest score of a query's gold skills.
        lowest_by_query = np.full(len(pool.query_texts), np.inf)
        np.minimum.at(lowest_by_query, queries, gold_scores)
        lowest = lowest_by_query[queries]  # [pair]

        # A candidate's score must be below `lowest` by the larger of the two margins.
        scores = pool.query_scores(queries, candidates)  # [pair]
        relative_margins = (self.relative_margin or 0.0) * np.abs(lowest)  # [pair]
        margins = np.maximum(self.absolute_margin or 0.0, relative_margins)
        is_too_high = scores > lowest - margins

        # A candidate has one pair for each gold skill. Report only the pair with the lowest-scored
        # gold skill.
        is_reported = is_too_high & (gold_scores == lowest)
        return np.where(is_reported, scores, np.nan)


RankWindows = dict[str, tuple[int, int | None]]
"""First and last rank by source. A last rank of None means no limit."""


class RankWindowLayer(FilterLayer):
    """Drops the candidates of a source outside a window of ranks; the value is the rank."""

    name: Literal["rank_window"] = "rank_window"
    ranks: RankWindows = Field(
        description="source: [first, last] rank to keep, counted from 1; last null: to the end"
    )
    needs_gold = False
    reason = "rank {value:.0f} outside the window of its source"

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: RankWindows) -> RankWindows:
        """Check that each window of ranks holds at least one rank."""
        for source, (first, last) in ranks.items():
            if first < 1 or (last is not None and last < first):
                raise ValueError(
                    f"the ranks of '{source}' must be [first, last] with 1 <= first <= last"
                )
        return ranks

    def check(self, pool: FilterPool, pairs: Pairs) -> Values:
        """Find the candidates whose rank is outside the window of their source.

        Returns:
            The rank of each candidate outside its window; NaN for all other candidates.

        Raises:
            SkilltrainError: A source of `ranks` has no candidate.
        """
        # The setting must name sources that occur.
        present = set(pool.sources)
        unknown = sorted(self.ranks.keys() - present)
        if unknown:
            problem = f"no candidate is of source '{unknown[0]}'"
            fix = f"sources: {', '.join(sorted(present))}"
            raise SkilltrainError(
                "unknown-source", problem, where="layers.rank_window.ranks", fix=fix
            )

        # Compare the ranks in RANKINGS. Candidates that earlier layers dropped are counted too.
        sources = np.array(pool.sources, dtype=object)[pairs["row"]]  # [pair]
        ranks = pairs["rank"]  # [pair]
        is_outside = np.zeros(len(pairs), dtype=bool)
        for source, (first, last) in self.ranks.items():
            is_beyond = ranks < first  # [pair]
            if last is not None:
                is_beyond |= ranks > last
            is_outside |= is_beyond & (sources == source)
        return np.where(is_outside, ranks, np.nan)
