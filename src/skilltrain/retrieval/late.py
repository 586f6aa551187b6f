"""Late interaction: candidates in the order of MaxSim, between each token of a query and the tokens of a skill."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.max_sim import max_sim
from skilltrain.models.micro_batches import TokenIds, micro_batches
from skilltrain.records import Query, Rankings, Skill
from skilltrain.terminal import track

_QUERY_TOKENS = 2**18  # of queries whose token vectors are in memory at once: 400 MB of MiniLM's
_TEXTS = 512  # skills that are tokenised at once


class LateConfig(EncoderConfig):
    """An encoder that orders the candidates of the ranker before it by their tokens' vectors."""

    kind: Literal["late"] = "late"
    precision: Precision = Field(default="auto", description="auto: bfloat16 where the hardware has it")
    token_budget: int = Field(default=4096, ge=64, description="padded tokens a micro-batch")
    keep: int | None = Field(default=None, ge=1, description="candidates per query that are kept; null: all needed")

    def check(self) -> None:
        """Raise SkilltrainError for a model that is not there or is no encoder; of a Hub model, fetches settings."""
        stored_settings(resolve_model(self.source, weights=False), "encoder")

    def open(self, skills: Sequence[Skill]) -> "Late":
        """The encoder ready to score."""
        model = load_encoder(self, default_device()).requires_grad_(False)
        pack_linear_layers(model.backbone, self.token_budget)
        return Late(model, {skill.skill_id: skill for skill in skills}, self.token_budget)


@dataclass(frozen=True)
class Late:
    """An encoder at work on tokens. It sees a skill's first window, and keeps no vectors."""

    encoder: Encoder
    skills: Mapping[str, Skill]
    token_budget: int

    def over(self, skills: Mapping[str, Skill]) -> "Late":
        """The same encoder over another pool."""
        return replace(self, skills=skills)

    @torch.inference_mode()
    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best candidates of each query by MaxSim. Each skill is encoded once for some 4,000 queries."""
        assert candidates is not None, "late interaction needs candidates"
        ids = self.encoder.tokenize_queries([query.text for query in queries])
        scores: list[dict[str, float]] = [{} for _ in queries]
        for block in micro_batches([len(text) for text in ids], _QUERY_TOKENS):
            asking: dict[str, list[int]] = {}
            for place in block:
                for skill_id, _ in candidates[queries[place].query_id]:
                    asking.setdefault(skill_id, []).append(place)
            vectors = dict(zip(block, self._in_order([ids[place] for place in block]), strict=True))
            for skill_id, tokens in self._skills(asking):
                found = max_sim([vectors[place] for place in asking[skill_id]], [tokens])[:, 0].tolist()
                for place, score in zip(asking[skill_id], found, strict=True):
                    scores[place][skill_id] = score
        rankings: Rankings = {}
        for query, of_query in zip(queries, scores, strict=True):
            ranking = [(skill_id, of_query[skill_id]) for skill_id, _ in candidates[query.query_id]]
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

    def _skills(self, skill_ids: Iterable[str]) -> Iterator[tuple[str, Float[Tensor, "token dim"]]]:
        """Yield each skill's tokens' vectors, longest texts first."""
        settings = self.encoder.settings
        texts = {skill_id: settings.template.render_skill(self.skills[skill_id]) for skill_id in skill_ids}
        ordered = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        starts = range(0, len(ordered), _TEXTS)
        for start in track(starts, "late interaction", len(starts)):
            some = ordered[start : start + _TEXTS]
            ids = self.encoder.tokenize([texts[skill_id] for skill_id in some], settings.max_tokens)
            for place, vectors in self._vectors(ids):
                yield some[place], vectors

    def _in_order(self, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ dim"]]:
        return [vectors for _, vectors in sorted(self._vectors(texts), key=lambda pair: pair[0])]

    def _vectors(self, texts: Sequence[TokenIds]) -> Iterator[tuple[int, Float[Tensor, "token dim"]]]:
        """Yield (a text's place, its tokens' unit vectors)."""
        for group in micro_batches([len(text) for text in texts], self.token_budget):
            batch = [texts[place] for place in group]
            rows = self.encoder.with_tokens(batch, max(map(len, batch)))
            for place, row in zip(group, rows, strict=True):
                yield place, row[1 : 1 + len(texts[place])]
