"""What a collector knows, kept in a database so that a kill at any moment loses one request at most.

A sync is one pass over a registry: the pages of its listing, then the downloads, which lie beside the database under
their SHA-256.
"""

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS listing (page TEXT);
CREATE TABLE IF NOT EXISTS skills (skill_id TEXT PRIMARY KEY, outcome TEXT);
"""


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page as it was read. `next` is where the next one stands, None after the last."""

    next: Position
    skills: list[Listed]
    dropped: list[Dropped]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a skill's download, asked for in a sync and under a version of the listing.

    A download that failed or was broken leaves the file of an earlier version, `sha256`, where there is one. `url_key`
    is a hash of its URL.
    """

    skill_id: str
    status: Literal["fetched", "gone", "forbidden", "too_big", "failed", "broken"]
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


class SyncState:
    """The state folder of one registry; open it with `open_state`."""

    def __init__(self, folder: Path, database: sqlite3.Connection, registry: dict[str, Any]) -> None:
        self._folder, self._database = folder, database
        database.executescript(_TABLES)
        known = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM meta")}
        home = known.get("registry", registry)["base_url"]
        if home != registry["base_url"]:
            raise SkilltrainError(f"holds what was collected from {home}", where=folder, fix="set another state=…")
        rows = database.execute("SELECT outcome FROM skills")
        self.outcomes = {outcome.skill_id: outcome for outcome in (Outcome(**json.loads(row[0])) for row in rows)}
        self.sync = known.get("sync", "")
        self.pages = [_page_from(json.loads(row[0])) for row in database.execute("SELECT page FROM listing")]
        if known.get("registry") != registry or known["is_finished"]:
            self.start_sync()
            self._keep("registry", registry)

    def _keep(self, key: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [key, json.dumps(value)])

    @property
    def has_listing(self) -> bool:
        """Whether the listing is read to its end."""
        return bool(self.pages) and self.pages[-1].next is None

    def start_sync(self) -> None:
        """Begin a listing anew. What is known of the skills stays."""
        self._database.execute("DELETE FROM listing")
        self.pages = []
        self.sync = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._keep("sync", self.sync)
        self._keep("is_finished", False)

    def add_page(self, page: ListedPage) -> None:
        """Keep a page; the next run goes on behind it."""
        self._database.execute("INSERT INTO listing VALUES (?)", [json.dumps(asdict(page))])
        self.pages.append(page)

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        dated = replace(outcome, date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        row = [outcome.skill_id, json.dumps(asdict(dated))]
        self._database.execute("INSERT OR REPLACE INTO skills VALUES (?, ?)", row)
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
    with locked(folder / "sync"):  # makes the folder, too
        try:
            with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as database:
                yield SyncState(folder, database, registry)
        except sqlite3.Error as error:  # no database, one of another program, or a full disk
            what = f"cannot be read or written as the state of a collector: {error}"
            raise SkilltrainError(what, where=folder / DATABASE, fix="free some space, or delete it") from error
        finally:
            (folder / PARTIAL).unlink(missing_ok=True)


def _page_from(row: dict[str, Any]) -> ListedPage:
    skills = [Listed(**skill) for skill in row["skills"]]
    return ListedPage(row["next"], skills, [Dropped(**dropped) for dropped in row["dropped"]])
