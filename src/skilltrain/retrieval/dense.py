"""Dense retrieval: skills and queries as unit vectors."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32
from pydantic import Field

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.records import Skill
from skilltrain.retrieval.encode_texts import EncodingCount, encode_texts
from skilltrain.retrieval.nearest import ChunkVectors, Encoders, VectorRanker, starts_of
from skilltrain.retrieval.vectors import OrderedTexts, Parts, VectorCache, cached_vectors


class EncoderSource(EncoderConfig):
    """An encoder to retrieve with."""

    precision: Precision = Field(default="auto", description="auto: bfloat16 where the hardware has it")
    token_budget: int = Field(default=4096, ge=64, description="padded tokens per micro-batch")
    cache: Path | None = Field(default=None, description="folder that keeps vectors by content, for later runs")


class DenseConfig(EncoderSource):
    """An encoder that finds the skills nearest to a query."""

    kind: Literal["dense"] = "dense"
    keep: int | None = Field(default=None, ge=1, description="skills kept per query; null: as many as needed")

    def check(self) -> None:
        """Raise SkilltrainError for a model that is not there or is no encoder; of a Hub model, fetches settings."""
        stored_settings(resolve_model(self.source, weights=False), "encoder")

    def open(self, skills: Sequence[Skill]) -> VectorRanker:
        """The encoder with the vectors of the pool."""
        return self.encoders().over(skills)

    def encoders(self) -> Encoders:
        """The encoder for any pool. Vectors of queries are not kept, so that they can be timed."""
        encoder = open_encoder(self)
        uncached = replace(encoder, cache=None)
        skills, queries = partial(encode_chunks, encoder), partial(encode_queries, uncached)
        return Encoders(skills, queries, encoder.model.settings.window)


@dataclass(frozen=True)
class SkillEncoder:
    """An encoder opened for retrieval; `identity` tells its vectors from those of any other (empty without a cache)."""

    model: Encoder
    source: str
    token_budget: int
    cache: VectorCache | None
    identity: str


def open_encoder(source: EncoderSource) -> SkillEncoder:
    """The encoder ready to encode and no more to be trained, on the GPU where there is one."""
    model = load_encoder(source, default_device()).requires_grad_(False)
    identity = _identity(model) if source.cache else ""
    cache = VectorCache.open(source.cache, identity) if source.cache else None
    pack_linear_layers(model.backbone, source.token_budget)
    return SkillEncoder(model, source.source, source.token_budget, cache, identity)


def _identity(model: Encoder) -> str:
    """A hash over the weights and all that shapes a text's vector, so that a cache never mixes two models.

    Into how many texts a skill is cut does not: windows that are in the cache already are not encoded again.
    """
    settings = model.settings.model_dump(mode="json", exclude={"chunks"})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(model.tokenizer.__class__.__name__.encode())
    for name, tensor in model.backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def encode_skills(encoder: SkillEncoder, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
    """One unit vector per skill, of its first window; equal texts are encoded once, cached texts not at all."""
    settings = encoder.model.settings
    texts = [settings.template.render_skill(skill) for skill in skills]
    return _vectors(encoder, texts, settings.max_tokens, "encoding skills")


def encode_chunks(encoder: SkillEncoder, skills: Sequence[Skill]) -> ChunkVectors:
    """The unit vectors of all windows of each skill, by which queries find it; for repeats see `encode_skills`."""
    settings = encoder.model.settings
    texts = [settings.chunk_texts(skill) for skill in skills]
    vectors = _vectors(encoder, [*chain.from_iterable(texts)], settings.max_tokens, "encoding skills")
    return ChunkVectors(vectors, starts_of([len(of_skill) for of_skill in texts]), settings.chunks.pool)


def encode_queries(encoder: SkillEncoder, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
    """One unit vector per raw query; the template's prompt and cap are applied here."""
    settings = encoder.model.settings
    rendered = [settings.template.render_query(text) for text in texts]
    return _vectors(encoder, rendered, settings.query_max_tokens, "encoding queries")


def _vectors(encoder: SkillEncoder, texts: Sequence[str], max_tokens: int, description: str) -> np.ndarray:
    def encode(work: OrderedTexts) -> Parts:
        return encode_texts(encoder.model, work, encoder.token_budget, EncodingCount())

    return cached_vectors(texts, max_tokens, description, encoder.cache, encode)
