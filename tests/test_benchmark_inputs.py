"""benchmarks/check_inputs.py: a folder is compared with the list of the benchmarks' inputs."""

import importlib.util
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from skilltrain.config import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The program, with a list of three inputs of tmp_path."""
    spec = importlib.util.spec_from_file_location("check_inputs", BENCHMARKS / "check_inputs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "b.parquet")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "file.txt").write_text("text")
    files = {name: module.describe(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c")}
    monkeypatch.setattr(module, "INPUTS", tmp_path / "inputs.yaml")
    module.INPUTS.write_text(yaml.safe_dump({"inputs": {"group": {"files": files}}}))
    return module


def test_same_inputs_are_equal(script, tmp_path, capsys):
    code = script.main(tmp_path)

    assert code == 0
    assert capsys.readouterr().out == "a.jsonl: equal\nb.parquet: equal\nc: equal\n"
    files = yaml.safe_load(script.INPUTS.read_text())["inputs"]["group"]["files"]
    assert files["a.jsonl"]["rows"] == 2
    assert files["b.parquet"]["rows"] == 3
    assert files["c"]["files"] == 1


def test_changed_inputs_are_told(script, tmp_path, capsys):
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "c" / "file.txt").rename(tmp_path / "c" / "other.txt")

    code = script.main(tmp_path)

    assert code == 1
    assert capsys.readouterr().out == "a.jsonl: missing\nb.parquet: equal\nc: differs\n"


def test_every_input_has_hash_and_source():
    inputs = yaml.safe_load((BENCHMARKS / "inputs.yaml").read_text(encoding="utf-8"))["inputs"]

    for group in inputs.values():
        assert group["source"]
        assert group["again"]
        for entry in group["files"].values():
            assert re.fullmatch("[0-9a-f]{64}", entry["sha256"])


def test_every_gpu_evaluation_has_planned_hours():
    results = (BENCHMARKS / "results" / "planned_evaluations.md").read_text(encoding="utf-8")
    # GTE, NV-Embed and the other models of table_4_served run in servers.
    gpu_evaluations = [
        path.relative_to(RECIPES).with_suffix("").as_posix()
        for path in [RECIPES / "skillflow.yaml", *sorted((RECIPES / "paper").glob("*.yaml"))]
        if load_recipe(path)["stage"] == "evaluate" and path.stem != "table_4_served"
    ]

    planned = re.findall(r"^\| `(.+?)` \|", results, re.MULTILINE)

    assert sorted(planned) == sorted(gpu_evaluations)
