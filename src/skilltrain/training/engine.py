"""Creates the accelerator of a run: for one process, DDP, FSDP2 or DeepSpeed ZeRO."""

import importlib.util
import math
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    gather_object,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from skilltrain.distributed import of_first_rank
from skilltrain.errors import SkilltrainError, install_command
from skilltrain.files import write_text
from skilltrain.models.loading import default_device
from skilltrain.terminal import launched_ranks
from skilltrain.training.settings import TrainingConfig

_SUPPORTED_TYPES = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"}  # names of accelerate
_VISIBILITY_TIMEOUT = 60.0  # seconds; a network file system may show a new file this late
_RANK_TIMEOUT = timedelta(hours=1)  # ranks wait while the first one saves a model


def new_accelerator(config: TrainingConfig, quantized: bool) -> Accelerator:
    """Create the accelerator for the way this process was launched.

    Args:
        config: Settings of the training run.
        quantized: Whether the frozen weights are in 4 bits.

    Raises:
        SkilltrainError: The launch is not supported, or the settings cannot work with the launch.
    """
    # Check and set up what the accelerator needs.
    on_cpu = default_device().type == "cpu"
    deepspeed = _is_requested("DEEPSPEED")
    _check_backends()  # DeepSpeed must be installed, and FSDP must have version 2
    _set_up_device()

    # Create the accelerator. `mixed` means that it computes in bfloat16.
    mixed = config.dtype_on(default_device()) == torch.bfloat16
    # On a CPU, DeepSpeed would not choose the backend gloo. None: accelerate chooses.
    backend = "gloo" if on_cpu and deepspeed else None
    handlers = [
        InitProcessGroupKwargs(backend=backend, timeout=_RANK_TIMEOUT),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # no copy of each gradient
    ]
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,  # with cpu=True, accelerate would ignore DeepSpeed
        mixed_precision="bf16" if mixed else "no",
        kwargs_handlers=handlers if launched_ranks() > 1 else None,
    )
    _refuse_unsupported(accelerator, config, quantized)

    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _set_deepspeed(accelerator, config)
    if accelerator.distributed_type == DistributedType.FSDP and mixed:
        _set_fsdp_precision(accelerator)
    return accelerator


def _set_up_device() -> None:
    """Set the process-wide options of PyTorch and DeepSpeed for the default device."""
    device_type = default_device().type
    if device_type == "cpu":
        # Without this variable, DeepSpeed prints that it had to look for a GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    elif device_type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ):
            # Expandable segments keep texts of unequal lengths from fragmenting the memory of the
            # GPU. A user who sets these variables has chosen other options.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _set_fsdp_precision(accelerator: Accelerator) -> None:
    """Let FSDP2 compute in bfloat16, and sum gradients in float32.

    accelerate's own policy would round the loss to bfloat16, and sum gradients in bfloat16.
    """
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


def _check_backends() -> None:
    """Check that a requested DeepSpeed is installed, and that a requested FSDP has version 2."""
    if _is_requested("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        fix = "set fsdp_version: 2, as launch/fsdp2.yaml does"
        raise SkilltrainError("unsupported-launcher", "FSDP version 1 is not supported", fix=fix)
    if _is_requested("DEEPSPEED") and importlib.util.find_spec("deepspeed") is None:
        fix = install_command("deepspeed")
        raise SkilltrainError("missing-package", "DeepSpeed is not installed", fix=fix)


def shards_weights(accelerator: Accelerator) -> bool:
    """Whether each rank has only a part of the weights (FSDP2, ZeRO-3)."""
    return accelerator.distributed_type == DistributedType.FSDP or _zero_stage(accelerator) == 3


def launch_of(accelerator: Accelerator) -> str:
    """Describe how the processes share the model. Only the same launch can resume a checkpoint.

    If each process has the whole model, their number does not matter, and is left out.
    """
    device = accelerator.device.type
    stage = _zero_stage(accelerator)
    if stage:
        method = f"DeepSpeed ZeRO-{stage}"
    elif accelerator.distributed_type == DistributedType.FSDP:
        method = "FSDP"
    else:
        return f"whole models on {device}"
    return f"{accelerator.num_processes} x {method} on {device}"


def check_folder_is_shared(accelerator: Accelerator, folder: Path) -> None:
    """Check that all ranks see a file that the first rank writes into a folder.

    A rank that finds the file in the listing of the folder will also see every checkpoint. All
    ranks must call this before any of them uses the folder.

    Raises:
        SkilltrainError: A rank does not see the file. All ranks raise this error.
    """
    if accelerator.num_processes == 1:
        return

    # Write the file. All ranks get the random name that the first rank has chosen.
    name = of_first_rank(f".seen-by-all-{secrets.token_hex(6)}")
    marker = folder / name
    if accelerator.is_main_process:
        write_text(marker, "")
    accelerator.wait_for_everyone()

    # Collect the numbers of the ranks that do not see the file.
    local_blind_ranks = [] if _becomes_visible(marker) else [accelerator.process_index]
    blind_ranks = gather_object(local_blind_ranks)
    if accelerator.is_main_process:
        marker.unlink(missing_ok=True)
    if blind_ranks:
        fault = f"process {blind_ranks[0]} does not see what process 0 writes here"
        fix = "out must be a folder that all machines share"
        raise SkilltrainError("folder-not-shared", fault, where=folder, fix=fix)


def _becomes_visible(file: Path) -> bool:
    """Wait until the listing of its folder has a file. Return False after a timeout."""
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT
    while file not in file.parent.glob("*"):
        if time.monotonic() >= deadline:
            return False
        time.sleep(1)
    return True


def shards_state() -> bool:
    """Whether the launcher requests FSDP2 or DeepSpeed.

    Each rank then has only a part of the optimiser's state.
    """
    return _is_requested("FSDP") or _is_requested("DEEPSPEED")


def _is_requested(backend: str) -> bool:
    """Whether `accelerate launch` requests this backend."""
    return os.environ.get(f"ACCELERATE_USE_{backend}", "false").lower() == "true"


def _zero_stage(accelerator: Accelerator) -> int:
    """Return DeepSpeed's ZeRO stage, or 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.zero_stage if plugin is not None else 0


def _refuse_unsupported(accelerator: Accelerator, config: TrainingConfig, quantized: bool) -> None:
    """Check that the launch is supported, and that the settings can work with it.

    Args:
        accelerator: The new accelerator, which knows how the processes were launched.
        config: Settings of the training run.
        quantized: Whether the frozen weights are in 4 bits.

    Raises:
        SkilltrainError: The launch is not supported, or the settings cannot work with the launch.
    """
    # Check that this kind of launch (DDP, FSDP, DeepSpeed) is supported.
    kind = accelerator.distributed_type
    if kind.value not in _SUPPORTED_TYPES:
        fault = f"the launcher asks for {kind.value}, which is not supported"
        raise SkilltrainError("unsupported-launcher", fault, fix="use a file of launch/")
    # On a CPU or in one process, accelerate replaces FSDP by DDP without a word.
    if _is_requested("FSDP") and kind != DistributedType.FSDP:
        fault = "accelerate would run FSDP on a CPU, or in one process, as plain DDP"
        fix = "use launch/ddp.yaml or launch/cpu.yaml there"
        raise SkilltrainError("unsupported-launcher", fault, fix=fix)
    # Stage 0 keeps the whole state on each process, as DDP does, so DeepSpeed has no use.
    if kind == DistributedType.DEEPSPEED and not _zero_stage(accelerator):
        fault = "DeepSpeed's ZeRO stage 0 shares nothing"
        fix = "use launch/ddp.yaml, or zero_stage: 2"
        raise SkilltrainError("unsupported-launcher", fault, fix=fix)
    # Check the settings. All processes share each batch in equal parts.
    _refuse_uneven_batch(config, accelerator.num_processes)
    # An optimiser is shardable if it is tested on ranks that each hold a part of the weights.
    is_sharded = kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if is_sharded and not config.optimizer.is_shardable:
        fault = f"training.optimizer {config.optimizer.name} cannot be combined with {kind.value}"
        fix = "use launch/ddp.yaml, or the optimizer adamw"
        raise SkilltrainError("unsupported-launcher", fault, fix=fix)
    if quantized and kind == DistributedType.DEEPSPEED:
        fault = f"4-bit weights (adapter.quantize) cannot be combined with {kind.value}"
        fix = "use launch/fsdp2.yaml, or adapter.quantize=none"
        raise SkilltrainError("unsupported-launcher", fault, fix=fix)


def _refuse_uneven_batch(config: TrainingConfig, num_processes: int) -> None:
    """Check that the processes can share a batch equally. The error suggests a larger batch."""
    if config.batch_size % num_processes == 0:
        return
    # Suggest the next larger batch, and about the same number of queries per update.
    batch = num_processes * math.ceil(config.batch_size / num_processes)
    accumulation = max(1, round(config.batch_size * config.accumulation / batch))
    fault = f"training.batch_size {config.batch_size} cannot be shared equally"
    fault += f" by {num_processes} processes"
    fix = (
        f"give training.batch_size={batch} training.accumulation={accumulation}, "
        f"{batch * accumulation} queries per update; or --num_processes 1 to accelerate launch"
    )
    raise SkilltrainError("uneven-batch", fault, fix=fix)


def _set_deepspeed(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Set DeepSpeed's settings that must follow the recipe, or whose defaults fail.

    Args:
        accelerator: Accelerator of the run, which uses DeepSpeed.
        config: Settings of the training run.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # otherwise transformers loads empty weights under ZeRO-3
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    settings = plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = config.batch_size // accelerator.num_processes
    # skilltrain accumulates gradients itself. accelerate tells DeepSpeed at each backward pass
    # whether a step follows.
    settings["gradient_accumulation_steps"] = 1
    # By default DeepSpeed clips gradients to 1.0, whatever the recipe says.
    settings["gradient_clipping"] = config.max_grad_norm
    # Accept PyTorch's AdamW, also if its state is on the CPU.
    settings["zero_allow_untested_optimizer"] = True
    settings["zero_force_ds_cpu_optimizer"] = False
    # Let a checkpoint gather the whole weights, which ZeRO-3 refuses by default.
    if plugin.zero_stage == 3:
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
