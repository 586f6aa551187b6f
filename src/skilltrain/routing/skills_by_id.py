"""Skills of a pool by their ids, without the texts of all of them in memory."""

from collections.abc import Iterator, Mapping, Sequence

from skilltrain.data.stored_skills import StoredSkills
from skilltrain.records import Skill


class SkillsById(Mapping[str, Skill]):
    """skill_id → skill, in the order of the pool. A skill that lies on disk is read each time it is asked for."""

    def __init__(self, skills: Sequence[Skill]) -> None:
        stored = isinstance(skills, StoredSkills)
        self.skill_ids: Sequence[str] = skills.skill_ids if stored else [skill.skill_id for skill in skills]
        self._skills, self._places = skills, {skill_id: place for place, skill_id in enumerate(self.skill_ids)}

    def __getitem__(self, skill_id: str) -> Skill:
        return self._skills[self._places[skill_id]]

    def __contains__(self, skill_id: object) -> bool:
        return skill_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self.skill_ids)

    def __len__(self) -> int:
        return len(self.skill_ids)
