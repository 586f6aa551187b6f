"""Pass rates and use of skills from a file of agents' trials: figures worked by hand, and what is refused."""

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
    condition: str = "none", task: str = "t1", trial: int = 0, passed: Any = False, **known: Any
) -> dict[str, Any]:
    return {"condition": condition, "task": task, "trial": trial, "passed": passed, **known}


def trials_of(condition: str, passed: dict[str, str], **known: Any) -> list[dict[str, Any]]:
    """Rows of tasks whose trials passed (1) or not (0)."""
    rows = [
        (task, number, mark == "1")
        for task, marks in passed.items()
        for number, mark in enumerate(marks)
    ]
    return [row(condition, *one, **known) for one in rows]


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
def test_pass_rates_by_hand(marks: str, expected: dict[str, float]) -> None:
    trials = [Trial(**one) for one in trials_of("none", {"t1": marks})]
    assert task_values(trials, 3, None) == pytest.approx(expected)


def test_what_a_file_knows_of_skills_becomes_a_mean_over_trials() -> None:
    trials = [
        Trial(**row(trial=0, used=["a"], retrieved=["a2", "x"], steps=10, cost=0.5)),
        Trial(**row(trial=1, used=False, retrieved=[], steps=20)),
        Trial(**row(trial=2)),
    ]
    values = task_values(trials, 1, GOLD["t1"])

    # a2 stands for a, one of two gold skills; the second trial got none
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
    assert task_values(trials[2:], 1, GOLD["t1"]) == {"Pass@1": 0.0}, "nothing is made up"


def test_conditions_are_compared_with_the_first_and_with_the_ceiling(tmp_path: Path) -> None:
    tasks = [f"t{n}" for n in range(8)]
    rows = trials_of("none", dict.fromkeys(tasks, "00")) + trials_of(
        "gold", dict.fromkeys(tasks, "11")
    )
    rows += trials_of("top-1", {task: "11" if task < "t4" else "00" for task in tasks}, used=True)
    file = tmp_path / "trials.jsonl"
    file.write_text(jsonl(*rows))

    found = agent_results(read_trials(file), {}, "gold")

    assert {name: means["Pass@1"].mean for name, means in found.means.items()} == {
        "none": 0,
        "gold": 1,
        "top-1": 0.5,
    }
    assert "used a skill" not in found.means["none"]
    assert found.means["top-1"]["used a skill"].mean == 1
    assert found.of_ceiling == {"none": 0, "gold": 1, "top-1": 0.5}

    gold, top = found.comparisons

    assert (gold.system, gold.baseline, gold.difference.mean, gold.difference.n) == (
        "gold",
        "none",
        1.0,
        8,
    )
    assert gold.p == pytest.approx(2 / 2**8)
    assert gold.p_holm == pytest.approx(2 * gold.p)
    assert (top.difference.mean, top.p) == (0.5, pytest.approx(2 / 2**4))

    # On the command line, with a benchmark that knows what the tasks ask for.
    wanted = {task: {"a": "required"} for task in tasks}
    bench = write_ours(tmp_path / "bench", [(task, "text", "test") for task in tasks], wanted)
    file.write_text(
        jsonl(*(one | {"retrieved": ["a"]} if one["condition"] == "gold" else one for one in rows))
    )
    shown = succeeds("skillflow", "agents", file, "--benchmark", bench, "--ceiling", "gold")

    assert "gold retrieved" in shown.err
    assert "1.000 [1.00, 1.00]" in shown.err
    assert "top-1 - none: Pass@1 +.500" in shown.out
    assert "top-1: 50.0% of gold's Pass@1" in shown.out
    assert '"Pass^2"' in succeeds("skillflow", "agents", file, "--json").out
    with raises("unknown-choice"):
        agent_results(read_trials(file), {}, "oracle")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "holds no trial"),
        ([row(), row()], "line 2: trial 0 of task 't1' stands there twice"),
        ([row(passed=1)], "line 1"),
        ([row(passed="yes")], "line 1"),
        ([row(cost=-1)], "cost"),
        ([row(steps=float("nan"))], "steps"),
        ([row(condition="")], "condition"),
        ([row(retrieved="a")], "retrieved"),
        ([{"condition": "none", "task": "t1", "passed": True}], "trial"),
        ([row(), row("gold", "t2")], "holds other queries (1) than system none (1)"),
    ],
)
def test_rows_that_are_no_trials_are_refused(
    rows: list[dict[str, Any]], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "trials.jsonl"
    file.write_text(jsonl(*rows))

    assert complaint in skilltrain("skillflow", "agents", file).only_line
