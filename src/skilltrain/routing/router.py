"""One request in plain words → ranked skills."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skilltrain.data.screening import Flag, screen
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.routing.skills_by_id import SkillsById
from skilltrain.routing.systems import SystemConfig, rank_with_systems


@dataclass(frozen=True)
class RoutedSkill:
    """One answer: how far up, how sure, which skill, and what the safety screening found in it."""

    rank: int
    score: float
    skill: Skill
    flags: tuple[Flag, ...]


def route(
    request: str,
    skills: Sequence[Skill],
    system: SystemConfig,
    top: int,
    flags: Mapping[str, Sequence[Flag]] | None = None,
) -> list[RoutedSkill]:
    """The `top` skills of the pool for `request`, best first. Raises SkilltrainError for an empty request.

    `flags` are those of the pool's screening; without them the answers are screened here.
    """
    if not request.strip():
        raise SkilltrainError("the request is empty")
    ranking = rank_with_systems([system], {"request": request}, skills, top)[system.name]["request"]
    by_id = SkillsById(skills)
    answers = [(rank, score, by_id[skill_id]) for rank, (skill_id, score) in enumerate(ranking, 1)]
    return [
        RoutedSkill(rank, score, skill, tuple(screen(skill) if flags is None else flags.get(skill.skill_id, ())))
        for rank, score, skill in answers
    ]
