"""What agents could gain from a system's rankings: the coverage mixture of SkillRouter, appendix H, equation 4."""

from dataclasses import dataclass

from skilltrain.evaluation.statistics.bootstrap import Interval


@dataclass(frozen=True, slots=True)
class PassRate:
    """The share of tasks that `agent` may pass with a system's rankings: vanilla + coverage x (gold - vanilla).

    `estimates` maps coverage measure (Hit@1, Recall@10, FC@10) → estimate; shares from 0 to 1.
    """

    system: str
    agent: str
    without_skills: float
    with_gold: float
    estimates: dict[str, Interval]
