"""The values of systems on the same queries, checked before anything is compared."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.results import SystemResult


def same_queries(results: Sequence[SystemResult]) -> tuple[str, ...]:
    """The ids of the queries that every system was scored on, in the first system's order; () for no systems.

    Raises SkilltrainError where two systems share a name or hold different queries: a mean over other queries is
    another quantity, and a paired test over the common ones would leave out those that a system failed to answer.
    """
    if not results:
        return ()
    first, names = results[0], set[str]()
    for system in results:
        if system.name in names:
            raise SkilltrainError(f"two systems are named '{system.name}'", fix="give each system a name of its own")
        names.add(system.name)
        if odd := sorted(system.per_query.keys() ^ first.per_query.keys()):
            raise SkilltrainError(
                f"runs over different query sets compared: {len(odd)} queries stand on one side only "
                f"(system {first.name} holds {len(first.per_query)}, this one {len(system.per_query)}), "
                f"first '{odd[0]}'",
                where=f"system {system.name}",
                fix="score all systems on the same queries",
            )
    return tuple(first.per_query)


def values_of(
    system: SystemResult, query_ids: Sequence[str], measures: Sequence[str]
) -> Float[np.ndarray, "query measure"]:
    """The system's values, float64, one row a query and one column a measure, in the orders asked for.

    Raises SkilltrainError for queries and measures that the system does not hold, a query that is asked for twice
    (it would count twice) and values that are not finite.
    """
    where = f"system {system.name}"
    if absent := [query_id for query_id in query_ids if query_id not in system.per_query]:
        raise SkilltrainError(f"{len(absent)} queries have no values, first '{absent[0]}'", where=where)
    if len(set(query_ids)) < len(query_ids):
        twice = next(query_id for i, query_id in enumerate(query_ids) if query_id in query_ids[:i])
        raise SkilltrainError(f"query '{twice}' is asked for twice and would count twice", where=where)
    for measure in measures:
        if absent := [query_id for query_id in query_ids if measure not in system.per_query[query_id]]:
            raise SkilltrainError(
                f"{len(absent)} queries have no value of measure '{measure}', first '{absent[0]}'",
                where=where,
                fix=f"that query holds {', '.join(system.per_query[absent[0]]) or 'no measure'}",
            )
    rows = [[system.per_query[query_id][measure] for measure in measures] for query_id in query_ids]
    values = np.array(rows, dtype=np.float64).reshape(len(query_ids), len(measures))
    if len(bad := np.argwhere(~np.isfinite(values))):
        row, column = bad[0]
        raise SkilltrainError(
            f"{len(bad)} values are not finite numbers, first {measures[column]} = {values[row, column]} "
            f"of query '{query_ids[row]}'",
            where=where,
        )
    return values
