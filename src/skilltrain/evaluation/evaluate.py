"""Stage `evaluate`: systems side by side on a benchmark, with intervals; and predictions of others, scored alone."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from skilltrain.config import InputPath, InputPaths
from skilltrain.data.near_duplicates import copies_of
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analyse import (
    AnalysisConfig,
    Inputs,
    analyse_inputs,
    analyse_results,
    tell_unserved,
)
from skilltrain.evaluation.candidates import estimate_ranking
from skilltrain.evaluation.report import Report, build_report
from skilltrain.evaluation.write import terminal_table, write_report
from skilltrain.files import read_json
from skilltrain.metrics.benchmarks.benchmark import Benchmark, add_copies, check_pool, join_tiers
from skilltrain.metrics.benchmarks.load import load_benchmark, read_unserved
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import (
    COPIES,
    DEFAULT_MEASURES,
    Measure,
    MeasureNames,
    parse_measures,
    per_query,
    with_copies,
)
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, check_systems, run_systems
from skilltrain.retrieval.rankers import parts_of
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.stage import Stage, Summary
from skilltrain.tables import RANKINGS, write_table
from skilltrain.terminal import console, say
from skilltrain.version import __version__

PREDICTION_MEASURES = (*DEFAULT_MEASURES, "COMP@10", "Set-Compat")
Predicted = dict[str, dict[str, list[str]]]
"""File's name → query_id → ranked skill ids."""


class Evaluate(Stage):
    """Compare systems on a benchmark, with 95% intervals."""

    example = "--benchmark bench --pool runs/pool --encoder runs/encoder out=runs/report"
    result = "{num_queries} queries; look at {out}/report.html"

    stage: Literal["evaluate"]
    pool: InputPath | None = Field(
        default=None,
        description="SKILLS table, or whatever the stage pool reads; null: the benchmark's own, if any",
    )
    benchmark: InputPaths = Field(
        min_length=1,
        description="folder of a benchmark, published or ours; several are tiers: [data/easy, data/hard]",
    )
    split: str | None = Field(
        default=None, description="score the queries of this split only; null for all"
    )
    systems: tuple[SystemConfig, ...] = Field(default=(), description="what to compare")
    predictions: InputPaths = Field(
        default=(), description="JSON files {query_id: [skill_id, …]} to score"
    )
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool: adds `Hit@1 (copies)` …, where near-duplicates count as gold",
    )
    measures: MeasureNames = Field(
        default=DEFAULT_MEASURES, min_length=1, description="e.g. Hit@1, nDCG@10, FC@10, Set-Compat"
    )
    depth: int = Field(
        default=50, ge=1, description="length of the rankings, unless a measure looks further"
    )
    analysis: AnalysisConfig = Field(
        default=AnalysisConfig(), description="what to look at beside the measures"
    )
    out: Path = Field(
        description="folder to write: metrics.json, report.html, report.md, per-query values, RANKINGS"
    )

    @model_validator(mode="after")
    def _knows_copies(self) -> "Evaluate":
        if self.clusters is None and (
            asked := [name for name in self.measures if name.endswith(COPIES)]
        ):
            raise ValueError(
                f"measures: {asked[0]} counts near-duplicates of gold skills: give clusters=…"
            )
        return self

    @property
    def scored(self) -> tuple[Measure, ...]:
        """What every query is scored by: `measures`, with copies too where there are `clusters`."""
        measures = parse_measures(self.measures)
        return measures if self.clusters is None else with_copies(measures)

    @property
    def num_systems(self) -> int:
        """How many systems and files of predictions are compared."""
        return len(self.systems) + len(self.predictions)

    def run(self, out: Path) -> Summary:
        """Write the report and the rankings. The table goes to the terminal; the summary has the means."""
        benchmark, pools, predicted = _opened(self)
        check_systems(self.systems)  # before what an analysis takes
        by_id = {skill_id: skill for pool in pools for skill_id, skill in pool.items()}
        inputs = Inputs(self.systems, benchmark, by_id)
        analysis: dict[str, Any] = {**analyse_inputs(self.analysis, inputs)}
        unserved = read_unserved(self.analysis.unserved) if self.analysis.unserved else []
        stages, asked = _ranked(self, benchmark, pools, unserved)
        notes = [*benchmark.notes, *_select_notes(asked)]
        query_ids = [*benchmark.relevances]
        if unserved:
            last = {name: ranked[-1].rankings for name, ranked in stages.items()}
            analysis["unserved"] = told = tell_unserved(last, query_ids, unserved)
            notes += [
                f"{name}: its best score for a query is above that for one that no skill serves with a chance of {value} "
                f"(n = {len(query_ids)} and {len(unserved)})."
                for name, value in told.items()
            ]
        stages = {
            name: [stage.only(query_ids) for stage in ranked] for name, ranked in stages.items()
        }
        if stages:
            found = {stage.name: stage.rankings for ranked in stages.values() for stage in ranked}
            write_table(rankings_table(found), RANKINGS, out)
        rankings = {name: ranked[-1].skill_ids() for name, ranked in stages.items()} | predicted
        report = _report(self, benchmark, rankings, by_id, notes, _provenance(self, len(by_id)))
        report = replace(report, analysis=analysis)
        results = analyse_results(self.analysis, report, stages)
        report = replace(report, analysis=analysis | results)
        write_report(report, out)
        console.print(terminal_table(report, console.width))
        means = report.every.means.items()
        return {
            "num_queries": len(benchmark.tasks),
            "systems": {
                name: {measure: round(one.mean, 4) for measure, one in row.items()}
                for name, row in means
            },
            "seconds_a_query": {
                stage.name: round(stage.seconds, 6)
                for ranked in stages.values()
                for stage in ranked
            },
            "asked": asked,
        }

    def dry_run(self) -> Summary:
        """Count what would be ranked, and estimate the cost of chat models and embeddings servers."""
        benchmark, pools, _ = _opened(self)
        skills = [skill for pool in pools for skill in pool.values()]
        return estimate_ranking(self.systems, benchmark.queries, skills)


def score_predictions(config: Evaluate) -> Report:
    """The report of predictions, without models; with a pool their ids are checked against it.

    Raises SkilltrainError for predictions and benchmarks that do not fit together.
    """
    benchmark, _, predicted = _opened(config)
    return _report(config, benchmark, predicted, {}, benchmark.notes, {})


def _opened(config: Evaluate) -> tuple[Benchmark, list[dict[str, Skill]], Predicted]:
    """(the benchmark as each of its parts can be scored over its pool, these pools, predictions by their file's name).

    An empty pool limits nothing. Raises SkilltrainError for whatever can be known to be wrong before anything is
    ranked: nothing to score, no pool to rank, a gold skill that the pool lacks, predictions that do not fit.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    if not config.systems and not config.predictions:
        raise SkilltrainError(
            "nothing-to-score", "there is nothing to evaluate: give systems or predictions"
        )
    if config.systems and config.pool is None and not all(part.pool for part in benchmark.parts):
        raise SkilltrainError("missing-pool", "systems need a pool to rank", fix="give pool=…")
    if config.pool is None:
        pools = [{skill.skill_id: skill for skill in part.pool} for part in benchmark.parts]
    else:
        skills = read_pool(config.pool)
        pools = [part.with_gold(skills) for part in benchmark.parts]
    parts = zip(benchmark.parts, pools, strict=True)
    benchmark = join_tiers([check_pool(part, pool.keys()) if pool else part for part, pool in parts])
    by_id = {skill_id: skill for pool in pools for skill_id, skill in pool.items()}
    predicted: Predicted = {}
    for file in config.predictions:
        if file.stem in [*predicted, *(system.name for system in config.systems)]:
            raise SkilltrainError(
                "repeated-name",
                f"another system is called '{file.stem}' as well",
                where=file,
                fix="rename it",
            )
        predicted[file.stem] = _predictions(file, benchmark, by_id)
    if config.clusters is not None:
        if not by_id:
            raise SkilltrainError(
                "missing-pool",
                "copies are found by the skills' texts",
                where="clusters",
                fix="give pool=…",
            )
        relevances = [task.relevance for task in benchmark.tasks]
        wanted = (skill_id for one in relevances for skill_id in (*one.gold, *one.alternatives))
        benchmark = add_copies(benchmark, copies_of(wanted, by_id, config.clusters))
    return benchmark, pools, predicted


def _ranked(
    config: Evaluate,
    benchmark: Benchmark,
    pools: Sequence[Mapping[str, Skill]],
    unserved: Sequence[Query],
) -> tuple[dict[str, list[RankedStage]], dict[str, Mapping[str, Any]]]:
    """(system → what each of its rankers answers, the queries of each part over its pool; ranker → what it asked).

    The `unserved` queries are asked over the first pool. No Recall@100 is counted over rankings of 50.
    """
    found: dict[str, list[RankedStage]] = {}
    asked: dict[str, Mapping[str, Any]] = {}
    depth = max(config.depth, *(measure.cutoff for measure in config.scored))
    for part, pool in zip(benchmark.parts, pools, strict=True):
        queries = part.queries if found else [*part.queries, *unserved]
        ranked = run_systems(
            config.systems, queries, [*pool.values()], depth, config.analysis.num_timed
        )
        for system, stages in ranked.items():
            tier = f", {part.name}" if benchmark.tiers else ""
            asked |= {f"{stage.name}{tier}": stage.counts for stage in stages if stage.counts}
            before = found.get(system)
            found[system] = (
                [*stages] if before is None else [*map(RankedStage.joined, before, stages)]
            )
    return found, asked


def _predictions(file: Path, benchmark: Benchmark, pool: Container[str]) -> dict[str, list[str]]:
    """query_id → ranked skill ids, of the tasks that are scored, from a JSON object.

    Raises SkilltrainError, naming the query, for any other shape, an id that appears twice, a task that the benchmark
    does not hold and, where the pool is known, for a skill that it lacks; and where no task is scored. A task without a
    prediction gets a warning: it scores 0, for a system that fails to answer is not excused.
    """
    values = read_json(file)
    if not isinstance(values, dict) or not values:
        raise SkilltrainError(
            "invalid-predictions",
            "predictions are an object {query_id: [skill_id, …]}, with a query at least",
            where=file,
        )
    for query_id, ranking in values.items():
        where = f"{file}, query {query_id}"
        if not isinstance(ranking, list) or not all(
            isinstance(skill_id, str) and skill_id for skill_id in ranking
        ):
            raise SkilltrainError(
                "invalid-predictions", "a prediction is a list of skill ids", where=where
            )
        if len(set(ranking)) < len(ranking):
            raise SkilltrainError(
                "repeated-id",
                f"skill '{Counter(ranking).most_common(1)[0][0]}' appears twice",
                where=where,
            )
        if pool and (strange := [skill_id for skill_id in ranking if skill_id not in pool]):
            what = f"{len(strange)} of {len(ranking)} predicted skills are not in the pool, first '{strange[0]}'"
            raise SkilltrainError(
                "unknown-skill",
                what,
                where=where,
                fix="predict ids of this pool, or score without pool=…",
            )
    known = [*benchmark.relevances]
    if unknown := [
        query_id for query_id in values if query_id not in benchmark.unscored.union(known)
    ]:
        what = f"{len(unknown)} of {len(values)} predicted queries are not in the benchmark, first '{unknown[0]}'"
        raise SkilltrainError(
            "unknown-query", what, where=file, fix=f"its query ids look like '{known[0]}'"
        )
    if not (scored := {query_id: values[query_id] for query_id in known if query_id in values}):
        raise SkilltrainError(
            "nothing-to-score",
            "all its predictions are for queries that are not scored here",
            where=file,
        )
    if missing := [query_id for query_id in known if query_id not in scored]:
        count = f"{len(missing)} of {len(known)}"
        say(
            f"warning: {file}: no prediction for {count} queries, first '{missing[0]}'; they score 0"
        )
    return scored


def _report(
    config: Evaluate,
    benchmark: Benchmark,
    rankings: Mapping[str, Mapping[str, Sequence[str]]],
    skills: Mapping[str, Skill],
    notes: Sequence[str],
    provenance: Mapping[str, str],
) -> Report:
    rows = {
        name: per_query(found, benchmark.relevances, config.scored)
        for name, found in rankings.items()
    }
    results = [
        SystemResult(name, rows[name], found, benchmark.clusters)
        for name, found in rankings.items()
    ]
    return build_report(benchmark, results, config.scored, skills, notes, provenance)


def _provenance(config: Evaluate, num_skills: int) -> dict[str, str]:
    """What was evaluated, and when; folders by their name, so that a report is the same wherever it is made."""
    pool = "of the benchmark" if config.pool is None else config.pool.resolve().name
    split = f", split {config.split}" if config.split else ""
    found = {
        "Benchmark": " + ".join(path.resolve().name for path in config.benchmark) + split,
        "Pool": f"{pool}, {num_skills:,} skills",
    }
    for system in config.systems:
        models = [
            part.server.model if part.server else part.model_source
            for part in parts_of(system.rankers)
        ]
        names = [Path(name).name if Path(name).exists() else name for name in models if name]
        if names:
            found[f"System {system.name}"] = ", ".join(names)
    return found | {"Made": f"{date.today().isoformat()} with skilltrain {__version__}"}


def _select_notes(asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What chat models left unanswered, and what their filters accepted."""
    notes: list[str] = []
    for name, counts in asked.items():
        if num := counts.get("num_unusable"):
            why = ", ".join(f"{kind} {count}" for kind, count in counts["unusable"].items())
            notes.append(
                f"{name}: the chat model gave nothing of use for {num} of {counts['num_asked']} queries ({why}); "
                "there it went on without the model."
            )
        for which, (num, num_seen) in counts.get("accepted", {}).items():
            if num_seen:
                notes.append(
                    f"{name}: {which} accepted {num} of {num_seen} skills ({num / num_seen:.1%})."
                )
    return notes
