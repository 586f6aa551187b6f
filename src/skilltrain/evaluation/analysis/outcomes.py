"""What a second system changed, query by query: fixed, broken, both right, both wrong (SkillRouter, section 5.5.1)."""

from dataclasses import dataclass

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.significance import mcnemar
from skilltrain.evaluation.statistics.values import same_queries, values_of


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


def outcomes(baseline: SystemResult, system: SystemResult, measure: str) -> Outcomes:
    """The queries that `system` fixed and broke by `measure`, and those where it changed nothing, in their order.

    Raises SkilltrainError for systems that do not hold the same queries, a measure that one of them lacks, and one
    with values other than 0 and 1: half a success is neither fixed nor broken.
    """
    query_ids = same_queries([baseline, system])
    if not query_ids:
        raise SkilltrainError("it holds no queries", where=f"system {baseline.name}")
    before, after = (_successes(result, query_ids, measure) for result in (baseline, system))
    cells: dict[tuple[bool, bool], list[str]] = {}
    for query_id, case in zip(query_ids, zip(before, after, strict=True), strict=True):
        cells.setdefault(case, []).append(query_id)
    return Outcomes(
        baseline=baseline.name,
        system=system.name,
        measure=measure,
        both=tuple(cells.get((True, True), ())),
        fixed=tuple(cells.get((False, True), ())),
        broken=tuple(cells.get((True, False), ())),
        neither=tuple(cells.get((False, False), ())),
        p=mcnemar(before, after),
    )


def _successes(result: SystemResult, query_ids: tuple[str, ...], measure: str) -> list[bool]:
    values = values_of(result, query_ids, [measure])[:, 0].tolist()
    if between := [i for i, value in enumerate(values) if value not in (0, 1)]:
        place = between[0]
        raise SkilltrainError(
            f"fixed and broken need a measure that is 0 or 1: {measure} is neither for {len(between)} queries, "
            f"first {values[place]:g} for '{query_ids[place]}'",
            where=f"system {result.name}",
            fix="take Hit@k or FC@k",
        )
    return [value == 1 for value in values]
