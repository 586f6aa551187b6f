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

_QUERY_TOKENS = 2**18  # of the queries in memory at once; 400 MB of vectors with MiniLM
_TEXTS = 512  # skills that are tokenised at once


@dataclass(frozen=True)
class TokenVectors:
    """Unit vectors of skills' tokens in 8 bits, which changes cosines by up to 1e-3.

    `file` holds a `row` (a scale and 8-bit values) for each token. Rows of skill i begin at `starts[i]`.
    """

    file: BinaryIO
    starts: Int64[np.ndarray, " skill_and_end"]
    row: np.dtype[Any]

    @classmethod
    def load(cls, folder: Path) -> "TokenVectors":
        """Open what `save_part` wrote into `folder`: gigabytes for a large pool, so a skill's are read when needed."""
        starts = np.load(folder / "starts.npy")
        file = (folder / "tokens.bin").open("rb")
        num_bytes = os.fstat(file.fileno()).st_size
        return cls(file, starts, _rows_of(num_bytes // starts[-1] - 4))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def of(self, position: int) -> np.ndarray:
        start, end = self.starts[position : position + 2].tolist()
        size = self.row.itemsize
        rows = os.pread(self.file.fileno(), (end - start) * size, start * size)
        return np.frombuffer(rows, self.row, end - start)  # raises ValueError if the file was cut


class LateConfig(OpenConfig, RankerConfig):
    """An encoder that orders the candidates of the previous ranker by token vectors."""

    kind: Literal["late"] = "late"
    keep: Keep = None
    only_orders = True
    stored_part = TokenVectors

    def open(self, opened: dict[str, Any]) -> "Late":
        return Late(open_encoder(self, opened).model, {}, self.token_budget)


def _rows_of(dim: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("values", "i1", dim)])


def _as_rows(vectors: Float[Tensor, "token dim"]) -> np.ndarray:
    values = vectors.float().cpu().numpy()
    rows = np.empty(len(values), _rows_of(values.shape[1]))
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

        Each distinct skill text is encoded once for some 4,000 queries.
        """
        assert candidates is not None, "late interaction needs candidates"
        rows = [[skill_id for skill_id, _ in candidates[query.query_id]] for query in queries]
        sources = self._first_with_text(chain.from_iterable(rows))
        scores: list[dict[str, float]] = [{} for _ in queries]  # by source
        token_ids = self.encoder.tokenize_queries([query.text for query in queries])
        for block in micro_batches([len(ids) for ids in token_ids], _QUERY_TOKENS):
            readers: dict[str, list[int]] = {}  # positions of queries by source
            for position in block:
                for source in dict.fromkeys(sources[skill_id] for skill_id in rows[position]):
                    readers.setdefault(source, []).append(position)
            encoded = self._encode([token_ids[position] for position in block])
            vectors = {block[number]: tokens for number, tokens in encoded}
            for source, tokens in track(self._skills(readers), "late interaction", len(readers)):
                positions = readers[source]
                values = max_sim([vectors[position] for position in positions], [tokens])[:, 0]
                for position, value in zip(positions, values.tolist(), strict=True):
                    scores[position][source] = value
        rankings: Rankings = {}
        for query, row, values in zip(queries, rows, scores, strict=True):
            ranking = [(skill_id, values[sources[skill_id]]) for skill_id in row]
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

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
        sources = [*new._first_with_text(new.skills).values()]
        num_skills = Counter(sources)
        known: dict[str, np.ndarray] = {}
        if stored is not None:
            for source, position in zip(sources, positions, strict=True):
                if position >= 0:
                    known[source] = stored.of(position)
        counts: list[int] = []
        with (folder / "tokens.bin").open("wb") as file:
            starts = range(0, len(skills), _TEXTS)
            for start in track(starts, "encoding tokens", len(starts)):
                block = sources[start : start + _TEXTS]
                missing = [source for source in dict.fromkeys(block) if source not in known]
                encoded = {source: _as_rows(tokens) for source, tokens in new._skills(missing)}
                for source in block:
                    rows = encoded[source] if source in encoded else known[source]
                    file.write(rows.tobytes())
                    counts.append(len(rows))
                known |= {source: encoded[source] for source in missing if num_skills[source] > 1}
        np.save(folder / "starts.npy", starts_of(counts))

    def _first_with_text(self, skill_ids: Iterable[str]) -> dict[str, str]:
        """Return for each skill the first of them that has the same text."""
        firsts: dict[str, str] = {}
        sources: dict[str, str] = {}
        for skill_id in skill_ids:
            if skill_id not in sources:
                text = self._render(skill_id)
                sources[skill_id] = firsts.setdefault(text, skill_id)
        return sources

    def _render(self, skill_id: str) -> str:
        return self.encoder.settings.template.render_skill(self.skills[skill_id])

    def _skills(self, skill_ids: Iterable[str]) -> Iterator[tuple[str, Float[Tensor, "token dim"]]]:
        """Yield each skill's token vectors: the stored ones, else encoded, long texts first."""
        if self.stored is not None:
            for skill_id in skill_ids:
                rows = self.stored.of(self._positions[skill_id])
                tokens = torch.from_numpy(rows["values"] * rows["scale"][:, None])
                yield skill_id, tokens.to(self.encoder.device)
            return
        texts = {skill_id: self._render(skill_id) for skill_id in skill_ids}
        ordered = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        for start in range(0, len(ordered), _TEXTS):
            block = ordered[start : start + _TEXTS]
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
                yield position, row[1 : 1 + len(texts[position])]
