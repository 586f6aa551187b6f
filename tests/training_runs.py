"""A short training run with dropout, and ways to stop it; spawned processes run it too."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import torch

from skilltrain.losses import InfoNCE
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, train
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings
from training_data import training_set

CONFIG = TrainingConfig(
    epochs=2,
    batch_size=4,
    accumulation=2,
    learning_rate=1e-3,
    token_budget=150,
    precision="float32",
    save_every=2,
    recompute=True,
    warmup_share=0.3,
)
NUM_LISTS = 20  # three optimiser steps an epoch, the third of them half as large: steps 1 to 6
CALLS_A_STEP = (2, 2, 1, 2, 2, 1)


def new_step(folder: Path, seed: int = 0) -> EncoderStep:
    """Return the step of an encoder with dropout."""
    encoder = load_encoder(EncoderConfig(source=str(folder)), torch.device("cpu"))
    return EncoderStep(
        encoder, InfoNCE(), training_set(NUM_LISTS, seed=seed), StepSettings(150, CONFIG.recompute)
    )


def signal_in(step: EncoderStep, number: int, which: signal.Signals) -> EncoderStep:
    """Let a step module send its process a signal in the `number`-th optimiser step."""
    forward = step.forward
    calls = []

    def forward_and_signal(batch):
        calls.append(batch)
        if len(calls) == 1 + sum(CALLS_A_STEP[: number - 1]):
            os.kill(os.getpid(), which)
        return forward(batch)

    step.forward = forward_and_signal
    return step


def accelerator():
    """Return an accelerator of one process on the CPU."""
    return new_accelerator(CONFIG, quantized=False)


def run(step: EncoderStep, out: Path, resume: bool) -> dict[str, torch.Tensor]:
    """Train and return the parameters."""
    train(accelerator(), step, CONFIG, Run(out, resume, {}))
    return {name: value.detach().clone() for name, value in step.named_parameters()}


def killed_in_step(number: int, folder: Path, out: Path) -> None:
    """Train until a kill -9 in the `number`-th step."""
    run(signal_in(new_step(folder), number, signal.SIGKILL), out, resume=False)


class _Malice:
    """Creates the file `sign` when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sign,)


def malicious_pickle(sign: Path) -> bytes:
    """Return a checkpoint that creates the file `sign` when it is unpickled."""
    stream = io.BytesIO()
    torch.save({"step": _Malice(sign)}, stream)
    return stream.getvalue()
