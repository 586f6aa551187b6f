"""Results of agents with skills: pass rates, skill use, steps and cost by condition.

Source: SkillFlow, sections 4.2 and A.3. An input file holds one JSON object per line, with the keys
of `Trial`. Values are computed for each task first, then averaged over the tasks, with the
bootstrap and the tests that rankings have.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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

MAIN_MEASURE = "Pass@1"  # the measure by which conditions are compared
_MAX_AMOUNT = 1e12  # of steps or dollars; larger values could overflow a sum


class Trial(Config, extra="ignore"):
    """One run of an agent on one task.

    Attributes:
        condition: Skills that the agent had: `none`, `gold`, `top-1`, ...
        used: Whether the agent used a skill, or the names of the skills that it used.
        retrieved: Ids of the skills that the agent got.
        steps: Number of the agent's steps.
        cost: Cost in dollars.
    """

    condition: str = Field(min_length=1)
    task: str = Field(min_length=1)
    trial: int
    passed: bool = Field(strict=True)
    used: bool | tuple[str, ...] | None = None
    retrieved: tuple[str, ...] | None = None
    steps: float | None = Field(default=None, ge=0, le=_MAX_AMOUNT)
    cost: float | None = Field(default=None, ge=0, le=_MAX_AMOUNT)


class ExcludedTask(Config, extra="ignore"):
    """A task that is not scored."""

    task: str = Field(min_length=1)


def read_excluded_tasks(path: Path) -> set[str]:
    """Read the names of excluded tasks from a JSON Lines file with the key `task`."""
    return {validate(ExcludedTask, row, where).task for where, row in read_jsonl(path)}


def read_trials(path: Path, excluded_tasks: Collection[str] = ()) -> list[Trial]:
    """Read the trials of a JSON Lines file. Unknown keys are ignored.

    Args:
        path: The file.
        excluded_tasks: Tasks whose trials are left out.

    Raises:
        SkilltrainError: A row is no trial, a trial appears twice, or there is no trial.
    """
    trials = {}  # by condition, task and number of the trial
    for where, row in read_jsonl(path):
        trial = validate(Trial, row, where)
        key = (trial.condition, trial.task, trial.trial)
        if key in trials:
            problem = f"trial {trial.trial} of task '{trial.task}' stands there twice"
            raise SkilltrainError("repeated-id", problem, where=where)
        trials[key] = trial
    scored = [trial for trial in trials.values() if trial.task not in excluded_tasks]
    if not scored:
        raise SkilltrainError("nothing-to-score", "holds no trial to score", where=path)
    return scored


@dataclass(frozen=True)
class AgentResults:
    """Results of all conditions.

    Attributes:
        means: Mean over the tasks, by condition and measure.
        comparisons: Pass@1 of each condition against the first condition.
        of_ceiling: Pass@1 of each condition as a share of the ceiling's Pass@1. Empty without a
            ceiling, or if the ceiling's Pass@1 is 0.
    """

    means: Mapping[str, Mapping[str, Interval]]
    comparisons: tuple[Comparison, ...]
    of_ceiling: Mapping[str, float]


def agent_results(
    trials: Sequence[Trial], gold: Mapping[str, Relevance], ceiling: str | None
) -> AgentResults:
    """Compute the results of all conditions.

    A trial is one run of an agent on one task. A condition is the set of skills that the agent had.

    Args:
        trials: Trials of all conditions.
        gold: Skills that each task needs, by task.
        ceiling: Name of the condition in which the agent had the gold skills; None without such
            a condition.

    Raises:
        SkilltrainError: Conditions have different tasks, or `ceiling` is no condition.
    """
    results = _results_by_task(trials, gold)
    conditions = [result.name for result in results]
    if ceiling is not None and ceiling not in conditions:
        fix = f"give one of {', '.join(conditions)}"
        raise SkilltrainError("unknown-choice", f"there is no condition '{ceiling}'", fix=fix)

    # Average each condition by itself, because conditions have different measures. For example, a
    # condition without skills has no use rate.
    tasks = shared_query_ids(results)
    means = {}
    for result in results:
        measures = dict.fromkeys(chain.from_iterable(result.per_query.values()))
        means |= means_of([result], tasks, list(measures))

    # Compare the conditions with the first condition, and with the ceiling.
    pairs = [(conditions[0], condition) for condition in conditions[1:]]
    comparisons = compare(results, pairs, [MAIN_MEASURE])
    pass_rates = {condition: row[MAIN_MEASURE].mean for condition, row in means.items()}
    # Divide each pass rate by that of the ceiling. Without a ceiling, there are no shares.
    shares_of_ceiling = {}
    if ceiling and pass_rates[ceiling]:
        shares_of_ceiling = {name: rate / pass_rates[ceiling] for name, rate in pass_rates.items()}
    return AgentResults(means, comparisons, of_ceiling=shares_of_ceiling)


def _results_by_task(trials: Sequence[Trial], gold: Mapping[str, Relevance]) -> list[SystemResult]:
    """Compute the measures of each task, in a result for each condition.

    Args:
        trials: Trials of all conditions.
        gold: Skills that each task needs, by task.
    """
    # Group the trials by condition, then by task.
    trials_by_condition = {}
    for trial in trials:
        trials_by_task = trials_by_condition.setdefault(trial.condition, {})
        trials_by_task.setdefault(trial.task, []).append(trial)

    # Pass@k needs k trials of every task, so the smallest number of trials is the largest k.
    max_k = min(Counter((trial.condition, trial.task) for trial in trials).values())
    results = []
    for condition, trials_by_task in trials_by_condition.items():
        values = {
            task: task_values(task_trials, max_k, gold.get(task))
            for task, task_trials in trials_by_task.items()
        }
        # The statistics are those of rankers. An agent has no rankings.
        results.append(SystemResult(condition, values, rankings={}))
    return results


def task_values(
    trials: Sequence[Trial], max_k: int, relevance: Relevance | None
) -> dict[str, float]:
    """Compute the measures of one task from its trials.

    n is the number of trials, and c the number of trials that passed (Chen et al., 2021):

    - Pass@k = 1 - C(n - c, k) / C(n, k): probability that one of k trials passes.
    - Pass^k = C(c, k) / C(n, k): probability that all of k trials pass.

    Args:
        trials: Trials of the task.
        max_k: Largest k. Every task must have at least this many trials.
        relevance: Skills that the task needs (gold), if known.

    Returns:
        Value by measure. A measure that no trial has data for is absent.
    """
    num_trials = len(trials)
    num_passed = sum(trial.passed for trial in trials)
    values = {}
    for k in range(1, max_k + 1):
        values[f"Pass@{k}"] = 1 - comb(num_trials - num_passed, k) / comb(num_trials, k)
    for k in range(2, max_k + 1):
        values[f"Pass^{k}"] = comb(num_passed, k) / comb(num_trials, k)

    # Average the other values over the trials that have data. None: the trial has no data.
    retrieved = [trial.retrieved for trial in trials if trial.retrieved is not None]
    values_of_trials = {
        "used a skill": [bool(trial.used) for trial in trials if trial.used is not None],
        "got a skill": [bool(skill_ids) for skill_ids in retrieved],
        "skills": [len(skill_ids) for skill_ids in retrieved],
        "gold retrieved": _gold_shares(retrieved, relevance) if relevance else [],
        "steps": [trial.steps for trial in trials if trial.steps is not None],
        "cost": [trial.cost for trial in trials if trial.cost is not None],
    }
    for measure, trial_values in values_of_trials.items():
        if trial_values:
            values[measure] = fmean(trial_values)
    return values


def _gold_shares(retrieved: Sequence[Sequence[str]], relevance: Relevance) -> list[float]:
    """Return the share of the gold skills that each trial retrieved.

    Args:
        retrieved: Ids of the skills that the agent got in each trial.
        relevance: The gold skills, which the task needs, and their alternatives.
    """
    gold_shares = []
    for skill_ids in retrieved:
        # A retrieved alternative counts as the gold skill that it replaces.
        gold_ids = resolve_alternatives(skill_ids, relevance).gold
        num_retrieved = len(gold_ids.intersection(skill_ids))
        gold_shares.append(num_retrieved / len(relevance.gold))
    return gold_shares
