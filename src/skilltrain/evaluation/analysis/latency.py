"""How long a query waits for each stage of a system."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLatency:
    """Seconds a query takes in one stage (`encode query`, `search`, `rerank`, `judge`, or `total`), asked one by one.

    `qps` is queries a second at one query at a time, `num` the number of timed queries.
    """

    system: str
    stage: str
    p50: float
    p95: float
    qps: float
    num: int
