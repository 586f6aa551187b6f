"""An embeddings API as an encoder: skills and queries as unit vectors, none of them paid for twice."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.llm import Usage
from skilltrain.llm.ask import cost_in_words
from skilltrain.llm.budget import estimate_tokens
from skilltrain.llm.embeddings import Embeddings
from skilltrain.llm.settings import EmbeddingsConfig
from skilltrain.records import Skill
from skilltrain.retrieval.encode_texts import OrderedTexts, Parts, VectorSource, text_keys
from skilltrain.retrieval.vectors import VectorCache
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import long_progress, say

_ABOUT, _ANY_TEXT = "about.json", "skill"
_ANY_LENGTH = 0  # tokens are the server's affair; characters are capped here


class ApiEncoderSource(EmbeddingsConfig):
    """An embeddings API to retrieve with. The key is read from the environment and stands nowhere else."""

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


@dataclass(frozen=True)
class ApiEncoder:
    """An embeddings API opened for retrieval; `server.budget` says what it has taken."""

    source: ApiEncoderSource
    server: Embeddings
    dim: int
    cache: VectorCache | None


def open_encoder(source: ApiEncoderSource) -> ApiEncoder:
    """The API ready to encode. Raises SkilltrainError where it does not answer.

    Only a new model in a cache, or no cache, makes it ask the server: for the vector of one word, whose length is then
    noted. So a pool whose vectors are all kept needs no server.
    """
    server = Embeddings(source)
    if source.cache is None:
        return ApiEncoder(source, server, source.dimensions or _length_of_a_vector(server), None)
    folder = _folder(source, source.cache)
    dim = _noted(folder / _ABOUT)
    if dim is None:
        dim = source.dimensions or _length_of_a_vector(server)
        write_json(folder / _ABOUT, _about(source) | {"numbers_a_vector": dim})
    server.dim = dim
    return ApiEncoder(source, server, dim, VectorCache.open(folder.parent, folder.name, dim))


def _about(source: ApiEncoderSource) -> dict[str, Any]:
    """What decides a vector, beside the text."""
    return source.model_dump(mode="json", include={"base_url", "model", "dimensions"})


def _folder(source: ApiEncoderSource, cache: Path) -> Path:
    """Where the cache keeps this model's vectors."""
    return cache.expanduser() / hashlib.sha256(json.dumps(_about(source), sort_keys=True).encode()).hexdigest()[:24]


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


def plan_encoding(source: ApiEncoderSource, skills: Iterable[Skill], queries: Iterable[str]) -> dict[str, Any]:
    """About what encoding will take, for `--dry-run`; asks nobody and writes nothing."""
    server = Embeddings(source)
    dim = _noted(_folder(source, source.cache) / _ABOUT) if source.cache else None
    is_new = dim is None and source.dimensions is None  # a first request tells the length of a vector
    cache = None
    if source.cache and dim is not None:
        cache = VectorCache(_folder(source, source.cache), dim)
    num_requests, num_tokens, num_texts, num_kept = int(is_new), is_new * estimate_tokens(_ANY_TEXT), 0, 0
    for texts in (map(source.render_skill, skills), map(source.render_query, queries)):
        sizes = array("q")
        keys, _ = text_keys(_sized(texts, sizes), _ANY_LENGTH)
        _, first = np.unique(keys, return_index=True)
        new = first[~cache.holds(keys[first])] if cache else first
        num_texts, num_kept = num_texts + len(new), num_kept + len(first) - len(new)
        num_requests += -(-len(new) // source.batch_size)
        num_tokens += int(np.array(sizes, dtype=np.int64)[new].sum())
    counts = {"model": source.model, "num_requests": num_requests, "num_texts": num_texts, "num_kept_texts": num_kept}
    return counts | server.budget.account(Usage(num_tokens, 0)) | {"budget": str(server.budget) or None}


def _sized(texts: Iterable[str], sizes: "array[int]") -> Iterator[str]:
    """`texts`, while `sizes` takes their estimated tokens."""
    for text in texts:
        sizes.append(estimate_tokens(text))
        yield text


def encode_skills(encoder: ApiEncoder, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
    """One unit vector a skill; equal texts are sent once, texts in the cache not at all.

    Raises SkilltrainError, with the skill named, where one gets no vector. Those before it are kept.
    """
    vectors = _vectors(encoder, lambda position: f"skill {skills[position].skill_id}")
    return vectors.vectors([encoder.source.render_skill(skill) for skill in skills], _ANY_LENGTH, "embedding skills")


def encode_queries(encoder: ApiEncoder, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
    """One unit vector a raw query; prompt and cap are applied here. Errors as of `encode_skills`, counted from 0."""
    vectors = _vectors(encoder, lambda position: f"query {position}")
    return vectors.vectors([encoder.source.render_query(text) for text in texts], _ANY_LENGTH, "embedding queries")


def _vectors(encoder: ApiEncoder, name_of: Callable[[int], str]) -> VectorSource:
    """The API and its cache; `name_of` says what stands at a position among the items."""

    def encode(work: OrderedTexts) -> Parts:
        return _embed_and_keep(encoder, work, lambda place: name_of(int(work.positions[place])))

    return VectorSource(encoder.dim, encoder.cache, encode)


def _embed_and_keep(encoder: ApiEncoder, work: OrderedTexts, name_of: Callable[[int], str]) -> Parts:
    """Yield vectors as the server gives them, each request's after the cache has them."""
    num, num_done = len(work.texts), 0
    if not num:
        return
    if not work.texts[num - 1]:  # the shortest
        raise SkilltrainError("has no text to embed", where=name_of(num - 1))

    usage = Usage(sum(estimate_tokens(work.texts[place]) for place in range(num)), 0)
    cost = cost_in_words(usage, encoder.server.budget, "embeddings.price")
    say(f"{num:,} texts to {encoder.source.model}, {cost}")
    with long_progress(work.description, num, 0) as show:
        for part, vectors in encoder.server.embed((work.texts[place] for place in range(num)), name_of):
            if encoder.cache:
                encoder.cache.add(work.keys[part.start : part.stop], vectors)
            num_done += len(part)
            show(num_done, _taken(encoder.server))
            yield np.arange(part.start, part.stop), vectors


def _taken(server: Embeddings) -> str:
    dollars = server.budget.price(server.budget.used)
    price = "" if dollars is None else f", ${dollars:,.4g}"
    return f"{server.budget.used.total:,} tokens{price}"
