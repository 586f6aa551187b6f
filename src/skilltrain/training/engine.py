"""How the processes of a run share the work: alone, DDP, FSDP2, DeepSpeed ZeRO."""

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
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.models.loading import default_device
from skilltrain.terminal import launched_ranks
from skilltrain.training.settings import TrainingConfig

_SUPPORTED = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"}  # accelerate's names
_PATIENCE = (
    60.0  # seconds: a network file system may remember for so long that a file was not there
)


def new_accelerator(config: TrainingConfig, quantized: bool) -> Accelerator:
    """An accelerator for the way in which this process was launched; `quantized`: frozen weights are in 4 bits.

    Raises SkilltrainError for a combination that cannot work, before anything is loaded.
    """
    on_cpu, deepspeed = default_device().type == "cpu", _asks_for("DEEPSPEED")
    if _asks_for("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise SkilltrainError(
            "FSDP version 1 is not supported", fix="set fsdp_version: 2, as launch/fsdp2.yaml does"
        )
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise SkilltrainError(
            "DeepSpeed is not installed", fix="pip install 'skilltrain[deepspeed]'"
        )
    if on_cpu:
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # DeepSpeed would say on stdout that it had to look
    else:
        torch.set_float32_matmul_precision("high")  # TF32
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Texts of unequal lengths do not fragment memory that grows in segments.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    mixed = config.dtype_on(default_device()) == torch.bfloat16
    # An hour's patience: ranks wait for the first one while it saves a model. DeepSpeed must be told of gloo.
    group = InitProcessGroupKwargs(
        backend="gloo" if on_cpu and deepspeed else None, timeout=timedelta(hours=1)
    )
    views = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True
    )  # else DDP holds every gradient twice
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,
        mixed_precision="bf16" if mixed else "no",
        kwargs_handlers=[group, views] if launched_ranks() > 1 else None,
    )
    _refuse_unsupported(accelerator, config, quantized)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _set_deepspeed(accelerator, config)
    if accelerator.distributed_type == DistributedType.FSDP and mixed:
        plugin = accelerator.state.fsdp_plugin
        assert plugin is not None
        # accelerate's own policy would round what the step gives back, the loss, to bfloat16, and reduce in it.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return accelerator


def shards_weights(accelerator: Accelerator) -> bool:
    """Whether no rank holds the whole model (FSDP2, ZeRO-3)."""
    return accelerator.distributed_type == DistributedType.FSDP or _zero_stage(accelerator) == 3


def launch_of(accelerator: Accelerator) -> str:
    """How the processes share the work; how many they are does not matter where each holds the whole model."""
    stage, device = _zero_stage(accelerator), accelerator.device.type
    if not stage and accelerator.distributed_type != DistributedType.FSDP:
        return f"whole models on {device}"
    return f"{accelerator.num_processes} x {f'DeepSpeed ZeRO-{stage}' if stage else 'FSDP'} on {device}"


def check_shared(accelerator: Accelerator, folder: Path) -> None:
    """Raise SkilltrainError, on every rank, unless all ranks see one `folder`; all must call it before any uses it.

    A rank that finds process 0's file in a listing has one that is new enough to hold every checkpoint too.
    """
    if accelerator.num_processes == 1:
        return
    marker = folder / of_first_rank(f".seen-by-all-{secrets.token_hex(6)}")
    if accelerator.is_main_process:
        write_text(marker, "")
    accelerator.wait_for_everyone()
    last = time.monotonic() + _PATIENCE
    while (unseen := marker not in folder.glob(".seen-by-all-*")) and time.monotonic() < last:
        time.sleep(1)
    blind = gather_object([accelerator.process_index] if unseen else [])
    if accelerator.is_main_process:
        marker.unlink(missing_ok=True)
    if blind:
        what = f"process {blind[0]} does not see what process 0 writes here"
        raise SkilltrainError(
            what, where=folder, fix="out must be a folder that all machines share"
        )


def shares_state() -> bool:
    """Whether the launcher asks for FSDP2 or DeepSpeed, with which each rank holds a part of what training keeps."""
    return _asks_for("FSDP") or _asks_for("DEEPSPEED")


def _asks_for(what: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() == "true"


def _zero_stage(accelerator: Accelerator) -> int:
    """DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.zero_stage if plugin is not None else 0


def _refuse_unsupported(accelerator: Accelerator, config: TrainingConfig, quantized: bool) -> None:
    kind, world = accelerator.distributed_type, accelerator.num_processes
    what, fix = "", ""
    if kind.value not in _SUPPORTED:
        what, fix = (
            f"the launcher asks for {kind.value}, which is not supported",
            "use a file of launch/",
        )
    elif _asks_for("FSDP") and kind != DistributedType.FSDP:
        what = "accelerate would run FSDP on a CPU, or in one process, as plain DDP"
        fix = "use launch/ddp.yaml or launch/cpu.yaml there"
    elif kind == DistributedType.DEEPSPEED and not _zero_stage(accelerator):
        what, fix = (
            "DeepSpeed's ZeRO stage 0 shares nothing",
            "use launch/ddp.yaml, or zero_stage: 2",
        )
    elif config.batch_size % world:
        what = (
            f"training.batch_size {config.batch_size} cannot be shared equally by {world} processes"
        )
        batch = world * math.ceil(config.batch_size / world)
        accumulation = max(1, round(config.batch_size * config.accumulation / batch))
        settings = f"training.batch_size={batch} training.accumulation={accumulation}"
        fix = f"give {settings}, {batch * accumulation} queries per update; or --num_processes 1 to accelerate launch"
    elif quantized and kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        what = f"4-bit weights (adapter.quantize) cannot be combined with {kind.value}"
        fix = "use launch/ddp.yaml, or adapter.quantize=none"
    if what:
        raise SkilltrainError(what, fix=fix)


def _set_deepspeed(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Settings that DeepSpeed keeps in its own configuration; its defaults would clip, or fail to save, unasked.

    Accumulation is ours: accelerate tells the engine at each backward pass whether a step follows.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # transformers would load empty weights under ZeRO-3
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": config.batch_size // accelerator.num_processes,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if plugin.zero_stage == 3:
        plugin.deepspeed_config["zero_optimization"][
            "stage3_gather_16bit_weights_on_model_save"
        ] = True
