"""Ask a chat model about many items, repeat what it answers badly, and estimate the cost."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import MALFORMED, AnswerError, Completion, Request, Usage
from skilltrain.llm.client import LLM, in_threads
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Dropped, counted
from skilltrain.terminal import say, track

_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*)\n[ \t]*```[ \t]*$", re.S | re.M | re.I)
_LASTING = ("failed", "budget")  # another attempt would fail for the same reason


class Item(Protocol):
    """Something a stage wants an answer for. Rows of DROPPED name it by these two ids."""

    @property
    def query_id(self) -> str: ...

    @property
    def skill_id(self) -> str: ...


ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT", bound=Item)
ValueT = TypeVar("ValueT")
Answer = Completion | AnswerError


@dataclass(frozen=True)
class Questions(Generic[ItemT, ValueT]):
    """One question per item, and how the answers are read.

    Attributes:
        llm: The chat model.
        items: What is asked about.
        prompt: Returns the system and the user message of an item.
        seed: Returns the seed of an item's attempt, counted from 0. Each attempt has another one.
        read: Returns the value in an answer. Raises AnswerError, or ValueError for its form, if it
            is not usable. Answers are read in the order of the items, so that the outcome does
            not depend on the server's speed.
        max_attempts: Answers asked for before an item is dropped.
        answer_tokens: Expected length of an answer, for the estimate.
        description: Label of the progress bar.
    """

    llm: LLM
    items: Sequence[ItemT]
    prompt: Callable[[ItemT], tuple[str, str]]
    seed: Callable[[ItemT, int], int]
    read: Callable[[ItemT, str], ValueT]
    max_attempts: int
    answer_tokens: int
    description: str

    def request(self, item: ItemT, attempt: int = 0, fault: Dropped | None = None) -> Request:
        """Return the request of an attempt. It quotes why the previous answer was refused."""
        system, user = self.prompt(item)
        if fault is not None:
            reason = untrusted_line(fault.reason)
            user += f"\nAn earlier answer was turned down: {reason}. Write another one."
        return Request(system, user, self.seed(item, attempt))


@dataclass(frozen=True)
class Outcome(Generic[ItemT, ValueT]):
    """Usable values with their items, the items dropped, and the tokens and dollars used."""

    values: list[tuple[ItemT, ValueT]]
    dropped: list[Dropped]
    used: dict[str, Any]

    def counts(self) -> dict[str, Any]:
        """Count the items, those without a usable answer by kind of fault, and the cost."""
        return {
            "num_asked": len(self.values) + len(self.dropped),
            "num_unusable": len(self.dropped),
            "unusable": counted(fault.filter for fault in self.dropped),
            **self.used,
        }


def estimate_cost(questions: Questions[Any, Any]) -> dict[str, Any]:
    """Estimate the cost of all first attempts and say it in one line.

    Sends nothing. Cached answers cost nothing.
    """
    llm = questions.llm
    requests = (questions.request(item) for item in questions.items)
    new = [request.num_tokens() for request in requests if llm.recall(request) is None]
    num_cached = len(questions.items) - len(new)
    usage = Usage(sum(new), len(new) * questions.answer_tokens)
    cached = f" ({num_cached:,} more are in the cache)" if num_cached else ""
    say(
        f"{len(new):,} requests to {llm.config.model}{cached}, {llm.budget.describe(usage)}; "
        "answers that cannot be used are asked for again, "
        f"up to {questions.max_attempts} times in all"
    )
    return {
        "model": llm.config.model,
        "num_requests": len(new),
        "num_answered_before": num_cached,
        **llm.budget.account(usage),
        "budget": str(llm.budget) or None,
    }


def ask_all(
    questions: Questions[ItemT, ValueT], drop_if_down: bool = False
) -> Outcome[ItemT, ValueT]:
    """Ask about all items, in rounds, until each answer is usable or the attempts are used up.

    Args:
        questions: What to ask.
        drop_if_down: Drop all items, with a warning, if no request can succeed.

    Raises:
        SkilltrainError: No request can succeed. Answers so far are in the cache.
    """
    values: dict[int, ValueT] = {}
    faults: dict[int, Dropped] = {}
    pending = list(range(len(questions.items)))
    try:
        for attempt in range(questions.max_attempts):
            _ask_round(questions, attempt, pending, values, faults)
            pending = [i for i, fault in faults.items() if fault.filter not in _LASTING]
    except SkilltrainError as error:
        if not drop_if_down:
            raise
        say(f"warning: {questions.description}: it goes on without the chat model: {error}")
        down = AnswerError("down", error.what)
        values = {}
        faults = {i: _dropped(item, down) for i, item in enumerate(questions.items)}
    usable = [(questions.items[position], values[position]) for position in sorted(values)]
    budget = questions.llm.budget
    return Outcome(usable, list(faults.values()), budget.account(budget.used))


def _ask_round(
    questions: Questions[ItemT, ValueT],
    attempt: int,
    pending: Sequence[int],
    values: dict[int, ValueT],
    faults: dict[int, Dropped],
) -> None:
    """Ask about the `pending` positions once and move each to `values` or `faults`."""
    llm = questions.llm
    answers: dict[int, Answer] = {}

    def request_of(position: int) -> Request:
        return questions.request(questions.items[position], attempt, faults.get(position))

    def ask(position: int) -> tuple[int, Answer]:
        try:
            return position, llm.complete(request_of(position))
        except AnswerError as error:
            return position, error

    # Cached answers first, so that the budget counts them before a request is sent.
    for position in pending:
        cached = llm.recall(request_of(position))
        if cached is not None:
            llm.budget.count(cached.usage)
            answers[position] = cached

    new = [position for position in pending if position not in answers]
    if new:
        replies = in_threads(ask, new, llm.config.concurrency)
        answers |= track(replies, f"{questions.description}, attempt {attempt + 1}", len(new))

    for position in pending:
        item = questions.items[position]
        try:
            values[position] = questions.read(item, _usable_text(answers[position]))
            faults.pop(position, None)
        except (AnswerError, ValueError) as error:
            faults[position] = _dropped(item, error)


def _usable_text(answer: Answer) -> str:
    if isinstance(answer, AnswerError):
        raise answer
    return answer.usable_text()


def _dropped(item: Item, error: AnswerError | ValueError) -> Dropped:
    if not isinstance(error, AnswerError):
        error = AnswerError(MALFORMED, str(error))
    return Dropped(
        item.query_id,
        item.skill_id,
        error.kind,
        error.reason,
        error.value,
        other_id=error.other_id,
    )


def read_object(answer: str, kind: type[ModelT]) -> ModelT:
    """Read the one JSON object of an answer, bare or in a fenced block.

    Raises ValueError, which says what is wrong.
    """
    try:
        return kind.model_validate(_read_json(answer, "{"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        raise ValueError(": ".join([*path, first["msg"]])) from error
    except (ValueError, RecursionError) as error:
        keys = ", ".join(kind.model_fields)
        raise ValueError(f"it is not one JSON object with {keys}: {error}") from error


def read_texts(answer: str) -> list[str]:
    """Read the one JSON list of texts in an answer. Raises AnswerError if it is none."""
    return _read_list(answer, lambda item: isinstance(item, str), "strings")


def read_numbers(answer: str, allowed: range) -> list[int]:
    """Read the one JSON list of numbers, all in `allowed`. Raises AnswerError if it is none."""
    wanted = f"numbers from {allowed.start} to {allowed.stop - 1}"
    return _read_list(answer, lambda item: type(item) is int and item in allowed, wanted)


def _read_list(answer: str, fits: Callable[[Any], bool], wanted: str) -> list[Any]:
    try:
        items = _read_json(answer, "[")
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(fits(item) for item in items):
        raise AnswerError("no_list", f"it was not a JSON list of {wanted}")
    return items


def _read_json(answer: str, opening: str) -> Any:
    text = answer.strip()
    fenced = _FENCED.search(text)
    if fenced and not text.startswith(opening):
        text = fenced[1]
    return json.loads(text, strict=False)  # many models put a line break inside a JSON string
