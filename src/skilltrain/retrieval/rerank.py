"""Reranking: the candidates of each query, ordered by the reranker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.micro_batches import run_micro_batches
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.retrieval.rankers import RankerConfig
from skilltrain.terminal import track

_MAX_REMEMBERED = 10_000  # queries whose scores are kept in memory


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
        default=0.0, ge=0, description="of the score before, which is added; SkillRouter: 0"
    )

    only_orders = True
    key_settings: ClassVar[Mapping[str, Any]] = {"keep": 1, "first_weight": 0.0}

    @property
    def num_read(self) -> int:
        return self.keep

    def check(self) -> None:
        stored_settings(resolve_model(self.source, weights=False), "reranker")

    def open(self, opened: dict[str, Any]) -> "Rerank":
        """Open the reranker without `first_weight`, so that systems share it whatever theirs is."""
        reranker = load_reranker(self, default_device())
        pack_linear_layers(reranker.network.base_model, self.token_budget)
        return Rerank(reranker, {}, self.token_budget)

    def ranker(self, skills: Sequence[Skill], opened: dict[str, Any]) -> "Rerank":
        ranker: Any = super().ranker(skills, opened)
        return replace(ranker, first_weight=self.first_weight) if self.first_weight else ranker


@dataclass(frozen=True)
class Rerank:
    """A reranker over a pool. It remembers its scores, so systems that share it score a pair once.

    Skills with the same text share one score, so their order does not depend on the processor.
    """

    reranker: Reranker
    skills: Mapping[str, Skill]
    token_budget: int
    first_weight: float = 0.0
    _scores: dict[Query, dict[bytes, float]] = field(default_factory=dict)
    _tokens: dict[str, bytes] = field(default_factory=dict)

    def over(self, skills: Mapping[str, Skill]) -> "Rerank":
        return replace(self, skills=skills, _scores={}, _tokens={})

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Order the first `keep` candidates of each query; the others follow in their order."""
        assert candidates is not None, "a reranker needs candidates"
        rankings: Rankings = {}
        for query in track(queries, "reranking", len(queries)):
            ranking = candidates[query.query_id]
            scores = self._score(query, [skill_id for skill_id, _ in ranking[:keep]])
            rankings[query.query_id] = reordered(ranking, keep, scores, self.first_weight)
        return rankings

    @torch.inference_mode()
    def _score(self, query: Query, skill_ids: Sequence[str]) -> dict[str, float]:
        if len(self._scores) >= _MAX_REMEMBERED:
            self._scores.clear()
        scores = self._scores.setdefault(query, {})
        tokens = self._tokenize(skill_ids)
        new = [ids for ids in dict.fromkeys(tokens.values()) if ids not in scores]
        if new:
            tokenizer = self.reranker.pairs
            query_ids = tokenizer.query(query.text)
            pairs = [tokenizer.join(query_ids, np.frombuffer(ids, np.int32)) for ids in new]
            groups = self.reranker.micro_batches([pairs], self.token_budget)
            values = run_micro_batches(self.reranker, pairs, groups).tolist()
            scores.update(zip(new, values, strict=True))
        return {skill_id: scores[ids] for skill_id, ids in tokens.items()}

    def _tokenize(self, skill_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the token ids of each skill's part of a pair, which identify its text."""
        new = [skill_id for skill_id in skill_ids if skill_id not in self._tokens]
        token_ids = self.reranker.pairs.skills([self.skills[skill_id] for skill_id in new])
        for skill_id, ids in zip(new, token_ids, strict=True):
            self._tokens[skill_id] = np.array(ids, np.int32).tobytes()
        return {skill_id: self._tokens[skill_id] for skill_id in skill_ids}


def reordered(
    before: Ranking, keep: int, scores: Mapping[str, float], first_weight: float
) -> Ranking:
    """The first `keep` of a ranking, best first (ties keep their order), and the others behind them in their order.

    Best by `scores`, to which the scores before are added, times `first_weight`: with few lists to learn from, two
    models err on different queries. The others score below all these; their size means nothing.
    """
    scored = [
        (skill_id, scores[skill_id] + first_weight * score) for skill_id, score in before[:keep]
    ]
    top = sorted(scored, key=lambda pair: -pair[1])
    lowest = top[-1][1] if top else 0.0
    return top + [
        (skill_id, lowest - place) for place, (skill_id, _) in enumerate(before[keep:], 1)
    ]
