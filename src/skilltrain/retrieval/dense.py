"""Dense retrieval: skills and queries as unit vectors, encoded longest first, texts of one length together."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.micro_batches import Groups, micro_batches
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex, starts_of
from skilltrain.retrieval.vectors import Parts, Positions, VectorCache, cached_vectors
from skilltrain.terminal import progress

_BLOCK = (
    2048  # texts whose token ids are in memory at once, and vectors that are given out together
)
_TOKENIZED_AT_ONCE = 256  # the tokenizer needs about 100 bytes per token while it works
_SAVE_SECONDS = 60  # a slow model's vectors are given out earlier
_ENOUGH_TOKENS = 512  # on a CPU a micro-batch of so many tokens is as fast a token as a larger one


class OpenConfig(EncoderConfig):
    """An encoder to answer with."""

    precision: Precision = Field(
        default="auto", description="auto: bfloat16 where the hardware has it"
    )
    token_budget: int = Field(default=4096, ge=64, description="padded tokens per micro-batch")

    def check(self) -> None:
        """Raise SkilltrainError for a model that is not there or is no encoder; of a Hub model, fetches settings."""
        stored_settings(resolve_model(self.source, weights=False), "encoder")


class EncoderSource(OpenConfig):
    """An encoder to retrieve with."""

    cache: Path | None = Field(
        default=None, description="folder that keeps vectors by content, for later runs"
    )


class DenseConfig(EncoderSource):
    """An encoder that finds the skills nearest to a query."""

    kind: Literal["dense"] = "dense"
    keep: int | None = Field(
        default=None, ge=1, description="skills kept per query; null: as many as needed"
    )

    def open(self, opened: dict[str, Any] | None = None) -> "SkillEncoder":
        return open_encoder(self, opened)


@dataclass(frozen=True)
class SkillEncoder:
    """An encoder opened for retrieval; `identity` tells its vectors from those of any other (empty without a cache)."""

    model: Encoder
    source: str
    token_budget: int
    cache: VectorCache | None
    identity: str

    def over(self, skills: Mapping[str, Skill], kept: ChunkVectors | None = None) -> PoolRanker:
        """The ranker of a pool, of which `kept` has the vectors; queries go into no cache, so that it can be timed."""
        chunks = kept or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, replace(self, cache=None).encode_queries))

    def encode_skills(self, skills: Sequence[Skill]) -> Float32[np.ndarray, "skill dim"]:
        """One unit vector per skill, of its first window; equal texts are encoded once, cached texts not at all."""
        settings = self.model.settings
        texts = [settings.template.render_skill(skill) for skill in skills]
        return self._vectors(texts, settings.max_tokens, "encoding skills")

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """The unit vectors of all windows of each skill, by which queries find it; for repeats see `encode_skills`."""
        settings = self.model.settings
        texts = [settings.chunk_texts(skill) for skill in skills]
        vectors = self._vectors(
            [*chain.from_iterable(texts)], settings.max_tokens, "encoding skills"
        )
        return ChunkVectors(
            vectors, starts_of([len(of_skill) for of_skill in texts]), settings.chunks.pool
        )

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "query dim"]:
        """One unit vector per raw query; the template's prompt and cap are applied here."""
        settings = self.model.settings
        rendered = [settings.template.render_query(text) for text in texts]
        return self._vectors(rendered, settings.query_max_tokens, "encoding queries")

    def _vectors(self, texts: Sequence[str], max_tokens: int, description: str) -> np.ndarray:
        def encode(some: list[str], _: Positions) -> Parts:
            return self.encode_texts(some, max_tokens, description, Counter())

        return cached_vectors(texts, max_tokens, self.cache, encode)

    @torch.inference_mode()
    def encode_texts(
        self, texts: Sequence[str], max_tokens: int, description: str, count: Counter[str]
    ) -> Parts:
        """Yield (places in `texts`, which come longest first, and their unit vectors).

        `count` starts empty, and grows by texts, their tokens, and the slots that these took, padding included. Raises
        SkilltrainError where a vector is no number.
        """
        if not texts:
            return
        model = self.model
        started = saved = time.monotonic()
        enough = _ENOUGH_TOKENS if model.device.type == "cpu" else self.token_budget
        places: list[int] = []
        vectors: list[torch.Tensor] = []
        with progress(description, len(texts), 0) as show:
            for start, ids in _tokenized(model, texts, max_tokens):
                for group in even_groups([len(text) for text in ids], self.token_budget, enough):
                    batch = [ids[position] for position in group]
                    vectors.append(model(batch))
                    places += [start + position for position in group]
                    count.update(
                        texts=len(batch), tokens=sum(map(len, batch)), slots=model.num_slots(batch)
                    )
                    show(
                        count["texts"],
                        f"{count['tokens'] / max(1e-9, time.monotonic() - started):,.0f} tokens/s",
                    )
                    is_due = len(places) >= _BLOCK or time.monotonic() - saved > _SAVE_SECONDS
                    if count["texts"] < len(texts) and not is_due:
                        continue
                    found = torch.cat(vectors).float().cpu().numpy()
                    if not np.isfinite(found).all():
                        source = model.backbone.config.name_or_path
                        raise SkilltrainError(
                            "the encoder gave vectors that are no numbers", where=source
                        )
                    yield np.array(places), found
                    places, vectors, saved = [], [], time.monotonic()


def open_encoder(source: OpenConfig, opened: dict[str, Any] | None = None) -> SkillEncoder:
    """The encoder ready to encode, never to be trained; `opened` keeps the model for sources of another cache."""
    opened = {} if opened is None else opened
    key = repr(source.model_dump(include={*OpenConfig.model_fields}))
    folder = source.cache if isinstance(source, EncoderSource) else None
    model, identity = opened.get(key, (None, ""))
    if model is None or (folder and not identity):
        model = load_encoder(source, default_device()).requires_grad_(False)
        identity = _identity(model) if folder else ""
        pack_linear_layers(model.backbone, source.token_budget)
        opened[key] = (model, identity)
    cache = VectorCache(folder.expanduser() / identity) if folder else None
    return SkillEncoder(model, source.source, source.token_budget, cache, identity)


def _identity(model: Encoder) -> str:
    """A hash over the weights and all that shapes a text's vector (chunks' number does not): caches never mix."""
    settings = model.settings.model_dump(mode="json", exclude={"chunks"})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(model.tokenizer.__class__.__name__.encode())
    for name, tensor in model.backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def _tokenized(
    model: Encoder, texts: Sequence[str], max_tokens: int
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield (where a block starts, its texts' token ids); beside a GPU, tokenised while the model works."""

    def tokenize(start: int) -> list[np.ndarray]:
        block = texts[start : start + _BLOCK]
        parts = (
            block[first : first + _TOKENIZED_AT_ONCE]
            for first in range(0, len(block), _TOKENIZED_AT_ONCE)
        )
        return [
            np.asarray(ids, dtype=np.int32)
            for some in parts
            for ids in model.tokenize(some, max_tokens)
        ]

    starts = range(0, len(texts), _BLOCK)
    if model.device.type == "cpu":
        yield from zip(starts, map(tokenize, starts), strict=True)
        return
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(tokenize, 0)
        for start in starts:
            ids, ahead = ahead.result(), thread.submit(tokenize, start + _BLOCK)
            yield start, ids


def even_groups(lengths: Sequence[int], token_budget: int, enough: int) -> Groups:
    """Positions in micro-batches of at most `token_budget` padded tokens, longest first.

    Where texts of one length have `enough` tokens together they stay among themselves: no mask, 10 to 20% faster.
    """
    of_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        of_length.setdefault(length, []).append(position)
    groups: Groups = []
    mixed: list[int] = []
    for length, positions in of_length.items():
        size = max(1, token_budget // max(1, length))
        chunks = [positions[start : start + size] for start in range(0, len(positions), size)]
        if length * len(chunks[-1]) < enough:
            mixed += chunks.pop()
        groups += chunks
    groups += [
        [mixed[place] for place in group]
        for group in micro_batches([lengths[p] for p in mixed], token_budget)
    ]
    return sorted(groups, key=lambda group: -lengths[group[0]])
