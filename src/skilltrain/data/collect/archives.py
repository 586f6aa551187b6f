"""Archives of skills from strangers, unpacked without ever writing outside their folder.

Nothing of an archive is trusted: not its names, sizes or kinds of files. Links and special files are never made, bytes
are counted while they are unpacked, and a folder gets its name only when all of it is written.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.collect.refusal import RefusalError
from skilltrain.errors import SkilltrainError
from skilltrain.texts import decode_text

MAX_PATH_BYTES, MAX_NAME_BYTES, MAX_DEPTH = 1024, 255, 32
RATIO_FREE_BYTES = 2**20  # a small file may be as compressible as it likes
_CHUNK = 2**14
_JOINERS = "\u200c\u200d"  # in emoji and in words of some scripts
_TAR_OVERHEAD = 3 * tarfile.BLOCKSIZE  # bytes a file: its header, and two that hold a long name
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, EOFError, RuntimeError,
    ValueError, OverflowError, OSError,
)  # fmt: skip
LEFT_OUT = {
    "link": "links, which are never made",
    "special_file": "devices, pipes or other special files",
    "collision": "files whose path, case and Unicode form aside, another file has or leads through",
    "file_too_big": "files larger than the limit of bytes for a file",
}


Member = tuple[str, str, int, IO[bytes] | None]
"""(name, file, folder, link or special_file; declared bytes, content of a file)."""


class ArchiveLimits(Config):
    """How much an archive may unpack to; beyond it is refused whole."""

    max_unpacked_bytes: int = Field(default=200_000_000, ge=1, description="bytes that an archive may unpack to")
    max_file_bytes: int = Field(default=50_000_000, ge=1, description="a larger file in an archive is left out")
    max_files: int = Field(default=10_000, ge=1, description="files and folders in an archive")
    max_ratio: float = Field(
        default=200.0, gt=1, description="unpacked bytes for a packed one, where it is more than 1 MiB that is unpacked"
    )


@dataclass
class Unpacked:
    """What was written into a skill's folder. `left_out` counts the members that were not, by what they are."""

    num_files: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def kind_of(path: Path) -> str:
    """zip, gzip, tar, html, json, text or other: what a file is by its content, whatever its name or a server says."""
    with path.open("rb") as file:
        head = file.read(4 * _CHUNK)
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
    writer = _Writer(partial, path.stat().st_size, limits, only_skill_files)
    try:
        for name, kind, num_bytes, source in _members(path, writer):
            writer.add(name, kind, num_bytes, source)
        if not any(file.name.lower() == "skill.md" for file in partial.rglob("*")):
            raise RefusalError("no_skill_file", f"holds no SKILL.md among {writer.result.num_files:,} files")
        entries = list(partial.iterdir())
        (entries[0] if len(entries) == 1 and entries[0].is_dir() else partial).rename(folder)
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SkilltrainError(f"cannot write: {error.strerror}", where=folder) from error
        reason = ascii(str(error) or type(error).__name__)[1:200].rstrip("'\"")
        raise RefusalError("broken_archive", f"cannot be unpacked: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return writer.result


def _members(path: Path, writer: "_Writer") -> Iterator[Member]:
    """The members of an archive; a text is the one member SKILL.md."""
    kind = kind_of(path)
    if kind == "zip":
        yield from _zip_members(path)
    elif kind in ("tar", "gzip"):
        with gzip.open(path) if kind == "gzip" else path.open("rb") as file:
            if not _is_tar(file.read(tarfile.BLOCKSIZE)):
                raise RefusalError("unknown_format", "is compressed with gzip, but what is inside is no tar file")
            file.seek(0)
            yield from _tar_members(_CountedReader(file, writer))
    elif kind == "text":
        with path.open("rb") as file:
            yield "SKILL.md", "file", path.stat().st_size, file
    else:
        what = {"html": "an HTML page", "json": "a JSON object"}.get(kind, "neither .zip, .tar, .tar.gz nor text")
        raise RefusalError("unknown_format", f"is {what}")


def _zip_members(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.orig_filename  # whole; `filename` ends at the first NUL
            mode = stat.S_IFMT(info.external_attr >> 16)
            if info.flag_bits & 1:
                raise RefusalError("encrypted", f"{name[:120]!a} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise RefusalError("unknown_format", f"{name[:120]!a} is compressed by method {info.compress_type}")
            if name.endswith("/") or mode == stat.S_IFDIR:
                yield name, "folder", 0, None
            elif mode not in (0, stat.S_IFREG):
                yield name, "link" if mode == stat.S_IFLNK else "special_file", 0, None
            else:
                with archive.open(info) as source:
                    yield name, "file", info.file_size, source


def _tar_members(file: Any) -> Iterator[Member]:
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
        for info in archive:
            if info.size < 0:
                raise tarfile.ReadError("declares a file of negative size")
            if info.isreg() and not info.issparse():
                yield info.name, "file", info.size, archive.extractfile(info)
            elif info.isdir():
                yield info.name, "folder", 0, None
            else:
                yield info.name, "link" if info.issym() or info.islnk() else "special_file", 0, None


class _CountedReader:
    """A tar file as `tarfile` reads it: onwards only, within the limits, and never as much at once as a header asks."""

    def __init__(self, file: Any, writer: "_Writer") -> None:
        self._file, self._writer, self._position = file, writer, 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 2 * _CHUNK:
            raise RefusalError("bomb", f"has a header of {size:,} bytes", float(size))
        block = self._file.read(size)
        self._position += len(block)
        self._check(self._position)
        return block

    def seek(self, position: int) -> None:
        if position < self._position:
            raise RefusalError("broken_archive", "leads back to what was read before")
        self._check(position)
        self._file.seek(position)
        self._position = position

    def tell(self) -> int:
        return self._position

    def _check(self, num_bytes: int) -> None:
        self._writer.check_bytes(num_bytes, free=_TAR_OVERHEAD * self._writer.limits.max_files)


class _Writer:
    """Writes the members of one archive into a fresh folder, within the limits."""

    def __init__(self, folder: Path, num_packed: int, limits: ArchiveLimits, only_skill_files: bool) -> None:
        self.folder, self.num_packed, self.limits = folder, num_packed, limits
        self.only_skill_files, self.result = only_skill_files, Unpacked()
        self.num_members = self.num_bytes = 0
        self.files, self.folders = set[str](), set[str]()

    def check_bytes(self, num_bytes: int, free: int = 0) -> None:
        """Raises RefusalError where so many unpacked bytes are too many."""
        limit = self.limits.max_unpacked_bytes
        if num_bytes > limit + free:
            raise RefusalError("bomb", f"unpacks to more than {limit:,} bytes", float(num_bytes))
        if num_bytes > RATIO_FREE_BYTES and num_bytes > self.limits.max_ratio * self.num_packed:
            reason = f"unpacks to more than {self.limits.max_ratio:g} times its {self.num_packed:,} bytes"
            raise RefusalError("bomb", reason, num_bytes / max(1, self.num_packed))

    def add(self, name: str, kind: str, num_bytes: int, source: IO[bytes] | None) -> None:
        """Write a member, or count why it is left out."""
        self.num_members += 1
        if self.num_members > self.limits.max_files:
            raise RefusalError("bomb", f"holds more than {self.limits.max_files:,} files", float(self.num_members))
        self.check_bytes(self.num_bytes + num_bytes)
        parts = path_parts(name)
        key, above = path_key(parts), {path_key(parts[:depth]) for depth in range(1, len(parts))}
        if kind == "folder" and key not in self.files:
            self.folders |= {*above, key}
        elif source is None:
            self.result.left_out[kind] += 1
        elif not parts or key in self.files | self.folders or self.files & above:
            self.result.left_out["collision"] += 1
        elif num_bytes > self.limits.max_file_bytes:
            self.result.left_out["file_too_big"] += 1
        else:
            self.files.add(key)
            self.folders |= above
            if not self.only_skill_files or parts[-1].lower() == "skill.md":
                self._write(self.folder.joinpath(*parts), source)

    def _write(self, path: Path, source: IO[bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as target:
            while chunk := source.read(_CHUNK):
                self.num_bytes += len(chunk)
                self.check_bytes(self.num_bytes)
                target.write(chunk)
        self.result.num_files += 1


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
    too_long = any(len(part.encode()) > MAX_NAME_BYTES for part in parts)
    if too_long or len(name.encode()) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH:
        raise RefusalError("unsafe_name", f"holds the name {name[:120]!a}, which is too long or too deep")
    return parts


def path_key(parts: tuple[str, ...]) -> str:
    """A path that is equal for names which some file system takes for the same: case and Unicode form do not count."""
    return unicodedata.normalize("NFKC", "/".join(parts)).casefold()
