"""An embeddings server as a ranker: skills and queries as unit vectors, none of them paid for twice."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import AnswerError, Usage, estimate_tokens, reported_tokens
from skilltrain.llm.client import Server, ServerError, in_threads
from skilltrain.llm.settings import ServerConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex
from skilltrain.retrieval.vectors import Parts, Positions, VectorCache, cached_vectors, text_keys
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import progress, say

_CACHE = Path("~/.cache/skilltrain/embeddings")
_ANY_LENGTH = 0  # the server limits tokens; characters are capped here
_TOO_MUCH = (400, 413, 422)  # how servers refuse a text that is too long, or too many at once

Vectors = Float32[np.ndarray, "text dim"]


class ApiConfig(ServerConfig):
    """A server that speaks OpenAI's embeddings: OpenAI itself, vLLM, Ollama, Text Embeddings Inference and others."""

    section: ClassVar[str] = "embeddings"
    kind: Literal["api"] = "api"
    keep: int | None = Field(
        default=None, ge=1, description="skills kept per query; null: as many as needed"
    )
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

    def check(self) -> None:
        ApiEncoder(self)

    def open(self) -> "ApiEncoder":
        return ApiEncoder(self)

    def render_skill(self, skill: Skill) -> str:
        return self.skill_prompt + self.skill.render(skill)

    def render_query(self, text: str) -> str:
        return self.query_prompt + text[: self.query_chars]


class ApiEncoder:
    """An embeddings server with its cache and `budget`; nobody is asked before there is a new text to encode."""

    def __init__(self, config: ApiConfig) -> None:
        self.config = config
        self.cache: VectorCache | None = None
        self._server = Server(config)
        self.budget = self._server.budget
        if (
            config.cache is not None
        ):  # in a folder named after all that decides a vector, besides the text
            identity = json.dumps([config.base_url, config.model])
            self.cache = VectorCache(
                config.cache.expanduser() / hashlib.sha256(identity.encode()).hexdigest()[:24]
            )

    def over(self, skills: Mapping[str, Skill], kept: ChunkVectors | None = None) -> PoolRanker:
        """The ranker of a pool, of which `kept` has the vectors."""
        chunks = kept or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, self.encode_queries))

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """One unit vector per skill; equal and cached texts are not sent. SkilltrainError names a skill without one."""
        texts = [self.config.render_skill(skill) for skill in skills]
        embed = partial(
            self._embed, "embedding skills", [f"skill {skill.skill_id}" for skill in skills]
        )
        return ChunkVectors.one_each(cached_vectors(texts, _ANY_LENGTH, self.cache, embed))

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
        """One unit vector per raw query; prompt and cap are applied here. Errors count queries from 0."""
        rendered = [self.config.render_query(text) for text in texts]
        embed = partial(
            self._embed, "embedding queries", [f"query {place}" for place in range(len(texts))]
        )
        return cached_vectors(rendered, _ANY_LENGTH, self.cache, embed)

    def _embed(
        self, description: str, names: Sequence[str], texts: list[str], positions: Positions
    ) -> Parts:
        """Yield vectors as the server gives them, those of requests that are under way also after one failed."""
        names = [names[int(place)] for place in positions]
        if not texts[-1]:  # the shortest
            raise SkilltrainError("has no text to embed", where=names[-1])
        cost = self.budget.describe(Usage(sum(map(estimate_tokens, texts)), 0))
        say(f"{len(texts):,} texts to {self.config.model}, {cost}")
        num_done = 0
        with progress(description, len(texts), 0) as show:
            ask = partial(self._ask, names, texts)
            starts = range(0, len(texts), self.config.batch_size)
            for places, vectors in in_threads(ask, starts, self.config.concurrency):
                num_done += len(vectors)
                show(num_done, f"{self.budget.used.total:,} tokens")
                yield places, vectors

    def _ask(
        self, names: Sequence[str], texts: Sequence[str], start: int
    ) -> tuple[np.ndarray, Vectors]:
        """(places, unit vectors) of the batch at `start`. Raises SkilltrainError where a text gets no vector."""
        # A request holds no half of a surrogate pair.
        batch = [
            text.encode(errors="replace").decode()
            for text in texts[start : start + self.config.batch_size]
        ]
        try:
            vectors = self._send(batch)
        except AnswerError as fault:
            raise self._fault(fault, batch, names[start]) from None
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        good = np.isfinite(lengths) & (lengths > 0)
        if not good.all():
            what = f"{self.config.base_url} gave it a vector that is zero or holds no number"
            raise SkilltrainError(what, where=names[start + int(np.argmin(good))])
        return start + np.arange(len(batch)), (vectors / lengths).astype(np.float32)

    def _send(self, texts: list[str]) -> Vectors:
        """The vectors of `texts`, counted in the budget. Raises AnswerError where there are none."""
        try:
            reply = self._server.call(
                lambda client: client.embeddings.create(model=self.config.model, input=texts)
            )
            data = sorted(reply.data, key=lambda item: item.index)
            vectors = np.array([item.embedding for item in data], dtype=np.float32)
        except (ValueError, TypeError, AttributeError) as error:
            raise AnswerError(
                "malformed", f"the server's reply holds no vectors: {error}"
            ) from None
        if (
            [item.index for item in data] != list(range(len(texts)))
            or vectors.ndim != 2
            or not vectors.size
        ):
            what = f"the server's reply does not hold one vector for each of {len(texts)} texts"
            raise AnswerError("malformed", what)
        reported = getattr(reply.usage, "prompt_tokens", None)
        self.budget.count(Usage(reported_tokens(reported, sum(map(estimate_tokens, texts))), 0))
        return vectors

    def _fault(self, fault: AnswerError, texts: Sequence[str], name: str) -> SkilltrainError:
        """A fault as the end of the run; the first of the texts, which is the longest, is called `name`."""
        section, url = self.config.section, self.config.base_url
        if isinstance(fault, ServerError) and fault.status in _TOO_MUCH:
            what = f"{url} refused {len(texts)} texts, the longest of {len(texts[0]):,} characters: {fault.reason}"
            fix = f"lower {section}.skill.body_chars, {section}.query_chars or {section}.batch_size"
            return SkilltrainError(what, where=name, fix=fix)
        fix = f"raise {section}.budget" if fault.kind == "budget" else "run again later"
        what = f"gave no vectors: {fault.reason}" if fault.kind == "failed" else fault.reason
        return SkilltrainError(what, where=url, fix=f"{fix}; vectors so far are kept")


def plan_encoding(
    config: ApiConfig, skills: Sequence[Skill], queries: Sequence[Query]
) -> dict[str, Any]:
    """About what encoding will cost, for `--dry-run`; asks nobody and writes nothing."""
    encoder = ApiEncoder(config)
    num_requests, num_tokens, num_texts, num_kept = 0, 0, 0, 0
    rendered = (
        [config.render_skill(skill) for skill in skills],
        [config.render_query(query.text) for query in queries],
    )
    for texts in rendered:
        keys, first = np.unique(text_keys(texts, _ANY_LENGTH), return_index=True)
        new = first[encoder.cache.missing(keys)] if encoder.cache else first
        num_texts, num_kept = num_texts + len(new), num_kept + len(first) - len(new)
        num_requests += -(-len(new) // config.batch_size)
        num_tokens += sum(estimate_tokens(texts[place]) for place in new)
    counts = {
        "model": config.model,
        "num_requests": num_requests,
        "num_texts": num_texts,
        "num_kept_texts": num_kept,
    }
    return (
        counts
        | encoder.budget.account(Usage(num_tokens, 0))
        | {"budget": str(encoder.budget) or None}
    )
