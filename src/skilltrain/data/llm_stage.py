"""Shared code of stages that ask a chat model: prompts (prompts.yaml), seeds and attempts.

Such a stage has items with a `query_id` and a `skill_id`, a function that renders one of the
prompts for an item, and a function that reads the value in an answer or raises AnswerError.
`questions_of` joins these; `ask` returns the values and the rows of DROPPED.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator

from skilltrain.config import load_recipe
from skilltrain.data.sampling import stable_number
from skilltrain.data.screening import flags_to_leave_out
from skilltrain.llm import LLM, LLMConfig, Outcome, Questions, ask_all, estimate_cost
from skilltrain.llm.ask import ItemT, ValueT
from skilltrain.llm.prompt_files import render_messages
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

Line = Annotated[str, AfterValidator(lambda text: one_line(clean_text(text)))]
"""A text in an answer, cleaned and put on one line."""


def load_prompt(name: str | Path) -> Mapping[str, Any]:
    """Return a prompt with the keys `system` and `user`, from a plug-in or a YAML file."""
    return load_recipe(name) if isinstance(name, Path) else load_plugin("prompt", name)


def render_prompt(texts: Mapping[str, Any], untrusted: str, **values: object) -> tuple[str, str]:
    """Render the system and the user message of a prompt.

    Args:
        texts: The prompt (see `load_prompt`), or one of PROMPTS.
        untrusted: Texts of strangers. The template gets them as `fenced`, between two marked lines.
        values: All other values of the template.
    """
    return render_messages(texts, {**values, "fenced": fenced(untrusted)})


def questions_of(
    llm: LLMConfig,
    items: Sequence[ItemT],
    prompt: Callable[[ItemT], tuple[str, str]],
    read: Callable[[ItemT, str], ValueT],
    seed: int,
    answer_tokens: int,
    description: str,
) -> Questions[ItemT, ValueT]:
    """Return the questions that a stage asks a chat model, one for each item.

    Each item and attempt has its own seed, so that a second attempt can give another answer.

    Args:
        llm: Settings of the chat model.
        items: The items to ask about, such as pairs of a query and a skill.
        prompt: Returns the system and the user message for an item.
        read: Parses an answer to an item and returns its value. Raises AnswerError for an answer
            that cannot be used; then the item is asked again.
        seed: Seed of the stage.
        answer_tokens: Expected tokens of an answer, for the estimate of the cost.
        description: Label of the progress bar.
    """

    def seed_of(item: ItemT, attempt: int) -> int:
        # A hash gives the same seed again when the stage is resumed.
        number = stable_number(seed, item.query_id, item.skill_id, attempt)
        # Servers accept seeds below 2**31. So keep the upper 31 bits of the 64-bit number.
        return number >> _UNUSED_BITS

    # An item without a usable answer after ATTEMPTS answers is dropped.
    return Questions(LLM(llm), items, prompt, seed_of, read, ATTEMPTS, answer_tokens, description)


def ask(questions: Questions[ItemT, ValueT]) -> Outcome[ItemT, ValueT]:
    """Print the estimated cost of the questions, then ask them."""
    estimate_cost(questions)
    return ask_all(questions)


def unflagged_skills(pool: Path) -> tuple[list[Skill], list[Dropped]]:
    """Return the skills of a pool without safety flags, and rows of DROPPED for flagged skills.

    The safety screening of the stage `pool` flags skills that may hold malware or injections.
    """
    skills = read_skills(pool)
    flags = flags_to_leave_out(pool)
    unflagged: list[Skill] = []
    dropped: list[Dropped] = []
    for skill in skills:
        if skill.skill_id in flags:
            reason = "the safety screening flagged the skill"
            # The query id is empty, because the reason concerns only the skill.
            dropped.append(Dropped("", skill.skill_id, "flagged", reason))
        else:
            unflagged.append(skill)
    return unflagged, dropped
