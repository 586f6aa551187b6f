"""Sheets for experts, and the agreement of experts and of the chat model."""

import csv
import json
from pathlib import Path

import pytest

from benchmark_folders import write_ours, write_pool
from skilltrain.records import Skill
from small_library import skilltrain, succeeds

VERDICTS = {
    "q1": {"a": "required", "b": "rejected"},
    "q2": {"b": "required", "c": "irrelevant"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two judged queries, the pool and a sheet of both queries."""
    skills = [Skill(skill_id, f"=tool {skill_id}", "does it", "body") for skill_id in "abc"]
    write_pool(tmp_path / "pool", skills)
    write_ours(tmp_path / "judged", [("q1", "make it", "dev"), ("q2", "@do", "dev")], VERDICTS)
    pool = ("--pool", tmp_path / "pool")
    succeeds("r3", "sheet", tmp_path / "judged", *pool, "--out", tmp_path / "empty.csv")
    return tmp_path


def rows_of(sheet: Path) -> list[dict[str, str]]:
    """Return the rows of a sheet."""
    with sheet.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def fill(folder: Path, name: str, verdicts: dict[tuple[str, str], str]) -> Path:
    """Write a copy of the sheet with the verdicts of an expert, and return its file."""
    rows = rows_of(folder / "empty.csv")
    for row in rows:
        row["verdict"] = verdicts.get((row["query_id"], row["skill_id"]), "")
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


ANNA = {
    ("q1", "a"): "Required ",
    ("q1", "b"): "rejected",
    ("q2", "b"): "required",
    ("q2", "c"): "rejected",
}


def test_sheet_shows_no_verdict(folder: Path):
    rows = rows_of(folder / "empty.csv")

    pairs = {(row["query_id"], row["skill_id"]) for row in rows}
    assert pairs == set(ANNA)
    assert {row["verdict"] for row in rows} == {""}


def test_sheet_holds_no_formula(folder: Path):
    rows = rows_of(folder / "empty.csv")

    assert {row["name"][:6] for row in rows} == {"'=tool"}
    assert {row["request"] for row in rows} == {"make it", "'@do"}


def test_sheet_can_be_sampled(folder: Path):
    pool = ("--pool", folder / "pool", "--queries", 1)

    outcome = succeeds("r3", "sheet", folder / "judged", *pool, "--out", folder / "small.csv")

    assert "2 skills to judge" in outcome.out
    assert len(rows_of(folder / "small.csv")) == 2


def test_pool_without_judged_skill_is_refused(folder: Path):
    write_pool(folder / "small", [Skill("a", "name", "d", "body")])

    line = skilltrain(
        "r3", "sheet", folder / "judged", "--pool", folder / "small", "--out", folder / "b.csv"
    ).error_line

    assert "small: lacks skill '" in line


def test_agreement_compares_each_two_judges(folder: Path):
    anna = fill(folder, "anna.csv", ANNA)
    ben = fill(folder, "ben.csv", {("q1", "a"): "required", ("q2", "c"): "irrelevant"})

    out = succeeds("r3", "agreement", anna, ben, "--judged", folder / "judged", "--json").out

    by_judges = {(row["first"], row["second"]): row for row in json.loads(out)["agreement"]}
    with_anna = by_judges["chat model", str(anna)]
    # Anna has 2 required and 2 rejected, the model 2, 1 and 1: (3/4 - 3/8) / (1 - 3/8).
    assert with_anna["kappa"]["mean"] == pytest.approx(0.6)
    assert (with_anna["num_equal"], with_anna["kappa"]["n"]) == (3, 4)
    both = by_judges[str(anna), str(ben)]
    assert (both["num_equal"], both["kappa"]["n"]) == (1, 2)
    assert by_judges["chat model", str(ben)]["kappa"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "rejected",
            "refused",
            "verdict: must be 'required', 'useful', 'irrelevant' or 'rejected', found",
        ),
        ("q1,", "q9,", "'b' is no judged skill of query 'q9', or repeated [invalid-row]"),
        ("verdict", "judgement", "row 1: missing key 'verdict' [missing-setting]"),
    ],
)
def test_wrong_row_is_named(folder: Path, old: str, new: str, problem: str):
    sheet = fill(folder, "anna.csv", {("q1", "b"): "rejected"})
    sheet.write_text(sheet.read_text().replace(old, new))

    line = skilltrain("r3", "agreement", sheet, "--judged", folder / "judged").error_line

    assert str(sheet) in line
    assert problem in line, line


def test_sheet_without_verdicts_is_refused(folder: Path):
    sheet = folder / "empty.csv"

    line = skilltrain("r3", "agreement", sheet, "--judged", folder / "judged").error_line

    assert line.endswith("no skill was judged twice [nothing-to-score]")


def test_file_that_is_no_text_is_refused(folder: Path):
    sheet = folder / "anna.csv"
    sheet.write_bytes(b"query_id,skill_id,verdict\n\xff\xfe,a,useful\n")

    line = skilltrain("r3", "agreement", sheet, "--judged", folder / "judged").error_line

    assert line.endswith("(save it as CSV in UTF-8) [unreadable-file]")


def test_filled_sheet_is_not_overwritten(folder: Path):
    sheet = folder / "empty.csv"

    line = skilltrain(
        "r3", "sheet", folder / "judged", "--pool", folder / "pool", "--out", sheet
    ).error_line

    assert "empty.csv: exists already" in line
