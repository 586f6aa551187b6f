"""A chat model that picks one candidate, as a ranker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from skilltrain.llm import open_llm
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.judge import JudgeSource, judge


class SelectConfig(JudgeSource):
    """A chat model that puts one of the candidates of the ranker before it first."""

    kind: Literal["select"] = "select"
    keep: int = Field(default=20, ge=1, description="candidates that it sees; the others stay behind these")

    def check(self) -> None:
        """Raise SkilltrainError for settings that the model's server cannot have."""
        open_llm(self.llm)

    def open(self, skills: Sequence[Skill]) -> "Select":
        """The model ready to choose."""
        return Select(self, {skill.skill_id: skill for skill in skills})


@dataclass
class Select:
    """A chat model at work; `counts` is what it did when it was last asked: requests, tokens, dollars, failures."""

    config: SelectConfig
    skills: Mapping[str, Skill]
    counts: dict[str, Any] = field(default_factory=dict)

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The chosen candidate first, the others as they were. Scores are minus the rank: a choice has none."""
        assert candidates is not None, "a chat model needs candidates"
        ids = {query.query_id: [skill_id for skill_id, _ in candidates[query.query_id]] for query in queries}
        top = {query_id: skill_ids[:keep] for query_id, skill_ids in ids.items()}
        judged = judge(self.config, {query.query_id: query.text for query in queries}, top, self.skills)
        self.counts = judged.counts()
        return {
            query_id: [
                (skill_id, -float(rank))
                for rank, skill_id in enumerate([*judged.rankings[query_id], *skill_ids[keep:]], 1)
            ]
            for query_id, skill_ids in ids.items()
        }
