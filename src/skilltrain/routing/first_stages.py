"""First stages: what finds candidates for a query in a whole pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32
from pydantic import Field

from skilltrain.config import Config
from skilltrain.llm.embeddings import Embeddings
from skilltrain.models.loading import resolve_model, stored_settings
from skilltrain.records import Skill
from skilltrain.retrieval import api_encoder, dense
from skilltrain.retrieval.api_encoder import ApiEncoderSource
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import Found, nearest

Vectors = Float32[np.ndarray, "text dim"]
Encode = Callable[[Sequence[str]], Vectors]


class LexicalSource(Config):
    """BM25 over name, description and body (`full`), or without the body (`nd`)."""

    fields: Literal["full", "nd"] = Field(default="full", description="what BM25 sees of a skill")


@dataclass(frozen=True)
class FirstStage:
    """A first stage with its pool prepared. A query takes `encode`, then `search`; BM25 has nothing to encode.

    `search` takes what `encode` made of the texts, and the number of skills wanted. `encode_anew` takes nothing from
    a cache, so that it can be timed; None where a query is sent to a server, which costs money.
    """

    encode: Callable[[Sequence[str]], Any]
    search: Callable[[Any, int], Found]
    encode_anew: Callable[[Sequence[str]], Any] | None

    def rank(self, texts: Sequence[str], depth: int) -> Found:
        """Positions in the pool and scores of the `depth` best skills for each text."""
        return self.search(self.encode(texts), depth)


def check_first_stage(source: LexicalSource | EncoderSource | ApiEncoderSource) -> None:
    """Raise SkilltrainError for a model that is not there or of the other kind, and for settings an API cannot have."""
    if isinstance(source, EncoderSource):
        stored_settings(resolve_model(source.source, weights=False), "encoder")
    elif isinstance(source, ApiEncoderSource):
        Embeddings(source)


def open_first_stage(source: LexicalSource | EncoderSource | ApiEncoderSource, skills: Sequence[Skill]) -> FirstStage:
    """The stage ready to answer: its index built, or its skills encoded."""
    if isinstance(source, LexicalSource):
        index = BM25Index.build(skills, partial(_lexical_text, fields=source.fields))
        return FirstStage(list, lambda texts, depth: index.search(texts, min(depth, len(skills))), list)
    if isinstance(source, ApiEncoderSource):
        server = api_encoder.open_encoder(source)
        return _dense(
            api_encoder.encode_skills(server, skills), lambda texts: api_encoder.encode_queries(server, texts), None
        )
    encoder = dense.open_encoder(source)
    uncached = replace(encoder, cache=None)
    return _dense(
        dense.encode_skills(encoder, skills),
        lambda texts: dense.encode_queries(encoder, texts),
        lambda texts: dense.encode_queries(uncached, texts),
    )


def _dense(vectors: Vectors, encode: Encode, encode_anew: Encode | None) -> FirstStage:
    return FirstStage(encode, lambda queries, depth: nearest(queries, vectors, depth), encode_anew)


def _lexical_text(skill: Skill, fields: Literal["full", "nd"]) -> str:
    return bm25_text(skill) if fields == "full" else f"{skill.name} {skill.description}"
