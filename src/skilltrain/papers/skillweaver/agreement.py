"""Agreement of two runs of `plans` over tasks in two wordings (SkillWeaver, section 7.4)."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl
from skilltrain.metrics.bootstrap import share
from skilltrain.metrics.slices import Row

Scores = Mapping[str, Mapping[str, float]]
"""Value by query id and measure."""
_MEASURES = ("DA", "CatR@1")


def agreements(first_run: Path, second_run: Path) -> list[Row]:
    """Compare the plans of two runs of the stage `plans`, in a row for each planner of both.

    Tasks are matched by query id.

    Args:
        first_run: Output folder of a run.
        second_run: Output folder of a run over the same tasks in other words.

    Raises:
        SkilltrainError: No planner has tasks in both runs.
    """
    first_scores = _read_scores(first_run)
    second_scores = _read_scores(second_run)
    rows = []
    for planner, first in first_scores.items():
        second = second_scores.get(planner, {})
        query_ids = [query_id for query_id in first if query_id in second]
        if query_ids:
            row = _compare(first, second, query_ids)
            rows.append({"planner": planner, **row})
    if not rows:
        problem = "has no planner with a task of the other run"
        raise SkilltrainError("nothing-to-score", problem, where=first_run)
    return rows


def _compare(first: Scores, second: Scores, query_ids: list[str]) -> Row:
    """Return the share of tasks with equal DA, and the means of both runs by measure.

    DA (decomposition accuracy) is 1 if a plan has as many steps as the gold plan.

    Args:
        first: Values of the first run by query id and measure.
        second: Values of the second run, for tasks in other words.
        query_ids: Tasks of both runs.
    """
    row = {"agreement": share([first[key]["DA"] == second[key]["DA"] for key in query_ids])}
    for measure in _MEASURES:
        pairs = [(first[key].get(measure), second[key].get(measure)) for key in query_ids]
        # Only tasks with a known gold skill for each step have CatR@1.
        known = [pair for pair in pairs if None not in pair]
        if known:
            means = [round(fmean(values), 4) for values in zip(*known, strict=True)]
            row |= {measure: means[0], f"{measure}, other words": means[1]}
    return row


def _read_scores(run: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the values of the tasks that have DA, by planner, query id and measure."""
    scores = {}
    for _, row in read_jsonl(run / "per_query.jsonl"):
        if "DA" in row:
            scores.setdefault(row["system"], {})[row["query_id"]] = row
    return scores
