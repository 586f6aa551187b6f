"""The settings of the stage `synthesize`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath
from skilltrain.llm import OpenAIConfig, SmolLM2Config


class OwnTextConfig(Config):
    """Passages of the skills' own texts: no model, no key, no network."""

    kind: Literal["own_text"] = "own_text"


class SynthesizeConfig(Config):
    """Write queries for the skills of a pool."""

    stage: Literal["synthesize"] = "synthesize"
    pool: InputPath = Field(description="SKILLS table, or the folder that holds it")
    llm: Annotated[OpenAIConfig | SmolLM2Config | OwnTextConfig, Field(discriminator="kind")] = Field(
        default=OwnTextConfig(), description="who writes: kind own_text (no model), openai or smollm2"
    )
    flagged: Literal["leave_out", "use"] = Field(
        default="leave_out", description="skills that the pool's safety screening flagged: no queries, or as any other"
    )
    num_queries_per_skill: int = Field(default=1, ge=1, description="queries asked for each skill")
    max_skills: int | None = Field(default=None, ge=1, description="sample that many, stratified by category and lang")
    num_words: int = Field(default=160, ge=5, description="length a model is asked for (the paper's mean)")
    max_words: int = Field(default=240, ge=5, description="longer answers are refused")
    body_chars: int = Field(default=4000, ge=1, description="how much of a body a model is shown")
    max_attempts: int = Field(default=3, ge=1, description="answers tried for one query before it is dropped")
    exempt_share: float | None = Field(
        default=None, gt=0, le=1,
        description="a model may say single-word names that are in this share of all bodies; null: none",
    )  # fmt: skip
    dev_share: float = Field(default=0.05, ge=0, le=1, description="share of skills whose queries are split dev")
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS table: near-duplicate skills have their queries in one split"
    )
    seed: int = Field(default=0, ge=0, description="decides sample, styles, split and the models' seeds")
    out: Path = Field(description="folder for queries, judgements and dropped; with own_text also for the skills "
                      "without the passages that became queries: the pool to train on")  # fmt: skip
