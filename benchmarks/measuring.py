"""Helpers of the speed benchmarks: processes, time and memory, FLOP, and ratios with intervals."""

import re
import resource
import sys
import time
import timeit
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import ArrayLike

SEED = 0
_NUM_RESAMPLES = 10_000
_GEMM_SIZE = 2048  # rows and columns of the matrices whose product is timed


def process_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a measured process. Torch reads them on import."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        # Without this, DeepSpeed prints on stdout how it chose a device, if it is installed.
        "DS_ACCELERATOR": "cpu",
    }


def new_parser(description: str | None, names: Sequence[str], kind: str) -> ArgumentParser:
    """Create a parser with the options of all speed benchmarks: --threads, --only and --json.

    Args:
        description: Text of --help.
        names: Choices of --only. All of them are the default.
        kind: What a name stands for, such as "CASE".
    """
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--threads", type=int, default=2, help="threads, or worker processes, of each measurement")
    add("--only", nargs="+", choices=names, default=names, metavar=kind, help=", ".join(names))
    add("--json", type=Path, help="file to write all measurements to")
    return parser


def new_process(
    initializer: Callable[..., None] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """Create an executor with one fresh process, so that its peak memory is measured separately.

    Args:
        initializer: Function that the process calls first.
        arguments: Its arguments.
    """
    return ProcessPoolExecutor(1, get_context("spawn"), initializer, arguments)


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Usage:
    """Time and memory that some work took.

    Attributes:
        seconds: Elapsed time.
        cpu_seconds: Processor time of the process.
        peak_bytes: Peak memory of the process beyond its memory at the first `Meter.start`.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Meter:
    """Measures time since the last `start`, and peak memory since the first one."""

    def __init__(self) -> None:
        self.baseline_bytes: int | None = None
        self.start_time = 0.0
        self.cpu_start_time = 0.0

    def start(self) -> None:
        """Start the clocks. The first call also records the memory in use."""
        if self.baseline_bytes is None:
            self.baseline_bytes = psutil.Process().memory_info().rss
        self.start_time = time.perf_counter()
        self.cpu_start_time = time.process_time()

    def read(self) -> Usage:
        """Return what was used since the start."""
        seconds = time.perf_counter() - self.start_time
        cpu_seconds = time.process_time() - self.cpu_start_time
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Usage(seconds, cpu_seconds, peak_bytes - (self.baseline_bytes or 0))


def peak_bytes(pid: int | str = "self") -> int:
    """Return the peak memory of a process (VmHWM), or 0 if the process has ended.

    `ru_maxrss` does not serve here: a new process inherits its value from its parent.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


class GemmPeak:
    """Measures how fast this machine multiplies two float32 matrices, in FLOP/s."""

    def __init__(self) -> None:
        """Create two random square matrices, and a function per library that multiplies them."""
        import torch

        inputs = torch.randn(_GEMM_SIZE, _GEMM_SIZE)
        weight = torch.randn(_GEMM_SIZE, _GEMM_SIZE)
        onednn = torch.ops.mkldnn
        packed = onednn._reorder_linear_weight(weight, _GEMM_SIZE)  # in oneDNN's memory layout
        self.products = (
            partial(torch.mm, inputs, weight),
            partial(onednn._linear_pointwise, inputs, packed, None, "none", [], ""),
        )
        self.measure()  # warm-up

    def measure(self) -> list[float]:
        """Return the best of six rates with MKL, which PyTorch uses, and with oneDNN."""
        rates = []
        for product in self.products:
            seconds = min(timeit.repeat(product, number=1, repeat=6))
            rates.append(2 * _GEMM_SIZE**3 / seconds)
        return rates


def forward_flops(network: Any, num_tokens: float, num_pairs: float) -> float:
    """Return the FLOP of a forward pass (Kaplan et al. 2020, section 2.1).

    A weight of a linear layer costs 2 FLOP per token. Attention costs 4 FLOP per layer, per unit of
    width and per pair of tokens. Embeddings and heads are not counted. A training step takes three
    times as many FLOP as its forward pass.

    Args:
        network: Transformer.
        num_tokens: Number of tokens of all texts.
        num_pairs: Sum of `num_attended_pairs` over all texts.
    """
    from torch import nn

    head_names = ("pooler", "classifier", "lm_head", "score")
    num_weights = 0
    for name, module in network.named_modules():
        is_head = name.startswith(head_names) or ".pooler" in name
        if isinstance(module, nn.Linear) and not is_head:
            num_weights += module.weight.numel()

    config = network.config
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    attention_width = config.num_hidden_layers * num_heads * head_dim
    return 2.0 * num_weights * num_tokens + 4.0 * attention_width * num_pairs


def num_attended_pairs(network: Any, length: int) -> float:
    """Count the pairs of a token and a token that it attends to, in a text of `length` tokens."""
    if is_causal(network):
        return length * (length + 1) / 2
    return length**2


def is_causal(network: Any) -> bool:
    """Return whether a token attends only to itself and to earlier tokens."""
    return "bert" not in type(network).__name__.lower()


def format_ratio(ours: ArrayLike, theirs: ArrayLike) -> str:
    """Format the median of theirs/ours as `median [low, high], n`.

    The 95% interval is a bootstrap over the pairs of measurements.
    """
    ratios = np.asarray(theirs) / np.asarray(ours)
    rng = np.random.default_rng(SEED)
    samples = rng.integers(len(ratios), size=(_NUM_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[samples], axis=1), [0.025, 0.975])
    return f"{np.median(ratios):.2f} [{low:.2f}, {high:.2f}], {len(ratios)}"
