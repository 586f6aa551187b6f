"""What a chat model is asked and what it answers: a server, live or in batches, or a model in this process.

A fault that every further request would meet (no key, no such model, no server) is a SkilltrainError and ends the run.
A fault of one request is a CompletionError, which the caller accounts for.
"""

from dataclasses import asdict, dataclass
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

    def rows(self) -> list[dict[str, str]]:
        """The messages as a server and a tokenizer take them."""
        return [asdict(message) for message in self.messages]


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


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. `finish_reason` is stop, length or refusal."""

    text: str
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_completion_tokens)


class CompletionError(Exception):
    """One request brought no answer.

    `kind` is `failed` (no answer after all retries), `malformed` (the reply is no completion; it is kept like an
    answer), `expired` (its batch ended before its turn) or `budget` (it was not sent).
    """

    def __init__(self, kind: Literal["failed", "malformed", "expired", "budget"], reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


Answer = Completion | CompletionError
