"""Late interaction: order candidates by MaxSim between the tokens of a query and of a skill."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds, micro_batches
from skilltrain.models.pooling import max_sim
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.dense import OpenConfig, open_encoder
from skilltrain.retrieval.nearest import starts_of
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.terminal import track

_MAX_QUERY_TOKENS = 2**18  # in memory at once; 400 MB of vectors with MiniLM
_SKILLS_AT_ONCE = 512  # skills that are tokenised at once

_SCALE_BYTES = 4  # of the scale in each row


@dataclass(frozen=True)
class TokenVectors:
    """Unit vectors of skills' tokens in 8 bits, which changes cosines by up to 1e-3.

    Attributes:
        file: A row for each token: a scale and 8-bit values.
        starts: First row of each skill, and the number of rows.
        row_dtype: Type of a row.
    """

    file: BinaryIO
    starts: Int64[np.ndarray, " skill_and_end"]
    row_dtype: np.dtype[Any]

    @classmethod
    def load(cls, folder: Path) -> "TokenVectors":
        """Open what `save_part` wrote into `folder`.

        A large pool has gigabytes, so the rows of a skill are read when they are needed.
        """
        starts = np.load(folder / "starts.npy")
        file = (folder / "tokens.bin").open("rb")
        num_bytes = os.fstat(file.fileno()).st_size
        dim = num_bytes // starts[-1] - _SCALE_BYTES
        return cls(file, starts, _row_dtype(dim))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def rows_of_skill(self, position: int) -> np.ndarray:
        start, end = self.starts[position : position + 2].tolist()
        size = self.row_dtype.itemsize
        rows = os.pread(self.file.fileno(), (end - start) * size, start * size)
        return np.frombuffer(
            rows, self.row_dtype, end - start
        )  # raises ValueError if the file was cut


class LateConfig(OpenConfig, RankerConfig):
    """An encoder that orders the candidates of the previous ranker by token vectors."""

    kind: Literal["late"] = "late"
    keep: Keep = None
    only_orders = True
    stored_part = TokenVectors

    def open(self, opened: dict[str, Any]) -> "Late":
        return Late(open_encoder(self, opened).model, {}, self.token_budget)


def _row_dtype(dim: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("values", "i1", dim)])


def _as_rows(vectors: Float[Tensor, "token dim"]) -> np.ndarray:
    values = vectors.float().cpu().numpy()
    rows = np.empty(len(values), _row_dtype(values.shape[1]))
    rows["scale"] = np.abs(values).max(1) / 127
    rows["values"] = np.rint(values / rows["scale"][:, None])
    return rows


@dataclass(frozen=True)
class Late:
    """An encoder that compares tokens. It sees the first window of each skill.

    `stored` holds the token vectors of the skills, in their order. Without it they are encoded.
    Skills with the same text share one score, so their order does not depend on the processor.
    """

    encoder: Encoder
    skills: Mapping[str, Skill]
    token_budget: int
    stored: TokenVectors | None = None

    def over(self, skills: Mapping[str, Skill], stored: TokenVectors | None = None) -> "Late":
        return replace(self, skills=skills, stored=stored)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {skill_id: position for position, skill_id in enumerate(self.skills)}

    @torch.inference_mode()
    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the `keep` best candidates of each query by MaxSim.

        Queries are scored in blocks of some 4,000. Each block encodes a distinct skill text once.
        """
        assert candidates is not None, "late interaction needs candidates"
        skill_ids = [[skill_id for skill_id, _ in candidates[query.query_id]] for query in queries]
        representatives = self._first_with_text(chain.from_iterable(skill_ids))
        skills_by_query = [
            dict.fromkeys(representatives[skill_id] for skill_id in row) for row in skill_ids
        ]
        scores: list[dict[str, float]] = [{} for _ in queries]  # by representative
        token_ids = self.encoder.tokenize_queries([query.text for query in queries])
        for block in micro_batches([len(ids) for ids in token_ids], _MAX_QUERY_TOKENS):
            encoded = self._encode([token_ids[position] for position in block])
            vectors = {block[index]: tokens for index, tokens in encoded}
            self._score_block(vectors, [(n, skills_by_query[n]) for n in block], scores)

        rankings: Rankings = {}
        for query, row, values in zip(queries, skill_ids, scores, strict=True):
            ranking = [(skill_id, values[representatives[skill_id]]) for skill_id in row]
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

    def _score_block(
        self,
        vectors: Mapping[int, Float[Tensor, "token dim"]],
        block: Sequence[tuple[int, Iterable[str]]],
        scores: Sequence[dict[str, float]],
    ) -> None:
        """Score a block of queries, given as pairs (position, skill ids), and add to `scores`.

        Args:
            vectors: Token vectors of a query by position.
            block: The queries.
            scores: Score by skill id, for each position.
        """
        queries_by_skill: dict[str, list[int]] = {}
        for position, skill_ids in block:
            for skill_id in skill_ids:
                queries_by_skill.setdefault(skill_id, []).append(position)
        skills = track(
            self._token_vectors(queries_by_skill), "late interaction", len(queries_by_skill)
        )
        for skill_id, tokens in skills:
            positions = queries_by_skill[skill_id]
            values = max_sim([vectors[position] for position in positions], [tokens])[:, 0]
            for position, value in zip(positions, values.tolist(), strict=True):
                scores[position][skill_id] = value

    @torch.inference_mode()
    def save_part(
        self,
        folder: Path,
        skills: Sequence[Skill],
        stored: TokenVectors | None,
        positions: Sequence[int],
    ) -> None:
        """Write the token vectors of `skills` into `folder`. Each distinct new text is encoded once.

        Args:
            stored: Vectors to copy, of skills that have not changed.
            positions: Position of each skill in `stored`; -1 for a new or changed skill.
        """
        new = self.over({skill.skill_id: skill for skill in skills})
        skill_ids = [*new._first_with_text(new.skills).values()]  # equal texts have the same id
        num_uses = Counter(skill_ids)
        rows_by_skill: dict[str, np.ndarray] = {}
        if stored is not None:
            for skill_id, position in zip(skill_ids, positions, strict=True):
                if position >= 0:
                    rows_by_skill[skill_id] = stored.rows_of_skill(position)

        counts: list[int] = []
        with (folder / "tokens.bin").open("wb") as file:
            starts = range(0, len(skills), _SKILLS_AT_ONCE)
            for start in track(starts, "encoding tokens", len(starts)):
                block = skill_ids[start : start + _SKILLS_AT_ONCE]
                missing = [
                    skill_id for skill_id in dict.fromkeys(block) if skill_id not in rows_by_skill
                ]
                for skill_id, tokens in new._token_vectors(missing):
                    rows_by_skill[skill_id] = _as_rows(tokens)
                for skill_id in block:
                    rows = rows_by_skill[skill_id]
                    file.write(rows.tobytes())
                    counts.append(len(rows))
                # Keep the rows of texts that other skills share, and free the others.
                for skill_id in missing:
                    if num_uses[skill_id] == 1:
                        del rows_by_skill[skill_id]
        np.save(folder / "starts.npy", starts_of(counts))

    def _first_with_text(self, skill_ids: Iterable[str]) -> dict[str, str]:
        """Return for each skill the first of the skills with its text."""
        first_by_text: dict[str, str] = {}
        representatives: dict[str, str] = {}
        for skill_id in skill_ids:
            if skill_id not in representatives:
                text = self._render(skill_id)
                representatives[skill_id] = first_by_text.setdefault(text, skill_id)
        return representatives

    def _render(self, skill_id: str) -> str:
        return self.encoder.settings.template.render_skill(self.skills[skill_id])

    def _token_vectors(
        self, skill_ids: Iterable[str]
    ) -> Iterator[tuple[str, Float[Tensor, "token dim"]]]:
        """Yield (skill id, its token vectors), stored or encoded. Long texts are encoded first."""
        if self.stored is not None:
            for skill_id in skill_ids:
                rows = self.stored.rows_of_skill(self._positions[skill_id])
                tokens = torch.from_numpy(rows["values"] * rows["scale"][:, None])
                yield skill_id, tokens.to(self.encoder.device)
            return
        texts = {skill_id: self._render(skill_id) for skill_id in skill_ids}
        ordered = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        for start in range(0, len(ordered), _SKILLS_AT_ONCE):
            block = ordered[start : start + _SKILLS_AT_ONCE]
            max_tokens = self.encoder.settings.max_tokens
            token_ids = self.encoder.tokenize([texts[skill_id] for skill_id in block], max_tokens)
            for position, tokens in self._encode(token_ids):
                yield block[position], tokens

    def _encode(
        self, texts: Sequence[TokenIds]
    ) -> Iterator[tuple[int, Float[Tensor, "token dim"]]]:
        """Yield (position in `texts`, token vectors) of each text."""
        for group in micro_batches([len(text) for text in texts], self.token_budget):
            batch = [texts[position] for position in group]
            rows = self.encoder.with_tokens(batch, max(map(len, batch)))
            for position, row in zip(group, rows, strict=True):
                # Row 0 is the vector of the whole text, and padding follows the tokens.
                yield position, row[1 : 1 + len(texts[position])]
