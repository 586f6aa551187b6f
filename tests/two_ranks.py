"""What runs on each of two gloo processes, and alone: five AdamW steps, and whole trainings, sharded ones too."""

import importlib.util
import os
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.losses import InfoNCE, LateInteraction, ListwiseCE
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import Precision
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.models.tokens import tokenized
from skilltrain.records import Query
from skilltrain.retrieval.cascade import Cascade
from skilltrain.training import engine
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.dev import Dev, OwnEncoder
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, train
from skilltrain.training.ranks import first_rank_first, made_by_first_rank
from skilltrain.training.settings import DevConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_set import lexical_scores
from training_data import training_set
from training_runs import malicious_pickle, signal_in

CPU = torch.device("cpu")
BATCH_SIZES = (5, 3, 1, 4, 1)
CONFIG = TrainingConfig(
    epochs=2, batch_size=4, accumulation=2, learning_rate=1e-3, warmup_share=0.2, token_budget=150,
    precision="float32", save_every=2, keep_checkpoints=9,
)  # fmt: skip
SHARDED = {  # ways to share a model, each with one of the tiny models and how near two ranks come to one
    "fsdp2 encoder": ("bert", 1e-9),
    "fsdp2 reranker": ("qwen3_reranker", 1e-7),  # Qwen3's norms compute in float32
    "zero2 encoder": ("qwen3", 1e-5),  # DeepSpeed computes in float32
    "zero3 reranker": ("qwen3_reranker", 1e-4),
    "fsdp2 reranker in bfloat16": ("qwen3_reranker", 0.02),  # of the losses, not of the weights
    "zero2 encoder in bfloat16": ("qwen3", 0.02),
    "zero3 reranker in bfloat16": ("qwen3_reranker", 0.02),
}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
_FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
Step = EncoderStep | RerankerStep
Weights = dict[str, torch.Tensor]


def encoder_step(folder: Path, recompute: bool = False) -> EncoderStep:
    """The encoder's step in float64 on fourteen lists, with BM25's part of the scores and late interaction."""
    encoder, data = load_encoder(EncoderConfig(source=str(folder)), CPU).double(), training_set(14)
    data = replace(data, lexical=lexical_scores((one.query for one in data.lists), list(data.skills.values())))
    settings = StepSettings(150, recompute, late_interaction=LateInteraction(weight=0.5, temperature=0.1))
    return EncoderStep(encoder, InfoNCE(lexical_weight=0.5), data, settings).train()


def reranker_step(folder: Path, recompute: bool = False) -> RerankerStep:
    """The reranker's step in float64 on the same lists."""
    reranker = load_reranker(
        RerankerConfig(source=str(folder), max_tokens=100 if "bert" in folder.name else 300), CPU
    ).double()
    return RerankerStep(reranker, ListwiseCE(), training_set(14), StepSettings(150, recompute)).train()


def sharded_step(kind: str, folder: Path) -> Step:
    """The step of a case of SHARDED."""
    rounds = kind.endswith("bfloat16")
    step = encoder_step(folder, rounds) if "encoder" in kind else reranker_step(folder, rounds)
    return step if kind.startswith("fsdp2") and not rounds else step.float()


def weights_of(step: Step) -> Weights:
    """A copy of all parameters."""
    return {name: value.detach().clone() for name, value in step.named_parameters()}


def five_steps(step: Step, world: int) -> tuple[list[float], Weights]:
    """(the losses over all ranks, the parameters) after five AdamW steps on batches that two does not divide."""
    step.settings = replace(step.settings, is_sharded=False)
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
    return losses, weights_of(step)


def training(step: Step, out: Path, resume: bool = False, precision: Precision = "float32") -> None:
    """The loop over two epochs, launched as the environment says: four steps of two batches, the last one smaller."""
    config = CONFIG.model_copy(update={"precision": precision})
    train(new_accelerator(config, quantized=False), step, step.data.lists, config, Run(out, resume, {}))


def precision_of(kind: str) -> Precision:
    """The number format that a case of SHARDED computes in."""
    return "bfloat16" if kind.endswith("bfloat16") else "float32"


def on_rank(rank: int, root: Path, folders: Mapping[str, Path]) -> None:
    """Everything as rank `rank` of two, which leaves its results in `root`."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, hundreds of them
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    looped = encoder_step(folders["bert"])
    results = {
        "encoder": five_steps(encoder_step(folders["bert"], recompute=True), 2),
        "reranker": five_steps(reranker_step(folders["bert_reranker"]), 2),
        "figure": dev_figure(root, rank),
        "made": made_by_first_rank(lambda: f"by rank {rank}"),
        "order": order(root / "order", rank),
        "interrupted": interrupted(folders["bert"], root / "interrupted", rank),
        "unshared": [unshared(folders["bert"], root / "unshared", rank, resume) for resume in (False, True)],
    }
    training(looped, root / "loop")
    results["loop"] = weights_of(looped)
    for kind, (folder, _) in SHARDED.items():
        if kind.startswith("fsdp2") or HAS_DEEPSPEED:
            sharded(kind, folders[folder], root / kind, rank)
    if HAS_DEEPSPEED:
        results["malicious"] = malicious(folders["qwen3"], root / "zero2 encoder" / "resumed", rank)
    torch.save(results, root / f"rank{rank}.pt")


def order(file: Path, rank: int) -> str:
    """What a file that all ranks write to holds after this one has."""
    with first_rank_first():
        if rank == 0:
            time.sleep(0.5)
        file.write_text((file.read_text() if file.exists() else "") + str(rank))
        return file.read_text()


def dev_figure(root: Path, rank: int) -> float:
    """MRR of a dev evaluation in which a last bit orders the skills differently on the second rank."""
    queries, skill_ids = [Query("q", "find", "single", "test", "dev")], ["s0", "s1"]
    asked = tokenized(["q"], ["q"], lambda texts: [[0]])
    own = OwnEncoder(asked, {skill_id: [[0]] for skill_id in skill_ids})
    relevances = {"q": Relevance(frozenset({"s0"}), {"s0": 1.0})}
    dev = Dev(DevConfig(benchmark=root), relevances, Cascade(queries, [], 20, own), own)
    return dev.evaluate(lambda _: torch.tensor([[1.0, 0], [1 - rank / 2, 0], [0.75, 0]]))["MRR@10"].mean


def sharded(kind: str, folder: Path, out: Path, rank: int) -> None:
    """A whole training with shards, and in `out`/resumed the same one from its second step of four on."""
    resumed = out / "resumed"
    for at, resume in ((out, False), (resumed, True)):
        if resume and rank == 0:
            shutil.copytree(out / "checkpoints" / "step-2", resumed / "checkpoints" / "step-2")
        dist.barrier()
        launch(kind)
        torch.manual_seed(rank)
        training(sharded_step(kind, folder), at, resume, precision_of(kind))


def malicious(folder: Path, out: Path, rank: int) -> str:
    """What the loop says when DeepSpeed's files in the newest checkpoint of `out` hold code, which must not run."""
    if rank == 0:
        for file in last_checkpoint(out).glob("deepspeed/*.pt"):
            file.write_bytes(malicious_pickle(out / "executed"))
    dist.barrier()
    launch("zero2 encoder")
    try:
        training(sharded_step("zero2 encoder", folder), out, resume=True)
    except SkilltrainError as error:
        return error.what
    return "trained"


def launch(kind: str) -> None:
    """What the launcher would set for a case of SHARDED."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if kind.startswith("fsdp2"):
        os.environ |= _FSDP
        PartialState(cpu=True)  # on a CPU accelerate would quietly run DDP
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    else:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # shared memory, which it would compile first
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[len("zero")]}


def last_checkpoint(out: Path) -> Path:
    """The newest checkpoint of a run."""
    return checkpoints(out / "checkpoints")[-1]


def interrupted(bert: Path, out: Path, rank: int) -> str:
    """What the loop says when only one rank gets Ctrl-C, in the second step."""
    step = encoder_step(bert)
    if rank == 1:
        signal_in(step, 2, signal.SIGINT)
    try:
        training(step, out)
    except SkilltrainError as error:
        return error.what
    return "not interrupted"


def unshared(bert: Path, root: Path, rank: int, resume: bool) -> str:
    """What the loop says when each rank has a folder `out` of its own, and only rank 0 a checkpoint to go on from."""
    if resume and rank == 0:
        (root / "0" / "checkpoints" / "step-2").mkdir(parents=True)
    try:
        with patch.object(engine, "_PATIENCE", 0.0):
            training(encoder_step(bert), root / str(rank), resume)
    except SkilltrainError as error:
        return str(error)
    return "trained"
