"""Dense retrieval: an encoder turns skills and queries into unit vectors."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.models.encoder import Encoder, EncoderConfig, encoder_settings, load_encoder
from skilltrain.models.loading import (
    Precision,
    default_device,
    model_fingerprint,
    resolve_model,
    stored_settings,
)
from skilltrain.models.micro_batches import Groups, micro_batches
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex, starts_of
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.retrieval.vectors import (
    EncodedTexts,
    VectorCache,
    Vectors,
    cached_vectors,
    encode_once,
)
from skilltrain.terminal import progress

_TEXTS_PER_BLOCK = 2048  # texts to tokenize at once, and vectors to save at once
_TOKENIZED_AT_ONCE = 256  # the tokenizer needs about 100 bytes per token while it works
_MAX_SECONDS_BETWEEN_YIELDS = 60  # so that the cache saves the vectors of a slow model
_ENOUGH_TOKENS = 512  # larger micro-batches are no faster on a CPU
# Settings that decide which texts an encoder reads. They do not change its network.
_TEXT_SETTINGS = {"fields", "template", "max_tokens", "query_max_tokens", "chunks"}


class OpenConfig(EncoderConfig):
    """Settings of an encoder that is not trained."""

    precision: Precision = Field(
        default="auto", description="auto: bfloat16 where the hardware has it"
    )
    token_budget: int = Field(default=4096, ge=64, description="padded tokens per micro-batch")

    def check(self) -> None:
        """Check that the model exists and is an encoder.

        The settings of a Hub model are downloaded.

        Raises:
            SkilltrainError: The model is missing, or of another kind.
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
        if self.cache or not folder:
            return self
        return self.model_copy(update={"cache": folder / "vectors"})


@dataclass(frozen=True)
class SkillEncoder:
    """An encoder that is opened for retrieval.

    Attributes:
        model: The encoder.
        source: Where it was loaded from, for errors.
        token_budget: Padded tokens per micro-batch.
        cache: Vectors of earlier texts, if they are kept.
        identity: Hash that distinguishes its vectors from those of other encoders, with a cache.
        forward: For a model in training: encodes texts that are cut to a number of tokens.
    """

    model: Encoder
    source: str
    token_budget: int
    cache: VectorCache | None = None
    identity: str = ""
    forward: Callable[[Sequence[str], int], Vectors] | None = None

    def over(self, skills: Mapping[str, Skill], stored: ChunkVectors | None = None) -> PoolRanker:
        """Return the ranker of a pool. `stored` holds the pool's vectors if they are known.

        The ranker does not cache queries, so that it can be timed.
        """
        chunks = stored or self.encode_chunks([*skills.values()])
        return PoolRanker([*skills], VectorIndex(chunks, replace(self, cache=None).encode_queries))

    def encode_skills(self, skills: Sequence[Skill]) -> Vectors:
        """Return one unit vector per skill, of its first window."""
        settings = self.model.settings
        texts = [*map(settings.template.render_skill, skills)]
        return self._encode(texts, settings.max_tokens, "encoding skills")

    def encode_chunks(self, skills: Sequence[Skill]) -> ChunkVectors:
        """Return the unit vectors of all windows of each skill.

        A window is a part of a long skill's text (see the setting `chunks`).
        """
        settings = self.model.settings
        windows_by_skill = [settings.chunk_texts(skill) for skill in skills]
        # Encode the windows of all skills together.
        texts = [*chain.from_iterable(windows_by_skill)]
        vectors = self._encode(texts, settings.max_tokens, "encoding skills")  # [window, dim]
        starts = starts_of([len(windows) for windows in windows_by_skill])
        return ChunkVectors(vectors, starts, settings.chunks.pool)

    def save_part(
        self, folder: Path, skills: Sequence[Skill], stored: Any, positions: Sequence[int]
    ) -> None:
        """Write the vectors of `skills`. The cache holds those that were encoded before."""
        self.encode_chunks(skills).save(folder)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per raw query. The template's prompt and cap are applied here."""
        settings = self.model.settings
        max_tokens = settings.query_max_tokens
        rendered = [*map(settings.template.render_query, texts)]
        # Everything that decides the vectors. Rankers that read other fields of skills share them.
        key = (self.model.backbone, self.token_budget, max_tokens, *rendered)
        return encode_once(key, lambda: self._encode(rendered, max_tokens, "encoding queries"))

    def _encode(self, texts: Sequence[str], max_tokens: int, description: str) -> Vectors:
        """Return the vector of each text. Each distinct text that the cache lacks is encoded.

        Args:
            texts: Texts of skills or queries.
            max_tokens: Number of tokens to which texts are cut.
            description: Label of the progress bar.
        """
        # A model in training changes, so that its vectors must not be cached.
        if self.forward:
            return self.forward(texts, max_tokens)
        return cached_vectors(
            texts,
            max_tokens,
            self.cache,
            lambda new_texts: self.encode_texts(new_texts, max_tokens, description, Counter()),
        )

    @torch.inference_mode()
    def encode_texts(
        self, texts: Sequence[str], max_tokens: int, description: str, counts: Counter[str]
    ) -> EncodedTexts:
        """Encode texts, and yield some vectors at a time so that they can be saved.

        Args:
            texts: Texts to encode, long ones first.
            max_tokens: Number of tokens to which texts are cut.
            description: Label of the progress bar.
            counts: Counter to which `texts`, `tokens` and `slots` (tokens and padding) are added.
                It is empty at first.

        Yields:
            Positions in `texts`, and the unit vectors of these texts.

        Raises:
            SkilltrainError: A vector is not finite.
        """
        started = time.monotonic()
        last_yield = started
        positions: list[int] = []
        vectors: list[Tensor] = []
        with progress(description, len(texts)) as show:
            for batch_positions, batch in self._micro_batches(texts, max_tokens):
                positions += batch_positions
                vectors.append(self.model(batch))
                num_tokens = sum(map(len, batch))
                num_slots = self.model.num_slots(batch)
                counts.update(texts=len(batch), tokens=num_tokens, slots=num_slots)

                now = time.monotonic()
                speed = counts["tokens"] / max(1e-9, now - started)
                show(counts["texts"], f"{speed:,.0f} tokens/s")
                is_last = counts["texts"] == len(texts)
                is_late = now - last_yield > _MAX_SECONDS_BETWEEN_YIELDS
                if is_last or is_late or len(positions) >= _TEXTS_PER_BLOCK:
                    yield np.array(positions), self._finite_rows(vectors)
                    positions = []
                    vectors = []
                    last_yield = time.monotonic()

    def _micro_batches(
        self, texts: Sequence[str], max_tokens: int
    ) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Tokenize texts, and yield (positions in `texts`, token ids) of each micro-batch.

        Args:
            texts: Texts to encode.
            max_tokens: Number of tokens to which texts are cut.
        """
        # Texts of one length form a micro-batch if they have at least `min_tokens` tokens, and are
        # mixed with other lengths otherwise. A GPU is fast only with full micro-batches, so the
        # minimum is the budget. On a CPU, smaller ones are as fast.
        min_tokens = self.token_budget
        if self.model.device.type == "cpu":
            min_tokens = _ENOUGH_TOKENS

        for start, token_ids in _tokenize_blocks(self.model, texts, max_tokens):
            lengths = [len(ids) for ids in token_ids]
            for group in even_groups(lengths, self.token_budget, min_tokens):
                # The group counts texts from the beginning of the block.
                positions = [start + index for index in group]
                yield positions, [token_ids[index] for index in group]

    def _finite_rows(self, vectors: list[Tensor]) -> Vectors:
        """Return vectors as rows of one array. Raises SkilltrainError if a value is not finite."""
        rows = torch.cat(vectors).float().cpu().numpy()
        if not np.isfinite(rows).all():
            problem = "the encoder gave vectors that are no numbers"
            where = self.model.backbone.config.name_or_path
            raise SkilltrainError("not-a-number", problem, where=where)
        return rows


def open_encoder(source: OpenConfig, opened: dict[str, Any] | None = None) -> SkillEncoder:
    """Open an encoder that is never trained.

    Args:
        source: Settings of the encoder. A subclass may have further settings, such as a cache.
        opened: Networks that are already loaded, by source and settings. A new network is added.
            Rankers that get the same dict share their networks.
    """
    if opened is None:
        opened = {}
    encoders = opened.setdefault(source.source, {})
    # Encoders share a network if they agree in all settings of OpenConfig that can change it.
    key = repr(source.model_dump(include={*OpenConfig.model_fields} - _TEXT_SETTINGS))
    if key not in encoders:
        encoder = load_encoder(source, default_device()).requires_grad_(False)
        pack_linear_layers(encoder.backbone, source.token_budget)
        encoders[key] = encoder
    encoder = encoders[key]

    # Encoders need settings of their own. A shallow copy of a module shares its weights.
    model = copy(encoder)
    model.settings = encoder_settings(source, encoder.backbone.config)
    folder = source.cache if isinstance(source, EncoderSource) else None
    if folder is None:
        return SkillEncoder(model, source.source, source.token_budget)
    identity = _identity(model, model_fingerprint(source.source))
    cache = VectorCache(folder.expanduser() / identity)
    return SkillEncoder(model, source.source, source.token_budget, cache, identity)


def _identity(model: Encoder, fingerprint: str) -> str:
    """Return a hash of the model's files and of all settings that change the vector of a text.

    The hash is the name of the model's folder in a cache of vectors.

    Args:
        model: Encoder with its settings.
        fingerprint: Hash of the model's files.
    """
    # How a skill is cut into chunks changes the texts, but not the vector of a text.
    settings = model.settings.model_dump_json(exclude={"chunks"})
    content = f"{settings} {model.backbone.dtype} {fingerprint}".encode()
    return hashlib.sha256(content).hexdigest()[:24]


def _tokenize_blocks(
    model: Encoder, texts: Sequence[str], max_tokens: int
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Tokenize texts in blocks of _TEXTS_PER_BLOCK.

    On a GPU, a thread tokenizes the next block while the GPU encodes this one.

    Args:
        model: Encoder, whose tokenizer is used.
        texts: Texts of skills or queries.
        max_tokens: Number of tokens to which each text is cut.

    Yields:
        Position of the first text of a block, and the token ids of each text in it.
    """

    def tokenize(start: int) -> list[np.ndarray]:
        """Return the token ids of each text of the block that begins at `start`."""
        token_ids = []
        block = texts[start : start + _TEXTS_PER_BLOCK]
        # Smaller pieces limit the memory that the tokenizer needs.
        for first in range(0, len(block), _TOKENIZED_AT_ONCE):
            some_texts = block[first : first + _TOKENIZED_AT_ONCE]
            for ids in model.tokenize(some_texts, max_tokens):
                # 4 bytes per token, while a list of Python ints takes at least 8.
                token_ids.append(np.asarray(ids, np.int32))
        return token_ids

    starts = range(0, len(texts), _TEXTS_PER_BLOCK)
    # On a CPU, a thread would compete with the encoder for the same cores.
    if model.device.type == "cpu":
        yield from zip(starts, map(tokenize, starts), strict=True)
        return
    with ThreadPoolExecutor(1) as thread:
        next_block = thread.submit(tokenize, 0)
        for start in starts:
            token_ids = next_block.result()
            # Tokenize the next block while the caller encodes this block. After the last block,
            # there are no texts to tokenize.
            next_block = thread.submit(tokenize, start + _TEXTS_PER_BLOCK)
            yield start, token_ids


def even_groups(lengths: Sequence[int], token_budget: int, min_tokens: int) -> Groups:
    """Group texts into micro-batches, long texts first.

    A micro-batch of texts with the same length needs no padding mask, which is 10 to 20% faster.
    Texts that do not fill such a micro-batch are mixed with texts of other lengths.

    Args:
        lengths: Number of tokens of each text.
        token_budget: Largest number of padded tokens in a micro-batch.
        min_tokens: Smallest number of tokens in a micro-batch of texts with the same length.

    Returns:
        Positions of the texts in each micro-batch.
    """
    positions_by_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        positions_by_length.setdefault(length, []).append(position)

    groups: Groups = []
    mixed: list[int] = []  # positions of texts to mix with other lengths
    for length, positions in positions_by_length.items():
        # Number of texts in a micro-batch. A text may be empty, or longer than the budget.
        size = max(1, token_budget // max(1, length))
        same_length = [positions[start : start + size] for start in range(0, len(positions), size)]
        # The last group may be too small.
        if length * len(same_length[-1]) < min_tokens:
            mixed += same_length.pop()
        groups += same_length

    # `micro_batches` returns positions in `mixed`.
    for group in micro_batches([lengths[position] for position in mixed], token_budget):
        groups.append([mixed[index] for index in group])
    return sorted(groups, key=lambda group: -lengths[group[0]])
