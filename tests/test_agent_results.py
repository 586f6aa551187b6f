"""Pass rates and use of skills from a file of agents' trials."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl, write_ours
from faults import raises
from skilltrain.metrics.measures import Relevance
from skilltrain.papers.skillflow.agent_results import Trial, agent_results, read_trials, task_values
from small_library import skilltrain, succeeds

GOLD = {"t1": Relevance(frozenset({"a", "b"}), {"a": 1.0, "b": 1.0}, {"a2": "a"})}


def row(
    condition: str = "none", task: str = "t1", trial: int = 0, passed: Any = False, **more: Any
) -> dict[str, Any]:
    return {"condition": condition, "task": task, "trial": trial, "passed": passed, **more}


def trials_of(condition: str, marks_by_task: dict[str, str], **more: Any) -> list[dict[str, Any]]:
    """Return rows of tasks; each trial is a letter, 1 if it passed."""
    rows = []
    for task, marks in marks_by_task.items():
        for number, mark in enumerate(marks):
            rows.append(row(condition, task, number, mark == "1", **more))
    return rows


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        # one of three: C(2,2)/C(3,2) = 1/3 of the pairs have no pass, none of them two
        ("100", {"Pass@1": 1 / 3, "Pass@2": 2 / 3, "Pass@3": 1, "Pass^2": 0, "Pass^3": 0}),
        ("110", {"Pass@1": 2 / 3, "Pass@2": 1, "Pass@3": 1, "Pass^2": 1 / 3, "Pass^3": 0}),
        # two of four: C(2,3) = 0 triples without a pass
        ("1100", {"Pass@1": 0.5, "Pass@2": 5 / 6, "Pass@3": 1, "Pass^2": 1 / 6, "Pass^3": 0}),
    ],
)
def test_pass_rates_by_hand(marks: str, expected: dict[str, float]):
    trials = [Trial(**values) for values in trials_of("none", {"t1": marks})]

    assert task_values(trials, 3, None) == pytest.approx(expected)


def test_use_of_skills_is_averaged_over_trials():
    # a2 is an alternative of a, one of two gold skills; the second trial got no skill.
    trials = [
        Trial(**row(trial=0, used=["a"], retrieved=["a2", "x"], steps=10, cost=0.5)),
        Trial(**row(trial=1, used=False, retrieved=[], steps=20)),
        Trial(**row(trial=2)),
    ]

    values = task_values(trials, 1, GOLD["t1"])

    assert values == pytest.approx(
        {
            "Pass@1": 0,
            "used a skill": 0.5,
            "got a skill": 0.5,
            "skills": 1,
            "gold retrieved": 0.25,
            "steps": 15,
            "cost": 0.5,
        }
    )


def test_unknown_use_of_skills_has_no_values():
    assert task_values([Trial(**row())], 1, GOLD["t1"]) == {"Pass@1": 0.0}


TASKS = [f"t{number}" for number in range(8)]
TRIALS = [
    *trials_of("none", dict.fromkeys(TASKS, "00")),
    *trials_of("gold", dict.fromkeys(TASKS, "11"), retrieved=["a"]),
    *trials_of("top-1", dict.fromkeys(TASKS[:4], "11"), used=True),
    *trials_of("top-1", dict.fromkeys(TASKS[4:], "00"), used=True),
]


@pytest.fixture
def trials_file(tmp_path: Path) -> Path:
    file = tmp_path / "trials.jsonl"
    file.write_text(jsonl(*TRIALS))
    return file


def test_conditions_have_means(trials_file: Path):
    means = agent_results(read_trials(trials_file), {}, None).means

    pass_rates = {name: values["Pass@1"].mean for name, values in means.items()}
    assert pass_rates == {"none": 0, "gold": 1, "top-1": 0.5}
    assert "used a skill" not in means["none"]
    assert means["top-1"]["used a skill"].mean == 1


def test_conditions_are_compared_with_ceiling(trials_file: Path):
    results = agent_results(read_trials(trials_file), {}, "gold")

    assert results.of_ceiling == {"none": 0, "gold": 1, "top-1": 0.5}


def test_conditions_are_compared_with_first(trials_file: Path):
    gold, top = agent_results(read_trials(trials_file), {}, None).comparisons

    assert (gold.system, gold.baseline) == ("gold", "none")
    assert (gold.difference.mean, gold.difference.n) == (1.0, 8)
    assert gold.p == pytest.approx(2 / 2**8)
    assert gold.p_holm == pytest.approx(2 * gold.p)
    assert top.difference.mean == 0.5
    assert top.p == pytest.approx(2 / 2**4)


def test_excluded_tasks_do_not_count(tmp_path: Path):
    rows = [row(task="t1", passed=True), row(task="t2"), row("gold", "t1", passed=True)]
    (tmp_path / "trials.jsonl").write_text(jsonl(*rows, row("gold", "t2")))
    (tmp_path / "excluded.jsonl").write_text(jsonl({"task": "t2", "reason": "flaky"}))
    command = ("skillflow", "agents", tmp_path / "trials.jsonl", "--json")

    out = succeeds(*command, "--exclude", tmp_path / "excluded.jsonl").out

    mean = json.loads(out)["means"]["none"]["Pass@1"]
    assert (mean["mean"], mean["n"]) == (1.0, 1)


def test_excluded_row_without_task_is_refused(tmp_path: Path):
    (tmp_path / "trials.jsonl").write_text(jsonl(row()))
    (tmp_path / "excluded.jsonl").write_text(jsonl({"name": "t2"}))
    command = ("skillflow", "agents", tmp_path / "trials.jsonl")

    line = skilltrain(*command, "--exclude", tmp_path / "excluded.jsonl").error_line

    assert "excluded.jsonl, line 1: missing key 'task'" in line


def test_unknown_ceiling_is_refused(trials_file: Path):
    with raises("unknown-choice"):
        agent_results(read_trials(trials_file), {}, "oracle")


def test_command_reads_gold_from_benchmark(trials_file: Path, tmp_path: Path):
    verdicts = {task: {"a": "required"} for task in TASKS}
    queries = [(task, "text", "test") for task in TASKS]
    benchmark = write_ours(tmp_path / "bench", queries, verdicts)
    options = ("--benchmark", benchmark, "--ceiling", "gold")

    outcome = succeeds("skillflow", "agents", trials_file, *options)

    assert "gold retrieved" in outcome.err
    assert "1.000 [1.00, 1.00]" in outcome.err
    assert "top-1 - none: Pass@1 +.500" in outcome.out
    assert "top-1: 50.0% of gold's Pass@1" in outcome.out


def test_command_writes_json(trials_file: Path):
    assert '"Pass^2"' in succeeds("skillflow", "agents", trials_file, "--json").out


def test_names_of_conditions_are_no_markup(tmp_path: Path):
    file = tmp_path / "trials.jsonl"
    file.write_text(jsonl(row("[/b]"), row("[red]x[/red]")))

    table = succeeds("skillflow", "agents", file).err

    assert "[/b]" in table
    assert "[red]x[/red]" in table


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no trial"),
        ([row(), row()], "line 2: trial 0 of task 't1' stands there twice"),
        ([row(passed=1)], "line 1"),
        ([row(passed="yes")], "line 1"),
        ([row(cost=-1)], "cost"),
        ([row(cost=1e308)], "cost"),
        ([row(steps=float("nan"))], "steps"),
        ([row(condition="")], "condition"),
        ([row(retrieved="a")], "retrieved"),
        ([{"condition": "none", "task": "t1", "passed": True}], "trial"),
        ([row(), row("gold", "t2")], "holds other queries (1) than system none (1)"),
    ],
)
def test_invalid_trials_are_refused(rows: list[dict[str, Any]], message: str, tmp_path: Path):
    file = tmp_path / "trials.jsonl"
    file.write_text(jsonl(*rows))

    assert message in skilltrain("skillflow", "agents", file).only_line
