"""Templates of the texts that models see. They are saved in a checkpoint.

The limits of templates count characters. The models' own limits count tokens, and apply too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.records import Skill

QWEN3_RERANKER_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QWEN3_RERANKER_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SkillFields = Literal["full", "nd", "name", "description", "body"]
"""The fields of a skill that a model sees."""
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
"""Name of the template with which SkillRouter's released code evaluates."""
SKILL_TASK = "Given a task description, retrieve the skills that an agent needs to complete it"


class Chunks(Config):
    """Settings of body windows. An encoder sees each window after the name and the description."""

    windows: int = Field(
        default=1, ge=1, description="most windows of a body, each of template.skill.body_chars"
    )
    overlap: int = Field(
        default=0, ge=0, description="characters that a window shares with the one before it"
    )
    pool: ChunkPool = Field(
        default="max", description="score of a skill: max: its best window; top2: mean of best two"
    )


class SkillTemplate(Config):
    """Template of a skill's text: `name | description | body`, the last two cut to a length."""

    fields: SkillFields = Field(default="full", description=SEEN)
    description_chars: int = Field(
        default=300, ge=0, description="longest description, in characters"
    )
    body_chars: int = Field(default=2500, ge=0, description="longest body, in characters")
    separator: str = Field(default=" | ", description="text between the fields")
    labelled: bool = Field(
        default=False,
        description="SkillRouter's structured prompt: `<Name>: ` before the name and so on, and "
        "`<Skill>:` before the skill in yes_no; outer spaces and empty fields stay",
    )
    verbatim: bool = Field(
        default=False, description="keep outer spaces and empty fields, as SkillRouter's code does"
    )

    def field_texts(self, skill: Skill) -> dict[str, str]:
        """Return the texts that a model sees of a skill, by field: name, description or body.

        Empty fields are left out and outer spaces are removed, unless `verbatim` or `labelled` is
        set.
        """
        # None: the name is never cut.
        max_chars = {"name": None, "description": self.description_chars, "body": self.body_chars}
        # `self.fields` is the key of a set of fields, such as "nd" for name and description.
        texts = {
            field: getattr(skill, field)[: max_chars[field]] for field in FIELDS_SEEN[self.fields]
        }
        if self.verbatim or self.labelled:
            return texts
        return {field: text.strip() for field, text in texts.items() if text.strip()}

    def label(self, field: str) -> str:
        """Return the text before a field, such as `<Name>: `. Without labels it is empty."""
        return f"<{field.title()}>: " if self.labelled else ""

    def render(self, skill: Skill) -> str:
        """Return the text of a skill: its fields with separators between them."""
        texts = [self.label(field) + text for field, text in self.field_texts(skill).items()]
        return self.separator.join(texts)

    def windows(self, skill: Skill, chunks: Chunks) -> list[Skill]:
        """Return a copy of the skill for each window of its body.

        The body of a copy begins with the window. `render` cuts it at the end of the window.
        """
        starts = self.window_starts(skill, chunks)
        return [replace(skill, body=skill.body[start:]) if start else skill for start in starts]

    def window_starts(self, skill: Skill, chunks: Chunks) -> range:
        """Return the positions in the body where its windows begin.

        There are enough windows to reach the end of the body, but at most `chunks.windows`.
        """
        num_chars_after_first = len(skill.body.rstrip()) - self.body_chars
        has_body = "body" in FIELDS_SEEN[self.fields]
        if chunks.windows == 1 or not has_body or num_chars_after_first <= 0:
            return range(1)
        step = self.body_chars - chunks.overlap
        starts = range(0, num_chars_after_first + step, step)
        return starts[: chunks.windows]


def _accept_released_name(**settings: Any) -> Any:
    """Return a pydantic validator that accepts the name RELEASED in place of a template.

    Args:
        settings: Settings of the template that the name stands for.
    """
    return model_validator(mode="before")(lambda value: settings if value == RELEASED else value)


class EncoderTemplate(Config):
    """Template of what the encoder sees of a query and of a skill.

    A prompt that is null is taken from the model's folder.
    """

    instruction: str | None = Field(
        default=None, description="task stated before a query, in Qwen3-Embedding's form"
    )
    query_prompt: str | None = Field(
        default=None, description="text before a query instead of an instruction: 'query: ' for E5"
    )
    skill_prompt: str | None = Field(
        default=None, description="text before a skill: 'passage: ' for E5"
    )
    query_chars: int = Field(default=1500, ge=1, description="longest query, in characters")
    skill: SkillTemplate = Field(default=SkillTemplate(), description="the text of a skill")
    _released_settings = _accept_released_name(
        instruction="Given a coding task description, retrieve the most relevant skill document "
        "that would help an agent complete the task",
        query_chars=2000,
        skill=SkillTemplate(description_chars=500, body_chars=8000, verbatim=True),
    )

    @model_validator(mode="after")
    def _check_single_prompt(self) -> "EncoderTemplate":
        if self.instruction and self.query_prompt is not None:
            raise ValueError("give 'instruction' or 'query_prompt', not both")
        return self

    def query_prefix(self) -> str:
        """Return the text before a query."""
        if self.instruction:  # Qwen3-Embedding's form has no space after `Query:`
            return f"Instruct: {self.instruction}\nQuery:"
        return self.query_prompt or ""

    def render_query(self, text: str) -> str:
        """Return the text of a query, with its prompt."""
        return self.query_prefix() + text[: self.query_chars]

    def render_skill(self, skill: Skill) -> str:
        """Return the text of a skill, with its prompt."""
        return (self.skill_prompt or "") + self.skill.render(skill)

    def with_prompts(self, query_prompt: str, skill_prompt: str) -> "EncoderTemplate":
        """Return a copy of the template with a model's prompts where this template has no prompts.

        Args:
            query_prompt: The model's own text before a query.
            skill_prompt: The model's own text before a skill.
        """
        prompts: dict[str, str | None] = {}
        if not self.instruction and self.query_prompt is None:
            prompts["query_prompt"] = query_prompt or None
        if self.skill_prompt is None:
            prompts["skill_prompt"] = skill_prompt or None
        return self.model_copy(update=prompts)


class RerankerTemplate(Config):
    """Template of what the reranker sees of a query and a skill.

    The form `pair` has two segments, for BERT-like models with a classification head. The form
    `yes_no` is the chat form of Qwen3-Reranker, which has two official separators.
    """

    form: Literal["pair", "yes_no"] = Field(
        default="pair", description="pair: BERT with a head; yes_no: Qwen3-Reranker"
    )
    instruction: str = Field(default=SKILL_TASK, description="task stated in yes_no")
    separator: Literal["\n", "\n\n"] = Field(
        default="\n\n", description="between the parts of yes_no"
    )
    query_chars: int | None = Field(
        default=1500, ge=1, description="longest query, in characters; null: no limit"
    )
    skill: SkillTemplate = Field(
        default=SkillTemplate(description_chars=500, body_chars=2000),
        description="the text of a skill",
    )
    _released_settings = _accept_released_name(
        form="yes_no",
        instruction="Given a coding task description, judge whether the skill document is relevant "
        "and useful for completing the task",
        query_chars=None,
        skill=SkillTemplate(description_chars=500, body_chars=2000, verbatim=True),
    )

    def query_prompt(self) -> str:
        """Return the text between the chat prefix and a query."""
        if self.form == "pair":
            return ""
        return f"<Instruct>: {self.instruction}{self.separator}<Query>: "

    def query_end(self) -> str:
        """Return the text after a query."""
        return self.separator if self.form == "yes_no" else ""

    def skill_prompt(self) -> str:
        """Return the text before a skill."""
        if self.form == "pair":
            return ""
        return "<Skill>:\n" if self.skill.labelled else "<Document>: "

    def render_skill(self, skill: Skill) -> str:
        """Return the text of a skill, without prompt. Only this text may be truncated."""
        return self.skill.render(skill)


TemplateT = TypeVar("TemplateT", EncoderTemplate, RerankerTemplate)


def with_fields(template: TemplateT, fields: SkillFields | None) -> TemplateT:
    """Return a copy of a template that shows other fields of a skill. None: the same fields."""
    update = {} if fields is None else {"fields": fields}
    skill = template.skill.model_copy(update=update)
    return template.model_copy(update={"skill": skill})
