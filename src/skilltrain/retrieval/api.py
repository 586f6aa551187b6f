"""An embeddings server as a ranker: unit vectors of skills and queries, each paid for once."""

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
    Parts,
    Positions,
    VectorCache,
    Vectors,
    cached_vectors,
    text_keys,
)
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import say, track

_CACHE = Path("~/.cache/skilltrain/embeddings")
_ANY_LENGTH = 0  # texts are cut by characters here, and by tokens on the server
_TOO_LONG = (400, 413, 422)  # how servers refuse a text that is too long, or too many texts


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
        """Estimate the cost of the texts that the cache lacks."""
        encoder = ApiEncoder(self)
        budget = encoder.server.budget
        texts = {self.render_skill(skill) for skill in skills}
        texts |= {self.render_query(query.text) for query in queries}
        new = [*texts]
        if encoder.cache:
            missing = encoder.cache.missing(text_keys(new, _ANY_LENGTH))
            new = [new[position] for position in missing]
        return {
            "model": self.model,
            "num_requests": math.ceil(len(new) / self.batch_size),
            "num_texts": len(new),
            "num_kept_texts": len(texts) - len(new),
            **budget.account(Usage(_num_tokens(new))),
            "budget": str(budget) or None,
        }

    def render_skill(self, skill: Skill) -> str:
        return self.skill_prompt + self.skill.render(skill)

    def render_query(self, text: str) -> str:
        return self.query_prompt + text[: self.query_chars]


class ApiEncoder:
    """An embeddings server and its cache. Nothing is sent before there is a new text to encode."""

    def __init__(self, config: ApiConfig) -> None:
        self.config = config
        self.server = Server(config)
        self.cache: VectorCache | None = None
        if config.cache is not None:
            # All that decides a vector, besides the text.
            identity = json.dumps([config.base_url, config.model])
            name = hashlib.sha256(identity.encode()).hexdigest()[:24]
            self.cache = VectorCache(config.cache.expanduser() / name)

    def over(self, skills: Mapping[str, Skill], kept: ChunkVectors | None = None) -> PoolRanker:
        """Return the ranker of a pool. `kept` holds its vectors if they are known."""
        chunks = kept or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, self.encode_queries))

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """Return one unit vector per skill. Raises SkilltrainError naming a skill without one."""
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
        rendered = [self.config.render_query(text) for text in texts]
        return self._encode(rendered, [f"query {number}" for number in range(len(texts))])

    def _encode(self, texts: Sequence[str], names: Sequence[str]) -> Vectors:
        # A request cannot hold half of a surrogate pair.
        texts = [text.encode(errors="replace").decode() for text in texts]
        name_of = dict(zip(texts, names, strict=True))
        if "" in name_of:
            raise SkilltrainError("empty-text", "has no text to embed", where=name_of[""])

        def send(batch: tuple[int, list[str]]) -> tuple[Positions, Vectors]:
            start, batch_texts = batch
            vectors = self._embed(batch_texts, name_of)
            return start + np.arange(len(vectors)), vectors

        def embed(new: list[str]) -> Parts:
            cost = self.server.budget.describe(Usage(_num_tokens(new)))
            say(f"{len(new):,} texts to {self.config.model}, {cost}")
            size = self.config.batch_size
            batches = [(start, new[start : start + size]) for start in range(0, len(new), size)]
            replies = in_threads(send, batches, self.config.concurrency)
            yield from track(replies, "embedding", len(batches))

        return cached_vectors(texts, _ANY_LENGTH, self.cache, embed)

    def _embed(self, texts: list[str], name_of: Mapping[str, str]) -> Vectors:
        """Return the unit vectors of one request. Raises SkilltrainError if a text gets none."""
        section = self.config.section
        where = self.config.base_url
        again = "run again later; vectors so far are kept"
        try:
            reply = self.server.call(
                lambda client: client.embeddings.create(model=self.config.model, input=texts)
            )
            rows = sorted(reply.data, key=lambda row: row.index)
            vectors = np.array([row.embedding for row in rows], dtype=np.float64)
            if [row.index for row in rows] != [*range(len(texts))] or vectors.ndim != 2:
                raise ValueError("wrong number of vectors")
        except AnswerError as error:
            code = "server-failing"
            problem = f"gave no vectors: {error.reason}"
            if error.kind == "budget":
                code = "budget-exceeded"
                again = f"raise {section}.budget; vectors so far are kept"
            if isinstance(error, ServerError) and error.status in _TOO_LONG:
                code = "text-too-long"
                problem = f"{len(texts)} texts, the longest of {len(texts[0]):,} characters"
                problem = f"{where} refused {problem}: {error.reason}"
                where = name_of[texts[0]]
                again = f"lower skill.body_chars, query_chars or batch_size of {section}"
            raise SkilltrainError(code, problem, where=where, fix=again) from None
        except (ValueError, TypeError, AttributeError):
            problem = f"the server's reply does not hold one vector for each of {len(texts)} texts"
            raise SkilltrainError("invalid-reply", problem, where=where, fix=again) from None
        reported = getattr(reply.usage, "prompt_tokens", None)
        self.server.budget.count(Usage(reported_tokens(reported, _num_tokens(texts))))
        lengths = np.linalg.norm(vectors, axis=1)
        for text, length in zip(texts, lengths.tolist(), strict=True):
            if not 0 < length < math.inf:
                problem = f"{where} gave it a vector that is zero or holds no number"
                raise SkilltrainError("invalid-reply", problem, where=name_of[text])
        return (vectors / lengths[:, None]).astype(np.float32)


def _num_tokens(texts: Sequence[str]) -> int:
    return sum(map(estimate_tokens, texts))
