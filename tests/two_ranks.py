"""What runs on each of two gloo processes, and alone: five AdamW steps, and a whole training."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.training import checkpoint
from skilltrain.training.engine import EngineSettings, new_accelerator
from skilltrain.training.loop import Run, TrainingConfig, train
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from training_data import training_set

CPU = torch.device("cpu")
BATCH_SIZES = (5, 3, 1, 4, 1)
CONFIG = TrainingConfig(
    epochs=2, batch_size=4, accumulation=2, learning_rate=1e-3, warmup_share=0.2, token_budget=150,
    precision="float32", save_every=100,
)  # fmt: skip


def encoder_step(folder: Path, recompute: bool = False) -> EncoderStep:
    """The encoder's step in float64 on fourteen lists."""
    encoder = load_encoder(EncoderConfig(source=str(folder)), CPU).double()
    return EncoderStep(encoder, InfoNCE(), training_set(14), StepSettings(150, recompute))


def reranker_step(folder: Path, recompute: bool = False) -> RerankerStep:
    """The reranker's step in float64 on the same lists."""
    reranker = load_reranker(
        RerankerConfig(source=str(folder), max_tokens=100 if "bert" in folder.name else 300), CPU
    ).double()
    return RerankerStep(reranker, ListwiseCE(), training_set(14), StepSettings(150, recompute))


def five_steps(step: EncoderStep | RerankerStep, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the losses over all ranks, the parameters) after five AdamW steps on batches that two does not divide."""
    model: nn.Module = DistributedDataParallel(step) if world > 1 else step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], 0
    for size in BATCH_SIZES:
        batch = step.data.lists[start : start + size]
        start += size
        loss = model(batch) * (world / size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        losses.append(shown.item() / world)
    return losses, {name: value.detach().clone() for name, value in step.named_parameters()}


def accelerator():
    """As the launcher of this process says."""
    return new_accelerator(EngineSettings("float32", CONFIG.batch_size, CONFIG.max_grad_norm, quantized=False))


def whole_training(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The parameters after the loop has trained two epochs."""
    step = encoder_step(folder)
    train(accelerator(), step, step.data.lists, CONFIG, Run(out, False, {}))
    return {name: value.detach().clone() for name, value in step.named_parameters()}


def on_rank(rank: int, root: Path, bert: Path, bert_reranker: Path) -> None:
    """Everything above as rank `rank` of two; rank 0 leaves its results in `root`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    results = {
        "encoder": five_steps(encoder_step(bert, recompute=True), 2),
        "reranker": five_steps(reranker_step(bert_reranker), 2),
        "interrupted": interrupted(bert, root / "interrupted", rank),
        "unshared": [unshared(bert, root / "unshared", rank, resume) for resume in (False, True)],
        "loop": whole_training(bert, root / "loop"),
    }
    torch.save(results, root / f"rank{rank}.pt")


def interrupted(bert: Path, out: Path, rank: int) -> str:
    """What the loop says when only one rank gets Ctrl-C, in the second step."""
    step = encoder_step(bert)
    forward, calls = step.forward, []

    def counting(batch):
        calls.append(batch)
        if rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(batch)

    step.forward = counting
    try:
        train(accelerator(), step, step.data.lists, CONFIG, Run(out, False, {}))
    except SkilltrainError as error:
        return error.what
    return "not interrupted"


def unshared(bert: Path, root: Path, rank: int, resume: bool) -> str:
    """What the loop says when each rank has a folder `out` of its own, and only rank 0 a checkpoint to go on from."""
    step = encoder_step(bert)
    if resume and rank == 0:
        (root / "0" / "checkpoints" / "step-2").mkdir(parents=True)
    try:
        with patch.object(checkpoint, "_PATIENCE", 0.0):
            train(accelerator(), step, step.data.lists, CONFIG, Run(root / str(rank), resume, {}))
    except SkilltrainError as error:
        return str(error)
    return "trained"
