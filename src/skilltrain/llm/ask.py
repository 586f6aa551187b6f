"""Ask a chat model about many items, ask again after unusable answers, and estimate the cost.

Notes:
    - Cached answers are read before any request is sent. The budget counts their cost too, so it
      allows fewer requests.
    - Answers are read in the order of the items, so that the outcome does not depend on the
      server's speed.
    - The answers before an error are in the cache.
    - Many models put a line break inside a JSON string, which strict JSON does not allow.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
_FINAL_FAULTS = ("failed", "budget")  # another attempt would have the same fault


class Item(Protocol):
    """The subject of a question. Rows of the table `dropped` identify it by these two ids."""

    @property
    def query_id(self) -> str: ...

    @property
    def skill_id(self) -> str: ...


ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT", bound=Item)
ValueT = TypeVar("ValueT")
AnswerOrError = Completion | AnswerError


@dataclass(frozen=True)
class Questions(Generic[ItemT, ValueT]):
    """Questions to a chat model, one for each item, and how to read the answers.

    Attributes:
        llm: The chat model.
        items: The items to ask about.
        prompt: Returns the system message and the user message for an item.
        seed: Returns the seed for an item and the number of an attempt, counted from 0. Every
            attempt needs another seed.
        read: Returns the value that an answer holds. If the answer is not usable, it raises
            AnswerError, or ValueError for a wrong format. It is called in the order of the items,
            so that the outcome does not depend on the server's speed.
        max_attempts: Number of unusable answers after which an item is dropped.
        answer_tokens: Expected number of tokens in an answer, for the estimate of the cost.
        description: Label of the progress bar.
        added_temperature: Returns what the number of an attempt adds to the model's temperature.
    """

    llm: LLM
    items: Sequence[ItemT]
    prompt: Callable[[ItemT], tuple[str, str]]
    seed: Callable[[ItemT, int], int]
    read: Callable[[ItemT, str], ValueT]
    max_attempts: int
    answer_tokens: int
    description: str
    added_temperature: Callable[[int], float] = lambda attempt: 0.0

    def request(self, item: ItemT, attempt: int = 0, fault: Dropped | None = None) -> Request:
        """Return the request for an attempt.

        Args:
            item: The item to ask about.
            attempt: Number of the attempt, counted from 0.
            fault: Fault of the previous answer, which the request quotes. None: there is no fault.
        """
        system, user = self.prompt(item)
        if fault is not None:
            # The reason may quote the model's answer, so the text is cleaned like any foreign text.
            reason = untrusted_line(fault.reason)
            user += f"\nAn earlier answer was turned down: {reason}. Write another one."
        return Request(system, user, self.seed(item, attempt), self.added_temperature(attempt))


@dataclass(frozen=True)
class Outcome(Generic[ItemT, ValueT]):
    """Result of asking about all items.

    Attributes:
        values: Pairs of an item with a usable answer and the answer's value, in the order of items.
        dropped: Rows of DROPPED for the other items.
        used: Numbers of tokens and dollars, by their names in the summary.
    """

    values: list[tuple[ItemT, ValueT]]
    dropped: list[Dropped]
    used: dict[str, Any]

    def counts(self) -> dict[str, Any]:
        """Return the number of items, the number of dropped items by reason, and the cost."""
        return {
            "num_asked": len(self.values) + len(self.dropped),
            "num_unusable": len(self.dropped),
            "unusable": counted(fault.filter for fault in self.dropped),
            **self.used,
        }


def estimate_cost(questions: Questions[Any, Any]) -> dict[str, Any]:
    """Estimate the cost of the first attempts for all items, and print it in one line.

    Answers in the cache cost nothing. No request is sent.

    Args:
        questions: The questions, one for each item.

    Returns:
        Numbers of requests, tokens and dollars, by their names in `--dry-run`.
    """
    llm = questions.llm
    prompt_tokens = []  # of each uncached request
    for item in questions.items:
        request = questions.request(item)
        if llm.recall(request) is None:
            prompt_tokens.append(request.num_tokens())
    # Without an answer in the cache, each item makes one request to the server.
    num_uncached = len(prompt_tokens)
    num_cached = len(questions.items) - num_uncached
    usage = Usage(prompt=sum(prompt_tokens), completion=num_uncached * questions.answer_tokens)

    cached = f" ({num_cached:,} more are in the cache)" if num_cached else ""
    say(
        f"{num_uncached:,} requests to {llm.config.model}{cached}, {llm.budget.describe(usage)}; "
        "answers that cannot be used are asked for again, "
        f"up to {questions.max_attempts} times in all"
    )
    return {
        "model": llm.config.model,
        "num_requests": num_uncached,
        "num_answered_before": num_cached,
        **llm.budget.account(usage),
        "budget": str(llm.budget) or None,
    }


def ask_all(
    questions: Questions[ItemT, ValueT], drop_if_down: bool = False
) -> Outcome[ItemT, ValueT]:
    """Ask about all items. Ask again about items without a usable answer, in further rounds.

    Args:
        questions: The questions, one for each item.
        drop_if_down: Whether to drop all items, with a warning, if no request can succeed. If
            false, the error is raised.

    Returns:
        The values of the usable answers, a row of DROPPED for each other item, and the cost.
    """
    items = questions.items
    # Each item ends with either a value or a fault, under its position in `items`.
    values: dict[int, ValueT] = {}
    faults: dict[int, Dropped] = {}  # why the last answer was not usable
    pending = list(range(len(items)))
    try:
        for attempt in range(questions.max_attempts):
            _ask_round(questions, attempt, pending, values, faults)
            # After a final fault, such as a used up budget, another request would not help.
            pending = [i for i, fault in faults.items() if fault.filter not in _FINAL_FAULTS]
    except SkilltrainError as error:  # all further requests would fail too
        if not drop_if_down:
            raise
        say(f"warning: {questions.description}: the run goes on without the chat model: {error}")
        # Drop all items, also those answered before the error.
        values = {}
        down = AnswerError("down", error.problem)
        faults = {i: _dropped_row(item, down) for i, item in enumerate(items)}
    usable = [(items[position], values[position]) for position in sorted(values)]
    budget = questions.llm.budget
    return Outcome(values=usable, dropped=list(faults.values()), used=budget.account(budget.used))


def _ask_round(
    questions: Questions[ItemT, ValueT],
    attempt: int,
    pending: Sequence[int],
    values: dict[int, ValueT],
    faults: dict[int, Dropped],
) -> None:
    """Ask once about some items, and store the new value or fault of each item.

    Args:
        questions: The questions, one for each item.
        attempt: Number of the round, from 0.
        pending: Positions of the items to ask about.
        values: Value of each item with a usable answer, by position. It is changed in place.
        faults: Last fault of each other item, by position. It is changed in place.
    """
    answers = _collect_answers(questions, attempt, pending, faults)
    for position in pending:
        item = questions.items[position]
        answer = answers[position]
        try:
            if isinstance(answer, AnswerError):
                raise answer
            values[position] = questions.read(item, answer.usable_text())
            faults.pop(position, None)  # the fault of an earlier round
        except (AnswerError, ValueError) as error:
            faults[position] = _dropped_row(item, error)


def _collect_answers(
    questions: Questions[ItemT, ValueT],
    attempt: int,
    pending: Sequence[int],
    faults: Mapping[int, Dropped],
) -> dict[int, AnswerOrError]:
    """Return an answer or an error for each item to ask about, by position of the item.

    Answers come from the cache, or else from the server.

    Args:
        questions: The questions, one for each item.
        attempt: Number of the round, from 0.
        pending: Positions of the items to ask about.
        faults: Last fault of each item, by position. The new request quotes this fault.
    """
    llm = questions.llm
    answers = {}

    def request_of(position: int) -> Request:
        return questions.request(questions.items[position], attempt, faults.get(position))

    for position in pending:
        cached = llm.recall(request_of(position))
        # The budget also counts the cost of cached answers.
        if cached is not None:
            llm.budget.count(cached.usage)
            answers[position] = cached

    def ask(position: int) -> tuple[int, AnswerOrError]:
        """Return the position of an item, and the server's answer or an error."""
        try:
            return position, llm.complete(request_of(position))
        except AnswerError as error:
            return position, error

    uncached = [position for position in pending if position not in answers]
    if uncached:
        # `in_threads` yields the replies as they arrive, and `track` shows the progress.
        replies = in_threads(ask, uncached, llm.config.concurrency)
        label = f"{questions.description}, attempt {attempt + 1}"
        answers.update(track(replies, label, len(uncached)))
    return answers


def _dropped_row(item: Item, error: AnswerError | ValueError) -> Dropped:
    """Return the row of the table DROPPED that tells why an item has no usable answer.

    Args:
        item: The item.
        error: Why the answer was not usable. A ValueError means an answer in a wrong format.
    """
    if not isinstance(error, AnswerError):
        error = AnswerError(MALFORMED, str(error))
    return Dropped(
        query_id=item.query_id,
        skill_id=item.skill_id,
        filter=error.kind,
        reason=error.reason,
        value=error.value,
        other_id=error.other_id,
    )


def read_object(answer: str, kind: type[ModelT]) -> ModelT:
    """Read the JSON object in an answer. The object may be in a code block.

    Args:
        answer: Text of the answer.
        kind: Class of the object, which says what keys and values the object has.

    Raises:
        ValueError: The answer is no such object. The message is short, because the next request
            quotes it to the model.
    """
    try:
        return kind.model_validate(_read_json(answer, "{"))
    except ValidationError as error:
        # The message names the first fault only, such as `score: Field required`.
        fault = error.errors(include_url=False, include_input=False)[0]
        path = [str(key) for key in fault["loc"]]
        raise ValueError(": ".join([*path, fault["msg"]])) from error
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
    """Read the JSON list in an answer.

    Args:
        answer: Text of the answer.
        is_expected: Returns whether an item is allowed.
        expected: The allowed items in words, for the error.

    Raises:
        AnswerError: The answer is not a JSON list of allowed items.
    """
    try:
        items = _read_json(answer, "[")
    except (ValueError, RecursionError):  # JSON that is nested too deeply raises RecursionError
        items = None
    if not isinstance(items, list) or not all(map(is_expected, items)):
        raise AnswerError("no_list", f"it was not a JSON list of {expected}")
    return items


def _read_json(answer: str, opening: str) -> Any:
    """Return the JSON value of an answer, or of the code block in it.

    Args:
        answer: Text of the answer.
        opening: First character of the value. A text that begins with it is read as a whole, even
            if it contains a code block.

    Raises:
        ValueError: The text is not JSON.
    """
    text = answer.strip()
    # Models often write a sentence, and then the value in a block of three backticks.
    code_block = _CODE_BLOCK.search(text)
    if code_block and not text.startswith(opening):
        text = code_block[1]
    # Many models put a line break inside a text, which strict JSON does not allow.
    return json.loads(text, strict=False)
