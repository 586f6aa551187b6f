"""The stage `plans`: plan a benchmark's compound tasks in one or several ways, and score the plans."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from skilltrain import __version__
from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.comparison import Comparison, SystemResult, compare, values_of, wilcoxon
from skilltrain.evaluation.plan_measures import MEANINGS, Outcome, measure_names, plan_values
from skilltrain.evaluation.slices import ALL, SliceMeans, means_by_slice
from skilltrain.files import write_json, write_text
from skilltrain.llm.budget import estimate_tokens
from skilltrain.records import Query, Ranker, Ranking, Skill
from skilltrain.report.page import markdown
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems
from skilltrain.routing.planning.compose import Plan
from skilltrain.routing.planning.hints import Find
from skilltrain.routing.planning.planner import Known, Planner, PlannerConfig, plan_cost
from skilltrain.routing.planning.show import plan_json

_SLICED = ("DA", "CatR@1", "CatR@10", "Skill R@10", "Chosen")
_MOST_VALUES = 50  # of a label: categories are many


class PlansConfig(Config):
    """Plan compound tasks and score the plans against the gold steps and skills."""

    stage: Literal["plans"]
    benchmark: tuple[InputPath, ...] = Field(
        min_length=1, max_length=1, description="folder of a benchmark whose tasks have steps: ours, LiveMCPBench"
    )
    split: str | None = Field(default=None, description="score the queries of this split only; null for all")
    pool: InputPath | None = Field(default=None, description="the skills to find; null: the benchmark's own")
    held_out: InputPath | None = Field(
        default=None, description="skills that are not to be found, only their categories count (transfer)"
    )
    system: SystemConfig = Field(description="what finds skills for a step, which is asked like a query")
    planners: tuple[PlannerConfig, ...] = Field(
        default=(PlannerConfig(name="rules"),), min_length=1, description="ways to plan; the first is the baseline"
    )
    compare: tuple[str, ...] = Field(
        default=("DA", "DA±1", "CatR@1", "Skill R@10"), description="measures by which the others are compared to it"
    )
    seed: Seed = Field(default=0, description="seed of the bootstrap")
    out: Path = Field(description="folder to write: metrics.json, report.md, per_query.jsonl, plans.jsonl")

    @field_validator("benchmark", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)

    @model_validator(mode="after")
    def _names_differ(self) -> "PlansConfig":
        names = [planner.name for planner in self.planners]
        if len(set(names)) < len(names):
            raise ValueError("two planners have the same name")
        if unknown := sorted({*self.compare} - {*measure_names()}):
            raise ValueError(f"compare: unknown measure '{unknown[0]}'; measures are {', '.join(measure_names())}")
        return self

    @property
    def scored(self) -> tuple[str, ...]:
        """The measures of every task."""
        return measure_names()

    @property
    def num_systems(self) -> int:
        """How many ways to plan are compared."""
        return len(self.planners)


def run_plans(config: PlansConfig, out: Path) -> dict[str, Any]:
    """Write the plans and what they are worth; the summary holds the means of all tasks."""
    benchmark, skills, pool = _opened(config)
    tasks, find = benchmark.tasks, finder(config.system, pool)
    oracle = _by_own_words(config, tasks, find)
    known = Known(
        {task.query.query_id: len(task.steps) for task in tasks},
        {task.query.query_id: sorted(task.relevance.gold) for task in tasks},
    )
    plans = {
        planner.name: Planner(planner, skills, find, known).plan([task.query for task in tasks])
        for planner in config.planners
    }
    results = [SystemResult(name, _values(tasks, own, oracle, skills), {}) for name, own in plans.items()]
    slices = {result.name: _slices(config, tasks, result, skills) for result in results}
    rounds = {name: _rounds(tasks, own) for name, own in plans.items()}
    compared, notes = _comparisons(config, results), [*benchmark.notes, *_notes(plans)]
    about = {"benchmark": benchmark.name, "num_tasks": len(tasks), "num_skills": len(pool), "notes": notes}
    shown = {"slices": slices, "rounds": rounds, "comparisons": compared, "measures": config.scored}
    write_text(out / "report.md", markdown("plans.md.j2", **about, **shown, meanings=MEANINGS, sliced=_SLICED))
    by_slice = {
        name: [{"label": s.label, "value": s.value, "n": len(s.query_ids), "means": s.to_json(name)} for s in own]
        for name, own in slices.items()
    }
    differences = [asdict(one) | {"wilcoxon_p_above": p} for one, p in compared]
    found = {"skilltrain": __version__, **about, "planners": by_slice, "rounds": rounds, "comparisons": differences}
    write_json(out / "metrics.json", found)
    _write_rows(out / "per_query.jsonl", [
        {"system": result.name, "query_id": query_id} | {**row}
        for result in results for query_id, row in result.per_query.items()
    ])  # fmt: skip
    _write_rows(out / "plans.jsonl", [
        {"system": name, "query_id": plan.task.query_id} | plan_json(plan, skills)
        for name, own in plans.items() for plan in own
    ])  # fmt: skip
    means = {name: {key: round(one.mean, 4) for key, one in own[0].means[name].items()} for name, own in slices.items()}
    return {"num_tasks": len(tasks), "num_skills": len(pool), "planners": means}


def _write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def plan_plans(config: PlansConfig) -> dict[str, Any]:
    """How much would be planned, and about what each chat model's first request for every task will take."""
    benchmark, _, pool = _opened(config)
    queries = [task.query for task in benchmark.tasks]
    costs = {planner.name: plan_cost(planner, queries) for planner in config.planners}
    return {"num_tasks": len(queries), "num_skills": len(pool), "asked": costs}


def finder(system: SystemConfig, skills: Sequence[Skill]) -> Find:
    """What finds skills for steps by `system`, whose models stay open. SkilltrainError: a model that is not there."""
    check_systems([system])
    opened: dict[str, Ranker] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        queries = [Query(f"step {number}", text, "step", "plan", "") for number, text in enumerate(texts)]
        if not queries:
            return []
        rankings = Cascade(queries, skills, keep, opened=opened).run(system)[-1].rankings
        return [rankings[query.query_id] for query in queries]

    return find


def _opened(config: PlansConfig) -> tuple[Benchmark, dict[str, Skill], list[Skill]]:
    """(the benchmark, all its skills by id, those that can be found). SkilltrainError: no steps, no pool, no gold."""
    benchmark = load_benchmark(config.benchmark, config.split)
    pool = list(benchmark.pool) if config.pool is None else read_pool(config.pool)
    if not pool:
        raise SkilltrainError("plans need a pool to find skills in", fix="give pool=…")
    if not any(task.steps for task in benchmark.tasks):
        raise SkilltrainError("its tasks have no steps", where=config.benchmark[0], fix="it needs plans.parquet")
    away = read_pool(config.held_out) if config.held_out else []
    away_ids = {skill.skill_id for skill in away}
    every = {skill.skill_id: skill for skill in [*pool, *away]}
    return check_pool(benchmark, every), every, [skill for skill in pool if skill.skill_id not in away_ids]


def _by_own_words(config: PlansConfig, tasks: Sequence[Task], find: Find) -> dict[str, list[list[str]]]:
    """query_id → what is found for each gold step's own words, as deep as for the steps of plans."""
    depth = max(planner.compose.candidates for planner in config.planners)
    rankings = iter(find([step.text for task in tasks for step in task.steps], depth))
    return {task.query.query_id: [[one for one, _ in next(rankings)] for _ in task.steps] for task in tasks}


def _values(
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    oracle: Mapping[str, Sequence[Sequence[str]]],
    skills: Mapping[str, Skill],
) -> dict[str, dict[str, float]]:
    """query_id → measure → value."""
    categories = {skill_id: skill.category for skill_id, skill in skills.items()}
    tokens = {one: estimate_tokens(f"{s.name} {s.description} {s.body}") for one, s in skills.items()}
    values: dict[str, dict[str, float]] = {}
    for task, plan in zip(tasks, plans, strict=True):
        found = [[skill_id for skill_id, _ in step.candidates] for step in plan.steps]
        outcome = Outcome(found, [step.skill_id for step in plan.steps])
        query_id = task.query.query_id
        values[query_id] = plan_values(task, outcome, oracle[query_id], categories, tokens)
    return values


def _slices(
    config: PlansConfig, tasks: Sequence[Task], result: SystemResult, skills: Mapping[str, Skill]
) -> tuple[SliceMeans, ...]:
    """All tasks, and slices by difficulty, category, and by whether the number of steps is right (the DA-conditioned
    table)."""
    labels = {}
    for task in tasks:
        query_id, num = task.query.query_id, len(task.steps)
        categories = tuple(dict.fromkeys(skills[s.skill_id].category or "none" for s in task.steps if s.skill_id))
        over = result.per_query[query_id]["steps"] - num
        count = "as many as gold" if not over else "too many" if over > 0 else "too few"
        difficulty = "easy" if num <= 2 else "medium" if num == 3 else "hard"
        labels[query_id] = {
            **task.labels, "difficulty": difficulty, "steps planned": count,
            **({"category": categories} if categories else {}),
        }  # fmt: skip
    every = means_by_slice([result], labels, config.scored, seed=config.seed, most_values=_MOST_VALUES)
    return tuple(part for part in every if part.label == ALL or len(part.query_ids) < len(tasks))


def _rounds(tasks: Sequence[Task], plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """What each round of Skill-Aware Decomposition came to: tasks that reached it, mean steps, DA, Jaccard of hints.

    A task that stopped before counts with its last round.
    """
    rows: list[dict[str, Any]] = []
    for number in range(max(len(plan.rounds) for plan in plans)):
        own = [plan.rounds[min(number, len(plan.rounds) - 1)] for plan in plans]
        pairs = list(zip(tasks, own, strict=True))
        counts = [(len(one.draft.texts), len(task.steps)) for task, one in pairs]
        alike = [one.jaccard for _, one in pairs if one.jaccard is not None] if number else []
        reached = sum(len(plan.rounds) > number for plan in plans)
        da = fmean(num == gold for num, gold in counts)
        jaccard = fmean(alike) if alike else None
        rows.append({"round": number, "reached": reached, "steps": fmean(n for n, _ in counts), "DA": da,
                     "jaccard": jaccard})  # fmt: skip
    return rows


def _comparisons(config: PlansConfig, results: Sequence[SystemResult]) -> list[tuple[Comparison, float]]:
    """Each planner beside the first by each measure that is defined, with Wilcoxon's one-sided p."""
    measures = [name for name in config.compare if any(name in row for row in results[0].per_query.values())]
    found: list[tuple[Comparison, float]] = []
    pairs = [(results[0].name, other.name) for other in results[1:]]
    query_ids = [one for one, row in results[0].per_query.items() if all(name in row for name in measures)]
    for made in compare(results, pairs, measures, query_ids, seed=config.seed):
        after, before = ({r.name: r for r in results}[name] for name in (made.system, made.baseline))
        difference = np.subtract(*(values_of(one, query_ids, [made.measure])[:, 0] for one in (after, before)))
        found.append((made, wilcoxon(difference, above=True)))
    return found


def _notes(plans: Mapping[str, Sequence[Plan]]) -> list[str]:
    """A sentence for each planner whose model gave no plan for some tasks, and for steps that nothing fits."""
    notes: list[str] = []
    for name, own in plans.items():
        if told := [plan.notes[0] for plan in own if plan.notes]:
            notes.append(f"{name}: rules planned {len(told)} of {len(own)} tasks, first: {told[0]}")
        if empty := sum(step.skill_id is None for plan in own for step in plan.steps):
            notes.append(f"{name}: nothing fits {empty} of {sum(len(plan.steps) for plan in own)} steps")
    return notes
