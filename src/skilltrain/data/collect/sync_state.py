"""What a collector knows, in one database, so that a kill at any moment loses one request at most.

A sync is one pass over a registry: the pages of its listing as they came, under their URLs, then the downloads.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import locked

DATABASE = "registry.sqlite"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a download asked for in a sync and under a version of the listing came to: files, or a refusal for good.

    `files` is folder → text of its SKILL.md, None for what is no text.
    """

    sync: int
    version: str
    files: dict[str, str | None] = field(default_factory=dict)
    etag: str = ""
    refusal: str = ""
    reason: str = ""


class SyncState:
    """The state of one registry; open it with `open_state`. `pages` are those of this sync, by URL; skills have ids."""

    def __init__(self, folder: Path, database: sqlite3.Connection, base_url: str) -> None:
        self._run = database.execute
        self._run("PRAGMA journal_mode = WAL")
        self._run(
            "CREATE TABLE IF NOT EXISTS facts (kind TEXT, name TEXT, value TEXT, PRIMARY KEY (kind, name))"
        )
        kept = self._read("sync") or {base_url: 1}
        [(self._home, self.sync)] = kept.items()
        if self._home != base_url:
            raise SkilltrainError(
                f"holds what was collected from {self._home}",
                where=folder,
                fix="set another state=…",
            )
        self._keep("sync", base_url, self.sync)
        self.pages = self._read("page")
        self.outcomes = {
            skill_id: Outcome(**value) for skill_id, value in self._read("skill").items()
        }

    def _read(self, kind: str) -> dict[str, Any]:
        rows = self._run("SELECT name, value FROM facts WHERE kind = ?", [kind])
        return {name: json.loads(value) for name, value in rows}

    def _keep(self, kind: str, name: str, value: Any) -> None:
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", [kind, name, json.dumps(value)])

    def keep_page(self, url: str, page: Any) -> None:
        """Keep a page: the next run does not ask for it."""
        self._keep("page", url, page)
        self.pages[url] = page

    def forget_pages(self) -> None:
        """Begin the listing anew. What is known of the skills stays."""
        self._run("DELETE FROM facts WHERE kind = 'page'")
        self.pages.clear()

    def record(self, skill_id: str, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        self._keep("skill", skill_id, asdict(outcome))
        self.outcomes[skill_id] = outcome

    def finish_sync(self) -> None:
        """The next run reads the listing anew."""
        self.forget_pages()
        self._keep("sync", self._home, self.sync + 1)


@contextmanager
def open_state(folder: Path, base_url: str) -> Iterator[SyncState]:
    """The state in `folder`, made if there is none; SkilltrainError if another collector is at work in it."""
    with locked(folder / "sync"):  # makes the folder, too
        try:
            with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as database:
                yield SyncState(folder, database, base_url)
        except sqlite3.Error as error:  # no database, one of another program, or a full disk
            what = f"cannot be read or written as the state of a collector: {error}"
            raise SkilltrainError(
                what, where=folder / DATABASE, fix="free some space, or delete it"
            ) from error
