"""What of the Batch API stands in files: the requests sent, the answers fetched, and our notes of batches under way."""

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.llm.chat import ENDPOINT, completion_of
from skilltrain.llm.protocol import Answer, CompletionError

MAX_FILE_BYTES = 190_000_000  # OpenAI takes 200 MB


@dataclass(frozen=True, slots=True)
class BatchNote:
    """A batch under way: where, which requests it holds (by cache key), and its ids as far as they are known."""

    base_url: str
    keys: tuple[str, ...]
    input_file_id: str
    batch_id: str | None = None

    @property
    def file_name(self) -> str:
        return f"{sha256(f'{self.base_url} {self.input_file_id}'.encode()).hexdigest()[:24]}.json"


class Journal:
    """Notes of batches under way, one file each, written before anything is waited for; answered ones are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def notes(self, base_url: str) -> list[BatchNote]:
        """The batches under way on one server, whoever submitted them."""
        notes = [self._read(file) for file in sorted(self.folder.glob("*.json"))]
        return [note for note in notes if note is not None and note.base_url == base_url]

    def _read(self, file: Path) -> BatchNote | None:
        try:
            values = read_json(file)
            return BatchNote(**values | {"keys": tuple(values["keys"])})
        except (TypeError, KeyError) as error:
            raise SkilltrainError("is no note of a batch", where=file, fix="delete it") from error
        except SkilltrainError:
            if file.exists():
                raise
            return None  # another process saw the batch to its end

    def write(self, note: BatchNote) -> BatchNote:
        """Keep a note; it is on disk before this returns."""
        write_json(self.folder / note.file_name, asdict(note))
        return note

    def created(self, note: BatchNote, batch_id: str) -> BatchNote:
        """Keep a batch's id."""
        return self.write(replace(note, batch_id=batch_id))

    def remove(self, note: BatchNote) -> None:
        """Forget a batch whose answers are in the cache."""
        (self.folder / note.file_name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else submits meanwhile: two processes that want the same answers must not both pay for them."""
        from filelock import FileLock

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / "submitting.lock")
            lock.acquire()
        except OSError as error:
            raise SkilltrainError(f"cannot write: {error.strerror or error}", where=self.folder) from error
        try:
            yield
        finally:
            lock.release()


class Chunk:
    """Requests that wait to be sent as one batch: JSON Lines in a temporary file."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.num_bytes = 0
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def add(self, key: str, body: dict[str, Any]) -> None:
        """One more request."""
        line = {"custom_id": key, "method": "POST", "url": ENDPOINT, "body": body}
        self.num_bytes += self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self.keys.append(key)

    def without(self, keys: Collection[str]) -> "Chunk":
        """The chunk itself, or one without the requests that have one of `keys`."""
        if not any(key in keys for key in self.keys):
            return self
        kept = Chunk()
        for key, line in zip(self.keys, self.lines(), strict=True):
            if key not in keys:
                kept.add(key, json.loads(line)["body"])
        return kept

    def lines(self) -> IO[bytes]:
        """The file, from its beginning."""
        self._file.seek(0)
        return self._file


def read_result(line: bytes, num_prompt_tokens: Mapping[str, int]) -> tuple[str, Answer] | None:
    """(custom id, answer) of a line of an output or an error file; None if it is none."""
    try:
        record = json.loads(line)
        key, response, error = str(record["custom_id"]), record.get("response") or {}, record.get("error")
        status, body = response.get("status_code"), response.get("body")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if error is None and status == 200:
        try:
            return key, completion_of(body, num_prompt_tokens.get(key, 0))
        except CompletionError as malformed:
            return key, malformed
    error = error or (body.get("error") if isinstance(body, dict) else None)
    error = error if isinstance(error, dict) else {"message": str(error or "no reason given")}
    reason = " ".join(str(error.get("message") or error.get("code")).split())[:300]
    kind = "expired" if error.get("code") == "batch_expired" else "failed"
    return key, CompletionError(kind, f"{reason}" if status is None else f"{reason} (status {status})")
