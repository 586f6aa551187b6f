"""The same numbers on a GPU as on the CPU, and what a training does there unasked: `pytest -m gpu`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.cpu_linear import OneDnnLinear
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, train
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from training_data import training_set

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = (torch.device("cpu"), torch.device("cuda"))
TEXTS = ["deploy pods", "review the merge commit of the agent " * 6, "运行 clip", "extract pdf text " * 40]
SETTINGS = StepSettings(150, True)


def encoder_step(folder: Path, device: torch.device) -> EncoderStep:
    return EncoderStep(load_encoder(EncoderConfig(source=str(folder)), device), InfoNCE(), training_set(8), SETTINGS)


def reranker_step(folder: Path, device: torch.device) -> RerankerStep:
    reranker = load_reranker(RerankerConfig(source=str(folder)), device)
    return RerankerStep(reranker, ListwiseCE(), training_set(8), SETTINGS)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_an_encoders_vectors(model_folders: dict[str, Path], name: str) -> None:
    encoders = [load_encoder(EncoderConfig(source=str(model_folders[name])), device) for device in DEVICES]
    with torch.inference_mode():
        on_cpu, there = (encoder(encoder.tokenize(TEXTS, 100)).cpu() for encoder in encoders)
    assert torch.allclose(there, on_cpu, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "step_of"),
    [
        ("bert", encoder_step),
        ("qwen3", encoder_step),
        ("bert_reranker", reranker_step),
        ("qwen3_reranker", reranker_step),
    ],
)
def test_a_steps_loss_and_gradients(
    model_folders: dict[str, Path], name: str, step_of: Callable[[Path, torch.device], EncoderStep | RerankerStep]
) -> None:
    losses, gradients = list[float](), list[dict[str, torch.Tensor]]()
    for device in DEVICES:
        step = step_of(model_folders[name], device)
        loss = step(step.data.lists)
        loss.backward()
        losses.append(loss.item())
        gradients.append({key: value.grad.cpu() for key, value in step.named_parameters() if value.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][key], gradient, atol=1e-4), key


def trained(folder: Path, out: Path, resume: bool = False, **settings: object) -> EncoderStep:
    """An encoder after a training whose recipe says nothing of precision and token budget."""
    config = TrainingConfig.model_validate({"batch_size": 4, "accumulation": 1, "learning_rate": 1e-3} | settings)
    accelerator = new_accelerator(config, quantized=False)
    step = encoder_step(folder, accelerator.device)
    train(accelerator, step, step.data.lists, config, Run(out, resume, {}))
    return step


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_training_by_default(model_folders: dict[str, Path], tmp_path: Path) -> None:
    """bfloat16 over float32 weights, TF32, growing segments, no layers of the CPU's, the peak in the log."""
    before = encoder_step(model_folders["bert"], DEVICES[1])
    step = trained(model_folders["bert"], tmp_path)
    assert AcceleratorState().mixed_precision == "bf16" and torch.get_float32_matmul_precision() == "high"
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert not any(isinstance(module, OneDnnLinear) for module in step.modules())
    rows = rows_of(tmp_path)
    assert len(rows) == 2 and all(0 < row["peak_gib"] < 1 for row in rows)
    weights = dict(step.named_parameters())
    for name, value in before.named_parameters():
        assert weights[name].dtype == torch.float32 and not torch.equal(weights[name], value), name


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_resumed_training_draws_the_same_dropout(model_folders: dict[str, Path], tmp_path: Path) -> None:
    """Not bit for bit: a GPU adds the gradients of embeddings in any order."""
    settings = {"epochs": 2, "save_every": 1, "keep_checkpoints": 9, "precision": "float32"}
    trained(model_folders["bert_dropout"], tmp_path, **settings)
    whole = [row["loss"] for row in rows_of(tmp_path)]
    for number in (3, 4):
        (tmp_path / "checkpoints" / f"step-{number}").rename(tmp_path / f"step-{number}")
    torch.manual_seed(99)
    trained(model_folders["bert_dropout"], tmp_path, resume=True, **settings)
    assert [row["loss"] for row in rows_of(tmp_path)] == pytest.approx(whole, rel=1e-4)


@pytest.mark.usefixtures("fresh_accelerate")
def test_memory_that_runs_out_is_one_line(model_folders: dict[str, Path], tmp_path: Path) -> None:
    config = TrainingConfig(batch_size=4)
    accelerator = new_accelerator(config, quantized=False)
    step = encoder_step(model_folders["bert"], accelerator.device)
    step.forward = lambda batch: torch.empty(2**42, device=accelerator.device)
    with pytest.raises(SkilltrainError, match=r"the GPU's memory has run out .*token_budget"):
        train(accelerator, step, step.data.lists, config, Run(tmp_path, False, {}))
