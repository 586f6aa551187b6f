"""What train_speed and encode_speed share: processes of one's own, the GEMM peak, FLOP, ratios with intervals."""

import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES, SEED = 10_000, 0


def set_environment(threads: int) -> None:
    """For this process and those that it starts, before torch is loaded."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ["DS_ACCELERATOR"] = (
        "cpu"  # DeepSpeed, where it is installed, would say on stdout that it had to look
    )


def own_process(*initial: Any) -> ProcessPoolExecutor:
    """A process for one way of doing the work, so that its peak memory is its own: `initial` is a call made in it."""
    function, *arguments = initial or (None,)
    return ProcessPoolExecutor(1, get_context("spawn"), function, tuple(arguments))


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Meter:
    """Time and memory of this process from the last `start` on; memory counts from the first."""

    def __init__(self) -> None:
        self.baseline: int | None = None
        self.started = self.cpu_started = 0.0

    def start(self) -> None:
        """Begin to measure."""
        if self.baseline is None:
            self.baseline = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float, int]:
        """(seconds, seconds of CPU time, the most bytes that this process had beyond those at the first start)."""
        seconds, cpu_seconds = (
            time.perf_counter() - self.started,
            time.process_time() - self.cpu_started,
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return seconds, cpu_seconds, peak - (self.baseline or 0)


class Gemm:
    """The best rates of float32 products of 2048 x 2048 matrices, in FLOP/s."""

    def __init__(self) -> None:
        import torch

        left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
        packed = torch.ops.mkldnn._reorder_linear_weight(right, 2048)  # as oneDNN wants it
        self.products = [
            lambda: torch.mm(left, right),
            lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
        ]
        self.rates()

    def rates(self) -> list[float]:
        """By PyTorch's own way (MKL) and by oneDNN, each the best of six."""
        return [2 * 2048**3 / min(_seconds(product) for _ in range(6)) for product in self.products]


def _seconds(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def forward_flops(network: Any, tokens: float, seen: float) -> float:
    """FLOP of a forward pass over so many tokens, of which `seen` pairs see each other (Kaplan et al. 2020, 2.1).

    2 a weight of the linear layers and token (embeddings and heads, used once a text, are left out), and in attention
    4 a layer, width and pair. A training step takes three times as many.
    """
    from torch import nn

    names, config = ("pooler", "classifier", "lm_head", "score"), network.config
    weights = sum(
        module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(names) and ".pooler" not in name
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        2.0 * weights * tokens
        + 4.0 * config.num_hidden_layers * config.num_attention_heads * width * seen
    )


def pairs_seen(network: Any, length: int) -> float:
    """Pairs of tokens that see each other in a text of so many tokens."""
    return length * (length + 1) / 2 if is_causal(network) else length**2


def is_causal(network: Any) -> bool:
    """Whether a token sees only those before it."""
    return "bert" not in type(network).__name__.lower()


def ratio(ours: Sequence[float], other: Sequence[float]) -> str:
    """The median of other/ours over the pairs, with a 95% interval by bootstrap over pairs."""
    ratios = np.asarray(other) / np.asarray(ours)
    drawn = np.random.default_rng(SEED).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return f"{np.median(ratios):.2f} [{low:.2f}, {high:.2f}], {len(ratios)}"
