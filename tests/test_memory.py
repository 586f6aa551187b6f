"""A GPU's memory: planned, probed before the first step, and one line where it runs out; more is in test_gpu.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE
from skilltrain.models.activations import checkpoint_layers, layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.encoder import Encoder, EncoderConfig
from skilltrain.templates import EncoderTemplate
from skilltrain.training import loop
from skilltrain.training.engine import new_accelerator
from skilltrain.training.estimates import activation_bytes
from skilltrain.training.loop import out_of_memory_in_one_line
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.train import TrainEncoder, check_fits, load_model
from skilltrain.training.training_set import ListsSource
from test_plan import NAME_ONLY, lists_by_hand
from training_data import training_set
from training_runs import CONFIG, new_step, run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CPU = torch.device("cpu")


def test_memory_that_runs_out_is_one_line_with_what_to_lower(model_folders, tmp_path):
    step = new_step(model_folders["bert"])

    def full(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB …")

    step.forward = full

    with pytest.raises(SkilltrainError) as error:
        run(step, tmp_path, resume=False)
    assert str(error.value) == (
        "the GPU's memory has run out (a training.token_budget below 150 or a model.max_tokens below 256 or a "
        "training.batch_size below 4 (with more accumulation) or an adapter (LoRA))"
    )

    step.settings = StepSettings(150, recompute=False)

    with (
        raises("out-of-memory"),
        out_of_memory_in_one_line(CONFIG, step),
    ):
        full(None)


@pytest.mark.parametrize(
    ("adapter", "launch", "num_processes", "bytes_each"),
    [
        (None, "NO", 1, (16, 0)),
        (None, "FSDP", 4, (4, 0)),
        (AdapterConfig(), "NO", 1, (4, 16)),
    ],
)
def test_a_model_that_cannot_fit_the_card_is_refused_before_it_is_loaded(
    model_folders, tmp_path, monkeypatch, adapter, launch, num_processes, bytes_each
):
    source = model_folders["bert"]
    config = TrainEncoder(
        stage="train_encoder",
        model=EncoderConfig(source=str(source)),
        adapter=adapter,
        data=ListsSource(pool=tmp_path, lists=tmp_path),
        out=tmp_path,
    )
    sizes = {name: value.numel() for name, value in load_model(config, CPU).named_parameters()}
    of_adapter = sum(size for name, size in sizes.items() if ".lora_" in name)
    least = bytes_each[0] * (sum(sizes.values()) - of_adapter) + bytes_each[1] * of_adapter
    properties = SimpleNamespace(total_memory=least)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("skilltrain.training.train.default_device", lambda: torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    monkeypatch.setenv(f"ACCELERATE_USE_{launch}", "true")
    check_fits(config)
    properties.total_memory -= 1

    with raises("out-of-memory"):
        check_fits(config)


def test_what_a_recipe_leaves_out_follows_from_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})

    silent, says = TrainingConfig(), TrainingConfig(token_budget=512, precision="float32")

    for device, budget, dtype in (
        (CPU, 4096, torch.float32),
        (torch.device("cuda"), 16384, torch.bfloat16),
    ):
        assert (silent.token_budget_on(device), silent.dtype_on(device)) == (budget, dtype)
        assert (says.token_budget_on(device), says.dtype_on(device)) == (512, torch.float32)
    assert TrainingConfig(precision="auto").dtype_on(CPU) == torch.bfloat16


def test_whole_training_moves_the_weights_whatever_the_models_precision(model_folders, tmp_path):
    """In bfloat16 steps of 2e-5 are lost on nearly all weights."""
    model = EncoderConfig(source=str(model_folders["bert"]), precision="bfloat16")
    data, training = (
        ListsSource(pool=tmp_path, lists=tmp_path),
        TrainingConfig(batch_size=4, precision="bfloat16"),
    )
    config = TrainEncoder(
        stage="train_encoder", model=model, data=data, training=training, out=tmp_path
    )

    encoder, lists = load_model(config, CPU), training_set(20)

    assert isinstance(encoder, Encoder)

    step = EncoderStep(encoder, InfoNCE(), lists, StepSettings(150))
    before = {
        name: value.detach().clone()
        for name, value in step.named_parameters()
        if "embeddings" not in name
    }
    loop.train(new_accelerator(training, False), step, training, loop.Run(tmp_path, False, {}))
    after = dict(step.named_parameters())

    assert {value.dtype for value in after.values()} == {torch.float32}

    moved = torch.cat([(after[name] != value).flatten() for name, value in before.items()])

    assert moved.float().mean() > 0.9


def kept_in_truth(network, num_tokens, dtype):
    """Bytes of all that autograd keeps in a forward pass of one text."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        network(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    return sum(storages.values())


LORA = AdapterConfig(rank=4, dropout=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "adapter"),
    [
        ("bert_dropout", torch.float32, None),
        ("bert_dropout", torch.bfloat16, LORA),
        ("qwen3", torch.bfloat16, None),
        ("qwen3", torch.float32, LORA),
    ],
)
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(open_encoder_of, name, dtype, adapter):
    network = open_encoder_of(name).backbone
    if adapter:
        add_adapter(network, adapter)

    found = layer_bytes(network, dtype)

    assert not network.training
    assert layer_bytes(copy.deepcopy(network).to("meta"), dtype) == found

    network.train()
    expected = (kept_in_truth(network, 128, dtype) - kept_in_truth(network, 64, dtype)) / 64 / 2

    assert found == pytest.approx(expected, rel=0.02)


def test_the_largest_batch_by_hand(open_encoder_of):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    data, of_layer = lists_by_hand(), layer_bytes(encoder.backbone, torch.float32)
    # Queries of 4 and 6 tokens; skills of 3, 5, 12 and 12: five of them padded to 12, the last alone.
    for recompute, expected in (
        (False, 63 * 2 * of_layer),
        (True, 63 * 2 * 32 * 4 + 60 * of_layer),
    ):
        step = EncoderStep(encoder, InfoNCE(), data, StepSettings(64, recompute))

        assert step.slots(data.lists) == [60, 3]
        assert activation_bytes(step, [data.lists[:1], data.lists], torch.float32) == expected


def test_a_network_that_cannot_recompute_is_refused():
    network = MPNetModel(
        MPNetConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with raises("unsupported-model"):
        checkpoint_layers(network)
