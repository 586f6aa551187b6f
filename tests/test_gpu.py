"""The same numbers on a GPU as on the CPU, and a training run's defaults there: `pytest -m gpu`."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import faiss
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.attention import varlen as flash
from transformers import Qwen3Config, Qwen3Model

from faults import raises
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.activations import layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.cpu_linear import OneDnnLinear
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, train
from skilltrain.training.memory import activation_bytes
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from tiny_models import qwen3_tokenizer
from training_data import training_set

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = (torch.device("cpu"), torch.device("cuda"))
TEXTS = [
    "deploy pods",
    "review the merge commit of the agent " * 6,
    "运行 clip",
    "extract pdf text " * 40,
]
Step = EncoderStep | RerankerStep


def encoder_step(
    folder: Path, device: torch.device, recompute: bool = True, varlen: bool = False
) -> EncoderStep:
    settings = StepSettings(150, recompute, varlen=varlen)
    encoder = load_encoder(EncoderConfig(source=str(folder)), device)
    return EncoderStep(encoder, InfoNCE(), training_set(8), settings).train()


def reranker_step(folder: Path, device: torch.device, recompute: bool = True) -> RerankerStep:
    settings = StepSettings(150, recompute)
    reranker = load_reranker(RerankerConfig(source=str(folder)), device)
    return RerankerStep(reranker, ListwiseCE(), training_set(8), settings).train()


def loss_and_gradients(step: Step) -> tuple[float, dict[str, Tensor]]:
    loss = step(step.data.lists)
    loss.backward()
    gradients = {
        key: value.grad.cpu() for key, value in step.named_parameters() if value.grad is not None
    }
    return loss.item(), gradients


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_encoder_vectors(model_folders: dict[str, Path], name: str):
    config = EncoderConfig(source=str(model_folders[name]))
    encoders = [load_encoder(config, device) for device in DEVICES]

    with torch.inference_mode():
        on_cpu, on_gpu = [encoder(encoder.tokenize(TEXTS, 100)).cpu() for encoder in encoders]

    assert torch.allclose(on_gpu, on_cpu, atol=1e-5)


CASES: list[tuple[str, Callable[..., Step]]] = [
    ("bert", encoder_step),
    ("qwen3", encoder_step),
    ("bert_reranker", reranker_step),
    ("qwen3_reranker", reranker_step),
]


@pytest.mark.parametrize(("name", "step_of"), CASES)
def test_gradients_of_step(model_folders: dict[str, Path], name: str, step_of: Callable[..., Step]):
    (expected_loss, expected), (loss, gradients) = [
        loss_and_gradients(step_of(model_folders[name], device)) for device in DEVICES
    ]

    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert torch.allclose(gradient, expected[key], atol=1e-4), key


@pytest.mark.parametrize(
    ("name", "step_of", "varlen"),
    [*((*case, False) for case in CASES), ("qwen3", partial(encoder_step, varlen=True), True)],
)
def test_bfloat16_is_close_to_float32(
    model_folders: dict[str, Path], name: str, step_of: Callable[..., Step], varlen: bool
):
    expected_loss, expected = loss_and_gradients(step_of(model_folders[name], DEVICES[0]))

    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        patch.object(flash, "varlen_attn", wraps=flash.varlen_attn) as kernel,
    ):
        loss, gradients = loss_and_gradients(step_of(model_folders[name], DEVICES[1]))

    assert bool(kernel.called) == varlen
    assert loss == pytest.approx(expected_loss, rel=0.02)
    flat = torch.cat([gradients[key].flatten() for key in expected])
    expected_flat = torch.cat([gradient.flatten() for gradient in expected.values()])
    assert torch.cosine_similarity(flat, expected_flat, dim=0) > 0.98


@pytest.mark.parametrize(
    ("name", "step_of"), [("bert_dropout", encoder_step), ("qwen3_reranker", reranker_step)]
)
def test_recomputed_layers_have_same_dropout(
    model_folders: dict[str, Path], name: str, step_of: Callable[..., Step]
):
    """BERT's own dropout, and LoRA's in a packed reranker."""
    results = []
    for recompute in (False, True):
        step = step_of(model_folders[name], DEVICES[1], recompute)
        torch.manual_seed(3)
        if isinstance(step, RerankerStep):
            add_adapter(step.model.network, AdapterConfig(rank=4, dropout=0.3))
        results.append(loss_and_gradients(step.train()))

    (expected_loss, expected), (loss, gradients) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for key, gradient in expected.items():
        assert torch.allclose(gradients[key], gradient, atol=1e-5), key


def test_two_passes_have_same_dropout(model_folders: dict[str, Path]):
    results = []
    for two_pass in (False, True):
        step = encoder_step(model_folders["bert_dropout"], DEVICES[1])
        step.settings = replace(step.settings, two_pass=two_pass)
        torch.manual_seed(3)
        results.append(loss_and_gradients(step))

    (expected_loss, expected), (loss, gradients) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for key, gradient in expected.items():
        assert torch.allclose(gradients[key], gradient, atol=1e-5), key


@pytest.mark.parametrize("recompute", [False, True])
def test_step_takes_planned_memory(tmp_path: Path, recompute: bool):
    """A Qwen3 of eight layers, whose activations are far larger than its weights."""
    qwen3_tokenizer(appends_end=True).save_pretrained(tmp_path)
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "head_dim": 64}
    config = Qwen3Config(vocab_size=800, num_attention_heads=8, num_key_value_heads=4, **sizes)
    Qwen3Model(config).save_pretrained(tmp_path)
    encoder = load_encoder(EncoderConfig(source=str(tmp_path), max_tokens=512), DEVICES[1])
    data = training_set(64, num_skills=200)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(8192, recompute)).train()
    bytes_per_slot = layer_bytes(step.model.network, torch.bfloat16)
    planned = activation_bytes(step, data.lists, bytes_per_slot)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()

    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = step(data.lists)
    loss.backward()

    # Gradients take as much as the weights.
    gradients = sum(parameter.numel() * 4 for parameter in step.parameters())
    activations = torch.cuda.max_memory_allocated() - allocated - gradients
    assert planned > 2 * gradients
    assert activations == pytest.approx(planned, rel=0.25)


def trained(folder: Path, out: Path, resume: bool = False, **settings: object) -> EncoderStep:
    """Train an encoder with the default precision and token budget."""
    config = TrainingConfig.model_validate(
        {"batch_size": 4, "accumulation": 1, "learning_rate": 1e-3} | settings
    )
    accelerator = new_accelerator(config, quantized=False)
    step = encoder_step(folder, accelerator.device)
    train(accelerator, step, config, Run(out, resume, {}))
    return step


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("fresh_accelerate")
def test_defaults_of_training(model_folders: dict[str, Path], tmp_path: Path):
    """bfloat16 over float32 weights, TF32, growing segments, no layers of the CPU, logged peak."""
    initial = encoder_step(model_folders["bert"], DEVICES[1])

    step = trained(model_folders["bert"], tmp_path)

    assert AcceleratorState().mixed_precision == "bf16"
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert not any(isinstance(module, OneDnnLinear) for module in step.modules())
    rows = rows_of(tmp_path)
    assert len(rows) == 2
    assert all(0 < row["peak_gib"] < 1 for row in rows)
    weights = dict(step.named_parameters())
    for name, value in initial.named_parameters():
        assert weights[name].dtype == torch.float32, name
        assert not torch.equal(weights[name], value), name


@pytest.mark.usefixtures("fresh_accelerate")
def test_resumed_training_has_same_dropout(model_folders: dict[str, Path], tmp_path: Path):
    """Not bit for bit: a GPU adds the gradients of embeddings in any order."""
    settings = {"epochs": 2, "save_every": 1, "keep_checkpoints": 9, "precision": "float32"}
    trained(model_folders["bert_dropout"], tmp_path, **settings)
    losses = [row["loss"] for row in rows_of(tmp_path)]
    for number in (3, 4):
        (tmp_path / "checkpoints" / f"step-{number}").rename(tmp_path / f"step-{number}")
    torch.manual_seed(99)

    trained(model_folders["bert_dropout"], tmp_path, resume=True, **settings)

    assert [row["loss"] for row in rows_of(tmp_path)] == pytest.approx(losses, rel=1e-4)


@pytest.mark.usefixtures("fresh_accelerate")
def test_out_of_memory_is_one_line(model_folders: dict[str, Path], tmp_path: Path):
    config = TrainingConfig(batch_size=4)
    accelerator = new_accelerator(config, quantized=False)
    step = encoder_step(model_folders["bert"], accelerator.device)
    step.forward = lambda batch: torch.empty(2**42, device=accelerator.device)

    with raises("out-of-memory"):
        train(accelerator, step, config, Run(tmp_path, False, {}))


@pytest.mark.skipif(not faiss.get_num_gpus(), reason="needs faiss-gpu in place of faiss-cpu")
def test_nearest_skills_equal_those_of_the_cpu():
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(3000, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    chunks = ChunkVectors.one_each(vectors)
    with patch.object(faiss, "get_num_gpus", return_value=0):
        expected = chunks.nearest(vectors[:200], 50)

    with patch.object(faiss, "knn_gpu", wraps=faiss.knn_gpu) as search:
        positions, scores = chunks.nearest(vectors[:200], 50)

    assert search.called
    assert (positions == expected[0]).all()
    assert (scores == expected[1]).all()
