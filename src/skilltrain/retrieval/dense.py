"""Dense retrieval: skills and queries as unit vectors, nearest by cosine."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, default_device
from skilltrain.models.micro_batches import TokenIds, micro_batches
from skilltrain.records import Skill
from skilltrain.retrieval.vector_cache import KEY_BYTES, VectorCache
from skilltrain.templates import EncoderTemplate
from skilltrain.terminal import progress


class EncoderSource(Config):
    """An encoder to retrieve with."""

    source: str = Field(description="folder, Hub id owner/name, or package:NAME (a package that ships a model)")
    max_tokens: int | None = Field(default=None, ge=8, description="token limit of a skill's text")
    template: EncoderTemplate | None = Field(default=None, description="the texts the model sees")
    precision: Precision = Field(default="auto", description="auto: bfloat16 where the hardware has it")
    token_budget: int = Field(default=4096, ge=64, description="padded tokens a micro-batch")
    cache: Path | None = Field(default=None, description="folder that keeps vectors by content, for later runs")


@dataclass(frozen=True)
class SkillEncoder:
    """An encoder opened for retrieval."""

    model: Encoder
    source: str
    token_budget: int
    cache: VectorCache | None


def open_encoder(source: EncoderSource) -> SkillEncoder:
    """The encoder ready to encode, on the GPU where there is one."""
    config = EncoderConfig(
        source=source.source, max_tokens=source.max_tokens, template=source.template, precision=source.precision
    )
    model = load_encoder(config, default_device())
    cache = VectorCache.open(source.cache, _identity(model)) if source.cache else None
    return SkillEncoder(model, source.source, source.token_budget, cache)


def _identity(model: Encoder) -> str:
    """A hash over the weights and all that shapes a vector, so that a cache never mixes two models."""
    digest = hashlib.sha256(json.dumps(model.settings.model_dump(mode="json"), sort_keys=True).encode())
    digest.update(model.tokenizer.__class__.__name__.encode())
    for name, tensor in model.backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def encode_skills(encoder: SkillEncoder, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
    """One unit vector a skill; equal texts are encoded once, cached texts not at all."""
    model = encoder.model
    texts = [model.settings.template.skill.render(skill) for skill in skills]
    return _encode(encoder, texts, model.settings.max_tokens, "encoding skills")


def encode_queries(encoder: SkillEncoder, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
    """One unit vector a raw query; the template's prompt and cap are applied here."""
    settings = encoder.model.settings
    rendered = [settings.template.render_query(text) for text in texts]
    return _encode(encoder, rendered, settings.query_max_tokens, "encoding queries")


def _encode(encoder: SkillEncoder, texts: Sequence[str], max_tokens: int, what: str) -> Float32[np.ndarray, "text dim"]:
    """Encode each distinct text that the cache does not hold, in blocks: they bound the memory of token ids and
    let an interrupted run keep what it has encoded.
    """
    keys = [hashlib.sha256(f"{max_tokens} {text}".encode("utf-8", "replace")).digest()[:KEY_BYTES] for text in texts]
    text_of = dict(zip(keys, texts, strict=True))
    known = encoder.cache.get(list(text_of)) if encoder.cache else {}
    missing = [key for key in text_of if key not in known]
    with progress(what, len(missing)) as (bar, task):
        for start in range(0, len(missing), 4096):
            block = missing[start : start + 4096]
            ids = encoder.model.tokenize([text_of[key] for key in block], max_tokens)
            vectors = _encode_ids(encoder, ids, lambda done: bar.advance(task, done))
            if not np.isfinite(vectors).all():
                raise SkilltrainError("the encoder gave vectors that are no numbers", where=encoder.source)
            if encoder.cache:
                encoder.cache.add(block, vectors)
            known |= dict(zip(block, vectors, strict=True))
    return np.stack([known[key] for key in keys]) if keys else np.zeros((0, encoder.model.dim), dtype=np.float32)


@torch.inference_mode()
def _encode_ids(
    encoder: SkillEncoder, ids: Sequence[TokenIds], advance: Callable[[int], None]
) -> Float32[np.ndarray, "text dim"]:
    result = np.zeros((len(ids), encoder.model.dim), dtype=np.float32)
    for group in micro_batches([len(text) for text in ids], encoder.token_budget):
        result[group] = encoder.model([ids[position] for position in group]).float().cpu().numpy()
        advance(len(group))
    return result


def nearest(
    queries: Float32[np.ndarray, "query dim"], pool: Float32[np.ndarray, "skill dim"], k: int
) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
    """Positions and cosines of the `k` nearest skills of each query, exact; ties go to the lower position."""
    import faiss

    k = min(k, len(pool))
    scores, positions = faiss.knn(
        np.ascontiguousarray(queries, dtype=np.float32),
        np.ascontiguousarray(pool, dtype=np.float32),
        k,
        metric=faiss.METRIC_INNER_PRODUCT,
    )
    order = np.lexsort((positions, -scores), axis=1)
    return np.take_along_axis(positions, order, 1), np.take_along_axis(scores, order, 1)
