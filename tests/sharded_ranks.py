"""What runs on each of two gloo processes that shard the model: whole trainings under FSDP2 and DeepSpeed ZeRO."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import two_ranks
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.engine import EngineSettings, new_accelerator
from skilltrain.training.loop import Run, train

_FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


def on_rank(rank: int, kind: str, model: str, folder: Path, root: Path) -> None:
    """Train as rank `rank` of two, the last checkpoint holds the result."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    os.environ |= _FSDP if kind == "fsdp2" else _deepspeed(kind)
    if kind != "fsdp2":  # an all-reduce through shared memory, which it would have to compile first
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    if kind == "fsdp2":  # on a CPU accelerate would quietly run DDP
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    whole_training(kind, model, folder, root / "out")


def alone(kind: str, model: str, folder: Path, out: Path) -> Path:
    """The last checkpoint of the same training in this process."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    whole_training(kind, model, folder, out)
    return last_checkpoint(out)


def last_checkpoint(out: Path) -> Path:
    """The newest checkpoint of a run."""
    return checkpoints(out / "checkpoints")[-1]


def whole_training(kind: str, model: str, folder: Path, out: Path) -> None:
    """Two epochs of the loop; in float64 except under DeepSpeed, which computes in float32."""
    config = two_ranks.CONFIG
    accelerator = new_accelerator(EngineSettings("float32", config.batch_size, config.max_grad_norm, quantized=False))
    step = two_ranks.encoder_step(folder) if model == "encoder" else two_ranks.reranker_step(folder)
    step = step if kind == "fsdp2" else step.float()
    train(accelerator, step, step.data.lists, config, Run(out, False, {}))


def _deepspeed(kind: str) -> dict[str, str]:
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[-1]}
