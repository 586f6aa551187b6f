"""Late interaction: candidates in the order of MaxSim, between each token of a query and the tokens of a skill."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds, micro_batches
from skilltrain.models.pooling import max_sim
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.dense import OpenConfig, open_encoder
from skilltrain.retrieval.nearest import starts_of
from skilltrain.terminal import track

_QUERY_TOKENS = 2**18  # of queries whose token vectors are in memory at once: 400 MB of MiniLM's
_TEXTS = 512  # skills that are tokenised at once


class LateConfig(OpenConfig):
    """An encoder that orders the candidates of the ranker before it by their tokens' vectors."""

    kind: Literal["late"] = "late"
    keep: int | None = Field(
        default=None, ge=1, description="candidates per query that are kept; null: all needed"
    )

    def open(self, opened: dict[str, Any] | None = None) -> "Late":
        return Late(open_encoder(self, opened).model, {}, self.token_budget)


@dataclass(frozen=True)
class TokenVectors:
    """Unit vectors of skills' tokens in 8 bits (scale, numbers; cosines off by 1e-3); skill i's from starts[i]."""

    rows: np.ndarray
    starts: Int64[np.ndarray, " skill_and_end"]

    @classmethod
    def load(cls, folder: Path) -> "TokenVectors":
        starts, file = np.load(folder / "starts.npy"), folder / "tokens.bin"
        return cls(np.memmap(file, _rows_of(file.stat().st_size // starts[-1] - 4), "r"), starts)

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def of(self, place: int) -> np.ndarray:
        return self.rows[self.starts[place] : self.starts[place + 1]]


def _rows_of(dim: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("values", "i1", dim)])


def _as_rows(vectors: Float[Tensor, "token dim"]) -> np.ndarray:
    found = vectors.float().cpu().numpy()
    rows = np.empty(len(found), _rows_of(found.shape[1]))
    rows["scale"] = np.abs(found).max(1) / 127
    rows["values"] = np.rint(found / rows["scale"][:, None])
    return rows


@dataclass(frozen=True)
class Late:
    """An encoder at work on tokens. It sees a skill's first window; what `stored` holds is not encoded again."""

    encoder: Encoder
    skills: Mapping[str, Skill]
    token_budget: int
    stored: TokenVectors | None = None  # in the order of the skills

    def over(self, skills: Mapping[str, Skill], stored: TokenVectors | None = None) -> "Late":
        return replace(self, skills=skills, stored=stored)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {skill_id: place for place, skill_id in enumerate(self.skills)}

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
            vectors = {
                block[place]: found
                for place, found in self._vectors([ids[place] for place in block])
            }
            for skill_id, tokens in track(self._skills(asking), "late interaction", len(asking)):
                found = max_sim([vectors[place] for place in asking[skill_id]], [tokens])[
                    :, 0
                ].tolist()
                for place, score in zip(asking[skill_id], found, strict=True):
                    scores[place][skill_id] = score
        rankings: Rankings = {}
        for query, of_query in zip(queries, scores, strict=True):
            ranking = [(skill_id, of_query[skill_id]) for skill_id, _ in candidates[query.query_id]]
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

    @torch.inference_mode()
    def save_tokens(
        self, folder: Path, skills: Sequence[Skill], kept: TokenVectors | None, at: Sequence[int]
    ) -> None:
        """Write the vectors of the tokens of `skills`; those of skill i stand at place `at[i]` in `kept` if not -1."""
        counts: list[int] = []
        with (folder / "tokens.bin").open("wb") as file:
            starts = range(0, len(skills), _TEXTS)
            for start in track(starts, "encoding tokens", len(starts)):
                some = [
                    *zip(skills[start : start + _TEXTS], at[start : start + _TEXTS], strict=True)
                ]
                new = {skill.skill_id: skill for skill, place in some if kept is None or place < 0}
                found = {
                    skill_id: _as_rows(tokens) for skill_id, tokens in self.over(new)._skills(new)
                }
                for skill, place in some:
                    rows = found[skill.skill_id] if kept is None or place < 0 else kept.of(place)
                    file.write(rows.tobytes())
                    counts.append(len(rows))
        np.save(folder / "starts.npy", starts_of(counts))

    def _skills(self, skill_ids: Iterable[str]) -> Iterator[tuple[str, Float[Tensor, "token dim"]]]:
        """Yield each skill's tokens' vectors: as they are stored, else encoded, longest texts first."""
        if self.stored is not None:
            for skill_id in skill_ids:
                rows = self.stored.of(self._places[skill_id])
                tokens = torch.from_numpy(rows["values"] * rows["scale"][:, None])
                yield skill_id, tokens.to(self.encoder.device)
            return
        settings = self.encoder.settings
        texts = {
            skill_id: settings.template.render_skill(self.skills[skill_id])
            for skill_id in skill_ids
        }
        ordered = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        for start in range(0, len(ordered), _TEXTS):
            some = ordered[start : start + _TEXTS]
            ids = self.encoder.tokenize([texts[skill_id] for skill_id in some], settings.max_tokens)
            for place, vectors in self._vectors(ids):
                yield some[place], vectors

    def _vectors(
        self, texts: Sequence[TokenIds]
    ) -> Iterator[tuple[int, Float[Tensor, "token dim"]]]:
        for group in micro_batches([len(text) for text in texts], self.token_budget):
            batch = [texts[place] for place in group]
            rows = self.encoder.with_tokens(batch, max(map(len, batch)))
            for place, row in zip(group, rows, strict=True):
                yield place, row[1 : 1 + len(texts[place])]
