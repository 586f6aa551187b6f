"""What the stages that ask a chat model share: its prompts (prompts.yaml), seeds, and how often it is asked again."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import jinja2
import yaml
from pydantic import AfterValidator

from skilltrain.data.draws import stable_number
from skilltrain.data.screening import flags_to_leave_out
from skilltrain.llm import Asked, LLMConfig, Questions, ask_until, cost_of, open_llm
from skilltrain.llm.ask import QuestionT, ValueT
from skilltrain.llm.untrusted import fenced
from skilltrain.records import Dropped, Skill
from skilltrain.tables import read_skills
from skilltrain.texts import clean_text, one_line

PROMPTS: Final[dict[str, Any]] = yaml.safe_load(
    (files("skilltrain.data") / "prompts.yaml").read_text(encoding="utf-8")
)
ATTEMPTS = 3  # answers tried for one thing before it is dropped
TOKENS_PER_WORD = 1.5  # of an answer, in the mean of English (1.3) and languages that take more
_LANGUAGES = {"en": "English", "zh": "Chinese"}
_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,2}")

Line = Annotated[str, AfterValidator(lambda text: one_line(clean_text(text)))]
"""A text in an answer that shall stand on one line."""


@cache
def _template(name: str, role: str) -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined
    )  # what is filled in is text, never a template
    environment.filters["named"] = language_named
    return environment.from_string(PROMPTS[name][role])


def prompt(name: str, untrusted: str, **values: object) -> tuple[str, str]:
    """What the system says and the user, with `untrusted` texts between two lines that hold a mark."""
    values["fenced"] = fenced(untrusted)
    return _template(name, "system").render(values), _template(name, "user").render(values)


def questions_of(
    llm: LLMConfig,
    asked: Sequence[QuestionT],
    prompt: Callable[[QuestionT], tuple[str, str]],
    seed: int,
    read: Callable[[QuestionT, str], ValueT],
    answer_tokens: int,
    description: str,
) -> Questions[QuestionT, ValueT]:
    """What a model is asked, and how its answers are read; each attempt has a seed of its own."""

    def seed_of(one: QuestionT, attempt: int) -> int:
        return (
            stable_number(seed, one.query_id, one.skill_id, attempt) >> 33
        )  # servers take seeds below 2**31

    return Questions(
        open_llm(llm), asked, prompt, seed_of, read, ATTEMPTS, answer_tokens, description
    )


def ask(questions: Questions[QuestionT, ValueT]) -> Asked[QuestionT, ValueT]:
    """The answers, once their cost is said."""
    cost_of(questions)
    return ask_until(questions)


def unflagged_skills(pool: Path) -> tuple[list[Skill], list[Dropped]]:
    """The skills of a pool that its safety screening has not flagged, and the rows of DROPPED of the others."""
    skills, flags = read_skills(pool), flags_to_leave_out(pool)
    why = "the safety screening flagged the skill"
    dropped = [
        Dropped("", skill.skill_id, "flagged", why) for skill in skills if skill.skill_id in flags
    ]
    return [skill for skill in skills if skill.skill_id not in flags], dropped


def language_named(lang: str | None, text: str) -> str:
    """A skill's language outside the fence: only a code is believed, for all else it is `the language of {text}`."""
    if lang is None or not _LANGUAGE_CODE.fullmatch(lang):
        return f"the language of {text}"
    return _LANGUAGES.get(lang, f"the language with the code {lang}")
