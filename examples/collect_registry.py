"""Collect the skills of an HTTP registry into a JSON Lines file that the stage `pool` reads.

    python examples/collect_registry.py https://registry.example.org/api skills.jsonl
    skilltrain pool sources=skills.jsonl out=runs/pool

Needs `pip install httpx2 tenacity`. The registry lists its skills at URL/skills?page=1, 2, ... as
{"items": [{"id": ..., "updated_at": ..., "download_url": ...}]}. Change `list_skills` for another
registry. A download is a SKILL.md, .zip, .tar or .tar.gz. You can stop the script at any time. The
same command continues, and downloads only new and changed skills. Nothing that the registry sends
is trusted.
"""

import argparse
import email.utils
import gzip
import io
import ipaddress
import json
import posixpath
import socket
import sys
import tarfile
import time
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import httpx2
import tenacity

from skilltrain.files import read_jsonl, write_jsonl
from skilltrain.texts import decode_text, printable

MAX_BYTES = 50_000_000  # of one response
MAX_SECONDS = 600  # for one response, however slowly it arrives
MAX_UNPACKED_BYTES = 200_000_000  # of one archive
MAX_FILES = 10_000  # in one archive
MAX_SKILL_BYTES = 10_000_000  # of one SKILL.md
MAX_REDIRECTS = 5
MAX_ATTEMPTS = 3  # of a request, while the registry is busy
MAX_WAIT = 3_600  # seconds; a longer Retry-After ends the run
ZIP = b"PK"  # first bytes of a .zip file
GZIP = b"\x1f\x8b"  # first bytes of a .gz file


class Registry:
    """An HTTP client for one registry.

    Attributes:
        url: Address of the registry.
    """

    def __init__(self, url: str, allowed_hosts: Collection[str] = (), pause: float = 1.0) -> None:
        """Create the client.

        Args:
            url: Address of the registry.
            allowed_hosts: Other hosts that it may send requests to.
            pause: Seconds to wait before each request.
        """
        self.url = httpx2.URL(url.rstrip("/") + "/")
        self._allowed_hosts = allowed_hosts
        self._pause = pause
        self._client = httpx2.Client(timeout=30, headers={"Accept-Encoding": "identity"})

    def fetch(self, url: httpx2.URL) -> bytes:
        """Return the body at `url`. Repeat the request while the registry is busy."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_busy),
            stop=tenacity.stop_after_attempt(MAX_ATTEMPTS),
            wait=seconds_to_wait,
            reraise=True,
        )
        return retrying(self._request, url)

    def _request(self, url: httpx2.URL) -> bytes:
        """Send one request, and follow redirects to allowed hosts."""
        for _ in range(MAX_REDIRECTS + 1):
            self._check_host(url)
            time.sleep(self._pause)
            with self._client.stream("GET", url) as response:
                if not response.has_redirect_location:
                    response.raise_for_status()
                    return read_body(response)
                url = url.join(response.headers["location"])
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    def _check_host(self, url: httpx2.URL) -> None:
        """Raise ValueError if a host is not allowed or has a private address."""
        if (url.scheme, url.netloc) == (self.url.scheme, self.url.netloc):
            return
        if url.scheme not in ("http", "https") or url.host not in self._allowed_hosts:
            raise ValueError(f"{url.host} is not the registry (name it with --allow-host)")
        for *_, socket_address in socket.getaddrinfo(url.host, url.port or url.scheme):
            address = socket_address[0]
            if not ipaddress.ip_address(address).is_global:
                raise ValueError(f"{url.host} has the private address {address}")


def is_busy(error: BaseException) -> bool:
    """Return whether a failed request may succeed at the next attempt."""
    if isinstance(error, httpx2.HTTPStatusError):
        status = error.response.status_code
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, httpx2.TransportError)


def seconds_to_wait(state: tenacity.RetryCallState) -> float:
    """Return the seconds to wait before the next attempt of a request.

    The header Retry-After gives the number of seconds or a date. Without it, the wait is 1, 2, 4,
    ... seconds. Exit if the wait is longer than MAX_WAIT.
    """
    error = state.outcome.exception() if state.outcome else None
    header = ""
    if isinstance(error, httpx2.HTTPStatusError):
        header = error.response.headers.get("Retry-After", "")
    seconds = 2.0 ** (state.attempt_number - 1)
    if header.isdecimal():
        seconds = float(header)
    elif date := email.utils.parsedate_tz(header):
        seconds = max(0.0, email.utils.mktime_tz(date) - time.time())
    if seconds > MAX_WAIT:
        sys.exit(f"the registry asks to wait {seconds:,.0f} seconds: run again later")
    return seconds


def read_body(response: httpx2.Response) -> bytes:
    """Return the body of a response.

    Raises:
        ValueError: The body is compressed, larger than MAX_BYTES or slower than MAX_SECONDS.
    """
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ValueError("is compressed, which was not asked for")
    deadline = time.monotonic() + MAX_SECONDS
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > MAX_BYTES or time.monotonic() > deadline:
            raise ValueError(f"has more than {MAX_BYTES:,} bytes or takes {MAX_SECONDS} seconds")
    return bytes(body)


def list_skills(registry: Registry) -> dict[str, dict[str, Any]]:
    """Read all pages of the registry's list, up to the first page without a new skill.

    Returns:
        Items of the list by id of the skill.
    """
    items_by_id: dict[str, dict[str, Any]] = {}
    for page in range(1, 1_000_000):
        url = registry.url.join(f"skills?page={page}")
        try:
            items = json.loads(registry.fetch(url))["items"]
            new_items = {
                str(item["id"]): item for item in items if str(item["id"]) not in items_by_id
            }
        except Exception as error:  # the registry may send anything
            sys.exit(f"{url}: cannot be read as a list of skills: {printable(repr(error), 200)}")
        if not new_items:
            break
        items_by_id |= new_items
    return items_by_id


class ArchiveMember(NamedTuple):
    """A member of an archive. A link or a folder has no file."""

    name: str
    num_bytes: int
    file: IO[bytes] | None


def members_of(content: bytes) -> Iterator[ArchiveMember]:
    """Yield the members of a .zip, .tar or .tar.gz archive.

    Raises:
        ValueError: The archive is too large, or its compression is not supported.
    """
    if content.startswith(ZIP):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"is compressed by method {info.compress_type}")
                yield ArchiveMember(info.filename, info.file_size, archive.open(info))
        return

    if content.startswith(GZIP):
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            content = packed.read(MAX_UNPACKED_BYTES + 1)
    if len(content) > MAX_UNPACKED_BYTES:
        raise ValueError(f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            yield ArchiveMember(member.name, member.size, file)


def read_skill_files(content: bytes) -> dict[str, str]:
    """Return the texts of all SKILL.md in a download, by folder relative to their common folder.

    Nothing is written to disk.

    Raises:
        ValueError: There is no SKILL.md, or an archive is too large or has an unsafe path.
    """
    is_tar = content[257:262] == b"ustar"
    if not is_tar and not content.startswith((ZIP, GZIP)):
        return {".": decode_skill(content)}

    texts: dict[str, str] = {}
    total_bytes = 0
    for number, (name, num_bytes, file) in enumerate(members_of(content), 1):
        total_bytes += num_bytes
        if number > MAX_FILES or total_bytes > MAX_UNPACKED_BYTES:
            raise ValueError(f"holds more than {MAX_FILES:,} files, {MAX_UNPACKED_BYTES:,} bytes")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise ValueError(f"holds the path {name!a}")
        if file and path.name.lower() == "skill.md" and num_bytes <= MAX_SKILL_BYTES:
            texts.setdefault(str(path.parent), decode_skill(file.read(num_bytes)))
    if not texts:
        raise ValueError("holds no SKILL.md")
    root = posixpath.commonpath(texts)
    return {posixpath.relpath(folder, root): text for folder, text in texts.items()}


def decode_skill(content: bytes) -> str:
    """Return the text of a SKILL.md.

    Raises:
        ValueError: The content is something else, such as a login page.
    """
    text = decode_text(content)
    if not text or text.lstrip().lower().startswith(("<!doctype", "<html", "{")):
        raise ValueError("is no SKILL.md, but binary, empty, a web page or JSON")
    return text


def fetch_rows(registry: Registry, item: dict[str, Any], version: str) -> list[dict[str, Any]]:
    """Download one item of the registry's list, and return a row for each SKILL.md in it."""
    url = registry.url.join(item["download_url"])
    entry = str(item["id"])
    rows: list[dict[str, Any]] = []
    for folder, text in read_skill_files(registry.fetch(url)).items():
        skill_id = entry if folder == "." else f"{entry}/{folder}"
        row = {"skill_id": skill_id, "skill_md": text, "source": registry.url.host}
        rows.append(row | {"entry": entry, "version": version})
    return rows


def collect(registry: Registry, file: Path) -> int:
    """Bring `file` up to date with the registry.

    Rows are appended as they arrive. Outdated and unlisted rows are removed at the end.

    Returns:
        Number of listed skills that are left out, because they cannot be downloaded or read.
    """
    rows_by_entry = read_rows(file)
    listed = list_skills(registry)
    num_refused = 0
    with file.open("ab", buffering=0) as output:
        for entry, item in listed.items():
            version = str(item.get("updated_at", ""))
            if entry in rows_by_entry and rows_by_entry[entry][0]["version"] == version:
                continue
            try:
                rows = fetch_rows(registry, item, version)
            except Exception as error:  # the registry may send anything
                print(printable(f"{entry}: left out: {error!r}", 300), file=sys.stderr)
                num_refused += 1
                continue
            rows_by_entry[entry] = rows
            output.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    current_rows: list[dict[str, Any]] = []
    for entry in listed:
        current_rows += rows_by_entry.get(entry, [])
    write_jsonl(file, current_rows)
    return num_refused


def read_rows(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of an entry's last version, by entry. The file may not exist."""
    rows_by_entry: dict[str, list[dict[str, Any]]] = {}
    if not file.exists():
        return rows_by_entry
    for _, row in read_jsonl(file):
        rows = rows_by_entry.setdefault(row["entry"], [])
        if rows and rows[0]["version"] != row["version"]:
            rows.clear()
        rows.append(row)
    return rows_by_entry


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Collect the skills of an HTTP registry.")
    parser.add_argument("url", help="address of the registry")
    parser.add_argument("file", type=Path, help="JSON Lines file to write or to bring up to date")
    parser.add_argument(
        "--allow-host", action="append", default=[], help="another host to send requests to"
    )
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each request")
    options = parser.parse_args()
    num_refused = collect(Registry(options.url, options.allow_host, options.pause), options.file)
    print(f"{options.file}: up to date, {num_refused} listed skills left out")
