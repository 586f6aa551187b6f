"""Late interaction: order candidates by MaxSim between the tokens of a query and of a skill."""

import os
from collections import Counter
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
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.dense import OpenConfig, open_encoder
from skilltrain.retrieval.nearest import starts_of
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.terminal import track

_MAX_QUERY_TOKENS = 2**18  # in memory at once; 400 MB of vectors with MiniLM
_SKILLS_AT_ONCE = 512  # skills that are tokenised at once
_SCALE_BYTES = 4  # size of the scale in each row


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
        """Open what `save_part` wrote into `folder`.

        The vectors of a large pool take gigabytes, so the rows of a skill are read when needed.
        """
        starts = np.load(folder / "starts.npy")
        file = (folder / "tokens.bin").open("rb")
        # The last start is the number of rows. A row holds a scale, and one byte per dimension.
        num_bytes = os.fstat(file.fileno()).st_size
        dim = num_bytes // starts[-1] - _SCALE_BYTES
        return cls(file, starts, _row_dtype(dim))

    @property
    def num_skills(self) -> int:
        return len(self.starts) - 1

    def rows_of_skill(self, position: int) -> np.ndarray:
        """Read the rows of a skill's tokens from the file.

        Args:
            position: Position of the skill in the pool.

        Returns:
            A structured array with the fields `scale` and `values` (8-bit): one row per token.
        """
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
    can_be_interleaved = False
    stored_part = TokenVectors

    def open(self, opened: dict[str, Any]) -> "Late":
        return Late(open_encoder(self, opened).model, {}, self.token_budget)


def _row_dtype(dim: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("values", "i1", dim)])


def _as_rows(vectors: Float[Tensor, "token dim"]) -> np.ndarray:
    """Round token vectors to 8 bits. The largest value of a vector becomes 127.

    Values of a vector become whole numbers from -127 to 127. The vector is about `values` times
    `scale`.
    """
    values = vectors.float().cpu().numpy()  # [token, dim]
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
        """Return the `keep` best candidates of each query by MaxSim.

        Queries are scored in blocks of at most `_MAX_QUERY_TOKENS` tokens, which is about 4,000
        queries. A block encodes each distinct skill text once.
        """
        assert candidates is not None, "late interaction needs candidates"
        skill_ids_by_query: list[list[str]] = []
        for query in queries:
            skill_ids_by_query.append([skill_id for skill_id, _ in candidates[query.query_id]])
        # The first of the skills with the same text represents all of them: only it is scored.
        representative_ids = self._first_with_same_text(chain.from_iterable(skill_ids_by_query))

        scores_by_query: list[dict[str, float]] = [{} for _ in queries]
        token_ids = self.encoder.tokenize_queries([query.text for query in queries])
        # Score one block of queries at a time. A block is a list of positions in `queries`.
        for block in micro_batches([len(ids) for ids in token_ids], _MAX_QUERY_TOKENS):
            query_vectors: dict[int, Tensor] = {}  # [token, dim], by position in `queries`
            block_token_ids = [token_ids[position] for position in block]  # of each query
            for index_in_block, vectors in self._encode(block_token_ids):
                query_vectors[block[index_in_block]] = vectors

            # For each skill to score, the positions of the queries that need its score.
            queries_by_skill: dict[str, list[int]] = {}
            for position in block:
                skill_ids = skill_ids_by_query[position]
                scored_ids = [representative_ids[skill_id] for skill_id in skill_ids]
                for skill_id in dict.fromkeys(scored_ids):  # without repetitions
                    queries_by_skill.setdefault(skill_id, []).append(position)
            self._add_scores(scores_by_query, query_vectors, queries_by_skill)

        rankings = {}
        for position, query in enumerate(queries):
            scores = scores_by_query[position]
            skill_ids = skill_ids_by_query[position]
            ranking = [(skill_id, scores[representative_ids[skill_id]]) for skill_id in skill_ids]
            # The sort is stable, so candidates with equal scores keep their order.
            rankings[query.query_id] = sorted(ranking, key=lambda pair: -pair[1])[:keep]
        return rankings

    def _add_scores(
        self,
        scores_by_query: Sequence[dict[str, float]],
        query_vectors: Mapping[int, Float[Tensor, "token dim"]],
        queries_by_skill: Mapping[str, Sequence[int]],
    ) -> None:
        """Score the pairs of a block of queries and their skills.

        Args:
            scores_by_query: Score by skill id for each query. The new scores are added here.
            query_vectors: Token vectors of each query of the block, by the query's position.
            queries_by_skill: Positions of the queries to score with each skill.
        """
        skills = self._token_vectors(queries_by_skill)  # pairs of a skill id and its vectors
        for skill_id, skill_vectors in track(skills, "late interaction", len(queries_by_skill)):
            positions = queries_by_skill[skill_id]
            vectors = [query_vectors[position] for position in positions]
            # For each query, the mean over its tokens of the best cosine with a skill's token.
            scores = max_sim(vectors, [skill_vectors])[:, 0]  # [query]
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
        """Write the token vectors of `skills` for MaxSim, a row for each token.

        The file tokens.bin holds the rows of all skills, skill after skill. The file starts.npy
        holds the first row of each skill. Each distinct new text is encoded once.

        Args:
            folder: Folder for these two files.
            skills: Skills of the pool.
            stored: Vectors of an earlier index. Those of unchanged skills are copied.
            positions: Position of each skill in `stored`; -1 for a new or changed skill.
        """
        ranker = self.over({skill.skill_id: skill for skill in skills})
        # Replace each skill by the first one with the same text, so that a text is encoded once.
        first_by_skill = ranker._first_with_same_text(ranker.skills)
        first_ids = list(first_by_skill.values())  # one id per skill, with repetitions
        num_uses = Counter(first_ids)  # number of skills that are still to be written, by first id

        # Read the stored vectors of skills that have not changed. A row holds a scale and 8-bit
        # values.
        rows_by_id: dict[str, np.ndarray] = {}
        if stored is not None:
            for first_id, position in zip(first_ids, positions, strict=True):
                if position >= 0:
                    rows_by_id[first_id] = stored.rows_of_skill(position)

        counts: list[int] = []  # number of rows of each skill
        with (folder / "tokens.bin").open("wb") as file:
            starts = range(0, len(skills), _SKILLS_AT_ONCE)
            for start in track(starts, "encoding tokens", len(starts)):
                block = first_ids[start : start + _SKILLS_AT_ONCE]
                # Encode the texts of this block that no earlier block has encoded.
                distinct_ids = dict.fromkeys(block)
                missing_ids = [first_id for first_id in distinct_ids if first_id not in rows_by_id]
                for first_id, vectors in ranker._token_vectors(missing_ids):
                    rows_by_id[first_id] = _as_rows(vectors)
                # Write the rows of every skill, also of skills that share a text.
                for first_id in block:
                    rows = rows_by_id[first_id]
                    file.write(rows.tobytes())
                    counts.append(len(rows))
                    # Free the memory of the rows after their last use.
                    num_uses[first_id] -= 1
                    if num_uses[first_id] == 0:
                        del rows_by_id[first_id]
        np.save(folder / "starts.npy", starts_of(counts))

    def _first_with_same_text(self, skill_ids: Iterable[str]) -> dict[str, str]:
        """Return, for each skill, the first of the skills that have the same text.

        For example, if the skills a, b and c have the texts x, y and x, then a stands for c:
        {a: a, b: b, c: a}.
        """
        first_by_text: dict[str, str] = {}
        first_ids = {}
        for skill_id in skill_ids:
            if skill_id not in first_ids:
                text = self._render(skill_id)
                first_ids[skill_id] = first_by_text.setdefault(text, skill_id)
        return first_ids

    def _render(self, skill_id: str) -> str:
        return self.encoder.settings.template.render_skill(self.skills[skill_id])

    def _token_vectors(
        self, skill_ids: Iterable[str]
    ) -> Iterator[tuple[str, Float[Tensor, "token dim"]]]:
        """Yield the id and the token vectors of each skill.

        Vectors are read if they are stored, and encoded otherwise, long texts first.
        """
        if self.stored is not None:
            for skill_id in skill_ids:
                rows = self.stored.rows_of_skill(self._positions[skill_id])
                # A row holds 8-bit values, and the scale by which they are multiplied.
                vectors = rows["values"] * rows["scale"][:, None]  # [token, dim]
                yield skill_id, torch.from_numpy(vectors).to(self.encoder.device)
            return

        texts = {skill_id: self._render(skill_id) for skill_id in skill_ids}
        # Long texts come first, so that memory peaks at the start.
        long_first = sorted(texts, key=lambda skill_id: -len(texts[skill_id]))
        max_tokens = self.encoder.settings.max_tokens
        for start in range(0, len(texts), _SKILLS_AT_ONCE):
            block = long_first[start : start + _SKILLS_AT_ONCE]
            token_ids = self.encoder.tokenize([texts[skill_id] for skill_id in block], max_tokens)
            for position, vectors in self._encode(token_ids):
                yield block[position], vectors

    def _encode(
        self, texts: Sequence[TokenIds]
    ) -> Iterator[tuple[int, Float[Tensor, "token dim"]]]:
        """Yield (position in `texts`, unit vectors of its tokens) of each text.

        Args:
            texts: Token ids of each text.
        """
        for group in micro_batches([len(text) for text in texts], self.token_budget):
            # The second argument is the number of token vectors of each text: the longest length.
            batch = [texts[position] for position in group]
            rows = self.encoder.with_tokens(batch, max(map(len, batch)))  # [text, row, dim]
            for position, row in zip(group, rows, strict=True):
                # Row 0 is the vector of the whole text, and padding follows the tokens.
                yield position, row[1 : 1 + len(texts[position])]
