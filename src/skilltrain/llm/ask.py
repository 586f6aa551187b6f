"""Ask a chat model about many items, repeat unusable answers, and estimate the cost."""

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

_CODE_BLOCK = re.compile(r"^```(?:json)?[ \t]*\n(.*)\n[ \t]*```[ \t]*$", re.S | re.M | re.I)
_FINAL_FAULTS = ("failed", "budget")  # another attempt would fail for the same reason


class Item(Protocol):
    """The subject of a question. Rows of the table `dropped` identify it by these two ids."""

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
    """Questions to a chat model, one for each item, and how to read the answers.

    Attributes:
        llm: The chat model.
        items: The items to ask about.
        prompt: Returns the system message and the user message for an item.
        seed: Returns the seed for an item and an attempt, counted from 0. Every attempt needs
            another seed.
        read: Returns the value that an answer holds. Raises AnswerError, or ValueError for a wrong
            format, if the answer is not usable. Answers are read in the order of the items, so
            that the outcome does not depend on the server's speed.
        max_attempts: Number of answers to ask for before an item is dropped.
        answer_tokens: Expected tokens in an answer, for the estimate of the cost.
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
        """Return the request for an attempt. It quotes the fault of the previous answer, if any."""
        system, user = self.prompt(item)
        if fault is not None:
            reason = untrusted_line(fault.reason)
            user += f"\nAn earlier answer was turned down: {reason}. Write another one."
        return Request(system, user, self.seed(item, attempt))


@dataclass(frozen=True)
class Outcome(Generic[ItemT, ValueT]):
    """Result of asking about all items.

    Attributes:
        values: Items with a usable answer, and its value, in the order of the items.
        dropped: Rows of DROPPED for the other items.
        used: Tokens and dollars, by their names in the summary.
    """

    values: list[tuple[ItemT, ValueT]]
    dropped: list[Dropped]
    used: dict[str, Any]

    def counts(self) -> dict[str, Any]:
        """Return the numbers of items and of unusable answers by kind, and the cost."""
        return {
            "num_asked": len(self.values) + len(self.dropped),
            "num_unusable": len(self.dropped),
            "unusable": counted(fault.filter for fault in self.dropped),
            **self.used,
        }


def estimate_cost(questions: Questions[Any, Any]) -> dict[str, Any]:
    """Estimate the cost of all first attempts, and print it in one line.

    No request is sent. Cached answers cost nothing.
    """
    llm = questions.llm
    requests = (questions.request(item) for item in questions.items)
    prompt_tokens = [request.num_tokens() for request in requests if llm.recall(request) is None]
    num_requests = len(prompt_tokens)
    num_cached = len(questions.items) - num_requests
    usage = Usage(sum(prompt_tokens), num_requests * questions.answer_tokens)
    cached = f" ({num_cached:,} more are in the cache)" if num_cached else ""
    say(
        f"{num_requests:,} requests to {llm.config.model}{cached}, {llm.budget.describe(usage)}; "
        "answers that cannot be used are asked for again, "
        f"up to {questions.max_attempts} times in all"
    )
    return {
        "model": llm.config.model,
        "num_requests": num_requests,
        "num_answered_before": num_cached,
        **llm.budget.account(usage),
        "budget": str(llm.budget) or None,
    }


def ask_all(
    questions: Questions[ItemT, ValueT], drop_if_down: bool = False
) -> Outcome[ItemT, ValueT]:
    """Ask about all items, in rounds, until every answer is usable or no attempts remain.

    Args:
        questions: The questions.
        drop_if_down: Drop all items, with a warning, if no request can succeed.

    Raises:
        SkilltrainError: No request can succeed. The answers so far are in the cache.
    """
    values: dict[int, ValueT] = {}
    faults: dict[int, Dropped] = {}
    pending = list(range(len(questions.items)))
    try:
        for attempt in range(questions.max_attempts):
            _ask_round(questions, attempt, pending, values, faults)
            pending = [i for i, fault in faults.items() if fault.filter not in _FINAL_FAULTS]
    except SkilltrainError as error:
        if not drop_if_down:
            raise
        say(f"warning: {questions.description}: it goes on without the chat model: {error}")
        fault = AnswerError("down", error.problem)
        values = {}
        faults = {i: _dropped_row(item, fault) for i, item in enumerate(questions.items)}

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
    """Ask once about the items at the `pending` positions, and fill `values` or `faults`.

    Args:
        questions: The questions.
        attempt: Number of the round, from 0.
        pending: Positions of the items to ask about.
        values: Usable values by position. The round adds to them.
        faults: Rows of DROPPED by position. The round replaces those that it asked about.
    """
    llm = questions.llm
    answers: dict[int, Answer] = {}

    def request_of(position: int) -> Request:
        return questions.request(questions.items[position], attempt, faults.get(position))

    def ask(position: int) -> tuple[int, Answer]:
        try:
            return position, llm.complete(request_of(position))
        except AnswerError as error:
            return position, error

    # Cached answers count towards the budget, so they come before any request is sent.
    for position in pending:
        cached = llm.recall(request_of(position))
        if cached is not None:
            llm.budget.count(cached.usage)
            answers[position] = cached

    uncached = [position for position in pending if position not in answers]
    if uncached:
        replies = in_threads(ask, uncached, llm.config.concurrency)
        label = f"{questions.description}, attempt {attempt + 1}"
        answers |= track(replies, label, len(uncached))

    for position in pending:
        item = questions.items[position]
        try:
            values[position] = questions.read(item, _usable_text(answers[position]))
            faults.pop(position, None)
        except (AnswerError, ValueError) as error:
            faults[position] = _dropped_row(item, error)


def _usable_text(answer: Answer) -> str:
    if isinstance(answer, AnswerError):
        raise answer  # so that the caller treats it like an answer that cannot be read
    return answer.usable_text()


def _dropped_row(item: Item, error: AnswerError | ValueError) -> Dropped:
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
    """Read the JSON object in an answer, which may be in a code block.

    Raises:
        ValueError: The answer is not one JSON object, or the object does not fit `kind`.
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
    """Read the JSON list of texts in an answer. Raises AnswerError if it is not such a list."""
    return _read_list(answer, lambda item: isinstance(item, str), "strings")


def read_numbers(answer: str, allowed: range) -> list[int]:
    """Read the JSON list of numbers in `allowed`. Raises AnswerError if it is not such a list."""
    expected = f"numbers from {allowed.start} to {allowed.stop - 1}"
    return _read_list(answer, lambda item: type(item) is int and item in allowed, expected)


def _read_list(answer: str, is_expected: Callable[[Any], bool], expected: str) -> list[Any]:
    try:
        items = _read_json(answer, "[")
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(map(is_expected, items)):
        raise AnswerError("no_list", f"it was not a JSON list of {expected}")
    return items


def _read_json(answer: str, opening: str) -> Any:
    """Return the JSON value of an answer, or of its code block.

    A code block is ignored if the answer itself begins with `opening`.
    """
    text = answer.strip()
    code_block = _CODE_BLOCK.search(text)
    if code_block and not text.startswith(opening):
        text = code_block[1]
    return json.loads(text, strict=False)  # many models put a line break inside a JSON string
