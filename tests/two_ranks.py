"""Training runs on two gloo processes and on one, with sharded models too."""

import importlib.util
import os
import shutil
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from skilltrain.distributed import made_by_first_rank
from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, LateInteraction, ListwiseCE
from skilltrain.metrics.measures import Relevance
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import Precision
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import Cascade
from skilltrain.training import engine
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.dev import Dev, encoder_opener
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, train
from skilltrain.training.settings import DevConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
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
    """A way to share a model, one of the tiny models, and the tolerance between two ranks and one.

    Each step but the last has two batches. The last has a single list, so one of the ranks idles.
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
    # Tolerance of the losses, not of the weights. The rounding of bfloat16 depends on the processor:
    # without AVX the third loss differs by .022.
    "fsdp2 reranker in bfloat16": Case("qwen3_reranker", 0.05, recompute=True),
    "zero3 reranker in bfloat16": Case("qwen3_reranker", 0.05, recompute=True),
}
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
    """Return the step of a case, in float64 if it can be; an encoder has late interaction."""
    case = CASES[kind]
    data = training_set(LISTS_A_STEP * (case.num_steps - 1) + 1)
    settings = StepSettings(150, case.recompute, is_sharded=not kind.startswith("ddp"))
    if "encoder" in kind:
        encoder = load_encoder(EncoderConfig(source=str(folder)), CPU)
        settings = replace(settings, late_interaction=LateInteraction(weight=0.5, temperature=0.1))
        step: Step = EncoderStep(encoder, InfoNCE(), data, settings)
    else:
        is_bert = "bert" in folder.name
        config = RerankerConfig(source=str(folder), max_tokens=100 if is_bert else 300)
        settings = replace(settings, token_budget=150 if is_bert else 500)
        step = RerankerStep(load_reranker(config, CPU), ListwiseCE(), data, settings)
    is_float32 = "zero" in kind or precision_of(kind) == "bfloat16"
    return step.float() if is_float32 else step.double()


def weights_of(step: Step) -> Weights:
    """Return a copy of all parameters."""
    return {name: value.detach().clone() for name, value in step.named_parameters()}


def training(step: Step, out: Path, resume: bool = False, precision: Precision = "float32") -> None:
    """Train with the launcher that the environment names."""
    config = CONFIG.model_copy(update={"precision": precision})
    train(new_accelerator(config, quantized=False), step, config, Run(out, resume, {}))


def failure(step: Step, out: Path, resume: bool = False) -> SkilltrainError:
    """Train and return the error that ends the loop."""
    with pytest.raises(SkilltrainError) as error:
        training(step, out, resume)
    return error.value


def precision_of(kind: str) -> Precision:
    """Return the number format that a case computes in."""
    return "bfloat16" if kind.endswith("bfloat16") else "float32"


def can_run(kind: str) -> bool:
    """Return whether the launcher of a case is installed."""
    return HAS_DEEPSPEED or not kind.startswith("zero")


def on_rank(rank: int, root: Path, folders: Mapping[str, Path]) -> None:
    """Run everything as rank `rank` of two and save the results in `root`."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, hundreds of them
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
        "figure": dev_figure(folders["bert"], root, rank),
        "made": made_by_first_rank(lambda: f"by rank {rank}"),
        "interrupted": interrupted(folders["bert"], root / "interrupted", rank),
        "unshared": [
            unshared(folders["bert"], root / "unshared", rank, resume) for resume in (False, True)
        ],
    }
    for kind in filter(can_run, CASES):
        both_trainings(kind, folders[CASES[kind].folder], root / kind, rank)
    if HAS_DEEPSPEED:
        results["malicious"] = malicious(folders["qwen3"], root / "zero2 encoder" / "resumed", rank)
    torch.save(results, root / f"rank{rank}.pt")


def dev_figure(bert: Path, root: Path, rank: int) -> float:
    """Return the MRR of a dev evaluation in which the second rank orders the skills differently."""
    queries = [Query("q", "find", "single", "test", "dev")]
    skills = {name: Skill(name, name, "", "") for name in "ab"}
    encoder = load_encoder(EncoderConfig(source=str(bert)), CPU)
    over_model = encoder_opener(encoder, queries, skills)
    relevances = {"q": Relevance(frozenset("a"), {"a": 1.0})}
    dev = Dev(DevConfig(benchmark=root), relevances, Cascade(queries, [], 20), over_model)
    vectors = torch.tensor([[1.0, 0], [1 - rank / 2, 0], [0.75, 0]])
    return dev.evaluate(lambda _: vectors)["MRR@10"].mean


def both_trainings(kind: str, folder: Path, out: Path, rank: int) -> None:
    """Train in `out`, and again from the second step in `out`/resumed.

    With DDP each rank saves its weights.
    """
    for at, resume in ((out, False), (out / "resumed", True)):
        if resume and rank == 0:
            shutil.copytree(out / "checkpoints" / "step-2", at / "checkpoints" / "step-2")
        dist.barrier()
        launch(kind)
        torch.manual_seed(rank)
        step = step_of(kind, folder)
        training(step, at, resume, precision_of(kind))
        if kind.startswith("ddp"):
            torch.save(weights_of(step), at / f"rank{rank}.pt")


def malicious(folder: Path, out: Path, rank: int) -> str:
    """Return the error for a checkpoint whose DeepSpeed files hold code, which must not run."""
    if rank == 0:
        for file in last_checkpoint(out).glob("deepspeed/*.pt"):
            file.write_bytes(malicious_pickle(out / "executed"))
    dist.barrier()
    launch("zero2 encoder")
    return failure(step_of("zero2 encoder", folder), out, resume=True).problem


def launch(kind: str) -> None:
    """Set the environment as the launcher of a case would."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if kind.startswith("fsdp2"):
        os.environ |= _FSDP
        PartialState(cpu=True)  # on a CPU accelerate would quietly run DDP
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    elif kind.startswith("zero"):
        import deepspeed

        # DeepSpeed would have to compile its shared memory first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[len("zero")],
        }


def last_checkpoint(out: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return checkpoints(out / "checkpoints")[-1]


def interrupted(bert: Path, out: Path, rank: int) -> str:
    """Return the error when only one rank gets Ctrl-C, in the second step."""
    step = step_of("ddp encoder", bert)
    if rank == 1:
        signal_in(step, 2, signal.SIGINT)
    return failure(step, out).problem


def unshared(bert: Path, root: Path, rank: int, resume: bool) -> str:
    """Return the error when each rank has its own folder and only rank 0 has a checkpoint."""
    if resume and rank == 0:
        (root / "0" / "checkpoints" / "step-2").mkdir(parents=True)
    with patch.object(engine, "_VISIBILITY_TIMEOUT", 0.0):
        return str(failure(step_of("ddp encoder", bert), root / str(rank), resume))
