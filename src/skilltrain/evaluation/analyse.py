"""Analyses of an evaluation: of its models and skills, and of the systems' answers.

Each analysis is a list of rows in metrics.json.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from pydantic import Field, SerializeAsAny

from skilltrain.config import Config, InputPath
from skilltrain.evaluation.report import Report
from skilltrain.metrics.benchmarks.benchmark import Benchmark
from skilltrain.metrics.bootstrap import Interval, cluster_sums, separation
from skilltrain.metrics.comparison import SystemResult, shared_query_ids, sign_test, values_of
from skilltrain.metrics.measures import Measure, per_query
from skilltrain.metrics.slices import Row, means_of
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.plugins import OneOf
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig
from skilltrain.retrieval.rankers import flatten_rankers
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track

STAGE_CUTOFFS = (1, 5, 10, 50, 100, 500, 1000)
_RIGHT_OR_WRONG = "Hit@1"  # measure that says whether a system got a query right
_NO_LIMIT = 10**9  # characters


class Inputs(NamedTuple):
    """Systems and benchmark of an evaluation, and the skills of all pools by id."""

    systems: Sequence[SystemConfig]
    benchmark: Benchmark
    skills: Mapping[str, Skill]

    def models(self) -> list[EncoderConfig | RerankConfig]:
        """Return the distinct models that run on this machine."""
        parts = {
            part.key: part for system in self.systems for part in flatten_rankers(system.rankers)
        }
        return [part for part in parts.values() if isinstance(part, EncoderConfig | RerankConfig)]


class Analysis(Config):
    """Base of an analysis. Its rows are in metrics.json under its kind, and in the report's tables.

    A subclass overrides one of the two methods.
    """

    kind: Any  # a Literal in each analysis

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        """Analyse models or skills before anything is ranked. May raise SkilltrainError."""
        return []

    def analyse_results(self, report: Report) -> list[Row]:
        """Analyse rankings and their values."""
        return []


class AnalysisConfig(Config):
    """Analyses beside the measures. All are cheap, except those that run models again."""

    num_timed: int = Field(
        default=0, ge=0, description="queries to rank again one at a time, to time local rankers"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of queries (key `query`) that no skill serves: do scores show it?",
    )
    truncation: bool = Field(
        default=False, description="count the skills that each model sees whole; reads all skills"
    )
    more: tuple[Annotated[SerializeAsAny[Analysis], OneOf("analysis")], ...] = Field(
        default=cast(Any, ({"kind": "pass_rates"},)), description="further analyses"
    )


def run_input_analyses(config: AnalysisConfig, inputs: Inputs) -> dict[str, list[Row]]:
    """Run the analyses that need no ranking. They come first, so that faults show early.

    Raises:
        SkilltrainError: An analysis is impossible.
    """
    rows = {analysis.kind: analysis.analyse_inputs(inputs) for analysis in config.more}
    if config.truncation:
        skills = [*inputs.skills.values()]
        rows["truncation"] = [truncation(model, skills) for model in inputs.models()]
    return rows


def run_result_analyses(
    config: AnalysisConfig, report: Report, stages: Mapping[str, Sequence[RankedStage]]
) -> dict[str, list[Row]]:
    """Run the analyses of rankings.

    Args:
        config: Settings.
        report: Report with the rows of `run_input_analyses`.
        stages: Answers of each ranker by system.
    """
    measures = [values for result in report.results for values in result.per_query.values()]
    rows: dict[str, list[Row]] = {"outcomes": []}
    if all(_RIGHT_OR_WRONG in values for values in measures):
        # Systems that are next to each other in the recipe are compared.
        for baseline, system in pairwise(report.results):
            rows["outcomes"].append(outcomes(baseline, system, _RIGHT_OR_WRONG))
    rows["stages"] = stage_recalls(stages, report.benchmark)
    rows["latencies"] = latencies(stages)
    for analysis in config.more:
        input_rows = report.analysis[analysis.kind]
        rows[analysis.kind] = [*input_rows, *analysis.analyse_results(report)]
    return rows


def outcomes(baseline: SystemResult, system: SystemResult, measure: str) -> Row:
    """Return the queries that `system` changed (SkillRouter, section 5.5.1).

    Args:
        baseline: System to compare with.
        system: System that is compared.
        measure: Measure that is 0 (wrong) or 1 (right).

    Returns:
        The exact p (`sign_test`), and the ids of the queries that are right in both systems, only
        in `system` (fixed), only in `baseline` (broken) or in neither.
    """
    query_ids = shared_query_ids([baseline, system])
    before = values_of(baseline, query_ids, [measure])
    after = values_of(system, query_ids, [measure])
    differences, _ = cluster_sums(after - before, baseline.clusters_of(query_ids))
    row: Row = {
        "baseline": baseline.name,
        "system": system.name,
        "measure": measure,
        "p": sign_test(differences[:, 0]),
    }
    cells = {"both": (1, 1), "fixed": (0, 1), "broken": (1, 0), "neither": (0, 0)}
    for cell, (was_right, is_right) in cells.items():
        is_in_cell = (before == was_right) & (after == is_right)
        row[cell] = np.array(query_ids)[is_in_cell[:, 0]].tolist()
    return row


def unserved_separation(
    rankings_by_system: Mapping[str, Rankings], query_ids: Sequence[str], unserved: Sequence[Query]
) -> dict[str, Interval]:
    """Return how well each system's best score separates served queries from unserved ones.

    It is the probability that the best score of one of `query_ids` is above that of one of
    `unserved`. The score of an empty ranking is -inf. A fused score is comparable between queries:
    it consists of z-scores, which say how far the best skill stands out among the candidates.
    """

    def best_scores(rankings: Rankings, ids: Iterable[str]) -> list[float]:
        return [rankings[query_id][0][1] if rankings[query_id] else -math.inf for query_id in ids]

    unserved_ids = [query.query_id for query in unserved]
    separations: dict[str, Interval] = {}
    for system, rankings in rankings_by_system.items():
        served_scores = best_scores(rankings, query_ids)
        separations[system] = separation(served_scores, best_scores(rankings, unserved_ids))
    return separations


def stage_recalls(stages: Mapping[str, Sequence[RankedStage]], benchmark: Benchmark) -> list[Row]:
    """Score each ranker of the systems that have several (SkillFlow, table 3).

    A row has the means of measures at several cutoffs, and `num_passed`, the number of skills that
    the ranker passes on. Recall at `num_passed` is the most that later rankers can reach. Hit at
    `num_passed` is the Hit@1 of a perfect next ranker.
    """
    relevances = benchmark.relevances
    rows: list[Row] = []
    for system, ranked in stages.items():
        if len(ranked) == 1:
            continue
        for number, stage in enumerate(ranked, 1):
            longest = max(1, *map(len, stage.rankings.values()))
            num_passed = min(stage.num_passed or longest, longest)
            cutoffs = sorted({num_passed, *(k for k in STAGE_CUTOFFS if k <= longest)})
            measures = [
                *(Measure("Recall", k) for k in cutoffs),
                *(Measure("Precision", k) for k in cutoffs),
                Measure("MRR", longest),
                Measure("Hit", num_passed),
            ]
            scores = per_query(stage.skill_ids(), relevances, measures)
            result = SystemResult(system, scores, {}, benchmark.clusters)
            means = means_of([result], list(relevances), list(map(str, measures)))[system]
            row: Row = {"system": system, "stage": f"{number} {stage.kind}"}
            rows.append(row | {"num_passed": num_passed, "means": means})
    return rows


def latencies(stages: Mapping[str, Sequence[RankedStage]]) -> list[Row]:
    """Return the latency of each ranker that was timed and, if all were, of the system (`total`).

    Latencies are seconds of queries that were ranked one at a time. With few queries p95 says
    little. `gpu_gib` is the peak GPU memory, and `gpu_seconds` the time for which 1,000 queries
    occupy the GPU. Both are None for rankers that use none.
    """
    rows: list[Row] = []
    for system, ranked in stages.items():
        groups: dict[str, Sequence[RankedStage]] = {}
        for number, stage in enumerate(ranked, 1):
            if stage.latencies:
                groups[f"{number} {stage.kind}"] = [stage]
        if len(groups) == len(ranked):
            groups["total"] = ranked
        for name, group in groups.items():
            seconds = np.sum([stage.latencies for stage in group], axis=0)
            mean = float(seconds.mean())
            p50, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
            gpu_gib = max(stage.gpu_bytes for stage in group) / 2**30
            gpu_seconds = sum(float(np.mean(stage.latencies)) for stage in group if stage.gpu_bytes)
            row: Row = {"system": system, "stage": name}
            row |= {"mean": mean, "p50": p50, "p95": p95, "qps": 1 / mean}
            row |= {"gpu_gib": gpu_gib or None, "gpu_seconds": 1000 * gpu_seconds or None}
            rows.append(row | {"num": len(seconds)})
    return rows


def truncation(config: EncoderConfig | RerankConfig, skills: Sequence[Skill]) -> Row:
    """Return the share of skills that a model sees whole (SkillFlow, figure 6).

    Of such a skill neither the template's limits of characters nor `max_tokens` cuts any field that
    the template shows. A reranker's tokens are counted as if the query had none.
    """
    if isinstance(config, RerankConfig):
        pairs = load_reranker(config, default_device()).pair_tokenizer
        template = pairs.template.skill
        tokenizer = pairs.text
        max_skill_tokens = pairs.settings.max_tokens - pairs.num_fixed
    else:
        encoder = load_encoder(config, default_device())
        template = encoder.settings.template.skill
        tokenizer = encoder.text_tokenizer
        num_special = len(encoder.tokenize([""], 8)[0])
        max_skill_tokens = encoder.settings.max_tokens - num_special
    whole_template = template.model_copy(
        update={"description_chars": _NO_LIMIT, "body_chars": _NO_LIMIT}
    )
    num_whole = 0
    for skill in track(skills, f"lengths for {config.source}", len(skills)):
        text = template.render(skill)
        if text == whole_template.render(skill):
            num_whole += len(tokenizer.ids([text])[0]) <= max_skill_tokens
    return {
        "model": config.source,
        "max_tokens": max_skill_tokens,
        "whole": num_whole / len(skills),
        "num_skills": len(skills),
    }
