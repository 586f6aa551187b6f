"""The one training loop, for the encoder and the reranker alike."""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import Field
from torch import nn

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import Precision, default_device, resolve_dtype
from skilltrain.terminal import progress
from skilltrain.training.checkpoint import Position, checkpoints, load_checkpoint, save_checkpoint
from skilltrain.training.log import TrainingLog
from skilltrain.training.training_set import TrainingList


class TrainingConfig(Config):
    """How to train; the defaults are SkillRouter's where the paper gives a value."""

    epochs: int = Field(default=1, ge=1, description="passes over the lists")
    batch_size: int = Field(default=8, ge=1, description="queries a forward pass, over all ranks together")
    accumulation: int = Field(default=4, ge=1, description="forward passes an optimiser step")
    learning_rate: float = Field(default=2e-5, gt=0, description="peak of the cosine schedule")
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="share of the steps that warm up")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's decay of matrices")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    token_budget: int = Field(default=4096, ge=64, description="padded tokens a micro-batch")
    recompute: bool = Field(
        default=False, description="rebuild activations in the backward pass: less memory, more time"
    )
    precision: Precision = Field(default="float32", description="bfloat16 computes mixed; auto where it is native")
    seed: int = Field(default=42, ge=0, description="order of the lists, dropout, new layers")
    save_every: int = Field(default=50, ge=1, description="optimiser steps between checkpoints")
    keep_checkpoints: int = Field(default=2, ge=1, description="checkpoints kept while training")


@dataclass(frozen=True)
class TrainingResult:
    """What a finished training has to say of itself."""

    num_steps: int
    num_queries: int
    last_loss: float
    seconds: float


def num_steps(num_lists: int, config: TrainingConfig) -> int:
    """Optimiser steps of a whole training."""
    return config.epochs * math.ceil(num_lists / (config.batch_size * config.accumulation))


def step_batches(lists: Sequence[TrainingList], config: TrainingConfig) -> Iterator[list[list[TrainingList]]]:
    """For each optimiser step its batches, in an order that depends on the seed and the epoch alone."""
    per_step = config.batch_size * config.accumulation
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.seed, epoch]).permutation(len(lists)).tolist()
        for start in range(0, len(order), per_step):
            chosen = [lists[position] for position in order[start : start + per_step]]
            yield [chosen[i : i + config.batch_size] for i in range(0, len(chosen), config.batch_size)]


def train(
    step_module: nn.Module, lists: Sequence[TrainingList], config: TrainingConfig, folder: Path, resume: bool
) -> TrainingResult:
    """Train the model inside `step_module` in place; checkpoints and train_log.jsonl go to `folder`.

    `step_module(batch)` gives the loss summed over this rank's queries of the batch. Raises SkilltrainError when the
    loss or the gradient is not finite (naming the step's queries), and on Ctrl-C, after saving a checkpoint.
    """
    mixed = resolve_dtype(config.precision, default_device()) == torch.bfloat16
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if mixed else "no",
        step_scheduler_with_optimizer=False,  # else accelerate steps it once a rank, and the schedule ends too early
    )
    set_seed(config.seed)
    total, position = num_steps(len(lists), config), Position()
    optimizer = torch.optim.AdamW(_parameter_groups(step_module, config), lr=config.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, total, config.warmup_share))
    model, optimizer, scheduler = accelerator.prepare(step_module.train(), optimizer, scheduler)
    accelerator.register_for_checkpointing(position)
    if resume:
        load_checkpoint(accelerator, folder / "checkpoints")
    elif found := checkpoints(folder / "checkpoints"):
        raise SkilltrainError("checkpoints of an earlier run lie here", where=found[-1], fix="--resume, or another out")
    started, queries = time.monotonic(), 0
    with (
        TrainingLog(folder / "train_log.jsonl", position.step, accelerator.is_main_process) as log,
        _Stop() as stop,
        progress("training", total) as (bar, task),
    ):
        for number, batches in enumerate(step_batches(lists, config)):
            if number < position.step:
                continue
            learning_rate = scheduler.get_last_lr()[0]
            loss, norm = _optimiser_step(accelerator, model, optimizer, batches, config.max_grad_norm)
            scheduler.step()
            position.step, position.loss = number + 1, loss
            queries += sum(len(batch) for batch in batches)
            rate = queries / (time.monotonic() - started)
            log.write(position.step, loss, learning_rate, norm, rate)
            bar.update(task, completed=position.step, note=f"loss {loss:.4f}  {rate:.1f} queries/s")
            stopping, is_last = _on_any_rank(accelerator, stop.asked), position.step == total
            if stopping or is_last or position.step % config.save_every == 0:  # the last, lest saving the model fails
                save_checkpoint(accelerator, folder / "checkpoints", position.step, config.keep_checkpoints)
            if stopping and not is_last:
                raise _interrupted(position.step, total, folder)
    accelerator.unwrap_model(model).eval()
    accelerator.end_training()
    return TrainingResult(total, queries, position.loss, time.monotonic() - started)


def _on_any_rank(accelerator: Accelerator, asked: bool) -> bool:
    """Whether any rank was asked to stop: a signal reaches the ranks in different steps, and all must save together."""
    flag = torch.tensor(float(asked), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum") > 0)  # type: ignore[operator]


def _interrupted(step: int, total: int, folder: Path) -> SkilltrainError:
    what = f"interrupted after step {step} of {total}; a checkpoint is saved"
    return SkilltrainError(what, where=folder, fix="run the same command with --resume to go on")


def _optimiser_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[TrainingList]],
    max_norm: float,
) -> tuple[float, float]:
    """(mean loss, gradient norm) of one step; every query of the step weighs the same."""
    count = sum(len(batch) for batch in batches)
    total = torch.zeros((), device=accelerator.device)
    for position, batch in enumerate(batches):
        with accelerator.no_sync(model) if position < len(batches) - 1 else nullcontext():
            loss = model(batch) * (accelerator.num_processes / count)
            accelerator.backward(loss)
        total += loss.detach().float()
    mean = float(accelerator.reduce(total, "mean"))  # type: ignore[arg-type]
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))  # type: ignore[arg-type]
    if not (math.isfinite(mean) and math.isfinite(norm)):
        names = ", ".join(one.query_id for batch in batches for one in batch[:4])
        what = "loss" if not math.isfinite(mean) else "gradient"
        raise SkilltrainError(
            f"the {what} is not a finite number in a step with queries {names}, …",
            fix="look at these lists; a lower learning_rate or precision=float32 may help",
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm


def _parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _schedule(step: int, total: int, warmup_share: float) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    warmup = math.ceil(warmup_share * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class _Stop:
    """Ctrl-C asks the loop to stop after the running step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "_Stop":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
