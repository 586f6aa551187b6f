"""Stage `encode`: puts the vectors of a pool, and of queries, into a cache, on as many processes as there are.

`accelerate launch -m skilltrain encode …` spreads it over the GPUs of one machine or several that share the cache's
folder. Whatever encodes the same skills by the same model afterwards (mine, filter, candidates, evaluate, route) finds
them there; queries are found by mine and filter, for systems encode theirs anew, so that they can be timed.
"""

import hashlib
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import default_device
from skilltrain.models.ranks import made_by_first_rank, of_first_rank, rank_and_world
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, open_encoder
from skilltrain.retrieval.vectors import VectorCache, longest_first, text_keys
from skilltrain.tables import QUERIES, read_skills, read_table
from skilltrain.terminal import launched_ranks, say

_SHOWN_WITHIN = 90  # seconds until a file that another machine wrote is seen; NFS keeps a folder's listing for 60
_PATIENCE = timedelta(hours=24)  # ranks wait for the slowest; one that has ended is noticed at once


class EncodeConfig(Config):
    """Encode a pool, and queries, into a cache of vectors, on any number of processes."""

    stage: Literal["encode"]
    pool: InputPath = Field(description="folder of the pool")
    queries: InputPath | None = Field(
        default=None, description="folder of queries, to encode them too"
    )
    encoder: EncoderSource = Field(
        description="encoder, and the cache that its vectors go to (encoder.cache)"
    )
    out: Path = Field(description="folder for the summary; the vectors are in the cache")

    @model_validator(mode="after")
    def _keeps_vectors(self) -> Self:
        if self.encoder.cache is None:
            raise ValueError("encoder.cache is missing: the folder that the vectors go to")
        return self


def run_encode(config: EncodeConfig, out: Path) -> dict[str, Any]:
    """Counts of texts, of those that were encoded now, and of tokens; writes vectors into the cache, and nothing else.

    All ranks call it. They take every n-th of the missing texts in order of length, so that all have equal work,
    whatever an earlier run on more or fewer ranks has left. Equal texts are encoded once.
    """
    _join_ranks()
    encoder = open_encoder(config.encoder)
    settings, cache = encoder.model.settings, encoder.cache
    assert cache is not None  # the settings see to it
    skills = read_skills(config.pool)
    chunks = [text for skill in skills for text in settings.chunk_texts(skill)]
    texts = {"skills" if settings.chunks.windows == 1 else "chunks": (chunks, settings.max_tokens)}
    if config.queries is not None:
        requests = read_table(config.queries, QUERIES).column("text").to_pylist()
        texts["queries"] = (
            list(map(settings.template.render_query, requests)),
            settings.query_max_tokens,
        )
    started, found, counts = monotonic(), dict[str, Any](), Counter[str]()
    for kind, (of_kind, max_tokens) in texts.items():
        count = Counter[str]()
        found |= _encode(encoder, cache, kind, of_kind, max_tokens, count)
        counts += count
    num_texts, tokens, slots = _sums(counts["texts"], counts["tokens"], counts["slots"])
    if num_texts:
        seconds = monotonic() - started
        say(
            f"encoded {num_texts:,} texts, {tokens:,} tokens in {seconds:,.0f} s ({tokens / seconds:,.0f} tokens/s)"
        )
    return found | {
        "num_tokens": tokens,
        "padding": round(1 - tokens / slots, 4) if slots else 0.0,
        "num_ranks": rank_and_world()[1],
        "dim": encoder.model.dim,
        "vectors": str(cache.folder),
    }


def _join_ranks() -> None:
    """Have the processes that `accelerate launch` started talk: over gloo, on GPUs too, for it is little."""
    if launched_ranks() > 1:
        is_cpu = default_device().type == "cpu"
        if is_cpu:
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # DeepSpeed would say on stdout that it had to look
        from accelerate import PartialState

        PartialState(cpu=is_cpu, backend="gloo", timeout=_PATIENCE)


def _sums(*numbers: int) -> list[int]:
    """Each number summed over the ranks; all have come here when this returns."""
    sums = torch.tensor(numbers, dtype=torch.int64)
    if rank_and_world()[1] > 1:
        torch.distributed.all_reduce(sums)
    return sums.tolist()


def _encode(
    encoder: SkillEncoder,
    cache: VectorCache,
    kind: str,
    texts: list[str],
    max_tokens: int,
    count: Counter[str],
) -> dict[str, int]:
    """Encode this rank's share of the texts that the cache lacks; the counts are over all ranks."""
    (rank, world), keys = rank_and_world(), text_keys(texts, max_tokens)
    digest = hashlib.sha256(encoder.identity.encode() + keys.tobytes()).digest()
    if of_first_rank(digest) != digest:
        what = (
            f"rank {rank} has other weights, another number format or other {kind} than the first"
        )
        raise SkilltrainError(
            what, where=encoder.source, fix="give all machines the same files and set precision"
        )
    _, first = np.unique(keys, return_index=True)
    # What the first rank lacks: the others' view of the folder may be older.
    cache.make()
    missing = first[made_by_first_rank(lambda: cache.missing(keys[first]))]
    missing = missing[longest_first([texts[place] for place in missing])]
    share = missing[rank::world]
    description = f"encoding {kind}" + (f" (rank 0 of {world})" if world > 1 else "")
    mine = [texts[place] for place in share.tolist()]
    for part, vectors in encoder.encode_texts(mine, max_tokens, description, count):
        cache.add(keys[share[part]], vectors)
    [encoded] = _sums(count["texts"])
    if rank == 0:
        _wait_for(cache, keys[missing])
    return {
        f"num_{kind}": len(keys),
        f"num_{kind}_distinct": len(first),
        f"num_{kind}_encoded": encoded,
    }


def _wait_for(cache: VectorCache, keys: np.ndarray) -> None:
    """Return when all `keys` are to be seen here. Raises SkilltrainError if they do not appear."""
    deadline = monotonic() + _SHOWN_WITHIN
    while lost := len(cache.missing(keys)):
        if monotonic() > deadline:
            what = f"{lost} vectors that other ranks have written are not here"
            raise SkilltrainError(
                what, where=cache.folder, fix="encoder.cache must be a folder all machines share"
            )
        sleep(1)
