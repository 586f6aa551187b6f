"""A Hub on loopback. huggingface_hub's own client creates, reads and writes its repositories."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from loopback import Quiet, serving

TOKEN = "token-of-the-test"
# /api/models/OWNER/NAME/ACTION/REVISION, or /datasets/OWNER/NAME/resolve/REVISION/FILE
_PATH = re.compile(
    r"(?:/api/(?:models|datasets)|/datasets)?/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<action>\w+))?(?:/(?P<revision>[^/]+))?(?:/(?P<file>.+))?"
)


@dataclass
class Repository:
    """A repository of the Hub.

    `files` are those of the branch main, `branches` and `tags` those of other revisions by name.
    Each of `pull_requests` is a list of the operations of its commit.
    """

    private: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    type: str = "model"
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)
    pull_requests: list[list[dict]] = field(default_factory=list)

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a branch, a tag or a commit."""
        named = {"main": self.files} | self.branches | self.tags
        by_commit = {commit_of(files): files for files in named.values()}
        return named.get(revision, by_commit.get(revision))


def commit_of(files: dict[str, bytes]) -> str:
    """Return the commit hash of some files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """A running server: its repositories, how it answers, and the requests that it got.

    `path_without_answer` is a part of the path of requests that are never answered. Refusals echo
    the client's token.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    status_of_read: int = 200
    status_of_create: int = 200
    status_of_commit: int = 200
    status_of_tag: int = 200
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

        def answer(self, status: int, value: object, code: str = "Refused") -> None:
            if status >= 400:
                value = f"{value} ({self.headers.get('Authorization')})"
            body = json.dumps({"error": value} if isinstance(value, str) else value).encode()
            headers = {"Content-Type": "application/json"}
            if status >= 400:
                headers |= {"X-Error-Message": str(value), "X-Error-Code": code}
            self.send(status, body, headers)

        def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def parts(self) -> dict[str, str]:
            """Return name, action, revision and file of the request's path."""
            match = _PATH.fullmatch(self.path.split("?")[0])
            assert match is not None
            return {key: unquote(value or "") for key, value in match.groupdict().items()}

        def do_GET(self) -> None:
            hub.log.append(f"GET {self.path}")
            parts = self.parts()
            repository = hub.repositories.get(parts["name"])
            if hub.status_of_read != 200:
                self.answer(hub.status_of_read, "Reading is refused")
            elif repository is None:
                self.answer(404, "Repository not found", "RepoNotFound")
            elif parts["action"] == "refs":
                tags = [{"name": tag, "ref": tag, "targetCommit": ""} for tag in repository.tags]
                self.answer(200, {"branches": [], "converts": [], "tags": tags})
            else:
                files = repository.at(parts["revision"] or "main")
                if files is None:
                    self.answer(404, "Revision not found", "RevisionNotFound")
                else:
                    self.read(parts, repository, files)

        do_HEAD = do_GET  # noqa: N815

        def read(
            self, parts: dict[str, str], repository: Repository, files: dict[str, bytes]
        ) -> None:
            commit = commit_of(files)
            if parts["action"] == "tree":
                rows = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(body),
                        "oid": commit_of({name: body}),
                    }
                    for name, body in files.items()
                ]
                self.answer(200, rows)
            elif parts["action"] == "resolve":
                name = parts["file"]
                etag = commit_of({name: files[name]})
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
                self.send(200, files[name], headers)
            else:
                siblings = [{"rfilename": file} for file in files]
                info = {"id": parts["name"], "private": repository.private, "sha": commit}
                self.answer(200, info | {"siblings": siblings})

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
            elif "/tag/" in self.path:
                self.tag(json.loads(body)["tag"])
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
                kind = request.get("type", "model")
                hub.repositories[name] = Repository(is_private, type=kind)
                self.answer(200, {"url": url})

        def tag(self, tag: str) -> None:
            parts = self.parts()
            repository = hub.repositories[parts["name"]]
            files = repository.at(parts["revision"])
            assert files is not None
            if hub.status_of_tag != 200:
                self.answer(hub.status_of_tag, "The tag is refused")
                return
            repository.tags[tag] = dict(files)
            self.answer(200, {})

        def commit(self, operations: list[dict]) -> None:
            parts = self.parts()
            repository = hub.repositories[parts["name"]]
            files = repository.at(parts["revision"])
            assert files is not None
            if hub.status_of_commit != 200:
                self.answer(hub.status_of_commit, "The commit is refused")
                return
            url = f"{hub.url}/{parts['name']}"
            if "create_pr=1" in self.path:
                repository.pull_requests.append(operations)
                files = dict(files)
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "deletedFile":
                    del files[value["path"]]
            repository.commits += 1
            commit = commit_of(files)
            answer = {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
            request_url = f"{url}/discussions/{len(repository.pull_requests)}"
            self.answer(200, answer | {"pullRequestUrl": request_url})

    with serving(Handler) as hub.url:
        try:
            yield hub
        finally:
            is_closing.set()
