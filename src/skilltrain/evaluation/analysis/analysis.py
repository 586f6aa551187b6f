"""Everything a report may hold beside the means."""

from dataclasses import dataclass

from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.analysis.pass_rates import PassRate
from skilltrain.evaluation.analysis.structure import FeatureComparison


@dataclass(frozen=True, slots=True)
class StageLatency:
    """Seconds that a query takes in one ranker of a system (`1 lexical`, `2 rerank`, … or `total`), asked one by one.

    `qps` is queries a second at one query at a time, `num` the number of timed queries.
    """

    system: str
    stage: str
    p50: float
    p95: float
    qps: float
    num: int


@dataclass(frozen=True, slots=True)
class FieldShares:
    """Shares of name, description and body; they sum to 1."""

    name: float
    description: float
    body: float


@dataclass(frozen=True, slots=True)
class FieldAttention:
    """Where a reranker looks: attention of the last position (of the first for models with a classification token) to
    the skill's fields (SkillRouter, section 3.2 and appendix F).

    Averaged over heads, then normalised over the three fields of each pair, then averaged over pairs. `tokens` is the
    share of the fields in the tokens: what attention without a preference would give.
    """

    model: str
    layers: tuple[FieldShares, ...]
    overall: FieldShares
    tokens: FieldShares
    num_pairs: int


@dataclass(frozen=True)
class Analysis:
    """The analyses of one evaluation; what was not asked for, or cannot be computed, is empty."""

    outcomes: tuple[Outcomes, ...] = ()
    pass_rates: tuple[PassRate, ...] = ()
    latencies: tuple[StageLatency, ...] = ()
    structure: tuple[FeatureComparison, ...] = ()
    attention: tuple[FieldAttention, ...] = ()
