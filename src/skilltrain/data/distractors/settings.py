"""The settings of stage `distractors`."""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.llm import LLMConfig

_TOKENS_PER_WORD = 1.6  # of a body as a JSON string: 1.3 in English prose, more in code and other scripts


class DistractorsConfig(Config):
    """Write skills that resemble the gold skills of a benchmark and do not do their work."""

    stage: Literal["distractors"] = "distractors"
    benchmark: InputPath = Field(description="benchmark folder whose gold skills are to be resembled")
    split: str | None = Field(default=None, description="only the gold skills of this split's queries; null: of all")
    pool: InputPath | None = Field(
        default=None, description="SKILLS table with the gold skills that the benchmark's own folder does not hold"
    )
    llm: LLMConfig = Field(description="who writes, kind openai or smollm2; needs a long llm.max_tokens, such as 3000")
    num_distractors: int = Field(
        default=3,
        ge=1,
        le=9,
        description="for each gold skill, one after the other in three strategies; the paper: 3-5",
    )
    body_chars: int = Field(default=4000, ge=1, description="how much of a gold body the model is shown")
    asked_words: tuple[int, int] = Field(default=(400, 1200), description="length of a body asked for, from and to")
    accepted_words: tuple[int, int] = Field(default=(150, 2400), description="bodies outside of it are turned down")
    max_jaccard: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="trigram Jaccard with a gold body or another distractor; above: turned down",
    )
    max_attempts: int = Field(default=3, ge=1, description="answers tried for one distractor before it is dropped")
    seed: int = Field(default=0, ge=0, description="decides the model's seeds")
    out: Path = Field(description="folder for skills, origins.jsonl, flags and dropped")

    @model_validator(mode="after")
    def _consistent(self) -> "DistractorsConfig":
        for name in ("asked_words", "accepted_words"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be [fewest, most], found [{low}, {high}]")
        if self.num_tokens > self.llm.max_tokens:
            raise ValueError(
                f"llm.max_tokens is {self.llm.max_tokens}, but a body of {self.asked_words[1]} words takes about "
                f"{self.num_tokens} tokens; set llm.max_tokens={self.num_tokens} or more"
            )
        return self

    @property
    def num_tokens(self) -> int:
        """About the tokens of the longest answer asked for."""
        return math.ceil(self.asked_words[1] * _TOKENS_PER_WORD) + 100
