"""Answers on disk, so that nobody pays twice for one: after a kill, in another run, in a process beside this one."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.protocol import Completion, Request
from skilltrain.terminal import log

_SECONDS_BETWEEN_LOOKS = 1.0


class CompletionCache:
    """Answers by key, in append-only JSON Lines files of one folder; memory holds where each stands, not its text.

    Each process appends to a file of its own, one write a line, so that processes never mix and a line torn by
    a kill is the last of its file. Torn lines are skipped. What other processes add is found while this one runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._own: Path | None = None
        self._places: dict[str, tuple[Path, int]] = {}
        self._read_until: dict[Path, int] = {}
        self._last_look = 0.0
        self._look()

    def get(self, key: str) -> Completion | None:
        """The answer kept under `key`, if any."""
        with self._lock:
            if key not in self._places and time.monotonic() - self._last_look > _SECONDS_BETWEEN_LOOKS:
                self._look()
            place = self._places.get(key)
        if place is None:
            return None
        try:
            with place[0].open("rb") as file:
                file.seek(place[1])
                record = _record(file.readline())
        except OSError:
            record = None
        return record[1] if record is not None and record[0] == key else None

    def put(self, key: str, completion: Completion) -> None:
        """Keep an answer; it is on disk before this returns. Raises SkilltrainError where the disk refuses it."""
        record = {"key": key, "completion": asdict(completion)}
        line = (json.dumps(record, ensure_ascii=True) + "\n").encode()
        with self._lock:
            try:
                file, start = self._append(line)
            except OSError as error:
                raise SkilltrainError(f"cannot write: {error.strerror or error}", where=self._folder) from error
            self._places[key] = file, start

    def _append(self, line: bytes) -> tuple[Path, int]:
        """(file, position) of a whole new line; a part of one is taken back."""
        if self._handle is None or self._own is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own = self._folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
            self._handle = os.open(self._own, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        start = os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            os.ftruncate(self._handle, start)
            raise
        return self._own, start

    def _look(self) -> None:
        """Find what was added to the folder since the last look."""
        self._last_look = time.monotonic()
        try:
            num_torn = sum(self._look_into(file) for file in sorted(self._folder.glob("*.jsonl")) if file != self._own)
        except OSError as error:
            raise SkilltrainError(f"cannot read the cache: {error.strerror or error}", where=self._folder) from error
        if num_torn:
            log.warning("%s: skipped %d broken line(s)", self._folder, num_torn)

    def _look_into(self, path: Path) -> int:
        """Note where the new answers of a file stand; the number of its broken lines. An unfinished line may go on."""
        position, num_torn = self._read_until.get(path, 0), 0
        if path.stat().st_size == position:
            return 0
        with path.open("rb") as file:
            file.seek(position)
            for line in file:
                record = _record(line)
                if record is not None:
                    self._places[record[0]] = path, position
                elif not line.endswith(b"\n"):
                    break
                else:
                    num_torn += bool(line.strip())
                position += len(line)
        self._read_until[path] = position
        return num_torn

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


def _record(line: bytes) -> tuple[str, Completion] | None:
    """(key, answer) of a line; None if it is none of ours, or torn."""
    try:
        record = json.loads(line)
        completion = Completion(**record["completion"])
        return (str(record["key"]), completion) if isinstance(completion.text, str) else None
    except (ValueError, KeyError, TypeError):
        return None


class Answers:
    """The kept answers of one model under one set of parameters; without a folder, none."""

    def __init__(self, folder: Path | None, parameters: Mapping[str, Any]) -> None:
        self._cache = CompletionCache(folder.expanduser()) if folder is not None else None
        self._parameters = dict(parameters)

    def key(self, request: Request) -> str:
        """SHA-256 over parameters, messages and seed, as hexadecimal digits; no secret goes into it."""
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        question = {"parameters": self._parameters, "messages": messages, "seed": request.seed}
        return hashlib.sha256(json.dumps(question, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

    def get(self, key: str) -> Completion | None:
        """The answer kept under `key`, if any."""
        return self._cache.get(key) if self._cache else None

    def put(self, key: str, completion: Completion) -> None:
        """Keep an answer; failures are not kept."""
        if self._cache:
            self._cache.put(key, completion)
