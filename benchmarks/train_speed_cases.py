"""What train_speed.py compares: the cases (model, caps, lists) and the ways in which each trainer is run."""

from dataclasses import dataclass, field
from typing import Literal

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, TEMPERATURE = 2e-5, 0.01, 1.0, 0.05


@dataclass(frozen=True)
class OurMode:
    """skilltrain's step and optimiser, as its loop runs them."""

    name: str
    token_budget: int
    recompute: bool = False
    same_loss: bool = True


@dataclass(frozen=True)
class PeerMode:
    """sentence-transformers' trainer with one of its losses.

    `cached` is CachedMultipleNegativesRankingLoss with `mini_batch` texts (or `mini_batch_tokens`) at a time; for a
    reranker `mini_batch` is ListNetLoss's (None: its default, the batch size; -1: all pairs at once). Without
    `merged` the columns of negatives are embedded one by one (`column_merging_disabled`). `sorted_negatives` lays out
    the data set so that a column holds texts of like length, which the library does not do by itself. `bare` leaves
    out the trainer: collator, loss, backward, clip, fused AdamW. `as_shipped` keeps the model's own dropout of 0.1.
    """

    name: str
    cached: bool = False
    mini_batch: int | None = None
    mini_batch_tokens: int | None = None
    merged: bool = True
    sorted_negatives: bool = False
    bare: bool = False
    as_shipped: bool = False
    compiled: bool = False
    padding_side: Literal["left", "right"] | None = None

    @property
    def same_loss(self) -> bool:
        """Whether its loss can be compared: with dropout it cannot."""
        return not self.as_shipped


Mode = OurMode | PeerMode


@dataclass(frozen=True)
class Case:
    """One model on one kind of lists."""

    name: str
    title: str
    kind: Literal["encoder", "reranker"]
    model: Literal["minilm", "qwen3"]
    description_chars: int
    body_chars: int
    max_tokens: int
    batch: int
    negatives: int
    rounds: int
    num_layers: int
    modes: tuple[Mode, ...]
    sweep: tuple[Mode, ...] = field(default=(), repr=False)


_DEFAULT = PeerMode("sentence-transformers, default")
_SHIPPED = PeerMode("sentence-transformers, default, dropout 0.1 as shipped", as_shipped=True)
_OUR_SWEEP = tuple(
    OurMode(f"skilltrain, budget {budget}{', recompute' if recompute else ''}", budget, recompute)
    for recompute in (False, True)
    for budget in (512, 1024, 2048, 4096, 16384)
)
_ENCODER_SWEEP = (
    _DEFAULT,
    PeerMode("sentence-transformers, default, no trainer", bare=True),
    PeerMode("sentence-transformers, a column at a time", merged=False),
    PeerMode(
        "sentence-transformers, a column at a time, negatives sorted by hand", merged=False, sorted_negatives=True
    ),
    *(PeerMode(f"sentence-transformers, cached, mini-batch {size}", True, size) for size in (1, 4, 8, 32)),
    PeerMode("sentence-transformers, cached, 4096 tokens", True, 32, 4096),
    *_OUR_SWEEP,
)
# A model with absolute positions computes other vectors from texts that are padded on the left.
_QWEN3_SWEEP = (
    *_ENCODER_SWEEP,
    *(
        PeerMode(
            f"sentence-transformers, cached, mini-batch {size}, padding on the right",
            True,
            size,
            None,
            padding_side="right",
        )
        for size in (1, 8)
    ),
)
_RERANKER_SWEEP = (
    PeerMode("sentence-transformers, default, no trainer", bare=True),
    *(PeerMode(f"sentence-transformers, mini-batch {size}", mini_batch=size) for size in (1, 2, 4, 8, 16, -1)),
    PeerMode("sentence-transformers, mini-batch 4, lists sorted by hand", mini_batch=4, sorted_negatives=True),
    *_OUR_SWEEP,
)
_OURS = OurMode("skilltrain", 2048)
_OURS_RECOMPUTE = OurMode("skilltrain, recompute", 2048, True)
_OURS_PACKED = OurMode(
    "skilltrain", 16384
)  # a list with its common prompt is one row: a small budget repeats the prompt
_OURS_PACKED_RECOMPUTE = OurMode("skilltrain, recompute", 4096, True)
_BEST_COLUMNS = PeerMode("sentence-transformers, best (a column at a time)", merged=False)
_CACHED = PeerMode("sentence-transformers, cached (mini-batch 8)", cached=True, mini_batch=8)
_BEST_LISTS = PeerMode("sentence-transformers, best (mini-batch 4)", mini_batch=4)

CASES = (
    Case("encoder-short", "MiniLM encoder, 300+2500 characters, 512 tokens", "encoder", "minilm",
         300, 2500, 512, 8, 10, 3, 6, (_DEFAULT, _BEST_COLUMNS, _CACHED, _OURS, _OURS_RECOMPUTE), _ENCODER_SWEEP),
    Case("encoder-long", "MiniLM encoder, 500+8000 characters, 512 tokens", "encoder", "minilm",
         500, 8000, 512, 8, 10, 3, 6, (_DEFAULT, _BEST_COLUMNS, _CACHED, _OURS, _OURS_RECOMPUTE), _ENCODER_SWEEP),
    Case("encoder-shipped", "MiniLM encoder with its dropout, 300+2500 characters, 512 tokens", "encoder", "minilm",
         300, 2500, 512, 2, 10, 5, 6, (_SHIPPED, _DEFAULT, _OURS), _ENCODER_SWEEP),
    Case("encoder-short-qwen3", "small Qwen3 encoder, 300+2500 characters", "encoder", "qwen3",
         300, 2500, 2048, 8, 10, 5, 4, (_DEFAULT, _BEST_COLUMNS, _CACHED, _OURS, _OURS_RECOMPUTE), _QWEN3_SWEEP),
    Case("encoder-long-qwen3", "small Qwen3 encoder, 500+8000 characters", "encoder", "qwen3",
         500, 8000, 4096, 8, 10, 5, 2, (_DEFAULT, _BEST_COLUMNS, _CACHED, _OURS, _OURS_RECOMPUTE), _QWEN3_SWEEP),
    Case("reranker-minilm", "MiniLM reranker, lists of 20, 500+2000 characters, 512 tokens", "reranker", "minilm",
         500, 2000, 512, 2, 19, 5, 6, (_DEFAULT, _BEST_LISTS, _OURS, _OURS_RECOMPUTE), _RERANKER_SWEEP),
    Case("reranker-qwen3", "small Qwen3 reranker, lists of 20, 500+2000 characters", "reranker", "qwen3",
         500, 2000, 4096, 2, 19, 5, 4, (_DEFAULT, _BEST_LISTS, _OURS_PACKED, _OURS_PACKED_RECOMPUTE), _RERANKER_SWEEP),
)  # fmt: skip
