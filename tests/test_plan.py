"""The plan of a training run: counts, memory and time equal hand calculations."""

import json

import pytest
import torch

from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from skilltrain.training import estimates
from skilltrain.training.estimates import estimate_run
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_set import TrainingList, TrainingSet
from small_library import succeeds
from training_data import training_set

NAME_ONLY = SkillTemplate(description_chars=0, body_chars=0)


def skill(skill_id, num_words):
    """Make a skill whose text has this number of words, each of one token."""
    return Skill(skill_id, " ".join(["chart"] * num_words), "", "")


def lists_by_hand():
    """Make lists of two queries of 2 and 4 words, with skills of 1, 3, 10 and 10 words."""
    skills = {"a": skill("a", 1), "b": skill("b", 3), "c": skill("c", 10), "d": skill("d", 10)}
    lists = (
        TrainingList("q1", "pods text", ("a", "b", "c"), (1.0, 0.0, 0.0), frozenset("a")),
        TrainingList(
            "q2", "pods text pods data", ("c", "a", "d"), (1.0, 0.0, 0.5), frozenset("cd")
        ),
    )
    return TrainingSet(lists, skills)


def encoder_plan(encoder, data, **training):
    """Return the plan of training an encoder."""
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(64))
    return estimate_run(step, TrainingConfig(**training))


def state_bytes(plan):
    """Return the planned memory without the activations."""
    return (plan["memory_mib"] - plan["activation_mib"]) * 2**20


@pytest.fixture
def short_encoder(open_encoder_of):
    """An encoder of up to 12 tokens that reads only names."""
    return open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))


def test_encoder_plan_counts_lists(short_encoder):
    plan = encoder_plan(
        short_encoder, lists_by_hand(), batch_size=2, accumulation=1, token_budget=64, epochs=3
    )

    assert (plan["num_lists"], plan["num_queries"], plan["num_skills"]) == (2, 2, 4)
    assert (plan["num_pairs"], plan["num_positives"], plan["num_steps"]) == (6, 3, 3)
    # A text has two more tokens than words. c and d reach the limit of 12.
    assert plan["positives_cut_share"] == pytest.approx(2 / 3, abs=1e-4)
    # Queries: 4 + 6. Skills: 3 + 5 + 12 and 12 + 3 + 12.
    assert plan["list_tokens"] == 57


def test_training_time_follows_slots(short_encoder, monkeypatch):
    data = lists_by_hand()
    step = EncoderStep(short_encoder, InfoNCE(), data, StepSettings(64))
    shapes = []

    def time_layer(network, ids, dtype):
        shapes.append(ids.shape)
        return 2.0

    monkeypatch.setattr(estimates, "_layer_seconds", time_layer)

    seconds = estimates.training_seconds(step, [data.lists] * 3, torch.float32, torch.device("cpu"))

    # Skills have about 8 tokens: (3 + 5 + 12 + 12 + 3 + 12) / 6. 8 rows of 8 fill the budget.
    assert shapes == [(8, 8)]
    num_layers = short_encoder.backbone.config.num_hidden_layers
    assert seconds == pytest.approx(3 * sum(step.slots(data.lists)) / 64 * num_layers * 2)


def test_reranker_plan_counts_pairs(open_reranker_of):
    template = RerankerTemplate(form="pair", skill=NAME_ONLY)
    reranker = open_reranker_of(
        "bert_reranker", max_tokens=32, query_max_tokens=8, template=template
    )
    data = lists_by_hand()
    long = TrainingSet(data.lists, {**data.skills, "d": skill("d", 40)})
    step = RerankerStep(reranker, ListwiseCE(), long, StepSettings(64))

    plan = estimate_run(step, TrainingConfig(batch_size=1, accumulation=2, token_budget=64))

    assert plan["num_steps"] == 1
    # [CLS] query [SEP] skill [SEP]: 3 + 2 + (1, 3, 10) and 3 + 4 + (10, 1, 40).
    # The last one is cut from 47 to 32.
    assert plan["positives_cut_share"] == round(1 / 3, 4)
    assert plan["list_tokens"] == 6 + 8 + 15 + 17 + 8 + 32


def test_memory_equals_hand_calculation(open_encoder_of):
    encoder = open_encoder_of("bert").to(torch.bfloat16)
    num_weights = sum(parameter.numel() for parameter in encoder.parameters())

    plan = encoder_plan(encoder, training_set(5))

    # A weight and its gradient have 2 bytes, its two float32 moments have 8.
    assert state_bytes(plan) == pytest.approx(num_weights * (2 + 2 + 8), abs=0.11 * 2**20)


def test_adapter_needs_memory_only_for_its_weights(open_encoder_of):
    encoder = open_encoder_of("bert").to(torch.bfloat16)
    num_weights = sum(parameter.numel() for parameter in encoder.parameters())
    add_adapter(encoder.backbone, AdapterConfig(rank=2))
    num_trained = sum(p.numel() for p in encoder.parameters() if p.requires_grad)

    plan = encoder_plan(encoder, training_set(5))

    # A trained weight has 4 bytes, its gradient 4 and its moments 8.
    expected = num_weights * 2 + num_trained * (4 + 4 + 8)
    assert state_bytes(plan) == pytest.approx(expected, abs=0.11 * 2**20)
    assert 0 < plan["num_trained_parameters"] == num_trained < plan["num_parameters"]
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan


@pytest.mark.parametrize(("name", "settings"), [("encoder", ()), ("reranker", ("adapter.rank=4",))])
def test_dry_run_counts_without_weights(name, settings, runs, monkeypatch):
    devices = set()

    def record_devices(step, *arguments):
        devices.update(parameter.device.type for parameter in step.parameters())
        return estimate_run(step, *arguments)

    monkeypatch.setattr("skilltrain.training.train.estimate_run", record_devices)

    outcome = succeeds("train", runs / "recipes" / f"{name}.yaml", "--dry-run", *settings)

    assert devices == {"meta"}
    plan = json.loads(outcome.out)["dry_run"]
    assert str(plan["list_tokens"]) not in outcome.err, "the plan is printed once"
    keys = ["num_lists", "num_skills", "num_pairs", "num_positives", "num_steps"]
    if not settings:
        keys += ["num_parameters", "num_trained_parameters"]
    summary = json.loads((runs / name / "run.json").read_text())["summary"]
    assert {key: plan[key] for key in keys} == {key: summary[key] for key in keys}


@pytest.mark.parametrize(("name", "recompute"), [("bert", False), ("qwen3", True)])
def test_timing_a_layer_changes_no_network(open_encoder_of, name, recompute):
    network = open_encoder_of(name).backbone.to("meta")
    add_adapter(network, AdapterConfig(rank=2))
    if recompute:
        checkpoint_layers(network)
    names = [name for name, _ in network.named_parameters()]
    ids = torch.zeros(2, 8, dtype=torch.long)

    seconds = estimates._layer_seconds(network, ids, torch.bfloat16)

    assert 0 < seconds < 60
    assert [name for name, value in network.named_parameters() if value.is_meta] == names


@pytest.fixture
def single_plan(open_encoder_of, monkeypatch):
    """The plan of one rank, with a layer of one hour."""
    monkeypatch.setattr(estimates, "_layer_seconds", lambda *_: 3600.0)
    return encoder_plan(open_encoder_of("bert"), training_set(5))


def test_ranks_share_activations(open_encoder_of, single_plan, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    plan = encoder_plan(open_encoder_of("bert"), training_set(5))

    assert (single_plan["num_ranks"], plan["num_ranks"]) == (1, 2)
    assert plan["hours"] == pytest.approx(single_plan["hours"] / 2, rel=0.05)
    assert plan["activation_mib"] == pytest.approx(single_plan["activation_mib"] / 2, abs=0.11)
    assert state_bytes(plan) == pytest.approx(state_bytes(single_plan), abs=0.11 * 2**20)


def test_fsdp_shares_all_memory(open_encoder_of, single_plan, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    plan = encoder_plan(open_encoder_of("bert"), training_set(5))

    assert plan["memory_mib"] == pytest.approx(single_plan["memory_mib"] / 2, abs=0.11)
