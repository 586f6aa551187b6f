"""The analyses of an evaluation: computed from rankings, and by asking models once more."""

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from statistics import mean

from pydantic import Field

from skilltrain.config import Config
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.analysis.attention import FieldAttention
from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.evaluation.analysis.outcomes import outcomes
from skilltrain.evaluation.analysis.pass_rates import AGENTS, pass_rates
from skilltrain.evaluation.analysis.quartiles import quartiles
from skilltrain.evaluation.analysis.structure import FeatureComparison, compare_structure
from skilltrain.evaluation.benchmarks.benchmark import Benchmark
from skilltrain.evaluation.results import SystemResult
from skilltrain.records import Skill
from skilltrain.retrieval.field_attention import field_attention
from skilltrain.retrieval.rerank import open_reranker
from skilltrain.routing.systems import SystemConfig

_DECIDES = "Hit@1"  # what is right and what is wrong in the analyses that need a yes or no


class AnalysisConfig(Config):
    """What an evaluation looks at beside its measures; all of it costs little but what asks models again."""

    num_timed: int = Field(default=0, ge=0, description="queries asked once more, alone, to time each stage")
    num_attention: int = Field(
        default=0, ge=0, description="queries with a gold skill in which each reranker's attention by field is measured"
    )
    structure: bool = Field(default=False, description="compare the structure of gold skills with the rest of the pool")


def analyse(
    config: AnalysisConfig,
    systems: Sequence[SystemConfig],
    results: Sequence[SystemResult],
    benchmark: Benchmark,
    skills: Sequence[Skill],
    latencies: tuple[StageLatency, ...],
    seed: int,
) -> Analysis:
    """All analyses that can be made of what is given; without the pool's texts some are left out.

    Outcomes compare each system with the one before it; a pair of systems that the recipe puts side by side.
    """
    by_id = _gold_skills(benchmark, skills)
    decides = all(_DECIDES in values for result in results for values in result.per_query.values())
    lengths = _description_lengths(benchmark, by_id)
    return Analysis(
        outcomes=tuple(outcomes(a, b, _DECIDES) for a, b in pairwise(results)) if decides else (),
        quartiles=quartiles(results, lengths, _DECIDES, seed=seed) if decides and lengths else (),
        pass_rates=pass_rates(results, AGENTS, seed=seed),
        latencies=latencies,
        structure=_structure(skills, by_id) if config.structure else (),
        attention=_attention(config.num_attention, systems, benchmark, by_id),
    )


def _gold_skills(benchmark: Benchmark, skills: Sequence[Skill]) -> dict[str, Skill]:
    gold = {skill_id for task in benchmark.tasks for skill_id in task.relevance.gold}
    return {skill.skill_id: skill for skill in skills if skill.skill_id in gold}


def _description_lengths(benchmark: Benchmark, gold: Mapping[str, Skill]) -> dict[str, float]:
    """query_id → mean characters of its gold skills' descriptions; empty where the pool is not known."""
    if not gold:
        return {}
    return {
        task.query.query_id: mean(len(gold[skill_id].description) for skill_id in task.relevance.gold)
        for task in benchmark.tasks
    }


def _structure(skills: Sequence[Skill], gold: Mapping[str, Skill]) -> tuple[FeatureComparison, ...]:
    others = (skill.body for skill in skills if skill.skill_id not in gold)
    return compare_structure([skill.body for skill in gold.values()], others) if gold else ()


def _attention(
    num: int, systems: Sequence[SystemConfig], benchmark: Benchmark, gold: Mapping[str, Skill]
) -> tuple[FieldAttention, ...]:
    """Of each distinct reranker, over the first `num` queries, each with its first gold skill by id."""
    pairs = [(task.query.text, gold[min(task.relevance.gold)]) for task in islice(benchmark.tasks, num)]
    sources = {repr(system.reranker): system.reranker for system in systems if system.reranker is not None}
    if not pairs:
        return ()
    return tuple(field_attention(open_reranker(source), pairs, source.source) for source in sources.values())
