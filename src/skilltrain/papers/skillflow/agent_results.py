"""What agents did with skills: pass rates by condition, use, steps and cost (SkillFlow, sections 4.2 and A.3).

A file has one JSON object a line: condition (`none`, `gold`, `top-1` …), task, trial, passed, and where it is known
used (true, or the skills' names), retrieved (skill ids), steps and cost (dollars). First there is a value for each
task, then means over tasks, with the bootstrap and the tests that rankings have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean

from pydantic import Field

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import Comparison, SystemResult, compare, shared_query_ids
from skilltrain.metrics.measures import Relevance, resolve_alternatives
from skilltrain.metrics.slices import means_of

CHIEF = "Pass@1"  # the measure by which conditions are compared


class Trial(Config, extra="ignore"):
    """One run of an agent."""

    condition: str = Field(min_length=1)
    task: str = Field(min_length=1)
    trial: int
    passed: bool = Field(strict=True)
    used: bool | tuple[str, ...] | None = None
    retrieved: tuple[str, ...] | None = None
    steps: float | None = Field(default=None, ge=0)
    cost: float | None = Field(default=None, ge=0)


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file; other keys are ignored. Raises SkilltrainError for a row that is none, or stands twice."""
    trials: dict[tuple[str, str, int], Trial] = {}
    for where, row in read_jsonl(path):
        trial = validate(Trial, row, where)
        if trials.setdefault((trial.condition, trial.task, trial.trial), trial) is not trial:
            raise SkilltrainError(
                "repeated-id",
                f"trial {trial.trial} of task '{trial.task}' stands there twice",
                where=where,
            )
    if not trials:
        raise SkilltrainError("nothing-to-score", "holds no trial", where=path)
    return [*trials.values()]


@dataclass(frozen=True)
class AgentResults:
    """Condition → measure → mean over the tasks; Pass@1 of each condition against the first; condition → its Pass@1 as
    a share of the ceiling's, empty without one.
    """

    means: Mapping[str, Mapping[str, Interval]]
    comparisons: tuple[Comparison, ...]
    of_ceiling: Mapping[str, float]


def agent_results(
    trials: Sequence[Trial], gold: Mapping[str, Relevance], ceiling: str | None
) -> AgentResults:
    """What trials come to; `gold` is what tasks ask for, `ceiling` the condition with gold skills, if known.

    Raises SkilltrainError where conditions hold different tasks, and for a ceiling that is none of them.
    """
    rows: dict[str, dict[str, list[Trial]]] = {}
    for trial in trials:
        rows.setdefault(trial.condition, {}).setdefault(trial.task, []).append(trial)
    if ceiling is not None and ceiling not in rows:
        raise SkilltrainError(
            "unknown-choice",
            f"there is no condition '{ceiling}'",
            fix=f"give one of {', '.join(rows)}",
        )
    least = min(len(row) for tasks in rows.values() for row in tasks.values())
    results: list[SystemResult] = []
    for name, of_task in rows.items():
        values = {task: task_values(row, least, gold.get(task)) for task, row in of_task.items()}
        results.append(SystemResult(name, values, {}))
    tasks, means = shared_query_ids(results), dict[str, Mapping[str, Interval]]()
    for result in results:  # each by itself: a condition without skills has no use rate
        measures = [*dict.fromkeys(measure for row in result.per_query.values() for measure in row)]
        means |= means_of([result], tasks, measures)
    pairs = [(results[0].name, result.name) for result in results[1:]]
    best = means[ceiling][CHIEF].mean if ceiling else 0.0
    shares = {name: row[CHIEF].mean / best for name, row in means.items()} if best else {}
    return AgentResults(means, compare(results, pairs, [CHIEF]), shares)


def task_values(trials: Sequence[Trial], most: int, gold: Relevance | None) -> dict[str, float]:
    """Measure → value of one task's trials, as far as they tell.

    Pass@k and Pass^k, up to `most`, are the chances that one of k trials passes, and that all do, drawn from those that
    there are (Chen et al., 2021): 1 - C(n - c, k) / C(n, k) and C(c, k) / C(n, k) for c of n that passed.
    """
    num, passed = len(trials), sum(trial.passed for trial in trials)
    values = {f"Pass@{k}": 1 - comb(num - passed, k) / comb(num, k) for k in range(1, most + 1)}
    values |= {f"Pass^{k}": comb(passed, k) / comb(num, k) for k in range(2, most + 1)}
    retrieved = [trial.retrieved for trial in trials if trial.retrieved is not None]
    known = {
        "used a skill": [bool(trial.used) for trial in trials if trial.used is not None],
        "got a skill": [bool(skill_ids) for skill_ids in retrieved],
        "skills": [len(skill_ids) for skill_ids in retrieved],
        "gold retrieved": [
            len(resolve_alternatives(ids, gold).gold & {*ids}) / len(gold.gold)
            for ids in retrieved
            if gold
        ],
        "steps": [trial.steps for trial in trials if trial.steps is not None],
        "cost": [trial.cost for trial in trials if trial.cost is not None],
    }
    return values | {measure: fmean(row) for measure, row in known.items() if row}
