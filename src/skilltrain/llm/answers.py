"""Requests to a chat model, its answers, and the cache that keeps answers from being paid twice."""

import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError

DATABASE = "answers.sqlite"
MALFORMED = "malformed"
_TOKENS_PER_MESSAGE = 4  # role and separators in OpenAI's chat format
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.S)
_SURROGATES = re.compile("[\ud800-\udfff]")  # cannot be written to a file
_TABLE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a chat model. Another seed asks for another answer."""

    system: str
    user: str
    seed: int

    def messages(self) -> list[dict[str, str]]:
        """Return the chat messages; an empty system message is left out."""
        texts = {"system": self.system, "user": self.user}
        return [{"role": role, "content": text} for role, text in texts.items() if text]

    def num_tokens(self) -> int:
        """Estimate how many tokens the server reads."""
        return sum(
            estimate_tokens(message["content"]) + _TOKENS_PER_MESSAGE for message in self.messages()
        )

    def key(self, parameters: Mapping[str, Any]) -> str:
        """Return a SHA-256 over the model's parameters, the messages and the seed."""
        content = {"parameters": parameters, "messages": self.messages(), "seed": self.seed}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    prompt: int = 0
    completion: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt + other.prompt, self.completion + other.completion)


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. `finish_reason` is stop, length, refusal or malformed."""

    text: str
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_completion_tokens)

    def usable_text(self) -> str:
        """Return the text. Raises AnswerError if there is none, or not all of it."""
        if self.finish_reason == MALFORMED:
            raise AnswerError(MALFORMED, "the server's reply is no chat completion")
        if self.finish_reason == "refusal":
            raise AnswerError("refused", "the model declined to answer")
        if not self.text.strip():
            raise AnswerError("empty", "there was no text in the answer")
        if self.finish_reason == "length":
            raise AnswerError("truncated", "the answer was cut off at llm.max_tokens")
        return self.text


class AnswerError(Exception):
    """Why a request has no usable answer, as DROPPED records it.

    The kinds of this package are `failed` (no answer after all retries), `budget` (not sent),
    `malformed`, `refused`, `empty` and `truncated`. Stages add their own.
    """

    def __init__(
        self, kind: str, reason: str, value: float | None = None, other_id: str | None = None
    ) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason
        self.value = value
        self.other_id = other_id


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text: 1 for 4 ASCII letters, 3 for 4 Chinese characters."""
    num_bytes = len(text.encode(errors="replace"))
    num_ascii = len(text.encode("ascii", "ignore"))
    return -(-num_ascii // 4) - (num_ascii - num_bytes) // 4


def reported_tokens(count: object, estimate: int) -> int:
    """Return the server's count of tokens, or our estimate if the server reports none."""
    return count if isinstance(count, int) and count > 0 else estimate


def read_completion(reply: Any, request: Request) -> Completion:
    """Read a reply of openai's client. A `<think>` block is removed from the text.

    A reply that is no chat completion gives a Completion whose `finish_reason` is `malformed`.
    """
    try:
        choice = reply.choices[0]
        refusal = choice.message.refusal
        text = _SURROGATES.sub("\ufffd", refusal or choice.message.content or "")
    except (LookupError, TypeError, AttributeError):
        return Completion("", MALFORMED, request.num_tokens())
    is_refusal = refusal or choice.finish_reason == "content_filter"
    usage = reply.usage
    return Completion(
        _THOUGHTS.sub("", text),
        "refusal" if is_refusal else str(choice.finish_reason or "stop"),
        reported_tokens(getattr(usage, "prompt_tokens", None), request.num_tokens()),
        reported_tokens(getattr(usage, "completion_tokens", None), estimate_tokens(text)),
    )


class AnswerCache:
    """Answers by key, in an SQLite file of `folder`; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder.expanduser() if folder is not None else None
        self._lock = threading.Lock()

    def get(self, key: str) -> Completion | None:
        """Return the answer kept under `key`, if any. Never creates the file."""
        if self._folder is None or not (self._folder / DATABASE).exists():
            return None
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        values = json.loads(rows[0][0]) if rows else {}
        return Completion(**values) if "text" in values else None  # older rows may lack a text

    def put(self, key: str, answer: Completion) -> None:
        """Keep an answer. A kill after this returns cannot lose it."""
        if self._folder is not None:
            values = json.dumps(asdict(answer))
            self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, values)

    @cached_property
    def _database(self) -> sqlite3.Connection:
        """The open file, which is created if it does not exist."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            self._folder / DATABASE, timeout=60, isolation_level=None, check_same_thread=False
        )
        database.executescript(_TABLE)
        return database

    def _execute(self, statement: str, *values: str) -> list[tuple[str]]:
        """Run one statement. Raises SkilltrainError for a full disk or a damaged file."""
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise SkilltrainError(
                f"cannot use the cache of answers: {error}",
                where=self._folder,
                fix="free the disk, or name another llm.cache",
            ) from error
