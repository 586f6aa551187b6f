"""Stage `evaluate`: systems side by side on a benchmark, with intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.skill_pool import open_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Slice, check_pool
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.metrics import DEFAULT_MEASURES, Measure, parse_measures, per_query
from skilltrain.evaluation.report.report import Report, ReportTexts, build_report, terminal_table, write_report
from skilltrain.evaluation.results import SystemResult
from skilltrain.files import read_json
from skilltrain.records import Skill
from skilltrain.routing.systems import SystemConfig, rank_with_systems, rankings_table
from skilltrain.tables import RANKINGS, write_table
from skilltrain.terminal import console


class EvaluateConfig(Config):
    """Rank a benchmark's queries with each system and report the measures."""

    stage: Literal["evaluate"]
    pool: InputPath | None = Field(default=None, description="SKILLS table, or whatever the stage pool reads")
    benchmark: InputPath = Field(description="folder in SkillRouter's format, or with queries and judgements tables")
    split: str | None = Field(default=None, description="score the queries of this split only; null for all")
    systems: tuple[SystemConfig, ...] = Field(default=(), description="what to compare")
    predictions: InputPath | None = Field(default=None, description="JSON {query_id: [skill_id, …]} to score as well")
    measures: tuple[str, ...] = Field(default=DEFAULT_MEASURES, description="e.g. Hit@1, nDCG@10, FC@10")
    depth: int = Field(default=50, ge=1, description="length of the rankings")
    seed: int = Field(default=0, description="seed of the bootstrap")
    out: Path = Field(description="folder to write: metrics.json, report.html, report.md, per-query values, RANKINGS")


def run_evaluate(config: EvaluateConfig, out: Path) -> dict[str, Any]:
    """Write the report and the rankings; the table goes to the terminal, the summary holds the means."""
    measures = parse_measures(config.measures)
    benchmark = load_benchmark(config.benchmark, config.split)
    if not config.systems and config.predictions is None:
        raise SkilltrainError("there is nothing to evaluate: give systems or predictions")
    skills = _skills(config, benchmark)
    if skills:
        benchmark = check_pool(benchmark, [skill.skill_id for skill in skills])
    queries = {task.query.query_id: task.query.text for task in benchmark.tasks}
    rankings: dict[str, Mapping[str, Sequence[str]]] = {}
    if config.systems:
        scored = rank_with_systems(config.systems, queries, skills, config.depth)
        tables = [rankings_table(found, name) for name, found in scored.items()]
        write_table(pa.concat_tables(tables), RANKINGS, out)
        rankings = {name: _ids(found) for name, found in scored.items()}
    if config.predictions is not None:
        name = config.predictions.stem
        if name in rankings:
            raise SkilltrainError(f"a system is called '{name}' as well", where=config.predictions, fix="rename it")
        rankings[name] = read_predictions(config.predictions)
    report = _report(config, benchmark, rankings, measures)
    names = {skill.skill_id: skill.name for skill in skills}
    gold = {task.query.query_id: task.relevance.gold for task in benchmark.tasks}
    write_report(report, out, ReportTexts(queries, names, gold))
    console.print(terminal_table(report))
    return {"num_queries": len(queries), "systems": {name: _means(report, name) for name in rankings}}


def _skills(config: EvaluateConfig, benchmark: Benchmark) -> list[Skill]:
    """The pool with the benchmark's own gold skills; these come last and never replace a skill of the pool."""
    if config.pool is None:
        if config.systems:
            raise SkilltrainError("systems need a pool to rank", fix="give pool=…")
        return []
    skills = open_pool(config.pool)
    known = {skill.skill_id for skill in skills}
    return skills + [skill for skill in benchmark.gold_skills if skill.skill_id not in known]


def read_predictions(path: Path) -> dict[str, list[str]]:
    """query_id → ranked skill ids, from a JSON object. Raises SkilltrainError for any other shape."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise SkilltrainError("predictions are an object {query_id: [skill_id, …]}", where=path)
    if not values:
        raise SkilltrainError("holds no prediction", where=path)
    for query_id, ranking in values.items():
        if not isinstance(ranking, list) or not all(isinstance(skill_id, str) for skill_id in ranking):
            raise SkilltrainError("predictions are lists of skill ids", where=f"{path}, query {query_id}")
    return values


def _ids(found: Mapping[str, Sequence[tuple[str, float]]]) -> dict[str, list[str]]:
    return {query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in found.items()}


def _report(
    config: EvaluateConfig,
    benchmark: Benchmark,
    rankings: Mapping[str, Mapping[str, Sequence[str]]],
    measures: Sequence[Measure],
) -> Report:
    relevances = {task.query.query_id: task.relevance for task in benchmark.tasks}
    slices: dict[str, Slice] = {task.query.query_id: task.slice for task in benchmark.tasks}
    results: list[SystemResult] = []
    for name, found in rankings.items():
        try:
            results.append(SystemResult(name, per_query(found, relevances, measures), found))
        except SkilltrainError as error:
            raise SkilltrainError(str(error), where=f"system {name}") from error
    return build_report(benchmark.name, results, slices, measures, config.seed)


def _means(report: Report, name: str) -> dict[str, float]:
    return {measure: round(value.mean, 4) for measure, value in report.summaries[name]["all"].items()}
