"""An embeddings API as a ranker."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from skilltrain.llm.embeddings import Embeddings
from skilltrain.records import Skill
from skilltrain.retrieval.api_encoder import ApiEncoderSource, encode_queries, encode_skills, open_encoder
from skilltrain.retrieval.nearest import VectorRanker


class ApiConfig(ApiEncoderSource):
    """An embeddings server that finds the skills nearest to a query."""

    kind: Literal["api"] = "api"
    keep: int | None = Field(default=None, ge=1, description="skills a query that are kept; null: as many as needed")

    def check(self) -> None:
        """Raise SkilltrainError for settings that the server cannot have."""
        Embeddings(self)

    def open(self, skills: Sequence[Skill]) -> VectorRanker:
        """The server with the vectors of the pool."""
        encoder = open_encoder(self)
        vectors = encode_skills(encoder, skills)
        return VectorRanker([skill.skill_id for skill in skills], vectors, lambda texts: encode_queries(encoder, texts))
