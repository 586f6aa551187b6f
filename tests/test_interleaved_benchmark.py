"""benchmarks/interleaved.py: rankings are cut to an equal number of skills for each task."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from skilltrain.retrieval.rankings import rankings_table
from skilltrain.tables import RANKINGS, write_table

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "skillweaver_llm", raising=False)
    spec = importlib.util.spec_from_file_location("interleaved", FOLDER / "interleaved.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rankings_are_cut_to_number_of_rounds(script, tmp_path: Path):
    # The model needs no skill for the second task.
    skill_ids = {
        script.BEFORE: {"t1": "abcd", "t2": "a"},
        script.QUERIES: {"t1": "efgh", "t2": "e"},
        script.IN_ROUNDS: {"t1": "ij", "t2": ""},
    }
    rankings = {}
    for system, ids_by_task in skill_ids.items():
        rankings[system] = {task: [(i, 1.0) for i in ids] for task, ids in ids_by_task.items()}
    write_table(rankings_table(rankings), RANKINGS, tmp_path)

    files = script.write_equal_rankings(tmp_path, tmp_path / "equal")

    assert [json.loads(Path(file).read_text()) for file in files] == [
        {"t1": ["a", "b"], "t2": []},
        {"t1": ["e", "f"], "t2": []},
        {"t1": ["i", "j"], "t2": []},
    ]
