"""Stage `evaluate`: systems side by side on a benchmark, with intervals; and predictions of others, scored alone."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, check_pool, joined
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import DEFAULT_MEASURES, Measure, MeasureNames, parse_measures, per_query
from skilltrain.files import write_json
from skilltrain.records import Rankings, Skill
from skilltrain.report.evaluation import About, Report, build_report
from skilltrain.report.terminal import terminal_table
from skilltrain.report.write import write_per_query, write_report
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, rankings_table, run_systems
from skilltrain.routing.analyse import AnalysisConfig, analyse_inputs, analyse_results
from skilltrain.routing.predictions import PREDICTION_MEASURES, read_predictions, scored_predictions
from skilltrain.tables import RANKINGS, write_table
from skilltrain.terminal import console
from skilltrain.version import __version__

Ranked = Mapping[str, Mapping[str, Sequence[str]]]
"""System → query_id → skill ids, best first."""


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
    measures: MeasureNames = Field(
        default=DEFAULT_MEASURES, min_length=1, description="e.g. Hit@1, nDCG@10, FC@10, Set-Compat"
    )
    depth: int = Field(
        default=50, ge=1, description="length of the rankings; they are longer where a measure looks further"
    )
    analysis: AnalysisConfig = Field(default=AnalysisConfig(), description="what to look at beside the measures")
    seed: int = Field(default=0, description="seed of the bootstrap")
    out: Path = Field(description="folder to write: metrics.json, report.html, report.md, per-query values, RANKINGS")

    @field_validator("benchmark", "predictions", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A single file as a list of one."""
        return () if value is None else value if isinstance(value, list | tuple) else (value,)

    @property
    def ranked_depth(self) -> int:
        """How many skills of a query are ranked, so that no Recall@100 is counted over 50."""
        return max(self.depth, *(measure.cutoff or 0 for measure in parse_measures(self.measures)))


def run_evaluate(config: EvaluateConfig, out: Path) -> dict[str, Any]:
    """Write the report and the rankings; the table goes to the terminal, the summary holds the means."""
    measures = parse_measures(config.measures)
    benchmark = load_benchmark(config.benchmark, config.split)
    check_use(config, benchmark)
    pools = [skills_of(config.pool, part) for part in benchmark.parts]
    by_id = {skill.skill_id: skill for skills in pools for skill in skills}
    benchmark = _within(benchmark, pools)
    predicted = _predicted(config, benchmark, by_id)
    inputs = analyse_inputs(config.analysis, config.systems, benchmark, by_id)
    stages = _ranked(config, benchmark, pools)
    if stages:
        write_table(rankings_table(chain(*stages.values())), RANKINGS, out)
    rankings = {name: _ids(ranked[-1].rankings) for name, ranked in stages.items()} | predicted
    results = _results(rankings, benchmark, measures)
    analysis = analyse_results(inputs, results, benchmark, stages)
    about = About((*benchmark.notes, *_select_notes(stages)), _provenance(config, len(by_id)))
    report = build_report(benchmark, results, measures, config.seed, by_id, analysis, about)
    write_report(report, out)
    console.print(terminal_table(report, console.width))
    return {
        "num_queries": len(benchmark.tasks),
        "systems": {name: _means(report, name) for name in rankings},
        "seconds_a_query": {stage.name: round(stage.seconds, 6) for ranked in stages.values() for stage in ranked},
        "asked": {stage.name: stage.counts for ranked in stages.values() for stage in ranked if stage.counts},
    }


def check_use(config: EvaluateConfig, benchmark: Benchmark) -> None:
    """Raise SkilltrainError where there is nothing to score, or no pool to rank."""
    if not config.systems and not config.predictions:
        raise SkilltrainError("there is nothing to evaluate: give systems or predictions")
    if config.systems and config.pool is None and not all(part.pool for part in benchmark.parts):
        raise SkilltrainError("systems need a pool to rank", fix="give pool=…")


def score_predictions(config: EvaluateConfig) -> Report:
    """The report of one predictions file, without models; with a pool its ids are checked against it.

    Raises SkilltrainError for predictions and benchmarks that do not fit together.
    """
    given = "measures" in config.model_fields_set
    measures = parse_measures(config.measures if given else PREDICTION_MEASURES)
    benchmark = load_benchmark(config.benchmark, config.split)
    pools = [skills_of(config.pool, part) for part in benchmark.parts]
    benchmark, skill_ids = _within(benchmark, pools), {skill.skill_id for skills in pools for skill in skills}
    results = _results(_predicted(config, benchmark, skill_ids), benchmark, measures)
    return build_report(benchmark, results, measures, config.seed, {}, Analysis(), About(benchmark.notes))


def write_scores(report: Report, file: Path) -> None:
    """Write the means of the report's one system as JSON, and the values of each query beside it.

    `{"all" | "single" | "multi": {measure: {"mean", "low", "high", "n"}}}`; a section without queries is left out.
    """
    write_json(file, report.predictions_json())
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


def _within(benchmark: Benchmark, pools: Sequence[Sequence[Skill]]) -> Benchmark:
    """`benchmark` as each of its parts can be scored over its pool; a part without a pool stays as it is."""
    parts = zip(benchmark.parts, pools, strict=True)
    return joined([check_pool(part, {skill.skill_id for skill in pool}) if pool else part for part, pool in parts])


def _ranked(
    config: EvaluateConfig, benchmark: Benchmark, pools: Sequence[Sequence[Skill]]
) -> dict[str, tuple[RankedStage, ...]]:
    """What each ranker of each system answers, the queries of each part over its pool."""
    found = [
        run_systems(
            config.systems, [task.query for task in part.tasks], pool, config.ranked_depth, config.analysis.num_timed
        )
        for part, pool in zip(benchmark.parts, pools, strict=True)
    ]
    return {
        system: tuple(map(_one_stage, zip(*(stages[system] for stages in found), strict=True))) for system in found[0]
    }


def _one_stage(stages: Sequence[RankedStage]) -> RankedStage:
    """One ranker's answers over several pools as one; seconds are those of a query, over all of them."""
    if len(stages) == 1:
        return stages[0]
    rankings = {query_id: ranking for stage in stages for query_id, ranking in stage.rankings.items()}
    seconds = sum(stage.seconds * len(stage.rankings) for stage in stages) / len(rankings)
    alone = tuple(chain.from_iterable(stage.alone for stage in stages))
    counts = reduce(_summed, (stage.counts for stage in stages))
    return replace(stages[0], rankings=rankings, seconds=seconds, alone=alone, counts=counts)


def _summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Counts by name, added; those in maps of their own too."""
    found = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            found[name] = _summed(found.get(name, {}), value)
        else:
            both = (found.get(name, 0), value)
            found[name] = None if None in both else sum(both)  # a cost of which a part is not known
    return found


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


def _ids(rankings: Rankings) -> dict[str, list[str]]:
    return {query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in rankings.items()}


def _results(rankings: Ranked, benchmark: Benchmark, measures: Sequence[Measure]) -> list[SystemResult]:
    relevances = {task.query.query_id: task.relevance for task in benchmark.tasks}
    results: list[SystemResult] = []
    for name, found in rankings.items():
        try:
            results.append(SystemResult(name, per_query(found, relevances, measures), found))
        except SkilltrainError as error:
            raise SkilltrainError(str(error), where=f"system {name}") from error
    return results


def _provenance(config: EvaluateConfig, num_skills: int) -> dict[str, str]:
    """What was evaluated, and when; folders by their name, so that a report is the same wherever it is made."""
    pool = "of the benchmark" if config.pool is None else config.pool.resolve().name
    split = f", split {config.split}" if config.split else ""
    systems = {f"System {system.name}": ", ".join(_models_of(system.model_dump())) for system in config.systems}
    return {
        "Benchmark": " + ".join(path.resolve().name for path in config.benchmark) + split,
        "Pool": f"{pool}, {num_skills:,} skills",
        **{name: models for name, models in systems.items() if models},
        "Made": f"{date.today().isoformat()} with skilltrain {__version__}",
    }


def _models_of(settings: Any) -> list[str]:
    """The models that a system's settings name, in their order."""
    if isinstance(settings, list | tuple):
        return [name for value in settings for name in _models_of(value)]
    if not isinstance(settings, dict):
        return []
    named = [settings[key] for key in ("source", "model") if isinstance(settings.get(key), str)]
    names = [Path(name).name if Path(name).exists() else name for name in named]
    return names + [name for value in settings.values() for name in _models_of(value)]


def _select_notes(stages: Mapping[str, Sequence[RankedStage]]) -> list[str]:
    """A sentence for each chat model that did not choose for every query."""
    notes: list[str] = []
    for stage in chain(*stages.values()):
        if num := stage.counts.get("num_unusable"):
            why = ", ".join(f"{kind} {count}" for kind, count in stage.counts["unusable"].items())
            notes.append(
                f"{stage.name}: the chat model chose nothing for {num} of {stage.counts['num_asked']} queries ({why}); "
                "there its figures are those of the stage before."
            )
    return notes


def _means(report: Report, name: str) -> dict[str, float]:
    return {measure: round(value.mean, 4) for measure, value in report.every.means[name].items()}
