"""What a collector knows, kept in a database so that a kill at any moment loses one request at most.

A sync is one pass over a registry: the pages of its listing as they came, under their URLs, then the downloads, which
lie beside the database under their SHA-256.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path, locked

DATABASE, DOWNLOADS = "registry.sqlite", "downloads"
_TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS sync (base_url TEXT, number INTEGER);
CREATE TABLE IF NOT EXISTS pages (url TEXT PRIMARY KEY, page TEXT);
CREATE TABLE IF NOT EXISTS skills (skill_id TEXT PRIMARY KEY, outcome TEXT);
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a download asked for in a sync and under a version of the listing came to: a file, or a refusal for good.

    `refusal` is empty, gone or too_big, with its reason and value.
    """

    skill_id: str
    sync: int
    version: str
    refusal: str = ""
    reason: str = ""
    value: float | None = None
    sha256: str = ""
    etag: str = ""
    modified: str = ""
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")


class SyncState:
    """The state folder of one registry; open it with `open_state`."""

    def __init__(self, folder: Path, database: sqlite3.Connection, base_url: str) -> None:
        self._folder, self._database = folder, database
        database.executescript(_TABLES)
        if not (row := database.execute("SELECT base_url, number FROM sync").fetchone()):
            row = (base_url, 1)
            database.execute("INSERT INTO sync VALUES (?, ?)", row)
        home, self.sync = row
        if home != base_url:
            raise SkilltrainError(f"holds what was collected from {home}", where=folder, fix="set another state=…")
        rows = database.execute("SELECT outcome FROM skills")
        self.outcomes = {outcome.skill_id: outcome for outcome in (Outcome(**json.loads(row[0])) for row in rows)}

    def page(self, url: str) -> Any:
        """The page of the listing that came from `url` in this sync; None if none did."""
        row = self._database.execute("SELECT page FROM pages WHERE url = ?", [url]).fetchone()
        return json.loads(row[0]) if row else None

    def keep_page(self, url: str, page: Any) -> None:
        """Keep a page: the next run does not ask for it."""
        self._database.execute("INSERT OR REPLACE INTO pages VALUES (?, ?)", [url, json.dumps(page)])

    def forget_pages(self) -> None:
        """Begin the listing anew. What is known of the skills stays."""
        self._database.execute("DELETE FROM pages")

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        row = [outcome.skill_id, json.dumps(asdict(outcome))]
        self._database.execute("INSERT OR REPLACE INTO skills VALUES (?, ?)", row)
        self.outcomes[outcome.skill_id] = outcome

    def forget(self, outcome: Outcome) -> None:
        """Let the next run ask for a skill as if it were new."""
        self._database.execute("DELETE FROM skills WHERE skill_id = ?", [outcome.skill_id])
        del self.outcomes[outcome.skill_id]

    def finish_sync(self) -> None:
        """The next run reads the listing anew. Downloads that no skill has any more are removed."""
        self.forget_pages()
        self._database.execute("UPDATE sync SET number = number + 1")
        wanted = {self.download_path(outcome.sha256) for outcome in self.outcomes.values() if outcome.sha256}
        for file in set((self._folder / DOWNLOADS).glob("??/*")) - wanted:
            file.unlink()

    def download_path(self, digest: str) -> Path:
        """Where a download with this SHA-256 lies."""
        return self._folder / DOWNLOADS / digest[:2] / digest

    def keep_download(self, content: bytes) -> str:
        """The SHA-256 of a download; its file is on disk before this returns."""
        digest = sha256(content).hexdigest()
        with atomic_path(self.download_path(digest)) as temporary:
            temporary.write_bytes(content)
        return digest


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
