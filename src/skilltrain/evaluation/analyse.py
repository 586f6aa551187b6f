"""The analyses of an evaluation, each a list of rows in metrics.json, of its models and skills and of their answers."""

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
from skilltrain.metrics.comparison import (
    SystemResult,
    same_queries,
    sign_test,
    values_of,
)
from skilltrain.metrics.measures import Measure, per_query
from skilltrain.metrics.slices import Row, means_of
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.plugins import OneOf
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig
from skilltrain.retrieval.rankers import parts_of
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track

STAGE_CUTOFFS = (1, 5, 10, 50, 100, 500, 1000)
_DECIDES = "Hit@1"  # what is right and what is wrong in the analyses that need a yes or no
_WHOLE = 10**9  # characters


class Inputs(NamedTuple):
    """What an evaluation is made of. `skills` are those of all pools by id."""

    systems: Sequence[SystemConfig]
    benchmark: Benchmark
    skills: Mapping[str, Skill]

    def models(self) -> list[EncoderConfig | RerankConfig]:
        """Return the distinct models that run on this machine."""
        parts = {part.key: part for system in self.systems for part in parts_of(system.rankers)}
        return [part for part in parts.values() if isinstance(part, EncoderConfig | RerankConfig)]


class Analysis(Config):
    """Base of an analysis: settings, and rows of metrics.json under its kind, which a report shows as a table.

    A subclass has one of the two methods.
    """

    kind: Any  # a Literal in each analysis

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        """Analyse models or skills before anything is ranked. Raises SkilltrainError if it cannot."""
        return []

    def analyse_results(self, report: Report) -> list[Row]:
        """Analyse rankings and their values."""
        return []


class AnalysisConfig(Config):
    """What an evaluation looks at beside its measures; all of it costs little but what asks models again."""

    num_timed: int = Field(
        default=0, ge=0, description="queries asked once more, alone, to time what asks no server"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of queries (key `query`) that no skill serves: does the best score tell?",
    )
    truncation: bool = Field(
        default=False, description="how many skills each model sees whole; reads the whole pool"
    )
    more: tuple[Annotated[SerializeAsAny[Analysis], OneOf("analysis")], ...] = Field(
        default=cast(Any, ({"kind": "pass_rates"},)), description="further analyses"
    )


def analyse_inputs(config: AnalysisConfig, inputs: Inputs) -> dict[str, list[Row]]:
    """The analyses that need no ranking, made first, so that what fails, fails early.

    Raises SkilltrainError where an analysis was asked for and cannot be made.
    """
    rows = {one.kind: one.analyse_inputs(inputs) for one in config.more}
    if config.truncation:
        skills = [*inputs.skills.values()]
        rows["truncation"] = [truncation(model, skills) for model in inputs.models()]
    return rows


def analyse_results(
    config: AnalysisConfig, report: Report, stages: Mapping[str, Sequence[RankedStage]]
) -> dict[str, list[Row]]:
    """Analyse the results. `report` has the rows of `analyse_inputs`.

    Outcomes compare each system with the one before it: a pair that the recipe puts side by side.
    """
    results = report.results
    decides = all(_DECIDES in values for result in results for values in result.per_query.values())
    pairs = pairwise(results) if decides else ()
    return {
        "outcomes": [outcomes(before, after, _DECIDES) for before, after in pairs],
        "stages": stage_recalls(stages, report.benchmark),
        "latencies": latencies(stages),
        **{
            one.kind: [*report.analysis[one.kind], *one.analyse_results(report)]
            for one in config.more
        },
    }


def outcomes(baseline: SystemResult, system: SystemResult, measure: str) -> Row:
    """Return which queries `system` changed, by a measure that is 0 or 1 (SkillRouter, section 5.5.1).

    Queries are right in both systems, in `system` alone (fixed), in `baseline` alone (broken) or in neither. `p` is
    exact (`sign_test`).
    """
    query_ids = same_queries([baseline, system])
    before, after = (values_of(result, query_ids, [measure]) for result in (baseline, system))
    net, _ = cluster_sums(after - before, baseline.clusters_of(query_ids))
    row: Row = {"baseline": baseline.name, "system": system.name, "measure": measure}
    row["p"] = sign_test(net[:, 0])
    cells = {"both": (1, 1), "fixed": (0, 1), "broken": (1, 0), "neither": (0, 0)}
    for cell, (was_right, is_right) in cells.items():
        chosen = (before == was_right) & (after == is_right)
        row[cell] = np.array(query_ids)[chosen[:, 0]].tolist()
    return row


def tell_unserved(
    ranked: Mapping[str, Rankings], query_ids: Sequence[str], unserved: Sequence[Query]
) -> dict[str, Interval]:
    """System → the chance that its best score for a query is above that for one of the `unserved`; -inf for no skill.

    A fused score is made of z-scores over a query's own candidates, and so says how far the best one stands out.
    """

    def tops(rankings: Rankings, ids: Iterable[str]) -> list[float]:
        return [rankings[query_id][0][1] if rankings[query_id] else -math.inf for query_id in ids]

    others = [query.query_id for query in unserved]
    return {
        name: separation(tops(row, query_ids), tops(row, others)) for name, row in ranked.items()
    }


def stage_recalls(stages: Mapping[str, Sequence[RankedStage]], benchmark: Benchmark) -> list[Row]:
    """What each ranker of the systems of several finds (SkillFlow, table 3): the means of measures with cutoffs up to
    its longest ranking, and how many skills it passes on (`num_passed`).

    Recall at this cutoff is what later rankers cannot exceed, Hit at it the Hit@1 of a perfect next ranker.
    """
    relevances = benchmark.relevances
    found: list[Row] = []
    for system, ranked in stages.items():
        for number, stage in enumerate(ranked if len(ranked) > 1 else (), 1):
            longest = max(1, *map(len, stage.rankings.values()))
            passed = min(stage.num_passed or longest, longest)
            cutoffs = sorted({passed, *(k for k in STAGE_CUTOFFS if k <= longest)})
            measures = [Measure(name, k) for name in ("Recall", "Precision") for k in cutoffs]
            measures += [Measure("MRR", longest), Measure("Hit", passed)]
            scores = per_query(stage.skill_ids(), relevances, measures)
            result = SystemResult(system, scores, {}, benchmark.clusters)
            means = means_of([result], list(relevances), list(map(str, measures)))[system]
            row: Row = {"system": system, "stage": f"{number} {stage.kind}"}
            found.append(row | {"num_passed": passed, "means": means})
    return found


def latencies(stages: Mapping[str, Sequence[RankedStage]]) -> list[Row]:
    """Seconds that a query asked alone waits for each ranker of the systems that were timed, and for all (`total`).

    `gpu_gib` is the most memory in use on the GPU, `gpu_seconds` are those of 1,000 queries for which a ranker holds
    it; both are None for rankers that use none. With few queries p95 says little.
    """
    found: list[Row] = []
    for system, ranked in stages.items():
        rows = {
            f"{number} {stage.kind}": [stage]
            for number, stage in enumerate(ranked, 1)
            if stage.alone
        }
        if len(rows) == len(ranked):
            rows["total"] = [*ranked]
        for name, own in rows.items():
            seconds = np.sum([stage.alone for stage in own], axis=0)
            mean, (p50, p95) = float(seconds.mean()), np.quantile(seconds, (0.5, 0.95)).tolist()
            num_bytes = max(stage.gpu_bytes for stage in own)
            held = sum(float(np.mean(stage.alone)) for stage in own if stage.gpu_bytes)
            gpu = {"gpu_gib": num_bytes / 2**30 or None, "gpu_seconds": 1000 * held or None}
            times = {"mean": mean, "p50": p50, "p95": p95, "qps": 1 / mean}
            found.append({"system": system, "stage": name, **times, **gpu, "num": len(seconds)})
    return found


def truncation(config: EncoderConfig | RerankConfig, skills: Sequence[Skill]) -> Row:
    """The share of `skills` that a model sees whole (SkillFlow, figure 6): of the fields that it is shown, neither the
    template's characters nor its tokens cut anything. Nothing is taken off a reranker's tokens for the query.
    """
    if isinstance(config, RerankConfig):
        pairs = load_reranker(config, default_device()).pair_tokenizer
        template, text, room = (
            pairs.template.skill,
            pairs.text,
            pairs.settings.max_tokens - pairs.num_fixed,
        )
    else:
        encoder = load_encoder(config, default_device())
        template, text = encoder.settings.template.skill, encoder.text_tokenizer
        room = encoder.settings.max_tokens - len(encoder.tokenize([""], 8)[0])
    uncapped = template.model_copy(update={"description_chars": _WHOLE, "body_chars": _WHOLE})
    num = 0
    for skill in track(skills, f"lengths for {config.source}", len(skills)):
        shown = template.render(skill)
        num += shown == uncapped.render(skill) and len(text.ids([shown])[0]) <= room
    return {
        "model": config.source,
        "max_tokens": room,
        "whole": num / len(skills),
        "num_skills": len(skills),
    }
