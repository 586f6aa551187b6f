"""Reranking: a reranker orders the candidates of each query."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.micro_batches import run_micro_batches
from skilltrain.models.pairs import PairIds
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.retrieval.rankers import RankerConfig
from skilltrain.terminal import track

_MAX_REMEMBERED = 10_000  # queries whose scores are kept in memory
TextKey = bytes
"""Token ids of a skill in a pair. Skills with the same text have the same key."""


class RerankConfig(RerankerConfig, RankerConfig):
    """A reranker that orders the candidates of the ranker before it."""

    kind: Literal["rerank"] = "rerank"
    precision: Precision = Field(
        default="auto", description="auto: bfloat16 where the hardware has it"
    )
    token_budget: int = Field(
        default=4096, ge=64, description="tokens per micro-batch, padding included"
    )
    keep: int = Field(
        default=20, ge=1, description="candidates that it orders; the others stay behind these"
    )
    first_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the previous ranker's score, which is added; SkillRouter: 0",
    )

    only_orders = True
    can_be_interleaved = False
    key_settings: ClassVar[Mapping[str, Any]] = {"keep": 1, "first_weight": 0.0}

    @property
    def num_read(self) -> int:
        return self.keep

    def check(self) -> None:
        stored_settings(resolve_model(self.source, weights=False), "reranker")

    def open(self, opened: dict[str, Any]) -> "Rerank":
        """Open the reranker. Systems with different `first_weight` share it."""
        reranker = load_reranker(self, default_device())
        pack_linear_layers(reranker.network.base_model, self.token_budget)
        return Rerank(reranker, {}, self.token_budget)

    def ranker(self, skills: Sequence[Skill], opened: dict[str, Any]) -> "Rerank":
        ranker: Any = super().ranker(skills, opened)
        return replace(ranker, first_weight=self.first_weight) if self.first_weight else ranker


@dataclass(frozen=True)
class QueryPairs:
    """Pairs of one query with its candidates.

    Attributes:
        key_by_skill: Key of each candidate by skill id.
        score_by_key: Scores of the query's pairs. Those of new pairs are added.
        new_keys: Keys without a score, each once.
    """

    key_by_skill: Mapping[str, TextKey]
    score_by_key: dict[TextKey, float]
    new_keys: Sequence[TextKey]


@dataclass(frozen=True)
class Rerank:
    """A reranker over a pool. It remembers its scores, so systems that share it score a pair once.

    Skills with the same text share one score, so their order does not depend on the processor.

    Attributes:
        reranker: The model.
        skills: The pool.
        token_budget: Padded tokens per micro-batch.
        first_weight: Weight of the previous ranker's score, which is added.
        forward: Scores lists of pairs with a model in training, and yields the scores of each list.
            None for another model.
    """

    reranker: Reranker
    skills: Mapping[str, Skill]
    token_budget: int
    first_weight: float = 0.0
    forward: Callable[[Iterable[list[PairIds]]], Iterable[list[float]]] | None = None
    _scores: dict[Query, dict[TextKey, float]] = field(default_factory=dict)
    _keys: dict[str, TextKey] = field(default_factory=dict)  # by skill id

    def over(self, skills: Mapping[str, Skill]) -> "Rerank":
        return replace(self, skills=skills, _scores={}, _keys={})

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Order the first `keep` candidates of each query. The others follow in their order.

        Args:
            queries: Queries with distinct ids.
            candidates: Ranking of the previous ranker by query id. A reranker cannot search the
                pool.
            keep: Number of candidates to score for each query.
        """
        assert candidates is not None, "a reranker needs candidates"
        # Scores are remembered for each query. Forget them all before they take too much memory.
        if len(self._scores) >= _MAX_REMEMBERED:
            self._scores.clear()

        pairs_by_query: list[QueryPairs] = []
        for query in track(queries, "tokenizing", len(queries)):
            skill_ids = [skill_id for skill_id, _ in candidates[query.query_id][:keep]]
            # This finds the scores that are remembered in `self._scores`.
            pairs_by_query.append(self._pairs(query, skill_ids))

        # Both maps are lazy: the loop below makes and scores the pairs, query by query.
        pair_lists = map(self._pair_ids, queries, pairs_by_query)
        if self.forward is not None:  # the model is in training
            score_lists = self.forward(pair_lists)
        else:
            score_lists = map(self._score, pair_lists)

        rankings = {}
        progress = track(queries, "reranking", len(queries))
        for query, pairs, new_scores in zip(progress, pairs_by_query, score_lists, strict=True):
            # `score_by_key` is a dict of `self._scores`, so this also remembers the new scores.
            pairs.score_by_key.update(zip(pairs.new_keys, new_scores, strict=True))
            # Skills with the same text have the same key, and so the same score.
            score_by_skill: dict[str, float] = {}
            for skill_id, key in pairs.key_by_skill.items():
                score_by_skill[skill_id] = pairs.score_by_key[key]
            ranking = candidates[query.query_id]
            rankings[query.query_id] = reorder(ranking, keep, score_by_skill, self.first_weight)
        return rankings

    def _pairs(self, query: Query, skill_ids: Sequence[str]) -> QueryPairs:
        """Pair a query with its candidates, and look up the scores that are known.

        Args:
            query: The query.
            skill_ids: Ids of the candidates.
        """
        key_by_skill = self._tokenize(skill_ids)
        # dict.fromkeys removes repeated keys and keeps the order.
        distinct_keys = dict.fromkeys(key_by_skill.values())
        # Another thread may clear `_scores` later, but not this dict of the query's scores.
        score_by_key = self._scores.setdefault(query, {})
        new_keys = [key for key in distinct_keys if key not in score_by_key]
        return QueryPairs(key_by_skill, score_by_key, new_keys)

    def _pair_ids(self, query: Query, pairs: QueryPairs) -> list[PairIds]:
        """Return the token ids of the query's new pairs."""
        tokenizer = self.reranker.pair_tokenizer
        # A query without new pairs need not be tokenized.
        query_ids = tokenizer.query_ids(query.text) if pairs.new_keys else ()
        # A key holds the token ids of a skill as bytes.
        return [tokenizer.join(query_ids, np.frombuffer(key, np.int32)) for key in pairs.new_keys]

    @torch.inference_mode()
    def _score(self, pairs: list[PairIds]) -> list[float]:
        if not pairs:
            return []
        groups = self.reranker.micro_batches([pairs], self.token_budget)
        return run_micro_batches(self.reranker, pairs, groups).tolist()

    def _tokenize(self, skill_ids: Sequence[str]) -> dict[str, TextKey]:
        """Return the key of each skill.

        The key is the bytes of the skill's token ids. Keys of earlier queries are remembered.
        """
        new_ids = [skill_id for skill_id in skill_ids if skill_id not in self._keys]
        new_skills = [self.skills[skill_id] for skill_id in new_ids]
        token_ids = self.reranker.pair_tokenizer.skill_ids(new_skills)
        for skill_id, ids in zip(new_ids, token_ids, strict=True):
            self._keys[skill_id] = np.array(ids, np.int32).tobytes()
        return {skill_id: self._keys[skill_id] for skill_id in skill_ids}


def reorder(
    ranking: Ranking, keep: int, scores: Mapping[str, float], previous_weight: float
) -> Ranking:
    """Sort the first `keep` skills of a ranking by score, and append the others in their order.

    Args:
        ranking: Ranking of the previous ranker.
        keep: Number of skills to sort. Ties keep their order.
        scores: Score of each of these skills, by its id.
        previous_weight: Weight with which the previous ranker's score is added to the new score.
            Adding it helps if the reranker learned from few examples, because both rankers err on
            different queries.

    Returns:
        The new ranking. Appended skills get scores without meaning, below those of sorted skills.
    """
    rescored: Ranking = []
    for skill_id, previous_score in ranking[:keep]:
        rescored.append((skill_id, scores[skill_id] + previous_weight * previous_score))
    reranked = sorted(rescored, key=lambda pair: -pair[1])
    # Each appended skill gets 1 less than the skill before it, below the lowest score.
    lowest = reranked[-1][1] if reranked else 0.0
    for distance, (skill_id, _) in enumerate(ranking[keep:], 1):
        reranked.append((skill_id, lowest - distance))
    return reranked
