"""Analyses of an evaluation: of its models and skills, and of the systems' answers.

Each analysis is a list of rows in metrics.json.

Notes:
    - A ranker cannot find a skill that the ranker before it did not pass on. So the recall of a
      ranker at `num_passed` is the highest recall that later rankers can reach, and its hit rate at
      `num_passed` their highest Hit@1.
    - A reranker reads a skill together with a query. The query is empty in the analysis
      `truncation`.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from pydantic import Field, SerializeAsAny

from skilltrain.config import Config, InputPath
from skilltrain.evaluation.report import Report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, Task
from skilltrain.metrics.bootstrap import Interval, cluster_sums
from skilltrain.metrics.comparison import SystemResult, shared_query_ids, sign_test, values_of
from skilltrain.metrics.measures import Measure, Relevance, per_query, resolve_alternatives
from skilltrain.metrics.refusal import (
    NUM_FOLDS,
    ScoredRequest,
    cross_validate,
    score_features,
)
from skilltrain.metrics.slices import Row, means_of
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.plugins import OneOf
from skilltrain.records import Query, Ranking, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig
from skilltrain.retrieval.rankers import flatten_rankers
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track

STAGE_CUTOFFS = (1, 5, 10, 50, 100, 500, 1000)
_OUTCOME_MEASURE = "Hit@1"  # 1 if a system got a query right, otherwise 0
_NO_LIMIT = 10**9  # characters
_MAX_SPECIAL_TOKENS = 8  # more than any model adds to a text


class Inputs(NamedTuple):
    """Systems and benchmark of an evaluation, and the skills of all pools by id."""

    systems: Sequence[SystemConfig]
    benchmark: Benchmark
    skills: Mapping[str, Skill]

    def models(self) -> list[EncoderConfig | RerankConfig]:
        """Return the distinct models that run on this machine."""
        rankers = flatten_rankers(chain.from_iterable(system.rankers for system in self.systems))
        models = [model for model in rankers if isinstance(model, EncoderConfig | RerankConfig)]
        return list({model.key: model for model in models}.values())


class Analysis(Config):
    """Base of an analysis. Its rows are in metrics.json under its kind, and in the report's tables.

    A subclass overrides one of the two methods.
    """

    kind: Any  # a Literal in each analysis

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        """Analyse models or skills before anything is ranked. May raise SkilltrainError."""
        return []

    def analyse_results(self, report: Report) -> list[Row]:
        """Analyse rankings and their scores."""
        return []


class AnalysisConfig(Config):
    """Analyses beside the measures. All are cheap, except those that run models again."""

    num_timed: int = Field(
        default=0, ge=0, description="queries to rank again one at a time, to time local rankers"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of queries (key `query`) that no skill serves: are they refused?",
    )
    truncation: bool = Field(
        default=False, description="count the skills that each model sees whole; reads all skills"
    )
    more: tuple[Annotated[SerializeAsAny[Analysis], OneOf("analysis")], ...] = Field(
        default=cast(Any, ({"kind": "pass_rates"},)), description="further analyses"
    )


def run_input_analyses(config: AnalysisConfig, inputs: Inputs) -> dict[str, list[Row]]:
    """Run the analyses that need no ranking, and return their rows by kind.

    They run before the systems, so that their errors show early.

    Args:
        config: Settings.
        inputs: Systems, benchmark and skills.

    Raises:
        SkilltrainError: An analysis is impossible.
    """
    rows = {analysis.kind: analysis.analyse_inputs(inputs) for analysis in config.more}
    if config.truncation:
        skills = list(inputs.skills.values())
        rows["truncation"] = [truncation(model, skills) for model in inputs.models()]
    return rows


def run_result_analyses(
    config: AnalysisConfig, report: Report, stages_by_system: Mapping[str, Sequence[RankedStage]]
) -> dict[str, list[Row]]:
    """Run the analyses of rankings, and return their rows by kind.

    Args:
        config: Settings.
        report: Report with the rows of `run_input_analyses`.
        stages_by_system: For each system, the rankings of each of its rankers in order.
    """
    rows = {
        "outcomes": _neighbour_outcomes(report.results),
        "stages": stage_recalls(stages_by_system, report.benchmark),
        "latencies": latencies(stages_by_system),
    }
    # Further analyses, such as plug-ins, may have rows of both kinds: of inputs and of results.
    for analysis in config.more:
        input_rows = report.analysis[analysis.kind]
        rows[analysis.kind] = [*input_rows, *analysis.analyse_results(report)]
    return rows


def _neighbour_outcomes(results: Sequence[SystemResult]) -> list[Row]:
    """Return the outcomes of each system and the system before it; none without Hit@1.

    Args:
        results: Rankings and scores of each system, in the order of the recipe.
    """
    for result in results:
        for values in result.per_query.values():
            if _OUTCOME_MEASURE not in values:
                return []
    return [outcomes(*pair, _OUTCOME_MEASURE) for pair in pairwise(results)]


def outcomes(baseline: SystemResult, system: SystemResult, measure: str) -> Row:
    """Return which queries of the baseline a system fixes and breaks (SkillRouter, section 5.5.1).

    Args:
        baseline: System to compare with.
        system: System that is compared.
        measure: Measure that is 0 (wrong) or 1 (right).

    Returns:
        The p-value of `sign_test`, and the ids of the queries that are right in both systems
        (`both`), only in `system` (`fixed`), only in `baseline` (`broken`) or in neither.
    """
    query_ids = shared_query_ids([baseline, system])
    baseline_values = values_of(baseline, query_ids, [measure])  # [query, 1]
    system_values = values_of(system, query_ids, [measure])  # [query, 1]
    differences = system_values - baseline_values
    # Related queries form a cluster. They count as one, so their differences are added up.
    sums_by_cluster, _ = cluster_sums(differences, baseline.clusters_of(query_ids))
    p = sign_test(sums_by_cluster[:, 0])
    row: Row = {"baseline": baseline.name, "system": system.name, "measure": measure, "p": p}

    # Values of baseline and system for each outcome.
    value_pairs = {"both": (1, 1), "fixed": (0, 1), "broken": (1, 0), "neither": (0, 0)}
    for outcome, (baseline_value, system_value) in value_pairs.items():
        # True for the queries with this outcome: [query, 1].
        mask = (baseline_values == baseline_value) & (system_values == system_value)
        row[outcome] = np.array(query_ids)[mask[:, 0]].tolist()
    return row


def refusals(
    stages_by_system: Mapping[str, Sequence[RankedStage]],
    tasks: Sequence[Task],
    unserved: Sequence[Query],
    task_folds: np.ndarray,
    seed: int,
) -> list[Row]:
    """Return how well each system refuses the queries that no skill serves, by cross-validation.

    The features of a skill are its score, and its lead: how far the score is above the best other
    score of the ranking.

    Args:
        stages_by_system: For each system, the rankings of each of its rankers in order.
        tasks: Queries that a skill serves, with their gold skills.
        unserved: Queries that no skill serves.
        task_folds: [task] Fold of each task.
        seed: Seed of the bootstrap.

    Returns:
        A row for each system: the values of `cross_validate`.
    """
    # Spread the unserved queries evenly over the folds. They follow the tasks: [request].
    folds = np.append(task_folds, np.arange(len(unserved)) % NUM_FOLDS)
    no_skill = Relevance(frozenset(), {})
    rows: list[Row] = []
    for system, stages in stages_by_system.items():
        rankings = stages[-1].rankings  # of the last ranker
        requests: list[ScoredRequest] = []
        for task in tasks:
            requests.append(_scored_request(rankings[task.query.query_id], task.relevance))
        for query in unserved:
            requests.append(_scored_request(rankings[query.query_id], no_skill))
        rows.append({"system": system, **cross_validate(requests, folds, seed)})
    return rows


def _scored_request(ranking: Ranking, relevance: Relevance) -> ScoredRequest:
    """Return the features of a ranking, and which of its skills are gold.

    Args:
        ranking: Pairs of skill id and score, the best first.
        relevance: Gold skills of the query. There are none if no skill serves the query.
    """
    skill_ids = [skill_id for skill_id, _ in ranking]
    gold = resolve_alternatives(skill_ids, relevance).gold
    is_right = np.array([skill_id in gold for skill_id in skill_ids], dtype=bool)
    return ScoredRequest(score_features([score for _, score in ranking]), is_right, len(gold))


def stage_recalls(
    stages_by_system: Mapping[str, Sequence[RankedStage]], benchmark: Benchmark
) -> list[Row]:
    """Score each ranker of the systems that have several rankers (SkillFlow, table 3).

    Such a system is a cascade: each ranker reorders the best skills of the ranker before.

    Args:
        stages_by_system: For each system, a stage for each of its rankers, in order. A stage holds
            the ranking of each query, and the number of skills passed on.
        benchmark: Tasks with their gold skills (the skills that a task needs).

    Returns:
        A row for each ranker: means of measures at several cutoffs, and `num_passed`, the number of
        skills that the next ranker reads.
    """
    rows = []
    for system, stages in stages_by_system.items():
        if len(stages) == 1:
            continue  # the main table has the scores of a single ranker
        for number, stage in enumerate(stages, 1):
            lengths = [len(ranking) for ranking in stage.rankings.values()]
            longest = max([1, *lengths])  # at least 1, because a cutoff of 0 has no recall
            # Without a number (0 or None), the next ranker reads whole rankings.
            num_passed = longest
            if stage.num_passed:
                num_passed = min(stage.num_passed, longest)

            means = _stage_means(stage, benchmark, longest, num_passed)
            row = {"system": system, "stage": f"{number} {stage.kind}"}
            rows.append(row | {"num_passed": num_passed, "means": means})
    return rows


def _stage_means(
    stage: RankedStage, benchmark: Benchmark, longest: int, num_passed: int
) -> dict[str, Interval]:
    """Return the mean of each measure over the queries for one ranker.

    Args:
        stage: Rankings of the ranker.
        benchmark: Tasks with their gold skills.
        longest: Length of the longest ranking.
        num_passed: Number of skills that the next ranker reads.
    """
    cutoffs = {k for k in STAGE_CUTOFFS if k <= longest}
    # The recall at `num_passed` is the highest that later rankers can reach.
    cutoffs.add(num_passed)
    measures = [Measure("Recall", k) for k in sorted(cutoffs)]
    measures += [Measure("Precision", k) for k in sorted(cutoffs)]
    measures += [Measure("MRR", longest), Measure("Hit", num_passed)]

    # Treat the ranker as a system, to get its means with intervals.
    scores = per_query(stage.skill_ids(), benchmark.relevances, measures)
    result = SystemResult(stage.name, scores, rankings={}, clusters=benchmark.clusters)
    means = means_of([result], list(benchmark.relevances), list(map(str, measures)))
    return means[stage.name]


def latencies(stages_by_system: Mapping[str, Sequence[RankedStage]]) -> list[Row]:
    """Return the latency of each ranker that was timed and, if all were, of the whole system.

    Args:
        stages_by_system: For each system, a stage for each of its rankers, in order.

    Returns:
        Rows of `_latency_row`. The row of a whole system has the stage `total`.
    """
    rows = []
    for system, stages in stages_by_system.items():
        num_timed = 0
        for number, stage in enumerate(stages, 1):
            if stage.latencies:
                rows.append(_latency_row(system, f"{number} {stage.kind}", [stage]))
                num_timed += 1
        if num_timed == len(stages):
            rows.append(_latency_row(system, "total", stages))
    return rows


def _latency_row(system: str, name: str, stages: Sequence[RankedStage]) -> Row:
    """Return the latency of rankers that run one after the other.

    Args:
        system: Name of the system.
        name: Name of the row: its key `stage`.
        stages: One stage for each ranker.

    Returns:
        A row. `mean`, `p50` and `p95` are seconds of a query that was ranked alone. `qps` is the
        number of queries per second, and `num` the number of queries. `gpu_gib` is the peak GPU
        memory, and `gpu_seconds` the GPU time of 1,000 queries. Both are None without a GPU.
    """
    # Add up the times of the rankers for each query.
    seconds = np.sum([stage.latencies for stage in stages], axis=0)  # [query]
    mean = float(seconds.mean())
    p50, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
    row: Row = {"system": system, "stage": name}
    row |= {"mean": mean, "p50": p50, "p95": p95, "qps": 1 / mean}
    row |= {"gpu_gib": None, "gpu_seconds": None, "num": len(seconds)}

    gpu_stages = [stage for stage in stages if stage.gpu_bytes]
    if gpu_stages:
        # Rankers run one after the other. So times add up, but memory is the highest of them.
        seconds_per_query = sum(float(np.mean(stage.latencies)) for stage in gpu_stages)
        row["gpu_gib"] = max(stage.gpu_bytes for stage in gpu_stages) / 2**30
        row["gpu_seconds"] = 1000 * seconds_per_query
    return row


def truncation(config: EncoderConfig | RerankConfig, skills: Sequence[Skill]) -> Row:
    """Return the share of skills that a model sees whole (SkillFlow, figure 6).

    The template shows some fields of a skill. The model sees the skill whole if neither a limit of
    characters in the template nor `max_tokens` cuts these fields. A reranker reads the skill with a
    query, which counts as empty here.

    Args:
        config: Settings of an encoder or a reranker.
        skills: Skills to count.
    """
    if isinstance(config, RerankConfig):
        pair_tokenizer = load_reranker(config, default_device()).pair_tokenizer
        template = pair_tokenizer.template.skill
        tokenizer = pair_tokenizer.text
        # `num_fixed` counts the tokens of the frame around query and skill.
        max_skill_tokens = pair_tokenizer.settings.max_tokens - pair_tokenizer.num_fixed
    else:
        encoder = load_encoder(config, default_device())
        template = encoder.settings.template.skill
        tokenizer = encoder.text_tokenizer
        # The tokens of an empty text are the special tokens, which the model adds to every text.
        special_tokens = encoder.tokenize([""], max_tokens=_MAX_SPECIAL_TOKENS)[0]
        max_skill_tokens = encoder.settings.max_tokens - len(special_tokens)

    # A skill that looks the same in a template without limits was not cut by characters.
    no_limits = {"description_chars": _NO_LIMIT, "body_chars": _NO_LIMIT}
    whole_template = template.model_copy(update=no_limits)
    num_whole = 0
    for skill in track(skills, f"lengths for {config.source}", len(skills)):
        text = template.render(skill)
        if text == whole_template.render(skill):
            num_tokens = len(tokenizer.ids([text])[0])
            num_whole += num_tokens <= max_skill_tokens
    return {
        "model": config.source,
        "max_tokens": max_skill_tokens,
        "whole": num_whole / len(skills),
        "num_skills": len(skills),
    }
