"""The parts of benchmarks/r3_ablation.sh: the split of judged groups, and the gradients."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmark_folders import jsonl, write_pool
from skilltrain.records import Skill
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_table, write_table
from small_library import succeeds

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def group(number: int) -> dict:
    """Return a judged group with one required skill, as an LLM leaves it after a refusal."""
    ids = [f"s{3 * number + position}" for position in range(3)]
    rejected = [{"skill_id": ids[1], "reason": "low_quality", "why": "poor"}]
    names = {"group_id": f"g{number}", "query": f"do task {number}"}
    return names | {"required": ids[:1], "rejected": rejected, "irrelevant": ids[2:]}


def test_split_without_rejections_keeps_single_skills(tmp_path: Path, monkeypatch):
    spec = importlib.util.spec_from_file_location("r3_split", BENCHMARKS / "r3_split.py")
    assert spec is not None and spec.loader is not None
    r3_split = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(r3_split)
    monkeypatch.setattr(r3_split, "NUM_OTHERS", 0)
    data = tmp_path / "data"
    write_pool(data / "pool", [Skill(f"s{n}", f"name {n}", "d", f"body {n}") for n in range(30)])
    (data / "r3").mkdir()
    (data / "r3" / "judgements.jsonl").write_text(jsonl(*map(group, range(10))))

    r3_split.main(data, tmp_path / "split")
    succeeds("pool", f"sources={tmp_path}/split/pool", f"out={tmp_path}/pool")
    for name, file in (("with", "train.jsonl"), ("without", "without/train.jsonl")):
        files = f"files={tmp_path}/split/{file}"
        succeeds("queries", files, f"pool={tmp_path}/pool", f"out={tmp_path}/{name}")

    query_ids = [read_table(tmp_path / name, QUERIES)["query_id"] for name in ("with", "without")]
    assert len(query_ids[0]) == 7
    assert query_ids[0] == query_ids[1]
    verdicts = read_table(tmp_path / "without", JUDGEMENTS)["verdict"].to_pylist()
    assert verdicts == ["required"] * 7


@pytest.mark.parametrize(("side", "model"), [("encoder", "bert"), ("reranker", "bert_reranker")])
def test_gradients_of_benchmark_are_shown(
    side: str, model: str, runs: Path, model_folders, tmp_path: Path
):
    rows = read_table(runs / f"{side}_lists", LISTS).to_pylist()
    for row in rows:
        verdicts = row["verdicts"]
        row["verdicts"] = ["rejected" if each == "irrelevant" else each for each in verdicts]
    write_table(rows, LISTS, tmp_path / "lists")
    for spec in (QUERIES, JUDGEMENTS):
        write_table(read_table(runs / f"{side}_lists", spec), spec, tmp_path / "lists")
    data = (f"data.pool={runs}/pool", f"data.lists={tmp_path}/lists", f"out={tmp_path}/out")
    recipe = BENCHMARKS / "r3" / f"gradients_{side}.yaml"

    source = f"model.source={model_folders[model]}"
    outcome = succeeds("r3", "gradients", recipe, source, *data, "--batches", "1")

    assert "of the rejections' gradient survive 1.00 at the scores" in outcome.out
    parts = json.loads((tmp_path / "out" / "gradients.json").read_text())["parts"]
    assert "rejected" in {part["part"] for part in parts}
