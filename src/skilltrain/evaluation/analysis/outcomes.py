"""What a second system changed, query by query: fixed, broken, both right, both wrong (SkillRouter, section 5.5.1)."""

from dataclasses import dataclass


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
