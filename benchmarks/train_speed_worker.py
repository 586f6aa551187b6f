"""The process that trains one case in one mode, a step at a time, on demand; its peak memory is its own."""

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from train_speed_cases import LEARNING_RATE, MAX_GRAD_NORM, TEMPERATURE, WEIGHT_DECAY, Case, Mode, OurMode
from train_speed_data import Material, read_material
from train_speed_flops import useful_flops


@dataclass(frozen=True)
class Work:
    """What a worker is to do; `folder` is the model's."""

    case: Case
    mode: Mode
    material: Path
    folder: Path
    threads: int


@dataclass(frozen=True)
class StepReport:
    """What a worker says of a step: its share of padding is that of all steps so far, its peak memory too."""

    seconds: float
    cpu_seconds: float
    loss: float
    padding: float
    peak_bytes: int
    kept_bytes: int
    useful_flops: float = 0.0


@dataclass
class Tokens:
    """Tokens computed, with and without padding."""

    real: int = 0
    slots: int = 0


def run(work: Work, pipe: Connection) -> None:
    """Say "ready", then take one training step for each message received."""
    import torch

    torch.set_num_threads(work.threads)
    training = _Training(work, pipe)
    if isinstance(work.mode, OurMode):
        _train_ours(work, work.mode, training)
    else:
        from train_speed_peer import train_peer

        train_peer(work.case, work.mode, work.folder, read_material(work.material), training)


def measure_gemm(threads: int, pipe: Connection) -> None:
    """For each message received, the best rate of float32 products of 2048 x 2048 matrices, in FLOP/s.

    Six by PyTorch's own way (MKL) and six by oneDNN, whose right matrix lies as it wants it: the peak of either.
    """
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 2048)
    products = [
        lambda: torch.mm(left, right),
        lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
    ]
    for product in products:
        product()
    pipe.send("ready")
    while pipe.recv():
        seconds = []
        for product in products * 6:
            started = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - started)
        pipe.send(2 * 2048**3 / min(seconds))


class _Training:
    """The worker's end of the conversation: counts tokens, times steps, measures memory."""

    def __init__(self, work: Work, pipe: Connection) -> None:
        self.pipe, self.tokens = pipe, Tokens()
        self.flops: Iterator[float] | None = None
        self.baseline = self.started = self.cpu_started = 0.0

    def ready(self) -> None:
        """The model and the data are loaded: memory counts from here, and the first step is waited for."""
        self.baseline = _resident_bytes()
        self.pipe.send("ready")
        self._wait()

    def report(self, loss: float) -> None:
        """A step is done; the next one is waited for."""
        seconds, cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu_started
        padding = 1 - self.tokens.real / self.tokens.slots
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.baseline
        flops = next(self.flops) if self.flops else 0.0
        kept = int(_resident_bytes() - self.baseline)
        self.pipe.send(StepReport(seconds, cpu_seconds, loss, padding, int(peak), kept, flops))
        self._wait()

    def _wait(self) -> None:
        if not self.pipe.recv():
            os._exit(0)
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _train_ours(work: Work, mode: OurMode, training: _Training) -> None:
    """skilltrain's step as its loop runs it: loss over queries, backward, clip, AdamW. Texts are tokenised before."""
    import torch

    from skilltrain.models.cpu_linear import train_with_onednn
    from skilltrain.training.loop import new_optimizer

    case, what = work.case, read_material(work.material)
    step, data = _our_step(case, mode, work.folder, what)
    batches = [data.lists[i : i + case.batch] for i in range(0, len(data.lists), case.batch)]
    train_with_onednn(step)
    training.flops = (useful_flops(step, batch) for batch in batches)
    optimizer = new_optimizer(step.train(), LEARNING_RATE, WEIGHT_DECAY)
    training.ready()
    for batch in batches:
        loss = step(batch) / len(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        training.tokens.real, training.tokens.slots = step.count.tokens, step.count.slots
        training.report(float(loss.detach()))


def _our_step(case: Case, mode: OurMode, folder: Path, what: Material) -> Any:
    """(the step module over the model in `folder`, the training set): the one place that knows their constructors."""
    import torch

    from skilltrain.losses import InfoNCE, ListwiseCE
    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
    from skilltrain.training.training_set import TrainingList, TrainingSet

    gains = (1.0, *(0.0 for _ in range(case.negatives)))
    lists = tuple(
        TrainingList(one.query_id, one.query, one.skill_ids, gains, frozenset(one.skill_ids[:1])) for one in what.lists
    )
    data, device = TrainingSet(lists, what.skills), torch.device("cpu")
    settings = StepSettings(token_budget=mode.token_budget, recompute=mode.recompute)
    if case.kind == "encoder":
        encoder = load_encoder(EncoderConfig(source=str(folder)), device)
        return EncoderStep(encoder, InfoNCE(temperature=TEMPERATURE), data, settings), data
    reranker = load_reranker(RerankerConfig(source=str(folder)), device)
    return RerankerStep(reranker, ListwiseCE(), data, settings), data
