"""Dense retrieval: skills and queries as unit vectors.

Long texts are encoded first, and texts of one length together.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, default_device, resolve_model, stored_settings
from skilltrain.models.micro_batches import Groups, micro_batches
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex, starts_of
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.retrieval.vectors import Parts, VectorCache, Vectors, cached_vectors
from skilltrain.terminal import progress

_BLOCK = 2048  # texts whose token ids are in memory at once
_TOKENIZED_AT_ONCE = 256  # the tokenizer needs about 100 bytes per token while it works
_MAX_SECONDS_BETWEEN_YIELDS = 60  # so that the cache saves the vectors of a slow model
_ENOUGH_TOKENS = 512  # larger micro-batches are no faster on a CPU


class OpenConfig(EncoderConfig):
    """Settings of an encoder that is not trained."""

    precision: Precision = Field(
        default="auto", description="auto: bfloat16 where the hardware has it"
    )
    token_budget: int = Field(default=4096, ge=64, description="padded tokens per micro-batch")

    def check(self) -> None:
        """Raise SkilltrainError if the model is missing or not an encoder.

        It downloads the settings of a Hub model.
        """
        stored_settings(resolve_model(self.source, weights=False), "encoder")


class EncoderSource(OpenConfig):
    """Settings of an encoder with a cache of vectors."""

    cache: Path | None = Field(
        default=None, description="folder that keeps vectors by content, for later runs"
    )


class DenseConfig(EncoderSource, RankerConfig):
    """An encoder that finds the skills nearest to a query."""

    kind: Literal["dense"] = "dense"
    keep: Keep = None
    stored_part = ChunkVectors

    def open(self, opened: dict[str, Any]) -> "SkillEncoder":
        return open_encoder(self, opened)

    def in_router(self, folder: Path | None) -> Self:
        """Keep vectors in the router's folder, unless the settings name another cache."""
        cache = self.cache or (folder and folder / "vectors")
        return self.model_copy(update={"cache": cache})


@dataclass(frozen=True)
class SkillEncoder:
    """An encoder opened for retrieval.

    Attributes:
        identity: Distinguishes its vectors from those of other encoders. It is empty without a cache.
        forward: Encodes texts that are cut to a number of tokens, for a model in training.
    """

    model: Encoder
    source: str
    token_budget: int
    cache: VectorCache | None = None
    identity: str = ""
    forward: Callable[[Sequence[str], int], Vectors] | None = None

    def over(self, skills: Mapping[str, Skill], kept: ChunkVectors | None = None) -> PoolRanker:
        """Return the ranker of a pool. `kept` holds its vectors if they are known.

        The ranker does not cache queries, so that it can be timed.
        """
        chunks = kept or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, replace(self, cache=None).encode_queries))

    def encode_skills(self, skills: Sequence[Skill]) -> Vectors:
        """Return one unit vector per skill, of its first window."""
        settings = self.model.settings
        texts = [settings.template.render_skill(skill) for skill in skills]
        return self._encode(texts, settings.max_tokens, "encoding skills")

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """Return the unit vectors of all windows of each skill."""
        settings = self.model.settings
        texts: list[str] = []
        counts: list[int] = []
        for skill in skills:
            windows = settings.chunk_texts(skill)
            texts += windows
            counts.append(len(windows))
        vectors = self._encode(texts, settings.max_tokens, "encoding skills")
        return ChunkVectors(vectors, starts_of(counts), settings.chunks.pool)

    def save_part(
        self, folder: Path, skills: Sequence[Skill], stored: Any, positions: Sequence[int]
    ) -> None:
        """Write the vectors of `skills`. The cache holds those that were encoded before."""
        self.encode_chunks(skills).save(folder)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per raw query. The template's prompt and cap are applied here."""
        settings = self.model.settings
        rendered = [settings.template.render_query(text) for text in texts]
        return self._encode(rendered, settings.query_max_tokens, "encoding queries")

    def _encode(self, texts: Sequence[str], max_tokens: int, description: str) -> Vectors:
        """Encode each distinct text that the cache lacks."""
        if self.forward:
            return self.forward(texts, max_tokens)

        def encode(new: list[str]) -> Parts:
            return self.encode_texts(new, max_tokens, description, Counter())

        return cached_vectors(texts, max_tokens, self.cache, encode)

    @torch.inference_mode()
    def encode_texts(
        self, texts: Sequence[str], max_tokens: int, description: str, count: Counter[str]
    ) -> Parts:
        """Yield (positions in `texts`, their unit vectors).

        Args:
            texts: Long texts first.
            count: Empty. Grows by `texts`, `tokens`, and `slots`, which are tokens and padding.

        Raises:
            SkilltrainError: A vector holds something that is not a number.
        """
        model = self.model
        min_tokens = _ENOUGH_TOKENS if model.device.type == "cpu" else self.token_budget
        started = saved = time.monotonic()
        positions: list[int] = []
        vectors: list[torch.Tensor] = []
        with progress(description, len(texts), 0) as show:
            for start, token_ids in _tokenized(model, texts, max_tokens):
                lengths = [len(ids) for ids in token_ids]
                for group in even_groups(lengths, self.token_budget, min_tokens):
                    batch = [token_ids[number] for number in group]
                    vectors.append(model(batch))
                    positions += [start + number for number in group]
                    num_tokens = sum(map(len, batch))
                    count.update(texts=len(batch), tokens=num_tokens, slots=model.num_slots(batch))
                    now = time.monotonic()
                    speed = count["tokens"] / max(1e-9, now - started)
                    show(count["texts"], f"{speed:,.0f} tokens/s")
                    is_due = len(positions) >= _BLOCK or now - saved > _MAX_SECONDS_BETWEEN_YIELDS
                    if not is_due and count["texts"] < len(texts):
                        continue
                    rows = torch.cat(vectors).float().cpu().numpy()
                    if not np.isfinite(rows).all():
                        problem = "the encoder gave vectors that are no numbers"
                        raise SkilltrainError(
                            "not-a-number", problem, where=model.backbone.config.name_or_path
                        )
                    yield np.array(positions), rows
                    positions = []
                    vectors = []
                    saved = time.monotonic()


def open_encoder(source: OpenConfig, opened: dict[str, Any] | None = None) -> SkillEncoder:
    """Open an encoder that is never trained. `opened` shares the model between sources."""
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
    """Return a hash of the weights and of all settings that change the vector of a text."""
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
    """Yield (start of a block, token ids of its texts), tokenized while a GPU works."""

    def tokenize(start: int) -> list[np.ndarray]:
        stop = min(start + _BLOCK, len(texts))
        token_ids: list[np.ndarray] = []
        for first in range(start, stop, _TOKENIZED_AT_ONCE):
            some = texts[first : min(first + _TOKENIZED_AT_ONCE, stop)]
            token_ids += [np.asarray(ids, np.int32) for ids in model.tokenize(some, max_tokens)]
        return token_ids

    starts = range(0, len(texts), _BLOCK)
    if model.device.type == "cpu":
        yield from zip(starts, map(tokenize, starts), strict=True)
        return
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(tokenize, 0)
        for start in starts:
            token_ids = ahead.result()
            ahead = thread.submit(tokenize, start + _BLOCK)
            yield start, token_ids


def even_groups(lengths: Sequence[int], token_budget: int, enough: int) -> Groups:
    """Group positions into micro-batches of at most `token_budget` padded tokens, longest first.

    Texts of one length that have `enough` tokens together are not mixed with others. They need no
    mask, which is 10 to 20% faster.
    """
    positions_by_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        positions_by_length.setdefault(length, []).append(position)
    groups: Groups = []
    mixed: list[int] = []
    for length, positions in positions_by_length.items():
        size = max(1, token_budget // max(1, length))
        even = [positions[start : start + size] for start in range(0, len(positions), size)]
        if length * len(even[-1]) < enough:  # only the last group may be small
            mixed += even.pop()
        groups += even
    for group in micro_batches([lengths[position] for position in mixed], token_budget):
        groups.append([mixed[index] for index in group])
    return sorted(groups, key=lambda group: -lengths[group[0]])
