"""The process that encodes skills in one mode, all of them on each demand; its peak memory is its own."""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skilltrain.records import Skill


@dataclass(frozen=True)
class Mode:
    """A way to encode. `packed` is skilltrain's own linear layers; `batch_size` is sentence-transformers'."""

    name: str
    library: Literal["skilltrain", "sentence-transformers"] = "skilltrain"
    precision: Literal["float32", "auto"] = "float32"
    packed: bool = True
    batch_size: int = 32


@dataclass(frozen=True)
class Work:
    """What a worker is to do; the vectors of its first round go to `out`."""

    mode: Mode
    skills: tuple[Skill, ...]
    folder: Path
    threads: int
    out: Path


@dataclass(frozen=True)
class Round:
    """What a worker says of having encoded all skills once; `flops` are those that cannot be done without."""

    seconds: float
    cpu_seconds: float
    tokens: int
    slots: int
    flops: float
    peak_bytes: int


def run(work: Work, pipe: Connection) -> None:
    """Say "ready", then encode all skills for each message received; `slots` are tokens with padding."""
    import torch

    torch.set_num_threads(work.threads)
    lengths, flops = _lengths_and_flops(work)
    slots: list[int] = []
    encode = (_ours if work.mode.library == "skilltrain" else _peer)(work, slots)
    baseline = _resident_bytes()
    pipe.send("ready")
    while pipe.recv():
        slots.clear()
        started, cpu_started = time.perf_counter(), time.process_time()
        vectors = encode()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        if not work.out.exists():
            np.save(work.out, vectors)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline
        pipe.send(Round(seconds, cpu_seconds, sum(lengths), sum(slots), flops, int(peak)))


def measure_gemm(threads: int, pipe: Connection) -> None:
    """For each message received, FLOP/s of float32 products by MKL and by oneDNN, the best of six of each."""
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 2048)
    products: list[Callable[[], Any]] = [
        lambda: torch.mm(left, right),
        lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
    ]
    pipe.send("ready")
    while pipe.recv():
        pipe.send([2 * 2048**3 / min(_seconds(product) for _ in range(6)) for product in products])


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _ours(work: Work, slots: list[int]) -> Callable[[], np.ndarray]:
    from skilltrain.retrieval import dense

    if not work.mode.packed:
        dense.pack_linear_layers = lambda network, num_rows: None
    encoder = dense.open_encoder(dense.EncoderSource(source=str(work.folder), precision=work.mode.precision))
    encoder.model.backbone.register_forward_pre_hook(
        lambda _module, _inputs, given: slots.append(given["input_ids"].numel()), with_kwargs=True
    )
    return lambda: dense.encode_skills(encoder, work.skills)


def _peer(work: Work, slots: list[int]) -> Callable[[], np.ndarray]:
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(work.folder), device="cpu")
    settings = _plain_encoder(work).settings
    model.max_seq_length = settings.max_tokens
    texts = [settings.template.skill.render(skill) for skill in work.skills]
    model[0].register_forward_pre_hook(lambda _module, inputs: slots.append(inputs[0]["input_ids"].numel()))
    return lambda: model.encode(texts, batch_size=work.mode.batch_size, show_progress_bar=False)


def _plain_encoder(work: Work) -> Any:
    import torch

    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return load_encoder(EncoderConfig(source=str(work.folder)), torch.device("cpu"))


def _lengths_and_flops(work: Work) -> tuple[list[int], float]:
    """(tokens of each text, FLOP of a forward pass over them).

    2 a weight of the linear layers and token, and in attention 4 a layer, width and pair of tokens that see each other.
    """
    from torch import nn

    encoder = _plain_encoder(work)
    texts = [encoder.settings.template.skill.render(skill) for skill in work.skills]
    lengths = [len(ids) for ids in encoder.tokenize(texts, encoder.settings.max_tokens)]
    config = encoder.backbone.config
    weights = sum(layer.weight.numel() for layer in encoder.backbone.modules() if isinstance(layer, nn.Linear))
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    seen = sum(n * n if config.model_type == "bert" else n * (n + 1) / 2 for n in lengths)
    return lengths, 2.0 * weights * sum(lengths) + 4.0 * config.num_hidden_layers * width * seen


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
