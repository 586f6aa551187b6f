"""Reranking: the candidates of each query, ordered by the reranker."""

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

    Attributes:
        forward: Yields the scores of each list of pairs, for a model in training.
    """

    reranker: Reranker
    skills: Mapping[str, Skill]
    token_budget: int
    first_weight: float = 0.0
    forward: Callable[[Iterable[list[PairIds]]], Iterable[list[float]]] | None = None
    _scores: dict[Query, dict[bytes, float]] = field(default_factory=dict)
    _tokens: dict[str, bytes] = field(default_factory=dict)

    def over(self, skills: Mapping[str, Skill]) -> "Rerank":
        return replace(self, skills=skills, _scores={}, _tokens={})

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Order the first `keep` candidates of each query; the others follow in their order."""
        assert candidates is not None, "a reranker needs candidates"
        if len(self._scores) >= _MAX_REMEMBERED:
            self._scores.clear()
        tokens: list[dict[str, bytes]] = []
        remembered: list[dict[bytes, float]] = []  # another thread may clear `_scores`
        new_ids: list[list[bytes]] = []
        for query in track(queries, "tokenizing", len(queries)):
            row = self._tokenize([skill_id for skill_id, _ in candidates[query.query_id][:keep]])
            known = self._scores.setdefault(query, {})
            tokens.append(row)
            remembered.append(known)
            new_ids.append([ids for ids in dict.fromkeys(row.values()) if ids not in known])
        lists = map(self._pairs, queries, new_ids)
        values = self.forward(lists) if self.forward else map(self._score, lists)
        rankings: Rankings = {}
        progress = track(queries, "reranking", len(queries))
        rows = zip(progress, tokens, remembered, new_ids, values, strict=True)
        for query, row, known, ids, scores in rows:
            known.update(zip(ids, scores, strict=True))
            by_skill = {skill_id: known[ids] for skill_id, ids in row.items()}
            ranking = candidates[query.query_id]
            rankings[query.query_id] = reordered(ranking, keep, by_skill, self.first_weight)
        return rankings

    def _pairs(self, query: Query, skills: Sequence[bytes]) -> list[PairIds]:
        """Return the pairs of a query and skills, given by their token ids."""
        tokenizer = self.reranker.pair_tokenizer
        query_ids = tokenizer.query_ids(query.text) if skills else ()
        return [tokenizer.join(query_ids, np.frombuffer(ids, np.int32)) for ids in skills]

    @torch.inference_mode()
    def _score(self, pairs: list[PairIds]) -> list[float]:
        if not pairs:
            return []
        groups = self.reranker.micro_batches([pairs], self.token_budget)
        return run_micro_batches(self.reranker, pairs, groups).tolist()

    def _tokenize(self, skill_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the token ids of each skill's part of a pair, which identify its text."""
        new = [skill_id for skill_id in skill_ids if skill_id not in self._tokens]
        token_ids = self.reranker.pair_tokenizer.skill_ids(
            [self.skills[skill_id] for skill_id in new]
        )
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
