"""One request in plain words → ranked skills."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skilltrain.data.screening import Flag, screen
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import SystemConfig, run_systems


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
    query = Query("request", request, kind="", origin="", split="")
    ranking = run_systems([system], [query], skills, top)[system.name][-1].rankings[query.query_id]
    by_id = {skill.skill_id: skill for skill in skills}
    answers: list[RoutedSkill] = []
    for rank, (skill_id, score) in enumerate(ranking, 1):
        found = screen(by_id[skill_id]) if flags is None else flags.get(skill_id, ())
        answers.append(RoutedSkill(rank, score, by_id[skill_id], tuple(found)))
    return answers
