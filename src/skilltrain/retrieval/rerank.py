"""Reranking: a reranker orders the candidates of each query.

Notes:
    - Pairs are made and scored lazily, query by query.
    - Another thread may clear the scores of all queries, but not the dict of a query in use.
    - Adding the previous ranker's score helps if the reranker learned from few examples, because
      both rankers err on different queries.
"""

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
        score_by_key: Scores of the query's pairs, a dict of `Rerank`. New scores are added to it.
        new_keys: Keys without a score, each once.
    """

    key_by_skill: Mapping[str, TextKey]
    score_by_key: dict[TextKey, float]
    new_keys: Sequence[TextKey]

    def scores(self) -> dict[str, float]:
        """Return the score of each candidate by skill id."""
        return {skill_id: self.score_by_key[key] for skill_id, key in self.key_by_skill.items()}


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
        """Order the first `keep` candidates of each query. The others follow in their order."""
        assert candidates is not None, "a reranker needs candidates"
        if len(self._scores) >= _MAX_REMEMBERED:
            self._scores.clear()

        pairs_by_query = []
        for query in track(queries, "tokenizing", len(queries)):
            skill_ids = [skill_id for skill_id, _ in candidates[query.query_id][:keep]]
            pairs_by_query.append(self._pairs(query, skill_ids))
        pair_lists = map(self._pair_ids, queries, pairs_by_query)
        score_lists = self.forward(pair_lists) if self.forward else map(self._score, pair_lists)

        rankings = {}
        progress = track(queries, "reranking", len(queries))
        for query, pairs, new_scores in zip(progress, pairs_by_query, score_lists, strict=True):
            pairs.score_by_key.update(zip(pairs.new_keys, new_scores, strict=True))
            ranking = candidates[query.query_id]
            rankings[query.query_id] = reorder(ranking, keep, pairs.scores(), self.first_weight)
        return rankings

    def _pairs(self, query: Query, skill_ids: Sequence[str]) -> QueryPairs:
        """Pair a query with its candidates, and look up the scores that are known."""
        key_by_skill = self._tokenize(skill_ids)
        distinct_keys = dict.fromkeys(key_by_skill.values())
        score_by_key = self._scores.setdefault(query, {})
        new_keys = [key for key in distinct_keys if key not in score_by_key]
        return QueryPairs(key_by_skill, score_by_key, new_keys)

    def _pair_ids(self, query: Query, pairs: QueryPairs) -> list[PairIds]:
        """Return the token ids of the query's new pairs."""
        tokenizer = self.reranker.pair_tokenizer
        query_ids = tokenizer.query_ids(query.text) if pairs.new_keys else ()
        return [tokenizer.join(query_ids, np.frombuffer(key, np.int32)) for key in pairs.new_keys]

    @torch.inference_mode()
    def _score(self, pairs: list[PairIds]) -> list[float]:
        if not pairs:
            return []
        groups = self.reranker.micro_batches([pairs], self.token_budget)
        return run_micro_batches(self.reranker, pairs, groups).tolist()

    def _tokenize(self, skill_ids: Sequence[str]) -> dict[str, TextKey]:
        """Return the key of each skill."""
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
        keep: Number of skills to sort.
        scores: New scores by skill id.
        previous_weight: Weight of the previous score.
    """
    rescored: Ranking = []
    for skill_id, previous_score in ranking[:keep]:
        rescored.append((skill_id, scores[skill_id] + previous_weight * previous_score))
    reranked = sorted(rescored, key=lambda pair: -pair[1])
    lowest = reranked[-1][1] if reranked else 0.0
    for distance, (skill_id, _) in enumerate(ranking[keep:], 1):
        reranked.append((skill_id, lowest - distance))
    return reranked
