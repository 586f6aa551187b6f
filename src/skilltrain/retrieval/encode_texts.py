"""Many texts through an encoder: longest first, in micro-batches of texts of one length, each block kept when done."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, Int32

from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import Groups, micro_batches, num_slots
from skilltrain.retrieval.vectors import OrderedTexts, Parts
from skilltrain.terminal import progress

_BLOCK = 2048  # texts whose token ids are in memory at once
_TOKENIZED_AT_ONCE = 256  # the tokenizer needs about 100 bytes per token while it works
_SAVE_SECONDS = 60  # a slow model's vectors are given out when a block takes longer than this
_ENOUGH_TOKENS = 512  # on a CPU a micro-batch of so many tokens is as fast a token as a larger one

Ids = Int32[np.ndarray, " token"]


@dataclass
class EncodingCount:
    """What was encoded: texts, tokens, and tokens with padding."""

    texts: int = 0
    tokens: int = 0
    slots: int = 0


@torch.inference_mode()
def encode_texts(model: Encoder, work: OrderedTexts, token_budget: int, count: EncodingCount) -> Parts:
    """Yield (places in `work`, their unit vectors) as they are done; `count` grows with them.

    Raises SkilltrainError for vectors that are no numbers.
    """
    if not len(work.texts):
        return
    before, started = replace(count), time.monotonic()
    enough = _ENOUGH_TOKENS if model.device.type == "cpu" else token_budget
    with progress(work.description, len(work.texts), 0) as show:
        for start, ids in _tokenized(model, work):
            lengths = [len(text) for text in ids]
            groups = even_groups(lengths, token_budget, enough)
            done: list[int] = []
            vectors: list[torch.Tensor] = []
            saved = time.monotonic()
            for number, group in enumerate(groups, 1):
                vectors.append(model([ids[position] for position in group]))
                done += group
                count.texts += len(group)
                count.tokens += sum(lengths[position] for position in group)
                count.slots += num_slots(lengths, [group])
                rate = (count.tokens - before.tokens) / max(1e-9, time.monotonic() - started)
                show(count.texts - before.texts, f"{rate:,.0f} tokens/s")
                if number == len(groups) or time.monotonic() - saved > _SAVE_SECONDS:
                    yield start + np.array(done), _as_numbers(vectors, model)
                    done, vectors, saved = [], [], time.monotonic()


def _as_numbers(vectors: list[torch.Tensor], model: Encoder) -> Float32[np.ndarray, "some dim"]:
    found = torch.cat(vectors).float().cpu().numpy()
    if not np.isfinite(found).all():
        source = model.backbone.config.name_or_path
        raise SkilltrainError("the encoder gave vectors that are no numbers", where=source)
    return found


def _tokenized(model: Encoder, work: OrderedTexts) -> Iterator[tuple[int, list[Ids]]]:
    """Yield (where a block starts, its texts' token ids).

    Beside a GPU the next block is tokenised while the model works; on a CPU the two would compete for the cores.
    """

    def tokenize(start: int) -> list[Ids]:
        ids: list[Ids] = []
        for first in range(start, start + _BLOCK, _TOKENIZED_AT_ONCE):
            some = work.texts[first : min(first + _TOKENIZED_AT_ONCE, start + _BLOCK)]
            ids += [np.asarray(text, dtype=np.int32) for text in model.tokenize(some, work.max_tokens)]
        return ids

    starts = range(0, len(work.texts), _BLOCK)
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
