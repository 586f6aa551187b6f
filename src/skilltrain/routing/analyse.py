"""The analyses of an evaluation: of its models and skills, before they are asked, and of what they answered."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis import (
    Analysis,
    StageLatency,
    StageRecall,
    Truncation,
    compare_structure,
    outcomes,
)
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, wanted_skills
from skilltrain.evaluation.bootstrap import Interval, intervals, separation
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import Measure, per_query
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig
from skilltrain.retrieval.rankers import key_of, parts_of
from skilltrain.retrieval.rerank import RerankConfig, open_reranker
from skilltrain.routing.field_attention import field_attention
from skilltrain.terminal import track

STAGE_CUTOFFS = (1, 5, 10, 50, 100, 500, 1000)
_WHOLE = 10**9  # characters
_DECIDES = "Hit@1"  # what is right and what is wrong in the analyses that need a yes or no


class AnalysisConfig(Config):
    """What an evaluation looks at beside its measures; all of it costs little but what asks models again."""

    num_timed: int = Field(
        default=0,
        ge=0,
        description="queries asked once more, alone, to time each stage; not of systems that ask a server",
    )
    num_attention: int = Field(
        default=0, ge=0, description="queries with a gold skill in which each reranker's attention by field is measured"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines file of queries (key `query`) that no skill serves: does a system's best score tell?",
    )
    truncation: bool = Field(default=False, description="how many skills each model sees whole; reads the whole pool")
    structure: bool = Field(default=False, description="compare the structure of gold skills with the rest of the pool")


def analyse_inputs(
    config: AnalysisConfig, systems: Sequence[SystemConfig], benchmark: Benchmark, skills: Mapping[str, Skill]
) -> Analysis:
    """The analyses that need no ranking, attention and structure; made first, so that what fails, fails early.

    Attention is that of each reranker, over the first queries, each with the first skill by id that it wants.
    Raises SkilltrainError where an analysis was asked for and cannot be made.
    """
    parts = [part for system in systems for part in parts_of(system.rankers)]
    rerankers = {key_of(part): part for part in parts if isinstance(part, RerankConfig)}
    if config.num_attention and not rerankers:
        raise SkilltrainError("is measured in rerankers, and no system has one", where="analysis.num_attention")
    if config.num_timed and not systems:
        raise SkilltrainError("there are no systems to time", where="analysis.num_timed")
    if config.structure and not skills:
        raise SkilltrainError("needs the skills' texts", where="analysis.structure", fix="give pool=…")
    wanted = [(task.query, wanted_skills(task.relevance, skills)) for task in benchmark.tasks]
    gold = {skill_id: skills[skill_id].body for _, skill_ids in wanted for skill_id in skill_ids}
    others = (skill.body for skill in skills.values() if skill.skill_id not in gold)
    structure = compare_structure(gold.values(), others) if config.structure else ()
    pairs = [(query, skills[skill_ids[0]]) for query, skill_ids in wanted[: config.num_attention]]
    attention = (field_attention(open_reranker(one), pairs, one.source) for one in rerankers.values() if pairs)
    models = {key_of(part): part for part in parts if isinstance(part, EncoderConfig | RerankConfig)}
    cut = [truncation(part, [*skills.values()]) for part in models.values() if config.truncation]
    return Analysis(truncation=tuple(cut), structure=structure, attention=tuple(attention))


def truncation(config: EncoderConfig | RerankConfig, skills: Sequence[Skill]) -> Truncation:
    """How many of `skills` the model sees whole."""
    if isinstance(config, RerankConfig):
        pairs = open_reranker(config).pairs
        template, text, room = pairs.template.skill, pairs.text, pairs.settings.max_tokens - pairs.num_fixed
    else:
        encoder = load_encoder(config, default_device())
        template, text = encoder.settings.template.skill, encoder.text_tokenizer
        room = encoder.settings.max_tokens - len(encoder.tokenize([""], 8)[0])
    uncapped = template.model_copy(update={"description_chars": _WHOLE, "body_chars": _WHOLE})
    num = 0
    for skill in track(skills, f"lengths for {config.source}", len(skills)):
        shown = template.render(skill)
        num += shown == uncapped.render(skill) and len(text.ids([shown])[0]) <= room
    return Truncation(config.source, room, num / len(skills), len(skills))


def analyse_results(
    inputs: Analysis,
    results: Sequence[SystemResult],
    benchmark: Benchmark,
    stages: Mapping[str, Sequence[RankedStage]],
    seed: int,
) -> Analysis:
    """`inputs` with what the results tell; `seed` is the bootstrap's.

    Outcomes compare each system with the one before it: a pair that the recipe puts side by side.
    """
    decides = all(_DECIDES in values for result in results for values in result.per_query.values())
    pairs = pairwise(results) if decides else ()
    found = tuple(outcomes(before, after, _DECIDES, benchmark.clusters) for before, after in pairs)
    return replace(inputs, outcomes=found, stages=stage_recalls(stages, benchmark, seed), latencies=latencies(stages))


def tell_unserved(
    ranked: Mapping[str, Rankings], query_ids: Sequence[str], unserved: Sequence[Query], seed: int
) -> dict[str, Interval]:
    """System → how well its best score tells the queries from the `unserved` ones; where nothing is found, it is -inf.

    A fused score is made of z-scores over a query's own candidates, and so says how far the best one stands out.
    """

    def tops(rankings: Rankings, ids: Iterable[str]) -> list[float]:
        return [rankings[query_id][0][1] if rankings[query_id] else -math.inf for query_id in ids]

    others = [query.query_id for query in unserved]
    return {
        name: separation(tops(rankings, query_ids), tops(rankings, others), seed=seed)
        for name, rankings in ranked.items()
    }


def stage_recalls(
    stages: Mapping[str, Sequence[RankedStage]], benchmark: Benchmark, seed: int
) -> tuple[StageRecall, ...]:
    """What the rankers of each system of several find, one after the other."""
    relevances = {task.query.query_id: task.relevance for task in benchmark.tasks}
    clusters = [task.cluster or task.query.query_id for task in benchmark.tasks]
    found: list[StageRecall] = []
    for system, ranked in stages.items():
        for number, stage in enumerate(ranked if len(ranked) > 1 else (), 1):
            longest = max(1, *map(len, stage.rankings.values()))
            passed = min(stage.num_passed or longest, longest)
            cutoffs = sorted({passed, *(k for k in STAGE_CUTOFFS if k <= longest)})
            measures = [Measure(name, k) for name in ("Recall", "Precision") for k in cutoffs]
            measures += [Measure("MRR", longest), Measure("Hit", passed)]
            ids = {query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in stage.rankings.items()}
            rows = per_query(ids, relevances, measures).values()
            columns = np.array([[row[str(measure)] for measure in measures] for row in rows])
            means = dict(zip(map(str, measures), intervals(columns, seed=seed, clusters=clusters), strict=True))
            found.append(StageRecall(system, f"{number} {stage.kind}", passed, means))
    return tuple(found)


def latencies(stages: Mapping[str, Sequence[RankedStage]]) -> tuple[StageLatency, ...]:
    """How long a query that is asked alone waits for each ranker of the systems that were timed, and for all together.

    Percentiles are between the two nearest measurements (numpy's default); with few queries p95 says little.
    """
    found: list[StageLatency] = []
    for system, ranked in stages.items():
        rows = {f"{number} {stage.kind}": [stage] for number, stage in enumerate(ranked, 1)}
        if all(stage.alone for stage in ranked):
            rows["total"] = [*ranked]
        for name, stages_of in rows.items():
            seconds = np.sum([stage.alone for stage in stages_of], axis=0)
            if seconds.size:
                p50, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
                mean, num_bytes = float(seconds.mean()), max(stage.gpu_bytes for stage in stages_of)
                held = sum(float(np.mean(stage.alone)) for stage in stages_of if stage.gpu_bytes)
                on_gpu = (num_bytes / 2**30, 1000 * held) if num_bytes else (None, None)
                found.append(StageLatency(system, name, mean, p50, p95, 1 / mean, *on_gpu, len(seconds)))
    return tuple(found)
