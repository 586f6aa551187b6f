"""Whether the length of a skill's description decides how well it is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.results import SystemResult, same_queries, values_of
from skilltrain.evaluation.statistics.bootstrap import Interval, intervals


@dataclass(frozen=True, slots=True)
class Quartile:
    """Queries whose gold skills' descriptions are `shortest` to `longest` characters long (their mean a query).

    `means` maps system → mean of `measure` over these queries.
    """

    number: int
    shortest: float
    longest: float
    measure: str
    means: Mapping[str, Interval]


def quartiles(
    results: Sequence[SystemResult], lengths: Mapping[str, float], measure: str, *, seed: int
) -> tuple[Quartile, ...]:
    """The systems' means of `measure` over four parts of the queries, from short to long, with bootstrap intervals.

    `lengths` maps query_id → mean length in characters of its gold skills' descriptions; it may hold further queries.
    Queries are cut in four by rank; equal lengths stay together, in the part where the middle of them falls. So parts
    may differ in size, and fewer than four distinct lengths give fewer parts; an empty part is left out, and the
    others are numbered from 1. Systems share their draws within a part. No systems give no parts.
    Raises SkilltrainError for systems that do not hold the same queries, a measure that one of them lacks, and a
    query whose length is missing or not a finite number from 0.
    """
    query_ids = same_queries(results)
    _check_lengths(query_ids, lengths)
    return tuple(
        _quartile(number, part, results, lengths, measure, seed=seed)
        for number, part in enumerate(_parts(query_ids, lengths), 1)
    )


def _parts(query_ids: Sequence[str], lengths: Mapping[str, float]) -> list[list[str]]:
    parts: tuple[list[str], ...] = ([], [], [], [])
    start = 0
    for _, equal in groupby(sorted(query_ids, key=lengths.__getitem__), key=lengths.__getitem__):
        group = list(equal)
        end = start + len(group)
        parts[2 * (start + end) // len(query_ids)].extend(group)  # 4 x the middle's share of the ranks, rounded down
        start = end
    return [part for part in parts if part]


def _quartile(
    number: int,
    query_ids: Sequence[str],
    results: Sequence[SystemResult],
    lengths: Mapping[str, float],
    measure: str,
    *,
    seed: int,
) -> Quartile:
    columns = np.concatenate([values_of(system, query_ids, [measure]) for system in results], axis=1)
    means = zip(results, intervals(columns, seed=seed), strict=True)
    return Quartile(
        number=number,
        shortest=lengths[query_ids[0]],
        longest=lengths[query_ids[-1]],
        measure=measure,
        means={system.name: mean for system, mean in means},
    )


def _check_lengths(query_ids: Sequence[str], lengths: Mapping[str, float]) -> None:
    if absent := [query_id for query_id in query_ids if query_id not in lengths]:
        raise SkilltrainError(f"{len(absent)} queries have no description length, first '{absent[0]}'")
    for query_id in query_ids:
        if not 0 <= lengths[query_id] < float("inf"):  # refuses NaN too
            raise SkilltrainError(
                f"a description length is a finite number from 0, found {lengths[query_id]}", where=f"query {query_id}"
            )
