"""The log of a server: answers that it gave, and skills that its clients then loaded.

A line of the log is one event, as a JSON object:

    {"time": …, "session": …, "query": …, "router": …, "skills": {ID: SCORE, …}}
    {"time": …, "session": …, "loaded": …}

The first one is an answer, with skills in order of rank. The second is a loaded skill. Each
process writes to files of its own, named `use-DAY-TIME-PROCESS.jsonl`.

Notes:
    - A line is written at once by one call, so a killed process loses at most its last line. After
      a failed write, the process begins a new file.
    - The time comes first in a file's name, so files in order of name are in order of time.
    - A session is one client of one process on one day (UTC). The log has only a hash of it.
    - Loads count for the newest answer of their session that showed the skill.
    - Whole sessions are held out. Requests of one session are often alike. A request that repeats
      a text of an earlier session goes where that session is, so no text is in both splits.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any

from pydantic import Field

from skilltrain.data.sampling import is_drawn
from skilltrain.data.screening.secret_keys import likely_secrets
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import LINE_ERRORS, check_input_file, json_object, numbered_lines
from skilltrain.metrics.benchmarks.rows import Row, parse_row
from skilltrain.records import Ranking
from skilltrain.terminal import say
from skilltrain.texts import clean_text, one_line

CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")
"""Address of the client whose request is answered. Empty for the one client of stdio."""
ORIGIN = "use"
"""Origin of queries that come from a log."""
_FILES = "use-*.jsonl"
_MAX_FILE_BYTES = 16 * 2**20  # a process then begins a new file
_MAX_LOG_BYTES = 512 * 2**20  # of all files; then the oldest ones are removed
_MAX_UNWRITTEN = 10_000  # newest events to keep while the log cannot be written
_MAX_QUERY_CHARS = 10_000  # a router reads no more of a request
_MAX_SECONDS = 3600.0  # from an answer to a load that counts for the answer
_HELD_OUT_SHARE = 0.33  # of the sessions, to compare routers on

_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}")
_NAME = r"[^/\\\s\"'`:,;)]{1,64}"  # of a home folder, without blanks
# The home folder of a user on Linux, macOS or Windows. On Windows, its name may have blanks if the
# path goes on with the same separator.
_HOME = re.compile(
    rf"[A-Za-z]:([\\/])Users\1{_NAME}(?:\x20{_NAME}){{1,3}}(?=\1)"
    rf"|(?:/(?:home|Users)/|[A-Za-z]:[\\/]Users[\\/]){_NAME}|/root\b"
)


def redact(text: str) -> str:
    """Replace likely secrets, e-mail addresses and home folders in a text.

    For example, "mail a.pdf to bo@x.org" becomes "mail a.pdf to [email]". A home folder becomes
    "~".
    """
    # A secret may contain another one, so the longest is replaced first.
    for secret in sorted(likely_secrets(text), key=len, reverse=True):
        text = text.replace(secret, "[secret]")
    return _HOME.sub("~", _EMAIL.sub("[email]", text))


# Writing -------------------------------------------------------------------------------------


class UseLog:
    """Writes the events of one process. Several threads may call its methods.

    Args:
        folder: Folder of the log, which other processes may write to as well.

    Raises:
        SkilltrainError: No file can be written into `folder`.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder, and check that files can be written into it."""
        self._folder = folder
        # The log holds hashes of clients' addresses. They are made with this random text, because
        # addresses could otherwise be found by hashing all of them.
        self._salt = secrets.token_hex(16)
        self._lock = Lock()
        # Lines to write. Lines of failed writes stay here until a later write succeeds.
        self._unwritten = deque[bytes](maxlen=_MAX_UNWRITTEN)
        self._file: FileIO | None = None
        self._day = ""  # on which the file was begun
        # A temporary file shows at the start whether the folder may be written.
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"cannot hold the log: {reason_of(error)}"
            fix = "name a folder that may be written"
            raise SkilltrainError("cannot-write", problem, where=folder, fix=fix) from error

    def add_answer(self, query: str, router: str, ranking: Ranking) -> None:
        """Write the answer to a request.

        Args:
            query: Text of the request. The log gets it without secrets and personal data.
            router: Identity of the router that answered.
            ranking: Skills that the client gets, in order.
        """
        # A secret at the cut would be shown in part, so redact more than is kept.
        text = redact(clean_text(query)[: 2 * _MAX_QUERY_CHARS])[:_MAX_QUERY_CHARS]
        self._write({"query": text, "router": router, "skills": dict(ranking)})

    def add_load(self, skill_id: str) -> None:
        """Write that a client has loaded a skill."""
        self._write({"loaded": skill_id})

    def _write(self, event: Mapping[str, Any]) -> None:
        """Write an event as one line.

        If the write fails, the line is kept and written before the next event.

        Args:
            event: Values of the event. The time and the session are added here.
        """
        day = time.strftime("%Y%m%d", time.gmtime())
        # A session is a client on one day. The log gets only a hash, so it shows no address.
        client = f"{self._salt}/{day}/{CLIENT.get()}"
        session = hashlib.sha256(client.encode()).hexdigest()[:16]
        row = {"time": round(time.time(), 3), "session": session, **event}
        line = f"{json.dumps(row, ensure_ascii=False)}\n".encode()
        with self._lock:
            self._unwritten.append(line)
            try:
                # The oldest lines come first: an earlier error, such as a full disk, may have left
                # some unwritten.
                while self._unwritten:
                    self._append(self._unwritten[0], day)
                    self._unwritten.popleft()
            except OSError as error:
                # The next event begins a new file, because this file may end in half a line.
                self._file = None
                # With a full disk, every write fails. If only one line is unwritten, this failure
                # is the first, and only the first gets a message.
                if len(self._unwritten) == 1:
                    say(f"{self._folder}: cannot write the log: {reason_of(error)}")

    def _append(self, line: bytes, day: str) -> None:
        """Append a line to the file of a day. Begin a new file if necessary."""
        if self._file is None or self._day != day or self._file.tell() > _MAX_FILE_BYTES:
            _remove_oldest(self._folder)
            path = self._folder / f"use-{day}-{time.time_ns()}-{os.getpid()}.jsonl"
            # Only the owner may read the file. It is not buffered, so a line is one system call.
            self._file = FileIO(path, "xb", opener=partial(os.open, mode=0o600))
            self._day = day
        if self._file.write(line) != len(line):
            raise OSError("no space left on device")


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest files of a log that has more than `_MAX_LOG_BYTES`."""
    num_bytes = 0
    # The newest files come first, because a file's name begins with its day and its time.
    for file in sorted(folder.glob(_FILES), reverse=True):
        # Another process may remove the file at the same time.
        with suppress(FileNotFoundError):
            num_bytes += file.stat().st_size
            if num_bytes > _MAX_LOG_BYTES:
                file.unlink()


# Reading -------------------------------------------------------------------------------------


class _Event(Row):
    """An answer, or a load if `loaded` is not empty."""

    time: float
    session: str
    query: str = ""
    skills: dict[str, float] = Field(default={})
    loaded: str = ""


@dataclass
class LoggedRequest:
    """A request with its answer.

    Attributes:
        where: File and line of the answer.
        session: Hash of the client's session.
        time: Unix time of the answer in seconds.
        shown_ids: Ids of the skills that the client got, in order.
        loaded: Ids of the skills that the client then loaded.
    """

    text: str
    where: str
    session: str
    time: float
    shown_ids: list[str]
    loaded: set[str] = field(default_factory=set)

    @property
    def skipped(self) -> list[str]:
        """Ids of the skills that were shown above a loaded skill and not loaded.

        What stands below the last loaded skill may never have been read, so it is left out.
        """
        last_rank = max((self.shown_ids.index(skill_id) for skill_id in self.loaded), default=0)
        return [skill_id for skill_id in self.shown_ids[:last_rank] if skill_id not in self.loaded]


def read_requests(folder: Path) -> list[LoggedRequest]:
    """Read the requests of a log, each with the skills that its client then loaded.

    Args:
        folder: Folder of the log.

    Returns:
        Requests, session after session. Those of a session are in order of time.

    Raises:
        SkilltrainError: There is no log, or a line is no event.
    """
    files = sorted(folder.glob(_FILES))
    if not files:
        fix = "make one with: skilltrain serve ROUTER --log DIR"
        raise SkilltrainError("not-found", "holds no log", where=folder, fix=fix)
    requests_by_session: dict[str, list[LoggedRequest]] = {}
    for where, event in chain.from_iterable(map(_read_events, files)):
        requests = requests_by_session.setdefault(event.session, [])
        # An event is an answer to a request, or a load: a client then loaded a skill.
        if event.loaded:
            _add_load(event, requests)
        else:
            text = one_line(event.query)
            shown_ids = [*event.skills]  # ids in order of rank
            requests.append(
                LoggedRequest(
                    text=text,
                    where=where,
                    session=event.session,
                    time=event.time,
                    shown_ids=shown_ids,
                )
            )
    return list(chain.from_iterable(requests_by_session.values()))


def _read_events(file: Path) -> Iterator[tuple[str, _Event]]:
    """Yield the place and the content of each line. A torn last line is left out."""
    check_input_file(file)
    where = str(file)
    try:
        for number, line in numbered_lines(file):
            where = f"{file}, line {number}"
            try:
                values = json_object(line)
            except ValueError:
                # A killed process may leave half a line, which has no line break.
                if not line.endswith(b"\n"):
                    return
                raise  # handled below
            yield where, parse_row(_Event, values, where)
    except LINE_ERRORS as error:
        problem = f"is not JSON Lines: {reason_of(error)}"
        raise SkilltrainError("not-json", problem, where=where) from error


def _add_load(load: _Event, requests: Sequence[LoggedRequest]) -> None:
    """Add a loaded skill to the newest request that showed it, if that is recent.

    Args:
        load: The event.
        requests: Earlier requests of its session, in order of time.
    """
    for request in reversed(requests):
        if load.loaded in request.shown_ids and load.time - request.time <= _MAX_SECONDS:
            request.loaded.add(load.loaded)
            return


def request_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a log as rows of a query file.

    Loaded skills are required, and skipped ones are irrelevant. A third of the sessions has the
    split dev. A repeated text has the same split in all sessions.
    """
    first_sessions: dict[str, str] = {}  # by text
    for request in read_requests(folder):
        # All requests with the same text get the split of the first session.
        session = first_sessions.setdefault(request.text, request.session)
        is_held_out = is_drawn(_HELD_OUT_SHARE, "session", session)
        row = {
            "query": request.text,
            "skill_ids": sorted(request.loaded),
            "irrelevant": request.skipped,
            "session": request.session,
            "split": "dev" if is_held_out else "train",
            "origin": ORIGIN,
        }
        yield request.where, row
