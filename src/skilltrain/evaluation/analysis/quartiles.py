"""Whether the length of a skill's description decides how well it is found."""

from collections.abc import Mapping
from dataclasses import dataclass

from skilltrain.evaluation.statistics.bootstrap import Interval


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
