"""Shared code of stages that ask a chat model: prompts (prompts.yaml), seeds and attempts.

Such a stage has items with a `query_id` and a `skill_id`, a function that renders one of the
prompts for an item, and a function that reads the value in an answer or raises AnswerError.
`questions_of` joins these; `ask` returns the values and the rows of DROPPED.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import jinja2
import yaml
from pydantic import AfterValidator

from skilltrain.config import load_recipe
from skilltrain.data.sampling import stable_number
from skilltrain.data.screening import flags_to_leave_out
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, LLMConfig, Outcome, Questions, ask_all, estimate_cost
from skilltrain.llm.ask import ItemT, ValueT
from skilltrain.llm.untrusted import fenced
from skilltrain.plugins import load_plugin
from skilltrain.records import Dropped, Skill
from skilltrain.tables import read_skills
from skilltrain.texts import clean_text, one_line

PROMPTS: Final[dict[str, Any]] = yaml.safe_load(
    (files("skilltrain.data") / "prompts.yaml").read_text(encoding="utf-8")
)
# Two plug-ins of the kind `prompt`, which the registry loads by these names
STYLES: Final = PROMPTS["styles"]
SKILLROUTER: Final = PROMPTS["skillrouter"]
ATTEMPTS = 3  # answers asked for before an item is dropped
TOKENS_PER_WORD = 1.5  # of answers on average; English takes 1.3, other languages more
_UNUSED_BITS = 33  # of a seed's 64 bits: servers take seeds below 2**31
_LANGUAGES = {"en": "English", "zh": "Chinese"}
_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,2}")

Line = Annotated[str, AfterValidator(lambda text: one_line(clean_text(text)))]
"""A text in an answer, cleaned and put on one line."""


def load_prompt(name: str | Path) -> Mapping[str, Any]:
    """Return a prompt with the keys `system` and `user`, from a plug-in or a YAML file."""
    texts = load_recipe(name) if isinstance(name, Path) else load_plugin("prompt", name)
    if not {"system", "user"} <= texts.keys():
        raise SkilltrainError("invalid-recipe", "a prompt has the keys system and user", where=name)
    return texts


@cache
def _template(text: str) -> jinja2.Template:
    # Untrusted texts are values of a template, and Jinja2 never renders a value as a template.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["named"] = language_phrase
    return environment.from_string(text)


def render_prompt(texts: Mapping[str, Any], untrusted: str, **values: object) -> tuple[str, str]:
    """Render the system and the user message of a prompt.

    Args:
        texts: The prompt (see `load_prompt`), or one of PROMPTS.
        untrusted: Texts of strangers. The template gets them as `fenced`, between two marked lines.
        values: All other values of the template.
    """
    values["fenced"] = fenced(untrusted)
    return _template(texts["system"]).render(values), _template(texts["user"]).render(values)


def questions_of(
    llm: LLMConfig,
    items: Sequence[ItemT],
    prompt: Callable[[ItemT], tuple[str, str]],
    read: Callable[[ItemT, str], ValueT],
    seed: int,
    answer_tokens: int,
    description: str,
) -> Questions[ItemT, ValueT]:
    """Return the questions of a stage. Each item and attempt has its own seed.

    Args:
        prompt: Returns the system and the user message for an item.
        read: Returns the value in an answer, or raises AnswerError.
        answer_tokens: Expected tokens of an answer.
        description: Label of the progress bar.
    """

    def seed_of(item: ItemT, attempt: int) -> int:
        number = stable_number(seed, item.query_id, item.skill_id, attempt)
        return number >> _UNUSED_BITS

    return Questions(LLM(llm), items, prompt, seed_of, read, ATTEMPTS, answer_tokens, description)


def ask(questions: Questions[ItemT, ValueT]) -> Outcome[ItemT, ValueT]:
    """Print the estimated cost of the questions, then ask them."""
    estimate_cost(questions)
    return ask_all(questions)


def unflagged_skills(pool: Path) -> tuple[list[Skill], list[Dropped]]:
    """Return the skills of a pool without safety flags, and rows of DROPPED for flagged ones."""
    skills = read_skills(pool)
    flags = flags_to_leave_out(pool)
    unflagged: list[Skill] = []
    dropped: list[Dropped] = []
    for skill in skills:
        if skill.skill_id in flags:
            reason = "the safety screening flagged the skill"
            dropped.append(Dropped("", skill.skill_id, "flagged", reason))
        else:
            unflagged.append(skill)
    return unflagged, dropped


def language_phrase(lang: str | None, text: str) -> str:
    """Return how a prompt names the language of a skill, such as "English".

    Args:
        lang: Field of the skill. It is untrusted, so it is used only if it is a language code.
        text: The text whose language is named otherwise: "the language of {text}".
    """
    if lang is None or not _LANGUAGE_CODE.fullmatch(lang):
        return f"the language of {text}"
    return _LANGUAGES.get(lang, f"the language with the code {lang}")
