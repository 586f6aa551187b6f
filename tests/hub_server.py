"""A Hub on loopback, where huggingface_hub's own client creates repositories and commits."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loopback import Quiet, serving

TOKEN = "token-of-the-test"
SHA = "0" * 40


@dataclass
class Repository:
    """A repository of the Hub."""

    private: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0


@dataclass
class Hub:
    """A running server: its repositories, how it answers, and the requests that it got.

    `path_without_answer` is a part of the path of requests that are never answered. Refusals echo
    the client's token.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    status_of_create: int = 200
    status_of_commit: int = 200
    path_without_answer: str = ""
    log: list[str] = field(default_factory=list)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Yield a Hub that listens until the block ends."""
    hub = Hub()
    is_closing = threading.Event()

    class Handler(Quiet):
        def parse_request(self) -> bool:
            is_valid = super().parse_request()
            if hub.path_without_answer and hub.path_without_answer in self.path:
                is_closing.wait()
            return is_valid

        def answer(self, status: int, value: object) -> None:
            if status >= 400:
                value = f"{value} ({self.headers.get('Authorization')})"
            body = json.dumps({"error": value} if isinstance(value, str) else value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status >= 400:
                self.send_header("X-Error-Message", str(value))
                self.send_header("X-Error-Code", "RepoNotFound" if status == 404 else "Refused")
            self.end_headers()
            self.wfile.write(body)

        def repository(self) -> tuple[str, Repository | None]:
            name = "/".join(self.path.split("?")[0].split("/")[3:5])
            return name, hub.repositories.get(name)

        def do_GET(self) -> None:
            hub.log.append(f"GET {self.path}")
            name, repository = self.repository()
            if repository is None:
                self.answer(404, "Repository not found")
                return
            siblings = [{"rfilename": file} for file in repository.files]
            info = {"id": name, "private": repository.private, "sha": SHA, "siblings": siblings}
            self.answer(200, info)

        def do_POST(self) -> None:
            hub.log.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, "Invalid credentials in Authorization header")
            elif self.path == "/api/repos/create":
                self.create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": files})
            else:
                self.commit([json.loads(line) for line in body.splitlines()])

        def create(self, request: dict[str, str]) -> None:
            name = f"{request['organization']}/{request['name']}"
            url = f"{hub.url}/{name}"
            if hub.status_of_create != 200:
                message = "You don't have the rights to create a model under this namespace"
                self.answer(hub.status_of_create, message)
            elif name in hub.repositories:
                self.answer(409, {"error": "You already created this model repo", "url": url})
            else:
                is_private = request.get("visibility") == "private" or bool(request.get("private"))
                hub.repositories[name] = Repository(is_private)
                self.answer(200, {"url": url})

        def commit(self, operations: list[dict]) -> None:
            name, repository = self.repository()
            assert repository is not None
            if hub.status_of_commit != 200:
                self.answer(hub.status_of_commit, "The commit is refused")
                return
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "deletedFile":
                    del repository.files[value["path"]]
            repository.commits += 1
            url = f"{hub.url}/{name}/commit/{SHA}"
            self.answer(200, {"commitUrl": url, "commitOid": SHA})

    with serving(Handler) as hub.url:
        try:
            yield hub
        finally:
            is_closing.set()
