"""Every string a model sees, saved inside a checkpoint. Caps count characters; token limits come on top of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.records import Skill

QWEN3_RERANKER_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_RERANKER_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SkillFields = Literal["full", "nd", "name", "description", "body"]
"""What is seen of a skill."""
FIELDS_SEEN: Mapping[SkillFields, tuple[str, ...]] = {
    "full": ("name", "description", "body"),
    "nd": ("name", "description"),
    "name": ("name",),
    "description": ("description",),
    "body": ("body",),
}
SEEN = "full: name, description and body; nd: no body; or one of the three alone"
ChunkPool = Literal["max", "top2"]
RELEASED = "skillrouter_released"
"""The template, by name, with which SkillRouter's released code evaluates; it trains with smaller caps."""
SKILL_TASK = "Given a task description, retrieve the skills that an agent needs to complete it"


class Chunks(Config):
    """How much of a body an encoder sees: one window, or several, each with name and description in front of it."""

    windows: int = Field(
        default=1, ge=1, description="windows of a body at most, each of template.skill.body_chars"
    )
    overlap: int = Field(
        default=0, ge=0, description="characters that a window shares with the one before it"
    )
    pool: ChunkPool = Field(
        default="max", description="a skill's score: its best window's; top2: mean of its best two"
    )


class SkillTemplate(Config):
    """How a skill becomes one text: `name | description | body`, the last two within their caps."""

    fields: SkillFields = Field(default="full", description=SEEN)
    description_chars: int = Field(default=300, ge=0, description="how much of a description")
    body_chars: int = Field(default=2500, ge=0, description="how much of a body")
    separator: str = Field(default=" | ", description="what stands between the parts")
    verbatim: bool = Field(
        default=False, description="keep outer spaces and empty fields, as SkillRouter's code does"
    )

    def parts(self, skill: Skill) -> dict[str, str]:
        """Field → what is shown of it, in order; a field that shows nothing is left out, unless `verbatim`."""
        caps = {"name": None, "description": self.description_chars, "body": self.body_chars}
        shown = {field: getattr(skill, field)[: caps[field]] for field in FIELDS_SEEN[self.fields]}
        return (
            shown
            if self.verbatim
            else {field: text.strip() for field, text in shown.items() if text.strip()}
        )

    def render(self, skill: Skill) -> str:
        """The text of a skill."""
        return self.separator.join(self.parts(skill).values())

    def windows(self, skill: Skill, chunks: Chunks) -> list[Skill]:
        """The skill once for each window, its body beginning there; the first is the skill itself."""
        return [
            replace(skill, body=skill.body[start:]) if start else skill
            for start in self.starts(skill, chunks)
        ]

    def starts(self, skill: Skill, chunks: Chunks) -> range:
        """Where in the body its windows begin: as many as reach its end, or `chunks.windows`."""
        rest = len(skill.body.rstrip()) - self.body_chars
        if chunks.windows == 1 or "body" not in FIELDS_SEEN[self.fields] or rest <= 0:
            return range(1)
        step = self.body_chars - chunks.overlap
        return range(0, rest + step, step)[: chunks.windows]


def _released(**settings: Any) -> Any:
    """A validator that takes RELEASED for these settings of a template."""
    return model_validator(mode="before")(lambda given: settings if given == RELEASED else given)


class EncoderTemplate(Config):
    """What the encoder sees of a query and of a skill. A prompt that is null is the one in the model's own folder."""

    instruction: str | None = Field(
        default=None, description="task stated before a query, in Qwen3-Embedding's form"
    )
    query_prompt: str | None = Field(
        default=None, description="or text before a query as it stands: 'query: ' for E5"
    )
    skill_prompt: str | None = Field(
        default=None, description="text before a skill as it stands: 'passage: ' for E5"
    )
    query_chars: int = Field(default=1500, ge=1, description="how much of a query")
    skill: SkillTemplate = Field(default=SkillTemplate(), description="the text of a skill")
    _by_name = _released(
        instruction="Given a coding task description, retrieve the most relevant skill document that would help an "
        "agent complete the task",
        query_chars=2000,
        skill=SkillTemplate(description_chars=500, body_chars=8000, verbatim=True),
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> "EncoderTemplate":
        if self.instruction and self.query_prompt is not None:
            raise ValueError("give 'instruction' or 'query_prompt', not both")
        return self

    def before_query(self) -> str:
        """What precedes the query; Qwen3-Embedding's form has no space after `Query:`."""
        return (
            f"Instruct: {self.instruction}\nQuery:" if self.instruction else self.query_prompt or ""
        )

    def render_query(self, text: str) -> str:
        """The text of a query, prompt included."""
        return self.before_query() + text[: self.query_chars]

    def render_skill(self, skill: Skill) -> str:
        """The text of a skill, prompt included."""
        return (self.skill_prompt or "") + self.skill.render(skill)

    def with_prompts(self, query_prompt: str, skill_prompt: str) -> "EncoderTemplate":
        """This template with the prompts of a model's folder, where it says nothing itself."""
        of_query = (
            {}
            if self.instruction or self.query_prompt is not None
            else {"query_prompt": query_prompt or None}
        )
        of_skill = {} if self.skill_prompt is not None else {"skill_prompt": skill_prompt or None}
        return self.model_copy(update=of_query | of_skill)


class RerankerTemplate(Config):
    """What the reranker sees of a (query, skill) pair.

    `pair` is the two-segment input of BERT-like models with a classification head, `yes_no` the chat form of
    Qwen3-Reranker, which has two official separators.
    """

    form: Literal["pair", "yes_no"] = Field(
        default="pair", description="pair: BERT with a head; yes_no: Qwen3-Reranker"
    )
    instruction: str = Field(default=SKILL_TASK, description="task stated in yes_no")
    separator: Literal["\n", "\n\n"] = Field(
        default="\n\n", description="between the parts of yes_no"
    )
    query_chars: int | None = Field(
        default=1500, ge=1, description="how much of a query; null: all of it"
    )
    skill: SkillTemplate = Field(
        default=SkillTemplate(description_chars=500, body_chars=2000),
        description="the text of a skill",
    )
    _by_name = _released(
        form="yes_no",
        instruction="Given a coding task description, judge whether the skill document is relevant and useful for "
        "completing the task",
        query_chars=None,
        skill=SkillTemplate(description_chars=500, body_chars=2000, verbatim=True),
    )

    def query_prompt(self) -> str:
        """What precedes the query's own text (after the chat prefix)."""
        return (
            f"<Instruct>: {self.instruction}{self.separator}<Query>: "
            if self.form == "yes_no"
            else ""
        )

    def query_end(self) -> str:
        """What follows the query's own text."""
        return self.separator if self.form == "yes_no" else ""

    def skill_prompt(self) -> str:
        """What precedes the skill's own text."""
        return "<Document>: " if self.form == "yes_no" else ""

    def render_skill(self, skill: Skill) -> str:
        """The text that alone may be truncated."""
        return self.skill.render(skill)


TemplateT = TypeVar("TemplateT", EncoderTemplate, RerankerTemplate)


def with_fields(template: TemplateT, fields: SkillFields | None) -> TemplateT:
    """`template` that shows these fields of a skill; null changes nothing."""
    skill = (
        template.skill if fields is None else template.skill.model_copy(update={"fields": fields})
    )
    return template.model_copy(update={"skill": skill})
