"""Stage `plans`: plan the compound tasks of a benchmark in several ways, and score the plans.

Notes:
    - Held-out skills may be gold skills, but the planners cannot find them. The pool may hold some
      of the held-out skills.
    - The slices of a planner are those of the benchmark's labels, of the difficulty (by the number
      of gold steps), of whether it planned too many steps, and of the gold skills' categories.
    - In the rows of a planner's rounds, a task that stopped earlier counts with its last round.
    - The groups of tasks compare each planner with the first one: it fixes the number of steps
      (DA), breaks it, or both have it right or wrong (SkillWeaver, section 7.6).
    - Latency is measured one task at a time, without the cache of answers.
    - A plan has a note only if a model failed, and rules planned the task.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from skilltrain.config import InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.page import markdown
from skilltrain.files import write_json, write_jsonl, write_text
from skilltrain.llm import LLM, estimate_cost
from skilltrain.llm.answers import estimate_tokens
from skilltrain.llm.query_prompts import Ask
from skilltrain.metrics.benchmarks.benchmark import Benchmark, Labels, Task, check_pool
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.comparison import SystemResult, compare
from skilltrain.metrics.slices import SliceMeans, distinct_slices, means_by_slice
from skilltrain.papers.skillweaver.compose import NUM_CANDIDATES, Plan, plan_json
from skilltrain.papers.skillweaver.decompose import ModelConfig
from skilltrain.papers.skillweaver.plan_measures import (
    MEANINGS,
    category_recall,
    gold_chain,
    measure_names,
    plan_values,
)
from skilltrain.papers.skillweaver.planner import Find, Planner, PlannerConfig, find_each
from skilltrain.papers.skillweaver.rules import Round
from skilltrain.records import Query, Ranking, Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.executor import OpenRankers, run_rankers, with_keeps
from skilltrain.stage import Stage, Summary
from skilltrain.version import __version__

# Measures that the report shows for each slice of the tasks.
_SLICED = ("DA", "CatR@1", "CatR@10", "Skill R@10", "Chosen")
_DIFFICULTIES = {0: "easy", 1: "easy", 2: "easy", 3: "medium"}  # by number of steps, else hard
_MAX_SLICES = 50  # values of one label that get a slice
_GROUPED = {"DA", "CatR@1"}  # measures that a group of tasks needs
_GROUPS = {
    (0.0, 1.0): "fixed",
    (1.0, 0.0): "broken",
    (1.0, 1.0): "both right",
    (0.0, 0.0): "both wrong",
}
PlansByPlanner = Mapping[str, Sequence[Plan]]
"""Plans of all tasks by the name of the planner."""
SlicesByPlanner = Mapping[str, Sequence[SliceMeans]]
"""Slices of the tasks by the name of the planner. The first slice holds all tasks."""


class Plans(Stage):
    """Plan the compound tasks of a benchmark, and score the plans step by step."""

    example = (
        "benchmark=livemcpbench system.name=bm25 'system.rankers=[{kind: lexical}]' out=runs/plans"
    )
    result = "{num_tasks} tasks planned; look at {out}/report.md"

    stage: Literal["plans"]
    benchmark: InputPath = Field(
        description="folder of a benchmark whose tasks have steps, such as ours or LiveMCPBench"
    )
    split: str | None = Field(
        default=None, description="score the queries of this split only; null for all"
    )
    pool: InputPath | None = Field(
        default=None, description="skills that can be found; null: the benchmark's own"
    )
    held_out: InputPath | None = Field(
        default=None,
        description="skills that are hidden from the planners; only their categories count",
    )
    system: SystemConfig = Field(
        description="system that retrieves skills for a step, with the step as query"
    )
    planners: tuple[PlannerConfig, ...] = Field(
        default=(PlannerConfig(name="rules"),),
        min_length=1,
        description="ways to plan; the first is the baseline",
    )
    compare: tuple[str, ...] = Field(
        default=("DA", "DA±1", "CatR@1", "Skill R@10"),
        description="measures by which the other planners are compared to the baseline",
    )
    num_timed: int = Field(
        default=0,
        ge=0,
        description="number of tasks that each planner plans again, one by one and without cached "
        "answers, to measure its latency",
    )
    out: Path = Field(
        description="folder to write: metrics.json, report.md, per_query.jsonl, plans.jsonl"
    )

    @model_validator(mode="after")
    def _check_names_and_measures(self) -> "Plans":
        if len({planner.name for planner in self.planners}) < len(self.planners):
            raise ValueError("two planners have the same name")
        unknown = sorted(set(self.compare).difference(self.scored))
        if unknown:
            raise ValueError(
                f"compare: unknown measure '{unknown[0]}'; measures are {', '.join(self.scored)}"
            )
        return self

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of all measures."""
        return measure_names()

    @property
    def num_systems(self) -> int:
        """Number of planners."""
        return len(self.planners)

    def run(self, out: Path) -> Summary:
        """Write the plans and their scores. Return counts, and means over all tasks by planner."""
        benchmark, skills, pool = _open(self)
        tasks = benchmark.tasks

        # Plan the tasks, and score the plans.
        find = finder(self.system, pool)
        # Skills that each task needs. Only LLM-Direct sees them, among other skills.
        golds = {task.query.query_id: task.relevance.gold for task in tasks}
        planners = {each.name: Planner(each, skills, find, golds) for each in self.planners}
        plans = {name: planner.plan(benchmark.queries) for name, planner in planners.items()}
        results = _results(tasks, plans, find, skills)
        slices = {result.name: _slices(tasks, result, skills, self.scored) for result in results}

        # Write the report, and the values behind it.
        baseline, *compared = self.planners
        pairs = [(baseline.name, planner.name) for planner in compared]
        rounds = {}
        latencies = {}
        for name, planner in planners.items():
            rounds[name] = _rounds(tasks, plans[name], find, skills)
            if self.num_timed:
                latencies[name] = _latency(planner, benchmark.queries[: self.num_timed])
        analyses = {"rounds": rounds, "groups": _groups(results), "latencies": latencies}
        comparisons = compare(results, pairs, self.compare)
        metrics = {
            "benchmark": benchmark.name,
            "num_tasks": len(tasks),
            "num_skills": len(pool),
            "notes": [*benchmark.notes, *_notes(plans)],
        }
        report = markdown(
            "plans",
            **metrics,
            slices=slices,
            **analyses,
            comparisons=comparisons,
            measures=self.scored,
            meanings=MEANINGS,
            sliced=_SLICED,
        )
        write_text(out / "report.md", report)
        metrics = {
            "skilltrain": __version__,
            **metrics,
            "planners": _slice_rows(slices),
            **analyses,
            "comparisons": comparisons,
        }
        write_json(out / "metrics.json", to_jsonable_python(metrics))
        _write_rows(results, plans, out)

        means = _means_over_all_tasks(slices)
        return {"num_tasks": len(tasks), "num_skills": len(pool), "planners": means}

    def dry_run(self) -> Summary:
        """Count the tasks and estimate the cost of each chat model's first requests."""
        benchmark, _, pool = _open(self)
        # The estimate leaves out skills that a request shows, because nothing is retrieved here.
        asks = [Ask(task.query) for task in benchmark.tasks]
        costs = {}
        for planner in self.planners:
            model = planner.decomposer
            if isinstance(model, ModelConfig):
                costs[planner.name] = estimate_cost(model.questions(LLM(model.llm), asks))
        return {"num_tasks": len(asks), "num_skills": len(pool), "asked": costs}


def _means_over_all_tasks(slices: SlicesByPlanner) -> dict[str, dict[str, float]]:
    """Return the means over all tasks by planner and measure, rounded to 4 decimals."""
    means_by_planner = {}
    for planner, planner_slices in slices.items():
        means = planner_slices[0].means[planner]  # the first slice holds all tasks
        means_by_planner[planner] = {name: round(mean.mean, 4) for name, mean in means.items()}
    return means_by_planner


def _slice_rows(slices: SlicesByPlanner) -> dict[str, list[dict[str, Any]]]:
    """Return the slices of each planner as rows of metrics.json.

    A slice holds the tasks with one value of a label, such as the tasks of difficulty "hard".
    """
    rows = {}
    for name, planner_slices in slices.items():
        rows[name] = []
        for item in planner_slices:
            rows[name].append(
                {
                    "label": item.label,
                    "value": item.value,
                    "n": len(item.query_ids),
                    "means": item.means[name],
                }
            )
    return rows


def _write_rows(results: Sequence[SystemResult], plans: PlansByPlanner, out: Path) -> None:
    """Write per_query.jsonl and plans.jsonl: a row for each planner and task.

    Args:
        results: Values of each planner's plans by query id and measure, for per_query.jsonl.
        plans: Plans of all tasks by planner, for plans.jsonl.
        out: Folder of the run.
    """
    scores = []
    for result in results:
        for query_id, values in result.per_query.items():
            scores.append({"system": result.name, "query_id": query_id, **values})
    write_jsonl(out / "per_query.jsonl", scores)

    rows = []
    for name, task_plans in plans.items():
        for plan in task_plans:
            rows.append({"system": name, "query_id": plan.task.query_id, **plan_json(plan)})
    write_jsonl(out / "plans.jsonl", rows)


def finder(system: SystemConfig, skills: Sequence[Skill]) -> Find:
    """Return a function that retrieves skills for steps. The models of `system` stay open.

    Args:
        system: Rankers that retrieve.
        skills: Skills that can be found.
    """
    pool = OpenRankers(skills)

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        """Return the first `keep` skills for each text."""
        # Rankers take queries, so make a query from each text.
        queries = [
            Query(f"step {number}", text, kind="step", origin="plan", split="")
            for number, text in enumerate(texts)
        ]
        # None: the first ranker searches the pool.
        rankings = run_rankers(with_keeps(system.rankers, keep), queries, None, pool)
        return [rankings[query.query_id][:keep] for query in queries]

    return find


def _open(config: Plans) -> tuple[Benchmark, dict[str, Skill], list[Skill]]:
    """Load the benchmark and the pool, and check them.

    Returns:
        The benchmark, all skills by id, and the skills that the planners can find.

    Raises:
        SkilltrainError: The benchmark has no steps, no pool, or no gold skills.
    """
    check_systems([config.system])
    for planner in config.planners:
        if isinstance(planner.decomposer, ModelConfig):
            planner.decomposer.check()
    benchmark = load_benchmark(config.benchmark, config.split)
    pool = list(benchmark.pool) if config.pool is None else read_pool(config.pool)
    if not pool:
        problem = "plans need a pool to find skills in"
        raise SkilltrainError("missing-pool", problem, fix="give pool=…")
    all_steps = list(chain.from_iterable(task.steps for task in benchmark.tasks))
    if not all_steps:
        problem = "its tasks have no steps"
        fix = "it needs plans.parquet"
        raise SkilltrainError("missing-table", problem, where=config.benchmark, fix=fix)

    # Held-out skills may be gold skills (that a task needs), but the planners cannot find them.
    held_out = read_pool(config.held_out) if config.held_out else []
    skills = {skill.skill_id: skill for skill in [*pool, *held_out]}
    benchmark = check_pool(benchmark, skills)
    for step in all_steps:
        if step.skill_id and step.skill_id not in skills:
            problem = f"skill '{step.skill_id}' of a step is not in the pool"
            raise SkilltrainError("unknown-skill", problem, where=config.benchmark)
    # The pool may hold some of the held-out skills.
    held_out_ids = {skill.skill_id for skill in held_out}
    findable = [skill for skill in pool if skill.skill_id not in held_out_ids]
    return benchmark, skills, findable


def _results(
    tasks: Sequence[Task],
    plans: PlansByPlanner,
    find: Find,
    skills: Mapping[str, Skill],
) -> list[SystemResult]:
    """Score the plans of each planner.

    Args:
        tasks: Tasks with their gold steps.
        plans: Plans of all tasks by planner.
        find: Retrieves skills for texts.
        skills: Skills by id.
    """
    # The oracle: the skills that are retrieved for the texts of the gold steps.
    gold_texts = []
    for task in tasks:
        gold_texts.append([step.text for step in task.steps])
    rankings_by_task = find_each(find, gold_texts, NUM_CANDIDATES)
    oracle = [_without_scores(rankings) for rankings in rankings_by_task]
    # Length of each skill in tokens, to measure how much context a plan saves.
    tokens = {
        skill_id: estimate_tokens(f"{skill.name} {skill.description} {skill.body}")
        for skill_id, skill in skills.items()
    }

    results = []
    for name, task_plans in plans.items():
        values = {}
        for task, plan, oracle_ids in zip(tasks, task_plans, oracle, strict=True):
            retrieved = _without_scores(step.candidates for step in plan.steps)
            chosen = [step.skill_id for step in plan.steps]
            values[task.query.query_id] = plan_values(
                task, retrieved, chosen, oracle_ids, skills, tokens
            )
        results.append(SystemResult(name, per_query=values, rankings={}))  # plans are no rankings
    return results


def _without_scores(rankings: Iterable[Ranking]) -> list[list[str]]:
    """Return the skill ids of each ranking, best first."""
    skill_ids = []
    for ranking in rankings:
        skill_ids.append([skill_id for skill_id, _ in ranking])
    return skill_ids


def _slices(
    tasks: Sequence[Task],
    result: SystemResult,
    skills: Mapping[str, Skill],
    measures: Sequence[str],
) -> Sequence[SliceMeans]:
    """Return the means of a planner's result over all tasks and over each group of tasks."""
    labels = _labels(tasks, result, skills)
    slices = means_by_slice([result], labels, measures, max_values=_MAX_SLICES)
    return distinct_slices(slices)


def _labels(
    tasks: Sequence[Task], result: SystemResult, skills: Mapping[str, Skill]
) -> dict[str, Labels]:
    """Return the labels of each task by query id, for slices of a planner's result.

    The labels are those of the benchmark, the difficulty (by the number of gold steps), whether
    the planner planned too many steps, and the categories of the gold skills.

    Args:
        tasks: Tasks with their gold steps (the steps of a right plan).
        result: Values of the planner's plans by query id and measure.
        skills: Skills by id.
    """
    labels = {}
    for task in tasks:
        query_id = task.query.query_id
        num_steps = len(task.steps)
        num_planned = result.per_query[query_id]["steps"]
        planned = "as many as gold"
        if num_planned > num_steps:
            planned = "too many"
        elif num_planned < num_steps:
            planned = "too few"
        difficulty = _DIFFICULTIES.get(num_steps, "hard")
        task_labels = {**task.labels, "difficulty": difficulty, "steps planned": planned}

        # A benchmark may not say which skill does which step.
        gold = [skills[step.skill_id] for step in task.steps if step.skill_id]
        if gold:
            categories = dict.fromkeys(skill.category or "none" for skill in gold)
            task_labels["category"] = tuple(categories)
        labels[query_id] = task_labels
    return labels


def _groups(results: Sequence[SystemResult]) -> list[dict[str, Any]]:
    """Return CatR@1 of each planner and the first one, by who has the right number of steps.

    A planner is compared with the first planner, in up to four groups of tasks: fixed (only the
    planner has the right number), broken (only the first planner has the right number), both right,
    and both wrong. Tasks without these measures are left out.

    Args:
        results: Values of all planners. The first planner is the baseline.

    Returns:
        A row for each other planner and group, with means over the tasks of the group.
    """
    rows = []
    baseline = results[0].per_query
    for result in results[1:]:
        pairs_by_group = {}
        for query_id, values in result.per_query.items():
            first = baseline[query_id]
            if values.keys() >= _GROUPED:
                # DA (decomposition accuracy) is 1 if the number of steps is right, else 0.
                group = _GROUPS[first["DA"], values["DA"]]
                pairs_by_group.setdefault(group, []).append((first["CatR@1"], values["CatR@1"]))
        for group, pairs in sorted(pairs_by_group.items()):
            before, after = map(fmean, zip(*pairs, strict=True))
            row = {"planner": result.name, "group": group, "n": len(pairs)}
            rows.append(row | {"first CatR@1": before, "CatR@1": after})
    return rows


def _without_cache(planner: PlannerConfig) -> PlannerConfig:
    """Return the settings of a planner whose chat model answers every request anew."""
    decomposer = planner.decomposer
    if not isinstance(decomposer, ModelConfig):
        return planner
    llm = decomposer.llm.model_copy(update={"cache": None})
    return planner.model_copy(update={"decomposer": decomposer.model_copy(update={"llm": llm})})


def _latency(planner: Planner, tasks: Sequence[Query]) -> dict[str, float]:
    """Plan tasks one by one, and return the seconds per task: mean, median and 95th percentile.

    A chat model answers every request anew. Answers from the cache would take no time.
    """
    uncached = replace(planner, config=_without_cache(planner.config))
    seconds = []
    for task in tasks:
        start = time.perf_counter()
        uncached.plan([task])
        seconds.append(time.perf_counter() - start)
    p50, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
    return {"n": len(seconds), "mean": fmean(seconds), "p50": p50, "p95": p95}


def _rounds(
    tasks: Sequence[Task], plans: Sequence[Plan], find: Find, skills: Mapping[str, Skill]
) -> list[dict[str, Any]]:
    """Summarise each round of a planner.

    A model with hints plans a task again, in several rounds. A task that stopped earlier counts
    with its last round.

    Returns:
        A row for each round: the number of tasks that reached it, and means over all tasks.
    """
    rows = []
    max_rounds = max(len(plan.rounds) for plan in plans)
    for number in range(max_rounds):
        rounds = [plan.rounds[min(number, len(plan.rounds) - 1)] for plan in plans]
        num_reached = sum(len(plan.rounds) > number for plan in plans)
        means = _round_means(tasks, rounds, find, skills)
        rows.append({"round": number, "reached": num_reached, **means})
    return rows


def _round_means(
    tasks: Sequence[Task], rounds: Sequence[Round], find: Find, skills: Mapping[str, Skill]
) -> dict[str, float | None]:
    """Return the means over all tasks of one round. None: no task has a value.

    Args:
        tasks: Tasks with their gold steps.
        rounds: The round of each task, with its planned steps.
        find: Retrieves skills for texts.
        skills: Skills by id.
    """
    counts = [len(each.texts) for each in rounds]
    is_exact = [count == len(task.steps) for count, task in zip(counts, tasks, strict=True)]
    # Similarity of the hints to the previous round's hints. The first round has no similarity.
    jaccards = [each.jaccard for each in rounds if each.jaccard is not None]
    retrieved = find_each(find, [each.texts for each in rounds], keep=1)
    recalls = _category_recalls(tasks, retrieved, skills)
    return {
        "steps": fmean(counts),
        "DA": fmean(is_exact),  # decomposition accuracy
        "CatR@1": fmean(recalls) if recalls else None,
        "jaccard": fmean(jaccards) if jaccards else None,
    }


def _category_recalls(
    tasks: Sequence[Task], retrieved: Sequence[Sequence[Ranking]], skills: Mapping[str, Skill]
) -> list[float]:
    """Return CatR@1 of the tasks that have a gold skill for every step.

    CatR@1 is the share of the steps whose first retrieved skill has the category of the gold skill.

    Args:
        tasks: Tasks with their gold steps.
        retrieved: For each task, the ranking of each planned step.
        skills: Skills by id.
    """
    categories = {skill_id: skill.category for skill_id, skill in skills.items()}
    recalls = []
    for task, rankings in zip(tasks, retrieved, strict=True):
        gold = gold_chain(task)  # gold skill of each step; empty if a step has none
        if gold:
            recalls.append(category_recall(gold, _without_scores(rankings), 1, categories))
    return recalls


def _notes(plans: PlansByPlanner) -> list[str]:
    """Count the tasks that rules planned instead of a model, and the steps that no skill fits.

    Returns:
        Sentences for the report.
    """
    notes = []
    for name, task_plans in plans.items():
        # A plan has a note only if a model failed, and rules planned the task.
        plan_notes = [plan.notes[0] for plan in task_plans if plan.notes]
        if plan_notes:
            share = f"{len(plan_notes)} of {len(task_plans)} tasks"
            notes.append(f"{name}: rules planned {share}, first reason: {plan_notes[0]}")
        steps = list(chain.from_iterable(plan.steps for plan in task_plans))
        num_unserved = sum(step.skill is None for step in steps)
        if num_unserved:
            notes.append(f"{name}: no skill fits {num_unserved} of {len(steps)} steps")
    return notes
