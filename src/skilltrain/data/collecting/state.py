"""What a collector knows, kept on disk so that a kill at any moment loses one request at most.

Two journals of JSON lines, each line written and synced before the next request: `listing.jsonl`, the pages of one
listing, begun anew for each sync; `outcomes.jsonl`, what became of each skill, the last line of a skill counts.
Downloads lie beside them under their SHA-256.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from skilltrain.data.collecting.archive_members import Refused
from skilltrain.data.collecting.registry_client import Validators
from skilltrain.data.collecting.registry_listing import Listed, Position
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl, write_text
from skilltrain.terminal import log

LISTING, OUTCOMES, DOWNLOADS = "listing.jsonl", "outcomes.jsonl", "downloads"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page as it was read. `next` is where the next one stands, None after the last."""

    url: str
    etag: str
    next: Position
    skills: list[Listed]
    refused: list[Refused]


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

    def validators(self, url: str) -> Validators:
        """What to ask `url` "has it changed?" with; nothing if the file is missing, broken or from elsewhere."""
        is_whole = bool(self.sha256) and self.status != "broken" and self.url_key == url_key(url)
        return Validators(self.etag, self.modified) if is_whole else Validators()


def url_key(url: str) -> str:
    """A URL in 16 digits: its query may hold a signature, which is kept no longer than the listing that it came in."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class SyncState:
    """The state folder of one registry; open it with `open_state`."""

    def __init__(self, folder: Path, registry: dict[str, Any]) -> None:
        self._folder, self._registry = folder, registry
        try:
            self.outcomes = {row["skill_id"]: Outcome(**row) for row in _rows(folder / OUTCOMES)}
            header, *pages = _rows(folder / LISTING) or [{}]
            is_finished = pages[-1:] == [{"finished": True}]
            is_same = header.get("registry") == registry
            read = [_page_from(row) for row in pages if is_same and "url" in row]
            self._check_home(header)
        except (KeyError, TypeError) as error:
            raise SkilltrainError(f"holds no state of a collector: {error!r}", where=folder) from error
        self.sync, self.pages = str(header.get("sync", "")), read
        self.is_begun = is_same and not is_finished
        self._before: dict[str, ListedPage] = {}

    def _check_home(self, header: dict[str, Any]) -> None:
        """A state folder serves one registry; the ids of another would mean other skills."""
        home = header.get("registry", self._registry)["base_url"]
        if home != self._registry["base_url"]:
            raise SkilltrainError(
                f"holds what was collected from {home}", where=self._folder, fix="set another state=…"
            )

    @property
    def has_listing(self) -> bool:
        """Whether the listing is read to its end."""
        return bool(self.pages) and self.pages[-1].next is None

    def start_sync(self) -> None:
        """Begin a listing anew. What is known of the skills stays; so do, for this run, the old pages' ETags."""
        self._before = {page.url: page for page in self.pages}
        self.sync = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.pages, self.is_begun = [], True
        (self._folder / LISTING).unlink(missing_ok=True)
        _append(self._folder / LISTING, {"sync": self.sync, "registry": self._registry})

    def page_before(self, url: str) -> ListedPage | None:
        """The page that an earlier listing had at `url`."""
        return self._before.get(url)

    def add_page(self, page: ListedPage) -> None:
        """Keep a page; the next run goes on behind it."""
        _append(self._folder / LISTING, asdict(page))
        self.pages.append(page)

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a skill."""
        dated = replace(outcome, date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        _append(self._folder / OUTCOMES, asdict(dated))
        self.outcomes[outcome.skill_id] = dated

    def finish_sync(self) -> None:
        """The next run reads the listing anew. What no skill has any more is removed: old lines, old downloads."""
        rows = (json.dumps(asdict(outcome), ensure_ascii=True) + "\n" for outcome in self.outcomes.values())
        write_text(self._folder / OUTCOMES, "".join(rows))
        _append(self._folder / LISTING, {"finished": True})
        self.is_begun = False
        wanted = {self.download_path(outcome.sha256) for outcome in self.outcomes.values() if outcome.sha256}
        for file in set((self._folder / DOWNLOADS).glob("??/*")) - wanted:
            file.unlink()

    def download_path(self, sha256: str) -> Path:
        """Where a download of this content lies."""
        return self._folder / DOWNLOADS / sha256[:2] / sha256

    def partial_path(self) -> Path:
        """Where a download is written while it comes in."""
        return self._folder / _PARTIAL

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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise SkilltrainError(f"cannot write: {error.strerror or error}", where=folder) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed, or the process dies
        except BlockingIOError as error:
            raise SkilltrainError("another collector is at work in this folder", where=folder) from error
        state = SyncState(folder, registry)
        try:
            yield state
        finally:
            state.partial_path().unlink(missing_ok=True)


def _page_from(row: dict[str, Any]) -> ListedPage:
    skills = [Listed(**skill) for skill in row["skills"]]
    return ListedPage(**{**row, "skills": skills, "refused": [Refused(**refused) for refused in row["refused"]]})


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a last one that a kill cut off is removed from it."""
    if not path.is_file():
        return []
    _cut_torn_line(path)
    try:
        return [row for _, row in read_jsonl(path)]
    except SkilltrainError as error:
        raise SkilltrainError(
            error.what, where=error.where, fix="delete the file; what it tells is asked again"
        ) from error


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("%s: removed a line that was cut off", path)
            file.truncate(whole)


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a line, on disk before this returns."""
    line = (json.dumps(row, ensure_ascii=True) + "\n").encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise SkilltrainError(f"cannot write: {error.strerror or error}", where=path) from error
