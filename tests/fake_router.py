"""A router without models: skills are ranked by the words that they share with a task."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skilltrain.data.screening import screen
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill


@dataclass
class FakeRouter:
    """What a server asks of a router. A task with `nothing` in it fits no skill."""

    skills: dict[str, Skill]

    def __post_init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.updates: list[list[str]] = []

    def route(self, task: str, k: int) -> Any:
        """The skills that share a word with the task."""
        if not task.strip():
            raise SkilltrainError("the request is empty")
        words = set(task.lower().split())
        scores = {key: len(words & set(f"{s.name} {s.description}".lower().split())) for key, s in self.skills.items()}
        ranked = sorted((key for key in scores if scores[key]), key=lambda key: (-scores[key], key))[:k]
        found = [
            SimpleNamespace(
                rank=rank, skill_id=key, name=self.skills[key].name, description=self.skills[key].description,
                path=Path("/nowhere"), score=float(scores[key]), probability=0.5, flags=tuple(screen(self.skills[key])),
                why=SimpleNamespace(placed=(SimpleNamespace(ranker="words", rank=rank, score=1.0),), terms=("pdf",)),
            )
            for rank, key in enumerate(ranked, 1)
        ]  # fmt: skip
        return SimpleNamespace(skills=tuple(found), fits=bool(found) and "nothing" not in words, num_likely=None)

    def flags(self, skill: Skill) -> Any:
        """What the screening finds."""
        return tuple(screen(skill))

    def update(self, skills: list[Skill]) -> dict[str, int]:
        """Answer with these skills from now on."""
        self.updates.append([skill.skill_id for skill in skills])
        self.skills = {skill.skill_id: replace(skill) for skill in skills}
        return {"num_skills": len(skills)}

    def refresh(self) -> bool:
        """Nobody else writes it."""
        return False
