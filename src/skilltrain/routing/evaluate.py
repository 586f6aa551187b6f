"""Stage `evaluate`: systems side by side on a benchmark, with intervals; and predictions of others, scored alone."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from skilltrain import __version__
from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.near_duplicates import copies_of
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis import Analysis
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, check_pool, joined, knowing_copies
from skilltrain.evaluation.benchmarks.load import load_benchmark, read_unserved
from skilltrain.evaluation.bootstrap import Interval
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import (
    COPIES,
    DEFAULT_MEASURES,
    Measure,
    MeasureNames,
    parse_measures,
    per_query,
    with_copies,
)
from skilltrain.evaluation.predictions import read_predictions, scored_predictions
from skilltrain.files import write_json
from skilltrain.records import Query, Skill
from skilltrain.report.evaluation import About, Report, build_report
from skilltrain.report.terminal import terminal_table
from skilltrain.report.write import write_per_query, write_report
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, rankings_table, run_systems
from skilltrain.retrieval.rankers import AskingConfig, parts_of
from skilltrain.routing.analyse import AnalysisConfig, analyse_inputs, analyse_results, tell_unserved
from skilltrain.routing.candidates import plan_ranking
from skilltrain.tables import RANKINGS, write_table
from skilltrain.terminal import console

PREDICTION_MEASURES = (*DEFAULT_MEASURES, "COMP@10", "Set-Compat")


class EvaluateConfig(Config):
    """Rank a benchmark's queries with each system and report the measures."""

    stage: Literal["evaluate"]
    pool: InputPath | None = Field(
        default=None, description="SKILLS table, or whatever the stage pool reads; null: the benchmark's own, if any"
    )
    benchmark: tuple[InputPath, ...] = Field(
        min_length=1,
        description="folder of a benchmark, in a published format or in our tables; several are tiers, each ranked "
        "over its own pool and scored together ([data/easy, data/hard])",
    )
    split: str | None = Field(default=None, description="score the queries of this split only; null for all")
    systems: tuple[SystemConfig, ...] = Field(default=(), description="what to compare")
    predictions: tuple[InputPath, ...] = Field(
        default=(), description="JSON files {query_id: [skill_id, …]} to score as well"
    )
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool (stage clusters): each measure stands a second time, as `Hit@1 (copies)`, "
        "where near-duplicates of a gold skill count as gold; null: strict measures alone",
    )
    measures: MeasureNames = Field(
        default=DEFAULT_MEASURES, min_length=1, description="e.g. Hit@1, nDCG@10, FC@10, Set-Compat"
    )
    depth: int = Field(
        default=50, ge=1, description="length of the rankings; they are longer where a measure looks further"
    )
    analysis: AnalysisConfig = Field(default=AnalysisConfig(), description="what to look at beside the measures")
    seed: Seed = Field(default=0, description="seed of the bootstrap")
    out: Path = Field(description="folder to write: metrics.json, report.html, report.md, per-query values, RANKINGS")

    @field_validator("benchmark", "predictions", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A single file as a list of one."""
        return () if value is None else value if isinstance(value, list | tuple) else (value,)

    @model_validator(mode="after")
    def _knows_copies(self) -> "EvaluateConfig":
        if self.clusters is None and (asked := [name for name in self.measures if name.endswith(COPIES)]):
            raise ValueError(f"measures: {asked[0]} counts near-duplicates of gold skills: give clusters=…")
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

    @property
    def ranked_depth(self) -> int:
        """How many skills of a query are ranked, so that no Recall@100 is counted over 50."""
        return max(self.depth, *(measure.cutoff for measure in self.scored))


def run_evaluate(config: EvaluateConfig, out: Path) -> dict[str, Any]:
    """Write the report and the rankings; the table goes to the terminal, the summary holds the means."""
    benchmark, pools = _opened(config)
    by_id = {skill.skill_id: skill for skills in pools for skill in skills}
    predicted = _predicted(config, benchmark, by_id)
    inputs = analyse_inputs(config.analysis, config.systems, benchmark, by_id)
    unserved = read_unserved(config.analysis.unserved) if config.analysis.unserved else []
    stages, asked = _ranked(config, benchmark, pools, unserved)
    query_ids = [task.query.query_id for task in benchmark.tasks]
    last = {name: ranked[-1].rankings for name, ranked in stages.items()}
    told = tell_unserved(last, query_ids, unserved, config.seed) if unserved else {}
    stages = {name: tuple(_of(query_ids, stage) for stage in ranked) for name, ranked in stages.items()}
    if stages:
        write_table(rankings_table(chain(*stages.values())), RANKINGS, out)
    rankings = {name: _ids(ranked[-1]) for name, ranked in stages.items()} | predicted
    results = _results(rankings, benchmark, config.scored)
    analysis = replace(analyse_results(inputs, results, benchmark, stages, config.seed), unserved=told)
    notes = (*benchmark.notes, *_select_notes(asked), *_unserved_notes(told, len(unserved)))
    about = About(notes, _provenance(config, len(by_id)))
    report = build_report(benchmark, results, config.scored, config.seed, by_id, analysis, about)
    write_report(report, out)
    console.print(terminal_table(report, console.width))
    means = report.every.means.items()
    return {
        "num_queries": len(benchmark.tasks),
        "systems": {name: {measure: round(one.mean, 4) for measure, one in row.items()} for name, row in means},
        "seconds_a_query": {stage.name: round(stage.seconds, 6) for ranked in stages.values() for stage in ranked},
        "asked": asked,
    }


def plan_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """How much would be ranked, and about what chat models and embeddings servers would take (`plan_ranking`)."""
    benchmark, pools = _opened(config)
    return plan_ranking(config.systems, [task.query for task in benchmark.tasks], list(chain.from_iterable(pools)))


def score_predictions(config: EvaluateConfig) -> Report:
    """The report of one predictions file, without models; with a pool its ids are checked against it.

    Raises SkilltrainError for predictions and benchmarks that do not fit together.
    """
    if "measures" not in config.model_fields_set:
        config = config.model_copy(update={"measures": PREDICTION_MEASURES})
    benchmark, pools = _opened(config)
    skill_ids = {skill.skill_id for skills in pools for skill in skills}
    results = _results(_predicted(config, benchmark, skill_ids), benchmark, config.scored)
    return build_report(benchmark, results, config.scored, config.seed, {}, Analysis(), About(benchmark.notes))


def write_scores(report: Report, file: Path) -> None:
    """Write the means of the report's one system as JSON, and the values of each query beside it.

    `{"all" | "single" | "multi": {measure: {"mean", "low", "high", "n"}}}`; a section without queries is left out.
    """
    write_json(file, report.sections(report.systems[0]))
    write_per_query(report, file.with_name(f"{file.stem}.per_query.jsonl"))


def skills_of(pool: Path | None, benchmark: Benchmark) -> list[Skill]:
    """The pool with the benchmark's own gold skills, which come last and never replace a skill of the pool.

    Without a pool, the one that the benchmark was published with.
    """
    if pool is None:
        return list(benchmark.pool)
    skills = read_pool(pool)
    known = {skill.skill_id for skill in skills}
    return skills + [skill for skill in benchmark.gold_skills if skill.skill_id not in known]


def _opened(config: EvaluateConfig) -> tuple[Benchmark, list[list[Skill]]]:
    """The benchmark as each of its parts can be scored over its pool, and these pools; an empty one limits nothing.

    Raises SkilltrainError where there is nothing to score, no pool to rank, or a gold skill that the pool lacks.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    if not config.systems and not config.predictions:
        raise SkilltrainError("there is nothing to evaluate: give systems or predictions")
    if config.systems and config.pool is None and not all(part.pool for part in benchmark.parts):
        raise SkilltrainError("systems need a pool to rank", fix="give pool=…")
    pools = [skills_of(config.pool, part) for part in benchmark.parts]
    parts = zip(benchmark.parts, pools, strict=True)
    checked = [check_pool(part, {skill.skill_id for skill in pool}) if pool else part for part, pool in parts]
    benchmark = joined(checked)
    if config.clusters is None:
        return benchmark, pools
    if not any(pools):
        raise SkilltrainError("copies are found by the skills' texts", where="clusters", fix="give pool=…")
    by_id = {skill.skill_id: skill for pool in pools for skill in pool}
    relevances = [task.relevance for task in benchmark.tasks]
    wanted = (skill_id for one in relevances for skill_id in (*one.gold, *one.alternatives))
    return knowing_copies(benchmark, copies_of(wanted, by_id, config.clusters)), pools


def _ranked(
    config: EvaluateConfig, benchmark: Benchmark, pools: Sequence[Sequence[Skill]], unserved: Sequence[Query]
) -> tuple[dict[str, tuple[RankedStage, ...]], dict[str, Mapping[str, Any]]]:
    """(system → what each of its rankers answers, the queries of each part over its pool; ranker → what it asked).

    The `unserved` queries are asked over the first pool.
    """
    found: dict[str, tuple[RankedStage, ...]] = {}
    asked: dict[str, Mapping[str, Any]] = {}
    for part, pool in zip(benchmark.parts, pools, strict=True):
        queries = [*(task.query for task in part.tasks), *(() if found else unserved)]
        ranked = run_systems(config.systems, queries, pool, config.ranked_depth, config.analysis.num_timed)
        for system, stages in ranked.items():
            tier = f", {part.name}" if benchmark.tiers else ""
            asked |= {f"{stage.name}{tier}": stage.counts for stage in stages if stage.counts}
            before = found.get(system)
            found[system] = stages if before is None else tuple(map(_with, before, stages))
    return found, asked


def _of(query_ids: Iterable[str], stage: RankedStage) -> RankedStage:
    return replace(stage, rankings={query_id: stage.rankings[query_id] for query_id in query_ids})


def _with(one: RankedStage, other: RankedStage) -> RankedStage:
    """One ranker's answers over two pools; seconds are those of a query, over both."""
    seconds = one.seconds * len(one.rankings) + other.seconds * len(other.rankings)
    rankings = one.rankings | other.rankings
    alone, gpu_bytes = one.alone + other.alone, max(one.gpu_bytes, other.gpu_bytes)
    return replace(one, rankings=rankings, seconds=seconds / len(rankings), alone=alone, gpu_bytes=gpu_bytes)


def _predicted(
    config: EvaluateConfig, benchmark: Benchmark, skill_ids: Collection[str]
) -> dict[str, dict[str, list[str]]]:
    """The rankings of the predictions files, each called by its file's name."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in config.predictions:
        if file.stem in found or any(system.name == file.stem for system in config.systems):
            raise SkilltrainError(f"another system is called '{file.stem}' as well", where=file, fix="rename it")
        found[file.stem] = scored_predictions(read_predictions(file), benchmark, skill_ids, file)
    return found


def _ids(stage: RankedStage) -> dict[str, list[str]]:
    return {query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in stage.rankings.items()}


def _results(
    rankings: Mapping[str, Mapping[str, Sequence[str]]], benchmark: Benchmark, measures: Sequence[Measure]
) -> list[SystemResult]:
    relevances = {task.query.query_id: task.relevance for task in benchmark.tasks}
    return [SystemResult(name, per_query(found, relevances, measures), found) for name, found in rankings.items()]


def _provenance(config: EvaluateConfig, num_skills: int) -> dict[str, str]:
    """What was evaluated, and when; folders by their name, so that a report is the same wherever it is made."""
    pool = "of the benchmark" if config.pool is None else config.pool.resolve().name
    split = f", split {config.split}" if config.split else ""
    systems = {f"System {system.name}": ", ".join(_models_of(system)) for system in config.systems}
    return {
        "Benchmark": " + ".join(path.resolve().name for path in config.benchmark) + split,
        "Pool": f"{pool}, {num_skills:,} skills",
        **{name: models for name, models in systems.items() if models},
        "Made": f"{date.today().isoformat()} with skilltrain {__version__}",
    }


def _models_of(system: SystemConfig) -> list[str]:
    """The models that a system's settings name, in their order; folders by their name."""
    parts = (part.llm if isinstance(part, AskingConfig) else part for part in parts_of(system.rankers))
    names = [getattr(part, key, None) for part in parts for key in ("source", "model")]
    return [Path(name).name if Path(name).exists() else name for name in names if name]


def _unserved_notes(told: Mapping[str, Interval], num_unserved: int) -> list[str]:
    return [
        f"{name}: its best score for a query is above that for one that no skill serves with a chance of {value} "
        f"(n = {value.n - num_unserved} and {num_unserved})."
        for name, value in told.items()
    ]


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
                notes.append(f"{name}: {which} accepted {num} of {num_seen} skills ({num / num_seen:.1%}).")
    return notes
