"""Optimisers and schedules: their values, resumed runs, and choice by name or import path."""

import importlib.util
import signal
from typing import Literal

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import training_runs
from faults import raises
from skilltrain.training import engine
from skilltrain.training.loop import (
    Run,
    Training,
    learning_rate_factor,
    new_optimizer,
    rate_scales,
    train,
)
from skilltrain.training.memory import held_bytes
from skilltrain.training.optimizers import Adafactor, AdamW, AdamW8bit, OptimizerConfig
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.train import TrainEncoder, load_model
from test_engine import Launched
from training_runs import CONFIG, new_step

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Momentum(OptimizerConfig):
    """Gradient descent with momentum."""

    bytes_per_weight = 4
    name: Literal["momentum"] = "momentum"

    def create(self, groups, learning_rate):
        return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"name": "cosine"}, [0.5, 1, 0.853553, 0.5, 0.146447]),
        ({"name": "linear"}, [0.5, 1, 0.75, 0.5, 0.25]),
        ({"name": "constant"}, [0.5, 1, 1, 1, 1]),
        ({"name": "warmup_stable_decay", "decay_share": 0.5}, [0.5, 1, 1, 1, 0.5]),
    ],
)
def test_rate_follows_schedule(scheduler, expected):
    """One of five steps warms up."""
    config = TrainingConfig.model_validate({"warmup_share": 0.2, "scheduler": scheduler})

    factors = [learning_rate_factor(step, 5, config) for step in range(5)]

    assert factors == pytest.approx(expected, abs=1e-6)


def test_adamw_takes_betas_and_eps():
    config = TrainingConfig(optimizer=AdamW(betas=(0.8, 0.95), eps=1e-6))

    optimizer = new_optimizer(torch.nn.Linear(2, 3), config)

    assert optimizer.defaults["betas"] == (0.8, 0.95)
    assert optimizer.defaults["eps"] == 1e-6


def test_optimizer_is_found_by_import_path():
    path = f"{__name__}:Momentum"

    config = TrainingConfig.model_validate({"optimizer": {"name": path}})

    assert isinstance(new_optimizer(torch.nn.Linear(2, 3), config), torch.optim.SGD)
    assert config.model_dump(mode="json")["optimizer"] == {"name": path}


@pytest.mark.parametrize(("optimizer", "num_bytes"), [(AdamW8bit(), 10), (Adafactor(), 8)])
def test_small_state_needs_less_memory(optimizer, num_bytes):
    model = torch.nn.Linear(2, 3)

    assert held_bytes(model, optimizer) == (6 + 3) * num_bytes


def test_missing_bitsandbytes_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with raises("missing-package"):
        AdamW8bit().create([], 1e-3)


def test_sharded_run_needs_adamw():
    launched = Launched(DistributedType.FSDP)
    config = TrainingConfig(optimizer=Adafactor())

    with raises("unsupported-launcher"):
        engine._refuse_unsupported(launched, config, quantized=False)


@pytest.mark.parametrize("optimizer", [Adafactor(), AdamW8bit(), Momentum()])
def test_stopped_run_resumes_bit_identically(model_folders, tmp_path, optimizer):
    if optimizer.name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")

    assert_resumes(optimizer, model_folders["bert_dropout"], tmp_path)


def assert_resumes(optimizer, folder, out):
    """Check that a run with this optimiser changes weights, and resumes to the same bits."""
    config = CONFIG.model_copy(update={"optimizer": optimizer, "layer_decay": 0.9})

    def run(step, name, resume):
        AcceleratorState._reset_state(reset_partial_state=True)
        train(training_runs.accelerator(), step, config, Run(out / name, resume, {}))
        return {name: value.detach().clone() for name, value in step.named_parameters()}

    whole = run(new_step(folder), "whole", resume=False)
    with raises("interrupted"):
        run(training_runs.signal_in(new_step(folder), 5, signal.SIGINT), "cut", resume=False)
    resumed = run(new_step(folder), "cut", resume=True)

    first = dict(new_step(folder).named_parameters())
    assert any(not torch.equal(first[name], value) for name, value in whole.items())
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_projection_is_above_all_layers():
    projection = torch.nn.Sequential(torch.nn.Linear(2, 2))
    backbone = torch.nn.ModuleDict({"layer": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    encoder = torch.nn.ModuleDict({"backbone": backbone, "projection": projection})

    scales = rate_scales(torch.nn.ModuleDict({"model": encoder}), layer_decay=0.5)

    assert scales["model.projection.0.weight"] == 1
    assert scales["model.backbone.layer.0.weight"] == 0.5


def test_layers_below_learn_more_slowly(model_folders, tmp_path):
    config = CONFIG.model_copy(update={"layer_decay": 0.9, "warmup_share": 0})
    step = new_step(model_folders["bert"])
    names = {id(parameter): name for name, parameter in step.named_parameters()}

    training = Training(training_runs.accelerator(), step, config, Run(tmp_path, False, {}))
    training._set_learning_rate(num_steps=4)

    rates = {}
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)].removeprefix("model.backbone.")] = group["lr"]
    top = rates["encoder.layer.1.output.dense.bias"]
    below = rates["encoder.layer.0.output.dense.bias"]
    bottom = rates["embeddings.word_embeddings.weight"]
    assert [top, below, bottom] == pytest.approx([1e-3, 0.9e-3, 0.81e-3])


def test_frozen_embeddings_do_not_train(model_folders):
    recipe = {
        "stage": "train_encoder",
        "model": {"source": str(model_folders["bert"])},
        "data": {"pool": "p", "lists": "l"},
        "training": {"freeze_embeddings": True},
        "out": "o",
    }

    model = load_model(TrainEncoder.model_validate(recipe), torch.device("cpu"))

    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert frozen == ["backbone.embeddings.word_embeddings.weight"]
