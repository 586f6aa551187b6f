"""Late interaction: order candidates by MaxSim between the tokens of a query and of a skill.

Notes:
    - Of skills with the same text, only the first is scored or encoded, and the others get its
      score or its vectors.
    - The vectors of a large pool take gigabytes. So the rows of a skill are read when needed, and
      freed after their last use when they are written.
    - Queries are scored in blocks of about 4,000. A block encodes each distinct skill text once.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds, micro_batches
from skilltrain.models.pooling import max_sim
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.retrieval.dense import OpenConfig, open_encoder
from skilltrain.retrieval.nearest import starts_of
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.terminal import track

_MAX_QUERY_TOKENS = 2**18  # in memory at once; 400 MB of vectors with MiniLM
_SKILLS_AT_ONCE = 512  # skills that are tokenised at once
_SCALE_BYTES = 4  # size of the scale in each row
TokenMatrix = Float[Tensor, "token dim"]


@dataclass(frozen=True)
class TokenVectors:
    """Unit vectors of skills' tokens in 8 bits, which changes cosines by up to 1e-3.

    Attributes:
        file: One row per token: a scale and 8-bit values.
        starts: First row of each skill, and the number of rows.
        row_dtype: Type of a row.
        lock: Held while the file is read.
    """

    file: BinaryIO
    starts: Int64[np.ndarray, " skill_and_end"]
    row_dtype: np.dtype[Any]
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def load(cls, folder: Path) -> "TokenVectors":
        """Open what `save_part` wrote into `folder`."""
        starts = np.load(folder / "starts.npy")
        file = (folder / "tokens.bin").open("rb")
        num_bytes = os.fstat(file.fileno()).st_size
        dim = num_bytes // starts[-1] - _SCALE_BYTES
        return cls(file, starts, _row_dtype(dim))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def rows_of_skill(self, position: int) -> np.ndarray:
        """Read the rows of a skill's tokens."""
        start, end = self.starts[position : position + 2].tolist()
        size = self.row_dtype.itemsize
        with self.lock:  # threads share the position in the file
            self.file.seek(start * size)
            content = self.file.read((end - start) * size)
        # Raises ValueError if the file was cut.
        return np.frombuffer(content, self.row_dtype, end - start)


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


def _as_rows(vectors: TokenMatrix) -> np.ndarray:
    """Round token vectors to 8 bits. The largest value of a vector becomes 127."""
    values = vectors.float().cpu().numpy()
    rows = np.empty(len(values), _row_dtype(values.shape[1]))
    rows["scale"] = np.abs(values).max(1) / 127
    rows["values"] = np.rint(values / rows["scale"][:, None])
    return rows


@dataclass(frozen=True)
class Late:
    """A ranker that compares the tokens of a query with those in the first window of each skill.

    Skills with the same text share one score, so their order does not depend on the processor.

    Attributes:
        encoder: The encoder.
        skills: The pool.
        token_budget: Padded tokens per micro-batch.
        stored: Token vectors of the skills, in their order. Without them, skills are encoded.
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
        """Return the `keep` best candidates of each query by MaxSim."""
        assert candidates is not None, "late interaction needs candidates"
        rankings = [candidates[query.query_id] for query in queries]
        skill_ids = [skill_id for skill_id, _ in chain.from_iterable(rankings)]
        first_ids = self._first_with_same_text(skill_ids)
        scores_by_query = self._score(queries, rankings, first_ids)
        new_rankings = {}
        for query, ranking, scores in zip(queries, rankings, scores_by_query, strict=True):
            rescored = [(skill_id, scores[first_ids[skill_id]]) for skill_id, _ in ranking]
            new_rankings[query.query_id] = sorted(rescored, key=lambda pair: -pair[1])[:keep]
        return new_rankings

    def _score(
        self, queries: Sequence[Query], rankings: Sequence[Ranking], first_ids: Mapping[str, str]
    ) -> list[dict[str, float]]:
        """Score queries with skills, a block of queries at a time.

        Args:
            rankings: Candidates of each query.
            first_ids: The first skill with each candidate's text. Only this skill is scored.

        Returns:
            Score by skill id, for each query.
        """
        scores_by_query: list[dict[str, float]] = [{} for _ in queries]
        token_ids = self.encoder.tokenize_queries([query.text for query in queries])
        for positions in micro_batches([len(ids) for ids in token_ids], _MAX_QUERY_TOKENS):
            queries_by_skill = defaultdict(list)
            for position in positions:
                repeated_ids = [first_ids[skill_id] for skill_id, _ in rankings[position]]
                for skill_id in dict.fromkeys(repeated_ids):
                    queries_by_skill[skill_id].append(position)
            vectors_by_query = {}
            for index, vectors in self._encode([token_ids[position] for position in positions]):
                vectors_by_query[positions[index]] = vectors
            self._add_scores(scores_by_query, vectors_by_query, queries_by_skill)
        return scores_by_query

    def _add_scores(
        self,
        scores_by_query: Sequence[dict[str, float]],
        vectors_by_query: Mapping[int, TokenMatrix],
        queries_by_skill: Mapping[str, Sequence[int]],
    ) -> None:
        """Score a block of queries with skills.

        Args:
            scores_by_query: Scores of each query by skill id. New scores are added.
            vectors_by_query: Token vectors of each query.
            queries_by_skill: Positions of the queries to score with each skill.
        """
        skills = self._token_vectors(queries_by_skill)
        for skill_id, skill_vectors in track(skills, "late interaction", len(queries_by_skill)):
            positions = queries_by_skill[skill_id]
            query_vectors = [vectors_by_query[position] for position in positions]
            scores = max_sim(query_vectors, [skill_vectors])[:, 0]  # [query]
            for position, score in zip(positions, scores.tolist(), strict=True):
                scores_by_query[position][skill_id] = score

    @torch.inference_mode()
    def save_part(
        self,
        folder: Path,
        skills: Sequence[Skill],
        stored: TokenVectors | None,
        positions: Sequence[int],
    ) -> None:
        """Write the token vectors of skills.

        Args:
            folder: Folder for the files.
            skills: Skills of the pool.
            stored: Vectors to copy.
            positions: Position of each skill in `stored`; -1 for a new or changed skill.
        """
        ranker = self.over({skill.skill_id: skill for skill in skills})
        first_ids = list(ranker._first_with_same_text(ranker.skills).values())
        rows_by_id = {}
        if stored is not None:
            for first_id, position in zip(first_ids, positions, strict=True):
                if position >= 0:
                    rows_by_id[first_id] = stored.rows_of_skill(position)
        with (folder / "tokens.bin").open("wb") as file:
            counts = ranker._write_rows(file, first_ids, rows_by_id)
        np.save(folder / "starts.npy", starts_of(counts))

    def _write_rows(
        self, file: BinaryIO, skill_ids: Sequence[str], rows_by_id: dict[str, np.ndarray]
    ) -> list[int]:
        """Write the rows of skills' tokens, and return the number of rows of each skill.

        Args:
            skill_ids: Skills in the order of the file. An id may repeat.
            rows_by_id: Known rows. They are removed after use.
        """
        counts = []
        num_uses = Counter(skill_ids)
        starts = range(0, len(skill_ids), _SKILLS_AT_ONCE)
        for start in track(starts, "encoding tokens", len(starts)):
            block = skill_ids[start : start + _SKILLS_AT_ONCE]
            missing_ids = [
                skill_id for skill_id in dict.fromkeys(block) if skill_id not in rows_by_id
            ]
            for skill_id, vectors in self._token_vectors(missing_ids):
                rows_by_id[skill_id] = _as_rows(vectors)
            for skill_id in block:
                rows = rows_by_id[skill_id]
                file.write(rows.tobytes())
                counts.append(len(rows))
                num_uses[skill_id] -= 1
                if num_uses[skill_id] == 0:
                    del rows_by_id[skill_id]
        return counts

    def _first_with_same_text(self, skill_ids: Iterable[str]) -> dict[str, str]:
        """Return, for each skill, the first of the skills that have the same text."""
        first_by_text = {}
        first_ids = {}
        for skill_id in skill_ids:
            if skill_id not in first_ids:
                text = self._render(skill_id)
                first_ids[skill_id] = first_by_text.setdefault(text, skill_id)
        return first_ids

    def _render(self, skill_id: str) -> str:
        return self.encoder.settings.template.render_skill(self.skills[skill_id])

    def _token_vectors(self, skill_ids: Iterable[str]) -> Iterator[tuple[str, TokenMatrix]]:
        """Yield the id and the token vectors of each skill. They are stored, or encoded now."""
        if self.stored is not None:
            for skill_id in skill_ids:
                rows = self.stored.rows_of_skill(self._positions[skill_id])
                vectors = rows["values"] * rows["scale"][:, None]  # [token, dim]
                yield skill_id, torch.from_numpy(vectors).to(self.encoder.device)
            return
        texts = {skill_id: self._render(skill_id) for skill_id in skill_ids}
        long_first = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        max_tokens = self.encoder.settings.max_tokens
        for start in range(0, len(texts), _SKILLS_AT_ONCE):
            block = long_first[start : start + _SKILLS_AT_ONCE]
            token_ids = self.encoder.tokenize([texts[skill_id] for skill_id in block], max_tokens)
            for position, vectors in self._encode(token_ids):
                yield block[position], vectors

    def _encode(self, texts: Sequence[TokenIds]) -> Iterator[tuple[int, TokenMatrix]]:
        """Yield (position in `texts`, token vectors) of each text."""
        for group in micro_batches([len(text) for text in texts], self.token_budget):
            batch = [texts[position] for position in group]
            rows = self.encoder.with_tokens(batch, max(map(len, batch)))  # [text, row, dim]
            for position, row in zip(group, rows, strict=True):
                # Row 0 is the vector of the whole text, and padding follows the tokens.
                yield position, row[1 : 1 + len(texts[position])]
