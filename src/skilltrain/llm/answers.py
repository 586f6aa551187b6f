"""Requests to a chat model, its answers, and a cache of answers."""

import hashlib
import json
import math
import re
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.texts import SURROGATES

DATABASE = "answers.sqlite"
MALFORMED = "malformed"
_TOKENS_PER_MESSAGE = 4  # role and separators in OpenAI's chat format
_THINK_BLOCK = re.compile(r"\A\s*<think>.*?</think>", re.S)  # at the start of an answer
_TABLE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a chat model. A request with another seed gets another answer.

    Attributes:
        added_temperature: Added to the temperature of the settings.
    """

    system: str
    user: str
    seed: int
    added_temperature: float = 0.0

    def messages(self) -> list[dict[str, str]]:
        """Return the chat messages, without the system message if it is empty."""
        texts = {"system": self.system, "user": self.user}
        return [{"role": role, "content": text} for role, text in texts.items() if text]

    def num_tokens(self) -> int:
        """Estimate the number of tokens that the server reads."""
        return sum(
            estimate_tokens(message["content"]) + _TOKENS_PER_MESSAGE for message in self.messages()
        )

    def key(self, parameters: Mapping[str, Any]) -> str:
        """Return the cache key: a SHA-256 of the parameters, the messages and the seed."""
        content = {"parameters": parameters, "messages": self.messages(), "seed": self.seed}
        # Without an added temperature, the key is that of a request without this field.
        if self.added_temperature:
            content["added_temperature"] = self.added_temperature
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens read (`prompt`) and written (`completion`)."""

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
        """Return the text of a complete answer.

        The error's first argument is the kind of the fault, which reports count.

        Raises:
            AnswerError: The answer is malformed, refused, empty or cut off.
        """
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
    """A request has no usable answer. Its attributes are recorded in a row of DROPPED.

    Attributes:
        kind: `failed` (no answer after all retries), `budget` (not sent), `malformed`, `refused`,
            `empty` or `truncated`. Stages add their own kinds.
        reason: The reason in words.
        value: A score that explains the reason, if there is one.
        other_id: A skill that explains the reason, if there is one.
    """

    def __init__(
        self, kind: str, reason: str, value: float | None = None, other_id: str | None = None
    ) -> None:
        """Set the attributes and the message of the error."""
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason
        self.value = value
        self.other_id = other_id


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens in a text: one token for every four bytes of UTF-8.

    Four bytes are four ASCII characters or 1.3 Chinese characters. ASCII characters and other
    characters are counted and rounded up separately.
    """
    # "ignore" leaves out all characters that are not ASCII.
    num_ascii_bytes = len(text.encode("ascii", "ignore"))
    # "replace" keeps characters that UTF-8 cannot hold from raising an error.
    num_other_bytes = len(text.encode(errors="replace")) - num_ascii_bytes
    return math.ceil(num_ascii_bytes / 4) + math.ceil(num_other_bytes / 4)


def reported_tokens(count: object, estimate: int) -> int:
    """Return the number of tokens that a server reports, or the estimate if it reports none."""
    return count if isinstance(count, int) and count > 0 else estimate


def read_completion(reply: Any, request: Request) -> Completion:
    """Read a reply of openai's client, and return the answer in it.

    Some models write their thoughts before the answer, as `<think>…</think>`. These are removed.

    Args:
        reply: The reply. If it is no chat completion, the answer has the finish reason malformed.
        request: The request. Its tokens are estimated if the server does not report them.
    """
    # A server may send anything, so the reply may lack each of these attributes.
    try:
        choice = reply.choices[0]
        refusal = choice.message.refusal
        # A surrogate is half a character, and cannot be written to a file.
        text = SURROGATES.sub("\ufffd", refusal or choice.message.content or "")
    except (LookupError, TypeError, AttributeError):
        return Completion(text="", finish_reason=MALFORMED, num_prompt_tokens=request.num_tokens())

    finish_reason = str(choice.finish_reason or "stop")
    if refusal or finish_reason == "content_filter":
        finish_reason = "refusal"
    # The thoughts of the model cost tokens too, so the estimate is made before their removal.
    usage = reply.usage
    return Completion(
        text=_THINK_BLOCK.sub("", text),
        finish_reason=finish_reason,
        num_prompt_tokens=reported_tokens(
            getattr(usage, "prompt_tokens", None), estimate=request.num_tokens()
        ),
        num_completion_tokens=reported_tokens(
            getattr(usage, "completion_tokens", None), estimate=estimate_tokens(text)
        ),
    )


class AnswerCache:
    """A cache of answers in an SQLite file of a folder. Without a folder it stays empty."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder.expanduser() if folder is not None else None
        self._lock = threading.Lock()

    def get(self, key: str) -> Completion | None:
        """Return the answer stored under `key`, if any. The file is not created."""
        if self._folder is None or not (self._folder / DATABASE).exists():
            return None
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        values = json.loads(rows[0][0]) if rows else {}
        is_answer = "text" in values  # rows of earlier versions have other keys
        return Completion(**values) if is_answer else None

    def put(self, key: str, answer: Completion) -> None:
        """Store an answer in the file at once, so that a killed process loses no answer."""
        if self._folder is not None:
            values = json.dumps(asdict(answer))
            self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, values)

    @cached_property
    def _database(self) -> sqlite3.Connection:
        """The open database. Its file is created if it does not exist."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        # Another process may hold the file for up to 60 seconds. Without an isolation level, each
        # statement is stored at once. Threads may share the connection, because `_execute` locks.
        database = sqlite3.connect(
            self._folder / DATABASE, timeout=60, isolation_level=None, check_same_thread=False
        )
        database.executescript(_TABLE)
        return database

    def _execute(self, statement: str, *values: str) -> list[tuple[str]]:
        """Run one statement. Raises SkilltrainError if the disk is full or the file damaged."""
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise SkilltrainError(
                "cannot-write",
                f"cannot use the cache of answers: {error}",
                where=self._folder,
                fix="free the disk, or name another llm.cache",
            ) from error
