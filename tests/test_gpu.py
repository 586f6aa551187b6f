"""The same numbers on a GPU as on the CPU: `pytest -m gpu`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
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
