"""Everything a report may hold beside the means, and the first of it: what a second system changed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.pass_rates import PassRate
from skilltrain.evaluation.analysis.structure import FeatureComparison
from skilltrain.evaluation.bootstrap import cluster_sums, is_binary
from skilltrain.evaluation.comparison import SystemResult, mcnemar, same_queries, values_of


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What `system` changed (SkillRouter, section 5.5.1): the queries that are right in both, in `system` alone
    (fixed), in `baseline` alone (broken) and in neither; `p` is McNemar's, exact.
    """

    baseline: str
    system: str
    measure: str
    both: tuple[str, ...]
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    neither: tuple[str, ...]
    p: float


@dataclass(frozen=True, slots=True)
class StageLatency:
    """Seconds that a query takes in one ranker of a system (`1 lexical`, … or `total`), of `num` asked one by one."""

    system: str
    stage: str
    p50: float
    p95: float
    qps: float
    num: int


@dataclass(frozen=True, slots=True)
class FieldShares:
    """Shares of the fields; they sum to 1."""

    name: float
    description: float
    body: float


@dataclass(frozen=True, slots=True)
class FieldAttention:
    """Where a reranker looks: attention of the last position (of the first for models with a classification token) to
    the skill's fields (SkillRouter, section 3.2 and appendix F), averaged over heads, normalised over a pair's fields,
    averaged over pairs. `tokens` is what attention without a preference would give: the fields' share of tokens.
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


def outcomes(
    baseline: SystemResult, system: SystemResult, measure: str, clusters: Mapping[str, str] | None = None
) -> Outcomes:
    """The queries that `system` fixed and broke by `measure`, in their order; `clusters` as for `compare`.

    Raises SkilltrainError for a measure with values other than 0 and 1: half a success is neither fixed nor broken.
    """
    query_ids = same_queries([baseline, system])
    before, after = (values_of(result, query_ids, [measure])[:, 0] for result in (baseline, system))
    for result, values in ((baseline, before), (system, after)):
        if not is_binary(values):
            what = f"fixed and broken need a measure that is 0 or 1, and {measure} is neither"
            raise SkilltrainError(what, where=f"system {result.name}", fix="take Hit@k or FC@k")

    def where(was_right: bool, is_right: bool) -> tuple[str, ...]:
        chosen = (before == was_right) & (after == is_right)
        return tuple(query_id for query_id, holds in zip(query_ids, chosen, strict=True) if holds)

    names = [(clusters or {}).get(query_id, query_id) for query_id in query_ids]
    net, _ = cluster_sums((after - before)[:, np.newaxis], names)
    both, fixed = where(True, True), where(False, True)
    broken, neither = where(True, False), where(False, False)
    return Outcomes(baseline.name, system.name, measure, both, fixed, broken, neither, p=mcnemar(net[:, 0]))
