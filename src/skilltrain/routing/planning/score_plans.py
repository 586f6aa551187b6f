"""The stage `plans`: plan a benchmark's compound tasks in one or several ways, and score the plans."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import to_jsonable_python

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Labels, Task, check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.comparison import SystemResult, compare
from skilltrain.evaluation.plan_measures import MEANINGS, measure_names, plan_values
from skilltrain.evaluation.slices import SliceMeans, means_by_slice, shown
from skilltrain.files import write_json, write_jsonl, write_text
from skilltrain.llm import LLM, estimate_cost
from skilltrain.llm.answers import estimate_tokens
from skilltrain.records import Query, Ranker, Ranking, Skill
from skilltrain.report.page import markdown
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems
from skilltrain.retrieval.select import Ask, questions_of
from skilltrain.routing.planning.compose import Plan, plan_json
from skilltrain.routing.planning.decompose import ModelConfig
from skilltrain.routing.planning.planner import Find, Planner, PlannerConfig, find_each
from skilltrain.version import __version__

_SLICED = ("DA", "CatR@1", "CatR@10", "Skill R@10", "Chosen")
_MOST_VALUES = 50  # of a label: categories are many


class PlansConfig(Config):
    """Plan compound tasks and score the plans against the gold steps and skills."""

    stage: Literal["plans"]
    benchmark: InputPath = Field(
        description="folder of a benchmark whose tasks have steps: ours, LiveMCPBench"
    )
    split: str | None = Field(
        default=None, description="score the queries of this split only; null for all"
    )
    pool: InputPath | None = Field(
        default=None, description="the skills to find; null: the benchmark's own"
    )
    held_out: InputPath | None = Field(
        default=None, description="skills not to be found, only their categories count"
    )
    system: SystemConfig = Field(
        description="what finds skills for a step, which is asked like a query"
    )
    planners: tuple[PlannerConfig, ...] = Field(
        default=(PlannerConfig(name="rules"),),
        min_length=1,
        description="ways to plan; the first is the baseline",
    )
    compare: tuple[str, ...] = Field(
        default=("DA", "DA±1", "CatR@1", "Skill R@10"),
        description="measures by which the others are compared to it",
    )
    out: Path = Field(
        description="folder to write: metrics.json, report.md, per_query.jsonl, plans.jsonl"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "PlansConfig":
        if len({planner.name for planner in self.planners}) < len(self.planners):
            raise ValueError("two planners have the same name")
        if unknown := sorted({*self.compare} - {*self.scored}):
            raise ValueError(
                f"compare: unknown measure '{unknown[0]}'; measures are {', '.join(self.scored)}"
            )
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
    known = {task.query.query_id: task for task in tasks}
    plans = {
        one.name: Planner(one, skills, find, known).plan(benchmark.queries)
        for one in config.planners
    }
    results = _results(config, tasks, plans, find, skills)
    slices: dict[str, tuple[SliceMeans, ...]] = {}
    for one in results:
        labels = _labels(tasks, one, skills)
        slices[one.name] = shown(
            means_by_slice([one], labels, config.scored, most_values=_MOST_VALUES)
        )
    rounds = {name: _rounds(tasks, own) for name, own in plans.items()}
    pairs = [(results[0].name, other.name) for other in results[1:]]
    compared = compare(results, pairs, config.compare)
    notes = [*benchmark.notes, *_notes(plans)]
    about = {
        "benchmark": benchmark.name,
        "num_tasks": len(tasks),
        "num_skills": len(pool),
        "notes": notes,
    }
    values = {
        "slices": slices,
        "rounds": rounds,
        "comparisons": compared,
        "measures": config.scored,
    }
    write_text(
        out / "report.md", markdown("plans", **about, **values, meanings=MEANINGS, sliced=_SLICED)
    )
    by_slice = {
        name: [
            {"label": s.label, "value": s.value, "n": len(s.query_ids), "means": s.means[name]}
            for s in own
        ]
        for name, own in slices.items()
    }
    found = {
        "skilltrain": __version__,
        **about,
        "planners": by_slice,
        "rounds": rounds,
        "comparisons": compared,
    }
    write_json(out / "metrics.json", to_jsonable_python(found))
    scores = (
        (one.name, query_id, row) for one in results for query_id, row in one.per_query.items()
    )
    made = (
        (name, plan.task.query_id, plan_json(plan)) for name, own in plans.items() for plan in own
    )
    for file, rows in {"per_query.jsonl": scores, "plans.jsonl": made}.items():
        write_jsonl(
            out / file,
            ({"system": name, "query_id": query_id, **row} for name, query_id, row in rows),
        )
    means = {
        name: {key: round(one.mean, 4) for key, one in own[0].means[name].items()}
        for name, own in slices.items()
    }
    return {"num_tasks": len(tasks), "num_skills": len(pool), "planners": means}


def plan_plans(config: PlansConfig) -> dict[str, Any]:
    """How much would be planned, and about what each chat model's first request for every task will take."""
    benchmark, _, pool = _opened(config)
    asks = [Ask(task.query) for task in benchmark.tasks]
    costs: dict[str, Any] = {}
    for planner in config.planners:
        if isinstance(model := planner.decomposer, ModelConfig):
            costs[planner.name] = estimate_cost(
                questions_of(model, LLM(model.llm), model.prompt, asks)
            )
    return {"num_tasks": len(asks), "num_skills": len(pool), "asked": costs}


def finder(system: SystemConfig, skills: Sequence[Skill]) -> Find:
    """What finds skills for steps by `system`, whose models stay open."""
    opened: dict[str, Ranker] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        queries = [
            Query(f"step {number}", text, "step", "plan", "") for number, text in enumerate(texts)
        ]
        rankings = Cascade(queries, skills, keep, opened).run(system)[-1].rankings
        return [rankings[query.query_id] for query in queries]

    return find


def _opened(config: PlansConfig) -> tuple[Benchmark, dict[str, Skill], list[Skill]]:
    """(the benchmark, all its skills by id, those that can be found).

    Raises SkilltrainError for a model that is not there, and where there are no steps, no pool or no gold.
    """
    check_systems([config.system])
    benchmark = load_benchmark(config.benchmark, config.split)
    pool = list(benchmark.pool) if config.pool is None else read_pool(config.pool)
    if not pool:
        raise SkilltrainError("plans need a pool to find skills in", fix="give pool=…")
    if not any(task.steps for task in benchmark.tasks):
        raise SkilltrainError(
            "its tasks have no steps", where=config.benchmark, fix="it needs plans.parquet"
        )
    away = {
        skill.skill_id: skill for skill in (read_pool(config.held_out) if config.held_out else ())
    }
    every = {skill.skill_id: skill for skill in pool} | away
    return (
        check_pool(benchmark, every),
        every,
        [skill for skill in pool if skill.skill_id not in away],
    )


def _results(
    config: PlansConfig,
    tasks: Sequence[Task],
    plans: Mapping[str, Sequence[Plan]],
    find: Find,
    skills: Mapping[str, Skill],
) -> list[SystemResult]:
    """The measures of every plan; the oracle looks as deep for each gold step's own words as plans do for theirs."""
    depth = max(planner.compose.candidates for planner in config.planners)
    own_words = find_each(find, [[step.text for step in task.steps] for task in tasks], depth)
    tokens = {
        one: estimate_tokens(f"{s.name} {s.description} {s.body}") for one, s in skills.items()
    }
    results: list[SystemResult] = []
    for name, own in plans.items():
        values: dict[str, dict[str, float]] = {}
        for task, plan, by_words in zip(tasks, own, own_words, strict=True):
            found = [[skill_id for skill_id, _ in step.candidates] for step in plan.steps]
            oracle = [[skill_id for skill_id, _ in ranking] for ranking in by_words]
            chosen = [step.skill_id for step in plan.steps]
            values[task.query.query_id] = plan_values(task, found, chosen, oracle, skills, tokens)
        results.append(SystemResult(name, values, {}))
    return results


def _labels(
    tasks: Sequence[Task], result: SystemResult, skills: Mapping[str, Skill]
) -> dict[str, Labels]:
    """query_id → difficulty, categories, and whether the number of steps is right (the DA-conditioned table)."""
    labels: dict[str, Labels] = {}
    for task in tasks:
        query_id, num = task.query.query_id, len(task.steps)
        over = result.per_query[query_id]["steps"] - num
        count = "as many as gold" if not over else "too many" if over > 0 else "too few"
        difficulty = "easy" if num <= 2 else "medium" if num == 3 else "hard"
        categories = tuple(
            dict.fromkeys(skills[s.skill_id].category or "none" for s in task.steps if s.skill_id)
        )
        of_gold = {"category": categories} if categories else {}
        labels[query_id] = {
            **task.labels,
            "difficulty": difficulty,
            "steps planned": count,
            **of_gold,
        }
    return labels


def _rounds(tasks: Sequence[Task], plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """What each round of Skill-Aware Decomposition came to: tasks that reached it, mean steps, DA, Jaccard of hints.

    A task that stopped before counts with its last round.
    """
    rows: list[dict[str, Any]] = []
    for number in range(max(len(plan.rounds) for plan in plans)):
        own = [plan.rounds[min(number, len(plan.rounds) - 1)] for plan in plans]
        counts = [len(one.texts) for one in own]
        alike = [one.jaccard for one in own if one.jaccard is not None] if number else []
        rows.append(
            {
                "round": number,
                "reached": sum(len(plan.rounds) > number for plan in plans),
                "steps": fmean(counts),
                "DA": fmean(
                    num == len(task.steps) for num, task in zip(counts, tasks, strict=True)
                ),
                "jaccard": fmean(alike) if alike else None,
            }
        )
    return rows


def _notes(plans: Mapping[str, Sequence[Plan]]) -> list[str]:
    """A sentence for each planner whose model gave no plan for some tasks, and for steps that nothing fits."""
    notes: list[str] = []
    for name, own in plans.items():
        if told := [plan.notes[0] for plan in own if plan.notes]:
            notes.append(f"{name}: rules planned {len(told)} of {len(own)} tasks, first: {told[0]}")
        steps = [step for plan in own for step in plan.steps]
        if empty := sum(step.skill_id is None for step in steps):
            notes.append(f"{name}: nothing fits {empty} of {len(steps)} steps")
    return notes
