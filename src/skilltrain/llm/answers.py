"""Answers and unfinished batches on disk, so that a run which was killed pays for nothing a second time."""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request

DATABASE = "answers.sqlite"
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (base_url TEXT, file_id TEXT, batch_id TEXT, keys TEXT,
                                    PRIMARY KEY (base_url, file_id));
"""


@dataclass(frozen=True, slots=True)
class BatchNote:
    """A batch under way: its file, the requests in it (by key), and its id as soon as the server has given one."""

    file_id: str
    keys: tuple[str, ...]
    batch_id: str | None = None


class Answers:
    """The kept answers of one model under one set of parameters, in a SQLite file; without a folder, none."""

    def __init__(self, folder: Path | None, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)
        self._folder = folder.expanduser() if folder is not None else None
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def key(self, request: Request) -> str:
        """SHA-256 over parameters, messages and seed, as hexadecimal digits; no secret goes into it."""
        question = {"parameters": self._parameters, "messages": request.rows(), "seed": request.seed}
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        """The answer kept under `key`, if any."""
        rows = self._run("SELECT answer FROM answers WHERE key = ?", (key,))
        if not rows:
            return None
        values = json.loads(rows[0][0])
        return CompletionError("malformed", values["malformed"]) if "malformed" in values else Completion(**values)

    def put(self, key: str, answer: Answer) -> None:
        """Keep an answer, or a reply that was malformed; other failures are not kept."""
        if isinstance(answer, Completion):
            values = asdict(answer)
        elif answer.kind == "malformed":
            values = {"malformed": answer.reason}
        else:
            return
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(values)))

    def batches(self, base_url: str) -> list[BatchNote]:
        """The batches under way on one server."""
        rows = self._run("SELECT file_id, keys, batch_id FROM batches WHERE base_url = ?", (base_url,))
        return [BatchNote(file_id, tuple(json.loads(keys)), batch_id) for file_id, keys, batch_id in rows]

    def note_batch(self, base_url: str, note: BatchNote) -> None:
        """Keep a batch under way, before anything is waited for."""
        row = (base_url, note.file_id, note.batch_id, json.dumps(note.keys))
        self._run("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)

    def forget_batch(self, base_url: str, note: BatchNote) -> None:
        """Remove a batch whose answers are kept."""
        self._run("DELETE FROM batches WHERE base_url = ? AND file_id = ?", (base_url, note.file_id))

    def _run(self, statement: str, values: Sequence[str | None]) -> list[Any]:
        """The rows of one statement. Raises SkilltrainError where the disk refuses it, or the file is damaged."""
        if self._folder is None:
            return []
        if statement.startswith("SELECT") and not (self._folder / DATABASE).exists():
            return []  # a dry run leaves no file behind
        try:
            with self._lock:
                if self._database is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    file = self._folder / DATABASE
                    self._database = sqlite3.connect(file, timeout=60, isolation_level=None, check_same_thread=False)
                    self._database.executescript(_TABLES)
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            fix = "free the disk, or name another llm.cache"
            raise SkilltrainError(f"cannot use the cache of answers: {error}", where=self._folder, fix=fix) from error
