"""What a system scored, query by query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SystemResult:
    """What one system scored: query_id → measure name → value (metrics.per_query), and its rankings of skill ids."""

    name: str
    per_query: Mapping[str, Mapping[str, float]]
    rankings: Mapping[str, Sequence[str]]
