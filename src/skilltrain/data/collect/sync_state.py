"""What a collector knows, in one database, so that a kill at any moment loses one request at most.

A sync is one pass over a registry: the pages of its listing as they came, under their URLs, then the downloads.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import locked

DATABASE = "registry.sqlite"
_TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS sync (base_url TEXT, number INTEGER);
CREATE TABLE IF NOT EXISTS pages (url TEXT PRIMARY KEY, page TEXT);
CREATE TABLE IF NOT EXISTS downloads (skill_id TEXT PRIMARY KEY, sync INTEGER, version TEXT, files TEXT, etag TEXT,
                                      refusal TEXT, reason TEXT);
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a download asked for in a sync and under a version of the listing came to: files, or a refusal for good.

    `files` is a JSON object: folder → text of its SKILL.md, null for what is no text.
    """

    skill_id: str
    sync: int
    version: str
    files: str = "{}"
    etag: str = ""
    refusal: str = ""
    reason: str = ""


class SyncState:
    """The state of one registry; open it with `open_state`."""

    def __init__(self, folder: Path, database: sqlite3.Connection, base_url: str) -> None:
        self._run = database.execute
        database.executescript(_TABLES)
        if not (row := self._run("SELECT base_url, number FROM sync").fetchone()):
            row = (base_url, 1)
            self._run("INSERT INTO sync VALUES (?, ?)", row)
        home, self.sync = row
        if home != base_url:
            raise SkilltrainError(f"holds what was collected from {home}", where=folder, fix="set another state=…")
        self.outcomes = {row[0]: Outcome(*row) for row in self._run("SELECT * FROM downloads")}

    def page(self, url: str) -> Any:
        """The page of the listing that came from `url` in this sync; None if none did."""
        row = self._run("SELECT page FROM pages WHERE url = ?", [url]).fetchone()
        return json.loads(row[0]) if row else None

    def keep_page(self, url: str, page: Any) -> None:
        """Keep a page: the next run does not ask for it."""
        self._run("INSERT OR REPLACE INTO pages VALUES (?, ?)", [url, json.dumps(page)])

    def forget_pages(self) -> None:
        """Begin the listing anew. What is known of the skills stays."""
        self._run("DELETE FROM pages")

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        self._run("INSERT OR REPLACE INTO downloads VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(outcome))
        self.outcomes[outcome.skill_id] = outcome

    def finish_sync(self) -> None:
        """The next run reads the listing anew."""
        self.forget_pages()
        self._run("UPDATE sync SET number = number + 1")


@contextmanager
def open_state(folder: Path, base_url: str) -> Iterator[SyncState]:
    """The state in `folder`, made if there is none; SkilltrainError if another collector is at work in it."""
    with locked(folder / "sync"):  # makes the folder, too
        try:
            with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as database:
                yield SyncState(folder, database, base_url)
        except sqlite3.Error as error:  # no database, one of another program, or a full disk
            what = f"cannot be read or written as the state of a collector: {error}"
            raise SkilltrainError(what, where=folder / DATABASE, fix="free some space, or delete it") from error
