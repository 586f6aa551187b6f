"""Asking a chat model in rounds until every answer is usable, and what that will cost, found without asking anybody."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answer, AnswerError, Request, Usage
from skilltrain.llm.budget import Budget
from skilltrain.llm.client import LLM
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Dropped, counted
from skilltrain.terminal import say, track

_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*)\n[ \t]*```[ \t]*$", re.S | re.M | re.I)
_LASTING = ("failed", "expired", "budget")  # faults that another answer would have again


class Question(Protocol):
    """What an answer is wanted for; DROPPED names it by these two."""

    @property
    def query_id(self) -> str: ...

    @property
    def skill_id(self) -> str: ...


ModelT = TypeVar("ModelT", bound=BaseModel)
QuestionT = TypeVar("QuestionT", bound=Question)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Questions(Generic[QuestionT, ValueT]):
    """Questions to a model, and how its answers are read.

    `prompt` gives what the system says and the user, `seed` the seed of an attempt, counted from 0, each another.
    `read` gives the value in an answer, or raises AnswerError, or ValueError for its form; answers are read in the
    order of the questions, so that the outcome depends on no server's speed. One has about `answer_tokens` tokens.
    """

    llm: LLM
    asked: Sequence[QuestionT]
    prompt: Callable[[QuestionT], tuple[str, str]]
    seed: Callable[[QuestionT, int], int]
    read: Callable[[QuestionT, str], ValueT]
    attempts: int
    answer_tokens: int
    description: str

    def request(self, question: QuestionT, attempt: int, fault: Dropped | None) -> Request:
        """What the model is asked in an attempt, after the `fault` of the last answer."""
        system, user = self.prompt(question)
        if fault:
            user += f"\nAn earlier answer was turned down: {untrusted_line(fault.reason)}. Write another one."
        return Request(system, user, self.seed(question, attempt))


@dataclass(frozen=True)
class Asked(Generic[QuestionT, ValueT]):
    """What came of questions, in their order: the usable values, why the others have none, tokens and dollars."""

    values: list[tuple[QuestionT, ValueT]]
    dropped: list[Dropped]
    used: dict[str, Any]

    def counts(self) -> dict[str, Any]:
        """How many questions there were, how many have no usable answer, why, and what all of it took."""
        num, why = len(self.dropped), counted(fault.filter for fault in self.dropped)
        return {
            "num_asked": len(self.values) + num,
            "num_unusable": num,
            "unusable": why,
            **self.used,
        }


def read_object(answer: str, kind: type[ModelT]) -> ModelT:
    """The one JSON object of an answer, bare or in a fenced block; or ValueError, which says what is wrong."""
    try:
        return kind.model_validate(_read_json(answer, "{"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(
            ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"it is not one JSON object with {', '.join(kind.model_fields)}: {error}"
        ) from error


def read_texts(answer: str) -> list[str]:
    """The one JSON list of texts in an answer, bare or in a fenced block. Raises AnswerError where it is none."""
    return _read_list(answer, lambda item: isinstance(item, str), "strings")


def read_numbers(answer: str, allowed: range) -> list[int]:
    """The one JSON list of numbers in an answer, as `read_texts`; each is one of `allowed`."""
    wanted = f"numbers from {allowed.start} to {allowed.stop - 1}"
    return _read_list(answer, lambda item: type(item) is int and item in allowed, wanted)


def _read_list(answer: str, fits: Callable[[Any], bool], wanted: str) -> list[Any]:
    try:
        items = _read_json(answer, "[")
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(map(fits, items)):
        raise AnswerError("no_list", f"it was not a JSON list of {wanted}")
    return items


def _read_json(answer: str, opening: str) -> Any:
    text = answer.strip()
    fenced = _FENCED.search(text)
    # Many models put a line break inside a JSON string, which loses nothing.
    return json.loads(fenced[1] if fenced and not text.startswith(opening) else text, strict=False)


def cost_of(questions: Questions[Any, Any]) -> dict[str, Any]:
    """What the first round would take, said in one line too; asks nobody. What was answered before costs nothing."""
    llm = questions.llm
    requests = (questions.request(question, 0, None) for question in questions.asked)
    new = [one.num_tokens() for one in requests if llm.answers.get(llm.answers.key(one)) is None]
    num_answered = len(questions.asked) - len(new)
    usage = Usage(sum(new), len(new) * questions.answer_tokens)
    counts = {"model": llm.model, "num_requests": len(new), "num_answered_before": num_answered}
    kept = f" ({num_answered:,} more are in the cache)" if num_answered else ""
    again = (
        f"answers that cannot be used are asked for again, up to {questions.attempts} times in all"
    )
    say(f"{len(new):,} requests to {llm.model}{kept}, {cost_in_words(usage, llm.budget)}; {again}")
    return counts | llm.budget.account(usage) | {"budget": str(llm.budget) or None}


def cost_in_words(usage: Usage, budget: Budget) -> str:
    """Tokens, price and budget."""
    dollars = budget.price(usage)
    price = (
        f"price unknown ({budget.section}.prices)" if dollars is None else f"about ${dollars:,.4g}"
    )
    written = f" and {usage.completion:,} written" if usage.completion else ""
    limit = f"budget {budget}" if str(budget) else f"no budget is set ({budget.section}.budget)"
    return f"about {usage.prompt:,} tokens read{written}, {price}; {limit}"


def ask_until(questions: Questions[QuestionT, ValueT]) -> Asked[QuestionT, ValueT]:
    """Ask in rounds, each for what the last one left, until every answer can be read or the attempts are used up.

    Raises SkilltrainError where no further request can succeed; what was answered until then is in the cache.
    """
    faults: dict[int, Dropped] = {}
    values: dict[int, tuple[QuestionT, ValueT]] = {}
    pending = list(range(len(questions.asked)))
    for attempt in range(questions.attempts):
        requests = (
            questions.request(questions.asked[place], attempt, faults.get(place))
            for place in pending
        )
        name = questions.description + (f", attempt {attempt + 1}" if attempt else "")
        answers = dict(
            track(questions.llm.complete_all(requests), name, len(pending)) if pending else ()
        )
        for position, place in enumerate(pending):
            question, answer = questions.asked[place], answers[position]
            try:
                values[place] = question, questions.read(question, _usable(answer))
            except (AnswerError, ValueError) as error:
                why = (
                    error
                    if isinstance(error, AnswerError)
                    else AnswerError("malformed", str(error))
                )
                ids = question.query_id, question.skill_id
                faults[place] = Dropped(
                    *ids, why.kind, why.reason, why.value, other_id=why.other_id
                )
        pending = [
            place
            for place in pending
            if place not in values and faults[place].filter not in _LASTING
        ]
    dropped = [faults[place] for place in sorted(faults.keys() - values.keys())]
    budget = questions.llm.budget
    return Asked([values[place] for place in sorted(values)], dropped, budget.account(budget.used))


def ask_while_up(questions: Questions[QuestionT, ValueT]) -> Asked[QuestionT, ValueT]:
    """As `ask_until`; but where no request can succeed, that is said, and every question is dropped as `down`."""
    try:
        return ask_until(questions)
    except SkilltrainError as error:
        say(f"warning: {questions.description}: it goes on without the chat model: {error}")
        dropped = [
            Dropped(one.query_id, one.skill_id, "down", error.what) for one in questions.asked
        ]
        return Asked([], dropped, questions.llm.budget.account(questions.llm.budget.used))


def _usable(answer: Answer) -> str:
    """The text of an answer. Raises AnswerError where there is none, or not the whole."""
    if isinstance(answer, AnswerError):
        raise answer
    if answer.finish_reason == "refusal":
        raise AnswerError("refused", "the model declined to answer")
    if not answer.text.strip():
        raise AnswerError("empty", "there was no text in the answer")
    if answer.finish_reason == "length":
        raise AnswerError("truncated", "the answer was cut off at llm.max_tokens")
    return answer.text
