"""Memory settings that a training run chooses before its first step."""

import math

import pytest
import torch

from faults import raises
from skilltrain.losses import InfoNCE
from skilltrain.models.activations import layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.micro_batches import BATCHES_PER_TRIM
from skilltrain.training import estimates, loop, memory
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import GIB, Run, Training, train
from skilltrain.training.memory import (
    activation_bytes,
    available_bytes,
    fit_into_memory,
    held_bytes,
    weight_bytes,
)
from skilltrain.training.optimizers import AdamW
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings
from training_data import training_set

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CPU = torch.device("cpu")
NUM_LISTS = 40  # all in one batch


@pytest.fixture
def step(open_encoder_of):
    data = training_set(NUM_LISTS, num_skills=60)
    return EncoderStep(open_encoder_of("bert"), InfoNCE(), data, StepSettings(2048))


def bytes_needed(step, recompute, token_budget):
    """Return the bytes that activations of the batch need with these settings."""
    step.settings = StepSettings(token_budget, recompute)
    bytes_per_slot = layer_bytes(step.model.network, torch.float32)
    needed = activation_bytes(step, step.data.lists, bytes_per_slot)
    step.settings = StepSettings(2048)
    return needed


def choose(step, monkeypatch, activation_limit, **settings):
    """Choose settings where activations may take so many bytes. Return both settings."""
    available = held_bytes(step, AdamW()) - weight_bytes(step) + activation_limit
    monkeypatch.setattr(memory, "available_bytes", lambda device: available)
    config = TrainingConfig(batch_size=NUM_LISTS, precision="float32", **settings)
    fit_into_memory(step, config, CPU)
    return step.settings.recompute, step.settings.token_budget


def test_enough_memory_needs_no_recomputation(step, monkeypatch):
    limit = bytes_needed(step, recompute=False, token_budget=2048)

    assert choose(step, monkeypatch, limit) == (False, 2048)


def test_less_memory_recomputes_layers(step, monkeypatch):
    limit = bytes_needed(step, recompute=False, token_budget=2048) - 1

    assert choose(step, monkeypatch, limit) == (True, 2048)


def test_little_memory_halves_the_token_budget(step, monkeypatch):
    limit = bytes_needed(step, recompute=True, token_budget=1024)

    assert choose(step, monkeypatch, limit) == (True, 1024)


def test_too_little_memory_is_refused(step, monkeypatch):
    limit = bytes_needed(step, recompute=True, token_budget=512) - 1

    with raises("out-of-memory"):
        choose(step, monkeypatch, limit)


def test_recipe_that_forbids_recomputation_is_refused(step, monkeypatch):
    limit = bytes_needed(step, recompute=True, token_budget=2048)

    with raises("out-of-memory"):
        choose(step, monkeypatch, limit, recompute=False, token_budget=2048)


def test_half_the_token_budget_lowers_the_peak(step):
    whole = bytes_needed(step, recompute=True, token_budget=1024)
    half = bytes_needed(step, recompute=True, token_budget=512)

    assert half < whole


@pytest.mark.parametrize("recompute", [False, True])
def test_two_passes_need_memory_of_a_micro_batch(step, recompute):
    step.settings = StepSettings(512, recompute, two_pass=True)
    lists = step.data.lists

    whole = activation_bytes(step, lists, bytes_per_token=1000.0)

    half = activation_bytes(step, lists[: NUM_LISTS // 2], bytes_per_token=1000.0)
    assert whole == pytest.approx(half, rel=0.1)


def test_ranks_share_no_micro_batch(step, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    step.settings = StepSettings(2048, two_pass=True)
    bytes_per_token = layer_bytes(step.model.network, torch.float32)
    limit = activation_bytes(step, step.data.lists, bytes_per_token) - 1

    assert choose(step, monkeypatch, limit) == (True, 2048)


def test_cpu_recomputes_although_more_memory_is_available(step, monkeypatch):
    monkeypatch.setattr(memory, "_MAX_CPU_BYTES", 1)

    assert choose(step, monkeypatch, 8 * GIB) == (True, 512)


def test_choice_is_printed(step, monkeypatch, capsys):
    choose(step, monkeypatch, 8 * GIB)

    assert "training.recompute=false training.token_budget=2048" in capsys.readouterr().err


def test_container_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 200\n")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)

    assert available_bytes(CPU) == 2200


def test_container_without_limit_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)

    assert available_bytes(CPU) > 2**20


def test_ranks_on_one_machine_share_its_memory(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    assert available_bytes(CPU) == 1000


def test_weights_gradients_and_moments_are_held(open_encoder_of):
    encoder = open_encoder_of("bert").to(torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in encoder.parameters())

    assert held_bytes(encoder, AdamW()) == num_parameters * (2 + 2 + 8)


def test_frozen_weights_have_no_gradients_and_moments(open_encoder_of):
    encoder = open_encoder_of("bert")
    num_frozen = sum(parameter.numel() for parameter in encoder.parameters())
    add_adapter(encoder.backbone, AdapterConfig(rank=2))
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)

    assert held_bytes(encoder, AdamW()) == num_frozen * 4 + num_trained * (4 + 4 + 8)


def test_sharded_state_is_shared_by_the_ranks(open_encoder_of, monkeypatch):
    encoder = open_encoder_of("bert")
    alone = held_bytes(encoder, AdamW())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    assert held_bytes(encoder, AdamW()) == alone / 2


def new_training(step, folder, **settings):
    config = TrainingConfig(batch_size=4, precision="float32", **settings)
    return Training(new_accelerator(config, False), step, config, Run(folder, False, {}))


def test_probe_changes_no_weights(step, tmp_path):
    training = new_training(step, tmp_path)
    weights = {name: value.detach().clone() for name, value in step.named_parameters()}

    training.probe_memory(step.data.lists[:4])

    assert all(torch.equal(weights[name], value) for name, value in step.named_parameters())
    assert all(parameter.grad is None for parameter in step.parameters())


def test_probe_changes_no_random_state(step, tmp_path):
    training = new_training(step, tmp_path)
    state = torch.get_rng_state()

    training.probe_memory(step.data.lists[:4])

    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("accumulation", "has_gradients"), [(1, [False]), (2, [False, True])])
def test_probe_keeps_gradients_as_a_step_does(step, tmp_path, accumulation, has_gradients):
    seen = []
    forward = step.forward

    def spy(batch):
        seen.append(any(parameter.grad is not None for parameter in step.parameters()))
        return forward(batch)

    step.forward = spy

    new_training(step, tmp_path, accumulation=accumulation).probe_memory(step.data.lists[:4])

    assert seen == has_gradients


def test_dry_run_probes_earlier_batches_too(step, tmp_path, monkeypatch):
    config = TrainingConfig(batch_size=2, accumulation=1, precision="float32")
    training = Training(new_accelerator(config, False), step, config, Run(tmp_path, False, {}))
    probed = []
    monkeypatch.setattr(Training, "probe_memory", lambda self, *args: probed.append(args) or 1.0)

    estimates.measure_run(training)

    largest, earlier_batches = probed[0]
    assert len(earlier_batches) > 1
    assert largest in earlier_batches


def test_probe_stops_when_another_rank_does(step, tmp_path, monkeypatch):
    config = TrainingConfig(batch_size=2, accumulation=1, precision="float32")
    training = Training(new_accelerator(config, False), step, config, Run(tmp_path, False, {}))
    batches = [step.data.lists[:2], step.data.lists[2:4]]
    probed = []
    training.model.register_forward_pre_hook(lambda _, inputs: probed.append(inputs[0]))
    monkeypatch.setattr(Training, "_sum_over_ranks", lambda self, values: torch.ones(1))

    training.probe_memory(batches[1], earlier_batches=batches)

    assert probed == [batches[1]]


def test_probe_is_timed_on_an_idle_device(step, tmp_path, monkeypatch):
    config = TrainingConfig(batch_size=2, accumulation=1, precision="float32")
    training = Training(new_accelerator(config, False), step, config, Run(tmp_path, False, {}))
    batch = step.data.lists[:2]
    events = []
    training.model.register_forward_pre_hook(lambda *_: events.append("batch"))
    monkeypatch.setattr(loop, "_wait_for", lambda device: events.append("wait"))

    training.probe_memory(batch, earlier_batches=[batch])

    assert events == ["batch", "wait", "batch", "wait"]


def test_memory_is_returned_within_a_step(step, tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr(loop, "return_free_memory", devices.append)
    config = TrainingConfig(batch_size=1, accumulation=NUM_LISTS, precision="float32")

    train(new_accelerator(config, False), step, config, Run(tmp_path, False, {}))

    # The only step has a batch for each list.
    assert devices == [CPU] * math.ceil(NUM_LISTS / BATCHES_PER_TRIM)


def test_resumed_run_keeps_its_token_budget(step, tmp_path):
    config = TrainingConfig(batch_size=4, accumulation=1, precision="float32")
    accelerator = new_accelerator(config, False)
    step.settings = StepSettings(1024)
    train(accelerator, step, config, Run(tmp_path, False, {}))
    step.settings = StepSettings(512)

    train(accelerator, step, config, Run(tmp_path, True, {}))

    assert step.settings.token_budget == 1024


@pytest.mark.parametrize(("seconds", "steps"), [(0, ["step-10", "step-9"]), (3600, ["step-10"])])
def test_cpu_saves_a_checkpoint_when_a_minute_has_passed(
    step, tmp_path, monkeypatch, seconds, steps
):
    monkeypatch.setattr(loop, "_SECONDS_PER_CHECKPOINT", seconds)
    config = TrainingConfig(batch_size=8, accumulation=1, epochs=2, precision="float32")

    train(new_accelerator(config, False), step, config, Run(tmp_path, False, {}))

    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == steps
