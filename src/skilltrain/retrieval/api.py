"""An embeddings server as a ranker: skills and queries as unit vectors, none of them paid for twice."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import CompletionError, Usage, estimate_tokens, reported_tokens
from skilltrain.llm.ask import cost_in_words
from skilltrain.llm.budget import Budget, over_budget
from skilltrain.llm.client import Server, ServerError, in_threads
from skilltrain.llm.settings import Prices, ServerConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.nearest import ChunkVectors, Encoders, PoolRanker
from skilltrain.retrieval.vectors import OrderedTexts, Parts, VectorCache, cached_vectors, text_keys
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import progress, say

# OpenAI's list prices in dollars per million tokens, as published in 2025.
LIST_PRICES = {"text-embedding-3-small": 0.02, "text-embedding-3-large": 0.13, "text-embedding-ada-002": 0.10}
_ANY_LENGTH = 0  # the server limits tokens; characters are capped here
_MOST_PER_TEXT = 32  # tokens that a server may put around a text
_TOO_MUCH = (400, 413, 422)  # how servers refuse a text that is too long, or too many at once

Vectors = Float32[np.ndarray, "text dim"]
NameOf = Callable[[int], str]
"""Which text stands at a place, for messages."""


class ApiConfig(ServerConfig):
    """A server that speaks OpenAI's embeddings: OpenAI itself, vLLM, Ollama, Text Embeddings Inference and others.

    The key is read from the environment only.
    """

    section: ClassVar[str] = "embeddings"
    kind: Literal["api"] = "api"
    keep: int | None = Field(default=None, ge=1, description="skills kept per query; null: as many as needed")
    dimensions: int | None = Field(
        default=None, ge=1, description="numbers of a vector, asked of the server; null: the model's own"
    )
    batch_size: int = Field(default=32, ge=1, le=2048, description="texts in one request; some servers take no more")
    price: float | None = Field(
        default=None, ge=0, description="dollars per million tokens; null: OpenAI's own where we know it"
    )
    query_prompt: str = Field(default="", description="text before a query, such as 'search_query: '")
    skill_prompt: str = Field(default="", description="text before a skill, such as 'search_document: '")
    query_chars: int = Field(default=1500, ge=1, description="characters of a query that are sent")
    skill: SkillTemplate = Field(default=SkillTemplate(), description="what is sent of a skill")
    cache: Path | None = Field(
        default=Path("~/.cache/skilltrain/embeddings"), description="folder that keeps vectors by content; null: none"
    )

    def check(self) -> None:
        """Raise SkilltrainError for settings that the server cannot have."""
        ApiEncoder(self)

    def open(self, skills: Sequence[Skill]) -> PoolRanker:
        """The server with the vectors of the pool."""
        return self.encoders().over(skills)

    def encoders(self) -> Encoders:
        """The server for any pool."""
        encoder = open_encoder(self)
        return Encoders(lambda skills: ChunkVectors.one_each(encoder.encode_skills(skills)), encoder.encode_queries)

    def render_skill(self, skill: Skill) -> str:
        """The text that is sent of a skill."""
        return self.skill_prompt + self.skill.render(skill)

    def render_query(self, text: str) -> str:
        """The text that is sent of a query."""
        return self.query_prompt + text[: self.query_chars]


class ApiEncoder:
    """An embeddings server; `budget` counts what it has used. Nobody is asked before there is a text to encode."""

    def __init__(self, config: ApiConfig, cache: VectorCache | None = None) -> None:
        price = config.price if config.price is not None or not config.is_openai else LIST_PRICES.get(config.model)
        prices = None if price is None else Prices(prompt=price, completion=0)
        self.config, self.cache = config, cache
        self.budget = Budget(config.budget, prices, config.section)
        self._server = Server(config, self.budget)
        self._dim = config.dimensions or (cache and cache.dim())  # of the first vector, where neither says so

    def encode_skills(self, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
        """One unit vector per skill; equal texts are sent once, texts in the cache not at all.

        Raises SkilltrainError, with the skill named, where one gets no vector. Those before it are kept.
        """
        texts = [self.config.render_skill(skill) for skill in skills]
        return self._encode(texts, "embedding skills", lambda place: f"skill {skills[place].skill_id}")

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
        """One unit vector per raw query; prompt and cap are applied here. Errors count queries from 0."""
        rendered = [self.config.render_query(text) for text in texts]
        return self._encode(rendered, "embedding queries", lambda place: f"query {place}")

    def _encode(self, texts: Sequence[str], description: str, name_of: NameOf) -> Vectors:
        def encode(work: OrderedTexts) -> Parts:
            return self._embed(work, lambda place: name_of(int(work.positions[place])))

        return cached_vectors(texts, _ANY_LENGTH, description, self.cache, encode)

    def _embed(self, work: OrderedTexts, name_of: NameOf) -> Parts:
        """Yield vectors as the server gives them; requests start in the order of the texts.

        Requests under way when one fails come to their end, and their vectors are yielded before.
        """
        if not work.texts[-1]:  # the shortest
            raise SkilltrainError("has no text to embed", where=name_of(len(work.texts) - 1))
        usage = Usage(sum(map(estimate_tokens, work.texts)), 0)
        cost = cost_in_words(usage, self.budget, "embeddings.price")
        say(f"{len(work.texts):,} texts to {self.config.model}, {cost}")
        num_done = 0
        with progress(work.description, len(work.texts), 0) as show:
            asked = in_threads(
                lambda batch: self._ask(*batch, name_of), self._reserved(work.texts), self.config.concurrency
            )
            for start, vectors in asked:
                num_done += len(vectors)
                show(num_done, f"{self.budget.used.total:,} tokens")
                yield np.arange(start, start + len(vectors)), vectors

    def _reserved(self, texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """(position of the first, texts) of each request, as soon as the budget holds it."""
        for start in range(0, len(texts), self.config.batch_size):
            # A request holds no half of a surrogate pair.
            batch = [text.encode(errors="replace").decode() for text in texts[start : start + self.config.batch_size]]
            if not self.budget.wait_to_reserve(_most_of(batch)):
                raise self._fault(over_budget(self.budget))
            yield start, batch

    def _ask(self, start: int, texts: Sequence[str], name_of: NameOf) -> tuple[int, Vectors]:
        """(position of the first, unit vectors) of `texts`, the first of which, the longest, is at `start`.

        Raises SkilltrainError where a text gets no vector.
        """
        try:
            vectors = self._server.ask(lambda: self._send(texts), _most_of(texts))
        except CompletionError as fault:
            if not isinstance(fault, ServerError) or fault.status not in _TOO_MUCH:
                raise self._fault(fault) from None
            section = self.config.section
            what = f"{self.config.base_url} refused {len(texts)} texts, the longest of {len(texts[0]):,} characters"
            fix = f"lower {section}.skill.body_chars, {section}.query_chars or {section}.batch_size"
            raise SkilltrainError(f"{what}: {fault.reason}", where=name_of(start), fix=fix) from None
        return start, self._unit(vectors, start, name_of)

    def _send(self, texts: Sequence[str]) -> tuple[Vectors, Usage]:
        """The vectors of `texts` from one try, and what it took. Raises CompletionError where there are none."""
        dimensions = {} if self.config.dimensions is None else {"dimensions": self.config.dimensions}
        create = self._server.client.embeddings.create
        try:
            reply = create(model=self.config.model, input=list(texts), extra_body=dimensions)
            data = sorted(reply.data, key=lambda item: item.index)
            vectors = np.array([item.embedding for item in data], dtype=np.float32)
        except (ValueError, TypeError, AttributeError) as error:
            raise CompletionError("malformed", f"the server's reply holds no vectors: {error}") from None
        if [item.index for item in data] != list(range(len(texts))) or vectors.ndim != 2 or not vectors.size:
            what = f"the server's reply does not hold one vector for each of {len(texts)} texts"
            raise CompletionError("malformed", what)
        reported = getattr(reply.usage, "prompt_tokens", None)
        return vectors, Usage(reported_tokens(reported, sum(map(estimate_tokens, texts))), 0)

    def _unit(self, vectors: Vectors, start: int, name_of: NameOf) -> Vectors:
        """`vectors` of length 1. Raises SkilltrainError for one that has no direction, or not the length expected."""
        dim = vectors.shape[1]
        self._dim = expected = self._dim or dim
        if dim != expected:
            what = f"model '{self.config.model}' gives vectors of {dim} numbers, not {expected}"
            fix = "the model behind this name has changed: name another cache folder"
            if self.config.dimensions is not None:
                fix = f"it cannot shorten them: leave out {self.config.section}.dimensions"
            raise SkilltrainError(what, where=self.config.base_url, fix=fix)
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        good = np.isfinite(lengths) & (lengths > 0)
        if not good.all():
            what = f"{self.config.base_url} gave it a vector that is zero or holds no number"
            raise SkilltrainError(what, where=name_of(start + int(np.argmin(good))))
        return (vectors / lengths).astype(np.float32)

    def _fault(self, fault: CompletionError) -> SkilltrainError:
        """A fault as the end of the run."""
        if isinstance(fault, ServerError) and fault.ends_run is not None:
            return fault.ends_run
        fix = f"raise {self.config.section}.budget" if fault.kind == "budget" else "run again later"
        what = f"gave no vectors: {fault.reason}" if fault.kind == "failed" else fault.reason
        return SkilltrainError(what, where=self.config.base_url, fix=f"{fix}; vectors so far are kept")


def open_encoder(config: ApiConfig) -> ApiEncoder:
    """The server with its cache. A pool whose vectors are all kept needs no server."""
    folder = _folder(config)
    return ApiEncoder(config, folder and VectorCache.open(folder.parent, folder.name))


def plan_encoding(config: ApiConfig, skills: Sequence[Skill], queries: Sequence[Query]) -> dict[str, Any]:
    """About what encoding will cost, for `--dry-run`; asks nobody and writes nothing."""
    folder, budget = _folder(config), ApiEncoder(config).budget
    num_requests, num_tokens, num_texts, num_kept = 0, 0, 0, 0
    rendered = [config.render_skill(skill) for skill in skills], [config.render_query(query.text) for query in queries]
    for texts in rendered:
        keys, first = np.unique(text_keys(texts, _ANY_LENGTH)[0], return_index=True)
        new = first[VectorCache(folder).missing(keys)] if folder else first
        num_texts, num_kept = num_texts + len(new), num_kept + len(first) - len(new)
        num_requests += -(-len(new) // config.batch_size)
        num_tokens += sum(estimate_tokens(texts[place]) for place in new)
    counts = {"model": config.model, "num_requests": num_requests, "num_texts": num_texts, "num_kept_texts": num_kept}
    return counts | budget.account(Usage(num_tokens, 0)) | {"budget": str(budget) or None}


def _folder(config: ApiConfig) -> Path | None:
    """Where the cache, if any, keeps this model's vectors: named after all that decides one, besides the text."""
    if config.cache is None:
        return None
    identity = config.model_dump(mode="json", include={"base_url", "model", "dimensions"})
    return config.cache.expanduser() / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def _most_of(texts: Sequence[str]) -> Usage:
    """The most that one try can take: one token per byte."""
    return Usage(sum(len(text.encode(errors="replace")) + _MOST_PER_TEXT for text in texts), 0)
