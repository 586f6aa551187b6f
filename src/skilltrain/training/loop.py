"""The one training loop, for the encoder and the reranker alike."""

import ctypes
import math
import platform
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.runs import CHECKPOINTS
from skilltrain.terminal import progress, say
from skilltrain.training.checkpoint import (
    Position,
    best_checkpoint,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from skilltrain.training.dev import Dev
from skilltrain.training.engine import check_shared, shards_weights, shares_state
from skilltrain.training.log import TrainingLog, note_of, open_trackers
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import StepModule
from skilltrain.training.training_set import TrainingList

GIB = 2**30
Batch = Sequence[TrainingList]


@dataclass(frozen=True)
class Run:
    """Where a training keeps its files, whether it goes on from them, and what it is evaluated on meanwhile."""

    folder: Path
    resume: bool
    recipe: Mapping[str, Any]
    dev: Dev | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


def drawn(lists: Sequence[TrainingList], generator: np.random.Generator) -> list[TrainingList]:
    """What one epoch sees: each list as often as its weight says, of lists of a broken weight that share by chance."""
    found = list[TrainingList]()
    for weight in dict.fromkeys(one.weight for one in lists):
        alike = [one for one in lists if one.weight == weight]
        found += alike * int(weight)
        if share := weight % 1:
            chosen = generator.choice(len(alike), max(1, round(share * len(alike))), replace=False)
            found += [alike[position] for position in chosen]
    return found


def step_batches(
    lists: Sequence[TrainingList], config: TrainingConfig
) -> Iterator[list[list[TrainingList]]]:
    """For each optimiser step its batches, in an order that depends on the seed and the epoch alone."""
    per_step = config.batch_size * config.accumulation
    for epoch in range(config.epochs):
        generator = np.random.default_rng([config.seed, epoch])
        seen = drawn(lists, generator)
        order = generator.permutation(len(seen)).tolist()
        for start in range(0, len(order), per_step):
            chosen = [seen[position] for position in order[start : start + per_step]]
            yield [
                chosen[i : i + config.batch_size] for i in range(0, len(chosen), config.batch_size)
            ]


def new_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> Optimizer:
    """AdamW over the parameters that train; biases and norms do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, fused=True)


def schedule(step: int, total: int, warmup_share: float) -> float:
    """Share of the peak learning rate at `step` (from 0) of `total`: linear warm-up, then half a cosine down to 0."""
    warmup = math.ceil(warmup_share * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def train(
    accelerator: Accelerator, step_module: StepModule, config: TrainingConfig, run: Run
) -> tuple[Position, Path]:
    """Train the model inside `step_module` on its lists; checkpoints and train_log.jsonl go to the run's folder.

    Returns where the training ended, and the checkpoint that counts: the best on the dev benchmark, or the last. Raises
    SkilltrainError when the loss or the gradient is not finite or explodes (naming the step's queries), and on Ctrl-C
    or SIGTERM, after saving a checkpoint.
    """
    training = Training(accelerator, step_module, config, run)
    training.go_on()
    return training.position, best_checkpoint(run.checkpoints) or checkpoints(run.checkpoints)[-1]


class Training:
    """What a training works with: the step module, wrapped by the launcher as `model`, its optimiser, its position."""

    def __init__(
        self, accelerator: Accelerator, step: StepModule, config: TrainingConfig, run: Run
    ) -> None:
        """Put everything in place, and as the newest checkpoint left it if the run is resumed."""
        set_seed(config.seed)
        check_shared(accelerator, run.checkpoints)
        if not run.resume and (found := checkpoints(run.checkpoints)):
            what = "checkpoints of an earlier run lie here"
            raise SkilltrainError(
                "unfinished-run", what, where=found[-1], fix="--resume, or another out"
            )
        if accelerator.device.type == "cpu" and not shards_weights(accelerator):
            train_with_onednn(step)
        self.accelerator, self.step, self.config, self.run = accelerator, step, config, run
        optimizer = new_optimizer(step, config.learning_rate, config.weight_decay)
        self.model, self.optimizer = accelerator.prepare(step.train(), optimizer)
        left = (
            load_checkpoint(accelerator, self.model, self.optimizer, run.checkpoints)
            if run.resume
            else None
        )
        self.position = left or Position()

    def go_on(self) -> None:
        """All steps that are left, each logged; some are followed by a dev evaluation or a checkpoint."""
        config, run, position, dev = self.config, self.run, self.position, self.run.dev
        steps, device = [*step_batches(self.step.data.lists, config)], self.accelerator.device
        total, patience = len(steps), (dev and dev.config.patience) or math.inf
        started, per_epoch = time.monotonic() - position.seconds, math.ceil(total / config.epochs)
        trackers = open_trackers(config.trackers, run.folder, run.recipe)
        with (
            out_of_memory_in_one_line(config, self.step),
            TrainingLog(run.folder / "train_log.jsonl", position.step, trackers) as log,
            Stop() as stop,
            progress("training", total, position.step) as show,
        ):
            if can_probe(self.accelerator):
                self._probe_memory(largest_batch(self.step, chain.from_iterable(steps)))
            for batches in steps[position.step :]:
                if position.best.num_bad >= patience:
                    break
                for group in (
                    self.optimizer.param_groups
                ):  # a rate that follows from the step alone needs no state
                    group["lr"] = config.learning_rate * schedule(
                        position.step, total, config.warmup_share
                    )
                figures = self._update(batches)
                position.seconds = time.monotonic() - started
                figures = {"epoch": position.step / per_epoch} | figures
                if device.type == "cuda":
                    figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
                log.write(position.step, figures)
                show(position.step, note_of(figures))
                return_free_memory(position.step, device)
                is_last = position.step == total
                improved = False
                if dev is not None and (is_last or position.step % dev.config.every == 0):
                    improved = self._improves(dev, log)
                ending = is_last or position.best.num_bad >= patience
                # A signal reaches the ranks in different steps, and all must save together.
                stopping = bool(self._summed(float(stop.asked)) > 0)
                if stopping or ending or improved or position.step % config.save_every == 0:
                    self._save()
                if stopping and not ending:
                    what = (
                        f"interrupted after step {position.step} of {total}; a checkpoint is saved"
                    )
                    fix = "run the same command with --resume to go on"
                    raise StoppedError(
                        "interrupted",
                        what,
                        where=run.folder,
                        fix=fix,
                        number=stop.asked or signal.SIGTERM,
                    )

    def _update(self, batches: list[list[TrainingList]]) -> dict[str, float]:
        """One step, in which every query weighs the same: its figures, its gradient's norm before clipping too."""
        started, accelerator, position = time.monotonic(), self.accelerator, self.position
        # There a rank keeps its part of the gradient only: putting off the exchange would make it keep all of it.
        keeps_part, count = shares_state(), sum(map(len, batches))
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            is_last = batch is batches[-1]
            accelerator.sync_gradients = (
                is_last  # DeepSpeed steps in the backward pass that it is told is the last
            )
            with nullcontext() if is_last or keeps_part else accelerator.no_sync(self.model):
                loss = self.model(batch) * (accelerator.num_processes / count)
                accelerator.backward(loss)
            total += loss.detach().float()
        mean = float(self._summed(total)) / accelerator.num_processes
        clipped: Any = accelerator.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm
        )
        norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
        _check_step(mean, norm, batches, self.config.stop_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens, slots = self._summed([self.step.count["tokens"], self.step.count["slots"]]).tolist()
        self.step.count.clear()
        position.step, position.loss = position.step + 1, mean
        position.queries, position.tokens = position.queries + count, position.tokens + tokens
        seconds = time.monotonic() - started
        return {
            "loss": mean,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "queries_per_second": count / seconds,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / slots,
        }

    def _improves(self, dev: Dev, log: TrainingLog) -> bool:
        """Whether the model does better than ever before on the dev benchmark; all ranks compute it together."""
        self.model.eval()
        with torch.no_grad():
            figures = dev.evaluate(self.model)
        self.model.train()
        self.step.count.clear()
        log.write_dev(self.position.step, figures)
        say(f"step {self.position.step}: {dev.line(figures)}")
        return self.position.best.update(self.position.step, dev.config.metric, figures)

    def _save(self) -> None:
        folder, keep = self.run.checkpoints, self.config.keep_checkpoints
        save_checkpoint(self.accelerator, self.model, self.optimizer, folder, self.position, keep)

    def _summed(self, values: Any) -> Tensor:
        """The sum over all ranks."""
        values = torch.as_tensor(values, device=self.accelerator.device)
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    def _probe_memory(self, batch: Batch) -> None:
        """Run the largest `batch` forward and backward once: what does not fit fails now, not after hours.

        No weight moves, gradients are dropped and random states put back. AdamW's two moments, which come with the
        first step, have their room taken meanwhile. All ranks must call it.
        """
        device = self.accelerator.device
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        moments = (
            []
            if self.optimizer.state
            else [torch.empty_like(each) for each in trained for _ in range(2)]
        )
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.accelerator.backward(self.model(batch))
        self.optimizer.zero_grad(set_to_none=True)
        self.step.count.clear()
        del moments
        if device.type == "cuda":
            peak, total = (
                torch.cuda.max_memory_allocated(device),
                torch.cuda.get_device_properties(device).total_memory,
            )
            say(f"the largest batch takes {peak / GIB:.1f} of the GPU's {total / GIB:.1f} GiB")


def _check_step(
    loss: float, norm: float, batches: list[list[TrainingList]], highest_norm: float
) -> None:
    """Raises SkilltrainError, naming the step's queries, before a bad gradient reaches the weights."""
    if not math.isfinite(loss + norm):
        what = f"the {'gradient' if math.isfinite(loss) else 'loss'} is not a finite number"
    elif norm > highest_norm:
        what = f"the gradient norm {norm:.3g} exceeds training.stop_grad_norm {highest_norm:.3g}"
    else:
        return
    queries = [one.query_id for batch in batches for one in batch]
    more = f", … ({len(queries)} in all)" if len(queries) > 8 else ""
    what = f"{what} in a step with queries {', '.join(queries[:8])}{more}"
    raise SkilltrainError(
        "diverged",
        what,
        fix="look at these lists; a lower learning_rate or precision=float32 may help",
    )


def largest_batch(step: StepModule, batches: Iterable[Batch]) -> Batch:
    """The batch with the most tokens."""
    return max(batches, key=lambda batch: sum(sum(step.lengths(one)) for one in batch))


def can_probe(accelerator: Accelerator) -> bool:
    """Whether memory can be probed, and run out: not on a CPU; DeepSpeed would step in the backward pass."""
    return (
        accelerator.device.type == "cuda"
        and accelerator.distributed_type != DistributedType.DEEPSPEED
    )


def return_free_memory(step: int, device: torch.device) -> None:
    """On a CPU, every few steps, give back what glibc's heap holds free: tensors of ever other lengths fragment it.

    A training of whole batches held 2.1 GB after 35 steps where 0.6 were in use, and went on growing.
    """
    if device.type == "cpu" and step % 3 == 0 and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def out_of_memory_in_one_line(config: TrainingConfig, step: StepModule) -> Iterator[None]:
    """Within, a GPU whose memory runs out raises SkilltrainError, which says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = [] if step.settings.recompute else ["training.recompute=true"]
        fix.append(f"a training.token_budget below {step.settings.token_budget}")
        fix.append(f"a model.max_tokens below {step.model.settings.max_tokens}")
        if config.batch_size > 1:
            fix.append(f"a training.batch_size below {config.batch_size} (with more accumulation)")
        if all(parameter.requires_grad for parameter in step.parameters()):
            fix.append("an adapter (LoRA)")
        raise SkilltrainError(
            "out-of-memory", "the GPU's memory has run out", fix=" or ".join(fix)
        ) from error


class Stop:
    """Ctrl-C and SIGTERM ask the loop to stop after the running step; a second Ctrl-C stops at once.

    Not a second SIGTERM: some batch systems signal the launcher and its workers both, and a save must come to its end.
    """

    def __init__(self) -> None:
        self.asked = 0  # the signal's number, as soon as there was one

    def __enter__(self) -> "Stop":
        asks = {
            number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._before: dict[int, Any] = {**asks}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
