"""What the stages that ask a chat model share: what is wanted of it, and how answers are refused and asked for again.

What it is told is in prompts.yaml.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import jinja2
import yaml
from pydantic import AfterValidator

from skilltrain.data.draws import stable_number
from skilltrain.data.screening import flags_to_leave_out
from skilltrain.llm import Asked, LLMConfig, Questions, ask_until, cost_of, open_llm
from skilltrain.llm.untrusted import fenced
from skilltrain.records import Dropped, Skill
from skilltrain.tables import read_skills
from skilltrain.texts import clean_text, one_line

AboutT = TypeVar("AboutT")
ValueT = TypeVar("ValueT")

PROMPTS: Final[dict[str, Any]] = yaml.safe_load((files("skilltrain.data") / "prompts.yaml").read_text(encoding="utf-8"))
ATTEMPTS = 3
_AGAIN = "\nAn earlier answer was turned down: {}. Write another one."
TOKENS_PER_WORD = 1.5  # of an answer, in the mean of English (1.3) and languages that take more
_LANGUAGES = {"en": "English", "zh": "Chinese"}
_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,2}")

Line = Annotated[str, AfterValidator(lambda text: one_line(clean_text(text)))]
"""A text in an answer that shall stand on one line."""


@cache
def _template(name: str, role: str) -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # what is filled in is text, never a template
    environment.filters["named"] = language_named
    return environment.from_string(PROMPTS[name][role])


def prompt(name: str, untrusted: str, **values: object) -> tuple[str, str]:
    """The messages of the system and of the user, with `untrusted` texts between two lines that hold a mark."""
    values["fenced"] = fenced(untrusted)
    return _template(name, "system").render(values), _template(name, "user").render(values)


@dataclass(frozen=True, slots=True)
class Wanted(Generic[AboutT]):
    """One thing that a chat model shall write: its ids in DROPPED, what it is about, and what decides its seed.

    `prompt` gives the message of the system and that of the user.
    """

    query_id: str
    skill_id: str
    about: AboutT
    prompt: Callable[[], tuple[str, str]]
    seed: tuple[object, ...]


def questions_of(
    llm: LLMConfig,
    wanted: Sequence[Wanted[AboutT]],
    read: Callable[[Wanted[AboutT], str], ValueT],
    answer_tokens: int,
    description: str,
    attempts: int = ATTEMPTS,
) -> Questions[Wanted[AboutT], ValueT]:
    """What a model is asked, and how its answers are read."""

    def seed(one: Wanted[AboutT], attempt: int) -> int:
        return stable_number(*one.seed, attempt) >> 33  # servers take seeds below 2**31

    return Questions(
        open_llm(llm), wanted, lambda one: one.prompt(), seed, read, attempts, answer_tokens, description, _AGAIN
    )


def ask(questions: Questions[Wanted[AboutT], ValueT]) -> Asked[Wanted[AboutT], ValueT]:
    """The answers, once their cost is said. Interrupted runs lose nothing: a new run finds what was answered."""
    cost_of(questions)
    return ask_until(questions)


def unflagged_skills(pool: Path) -> tuple[list[Skill], list[Dropped]]:
    """The skills of a pool that its safety screening has not flagged, and the rows of DROPPED of the others."""
    skills, flags = read_skills(pool), flags_to_leave_out(pool)
    why = "the safety screening flagged the skill"
    dropped = [Dropped("", skill.skill_id, "flagged", why) for skill in skills if skill.skill_id in flags]
    return [skill for skill in skills if skill.skill_id not in flags], dropped


def language_named(lang: str | None, text: str) -> str:
    """A skill's language as a prompt names it; that of `text` where it names none, or something that is no code.

    A skill's own word for its language is untrusted, and this is outside the fence.
    """
    if lang is None or not _LANGUAGE_CODE.fullmatch(lang):
        return f"the language of {text}"
    return _LANGUAGES.get(lang, f"the language with the code {lang}")
