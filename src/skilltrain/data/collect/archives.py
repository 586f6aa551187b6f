"""Archives of skills from strangers, unpacked without ever writing outside their folder.

Nothing of an archive is trusted: not its names, sizes or kinds of files. Links and special files are never made, and a
folder gets its name only when all of it is written.
"""

import errno
import gzip
import io
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from skilltrain.data.collect import RefusalError
from skilltrain.errors import SkilltrainError
from skilltrain.texts import decode_text

MAX_UNPACKED_BYTES, MAX_FILES = 200_000_000, 10_000  # of an archive, which is refused beyond
MAX_FILE_BYTES = 50_000_000  # a larger file in an archive is left out
MAX_RATIO = 200  # unpacked bytes for a packed one
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
MAX_HEADER_BYTES = 2**18  # of a tar header, which tarfile takes into memory as a whole
RATIO_FREE_BYTES = 2**20  # a small file may be as compressible as it likes
SKILL_FILE = "skill.md"  # in any case
_CHUNK = 2**16
_JOINERS = "\u200c\u200d"  # in emoji and in words of some scripts
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, RuntimeError,
    ValueError, OverflowError, OSError,
)  # fmt: skip


def check_size(num_unpacked: int, num_packed: int) -> None:
    """Raises RefusalError where so many unpacked bytes are too many."""
    if num_unpacked > MAX_UNPACKED_BYTES:
        raise RefusalError("bomb", f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes", float(num_unpacked))
    if num_unpacked > RATIO_FREE_BYTES and num_unpacked > MAX_RATIO * num_packed:
        reason = f"unpacks to more than {MAX_RATIO} times its {num_packed:,} bytes"
        raise RefusalError("bomb", reason, num_unpacked / max(1, num_packed))


class Member(NamedTuple):
    """One entry of an archive; `open` reads a file. `kind` is file, folder, link or special_file."""

    name: str
    kind: str
    num_bytes: int
    open: Callable[[], Any]


def kind_of(content: bytes) -> str:
    """zip, gzip, tar, html, json, text or other: what a file is by its content, whatever its name or a server says."""
    if content.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if content.startswith(b"\x1f\x8b"):
        return "gzip"
    if _is_tar(content):
        return "tar"
    text = (decode_text(content[:_CHUNK]) or "").strip("\ufeff \t\r\n")
    if text[:100].lower().startswith(("<!doctype html", "<html")):
        return "html"
    if text.startswith("{") and text.endswith("}"):
        return "json"
    return "text" if text else "other"


def _is_tar(content: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def unpack(content: bytes, folder: Path) -> Counter[str]:
    """Make `folder` of an archive (.zip, .tar, .tar.gz) or a single SKILL.md, whole or not at all.

    The one folder that wraps everything is taken off. Archives inside the archive stay packed. Returns what was left
    out, counted by kind. Raises RefusalError.
    """
    left_out = Counter[str]()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
        box = Path(scratch, "box")
        try:
            box.mkdir()
            for member, parts in _files(_members(content), len(content), left_out):
                path = box.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, path.open("xb") as target:
                    shutil.copyfileobj(source, target, _CHUNK)
            if not any(file.name.lower() == SKILL_FILE for file in box.rglob("*")):
                raise RefusalError("no_skill_file", "holds no SKILL.md")
            entries = list(box.iterdir())
            (entries[0] if len(entries) == 1 and entries[0].is_dir() else box).rename(folder)
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SkilltrainError(f"cannot write: {error.strerror}", where=folder) from error
            reason = ascii(str(error) or type(error).__name__)[1:200].rstrip("'\"")
            raise RefusalError("broken_archive", f"cannot be unpacked: {reason}") from error
    return left_out


def _members(content: bytes) -> Iterator[Member]:
    """The members of an archive; a text is the one member SKILL.md."""
    kind = kind_of(content)
    if kind == "zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                yield _zip_member(archive, info)
    elif kind in ("tar", "gzip"):
        packed = io.BytesIO(content)
        yield from _tar_members(_Tape(gzip.GzipFile(fileobj=packed) if kind == "gzip" else packed, len(content)))
    elif kind == "text":
        yield Member("SKILL.md", "file", len(content), lambda: io.BytesIO(content))
    else:
        what = {"html": "an HTML page", "json": "a JSON object"}.get(kind, "neither .zip, .tar, .tar.gz nor text")
        raise RefusalError("unknown_format", f"is {what}")


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    name = info.orig_filename  # whole; `filename` ends at the first NUL
    mode = stat.S_IFMT(info.external_attr >> 16)
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        what = "encrypted" if info.flag_bits & 1 else f"compressed by method {info.compress_type}"
        raise RefusalError("unknown_format", f"{name[:120]!a} is {what}")
    kinds = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = "folder" if name.endswith("/") else kinds.get(mode, "special_file")
    return Member(name, kind, info.file_size, lambda: archive.open(info))


class _Tape:
    """The file that tarfile reads: no header is large, and a bomb ends at the limit and not at its end."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, num_packed: int) -> None:
        self._file, self._num_packed = file, num_packed
        self.seek, self.tell = file.seek, file.tell

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > MAX_HEADER_BYTES:
            raise RefusalError("bomb", f"holds a header of {num_bytes:,} bytes", float(num_bytes))
        data = self._file.read(num_bytes)
        check_size(self._file.tell(), self._num_packed)
        return data


def _tar_members(tape: Any) -> Iterator[Member]:
    if not _is_tar(tape.read(tarfile.BLOCKSIZE)):
        raise RefusalError("unknown_format", "is compressed with gzip, but what is inside is no tar file")
    tape.seek(0)
    with tarfile.open(fileobj=tape, mode="r:", encoding="utf-8") as archive:
        for info in archive:
            if info.size < 0:
                raise tarfile.ReadError("declares a file of negative size")
            is_file, is_link = info.isreg() and not info.issparse(), info.issym() or info.islnk()
            kind = "file" if is_file else "folder" if info.isdir() else "link" if is_link else "special_file"
            yield Member(info.name, kind, info.size, lambda info=info: archive.extractfile(info))
    while tape.read(_CHUNK):  # to the end, where gzip's checksum stands
        pass


def _files(
    members: Iterable[Member], num_packed: int, left_out: Counter[str]
) -> Iterator[tuple[Member, tuple[str, ...]]]:
    """The files that can be written, with the parts of their paths; `left_out` counts why others are not.

    No more of a member is ever read than it declares. A path is one for two names that some file system takes for the
    same: case and Unicode form do not count.
    """
    files, folders, num_bytes = set[tuple[str, ...]](), set[tuple[str, ...]](), 0
    for number, member in enumerate(members, 1):
        if number > MAX_FILES:
            raise RefusalError("bomb", f"holds more than {MAX_FILES:,} files", float(number))
        num_bytes += member.num_bytes
        check_size(num_bytes, num_packed)
        parts = path_parts(member.name)
        key = tuple(unicodedata.normalize("NFKC", part).casefold() for part in parts)
        above = {key[:depth] for depth in range(1, len(key))}
        if member.kind == "folder" and key not in files:
            folders |= {*above, key}
        elif member.kind != "file":
            left_out[member.kind] += 1
        elif not parts or key in files | folders or files & above:
            left_out["collision"] += 1
        elif member.num_bytes > MAX_FILE_BYTES:
            left_out["file_too_big"] += 1
        else:
            files.add(key)
            folders |= above
            yield member, parts


def path_parts(name: str) -> tuple[str, ...]:
    """The folders and the file that a member's name leads through; empty for the archive's own root.

    Raises RefusalError for a name that leads out of a folder on any system, or that is not what it looks like.
    """
    plain = unicodedata.normalize("NFKC", name)
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    leads_up = any(part not in ("", ".") and not part.strip(". ") for part in plain.split("/"))
    is_absolute = plain.startswith("/") or re.match(r"[A-Za-z]:", plain)
    if leads_up or is_absolute or "\\" in plain or plain.count("/") != name.count("/"):
        raise RefusalError("unsafe_name", f"holds the name {name[:120]!a}, which leads out of its folder")
    if any(unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in _JOINERS for char in name):
        raise RefusalError("unsafe_name", f"holds the name {name[:120]!a}, which holds characters that deceive")
    if len(name.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise RefusalError("unsafe_name", f"holds the name {name[:120]!a}, which is too long")
    return parts
