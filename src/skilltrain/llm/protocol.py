"""What is asked of a chat model and what comes back, whoever answers: a server live, a server's batch, a local model.

A fault that every further request would meet (no key, no such model, no server) is a SkilltrainError and ends
the run; a fault of one request is a CompletionError, which the caller accounts for and goes on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One question; another seed asks for another answer."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. `finish_reason` is stop, length or refusal.

    Token counts are the server's, or our own estimate where that is larger: servers leave them out, and some lie.
    """

    text: str
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class CompletionError(Exception):
    """One request came to nothing, after all retries.

    `kind` is `failed` (the server did not answer, asking again now is useless), `malformed` (it answered something
    that is no completion), `expired` (its batch ended before its turn) or `budget` (it was not asked at all).
    """

    def __init__(self, kind: Literal["failed", "malformed", "expired", "budget"], reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


Answer = Completion | CompletionError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written, of one request or of many."""

    prompt: int = 0
    completion: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt + other.prompt, self.completion + other.completion)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt - other.prompt, self.completion - other.completion)


def in_order(answers: Iterable[tuple[int, Answer]]) -> Iterator[Answer]:
    """Answers by position, each as soon as all before it are there: what is made of them depends on no server's speed.

    Raises ValueError if a position is missing.
    """
    early: dict[int, Answer] = {}
    position = 0
    for found, answer in answers:
        early[found] = answer
        while position in early:
            yield early.pop(position)
            position += 1
    if early:
        raise ValueError(f"no answer to request {position}")
