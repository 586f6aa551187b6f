"""Chooses the memory settings of a training run before its first step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from skilltrain.errors import SkilltrainError
from skilltrain.models.activations import checkpoint_layers, layer_bytes
from skilltrain.terminal import launched_ranks, say
from skilltrain.training.engine import shares_state
from skilltrain.training.loop import GIB, Batch, largest_batch, step_batches
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import StepModule, StepSettings

_ADAMW_BYTES = 8  # two float32 moments per trained parameter
_GPU_SHARE = 0.9  # of the free memory; CUDA and the loss need the rest
_MAX_CPU_BYTES = GIB  # for activations; more makes a step no faster
_MIN_TOKEN_BUDGET = 512  # a smaller micro-batch saves little
_CONTAINER = Path("/sys/fs/cgroup")  # limits of a container, on Linux
_STATUS = Path("/proc/self/status")  # on Linux


def fit_into_memory(step: StepModule, config: TrainingConfig, device: torch.device) -> None:
    """Choose recomputation and the token budget where the recipe leaves them open.

    The first choice that fits is taken, in the order of `memory_choices`. One line says which.

    Raises:
        SkilltrainError: The memory that is available suffices for none of them.
    """
    batches = chain.from_iterable(step_batches(step.data.lists, config))
    batch = largest_batch(step, batches)
    bytes_per_slot = layer_bytes(step.model.network, config.dtype_on(device))
    available = available_bytes(device) - held_bytes(step)
    preferred = available if device.type == "cuda" else min(available, _MAX_CPU_BYTES)

    needed = 0.0
    for settings in memory_choices(step.settings, config):
        step.settings = settings
        needed = activation_bytes(step, batch, bytes_per_slot) / launched_ranks()
        if needed <= preferred:
            break
    if needed > available:
        problem = f"the largest batch needs {needed / GIB:.1f} GiB for activations"
        problem += f", and {max(0.0, available) / GIB:.1f} GiB are left for them"
        fix = "lower training.batch_size (with more accumulation) or model.max_tokens"
        raise SkilltrainError("out-of-memory", problem, where="training", fix=fix)

    if step.settings.recompute:
        checkpoint_layers(step.model.network)
    say(
        f"memory: training.recompute={str(step.settings.recompute).lower()} "
        f"training.token_budget={step.settings.token_budget}, "
        f"{needed / GIB:.1f} GiB for the activations of the largest batch"
    )


def memory_choices(settings: StepSettings, config: TrainingConfig) -> Iterator[StepSettings]:
    """Yield the settings to try: fastest first, then those that need less memory.

    A value that the recipe sets does not change.
    """
    if config.recompute is None:
        yield replace(settings, recompute=False)
    recompute = config.recompute is not False
    token_budget = settings.token_budget
    yield replace(settings, recompute=recompute)
    while config.token_budget is None and token_budget > _MIN_TOKEN_BUDGET:
        token_budget //= 2
        yield replace(settings, recompute=recompute, token_budget=token_budget)


def available_bytes(device: torch.device) -> int:
    """Return the bytes that a run may take on a device, with those of a model loaded there."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_GPU_SHARE * (free + torch.cuda.memory_allocated(device)))

    available = psutil.virtual_memory().available
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit
        return available
    return min(available, limit - used)


def held_bytes(module: nn.Module) -> float:
    """Return the bytes on each rank of weights, gradients and AdamW's two moments."""
    total = 0
    for parameter in module.parameters():
        weight_bytes = parameter.numel() * parameter.element_size()
        total += weight_bytes
        if parameter.requires_grad:
            total += weight_bytes  # of the gradient
            total += _ADAMW_BYTES * parameter.numel()
    return total / (launched_ranks() if shares_state() else 1)


def activation_bytes(step: StepModule, batch: Batch, bytes_per_slot: float) -> int:
    """Return the bytes of activations of a batch, all on one process.

    With `recompute`, only the inputs of layers are stored for the whole batch. In addition, one
    layer at a time has all its activations, for one micro-batch.

    Args:
        bytes_per_slot: Bytes that one layer keeps per token or padding (see `layer_bytes`).
    """
    network = step.model.network
    slots = step.slots(batch)
    num_layers = network.config.num_hidden_layers
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * bytes_per_slot)
    input_bytes = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * input_bytes + max(slots) * bytes_per_slot)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has occupied: on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        status = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return 1024 * int(status["VmHWM"].removesuffix("kB"))
    memory: Any = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss)  # Windows knows the peak, macOS does not
