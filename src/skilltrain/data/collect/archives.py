"""The SKILL.md files in archives from strangers, read in memory: nothing of an archive is ever written to disk.

Nothing of an archive is trusted: not its names, sizes or kinds of files.
"""

import gzip
import io
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from skilltrain.data.collect import RefusalError
from skilltrain.texts import decode_text

MAX_UNPACKED_BYTES, MAX_FILES = 200_000_000, 10_000  # of an archive, which is refused beyond
MAX_SKILL_BYTES = 50_000_000  # a larger SKILL.md is not read
MAX_HEADER_BYTES = 2**18  # of a tar header, which tarfile takes into memory as a whole
_CHUNK = 2**16
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    OSError,
)
Member = tuple[str, int, Callable[[], Any] | None]
"""Name and declared bytes of an entry, and what opens it; None where it is no plain file."""


def read_skill_files(content: bytes) -> dict[str, bytes]:
    """Folder → its SKILL.md, of an archive (.zip, .tar, .tar.gz) or a single SKILL.md; the root's folder is empty.

    The one folder that wraps everything is taken off. Archives inside the archive stay packed. No more of a member is
    ever read than it declares. Raises RefusalError; and ValueError for what may come right at another try: a broken
    archive, or a message in place of one.
    """
    found: dict[tuple[str, ...], bytes] = {}
    tops: set[str] = set()
    num_bytes = 0
    try:
        for number, (name, size, open_file) in enumerate(_members(content), 1):
            if number > MAX_FILES:
                raise RefusalError("bomb", f"holds more than {MAX_FILES:,} files")
            num_bytes += size
            _check_size(num_bytes)
            parts = path_parts(name)
            if open_file and parts:
                tops.add(parts[0] if parts[1:] else "")
                is_new_skill = parts[-1].lower() == "skill.md" and parts[:-1] not in found
                if is_new_skill and size <= MAX_SKILL_BYTES:
                    with open_file() as file:
                        found[parts[:-1]] = file.read()
    except _BROKEN as error:
        raise ValueError(
            f"cannot be unpacked: {str(error) or type(error).__name__!a:.200}"
        ) from error
    if not found:
        raise RefusalError(
            "no_skill_file", f"holds no SKILL.md of at most {MAX_SKILL_BYTES:,} bytes"
        )
    depth = int(len(tops) == 1 and "" not in tops)
    return {"/".join(folder[depth:]): text for folder, text in sorted(found.items())}


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_UNPACKED_BYTES:
        raise RefusalError("bomb", f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")


def _members(content: bytes) -> Iterator[Member]:
    """The members of an archive, told by its content whatever its name; a text is the one member SKILL.md."""
    if content.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        yield from _zip_members(content)
    elif content.startswith(b"\x1f\x8b"):
        yield from _tar_members(_Tape(gzip.GzipFile(fileobj=io.BytesIO(content))))
    elif content[257:262] == b"ustar":
        yield from _tar_members(_Tape(io.BytesIO(content)))
    else:
        text = (decode_text(content[:_CHUNK]) or "").strip("\ufeff \t\r\n")
        if text[:100].lower().startswith(("<!doctype html", "<html")):
            raise ValueError("it is an HTML page")
        if text.startswith("{") and text.endswith("}"):
            raise ValueError("it is a JSON object")
        if not text:
            raise RefusalError("unknown_format", "is neither .zip, .tar, .tar.gz nor text")
        yield "SKILL.md", len(content), lambda: io.BytesIO(content)


def _zip_members(content: bytes) -> Iterator[Member]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            if info.flag_bits & 1 or info.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                what = (
                    "encrypted"
                    if info.flag_bits & 1
                    else f"compressed by method {info.compress_type}"
                )
                raise RefusalError("unknown_format", f"{info.filename[:120]!a} is {what}")
            is_file = not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (
                0,
                stat.S_IFREG,
            )
            yield info.filename, info.file_size, partial(archive.open, info) if is_file else None


class _Tape:
    """The file that tarfile reads: no header is large, and a bomb ends at the limit and not at its end."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > MAX_HEADER_BYTES:
            raise RefusalError("bomb", f"holds a header of {num_bytes:,} bytes")
        data = self._file.read(num_bytes)
        _check_size(self._file.tell())
        return data


def _tar_members(tape: Any) -> Iterator[Member]:
    with tarfile.open(fileobj=tape, mode="r:", encoding="utf-8") as archive:
        for info in archive:
            if info.size < 0:
                raise tarfile.ReadError("declares a file of negative size")
            is_file = info.isreg() and not info.issparse()
            yield info.name, info.size, partial(archive.extractfile, info) if is_file else None
    while tape.read(_CHUNK):  # to the end, where gzip's checksum stands
        pass


def path_parts(name: str) -> tuple[str, ...]:
    """The folders and the file that a member's name leads through. Raises RefusalError where it leads out of them."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or "\\" in name or ".." in parts:
        raise RefusalError(
            "unsafe_name", f"holds the name {name[:120]!a}, which leads out of its folder"
        )
    return parts
