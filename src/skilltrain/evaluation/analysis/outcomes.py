"""What a second system changed, query by query: fixed, broken, both right, both wrong (SkillRouter, section 5.5.1)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.results import SystemResult, same_queries, values_of
from skilltrain.evaluation.statistics.bootstrap import cluster_sums, is_binary
from skilltrain.evaluation.statistics.significance import mcnemar


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The queries of a 2x2 table of two systems by a measure that is 0 or 1; `p` is McNemar's, two-sided and exact.

    `fixed` are right in `system` alone, `broken` in `baseline` alone.
    """

    baseline: str
    system: str
    measure: str
    both: tuple[str, ...]
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    neither: tuple[str, ...]
    p: float


def outcomes(
    baseline: SystemResult, system: SystemResult, measure: str, clusters: Mapping[str, str] | None = None
) -> Outcomes:
    """The queries that `system` fixed and broke by `measure`, and those where it changed nothing, in their order.

    `clusters` as for `compare`. Raises SkilltrainError for systems that do not hold the same queries, a measure that
    one of them lacks, and one with values other than 0 and 1: half a success is neither fixed nor broken.
    """
    query_ids = same_queries([baseline, system])
    before, after = (values_of(result, query_ids, [measure])[:, 0] for result in (baseline, system))
    for result, values in ((baseline, before), (system, after)):
        if not is_binary(values):
            what = f"fixed and broken need a measure that is 0 or 1, and {measure} is neither"
            raise SkilltrainError(what, where=f"system {result.name}", fix="take Hit@k or FC@k")
    cells: dict[tuple[bool, bool], list[str]] = {}
    for query_id, was_right, is_right in zip(query_ids, before, after, strict=True):
        cells.setdefault((bool(was_right), bool(is_right)), []).append(query_id)
    names = [(clusters or {}).get(query_id, query_id) for query_id in query_ids]
    net, _ = cluster_sums((after - before)[:, np.newaxis], names)
    return Outcomes(
        baseline=baseline.name,
        system=system.name,
        measure=measure,
        both=tuple(cells.get((True, True), ())),
        fixed=tuple(cells.get((False, True), ())),
        broken=tuple(cells.get((True, False), ())),
        neither=tuple(cells.get((False, False), ())),
        p=mcnemar(net[:, 0]),
    )
