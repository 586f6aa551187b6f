"""An embeddings server as a ranker. A cache keeps vectors, so each text is paid for once."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import AnswerError, Usage, estimate_tokens, reported_tokens
from skilltrain.llm.client import Server, ServerError, in_threads
from skilltrain.llm.settings import ServerConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.retrieval.vectors import (
    EncodedTexts,
    Positions,
    VectorCache,
    Vectors,
    cached_vectors,
    encode_once,
    text_keys,
)
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import say, track

_CACHE = Path("~/.cache/skilltrain/embeddings")
_NO_TOKEN_LIMIT = 0  # texts are cut by characters here, and by tokens on the server
# HTTP statuses with which servers refuse a text that is too long, or too many texts.
_TOO_LONG_STATUSES = (400, 413, 422)
_RUN_AGAIN = "run again later; vectors so far are kept"


class ApiConfig(ServerConfig, RankerConfig):
    """An embeddings server: OpenAI, vLLM, Ollama, Text Embeddings Inference or another."""

    section: ClassVar[str] = "embeddings"
    kind: Literal["api"] = "api"
    keep: Keep = None
    batch_size: int = Field(
        default=32, ge=1, le=2048, description="texts in one request; some servers take no more"
    )
    query_prompt: str = Field(
        default="", description="text before a query, such as 'search_query: '"
    )
    skill_prompt: str = Field(
        default="", description="text before a skill, such as 'search_document: '"
    )
    query_chars: int = Field(default=1500, ge=1, description="characters of a query that are sent")
    skill: SkillTemplate = Field(default=SkillTemplate(), description="what is sent of a skill")
    cache: Path | None = Field(
        default=_CACHE, description="folder that keeps vectors by content; null: none"
    )

    is_remote = True
    stored_part = ChunkVectors

    def check(self) -> None:
        ApiEncoder(self)

    def open(self, opened: dict[str, Any]) -> "ApiEncoder":
        return ApiEncoder(self)

    @property
    def server(self) -> ServerConfig:
        return self

    def dry_run(self, queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any]:
        """Estimate the cost of the texts that the cache lacks. Nothing is sent.

        Returns:
            Counts of requests, texts and tokens, and their price, by key of a stage's summary.
            `num_kept_texts` counts the texts in the cache.
        """
        encoder = ApiEncoder(self)
        budget = encoder.server.budget
        # Equal texts are sent once.
        texts = {self.render_skill(skill) for skill in skills}
        texts |= {self.render_query(query.text) for query in queries}
        new_texts = [*texts]
        if encoder.cache:
            keys = text_keys(new_texts, _NO_TOKEN_LIMIT)
            new_texts = [new_texts[position] for position in encoder.cache.missing(keys)]
        return {
            "model": self.model,
            "num_requests": math.ceil(len(new_texts) / self.batch_size),
            "num_texts": len(new_texts),
            "num_kept_texts": len(texts) - len(new_texts),
            **budget.account(Usage(_num_tokens(new_texts))),  # tokens and dollars
            "budget": str(budget) or None,  # None if no limit is set
        }

    def render_skill(self, skill: Skill) -> str:
        return self.skill_prompt + self.skill.render(skill)

    def render_query(self, text: str) -> str:
        return self.query_prompt + text[: self.query_chars]


class ApiEncoder:
    """An embeddings server and a cache of its vectors. Only texts that the cache lacks are sent."""

    def __init__(self, config: ApiConfig) -> None:
        self.config = config
        self.server = Server(config)
        self.cache: VectorCache | None = None
        if config.cache is not None:
            # Everything that decides the vector of a text.
            identity = json.dumps([config.base_url, config.model])
            # Each server and model has a folder of its own in the cache.
            name = hashlib.sha256(identity.encode()).hexdigest()[:24]
            self.cache = VectorCache(config.cache.expanduser() / name)

    def over(self, skills: Mapping[str, Skill], stored: ChunkVectors | None = None) -> PoolRanker:
        """Return the ranker of a pool. `stored` holds the pool's vectors if they are known."""
        chunks = stored or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, self.encode_queries))

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """Return one unit vector per skill.

        Raises:
            SkilltrainError: A skill gets no vector. The error names it.
        """
        texts = [self.config.render_skill(skill) for skill in skills]
        names = [f"skill {skill.skill_id}" for skill in skills]
        return ChunkVectors.one_each(self._encode(texts, names))

    def save_part(
        self, folder: Path, skills: Sequence[Skill], stored: Any, positions: Sequence[int]
    ) -> None:
        """Write the vectors of `skills`. The cache holds those that were encoded before."""
        self.encode_chunks(skills).save(folder)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per raw query. Errors count queries from 0."""
        rendered = [*map(self.config.render_query, texts)]
        names = [f"query {number}" for number in range(len(texts))]
        # Everything that decides the vectors.
        key = (self.config.base_url, self.config.model, *rendered)
        return encode_once(key, lambda: self._encode(rendered, names))

    def _encode(self, texts: Sequence[str], names: Sequence[str]) -> Vectors:
        """Return the unit vector of each text, from the cache or from the server.

        Args:
            texts: Texts to encode.
            names: Name of each text for errors, such as `skill pdf`.

        Raises:
            SkilltrainError: A text is empty, or the server gives no usable vector for it.
        """
        # Half of a surrogate pair cannot be sent, so `?` replaces such a character.
        texts = [text.encode(errors="replace").decode() for text in texts]
        name_by_text = dict(zip(texts, names, strict=True))
        if "" in name_by_text:
            raise SkilltrainError("empty-text", "has no text to embed", where=name_by_text[""])

        return cached_vectors(
            texts,
            _NO_TOKEN_LIMIT,
            self.cache,
            lambda new_texts: self._send(new_texts, name_by_text),
        )

    def _send(self, texts: list[str], name_by_text: Mapping[str, str]) -> EncodedTexts:
        """Send texts to the server in batches, several at once.

        Args:
            texts: Texts to encode.
            name_by_text: Name of each text for errors, such as `skill pdf`.

        Yields:
            Positions in `texts` and the vectors of these texts, as the replies come.
        """
        cost = self.server.budget.describe(Usage(_num_tokens(texts)))
        say(f"{len(texts):,} texts to {self.config.model}, {cost}")
        size = self.config.batch_size
        starts = range(0, len(texts), size)

        def embed(start: int) -> tuple[Positions, Vectors]:
            """Send the batch that begins at `start`. Return the texts' positions and vectors."""
            vectors = self._embed(texts[start : start + size], name_by_text)
            return start + np.arange(len(vectors)), vectors

        replies = in_threads(embed, starts, self.config.concurrency)
        yield from track(replies, "embedding", len(starts))

    def _embed(self, texts: list[str], name_by_text: Mapping[str, str]) -> Vectors:
        """Send one request to the embedding server, and return a unit vector for each text.

        Args:
            texts: Texts of the request.
            name_by_text: Name of each text for errors, such as `skill pdf`.

        Returns:
            Vectors in the order of `texts`: [text, dim].

        Raises:
            SkilltrainError: The request fails, or a text gets no usable vector.
        """
        url = self.config.base_url
        try:
            reply = self.server.call(
                lambda client: client.embeddings.create(model=self.config.model, input=texts)
            )
            # A server may return the vectors in another order, with the text's number as `index`.
            rows = sorted(reply.data, key=lambda row: row.index)
            vectors = np.array([row.embedding for row in rows], dtype=np.float64)
            # np.array raises ValueError for vectors of different lengths. Without vectors, its
            # result has one dimension.
            if [row.index for row in rows] != [*range(len(texts))] or vectors.ndim != 2:
                raise ValueError("wrong number of vectors")
        except AnswerError as error:
            raise self._request_error(error, texts, name_by_text) from None
        except (ValueError, TypeError, AttributeError):  # the reply has another form
            problem = f"the server's reply does not hold one vector for each of {len(texts)} texts"
            raise SkilltrainError("invalid-reply", problem, where=url, fix=_RUN_AGAIN) from None

        # Add the tokens to the budget of the run: those that the server reports, or an estimate.
        reported = getattr(reply.usage, "prompt_tokens", None)
        self.server.budget.count(Usage(reported_tokens(reported, _num_tokens(texts))))

        # Scale all vectors to length 1.
        lengths = np.linalg.norm(vectors, axis=1)  # [text]
        for text, length in zip(texts, lengths.tolist(), strict=True):
            # This is also true for NaN, which compares as false.
            if not 0 < length < math.inf:
                problem = f"{url} gave it a vector that is zero or holds no number"
                raise SkilltrainError("invalid-reply", problem, where=name_by_text[text])
        return (vectors / lengths[:, None]).astype(np.float32)

    def _request_error(
        self, error: AnswerError, texts: Sequence[str], name_by_text: Mapping[str, str]
    ) -> SkilltrainError:
        """Return the error to raise for a request that failed.

        Args:
            error: What went wrong.
            texts: Texts of the request, long ones first.
            name_by_text: Name of each text.
        """
        section = self.config.section
        url = self.config.base_url
        # These HTTP statuses mean that a text is too long, or that there are too many texts.
        if isinstance(error, ServerError) and error.status in _TOO_LONG_STATUSES:
            sizes = f"{len(texts)} texts, the longest of {len(texts[0]):,} characters"
            problem = f"{url} refused {sizes}: {error.reason}"
            fix = f"lower skill.body_chars, query_chars or batch_size of {section}"
            where = name_by_text[texts[0]]  # the longest text
            return SkilltrainError("text-too-long", problem, where=where, fix=fix)
        problem = f"gave no vectors: {error.reason}"
        if error.kind == "budget":
            fix = f"raise {section}.budget; vectors so far are kept"
            return SkilltrainError("budget-exceeded", problem, where=url, fix=fix)
        return SkilltrainError("server-failing", problem, where=url, fix=_RUN_AGAIN)


def _num_tokens(texts: Sequence[str]) -> int:
    return sum(map(estimate_tokens, texts))
