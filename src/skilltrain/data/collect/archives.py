"""Archives of skills from strangers, unpacked without ever writing outside their folder.

Nothing of an archive is trusted: not its names, sizes or kinds of files. Links and special files are never made, and a
folder gets its name only when all of it is written.
"""

import errno
import gzip
import re
import shutil
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.collect.refusal import RefusalError
from skilltrain.errors import SkilltrainError
from skilltrain.texts import decode_text

MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
RATIO_FREE_BYTES = 2**20  # a small file may be as compressible as it likes
_CHUNK = 2**16
_JOINERS = "\u200c\u200d"  # in emoji and in words of some scripts
_TAR_OVERHEAD = 3 * tarfile.BLOCKSIZE  # bytes a file: its header, and two that hold a long name
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, RuntimeError,
    ValueError, OverflowError, OSError,
)  # fmt: skip


class ArchiveLimits(Config):
    """How much an archive may unpack to; beyond it is refused whole."""

    max_unpacked_bytes: int = Field(default=200_000_000, ge=1, description="bytes that an archive may unpack to")
    max_file_bytes: int = Field(default=50_000_000, ge=1, description="a larger file in an archive is left out")
    max_files: int = Field(default=10_000, ge=1, description="files and folders in an archive")
    max_ratio: float = Field(
        default=200.0, gt=1, description="unpacked bytes for a packed one, where it is more than 1 MiB that is unpacked"
    )

    def check_bytes(self, num_unpacked: int, num_packed: int, overhead: int = 0) -> None:
        """Raises RefusalError where so many unpacked bytes are too many."""
        if num_unpacked > self.max_unpacked_bytes + overhead:
            reason = f"unpacks to more than {self.max_unpacked_bytes:,} bytes"
            raise RefusalError("bomb", reason, float(num_unpacked))
        if num_unpacked > RATIO_FREE_BYTES and num_unpacked > self.max_ratio * num_packed:
            reason = f"unpacks to more than {self.max_ratio:g} times its {num_packed:,} bytes"
            raise RefusalError("bomb", reason, num_unpacked / max(1, num_packed))


@dataclass(frozen=True)
class Member:
    """One entry of an archive; `open` reads a file. `kind` is file, folder, link or special_file."""

    name: str
    kind: str
    num_bytes: int
    open: Callable[[], IO[bytes] | None]


@dataclass
class Unpacked:
    """What was written into a skill's folder. `left_out` counts the members that were not, by what they are."""

    num_files: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def kind_of(path: Path) -> str:
    """zip, gzip, tar, html, json, text or other: what a file is by its content, whatever its name or a server says."""
    with path.open("rb") as file:
        head = file.read(_CHUNK)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if _is_tar(head):
        return "tar"
    text = (decode_text(head) or "").strip("\ufeff \t\r\n")
    if text[:100].lower().startswith(("<!doctype html", "<html")):
        return "html"
    if text.startswith("{") and text.endswith("}"):
        return "json"
    return "text" if text else "other"


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def unpack(path: Path, folder: Path, limits: ArchiveLimits, only_skill_files: bool) -> Unpacked:
    """Make `folder` of an archive (.zip, .tar, .tar.gz) or a single SKILL.md, whole or not at all.

    The one folder that wraps everything is taken off. Archives inside the archive stay packed. Raises RefusalError.
    """
    partial = folder.with_name(f".{folder.name[:200]}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    unpacked_tar = folder.with_name(f".{folder.name[:200]}.tar")
    result = Unpacked()
    try:
        members = _within_limits(_members(path, unpacked_tar, limits), path.stat().st_size, limits)
        for member, parts in _files_to_write(members, limits.max_file_bytes, result.left_out):
            if not only_skill_files or parts[-1].lower() == "skill.md":
                _write(member, partial.joinpath(*parts))
                result.num_files += 1
        if not any(file.name.lower() == "skill.md" for file in partial.rglob("*")):
            raise RefusalError("no_skill_file", f"holds no SKILL.md among {result.num_files:,} files")
        entries = list(partial.iterdir())
        (entries[0] if len(entries) == 1 and entries[0].is_dir() else partial).rename(folder)
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SkilltrainError(f"cannot write: {error.strerror}", where=folder) from error
        reason = ascii(str(error) or type(error).__name__)[1:200].rstrip("'\"")
        raise RefusalError("broken_archive", f"cannot be unpacked: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        unpacked_tar.unlink(missing_ok=True)
    return result


def _members(path: Path, unpacked_tar: Path, limits: ArchiveLimits) -> Iterator[Member]:
    """The members of an archive; a text is the one member SKILL.md."""
    kind = kind_of(path)
    if kind == "zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                yield _zip_member(archive, info)
    elif kind in ("tar", "gzip"):
        tar = _gunzip(path, unpacked_tar, limits) if kind == "gzip" else path
        with tarfile.open(tar, "r:", encoding="utf-8") as archive:
            for info in archive:
                yield _tar_member(archive, info)
    elif kind == "text":
        yield Member("SKILL.md", "file", path.stat().st_size, lambda: path.open("rb"))
    else:
        what = {"html": "an HTML page", "json": "a JSON object"}.get(kind, "neither .zip, .tar, .tar.gz nor text")
        raise RefusalError("unknown_format", f"is {what}")


def _gunzip(path: Path, target: Path, limits: ArchiveLimits) -> Path:
    """The tar file inside, on disk: tarfile would take a header of any size into memory."""
    num_packed, num_bytes = path.stat().st_size, 0
    with gzip.open(path) as packed, target.open("wb") as file:
        while chunk := packed.read(_CHUNK):
            if not num_bytes and not _is_tar(chunk):
                raise RefusalError("unknown_format", "is compressed with gzip, but what is inside is no tar file")
            num_bytes += file.write(chunk)
            limits.check_bytes(num_bytes, num_packed, _TAR_OVERHEAD * limits.max_files)
    return target


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    name = info.orig_filename  # whole; `filename` ends at the first NUL
    mode = stat.S_IFMT(info.external_attr >> 16)
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        what = "encrypted" if info.flag_bits & 1 else f"compressed by method {info.compress_type}"
        raise RefusalError("unknown_format", f"{name[:120]!a} is {what}")
    kinds = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = "folder" if name.endswith("/") else kinds.get(mode, "special_file")
    return Member(name, kind, info.file_size, lambda: archive.open(info))


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    if info.size < 0:
        raise tarfile.ReadError("declares a file of negative size")
    is_file = info.isreg() and not info.issparse()
    is_link = info.issym() or info.islnk()
    kind = "file" if is_file else "folder" if info.isdir() else "link" if is_link else "special_file"
    return Member(info.name, kind, info.size, lambda: archive.extractfile(info))


def _within_limits(members: Iterator[Member], num_packed: int, limits: ArchiveLimits) -> Iterator[Member]:
    """`members` while they are few and small enough: no more of one is ever read than it declares."""
    num_bytes = 0
    for number, member in enumerate(members, 1):
        if number > limits.max_files:
            raise RefusalError("bomb", f"holds more than {limits.max_files:,} files", float(number))
        num_bytes += member.num_bytes
        limits.check_bytes(num_bytes, num_packed)
        yield member


def _files_to_write(
    members: Iterator[Member], max_bytes: int, left_out: Counter[str]
) -> Iterator[tuple[Member, tuple[str, ...]]]:
    """The files that can be written, with the parts of their paths; `left_out` counts why others are not.

    A path is one for two names that some file system takes for the same: case and Unicode form do not count.
    """
    files, folders = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for member in members:
        parts = path_parts(member.name)
        key = tuple(unicodedata.normalize("NFKC", part).casefold() for part in parts)
        above = {key[:depth] for depth in range(1, len(key))}
        if member.kind == "folder" and key not in files:
            folders |= {*above, key}
        elif member.kind != "file":
            left_out[member.kind] += 1
        elif not parts or key in files | folders or files & above:
            left_out["collision"] += 1
        elif member.num_bytes > max_bytes:
            left_out["file_too_big"] += 1
        else:
            files.add(key)
            folders |= above
            yield member, parts


def _write(member: Member, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    if source is None:
        raise tarfile.ReadError("holds a file without content")
    with source, path.open("xb") as target:
        shutil.copyfileobj(source, target, _CHUNK)


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
