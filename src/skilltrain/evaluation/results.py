"""What a system scored, query by query, and its values as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError


@dataclass(frozen=True)
class SystemResult:
    """What one system scored: query_id → measure name → value (metrics.per_query), and its rankings of skill ids."""

    name: str
    per_query: Mapping[str, Mapping[str, float]]
    rankings: Mapping[str, Sequence[str]]


def same_queries(results: Sequence[SystemResult]) -> tuple[str, ...]:
    """The ids of the queries that every system was scored on, in the first system's order; () for no systems.

    Raises SkilltrainError where two systems share a name or hold different queries.
    """
    if not results:
        return ()
    first, names = results[0], set[str]()
    for system in results:
        if system.name in names:
            raise SkilltrainError(f"two systems are named '{system.name}'", fix="give each system a name of its own")
        names.add(system.name)
        if odd := sorted(system.per_query.keys() ^ first.per_query.keys()):
            held = f"(system {first.name} holds {len(first.per_query)}, this one {len(system.per_query)})"
            what = f"runs over different query sets compared: {len(odd)} queries stand on one side only {held}"
            fix = "score all systems on the same queries"
            raise SkilltrainError(f"{what}, first '{odd[0]}'", where=f"system {system.name}", fix=fix)
    return tuple(first.per_query)


def values_of(
    system: SystemResult, query_ids: Sequence[str], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
    """The system's values in the orders asked for. Raises SkilltrainError for one that is missing or not finite."""
    values = np.empty((len(query_ids), len(measures)))
    for column, measure in enumerate(measures):
        found = [system.per_query[query_id].get(measure) for query_id in query_ids]
        if absent := [query_id for query_id, value in zip(query_ids, found, strict=True) if value is None]:
            what = f"{len(absent)} queries have no value of measure '{measure}', first '{absent[0]}'"
            raise SkilltrainError(what, where=f"system {system.name}")
        values[:, column] = found
    if len(bad := np.argwhere(~np.isfinite(values))):
        row, column = bad[0]
        what = f"{len(bad)} values are not finite numbers, first {measures[column]} = {values[row, column]}"
        raise SkilltrainError(f"{what} of query '{query_ids[row]}'", where=f"system {system.name}")
    return values
