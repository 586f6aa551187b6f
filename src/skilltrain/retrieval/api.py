"""An embeddings server as a ranker: skills and queries as unit vectors, none of them paid for twice."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.llm.ask import cost_in_words
from skilltrain.llm.budget import estimate_tokens
from skilltrain.llm.embeddings import Embeddings
from skilltrain.llm.protocol import Usage
from skilltrain.llm.settings import EmbeddingsConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.encode_texts import OrderedTexts, Parts, VectorSource, text_keys
from skilltrain.retrieval.nearest import VectorRanker
from skilltrain.retrieval.vectors import VectorCache
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import progress, say

_ABOUT, _ANY_TEXT = "about.json", "skill"
_ANY_LENGTH = 0  # the server limits tokens; characters are capped here


class ApiConfig(EmbeddingsConfig):
    """An embeddings server that finds the skills nearest to a query. The key is read from the environment only."""

    kind: Literal["api"] = "api"
    keep: int | None = Field(default=None, ge=1, description="skills a query that are kept; null: as many as needed")
    query_prompt: str = Field(default="", description="text before a query, such as 'search_query: '")
    skill_prompt: str = Field(default="", description="text before a skill, such as 'search_document: '")
    query_chars: int = Field(default=1500, ge=1, description="characters of a query that are sent")
    skill: SkillTemplate = Field(default=SkillTemplate(), description="what is sent of a skill")
    cache: Path | None = Field(
        default=Path("~/.cache/skilltrain/embeddings"), description="folder that keeps vectors by content; null: none"
    )

    def render_skill(self, skill: Skill) -> str:
        """The text that is sent of a skill."""
        return self.skill_prompt + self.skill.render(skill)

    def render_query(self, text: str) -> str:
        """The text that is sent of a query."""
        return self.query_prompt + text[: self.query_chars]

    def check(self) -> None:
        """Raise SkilltrainError for settings that the server cannot have."""
        Embeddings(self)

    def open(self, skills: Sequence[Skill]) -> VectorRanker:
        """The server with the vectors of the pool."""
        encoder = open_encoder(self)
        vectors = encoder.encode_skills(skills)
        return VectorRanker([skill.skill_id for skill in skills], vectors, encoder.encode_queries)


@dataclass(frozen=True)
class ApiEncoder:
    """An embeddings server ready to encode; `server.budget` counts what it has used."""

    config: ApiConfig
    server: Embeddings
    dim: int
    cache: VectorCache | None

    def encode_skills(self, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
        """One unit vector per skill; equal texts are sent once, texts in the cache not at all.

        Raises SkilltrainError, with the skill named, where one gets no vector. Those before it are kept.
        """
        texts = [self.config.render_skill(skill) for skill in skills]
        return self._encode(texts, lambda place: f"skill {skills[place].skill_id}", "embedding skills")

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
        """One unit vector per raw query; prompt and cap are applied here. Errors count queries from 0."""
        rendered = [self.config.render_query(text) for text in texts]
        return self._encode(rendered, lambda place: f"query {place}", "embedding queries")

    def _encode(
        self, texts: Sequence[str], name_of: Callable[[int], str], description: str
    ) -> Float32[np.ndarray, "text dim"]:
        def encode(work: OrderedTexts) -> Parts:
            return self._embed_and_keep(work, lambda place: name_of(int(work.positions[place])))

        return VectorSource(self.dim, self.cache, encode).vectors(texts, _ANY_LENGTH, description)

    def _embed_and_keep(self, work: OrderedTexts, name_of: Callable[[int], str]) -> Parts:
        """Yield vectors as the server gives them, each request's after the cache has them."""
        num, num_done = len(work.texts), 0
        if not num:
            return
        if not work.texts[-1]:  # the shortest
            raise SkilltrainError("has no text to embed", where=name_of(num - 1))
        budget = self.server.budget
        cost = cost_in_words(Usage(sum(map(estimate_tokens, work.texts)), 0), budget, "embeddings.price")
        say(f"{num:,} texts to {self.config.model}, {cost}")
        with progress(work.description, num, 0) as show:
            for part, vectors in self.server.embed(work.texts, name_of):
                if self.cache:
                    self.cache.add(work.keys[part.start : part.stop], vectors)
                num_done += len(part)
                show(num_done, f"{budget.used.total:,} tokens")
                yield np.arange(part.start, part.stop), vectors


def open_encoder(config: ApiConfig) -> ApiEncoder:
    """The server ready to encode. Raises SkilltrainError where it does not answer.

    Only a new model in a cache, or no cache, makes it ask the server: for the vector of one word, whose length is then
    noted. So a pool whose vectors are all kept needs no server.
    """
    server = Embeddings(config)
    if config.cache is None:
        return ApiEncoder(config, server, config.dimensions or _length_of_a_vector(server), None)
    folder = _folder(config, config.cache)
    dim = _noted(folder / _ABOUT)
    if dim is None:
        dim = config.dimensions or _length_of_a_vector(server)
        write_json(folder / _ABOUT, _identity(config) | {"numbers_a_vector": dim})
    server.dim = dim
    return ApiEncoder(config, server, dim, VectorCache.open(folder.parent, folder.name, dim))


def plan_encoding(config: ApiConfig, skills: Sequence[Skill], queries: Sequence[Query]) -> dict[str, Any]:
    """About what encoding will cost, for `--dry-run`; asks nobody and writes nothing."""
    budget = Embeddings(config).budget
    dim = _noted(_folder(config, config.cache) / _ABOUT) if config.cache else None
    is_new = dim is None and config.dimensions is None  # a first request finds the length of a vector
    cache = VectorCache(_folder(config, config.cache), dim) if config.cache and dim is not None else None
    num_requests, num_tokens, num_texts, num_kept = int(is_new), is_new * estimate_tokens(_ANY_TEXT), 0, 0
    rendered = [config.render_skill(skill) for skill in skills], [config.render_query(query.text) for query in queries]
    for texts in rendered:
        keys, first = np.unique(text_keys(texts, _ANY_LENGTH)[0], return_index=True)
        new = first[~cache.read(keys)[0]] if cache else first
        num_texts, num_kept = num_texts + len(new), num_kept + len(first) - len(new)
        num_requests += -(-len(new) // config.batch_size)
        num_tokens += sum(estimate_tokens(texts[place]) for place in new)
    counts = {"model": config.model, "num_requests": num_requests, "num_texts": num_texts, "num_kept_texts": num_kept}
    return counts | budget.account(Usage(num_tokens, 0)) | {"budget": str(budget) or None}


def _identity(config: ApiConfig) -> dict[str, Any]:
    """What decides a vector, besides the text."""
    return config.model_dump(mode="json", include={"base_url", "model", "dimensions"})


def _folder(config: ApiConfig, cache: Path) -> Path:
    """Where the cache keeps this model's vectors."""
    return cache.expanduser() / hashlib.sha256(json.dumps(_identity(config), sort_keys=True).encode()).hexdigest()[:24]


def _noted(file: Path) -> int | None:
    """The length of a model's vectors as noted beside them; None where it is not, or the note is damaged."""
    try:
        dim = read_json(file)["numbers_a_vector"]
    except (SkilltrainError, KeyError, TypeError):
        return None
    return dim if type(dim) is int and dim > 0 else None


def _length_of_a_vector(server: Embeddings) -> int:
    ((_, vectors),) = server.embed([_ANY_TEXT], lambda _: f"the text '{_ANY_TEXT}'")
    return vectors.shape[1]
