"""Stage `evaluate`: compare systems, and predictions of other software, on a benchmark.

Notes:
    - A task without a prediction scores 0, because a system that fails to answer is not excused.
    - Every tier of a benchmark is ranked over one pool. Predictions can also be scored without one.
    - Rankings are at least as long as the largest cutoff of a measure.
    - Counts of a chat model are named `RANKER`, or `RANKER, TIER` if there are tiers.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from skilltrain.config import InputPath, InputPaths, Seed
from skilltrain.data.near_duplicates import copies_of
from skilltrain.data.pool.read import read_pool
from skilltrain.data.sampling import stable_number
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analyse import (
    AnalysisConfig,
    Inputs,
    refusals,
    run_input_analyses,
    run_result_analyses,
)
from skilltrain.evaluation.candidates import estimate_ranking
from skilltrain.evaluation.report import Report, build_report
from skilltrain.evaluation.write import terminal_table, write_report
from skilltrain.files import read_json
from skilltrain.metrics.benchmarks.benchmark import Benchmark, add_copies, check_pool, join_tiers
from skilltrain.metrics.benchmarks.load import load_benchmark, read_unserved
from skilltrain.metrics.benchmarks.trec import read_run
from skilltrain.metrics.bootstrap import SEED
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import (
    COPIES,
    DEFAULT_MEASURES,
    JUDGED,
    Measure,
    MeasureNames,
    parse_measure,
    parse_measures,
    per_query,
    with_copies,
)
from skilltrain.metrics.refusal import NUM_FOLDS, assign_folds
from skilltrain.metrics.slices import Row
from skilltrain.metrics.verdicts import add_judged, read_pair_verdicts, write_sheet
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, check_systems, run_systems
from skilltrain.retrieval.rankers import flatten_rankers
from skilltrain.retrieval.rankings import rankings_table
from skilltrain.stage import Stage, Summary
from skilltrain.tables import RANKINGS, write_table
from skilltrain.terminal import console, say
from skilltrain.version import __version__

PREDICTION_MEASURES = (*DEFAULT_MEASURES, "COMP@10", "Set-Compat")
Predictions = dict[str, list[str]]
"""Ranked skill ids by query id."""


class Evaluate(Stage):
    """Compare systems on a benchmark, with 95% intervals."""

    example = "--benchmark bench --pool runs/pool --encoder runs/encoder out=runs/report"
    result = "{num_queries} queries; look at {out}/report.html"

    stage: Literal["evaluate"]
    pool: InputPath | None = Field(
        default=None,
        description="SKILLS table, or a source of the stage pool; null: the benchmark's pool",
    )
    benchmark: InputPaths = Field(
        min_length=1,
        description="folder of a benchmark; several are its tiers: [data/easy, data/hard]",
    )
    split: str | None = Field(
        default=None, description="score the queries of this split only; null for all"
    )
    systems: tuple[SystemConfig, ...] = Field(default=(), description="systems to compare")
    only: tuple[str, ...] = Field(
        default=(),
        description="names of the systems to run; p-values are corrected as if all had run",
    )
    predictions: InputPaths = Field(
        default=(),
        description="files to score: .json with {query_id: [skill_id, …]}, others are TREC runs",
    )
    clusters: InputPath | None = Field(
        default=None,
        description="CLUSTERS of the pool: adds `Hit@1 (copies)` …: near-duplicates count as gold",
    )
    verdicts: InputPaths = Field(
        default=(),
        description="CSV files with query_id, skill_id, verdict (required, serves or no) and "
        "reader: adds `Hit@1 (judged)`, where skills that serve count as gold",
    )
    sheet_depth: int = Field(
        default=0,
        ge=0,
        description="skills of each ranking that readers are to judge, in to_judge.csv; 0 for none",
    )
    measures: MeasureNames = Field(
        default=DEFAULT_MEASURES, min_length=1, description="e.g. Hit@1, nDCG@10, FC@10, Set-Compat"
    )
    depth: int = Field(
        default=50,
        ge=1,
        description="length of the rankings, at least the largest cutoff of a measure",
    )
    bootstrap_seed: Seed = Field(default=SEED, description="seed of the bootstrap's samples")
    analysis: AnalysisConfig = Field(
        default=AnalysisConfig(), description="further analyses of systems and rankings"
    )
    print_groups: bool = Field(
        default=True, description="print the means of groups of 10 or more queries too"
    )
    out: Path = Field(
        description="folder to write: metrics.json, the report, per_query.jsonl and RANKINGS"
    )

    @model_validator(mode="after")
    def _check_copies(self) -> "Evaluate":
        """Check that the settings have the inputs that the measures need.

        COPIES and JUDGED are the endings of names of measures, as in "Hit@1 (copies)".
        """
        for name in self.measures:
            if name.endswith(COPIES) and self.clusters is None:
                problem = f"{name} counts near-duplicates of gold skills"
                raise ValueError(f"measures: {problem}: give clusters=…")
            if name.endswith(JUDGED) and not self.verdicts:
                raise ValueError(f"measures: {name} counts judged skills: give verdicts=…")
        return self

    @model_validator(mode="after")
    def _check_only(self) -> "Evaluate":
        names = [system.name for system in self.systems]
        for name in self.only:
            if name not in names:
                raise ValueError(f"only: no system is called '{name}', but {', '.join(names)}")
        return self

    @property
    def selected_systems(self) -> tuple[SystemConfig, ...]:
        """The systems to run, in the order of the table."""
        if not self.only:
            return self.systems
        return tuple(system for system in self.systems if system.name in self.only)

    def unused_settings(self) -> frozenset[str]:
        """Return the keys of the systems that do not run."""
        selected = self.selected_systems
        keys = {f"systems.{n}": system for n, system in enumerate(self.systems)}
        return frozenset(key for key, system in keys.items() if system not in selected)

    @property
    def scored(self) -> tuple[Measure, ...]:
        """All measures: those of the settings, and those that need an optional input.

        With `clusters`, each measure has a variant in which copies (near-duplicates) of gold skills
        count as gold. With `verdicts`, there is Hit@1 (judged), in which skills that people judged
        to serve the query count as gold.
        """
        measures = parse_measures(self.measures)
        if self.clusters is not None:
            # Keep each measure, and add its variant for copies.
            measures = with_copies(measures)
        judged_measures = [parse_measure(f"Hit@1{JUDGED}")] if self.verdicts else []
        # The settings may name these measures too, so remove duplicates.
        return tuple(dict.fromkeys([*measures, *judged_measures]))

    @property
    def num_systems(self) -> int:
        """Number of systems and files of predictions."""
        return len(self.selected_systems) + len(self.predictions)

    def run(self, out: Path) -> Summary:
        """Write the report and the rankings, print a table, and return the means."""
        # Load the benchmark, the pools and the predictions, and analyse what needs no ranking.
        data = _load(self)
        systems = self.selected_systems
        check_systems(systems)  # before the analyses, which may take long
        inputs = Inputs(systems, data.benchmark, data.skills)
        analysis: dict[str, Any] = dict(run_input_analyses(self.analysis, inputs))

        # Rank all queries, also those that no skill serves. There is one result for each ranker of
        # a system. The result of the last ranker is the final one.
        tasks = data.benchmark.tasks
        unserved, folds, refusal_notes = _unserved_with_folds(self, data.benchmark)
        results_by_system, chat_counts = _rank(self, data, unserved)
        query_ids = list(data.benchmark.relevances)
        notes = [*data.benchmark.notes, *_selection_notes(self), *refusal_notes]
        notes += _chat_notes(chat_counts)
        if folds is not None:
            rows = refusals(results_by_system, tasks, unserved, folds, self.bootstrap_seed)
            analysis["unserved"] = rows
            notes += _refusal_notes(rows)

        # From here on, results are without the unserved queries.
        all_results = []
        ranked_ids = {}
        for system, results in results_by_system.items():
            results = [result.only(query_ids) for result in results]
            results_by_system[system] = results
            all_results += results
            ranked_ids[system] = results[-1].skill_ids()
        if all_results:
            # RANKINGS has the result of every ranker, not only of the last one.
            rankings = {result.name: result.rankings for result in all_results}
            write_table(rankings_table(rankings), RANKINGS, out)

        # Predictions of other software are scored like the rankings of systems.
        ranked_ids |= data.predictions
        if self.sheet_depth:
            write_sheet(_pairs_to_judge(data, ranked_ids, self.sheet_depth), out / "to_judge.csv")

        # The analyses of results read a report that holds the analyses of inputs.
        provenance = _provenance(self, len(data.skills))
        report = _report(self, data.benchmark, ranked_ids, data.skills, notes, provenance)
        report = replace(report, analysis=analysis)
        analysis |= run_result_analyses(self.analysis, report, results_by_system)
        report = replace(report, analysis=analysis)
        write_report(report, out)
        console.print(terminal_table(report, console.width, self.print_groups))

        means = {}
        for name, intervals in report.overall.means.items():
            means[name] = {measure: round(value.mean, 4) for measure, value in intervals.items()}
        return {
            "num_queries": len(query_ids),
            "systems": means,
            "seconds_a_query": {result.name: round(result.seconds, 6) for result in all_results},
            "asked": chat_counts,
        }

    def dry_run(self) -> Summary:
        """Count what would be ranked, and estimate the cost of chat models and servers."""
        data = _load(self)
        skills = list(chain.from_iterable(pool.values() for pool in data.pools))
        return estimate_ranking(self.selected_systems, data.benchmark.queries, skills)


def score_predictions(config: Evaluate) -> Report:
    """Return the report of the predictions alone, without running a model.

    Raises:
        SkilltrainError: Predictions do not fit the benchmark or, if there is one, the pool.
    """
    data = _load(config)
    return _report(config, data.benchmark, data.predictions, {}, data.benchmark.notes, {})


class _Data(NamedTuple):
    """Inputs of an evaluation.

    Attributes:
        benchmark: Tasks that can be scored.
        pools: Skills by id for each tier of the benchmark. An empty pool allows all skill ids.
        skills: Skills of all pools by id.
        predictions: Predictions by the name of their file.
    """

    benchmark: Benchmark
    pools: Sequence[Mapping[str, Skill]]
    skills: Mapping[str, Skill]
    predictions: Mapping[str, Predictions]


def _load(config: Evaluate) -> _Data:
    """Load the inputs, and check them before anything is ranked.

    Args:
        config: Settings of the stage.

    Returns:
        The tasks, the pools that are ranked for them, and the predictions.

    Raises:
        SkilltrainError: There is nothing to score or no pool to rank, the pool lacks a gold skill,
            or predictions do not fit the benchmark.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    _check_has_work(config, benchmark)
    # The skills of the setting `pool`. Without this setting, the benchmark's own pool is ranked.
    skills = None if config.pool is None else read_pool(config.pool)
    pools = []
    tiers = []
    skills_by_id = {}
    # A tier is a part of a benchmark with a pool of its own, such as SkillRouter's easy pool.
    # A benchmark without tiers counts as its only tier.
    for tier in benchmark.tiers_or_self:
        pool = {skill.skill_id: skill for skill in tier.pool}
        # A given pool replaces the tier's own pool, and gets the gold skills that it lacks.
        if skills is not None:
            pool = tier.with_gold(skills)
        pools.append(pool)
        # `check_pool` returns the tier without the gains of non-gold skills that the pool lacks.
        # Predictions can also be scored without a pool.
        tiers.append(check_pool(tier, pool.keys()) if pool else tier)
        skills_by_id |= pool
    benchmark = join_tiers(tiers)

    predictions = _read_predictions(config, benchmark, skills_by_id)
    if config.clusters is not None:
        benchmark = _add_near_duplicates(benchmark, skills_by_id, config.clusters)
    if config.verdicts:
        benchmark = add_judged(benchmark, read_pair_verdicts(config.verdicts), skills_by_id)
    return _Data(benchmark, pools, skills_by_id, predictions)


def _check_has_work(config: Evaluate, benchmark: Benchmark) -> None:
    """Check that there is something to score, and that there are pools where they are needed.

    Systems rank a pool. The sheet, on which people judge skills, shows the texts of a pool.

    Args:
        config: Settings of the stage.
        benchmark: Tasks, with the pool of each tier if the benchmark has one.

    Raises:
        SkilltrainError: There are neither systems nor predictions, or a pool is missing.
    """
    if not config.systems and not config.predictions:
        problem = "there is nothing to evaluate: give systems or predictions"
        raise SkilltrainError("nothing-to-score", problem)
    # `tiers_or_self` holds the tiers, or the benchmark itself if it has no tiers.
    has_pools = config.pool is not None or all(tier.pool for tier in benchmark.tiers_or_self)
    # `sheet_depth` is above 0 if the stage writes a sheet.
    if (config.systems or config.sheet_depth) and not has_pools:
        problem = "systems need a pool to rank, and a sheet shows its texts"
        raise SkilltrainError("missing-pool", problem, fix="give pool=…")


def _add_near_duplicates(
    benchmark: Benchmark, skills: Mapping[str, Skill], clusters: Path
) -> Benchmark:
    """Add the near-duplicates of gold skills, which some measures count as gold.

    Args:
        benchmark: Tasks with their gold skills.
        skills: Skills by id.
        clusters: CLUSTERS table of the skills.
    """
    if not skills:
        problem = "near-duplicates are found by texts of skills, and there is no pool"
        raise SkilltrainError("missing-pool", problem, where="clusters", fix="give pool=…")
    # Skills whose copies are needed: gold skills, and alternatives, which can take the place of a
    # gold skill.
    needed_ids = []
    for task in benchmark.tasks:
        needed_ids += [*task.relevance.gold, *task.relevance.alternatives]
    copies = copies_of(needed_ids, skills, clusters)
    return add_copies(benchmark, copies)


def _unserved_with_folds(
    config: Evaluate, benchmark: Benchmark
) -> tuple[list[Query], np.ndarray | None, list[str]]:
    """Read the queries that no skill serves, and assign the tasks to folds.

    Args:
        config: Settings.
        benchmark: Tasks, which are queries that some skill serves.

    Returns:
        The queries that no skill serves, the fold of each task, and notes for the report. There are
        neither queries nor folds (None) if refusals are not analysed.
    """
    if config.analysis.unserved is None:
        return [], None, []
    unserved = read_unserved(config.analysis.unserved)
    try:
        return unserved, assign_folds(benchmark.tasks, NUM_FOLDS, config.bootstrap_seed), []
    except SkilltrainError as error:
        # Shared gold skills link all queries, so there are no folds to fit on and to test on.
        return [], None, [f"Refusals are not analysed: {error.problem}."]


def _rank(
    config: Evaluate, data: _Data, unserved: Sequence[Query]
) -> tuple[dict[str, list[RankedStage]], dict[str, Mapping[str, Any]]]:
    """Rank the queries of each tier over the pool of this tier.

    Args:
        config: Settings.
        data: Benchmark and pools.
        unserved: Queries that no skill serves, ranked over the first pool.

    Returns:
        The rankings of each ranker by system, and the counts of each ranker that asks a chat model.
        The key of the counts is the name of the ranker, or `RANKER, TIER` if there are tiers.
    """
    stages_by_system = {}
    chat_counts = {}
    # Rankings are at least as long as the largest cutoff of a measure, such as 10 for `Hit@10`.
    cutoffs = [measure.cutoff for measure in config.scored]
    depth = max([config.depth, *cutoffs])
    num_timed = config.analysis.num_timed
    for tier, pool in zip(data.benchmark.tiers_or_self, data.pools, strict=True):
        queries = list(tier.queries)
        if not stages_by_system:  # the first tier
            queries.extend(unserved)
        tier_suffix = f", {tier.name}" if data.benchmark.tiers else ""
        ranked = run_systems(
            config.selected_systems, queries, list(pool.values()), depth, num_timed=num_timed
        )

        for system, stages in ranked.items():
            for stage in stages:
                if stage.counts:
                    chat_counts[f"{stage.name}{tier_suffix}"] = stage.counts
            # The same rankers have ranked the queries of earlier tiers, so join both.
            if system in stages_by_system:
                pairs = zip(stages_by_system[system], stages, strict=True)
                stages = [earlier.joined(later) for earlier, later in pairs]
            stages_by_system[system] = list(stages)
    return stages_by_system, chat_counts


def _pairs_to_judge(
    data: _Data, ranked_ids: Mapping[str, Predictions], depth: int
) -> list[tuple[Query, Skill]]:
    """Return each query with the first skills of all systems, in an order that tells nothing.

    Args:
        data: Benchmark and skills.
        ranked_ids: Ranked skill ids by system and query id.
        depth: Number of skills of each ranking.
    """
    pairs: list[tuple[Query, Skill]] = []
    # Pseudo-random numbers of the ids decide the order. So readers cannot guess a system or a rank
    # from the order, and a repeated run writes the same sheet.
    for query in sorted(data.benchmark.queries, key=lambda query: stable_number(query.query_id)):
        query_id = query.query_id
        skill_ids: set[str] = set()
        for rankings in ranked_ids.values():
            skill_ids.update(rankings.get(query_id, [])[:depth])
        for skill_id in sorted(skill_ids, key=lambda key: stable_number(query_id, key)):
            pairs.append((query, data.skills[skill_id]))
    return pairs


def _read_predictions(
    config: Evaluate, benchmark: Benchmark, pool: Container[str]
) -> dict[str, Predictions]:
    """Read all files of predictions. A file's name is the name of a system.

    Args:
        config: Settings.
        benchmark: Tasks.
        pool: Skill ids that may be predicted. An empty pool allows all.

    Returns:
        Ranked skill ids by query id, for each file by its name.
    """
    names = {system.name for system in config.systems}
    predictions = {}
    for file in config.predictions:
        if file.stem in names:
            problem = f"another system is called '{file.stem}' as well"
            raise SkilltrainError("repeated-name", problem, where=file, fix="rename it")
        # The name of a file names a system, so all names must differ.
        names.add(file.stem)
        predictions[file.stem] = _read_prediction_file(file, benchmark, pool)
    return predictions


def _read_prediction_file(file: Path, benchmark: Benchmark, pool: Container[str]) -> Predictions:
    """Read the predictions for the tasks that are scored, and warn of missing ones.

    Args:
        file: JSON file with an object {query_id: [skill_id, …]}, or a TREC run.
        benchmark: Tasks.
        pool: Skill ids that may be predicted. An empty pool allows all.
    """
    is_json = file.suffix.lower() == ".json"
    values = read_json(file) if is_json else read_run(file)
    if not isinstance(values, dict) or not values:
        problem = "predictions are an object {query_id: [skill_id, …]}, or a TREC run"
        raise SkilltrainError("invalid-predictions", problem, where=file)
    for query_id, ranking in values.items():
        _check_prediction(ranking, pool, f"{file}, query {query_id}")
    _check_query_ids(list(values), benchmark, file)

    # Predictions for other splits of the benchmark are ignored.
    scored_ids = list(benchmark.relevances)
    predictions = {query_id: values[query_id] for query_id in scored_ids if query_id in values}
    if not predictions:
        problem = "all its predictions are for queries that are not scored here"
        raise SkilltrainError("nothing-to-score", problem, where=file)
    missing_ids = [query_id for query_id in scored_ids if query_id not in predictions]
    if missing_ids:
        say(
            f"warning: {file}: no prediction for {len(missing_ids)} of {len(scored_ids)} queries, "
            f"first '{missing_ids[0]}'; they score 0"
        )
    return predictions


def _check_query_ids(query_ids: Sequence[str], benchmark: Benchmark, file: Path) -> None:
    """Check that all predicted queries are in the benchmark, scored or not.

    Args:
        query_ids: Ids of the predicted queries.
        benchmark: Tasks.
        file: File of the predictions, for an error.
    """
    # `unscored` has the ids of queries that the benchmark holds, but does not score here.
    benchmark_ids = benchmark.unscored.union(benchmark.relevances)
    unknown_ids = [query_id for query_id in query_ids if query_id not in benchmark_ids]
    if unknown_ids:
        problem = (
            f"{len(unknown_ids)} of {len(query_ids)} predicted queries are not in the benchmark, "
            f"first '{unknown_ids[0]}'"
        )
        example_id = next(iter(benchmark.relevances))
        fix = f"its query ids look like '{example_id}'"
        raise SkilltrainError("unknown-query", problem, where=file, fix=fix)


def _check_prediction(ranking: Any, pool: Container[str], where: str) -> None:
    """Check that a prediction is a list of distinct skill ids of the pool.

    An empty pool allows all skill ids.

    Args:
        ranking: Value of a query in the file.
        pool: Skill ids that may be predicted.
        where: File and query, for an error.
    """
    is_valid = isinstance(ranking, list) and all(item and isinstance(item, str) for item in ranking)
    if not is_valid:
        problem = "a prediction is a list of skill ids"
        raise SkilltrainError("invalid-predictions", problem, where=where)
    if len(set(ranking)) < len(ranking):
        repeated_id, _ = Counter(ranking).most_common(1)[0]
        problem = f"skill '{repeated_id}' appears twice"
        raise SkilltrainError("repeated-id", problem, where=where)
    unknown_ids = [skill_id for skill_id in ranking if skill_id not in pool]
    if pool and unknown_ids:
        problem = (
            f"{len(unknown_ids)} of {len(ranking)} predicted skills are not in the pool, "
            f"first '{unknown_ids[0]}'"
        )
        fix = "predict ids of this pool, or score without pool=…"
        raise SkilltrainError("unknown-skill", problem, where=where, fix=fix)


def _report(
    config: Evaluate,
    benchmark: Benchmark,
    ranked_ids: Mapping[str, Predictions],
    skills: Mapping[str, Skill],
    notes: Sequence[str],
    provenance: Mapping[str, str],
) -> Report:
    """Score rankings, and make the report.

    Args:
        config: Settings.
        benchmark: Tasks to score.
        ranked_ids: Ranked skill ids by system and query id.
        skills: Skills by id, for their names.
        notes: Sentences for the report.
        provenance: What was evaluated, by title, such as `Pool`.
    """
    results = []
    for name, rankings in ranked_ids.items():
        values = per_query(rankings, benchmark.relevances, config.scored)
        clusters = benchmark.clusters
        results.append(SystemResult(name, values, rankings, clusters, config.bootstrap_seed))
    # P-values are corrected as if all systems of the settings had run, also those left out by
    # `only`.
    planned = [system.name for system in config.systems]
    planned += [file.stem for file in config.predictions]
    return build_report(
        benchmark, results, config.scored, skills, notes, provenance, planned=planned
    )


def _provenance(config: Evaluate, num_skills: int) -> dict[str, str]:
    """Return what was evaluated, by title: benchmark, pool, models, date and version.

    Folders are given by name, so that the report does not depend on where they are.

    Args:
        config: Settings.
        num_skills: Number of skills of all pools.
    """
    pool = "of the benchmark" if config.pool is None else config.pool.resolve().name
    split = f", split {config.split}" if config.split else ""
    provenance = {
        "Benchmark": " + ".join(path.resolve().name for path in config.benchmark) + split,
        "Pool": f"{pool}, {num_skills:,} skills",
    }
    for system in config.selected_systems:
        models = []
        for ranker in flatten_rankers(system.rankers):
            # A model runs on a server or on this machine. Some rankers, such as `lexical`, have no
            # model.
            model = ranker.server.model if ranker.server else ranker.model_source
            if model:
                # Of a local model, only the name of its folder is shown.
                path = Path(model)
                models.append(path.name if path.exists() else model)
        if models:
            provenance[f"System {system.name}"] = ", ".join(models)
    provenance["Made"] = f"{date.today().isoformat()} with skilltrain {__version__}"
    return provenance


def _selection_notes(config: Evaluate) -> list[str]:
    """Write a sentence about the systems that did not run."""
    if not config.only:
        return []
    counts = f"{len(config.selected_systems)} of {len(config.systems)}"
    return [f"{counts} systems ran (only). P-values are corrected as if all had run."]


def _refusal_notes(rows: Sequence[Row]) -> list[str]:
    """Write sentences for each system about the queries that it answers and refuses.

    Args:
        rows: Rows of `refusals`, one for each system. A share prints as a rate with its interval,
            and its `n` is the number of queries that it is computed from. `exact_set` is the share
            of queries with a skill whose predicted skills are exactly the gold skills. `separation`
            is the probability that a query with a skill has a higher best score than a query that
            no skill serves.
    """
    return [
        f"{row['system']}: a threshold from other folds answers {row['answered_unserved']} of the "
        f"{row['answered_unserved'].n} queries that no skill serves, and refuses "
        f"{row['refused_served']} of the {row['refused_served'].n} others. Exact skills "
        f"{row['exact_set']}, calibration error {row['calibration_error']}. The best score of a "
        f"query with a skill is the higher one with probability {row['separation']}; .5 is chance."
        for row in rows
    ]


def _chat_notes(chat_counts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write sentences about the chat models, from the counts of each ranker that asks one.

    They say to how many questions a model gave no usable answer, and how many skills each filter
    accepted.

    Args:
        chat_counts: Counts of each ranker by its name.
    """
    notes = []
    for name, counts in chat_counts.items():
        # An answer is unusable if it is, for example, malformed or a refusal.
        num_unusable = counts.get("num_unusable")
        if num_unusable:
            reasons = ", ".join(f"{kind} {count}" for kind, count in counts["unusable"].items())
            notes.append(
                f"{name}: the chat model gave no usable answer to {num_unusable} of "
                f"{counts['num_asked']} questions ({reasons}). The ranker went on without it."
            )
        # A ranker of SkillFlow asks a chat model which skills to accept, in the filters `relevancy`
        # and `specificity`.
        for filter_name, (num_accepted, num_judged) in counts.get("accepted", {}).items():
            if num_judged:
                share = num_accepted / num_judged
                accepted = f"{num_accepted} of {num_judged} skills ({share:.1%})"
                notes.append(f"{name}: {filter_name} accepted {accepted}.")
    return notes
