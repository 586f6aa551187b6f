"""How long one query waits, stage by stage: queries are asked one after the other, alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.terminal import without_bars

Step = tuple[str, Callable[[str, Any], Any]]
"""(name, function of the query's id and of what the step before it returned)."""


def time_steps(
    system: str, steps: Sequence[Step], query_ids: Sequence[str], clock: Callable[[], float]
) -> tuple[StageLatency, ...]:
    """The latency of each step and of all together, over `query_ids`; the first is asked twice, once to warm up.

    `clock` tells the seconds, like time.perf_counter. Percentiles are between the two nearest measurements (numpy's
    default); with few queries p95 says little.
    """
    seconds = np.array([_time_query(steps, query_id, clock) for query_id in (query_ids[0], *query_ids)])[1:]
    rows = {name: seconds[:, column] for column, (name, _) in enumerate(steps)} | {"total": seconds.sum(axis=1)}
    return tuple(
        StageLatency(
            system, name, float(np.quantile(row, 0.5)), float(np.quantile(row, 0.95)), float(1 / row.mean()), len(row)
        )
        for name, row in rows.items()
    )


def _time_query(steps: Sequence[Step], query_id: str, clock: Callable[[], float]) -> list[float]:
    taken: list[float] = []
    value: Any = None
    with without_bars():
        for _, step in steps:
            started = clock()
            value = step(query_id, value)
            taken.append(clock() - started)
    return taken
