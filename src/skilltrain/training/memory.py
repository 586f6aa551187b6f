"""Chooses the memory settings of a training run before its first step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from skilltrain.distributed import of_first_rank
from skilltrain.errors import SkilltrainError
from skilltrain.models.activations import checkpoint_layers, layer_bytes
from skilltrain.models.micro_batches import return_free_memory
from skilltrain.terminal import launched_ranks, ranks_on_machine, say
from skilltrain.training.engine import shards_state
from skilltrain.training.loop import GIB, Batch, largest_batch, step_batches
from skilltrain.training.optimizers import OptimizerConfig
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import StepModule, StepSettings

_GPU_SHARE = 0.9  # of the free memory; CUDA and the loss need the rest
_MAX_CPU_BYTES = 3 * GIB // 2  # for activations: on a CPU, other programs need the rest
_MIN_TOKEN_BUDGET = 512  # a smaller micro-batch saves little
_CONTAINER = Path("/sys/fs/cgroup")  # limits of a container, on Linux
_STATUS = Path("/proc/self/status")  # on Linux


def fit_into_memory(step: StepModule, config: TrainingConfig, device: torch.device) -> None:
    """Choose recomputation and the token budget, unless the recipe sets them.

    Recomputation saves memory: the backward pass computes activations again. The token budget
    limits the tokens of a micro-batch.

    The choices of `memory_choices` are tried in their order, until one fits. The chosen values are
    set in `step.settings`, and one line of output names them.

    Args:
        step: The step module, whose network is not yet sharded.
        config: Settings of the training run.
        device: Device on which the run trains.

    Raises:
        SkilltrainError: The available memory is too small for every choice.
    """
    # Return the memory of the stages that this process ran before.
    return_free_memory(device)

    # Compute the memory that is left for the activations of the largest batch.
    batch = largest_batch(step, chain.from_iterable(step_batches(step.data.lists, config)))
    bytes_per_token = layer_bytes(step.model.network, config.dtype_on(device))
    # On a CPU the weights are in memory already, so the free memory does not include their bytes.
    bytes_in_use = weight_bytes(step) if device.type == "cpu" else 0
    # Bytes still to be allocated: all weights, gradients and optimiser states, minus those in use.
    needed_by_state = held_bytes(step, config.optimizer) - bytes_in_use
    # All ranks must choose the same settings, so the memory of the first rank counts.
    available = of_first_rank(available_bytes(device)) - needed_by_state
    # On a CPU, prefer a choice that leaves memory for other programs.
    preferred = available if device.type == "cuda" else min(available, _MAX_CPU_BYTES)

    # Take the first choice that needs at most the preferred memory, else the last choice.
    # The ranks share the batch, so each needs a part of the memory. In two passes, each rank
    # computes one whole micro-batch at a time, so nothing is divided.
    num_sharing = 1 if step.settings.two_pass else launched_ranks()
    needed = 0.0
    for settings in memory_choices(step.settings, config):
        step.settings = settings
        needed = activation_bytes(step, batch, bytes_per_token) / num_sharing
        if needed <= preferred:
            break

    # The last choice may need more than the preferred memory, but not more than is available.
    if needed > available:
        raise _out_of_memory(needed, available)

    if step.settings.recompute:
        checkpoint_layers(step.model.network)
    say(
        f"memory: training.recompute={str(step.settings.recompute).lower()} "
        f"training.token_budget={step.settings.token_budget}, "
        f"{needed / GIB:.1f} GiB for the activations of the largest batch"
    )


def _out_of_memory(needed: float, available: float) -> SkilltrainError:
    """Return the error for activations that need more bytes than are available."""
    problem = f"the largest batch needs {needed / GIB:.1f} GiB for activations"
    problem += f", and {max(0.0, available) / GIB:.1f} GiB are left for them"
    fix = "lower training.batch_size (with more accumulation) or model.max_tokens"
    return SkilltrainError("out-of-memory", problem, where="training", fix=fix)


def memory_choices(settings: StepSettings, config: TrainingConfig) -> Iterator[StepSettings]:
    """Yield the settings to try: the fastest first, then settings that need less memory.

    Args:
        settings: Settings of the step, with the largest token budget.
        config: Settings of the recipe. If they set `recompute` or `token_budget`, that value does
            not change.
    """
    # If the recipe leaves the choice, try without recomputation first, which is faster.
    recompute = config.recompute
    if recompute is None:
        yield replace(settings, recompute=False)
        recompute = True
    yield replace(settings, recompute=recompute)

    # Halve the token budget.
    token_budget = settings.token_budget
    while config.token_budget is None and token_budget > _MIN_TOKEN_BUDGET:
        token_budget //= 2
        yield replace(settings, recompute=recompute, token_budget=token_budget)


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may take on its device.

    On a GPU, they include the bytes that tensors of this process already take. On a CPU, they are
    its share of the free memory, because all ranks on one machine take from it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)  # by this process
        return int(_GPU_SHARE * (free + allocated))

    # On a CPU, a container may have less memory than the machine.
    available = psutil.virtual_memory().available
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        lines = (_CONTAINER / "memory.stat").read_text().splitlines()
        bytes_by_use = dict(line.split() for line in lines)
        cached = int(bytes_by_use["inactive_file"])  # given up on demand
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return available // ranks_on_machine()
    return min(available, limit - used + cached) // ranks_on_machine()


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights."""
    return sum(parameter.nbytes for parameter in module.parameters())


def held_bytes(module: nn.Module, optimizer: OptimizerConfig) -> float:
    """Return the bytes that weights, gradients and the optimiser's state take on each rank."""
    total = weight_bytes(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            total += parameter.nbytes  # the gradient is as large as the weight
            total += optimizer.bytes_per_weight * parameter.numel()
    # Under FSDP2 and DeepSpeed, each rank has only a part of them.
    num_shards = launched_ranks() if shards_state() else 1
    return total / num_shards


def activation_bytes(step: StepModule, batch: Batch, bytes_per_token: float) -> int:
    """Return the bytes that the activations of a batch take, if one process computes all of it.

    Args:
        step: The step module.
        batch: Lists of the batch.
        bytes_per_token: Bytes that one layer saves per token, for the backward pass.
    """
    network = step.model.network
    num_layers = network.config.num_hidden_layers
    tokens_by_micro_batch = step.padded_tokens(batch)
    largest = max(tokens_by_micro_batch)
    # In two passes, only one micro-batch at a time has activations.
    num_tokens = largest if step.settings.two_pass else sum(tokens_by_micro_batch)
    if not step.settings.recompute:
        return round(num_tokens * num_layers * bytes_per_token)

    # With recomputation, each layer saves only its input, a vector per token. The backward pass
    # recomputes the activations of one layer for one micro-batch at a time.
    vector_bytes = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    saved_inputs = num_tokens * num_layers * vector_bytes
    recomputed_layer = largest * bytes_per_token
    return round(saved_inputs + recomputed_layer)


def peak_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that this process has occupied so far.

    This is the memory of tensors on a GPU, and the resident memory of the process on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)

    # Linux reports the peak of the resident memory as VmHWM.
    if _STATUS.exists():
        status = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return 1024 * int(status["VmHWM"].removesuffix("kB"))

    # Windows reports the peak as peak_wset. macOS reports only the present memory (rss).
    memory: Any = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss)
