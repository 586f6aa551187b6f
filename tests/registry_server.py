"""An HTTP server on loopback that lists skills and sends them as a registry does."""

import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from loopback import Quiet, serving

PAGE_SIZE = 3


@dataclass(frozen=True)
class Reply:
    """What the server answers to one request."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Registry:
    """The running registry: its skills, the requests it got, and replies in place of the usual."""

    base_url: str = ""
    skills: dict[str, bytes] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    script: dict[str, list[Reply]] = field(default_factory=dict)  # path → the first replies

    def downloads(self) -> list[str]:
        """Return the ids of the skills that were asked for, in order."""
        prefix = "/api/get/"
        return [path.removeprefix(prefix) for path in self.paths if path.startswith(prefix)]

    def reply(self, path: str) -> Reply:
        """Return the usual reply: a page of the listing, or a skill."""
        url = urlsplit(path)
        if url.path == "/api/skills":
            return self._page(int(parse_qs(url.query)["page"][0]))
        content = self.skills.get(url.path.removeprefix("/api/get/"))
        return Reply(b"no such skill", 404) if content is None else Reply(content)

    def _page(self, number: int) -> Reply:
        items = []
        for skill_id in self.skills:
            version = self.versions.get(skill_id, "1")
            items.append({"id": skill_id, "updated_at": version, "download_url": f"get/{skill_id}"})
        start = (number - 1) * PAGE_SIZE
        return Reply(json.dumps({"items": items[start : start + PAGE_SIZE]}).encode())


def skill_md(name: str) -> bytes:
    """Return a SKILL.md."""
    return f"---\nname: {name}\ndescription: How to {name}.\n---\n# {name}\nDo it well.\n".encode()


def zip_of(files: dict[str, bytes]) -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    """Return a tar archive, compressed by `mode`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def registry_server() -> Iterator[Registry]:
    """Yield a registry below /api on a free port of loopback."""
    registry = Registry()

    class Handler(Quiet):
        def do_GET(self) -> None:
            registry.paths.append(self.path)
            scripted = registry.script.get(self.path)
            reply = scripted.pop(0) if scripted else registry.reply(self.path)
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

    with serving(Handler) as address:
        registry.base_url = f"{address}/api"
        yield registry
