"""One request in plain words → ranked skills."""

from collections.abc import Sequence
from dataclasses import dataclass

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.routing.systems import SystemConfig, rank_with_systems


@dataclass(frozen=True)
class RoutedSkill:
    """One answer: how far up, how sure, and which skill."""

    rank: int
    score: float
    skill: Skill


def route(request: str, skills: Sequence[Skill], system: SystemConfig, top: int) -> list[RoutedSkill]:
    """The `top` skills of the pool for `request`, best first. Raises SkilltrainError for an empty request."""
    if not request.strip():
        raise SkilltrainError("the request is empty")
    by_id = {skill.skill_id: skill for skill in skills}
    ranking = rank_with_systems([system], {"request": request}, skills, top)[system.name]["request"]
    return [RoutedSkill(rank, score, by_id[skill_id]) for rank, (skill_id, score) in enumerate(ranking, 1)]
