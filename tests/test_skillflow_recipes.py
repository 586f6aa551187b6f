"""SkillFlow's recipes run with tiny models and a chat server, in all their rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import write_ours, write_pool
from llm_server import LLMServer, Reply, chat
from skilltrain.config import load_recipe
from skilltrain.records import Skill
from skilltrain.stage import parse_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
SYSTEMS = {
    "skillflow": 10,
    "paper/skillflow_figure_3": 4,
    "paper/skillflow_interleaved": 3,
    "paper/skillflow_table_8": 6,
    "paper/skillflow_table_9": 9,
    "paper/skillflow_table_10": 8,
    "paper/skillflow_table_11": 28,
}
SKILLS = [Skill(f"s{n}", f"skill-{n}", f"does thing{n}", f"Do thing{n} well.") for n in range(12)]
TASKS = {"t1": "thing1", "t2": "thing2"}


def answer(request: dict[str, Any]) -> Reply:
    """Answer as a model that follows each of the prompts."""
    text = request["messages"][-1]["content"]
    several = re.search(r"JSON list of (\d+) strings", text)
    if several:
        return Reply(json.dumps([f"thing{n}" for n in range(1, int(several[1]) + 1)]))
    if '"search"' in request["messages"][0]["content"]:
        return Reply('{"search": "thing1"}')
    if "JSON list of numbers" in text:
        return Reply("[1, 2]")
    return Reply("INJECT" if "INJECT" in text else "thing1")


def tiny(value: Any, models: dict[str, str], llm: dict[str, Any]) -> Any:
    """Return settings with tiny models by kind of ranker, and our chat server."""
    if isinstance(value, list):
        return [tiny(item, models, llm) for item in value]
    if not isinstance(value, dict):
        return value
    values = {key: tiny(item, models, llm) for key, item in value.items()}
    if "source" in values:
        values |= {"source": models[values["kind"]], "max_tokens": 64, "precision": "float32"}
    if "llm" in values:
        values["llm"] = llm
    return {key: item for key, item in values.items() if key != "cache"}


@pytest.fixture
def results(request, server: LLMServer, model_folders, tmp_path) -> dict[str, Any]:
    """The summary of one recipe's run."""
    server.otherwise = answer
    models = {
        "dense": str(model_folders["bert"]),
        "rerank": str(model_folders["bert_reranker"]),
    }
    verdicts = {task: {f"s{task[1]}": "required"} for task in TASKS}
    queries = [(query_id, text, "test") for query_id, text in TASKS.items()]
    recipe = load_recipe(RECIPES / f"{request.param}.yaml")
    changed = tiny(recipe, models, chat(server, tmp_path / "answers"))
    changed["pool"] = str(write_pool(tmp_path / "pool", SKILLS))
    changed["benchmark"] = str(write_ours(tmp_path / "bench", queries, verdicts))
    changed["analysis"] = {"num_timed": 1}
    stage = parse_recipe(changed, "test")
    (tmp_path / "out").mkdir()
    return {"name": request.param, **stage.run(tmp_path / "out")}


@pytest.mark.parametrize("results", SYSTEMS, indirect=True)
def test_recipe_runs_all_rows(results):
    systems = results["systems"]

    assert len(systems) == SYSTEMS[results["name"]]
    assert all(counts["num_unusable"] == 0 for counts in results["asked"].values())


@pytest.mark.parametrize("name", SYSTEMS)
def test_rows_have_the_papers_chat_model(name):
    text = (RECIPES / f"{name}.yaml").read_text()

    models = re.findall(r"llm: &llm \{kind: openai, (.*?)\}", text)

    assert models == ["model: gpt-4o-mini, temperature: 0, max_tokens: 200"]
