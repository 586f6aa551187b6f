"""Training runs for two gloo processes and for one, with whole and with sharded models."""

import contextlib
import importlib.util
import os
import shutil
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from skilltrain.cli import as_program
from skilltrain.distributed import made_by_first_rank, rank_and_world
from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, LateInteraction, ListwiseCE, Matryoshka
from skilltrain.metrics.measures import Relevance
from skilltrain.models.adapters import AdapterConfig, add_adapter, quantizing_options
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import Precision
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import Cascade
from skilltrain.training import engine, memory
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.dev import Dev, encoder_opener
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import GIB, Batch, Run, Training, train
from skilltrain.training.memory import fit_into_memory
from skilltrain.training.settings import DevConfig, TrainingConfig
from skilltrain.training.steps import (
    EncoderStep,
    PairsToScore,
    RerankerStep,
    StepSettings,
    TextsToEncode,
)
from training_data import training_set
from training_runs import malicious_pickle, signal_in

CPU = torch.device("cpu")
CONFIG = TrainingConfig(
    batch_size=2,
    accumulation=2,
    learning_rate=1e-3,
    warmup_share=0.2,
    token_budget=150,
    precision="float32",
    save_every=2,
    keep_checkpoints=9,
)
LISTS_A_STEP = CONFIG.batch_size * CONFIG.accumulation


@dataclass(frozen=True)
class Case:
    """A training run that is distributed in one way.

    Each step but the last has two batches. The last has a single list, so one rank idles.

    Attributes:
        folder: Name of the tiny model.
        tolerance: Largest difference of a weight between two ranks and one process.
    """

    folder: str
    tolerance: float
    num_steps: int = 3
    recompute: bool = False


CASES = {
    "ddp encoder": Case("bert", 1e-9, 5, recompute=True),
    "ddp reranker": Case("bert_reranker", 1e-9, 5),
    "fsdp2 encoder": Case("bert", 1e-9),
    "fsdp2 reranker": Case("qwen3_reranker", 1e-7),  # Qwen3's norms compute in float32
    "zero2 encoder": Case("qwen3", 1e-4),  # DeepSpeed computes in float32
    "zero3 reranker": Case("qwen3_reranker", 1e-4),
    # Tolerance of the losses, not of the weights. The rounding of bfloat16 depends on the CPU:
    # without AVX the third loss differs by .022.
    "fsdp2 reranker in bfloat16": Case("qwen3_reranker", 0.05, recompute=True),
    "fsdp2 4-bit encoder in bfloat16": Case("qwen3_wide", 0.05, recompute=True),
    "zero3 reranker in bfloat16": Case("qwen3_reranker", 0.05, recompute=True),
}
# The tolerance is that of a gradient in two passes, relative to the largest gradient.
TWO_PASS_CASES = {
    "ddp encoder": Case("bert_dropout", 1e-9),
    "fsdp2 encoder": Case("bert_dropout", 1e-9),
    "fsdp2 encoder in bfloat16": Case("bert_dropout", 0.01),
    "zero2 encoder": Case("qwen3", 1e-5),  # DeepSpeed computes in float32
    "zero3 encoder": Case("qwen3", 1e-5),
    "zero2 encoder in bfloat16": Case("qwen3", 0.01),
    "zero3 encoder in bfloat16": Case("qwen3", 0.01),
}
REFUSED_KINDS = ("ddp encoder", "fsdp2 encoder", "zero2 encoder", "zero3 reranker")
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
Step = EncoderStep | RerankerStep
Weights = dict[str, torch.Tensor]


def step_of(kind: str, folder: Path) -> Step:
    """Make the training step of a case. It computes in float64 where the case allows."""
    case = (TWO_PASS_CASES | CASES)[kind]
    data = training_set(LISTS_A_STEP * (case.num_steps - 1) + 1)
    settings = StepSettings(150, case.recompute, is_sharded=not kind.startswith("ddp"))
    is_bert = "bert" in folder.name
    if "4-bit" in kind:
        adapter = AdapterConfig(rank=4, alpha=8, quantize="nf4")
        options = quantizing_options(adapter, sharded=rank_and_world()[1] > 1)
        torch.manual_seed(0)
        encoder = load_encoder(EncoderConfig(source=str(folder)), CPU, options)
        add_adapter(encoder.network, adapter)
        return EncoderStep(encoder, InfoNCE(), data, settings)
    if "encoder" in kind:
        encoder = load_encoder(EncoderConfig(source=str(folder)), CPU)
        settings = replace(settings, late_interaction=LateInteraction(weight=0.5, temperature=0.1))
        step: Step = EncoderStep(encoder, InfoNCE(), data, settings)
    else:
        config = RerankerConfig(source=str(folder), max_tokens=100 if is_bert else 300)
        settings = replace(settings, token_budget=150 if is_bert else 500)
        step = RerankerStep(load_reranker(config, CPU), ListwiseCE(), data, settings)
    is_float64 = "zero" not in kind and precision_of(kind) == "float32"
    return step.double() if is_float64 else step.float()


def weights_of(step: Step) -> Weights:
    """Return a copy of all parameters."""
    return {name: value.detach().clone() for name, value in step.named_parameters()}


def run_training(
    step: Step, out: Path, resume: bool = False, precision: Precision = "float32"
) -> None:
    """Run the training loop as the environment configures it."""
    config = CONFIG.model_copy(update={"precision": precision})
    train(new_accelerator(config, quantized=False), step, config, Run(out, resume, {}))


def training_error(step: Step, out: Path, resume: bool = False) -> SkilltrainError:
    """Run the training loop and return its error."""
    with pytest.raises(SkilltrainError) as error:
        run_training(step, out, resume)
    return error.value


def precision_of(kind: str) -> Precision:
    """Return the number format of a case."""
    return "bfloat16" if kind.endswith("bfloat16") else "float32"


def can_run(kind: str) -> bool:
    """Return whether the packages of a case are installed."""
    if "4-bit" in kind:
        return importlib.util.find_spec("bitsandbytes") is not None
    return HAS_DEEPSPEED or not kind.startswith("zero")


def on_rank(rank: int, root: Path, folders: Mapping[str, Path]) -> None:
    """Run everything as one of two ranks and save the results in `root`.

    Args:
        folders: Folder of each tiny model by its name.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch gives hundreds of them
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    results = {
        "dev_metric": dev_metric(folders["bert"], root, rank),
        "first_rank_value": made_by_first_rank(lambda: f"by rank {rank}"),
        "memory_choice": memory_choice(folders["bert"], rank),
        "random_number": random_number(folders["bert"], root / "random"),
        "copied_inputs": copied_inputs(folders["bert"], folders["qwen3_reranker"]),
        "two_passes": {
            kind: compare_passes(kind, folders[case.folder], root / "passes" / kind)
            for kind, case in TWO_PASS_CASES.items()
            if can_run(kind)
        },
        "interruption": interrupt(folders["bert"], root / "interrupted", rank),
        "unshared_folder": [
            train_unshared(folders["bert"], root / "unshared", rank, resume)
            for resume in (False, True)
        ],
    }
    for kind in filter(can_run, CASES):
        train_and_resume(kind, folders[CASES[kind].folder], root / kind, rank)
    if HAS_DEEPSPEED:
        out = root / "zero2 encoder" / "resumed"
        results["malicious_checkpoint"] = resume_malicious(folders["qwen3"], out, rank)
    for reason in ("limit", "nan"):
        results[reason] = {
            kind: refuse_step(kind, folders[CASES[kind].folder], root / reason / kind, reason)
            for kind in filter(can_run, REFUSED_KINDS)
        }
    torch.save(results, root / f"rank{rank}.pt")
    dist.barrier()
    lose_a_rank(folders["bert"], root / "killed", rank)


def dev_metric(bert: Path, root: Path, rank: int) -> float:
    """Return MRR of a dev evaluation whose skill vectors differ between the ranks.

    The second rank orders the skills differently.
    """
    queries = [Query("q", "find", "single", "test", "dev")]
    skills = {name: Skill(name, name, "", "") for name in "ab"}
    encoder = load_encoder(EncoderConfig(source=str(bert)), CPU)
    opener = encoder_opener(encoder, queries, skills)
    relevances = {"q": Relevance(frozenset("a"), {"a": 1.0})}
    dev = Dev(DevConfig(benchmark=root), relevances, Cascade(queries, [], 20), opener)
    # One query and two skills, shape (3, 2).
    vectors = torch.tensor([[1.0, 0], [1 - rank / 2, 0], [0.75, 0]])
    return dev.evaluate(lambda _: vectors)["MRR@10"].mean


def compare_passes(kind: str, folder: Path, out: Path) -> tuple[float, int]:
    """Compute the gradients of a batch in one pass and in two passes.

    Returns:
        The largest difference of a gradient, relative to the largest gradient. And how often DDP
        sums the gradients of all ranks in two passes.
    """
    gradients = []
    finished: list[bool] = []  # whether a sum is the last one of a backward pass
    for two_pass in (False, True):
        launch(kind)
        step = step_of(kind, folder)
        assert isinstance(step, EncoderStep)
        settings = replace(step.settings, two_pass=two_pass, token_budget=60)
        step = EncoderStep(step.model, Matryoshka(dims=(8, 32)), step.data, settings)
        config = CONFIG.model_copy(update={"precision": precision_of(kind)})
        accelerator = new_accelerator(config, quantized=False)
        training = Training(accelerator, step, config, Run(out, False, {}))
        if two_pass and kind.startswith("ddp"):
            training.model.register_comm_hook(finished, count_and_sum)
        gradients.append(local_gradient(training, step.data.lists[:5]))
    one_pass, two_passes = gradients
    difference = (one_pass - two_passes).abs().max() / one_pass.abs().max()
    return difference.item(), sum(finished)


def count_and_sum(finished: list[bool], bucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, as DDP does. Record if no bucket follows."""
    finished.append(bucket.is_last())
    all_ranks: Any = None
    return allreduce_hook(all_ranks, bucket)


def local_gradient(training: Training, batch: Batch) -> torch.Tensor:
    """Return this rank's part of the gradient as a vector. FSDP2 and DeepSpeed have parts."""
    parts: list[torch.Tensor] = []

    def keep_parts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                parts.append(local.flatten().double())

    optimizer: Any = training.optimizer
    while hasattr(optimizer, "optimizer"):  # unwrap accelerate's and DeepSpeed's optimisers
        optimizer = optimizer.optimizer
    optimizer.register_step_pre_hook(keep_parts)
    training._update([batch])
    return torch.cat(parts)


def memory_choice(bert: Path, rank: int) -> tuple[bool, int]:
    """Choose memory settings where the second rank has little memory.

    Returns:
        Whether the layers are recomputed, and the token budget.
    """
    step = step_of("ddp encoder", bert)
    step.settings = replace(step.settings, recompute=False, token_budget=2048)
    available = GIB if rank == 0 else 0
    with patch.object(memory, "available_bytes", lambda device: available):
        fit_into_memory(step, TrainingConfig(precision="float32"), CPU)
    return step.settings.recompute, step.settings.token_budget


def random_number(bert: Path, out: Path) -> float:
    """Return the first random number of this rank in a training run, as dropout draws it."""
    launch("ddp encoder")
    accelerator = new_accelerator(CONFIG, quantized=False)
    Training(accelerator, step_of("ddp encoder", bert), CONFIG, Run(out, False, {}))
    return torch.rand(1).item()


def copied_inputs(bert: Path, reranker: Path) -> list[str]:
    """Return the kinds of evaluation inputs that FSDP2 with mixed precision copies."""
    encoder_step = step_of("fsdp2 encoder", bert)
    reranker_step = step_of("fsdp2 reranker in bfloat16", reranker)
    assert isinstance(reranker_step, RerankerStep)
    pairs = [reranker_step.make_pairs(each) for each in reranker_step.data.lists[:2]]
    cases = [
        (encoder_step, TextsToEncode([[2, 9, 3], [2, 7, 7, 3]])),
        (reranker_step, PairsToScore(pairs)),
    ]
    copied = []
    for step, inputs in cases:
        received = []
        fully_shard(step, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        step.register_forward_pre_hook(lambda _, args, to=received: to.append(args[0]))
        with torch.no_grad():
            step(inputs)
        if received[0] is not inputs:
            copied.append(type(inputs).__name__)
    return copied


def refuse_step(kind: str, folder: Path, out: Path, reason: str) -> tuple[str, str, bool]:
    """Train with a gradient that must be refused.

    Args:
        reason: `limit` if the norm of the gradient is above the limit. `nan` if the gradient of the
            second rank is not a number.

    Returns:
        Code and problem of the error, and whether a weight moved.
    """
    launch(kind)
    step = step_of(kind, folder)
    config = CONFIG
    if reason == "limit":
        config = CONFIG.model_copy(update={"stop_grad_norm": 1e-3})
    elif rank_and_world()[0] == 1:
        spoil_gradient(step)
    training = Training(new_accelerator(config, quantized=False), step, config, Run(out, False, {}))
    before = local_weights(step)
    with pytest.raises(SkilltrainError) as error:
        training.run_remaining_steps()
    weight_pairs = zip(before, local_weights(step), strict=True)
    has_moved = any(not torch.equal(*pair) for pair in weight_pairs)
    return error.value.code, error.value.problem, has_moved


def spoil_gradient(step: Step) -> None:
    """Let a step return a finite loss whose gradient is not a number."""
    forward = step.forward

    def forward_and_spoil(batch: Any) -> torch.Tensor:
        loss = forward(batch)
        loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    step.forward = forward_and_spoil


def local_weights(step: Step) -> list[torch.Tensor]:
    """Return a copy of this rank's part of each weight. FSDP2 and ZeRO-3 have parts."""
    weights = []
    for parameter in step.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        weights.append(getattr(local, "ds_tensor", local).detach().clone())
    return weights


def train_and_resume(kind: str, folder: Path, out: Path, rank: int) -> None:
    """Train in `out`, and in `out`/resumed from the checkpoint of its second step."""
    resumed = out / "resumed"
    train_once(kind, folder, out, rank, resume=False)
    if rank == 0:
        shutil.copytree(out / "checkpoints" / "step-2", resumed / "checkpoints" / "step-2")
    train_once(kind, folder, resumed, rank, resume=True)


def train_once(kind: str, folder: Path, out: Path, rank: int, resume: bool) -> None:
    """Run one training. With DDP, save the weights of each rank."""
    dist.barrier()
    launch(kind)
    torch.manual_seed(rank)
    step = step_of(kind, folder)
    run_training(step, out, resume, precision_of(kind))
    if kind.startswith("ddp"):
        torch.save(weights_of(step), out / f"rank{rank}.pt")


def resume_malicious(folder: Path, out: Path, rank: int) -> str:
    """Resume from a DeepSpeed checkpoint whose files hold code. Returns the error."""
    if rank == 0:
        for file in last_checkpoint(out).glob("deepspeed/*.pt"):
            file.write_bytes(malicious_pickle(out / "executed"))
    dist.barrier()
    launch("zero2 encoder")
    return training_error(step_of("zero2 encoder", folder), out, resume=True).problem


def launch(kind: str) -> None:
    """Set the environment as the launcher does for a case."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if kind.startswith("fsdp2"):
        os.environ |= _FSDP
        PartialState(cpu=True)  # on a CPU, accelerate would run DDP without a warning
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    elif kind.startswith("zero"):
        import deepspeed

        # Shared memory would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[len("zero")],
        }


def last_checkpoint(out: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return checkpoints(out / "checkpoints")[-1]


def interrupt(bert: Path, out: Path, rank: int) -> str:
    """Send Ctrl-C to one rank in the second step. Returns the error."""
    step = step_of("ddp encoder", bert)
    if rank == 1:
        signal_in(step, 2, signal.SIGINT)
    return training_error(step, out).problem


def train_unshared(bert: Path, root: Path, rank: int, resume: bool) -> str:
    """Train with an output folder for each rank. Returns the error.

    To resume, only the first rank has a checkpoint.
    """
    if resume and rank == 0:
        (root / "0" / "checkpoints" / "step-2").mkdir(parents=True)
    with patch.object(engine, "_VISIBILITY_TIMEOUT", 0.0):
        return str(training_error(step_of("ddp encoder", bert), root / str(rank), resume))


def lose_a_rank(bert: Path, out: Path, rank: int) -> None:
    """End the second rank by SIGKILL in the third step. The first rank runs as a program does.

    Both processes end here. What the first rank prints goes to `out`/stderr.txt.
    """
    launch("ddp encoder")
    step = step_of("ddp encoder", bert)
    if rank == 1:
        signal_in(step, 3, signal.SIGKILL)
    out.mkdir(exist_ok=True)
    with (out / "stderr.txt").open("w") as file, contextlib.redirect_stderr(file):
        as_program(lambda words: run_training(step, out), [])
