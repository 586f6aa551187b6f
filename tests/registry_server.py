"""A real HTTP server on loopback that lists and hands out skills as a registry does, and fails as it is told to."""

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from urllib.parse import parse_qs, urlsplit

from loopback import Quiet, serving


@dataclass(frozen=True)
class Reply:
    """What the server says. `length` is a Content-Length that lies; `cut` closes after so many bytes of the body."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    cut: int | None = None


@dataclass
class Entry:
    """A skill that the registry lists."""

    body: bytes
    updated: str = "2026-01-01"
    digest: str = ""
    etag: str = ""
    url: str | None = None  # None: the registry's own


@dataclass
class Registry:
    """The running registry: what it has, what it was asked, what it says instead."""

    base_url: str = ""
    skills: dict[str, Entry] = field(default_factory=dict)
    log: list[tuple[str, Message]] = field(default_factory=list)  # paths and headers of requests
    # path and query → replies that come first, or a function that makes one (None: the usual reply)
    script: dict[str, list[Reply]] = field(default_factory=dict)
    before: Callable[[str], Reply | None] = field(default=lambda path: None)

    @property
    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [path for path, _ in self.log]

    def downloads(self) -> list[str]:
        """Ids of the skills that were asked for, in order."""
        return [
            path.removeprefix("/api/get/") for path in self.paths if path.startswith("/api/get/")
        ]

    def reply(self, path: str, headers: Mapping[str, str] | Message) -> Reply:
        """The usual reply: a page of the listing, or a skill."""
        parts = urlsplit(path)
        if parts.path == "/api/skills":
            return self._page({key: values[0] for key, values in parse_qs(parts.query).items()})
        entry = self.skills.get(parts.path.split("/", 3)[-1])
        if entry is None:
            return Reply(b"no such skill", 404)
        is_known = bool(entry.etag) and headers.get("if-none-match") == entry.etag
        return Reply(
            b"" if is_known else entry.body, 304 if is_known else 200, {"ETag": entry.etag}
        )

    def _page(self, query: dict[str, str]) -> Reply:
        """Three skills, by the number of the page or by a cursor."""
        start = 3 * int(query["page"]) - 3 if "page" in query else int(query.get("cursor", 0))
        items = [
            {
                "id": skill_id,
                "name": f"The {skill_id}",
                "updated_at": entry.updated,
                "digest": entry.digest,
                "download_url": f"get/{skill_id}" if entry.url is None else entry.url,
            }
            for skill_id, entry in self.skills.items()
        ]
        page = {
            "items": items[start : start + 3],
            "next_cursor": str(start + 3) if start + 3 < len(items) else None,
        }
        return Reply(json.dumps(page).encode(), headers={"Content-Type": "application/json"})


def skill_md(name: str, body: str = "Do it well.") -> bytes:
    """A SKILL.md."""
    return f"---\nname: {name}\ndescription: How to {name}.\n---\n# {name}\n{body}\n".encode()


def zip_of(files: dict[str, bytes]) -> bytes:
    """A zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    """A tar archive, compressed by `mode`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest_of(content: bytes) -> str:
    """The SHA-256 as a listing writes it."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


@contextmanager
def registry_server() -> Iterator[Registry]:
    """Yield a registry below /api on a free port of loopback."""
    state = Registry()

    class Handler(Quiet):
        def do_GET(self) -> None:
            state.log.append((self.path, self.headers))
            scripted = state.script.get(self.path)
            reply = (
                scripted.pop(0)
                if scripted
                else state.before(self.path) or state.reply(self.path, self.headers)
            )
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.length != -1 and reply.status != 304:
                self.send_header(
                    "Content-Length", str(len(reply.body) if reply.length is None else reply.length)
                )
            if reply.length is not None or reply.cut is not None:
                self.close_connection = True
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(reply.body if reply.cut is None else reply.body[: reply.cut])

    with serving(Handler) as address:
        state.base_url = f"{address}/api"
        yield state
