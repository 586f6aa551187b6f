"""Reranking: the candidates of each query, ordered by the reranker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int32
from pydantic import Field

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.micro_batches import run_micro_batches
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.terminal import track

_REMEMBERED = 10_000  # queries whose scores are held at most


class RerankConfig(RerankerConfig):
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

    def check(self) -> None:
        stored_settings(resolve_model(self.source, weights=False), "reranker")

    def open(self) -> "Rerank":
        """The reranker ready to score, without `first_weight`, so that systems share it whatever theirs is."""
        reranker = load_reranker(self, default_device())
        pack_linear_layers(reranker.network.base_model, self.token_budget)
        return Rerank(reranker, {}, self.token_budget)


@dataclass(frozen=True)
class Rerank:
    """A reranker at work. It remembers its scores, so that systems which share it score a pair once."""

    reranker: Reranker
    skills: Mapping[str, Skill]
    token_budget: int
    first_weight: float = 0.0
    _scores: dict[Query, dict[str, float]] = field(default_factory=dict)
    _tokens: dict[str, Int32[np.ndarray, " token"]] = field(default_factory=dict)

    def over(self, skills: Mapping[str, Skill]) -> "Rerank":
        return replace(self, skills=skills, _scores={}, _tokens={})

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The first `keep` candidates of each query by score, the others behind them in their order."""
        assert candidates is not None, "a reranker needs candidates"
        found: Rankings = {}
        for query in track(queries, "reranking", len(queries)):
            before = candidates[query.query_id]
            scores = self._scored(query, [skill_id for skill_id, _ in before[:keep]])
            found[query.query_id] = reordered(before, keep, scores, self.first_weight)
        return found

    @torch.inference_mode()
    def _scored(self, query: Query, skill_ids: Sequence[str]) -> Mapping[str, float]:
        if len(self._scores) >= _REMEMBERED:
            self._scores.clear()
        scores, texts = self._scores.setdefault(query, {}), self.reranker.pairs
        if asked := [skill_id for skill_id in skill_ids if skill_id not in scores]:
            new = [skill_id for skill_id in asked if skill_id not in self._tokens]
            ids = [
                np.array(of_skill, np.int32)
                for of_skill in texts.skills([self.skills[s] for s in new])
            ]
            self._tokens.update(zip(new, ids, strict=True))
            query_ids = texts.query(query.text)
            pairs = [texts.join(query_ids, self._tokens[skill_id]) for skill_id in asked]
            groups = self.reranker.micro_batches([pairs], self.token_budget)
            scores.update(
                zip(asked, run_micro_batches(self.reranker, pairs, groups).tolist(), strict=True)
            )
        return scores


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
