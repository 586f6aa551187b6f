"""GPU memory: planned, probed before the first step, and one line where it runs out."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from faults import raises
from skilltrain.losses import InfoNCE
from skilltrain.models.activations import checkpoint_layers, layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.encoder import Encoder, EncoderConfig
from skilltrain.templates import EncoderTemplate
from skilltrain.training import loop
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import out_of_memory_in_one_line
from skilltrain.training.memory import activation_bytes
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.train import TrainEncoder, check_fits, load_model
from skilltrain.training.training_set import ListsSource
from test_plan import NAME_ONLY, lists_by_hand
from training_data import training_set
from training_runs import CONFIG, new_step, run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CPU = torch.device("cpu")


def out_of_memory(batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB …")


def test_out_of_memory_says_what_to_lower(model_folders, tmp_path):
    step = new_step(model_folders["bert"])
    step.forward = out_of_memory

    with raises("out-of-memory") as error:
        run(step, tmp_path, resume=False)

    assert str(error.value) == (
        "the GPU's memory has run out (a training.token_budget below 150 or a model.max_tokens "
        "below 256 or a training.batch_size below 4 (with more accumulation) or an adapter (LoRA))"
    )


def test_out_of_memory_without_recomputation(model_folders):
    step = new_step(model_folders["bert"])
    step.settings = StepSettings(150, recompute=False)

    with raises("out-of-memory"), out_of_memory_in_one_line(CONFIG, step):
        out_of_memory(None)


@pytest.mark.parametrize(
    ("adapter", "launch", "num_processes", "weight_bytes", "adapter_bytes"),
    [
        (None, "NO", 1, 16, 0),
        (None, "FSDP", 4, 4, 0),
        (AdapterConfig(), "NO", 1, 4, 16),
    ],
)
def test_model_that_cannot_fit_is_refused(
    model_folders,
    tmp_path,
    monkeypatch,
    adapter,
    launch,
    num_processes,
    weight_bytes,
    adapter_bytes,
):
    """The bytes are those of each weight of the model and of the adapter."""
    config = TrainEncoder(
        stage="train_encoder",
        model=EncoderConfig(source=str(model_folders["bert"])),
        adapter=adapter,
        data=ListsSource(pool=tmp_path, lists=tmp_path),
        out=tmp_path,
    )
    num_bytes = 0
    for name, value in load_model(config, CPU).named_parameters():
        num_bytes += value.numel() * (adapter_bytes if ".lora_" in name else weight_bytes)
    properties = SimpleNamespace(total_memory=num_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("skilltrain.training.train.default_device", lambda: torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    monkeypatch.setenv(f"ACCELERATE_USE_{launch}", "true")
    check_fits(config)

    properties.total_memory -= 1

    with raises("out-of-memory"):
        check_fits(config)


@pytest.mark.parametrize(
    ("device", "token_budget", "dtype"),
    [("cpu", 4096, torch.float32), ("cuda", 16384, torch.bfloat16)],
)
def test_defaults_follow_from_device(monkeypatch, device, token_budget, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    config = TrainingConfig()

    assert config.token_budget_on(torch.device(device)) == token_budget
    assert config.dtype_on(torch.device(device)) == dtype


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_override_device(device):
    config = TrainingConfig(token_budget=512, precision="float32")

    assert config.token_budget_on(torch.device(device)) == 512
    assert config.dtype_on(torch.device(device)) == torch.float32


def test_automatic_precision_asks_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})

    assert TrainingConfig(precision="auto").dtype_on(CPU) == torch.bfloat16


def test_training_of_bfloat16_model_moves_weights(model_folders, tmp_path):
    """Weights in bfloat16 would lose nearly all steps of 2e-5, so they are trained in float32."""
    training = TrainingConfig(batch_size=4, precision="bfloat16")
    config = TrainEncoder(
        stage="train_encoder",
        model=EncoderConfig(source=str(model_folders["bert"]), precision="bfloat16"),
        data=ListsSource(pool=tmp_path, lists=tmp_path),
        training=training,
        out=tmp_path,
    )
    encoder = load_model(config, CPU)
    assert isinstance(encoder, Encoder)
    step = EncoderStep(encoder, InfoNCE(), training_set(20), StepSettings(150))
    weights = {name: value.detach().clone() for name, value in step.named_parameters()}

    loop.train(new_accelerator(training, False), step, training, loop.Run(tmp_path, False, {}))

    moved = []
    for name, value in step.named_parameters():
        assert value.dtype == torch.float32
        if "embeddings" not in name:
            moved.append((value != weights[name]).flatten())
    assert torch.cat(moved).float().mean() > 0.9


def bytes_kept_by_autograd(network, num_tokens, dtype):
    """Measure the bytes that autograd keeps in a forward pass of one text."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        network(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    return sum(storage.nbytes() for storage in storages.values())


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
def test_layer_bytes_equal_those_of_autograd(open_encoder_of, name, dtype, adapter):
    network = open_encoder_of(name).backbone
    if adapter:
        add_adapter(network, adapter)

    num_bytes = layer_bytes(network, dtype)

    assert not network.training
    assert layer_bytes(copy.deepcopy(network).to("meta"), dtype) == num_bytes
    network.train()
    short = bytes_kept_by_autograd(network, 64, dtype)
    long = bytes_kept_by_autograd(network, 128, dtype)
    # Of one token and one of two layers.
    assert num_bytes == pytest.approx((long - short) / 64 / 2, rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_largest_batch_by_hand(open_encoder_of, recompute):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    data = lists_by_hand()
    num_bytes = layer_bytes(encoder.backbone, torch.float32)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(64, recompute))

    memory = activation_bytes(step, data.lists, num_bytes)

    # Queries of 4 and 6 tokens; skills of 3, 5, 12 and 12: five of them padded to 12, the last in a
    # micro-batch of its own. With recomputation only the inputs of two layers of width 32 are kept.
    assert step.padded_tokens(data.lists) == [60, 3]
    expected = 63 * 2 * 32 * 4 + 60 * num_bytes if recompute else 63 * 2 * num_bytes
    assert memory == expected


def test_network_that_cannot_recompute_is_refused():
    config = MPNetConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)

    with raises("unsupported-model"):
        checkpoint_layers(MPNetModel(config))
