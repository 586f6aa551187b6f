"""The plan: counts and memory worked by hand."""

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
    """A skill whose text is so many words that are one token each."""
    return Skill(skill_id, " ".join(["chart"] * num_words), "", "")


def lists_by_hand():
    """Two queries of 2 and 4 words; skills of 1, 3, 10 and 10 words, of which a stands in both lists."""
    skills = {"a": skill("a", 1), "b": skill("b", 3), "c": skill("c", 10), "d": skill("d", 10)}
    lists = (
        TrainingList("q1", "pods text", ("a", "b", "c"), (1.0, 0.0, 0.0), frozenset("a")),
        TrainingList(
            "q2", "pods text pods data", ("c", "a", "d"), (1.0, 0.0, 0.5), frozenset("cd")
        ),
    )
    return TrainingSet(lists, skills)


def encoder_plan(encoder, data, **training):
    """The plan of training `encoder`."""
    return estimate_run(
        EncoderStep(encoder, InfoNCE(), data, StepSettings(64)), TrainingConfig(**training)
    )


def test_encoder_by_hand(open_encoder_of, monkeypatch):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    plan = encoder_plan(
        encoder, lists_by_hand(), batch_size=2, accumulation=1, token_budget=64, epochs=3
    )
    counts = [
        plan[f"num_{name}"]
        for name in ("lists", "queries", "skills", "pairs", "positives", "steps")
    ]
    assert counts == [2, 2, 4, 6, 3, 3]
    # Every text is two tokens longer than its words; c and d reach the limit of 12.
    assert plan["positives_cut_share"] == pytest.approx(2 / 3, abs=1e-4)
    # Queries 4 + 6, skills 3 + 5 + 12 and 12 + 3 + 12.
    assert plan["list_tokens"] == 57
    timed, data = [], lists_by_hand()
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(64))
    monkeypatch.setattr(
        estimates, "_layer_seconds", lambda network, ids, dtype: timed.append(ids.shape) or 2.0
    )
    seconds = estimates.training_seconds(step, [data.lists] * 3, torch.float32, torch.device("cpu"))
    # Texts of (3 + 5 + 12 + 12 + 3 + 12) / 6, about 8, tokens fill 64 in 8 rows. The batch pads six texts of 3, 4, 5,
    # 6, 12 and 12 tokens to one micro-batch: 72 exceed 64, so that the longest two stand apart or pad less.
    assert timed == [(8, 8)]
    num_layers = encoder.backbone.config.num_hidden_layers
    assert seconds == pytest.approx(3 * sum(step.slots(data.lists)) / 64 * num_layers * 2)


def test_reranker_pair_by_hand(open_reranker_of):
    template = RerankerTemplate(form="pair", skill=NAME_ONLY)
    reranker = open_reranker_of(
        "bert_reranker", max_tokens=32, query_max_tokens=8, template=template
    )
    data = lists_by_hand()
    long = TrainingSet(data.lists, {**data.skills, "d": skill("d", 40)})
    settings = TrainingConfig(batch_size=1, accumulation=2, token_budget=64)
    plan = estimate_run(RerankerStep(reranker, ListwiseCE(), long, StepSettings(64)), settings)
    assert plan["num_steps"] == 1
    # [CLS] query [SEP] skill [SEP]: 3 + 2 + (1, 3, 10), 3 + 4 + (10, 1, 40), the last cut from 47 to 32.
    assert plan["positives_cut_share"] == round(1 / 3, 4)
    assert plan["list_tokens"] == 6 + 8 + 15 + 17 + 8 + 32


def test_memory_by_hand(open_encoder_of):
    encoder, data = open_encoder_of("bert").to(torch.bfloat16), training_set(5)
    count = sum(parameter.numel() for parameter in encoder.parameters())
    # Two bytes a weight, two its gradient, two float32 moments.
    plan = encoder_plan(encoder, data)
    assert plan["memory_mib"] - plan["activation_mib"] == pytest.approx(
        count * (2 + 2 + 8) / 2**20, abs=0.11
    )
    add_adapter(encoder.backbone, AdapterConfig(rank=2))
    trained = sum(
        parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad
    )
    plan, weights = encoder_plan(encoder, data), count * 2 + trained * (4 + 4 + 8)
    assert plan["memory_mib"] - plan["activation_mib"] == pytest.approx(weights / 2**20, abs=0.11)
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    assert 0 < plan["num_trained_parameters"] == trained < plan["num_parameters"]


@pytest.mark.parametrize(("name", "settings"), [("encoder", ()), ("reranker", ("adapter.rank=4",))])
def test_a_dry_run_loads_no_weights_and_prints_once_what_the_training_counts(
    name, settings, runs, monkeypatch
):
    def planned(step, *others):
        devices.update(parameter.device.type for parameter in step.parameters())
        return estimate_run(step, *others)

    devices = set()
    monkeypatch.setattr("skilltrain.training.train.estimate_run", planned)
    outcome = succeeds("train", runs / "recipes" / f"{name}.yaml", "--dry-run", *settings)
    plan, summary = (
        json.loads(outcome.out)["dry_run"],
        json.loads((runs / name / "run.json").read_text())["summary"],
    )
    assert devices == {"meta"} and str(plan["list_tokens"]) not in outcome.err
    same = {"num_lists", "num_skills", "num_pairs", "num_positives", "num_steps"}
    same |= set() if settings else {"num_parameters", "num_trained_parameters"}
    assert {key: plan[key] for key in same} == {key: summary[key] for key in same}


@pytest.mark.parametrize(("name", "recompute"), [("bert", False), ("qwen3", True)])
def test_a_layer_is_timed_and_the_network_stays_as_it_was(open_encoder_of, name, recompute):
    network = open_encoder_of(name).backbone.to("meta")
    add_adapter(network, AdapterConfig(rank=2))
    if recompute:
        checkpoint_layers(network)
    names = [key for key, _ in network.named_parameters()]
    taken = estimates._layer_seconds(network, torch.zeros(2, 8, dtype=torch.long), torch.bfloat16)
    assert 0 < taken < 60
    assert [key for key, value in network.named_parameters() if value.is_meta] == names


def test_ranks_share_time_and_activations_and_with_fsdp_the_rest(open_encoder_of, monkeypatch):
    encoder, data = open_encoder_of("bert"), training_set(5)
    monkeypatch.setattr(estimates, "_layer_seconds", lambda *_: 3600.0)
    alone = encoder_plan(encoder, data)
    monkeypatch.setenv("WORLD_SIZE", "2")
    together = encoder_plan(encoder, data)
    assert (alone["num_ranks"], together["num_ranks"]) == (1, 2)
    assert together["hours"] == pytest.approx(alone["hours"] / 2, rel=0.05)
    assert together["activation_mib"] == pytest.approx(alone["activation_mib"] / 2, abs=0.11)
    held = alone["memory_mib"] - alone["activation_mib"]
    assert together["memory_mib"] - together["activation_mib"] == pytest.approx(held, abs=0.11)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    shared = encoder_plan(encoder, data)
    assert shared["memory_mib"] == pytest.approx(alone["memory_mib"] / 2, abs=0.11)
