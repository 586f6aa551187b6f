"""Many texts through an encoder: longest first, in micro-batches of texts of one length, each block kept when done."""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, Int32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import Groups, micro_batches, num_slots
from skilltrain.retrieval.vectors import KEY, VectorCache
from skilltrain.terminal import progress

_BLOCK = 2048  # texts whose token ids are in memory at once
_TOKENIZED_AT_ONCE = 256  # the tokenizer needs about 100 bytes a token while it works
_SAVE_SECONDS = 60  # a slow model's vectors are given out when a block takes longer than this
_ENOUGH_TOKENS = 512  # on a CPU a micro-batch of so many tokens is as fast a token as a larger one

Ids = Int32[np.ndarray, " token"]


@dataclass
class EncodingCount:
    """What was encoded: texts, tokens, and tokens with padding."""

    texts: int = 0
    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True)
class OrderedTexts:
    """Distinct texts, longest first, cut to `max_tokens`.

    `keys` are as `text_keys` gives them; `positions` say where each text stands among all that were given.
    """

    texts: Sequence[str]
    keys: np.ndarray
    positions: Int64[np.ndarray, " text"]
    max_tokens: int
    description: str


Parts = Iterator[tuple[Int64[np.ndarray, " some"], Float32[np.ndarray, "some dim"]]]
"""Places in `OrderedTexts`, and their vectors, as they are done."""


@dataclass(frozen=True)
class VectorSource:
    """Where vectors of `dim` numbers come from: the cache first, then `encode`, which keeps there what it yields."""

    dim: int
    cache: VectorCache | None
    encode: Callable[[OrderedTexts], Parts]

    def vectors(self, texts: Sequence[str], max_tokens: int, description: str) -> Float32[np.ndarray, "text dim"]:
        """The vector of each text, cut to `max_tokens`; each distinct text is encoded once, a cached one not at all."""
        keys, lengths = text_keys(texts, max_tokens)
        distinct, first, which = np.unique(keys, return_index=True, return_inverse=True)
        missing, vectors = np.ones(len(first), dtype=bool), np.empty((len(first), self.dim), dtype=np.float32)
        if self.cache:
            found, vectors = self.cache.read(distinct)
            missing = ~found
        places = np.flatnonzero(missing)
        places = places[longest_first(lengths[first[places]])]
        positions = first[places]
        work = OrderedTexts(
            [texts[int(position)] for position in positions], distinct[places], positions, max_tokens, description
        )
        for part, some in self.encode(work):
            vectors[places[part]] = some
        return vectors[which]


def text_keys(texts: Iterable[str], max_tokens: int) -> tuple[np.ndarray, Int64[np.ndarray, " text"]]:
    """(a key of each text's content and its token limit, its characters); no text is kept."""
    keys, lengths = bytearray(), array("q")
    for text in texts:
        keys += hashlib.sha256(f"{max_tokens} {text}".encode("utf-8", "replace")).digest()[: KEY.itemsize]
        lengths.append(len(text))
    return np.frombuffer(bytes(keys), KEY), np.array(lengths, dtype=np.int64)


def longest_first(lengths: Int64[np.ndarray, " text"]) -> Int64[np.ndarray, " text"]:
    """Positions in the order of encoding: memory peaks at the start, and the texts of a block are of like length."""
    return np.argsort(-lengths, kind="stable")


def encode_texts(model: Encoder, work: OrderedTexts, token_budget: int, count: EncodingCount) -> Parts:
    """Yield (places in `work`, their unit vectors) as they are done; `count` grows with them.

    Raises SkilltrainError for vectors that are no numbers.
    """
    if not len(work.texts):
        return
    before, started = replace(count), time.monotonic()
    with progress(work.description, len(work.texts), 0) as show:

        def tell() -> None:
            rate = (count.tokens - before.tokens) / max(1e-9, time.monotonic() - started)
            show(count.texts - before.texts, f"{rate:,.0f} tokens/s")

        for start, ids in _tokenized(model, work):
            for part, vectors in _encode_block(model, ids, token_budget, count, tell):
                if not np.isfinite(vectors).all():
                    raise SkilltrainError("the encoder gave vectors that are no numbers")
                yield start + part, vectors


def _tokenized(model: Encoder, work: OrderedTexts) -> Iterator[tuple[int, list[Ids]]]:
    """Yield (where a block starts, its texts' token ids).

    Beside a GPU the next block is tokenised while the model works; on a CPU the two would compete for the cores.
    """
    num = len(work.texts)

    def tokenize(start: int) -> list[Ids]:
        ids: list[Ids] = []
        end = min(start + _BLOCK, num)
        for first in range(start, end, _TOKENIZED_AT_ONCE):
            some = [work.texts[place] for place in range(first, min(first + _TOKENIZED_AT_ONCE, end))]
            ids += [np.asarray(text, dtype=np.int32) for text in model.tokenize(some, work.max_tokens)]
        return ids

    starts = range(0, num, _BLOCK)
    if model.device.type == "cpu":
        yield from ((start, tokenize(start)) for start in starts)
        return
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(tokenize, 0)
        for start in starts:
            ids = ahead.result()
            if start + _BLOCK < num:
                ahead = thread.submit(tokenize, start + _BLOCK)
            yield start, ids


@torch.inference_mode()
def _encode_block(
    model: Encoder, ids: Sequence[Ids], token_budget: int, count: EncodingCount, tell: Callable[[], None]
) -> Iterator[tuple[Int64[np.ndarray, " some"], Float32[np.ndarray, "some dim"]]]:
    lengths = [len(text) for text in ids]
    enough = _ENOUGH_TOKENS if model.device.type == "cpu" else token_budget
    done: list[int] = []
    vectors: list[torch.Tensor] = []
    started = time.monotonic()
    groups = even_groups(lengths, token_budget, enough)
    for number, group in enumerate(groups, 1):
        vectors.append(model([ids[position] for position in group]))
        done += group
        count.texts += len(group)
        count.tokens += sum(lengths[position] for position in group)
        count.slots += num_slots(lengths, [group])
        tell()
        if number == len(groups) or time.monotonic() - started > _SAVE_SECONDS:
            yield np.array(done), torch.cat(vectors).float().cpu().numpy()
            done, vectors, started = [], [], time.monotonic()


def even_groups(lengths: Sequence[int], token_budget: int, enough: int) -> Groups:
    """Positions in micro-batches of at most `token_budget` padded tokens, longest first.

    Texts of one length are among themselves where they have `enough` tokens together: without padding there is no
    mask, and attention is faster by 10 to 20%.
    """
    of_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        of_length.setdefault(length, []).append(position)
    groups: Groups = []
    mixed: list[int] = []
    for length, positions in of_length.items():
        size = max(1, token_budget // max(1, length))
        chunks = [positions[start : start + size] for start in range(0, len(positions), size)]
        if chunks and length * len(chunks[-1]) < enough:
            mixed += chunks.pop()
        groups += chunks
    groups += [[mixed[place] for place in group] for group in micro_batches([lengths[p] for p in mixed], token_budget)]
    return sorted(groups, key=lambda group: -lengths[group[0]])
