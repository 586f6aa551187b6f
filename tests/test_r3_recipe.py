"""The recipe that evaluates R3's released models: texts, limits, and a run with tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import write
from skilltrain.config import load_recipe
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.stage import parse_recipe
from small_library import skilltrain, succeeds

RECIPE = Path(__file__).parents[1] / "recipes" / "paper" / "r3_skill.yaml"
# Texts in infer.py of R3's repository
ENCODER_PROMPT = "Instruct: Given a user request, retrieve the agent skill that solves it.\nQuery: "
RERANKER_PROMPT = "Given a user request, retrieve the agent skill that solves it."
TEXTS = {
    "skill-0": "music-composer | Compose music | Theme writing | MIDI and mixing",
    "skill-1": "json-toolkit | Query JSON |  with spaces around ",
    "skill-2": "sql-builder | Write SQL | Window functions",
}


@pytest.fixture
def r3_skill(tmp_path: Path) -> Path:
    """A benchmark in R3-Skill's form."""
    queries = [
        {"query": "write a theme for a film", "skill_ids": ["skill-0"], "lang": "en2en"},
        {"query": "read json into sql", "skill_ids": ["skill-1", "skill-2"], "lang": "en2en"},
    ]
    skills = [{"id": skill_id, "text": text} for skill_id, text in TEXTS.items()]
    return write(tmp_path / "data", {"test.jsonl": queries, "skills_test.jsonl": skills})


def rankers_of_recipe() -> list[Any]:
    """Return the settings of the encoder and of the reranker."""
    config: Any = parse_recipe(load_recipe(RECIPE), RECIPE)
    return config.systems[1].rankers


def test_encoder_sees_texts_of_infer_py(r3_skill: Path):
    encoder, _ = rankers_of_recipe()

    query = encoder.template.render_query("do it")
    texts = {
        skill.skill_id: encoder.template.render_skill(skill)
        for skill in load_benchmark(r3_skill).pool
    }

    assert query == f"{ENCODER_PROMPT}do it"
    assert texts == TEXTS
    assert (encoder.max_tokens, encoder.query_max_tokens) == (4096, 4096)


def test_reranker_sees_texts_of_infer_py(r3_skill: Path):
    _, reranker = rankers_of_recipe()

    texts = {
        skill.skill_id: reranker.template.render_skill(skill)
        for skill in load_benchmark(r3_skill).pool
    }

    assert reranker.template.query_prompt() == f"<Instruct>: {RERANKER_PROMPT}\n<Query>: "
    assert texts == TEXTS
    assert (reranker.max_tokens, reranker.keep, reranker.first_weight) == (4096, 20, 0)


@pytest.fixture
def overrides(r3_skill: Path, model_folders, tmp_path: Path) -> list[str]:
    """Settings that replace the benchmark and the released models by small ones."""
    overrides = [f"benchmark=[{r3_skill}]", f"out={tmp_path}/report"]
    for place in ("0.rankers.0", "1.rankers.0"):
        source = model_folders["qwen3"]
        overrides += [f"systems.{place}.source={source}", f"systems.{place}.cache=null"]
    overrides += [f"systems.1.rankers.1.source={model_folders['qwen3_reranker']}"]
    for place in ("0.rankers.0", "1.rankers.0", "1.rankers.1"):
        overrides += [f"systems.{place}.max_tokens=512", f"systems.{place}.query_max_tokens=128"]
    return overrides


def test_recipe_runs_with_other_weights(overrides: list[str], tmp_path: Path):
    succeeds("evaluate", RECIPE, *overrides)

    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    names = [system["name"] for system in metrics["systems"]]
    assert names == ["R3-Embedding", "R3-Embedding + R3-Reranker"]
    assert metrics["systems"][1]["metrics"]["Set-Compat"]["n"] == 1


def test_dry_run_counts_queries(overrides: list[str], tmp_path: Path):
    outcome = succeeds("evaluate", RECIPE, *overrides, "--dry-run")

    assert json.loads(outcome.out)["dry_run"]["num_queries"] == 2
    assert not (tmp_path / "report").exists()


def test_missing_benchmark_is_named():
    line = skilltrain("evaluate", RECIPE, "--dry-run").error_line

    assert "R3-Skill/data: no such file or folder" in line
