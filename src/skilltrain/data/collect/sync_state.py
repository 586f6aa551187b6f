"""What a collector knows, kept in a database so that a kill at any moment loses one request at most.

A sync is one pass over a registry: the pages of its listing, then the downloads, which lie beside the database under
their SHA-256.
"""

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from skilltrain.data.collect.registry import Listed, Position
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked
from skilltrain.records import Dropped

DATABASE, DOWNLOADS, PARTIAL = "collected.sqlite", "downloads", "download.partial"
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS pages (sync TEXT, url TEXT, page TEXT);
CREATE TABLE IF NOT EXISTS outcomes (skill_id TEXT PRIMARY KEY, outcome TEXT);
"""


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page as it was read. `next` is where the next one stands, None after the last."""

    url: str
    etag: str
    next: Position
    skills: list[Listed]
    dropped: list[Dropped]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a skill's download, asked for in a sync and under a version of the listing.

    A download that failed or was broken leaves the file of an earlier version, `sha256`, where there is one.
    """

    skill_id: str
    status: Literal["fetched", "gone", "too_big", "failed", "broken"]
    sync: str
    version: str
    url_key: str
    reason: str = ""
    value: float | None = None
    sha256: str = ""
    num_bytes: int = 0
    etag: str = ""
    modified: str = ""
    date: str = ""


def url_key(url: str) -> str:
    """A URL in 16 digits: its query may hold a signature, which is kept no longer than the listing that it came in."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class SyncState:
    """The state folder of one registry; open it with `open_state`."""

    def __init__(self, folder: Path, database: sqlite3.Connection, registry: dict[str, Any]) -> None:
        self._folder, self._database = folder, database
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA busy_timeout = 0;" + _TABLES)
        known = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM meta")}
        home = known.get("registry", registry)["base_url"]
        if home != registry["base_url"]:
            raise SkilltrainError(f"holds what was collected from {home}", where=folder, fix="set another state=…")
        rows = database.execute("SELECT outcome FROM outcomes")
        self.outcomes = {outcome.skill_id: outcome for outcome in (Outcome(**json.loads(row[0])) for row in rows)}
        self.sync = known.get("sync", "")
        self.pages: list[ListedPage] = []
        if known.get("registry") == registry and not known.get("is_finished"):
            rows = database.execute("SELECT page FROM pages WHERE sync = ? ORDER BY rowid", [self.sync])
            self.pages = [_page_from(json.loads(row[0])) for row in rows]
        else:
            if known.get("registry") != registry:  # its pages were read under other keys
                self._write("DELETE FROM pages")
            self._keep("registry", registry)
            self.start_sync()

    def _write(self, statement: str, *values: str) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.OperationalError as error:  # a full disk
            raise SkilltrainError(f"cannot write: {error}", where=self._folder / DATABASE) from error

    def _keep(self, key: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    @property
    def has_listing(self) -> bool:
        """Whether the listing is read to its end."""
        return bool(self.pages) and self.pages[-1].next is None

    def start_sync(self) -> None:
        """Begin a listing anew. What is known of the skills stays, and so do the pages of the sync before."""
        self._write("DELETE FROM pages WHERE sync != ?", self.sync)
        self.sync = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._keep("sync", self.sync)
        self._keep("is_finished", False)
        self.pages = []

    def page_before(self, url: str) -> ListedPage | None:
        """The page that an earlier listing had at `url`."""
        query = "SELECT page FROM pages WHERE url = ? AND sync != ?"
        row = self._database.execute(query, [url, self.sync]).fetchone()
        return _page_from(json.loads(row[0])) if row else None

    def add_page(self, page: ListedPage) -> None:
        """Keep a page; the next run goes on behind it."""
        self._write("INSERT INTO pages VALUES (?, ?, ?)", self.sync, page.url, json.dumps(asdict(page)))
        self.pages.append(page)

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        dated = replace(outcome, date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        self._write("INSERT OR REPLACE INTO outcomes VALUES (?, ?)", outcome.skill_id, json.dumps(asdict(dated)))
        self.outcomes[outcome.skill_id] = dated

    def finish_sync(self) -> None:
        """The next run reads the listing anew. Downloads that no skill has any more are removed."""
        self._keep("is_finished", True)
        wanted = {self.download_path(outcome.sha256) for outcome in self.outcomes.values() if outcome.sha256}
        for file in set((self._folder / DOWNLOADS).glob("??/*")) - wanted:
            file.unlink()

    def download_path(self, sha256: str) -> Path:
        """Where a download of this content lies."""
        return self._folder / DOWNLOADS / sha256[:2] / sha256

    def has_download(self, sha256: str) -> bool:
        """Whether there is such a download."""
        return bool(sha256) and self.download_path(sha256).is_file()

    def partial_path(self) -> Path:
        """Where a download is written while it comes in."""
        return self._folder / PARTIAL

    def keep_download(self, sha256: str) -> None:
        """Give the partial download its name; on disk before this returns."""
        target = self.download_path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.partial_path().open("rb") as file:
            os.fsync(file.fileno())
        self.partial_path().replace(target)


@contextmanager
def open_state(folder: Path, registry: dict[str, Any]) -> Iterator[SyncState]:
    """The state in `folder`, made if there is none; SkilltrainError if another collector is at work in it.

    `registry` is what makes a listing another one: its settings without secrets and permissions.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock"))
            database = stack.enter_context(closing(sqlite3.connect(folder / DATABASE, isolation_level=None)))
            state = SyncState(folder, database, registry)
        except OSError as error:
            raise SkilltrainError(f"cannot write: {error.strerror or error}", where=folder) from error
        except (sqlite3.DatabaseError, KeyError, TypeError, ValueError) as error:
            fix = f"delete {DATABASE}; what it holds is asked again"
            raise SkilltrainError(f"holds no state of a collector: {error!r}", where=folder, fix=fix) from error
        stack.callback(state.partial_path().unlink, missing_ok=True)
        yield state


def _page_from(row: dict[str, Any]) -> ListedPage:
    skills = [Listed(**skill) for skill in row["skills"]]
    return ListedPage(**{**row, "skills": skills, "dropped": [Dropped(**dropped) for dropped in row["dropped"]]})
