"""A chat model's verdicts on numbered skills: for a request of its own that needs some of them, or for a given one.

R3's prompts are not public: the words in prompts.yaml are ours, and so are the meanings of its eight reasons.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from skilltrain.data.asking import Line, language_named, prompt
from skilltrain.data.query_texts import fit_query
from skilltrain.llm import AnswerError, read_list, read_object
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.records import Reason, Skill, Verdict
from skilltrain.texts import language_of

_BODY_CHARS: Final = 1000  # shown of each skill


@dataclass(frozen=True, slots=True)
class Group:
    """Skills that are judged for one request: a given one, or one that the model writes in `lang` for the first."""

    query_id: str
    lang: str
    skills: tuple[Skill, ...]
    request: str = ""

    @property
    def skill_id(self) -> str:
        """The first one's."""
        return self.skills[0].skill_id


class Judged(BaseModel, frozen=True):
    """What an answer says of one skill, by its number from 1."""

    skill: int
    verdict: Verdict
    reason: Reason | None = None
    why: Line | None = None


class Judgements(BaseModel, frozen=True):
    """The answer where the request is given."""

    verdicts: tuple[Judged, ...] = ()


class JudgedRequest(Judgements, frozen=True):
    """The answer where it is not: a request with verdicts, or one that needs the first skill alone, with a refusal."""

    request: Line
    refusal: Reason | None = None
    why: Line | None = None


def group_prompt(name: str, words: int, group: Group) -> tuple[str, str]:
    """What a judge is told by the prompt of a `name`; a request that it writes has about so many `words`."""
    parts = [f"Capability {n}\n{untrusted_skill(one, 300, _BODY_CHARS)}" for n, one in enumerate(group.skills, 1)]
    if group.request:
        parts.insert(0, f"Request: {untrusted_line(group.request, 4000)}")
    return prompt(name, "\n\n".join(parts), given=bool(group.request), lang=group.lang, words=words)


def read_request(seen: set[str], max_words: int, group: Group, answer: str) -> JudgedRequest:
    """The request and one verdict for each skill, a refusal written out. Raises AnswerError or ValueError."""
    found, skills, lang = read_object(answer, JudgedRequest), group.skills, group.lang
    if found.refusal is not None:
        others = range(2, len(skills) + 1)
        turned = (Judged(skill=n, verdict=Verdict.REJECTED, reason=found.refusal, why=found.why) for n in others)
        found = found.model_copy(update={"verdicts": (Judged(skill=1, verdict=Verdict.REQUIRED), *turned)})
    _check_verdicts(found.verdicts, skills)
    num_required = sum(one.verdict is Verdict.REQUIRED for one in found.verdicts)
    if num_required < 1 + (found.refusal is None):
        raise ValueError(f"{num_required} capabilities are required, two or more are wanted, or a refusal")
    if language_of(found.request) not in (lang, None):
        raise AnswerError("language", f"the request is not in {language_named(lang, 'the capabilities')}")
    return found.model_copy(update={"request": fit_query(found.request, seen, max_words, skills)})


def read_given(group: Group, answer: str) -> Judgements:
    """One verdict for each skill. Raises ValueError where they are not there."""
    found = read_object(answer, Judgements)
    _check_verdicts(found.verdicts, group.skills)
    return found


def read_equivalents(group: Group, answer: str) -> list[Skill]:
    """The skills whose numbers an answer lists. Raises ValueError where it is no list of numbers from 2."""
    numbers, skills = read_list(answer), group.skills
    if numbers is None or any(type(one) is not int or not 2 <= one <= len(skills) for one in numbers):
        raise ValueError(f"it is not a JSON list of numbers from 2 to {len(skills)}")
    return [skill for number, skill in enumerate(skills, 1) if number in numbers]


def _check_verdicts(verdicts: Sequence[Judged], skills: Sequence[Skill]) -> None:
    """Raise ValueError where a skill has no verdict or two, or was rejected without a reason."""
    numbers = sorted(one.skill for one in verdicts)
    if numbers != list(range(1, len(skills) + 1)):
        raise ValueError(f"the capabilities judged are {numbers}, not 1 to {len(skills)}, each once")
    if without := [one.skill for one in verdicts if one.verdict is Verdict.REJECTED and one.reason is None]:
        raise ValueError(f"capability {without[0]} is rejected without a reason")


def judged_rows(group: Group, verdicts: Iterable[Judged], judge: str) -> list[dict[str, Any]]:
    """The rows of JUDGEMENTS of a group; only a rejection has a reason."""
    return [
        {
            "query_id": group.query_id, "skill_id": group.skills[one.skill - 1].skill_id, "verdict": str(one.verdict),
            "reason": str(one.reason) if one.verdict is Verdict.REJECTED else None, "why": one.why,
            "group": group.query_id, "judge": judge,
        }
        for one in verdicts
    ]  # fmt: skip
