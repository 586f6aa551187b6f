"""Readers' verdicts in an evaluation: sheets to judge, judged skills, agreement, wrong rows."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import validate
from skilltrain.evaluation.evaluate import Evaluate
from skilltrain.metrics.verdicts import read_pair_verdicts
from skilltrain.records import Skill
from skilltrain.texts import spreadsheet_cell, text_of_cell

QUERIES = [("q1", "count red apples", ""), ("q2", "paint red boats", ""), ("q3", "=fly kites", "")]
GOLD = {"q1": {"a": "required"}, "q2": {"b": "required"}, "q3": {"c": "required"}}
RANKINGS = {"q1": ["b", "a"], "q2": ["b", "c"], "q3": ["a", "c"]}
OTHER_RANKINGS = {"q1": ["c", "a"], "q2": ["a", "b"], "q3": ["c", "b"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three skills, three queries, and two files of predictions."""
    skills = [Skill(skill_id, f"name {skill_id}", "about", "body") for skill_id in "abc"]
    write_pool(tmp_path / "pool", skills)
    write_ours(tmp_path / "bench", QUERIES, GOLD)
    (tmp_path / "mine.json").write_text(json.dumps(RANKINGS))
    (tmp_path / "theirs.json").write_text(json.dumps(OTHER_RANKINGS))
    (tmp_path / "out").mkdir()
    return tmp_path


def evaluate(folder: Path, **settings: Any) -> dict[str, Any]:
    """Evaluate both predictions, and return the saved metrics."""
    files = [folder / "mine.json", folder / "theirs.json"]
    values = {"stage": "evaluate", "benchmark": folder / "bench", "predictions": files}
    values |= {"measures": ["Hit@1"], "out": folder / "out", "pool": folder / "pool"}
    validate(Evaluate, values | settings, "test").run(folder / "out")
    return json.loads((folder / "out" / "metrics.json").read_text())


def write_verdicts(folder: Path, name: str, *rows: str) -> Path:
    """Write a sheet of verdicts with the columns query_id, skill_id, verdict and reader."""
    file = folder / name
    file.write_text("\n".join(["query_id,skill_id,verdict,reader", *rows]))
    return file


def test_sheet_holds_first_skills_of_all_systems(folder: Path):
    evaluate(folder, sheet_depth=1)

    with (folder / "out" / "to_judge.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    pairs = {(row["query_id"], row["skill_id"]) for row in rows}
    assert pairs == {("q1", "b"), ("q1", "c"), ("q2", "a"), ("q2", "b"), ("q3", "a"), ("q3", "c")}
    columns = "query_id request skill_id name description body verdict"
    columns = "query_id request skill_id name description body verdict"
    assert list(rows[0]) == columns.split()
    assert {row["request"] for row in rows if row["query_id"] == "q3"} == {"'=fly kites"}


def test_sheet_needs_texts_of_skills(folder: Path):
    with raises("missing-pool"):
        evaluate(folder, sheet_depth=1, pool=None)


def test_judged_skills_count_as_gold(folder: Path):
    """Both readers accept b for q1. They disagree about a for q3, so a does not count."""
    file = write_verdicts(
        folder,
        "all.csv",
        "q1,b,serves,anna",
        "q1,b,Required,ben",
        "q3,a,serves,anna",
        "q3,a,no,ben",
    )

    metrics = evaluate(folder, verdicts=[file])

    (mine, theirs) = [system["metrics"] for system in metrics["systems"]]
    assert mine["Hit@1"]["mean"] == pytest.approx(1 / 3)
    assert mine["Hit@1 (judged)"]["mean"] == pytest.approx(2 / 3)
    assert theirs["Hit@1 (judged)"]["mean"] == theirs["Hit@1"]["mean"]
    assert "1 of 3 queries have any" in " ".join(metrics["notes"])


def test_agreement_of_readers_is_told(folder: Path):
    """Of four shared pairs three are equal; a reader without the column is the file's name."""
    rows = ["q1,b,serves,", "q1,c,no,", "q2,a,no,", "q3,a,serves,"]
    anna = write_verdicts(folder, "anna.csv", *rows)
    ben = write_verdicts(folder, "ben.csv", *rows[:3], "q3,a,no,", "q3,b,,")

    notes = " ".join(evaluate(folder, verdicts=[anna, ben])["notes"])

    # Expected by chance: 1/2 · 1/4 + 1/2 · 3/4 = 1/2, so kappa is (3/4 - 1/2) / (1 - 1/2).
    assert "Readers anna and ben: Cohen's kappa .500" in notes
    assert "3 of 4 shared verdicts are equal" in notes


@pytest.mark.parametrize("skill_id", ["=fly", "'til", "'=fly", "''-", "fly"])
def test_cells_give_back_ids(skill_id: str):
    assert text_of_cell(spreadsheet_cell(skill_id)) == skill_id


def test_id_may_begin_with_apostrophe(folder: Path):
    write_pool(folder / "pool", [Skill(key, key, "", "") for key in ("a", "b", "c", "'til")])
    file = write_verdicts(folder, "all.csv", "q1,'til,serves,anna")

    notes = " ".join(evaluate(folder, verdicts=[file])["notes"])

    assert "1 of 3 queries have any" in notes


def test_readers_may_share_no_pair(folder: Path):
    anna = write_verdicts(folder, "anna.csv", "q1,b,serves,")
    ben = write_verdicts(folder, "ben.csv", "q2,a,no,")

    notes = " ".join(evaluate(folder, verdicts=[anna, ben])["notes"])

    assert "1 of 3 queries have any" in notes
    assert "kappa" not in notes


def test_folder_is_no_sheet(folder: Path):
    with raises("special-file"):
        read_pair_verdicts([folder])


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        (["q1,b,no,anna", "q1,b,serves,anna"], "invalid-row", "row 2: calls skill 'b' serves"),
        (["q9,b,no,anna"], "unknown-skill", "verdicts of anna: the benchmark lacks query 'q9'"),
        (["q1,x,no,anna"], "unknown-skill", "or the pool skill 'x'"),
        (["q1,b,maybe,anna"], "unknown-choice", "must be 'required', 'serves' or 'no'"),
    ],
)
def test_wrong_verdict_is_refused(folder: Path, rows: list[str], code: str, words: str):
    file = write_verdicts(folder, "all.csv", *rows)

    with raises(code) as caught:
        evaluate(folder, verdicts=[file])
    assert words in str(caught.value)


def test_judged_measure_needs_verdicts(folder: Path):
    with raises("invalid-setting"):
        evaluate(folder, measures=["Hit@1 (judged)"])
