"""The dry run of a training run: counts worked by hand, memory and time measured."""

import json

import pytest
import torch

from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from skilltrain.training import estimates
from skilltrain.training.estimates import count_work
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_set import TrainingList, TrainingSet
from small_library import succeeds

NAME_ONLY = SkillTemplate(description_chars=0, body_chars=0)


def skill(skill_id, num_words):
    """Return a skill whose text is so many words, each of which is one token."""
    return Skill(skill_id, " ".join(["chart"] * num_words), "", "")


def lists_by_hand():
    """Return two lists with queries of 2 and 4 words.

    The skills have 1, 3, 10 and 10 words. Skill `a` is in both lists.
    """
    skills = {"a": skill("a", 1), "b": skill("b", 3), "c": skill("c", 10), "d": skill("d", 10)}
    lists = (
        TrainingList("q1", "pods text", ("a", "b", "c"), (1.0, 0.0, 0.0), frozenset("a")),
        TrainingList(
            "q2", "pods text pods data", ("c", "a", "d"), (1.0, 0.0, 0.5), frozenset("cd")
        ),
    )
    return TrainingSet(lists, skills)


@pytest.fixture
def encoder_counts(open_encoder_of):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    step = EncoderStep(encoder, InfoNCE(), lists_by_hand(), StepSettings(64))
    return count_work(step, TrainingConfig(batch_size=2, accumulation=1, epochs=3))


def test_lists_and_steps_are_counted(encoder_counts):
    names = ("lists", "queries", "skills", "pairs", "positives", "steps")

    counts = [encoder_counts[f"num_{name}"] for name in names]

    assert counts == [2, 2, 4, 6, 3, 3]


def test_tokens_of_an_encoder_are_counted(encoder_counts):
    # A text has two tokens more than words. The limit of 12 tokens cuts c and d.
    query_tokens = 4 + 6
    skill_tokens = (3 + 5 + 12) + (12 + 3 + 12)

    assert encoder_counts["list_tokens"] == query_tokens + skill_tokens
    assert encoder_counts["positives_cut_share"] == pytest.approx(2 / 3, abs=1e-4)


def test_tokens_of_a_reranker_are_counted(open_reranker_of):
    template = RerankerTemplate(form="pair", skill=NAME_ONLY)
    reranker = open_reranker_of(
        "bert_reranker", max_tokens=32, query_max_tokens=8, template=template
    )
    data = lists_by_hand()
    long = TrainingSet(data.lists, {**data.skills, "d": skill("d", 40)})
    step = RerankerStep(reranker, ListwiseCE(), long, StepSettings(64))

    counts = count_work(step, TrainingConfig(batch_size=1, accumulation=2))

    # A pair is [CLS] query [SEP] skill [SEP]. The limit of 32 tokens cuts the last of 47.
    assert counts["list_tokens"] == (6 + 8 + 15) + (17 + 8 + 32)
    assert counts["positives_cut_share"] == round(1 / 3, 4)
    assert counts["num_steps"] == 1


def dry_run(recipe, *settings):
    outcome = succeeds("train", recipe, "--dry-run", *settings)
    return json.loads(outcome.out)["dry_run"]


@pytest.mark.parametrize("name", ["encoder", "reranker"])
def test_dry_run_counts_as_the_run_does(name, runs):
    summary = json.loads((runs / name / "run.json").read_text())["summary"]

    counts = dry_run(runs / "recipes" / f"{name}.yaml")

    same = ["num_lists", "num_skills", "num_pairs", "num_positives", "num_steps"]
    same += ["num_parameters", "num_trained_parameters"]
    assert {key: counts[key] for key in same} == {key: summary[key] for key in same}


def test_dry_run_measures_memory_and_time(runs, tmp_path):
    out = tmp_path / "run"

    counts = dry_run(runs / "recipes" / "encoder.yaml", f"out={out}")

    assert counts["memory_mib"] > 100  # Python and torch alone take more
    assert 0 < counts["hours"] < 1
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the heap of a CPU")
def test_dry_run_allows_for_growth_of_the_heap(runs, monkeypatch):
    monkeypatch.setattr(estimates, "peak_bytes", lambda device: 100 * 2**20)

    counts = dry_run(runs / "recipes" / "encoder.yaml")

    assert counts["memory_mib"] == 110


def test_dry_run_of_a_large_model_on_a_cpu_loads_no_weights(runs, monkeypatch):
    devices = set()

    def spy(step, config):
        devices.update(parameter.device.type for parameter in step.parameters())
        return count_work(step, config)

    monkeypatch.setattr("skilltrain.training.train.count_work", spy)
    monkeypatch.setattr("skilltrain.training.train._MAX_PARAMETERS_ON_CPU", 10)

    counts = dry_run(runs / "recipes" / "encoder.yaml")

    assert devices == {"meta"}
    assert "memory_mib" not in counts
