"""What a chat model is asked and what it answers: here, on the wire, and kept on disk so that nobody pays twice.

A fault that every further request would meet is a SkilltrainError and ends the run; that of one is an AnswerError.
"""

import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.settings import OpenAIConfig

DATABASE = "answers.sqlite"
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.S)
_UNPAIRED = re.compile("[\ud800-\udfff]")  # surrogates, which no file takes
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (base_url TEXT, file_id TEXT, keys TEXT, PRIMARY KEY (base_url, file_id));
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One question: what the system says, if anything, and the user; another seed asks for another answer."""

    system: str
    user: str
    seed: int

    def messages(self) -> list[dict[str, str]]:
        """As a server and a tokenizer take them."""
        said = {"system": self.system, "user": self.user}
        return [{"role": role, "content": text} for role, text in said.items() if text]

    def num_tokens(self) -> int:
        """About how many tokens a server reads; a role and its separators are four in OpenAI's chat format."""
        return sum(estimate_tokens(message["content"]) + 4 for message in self.messages())

    def body(self, config: OpenAIConfig) -> dict[str, Any]:
        """As the chat completions take it."""
        limit = "max_completion_tokens" if config.is_openai else "max_tokens"
        body = {
            "model": config.model,
            "messages": self.messages(),
            "seed": self.seed,
            limit: config.max_tokens,
        }
        return body if config.temperature is None else body | {"temperature": config.temperature}


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

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt - other.prompt, self.completion - other.completion)


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. `finish_reason` is stop, length or refusal."""

    text: str
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class AnswerError(Exception):
    """Why a request has no answer that can be used: kind, reason, a value and another skill's id, as DROPPED has them.

    Without any answer the kind is `failed` (after all retries), `malformed` (the reply is no completion; that is kept
    like an answer), `expired` (its batch ended before its turn) or `budget` (it was not sent).
    """

    def __init__(
        self, kind: str, reason: str, value: float | None = None, other_id: str | None = None
    ) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason, self.value, self.other_id = kind, reason, value, other_id


Answer = Completion | AnswerError


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: one for four ASCII letters, three for four Chinese characters."""
    num_bytes = len(text.encode(errors="replace"))
    num_ascii = len(text.encode("ascii", "ignore"))
    return -(-num_ascii // 4) - (num_ascii - num_bytes) // 4


def read_answer(text: str, num_prompt_tokens: int) -> Completion:
    """A reply's body as a Completion, without a `<think>` block; `num_prompt_tokens`: where it reports none."""
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        content, refusal = choice["message"].get("content"), choice["message"].get("refusal")
        finish_reason, usage = choice.get("finish_reason") or "stop", body.get("usage")
        if refusal or finish_reason == "content_filter":
            finish_reason, content = "refusal", refusal or content
        written = _UNPAIRED.sub("\ufffd", content or "")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise AnswerError("malformed", "the server's reply is no chat completion") from None
    reported = usage if isinstance(usage, dict) else {}
    num_prompt = reported_tokens(reported.get("prompt_tokens"), num_prompt_tokens)
    num_completion = reported_tokens(reported.get("completion_tokens"), estimate_tokens(written))
    return Completion(_THOUGHTS.sub("", written), str(finish_reason), num_prompt, num_completion)


def reported_tokens(count: object, estimate: int) -> int:
    """The server's count of tokens; our estimate where the server gives none."""
    return (
        count if isinstance(count, int) and count > 0 and not isinstance(count, bool) else estimate
    )


class Answers:
    """The answers of a model under one set of parameters, and batches under way, in SQLite; none without a folder."""

    def __init__(self, folder: Path | None, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)
        self._folder = folder.expanduser() if folder is not None else None
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def key(self, request: Request) -> str:
        """SHA-256 over parameters, messages and seed; no secret goes into it."""
        question = {
            "parameters": self._parameters,
            "messages": request.messages(),
            "seed": request.seed,
        }
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        """The answer kept under `key`, if any."""
        for (kept,) in self._run("SELECT answer FROM answers WHERE key = ?", key):
            values = json.loads(kept)
            return (
                AnswerError("malformed", values["malformed"])
                if "malformed" in values
                else Completion(**values)
            )
        return None

    def put(self, key: str, answer: Answer) -> None:
        """Keep an answer, or a reply that was malformed; other failures are not kept."""
        if isinstance(answer, Completion) or answer.kind == "malformed":
            values = (
                asdict(answer) if isinstance(answer, Completion) else {"malformed": answer.reason}
            )
            self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, json.dumps(values))

    def batches(self, base_url: str) -> dict[str, list[str]]:
        """The batches under way on one server: id of the file → keys of the requests in it."""
        rows = self._run("SELECT file_id, keys FROM batches WHERE base_url = ?", base_url)
        return {file_id: json.loads(keys) for file_id, keys in rows}

    def note_batch(self, base_url: str, file_id: str, keys: Sequence[str]) -> None:
        """Keep a batch under way."""
        columns = "batches (base_url, file_id, keys)"
        self._run(
            f"INSERT OR REPLACE INTO {columns} VALUES (?, ?, ?)",
            base_url,
            file_id,
            json.dumps([*keys]),
        )

    def forget_batch(self, base_url: str, file_id: str) -> None:
        """Remove a batch."""
        self._run("DELETE FROM batches WHERE base_url = ? AND file_id = ?", base_url, file_id)

    def _run(self, statement: str, *values: str) -> Sequence[Any]:
        """The rows of one statement. Raises SkilltrainError where the disk refuses it, or the file is damaged."""
        if self._folder is None or (
            statement.startswith("SELECT") and not (self._folder / DATABASE).exists()
        ):
            return []  # a dry run leaves no file behind
        try:
            with self._lock:
                if self._database is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    file = self._folder / DATABASE
                    self._database = sqlite3.connect(
                        file, timeout=60, isolation_level=None, check_same_thread=False
                    )
                    self._database.executescript(_TABLES)
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            fix = "free the disk, or name another llm.cache"
            raise SkilltrainError(
                f"cannot use the cache of answers: {error}", where=self._folder, fix=fix
            ) from error
