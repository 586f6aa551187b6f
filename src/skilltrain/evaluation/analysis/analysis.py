"""Everything a report may hold beside the means."""

from dataclasses import dataclass

from skilltrain.evaluation.analysis.attention import FieldAttention
from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.analysis.pass_rates import PassRate
from skilltrain.evaluation.analysis.structure import FeatureComparison


@dataclass(frozen=True)
class Analysis:
    """The analyses of one evaluation; what was not asked for, or cannot be computed, is empty."""

    outcomes: tuple[Outcomes, ...] = ()
    pass_rates: tuple[PassRate, ...] = ()
    latencies: tuple[StageLatency, ...] = ()
    structure: tuple[FeatureComparison, ...] = ()
    attention: tuple[FieldAttention, ...] = ()
