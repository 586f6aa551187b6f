"""Archives of skills from strangers, unpacked without ever writing outside their folder.

Nothing of an archive is trusted: not its names, sizes or kinds of files. Files are made one by one in a fresh
folder, never through a link, for links are never made; the folder gets its name when all is written.
"""

import gzip
import json
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from skilltrain.data.collecting.archive_members import (
    RATIO_FREE_BYTES,
    ArchiveError,
    ArchiveLimits,
    Member,
    check_totals,
    path_key,
    path_parts,
)
from skilltrain.data.collecting.tar_headers import check_tar_headers, is_tar_header
from skilltrain.data.collecting.zip_headers import check_zip_end, check_zip_entries
from skilltrain.texts import decode_text

Kind = Literal["zip", "gzip", "tar", "text", "html", "json", "other"]
SKILL_FILE = "SKILL.md"
_CHUNK = 2**16
_BROKEN = (
    zipfile.BadZipFile, zipfile.LargeZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError,
    NotImplementedError, RecursionError, ValueError, OverflowError, struct.error,
)  # fmt: skip
_LEFT_OUT = {
    "link": "links, which are never made",
    "special_file": "devices, pipes or other special files",
    "collision": "files whose path, case and Unicode form aside, another file has or leads through",
    "file_too_big": "files larger than the limit of bytes for a file",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Members of one archive that were not written, `value` of them, while the rest was."""

    filter: str
    reason: str
    value: float


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What was written into a skill's folder."""

    num_files: int
    num_bytes: int
    left_out: list[LeftOut]


def kind_of(path: Path) -> Kind:
    """What a file is by its content; its name and what a server said of it count for nothing."""
    with path.open("rb") as file:
        head = file.read(_CHUNK)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if is_tar_header(head):
        return "tar"
    text = decode_text(head)
    if text is None:
        return "other"
    text = text.lstrip("\ufeff \t\r\n")
    if text[:100].lower().startswith(("<!doctype html", "<html")):
        return "html"
    return "json" if text.startswith("{") and _is_json(path) else "text"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def unpack(path: Path, folder: Path, limits: ArchiveLimits, only_skill_files: bool) -> Unpacked:
    """Make `folder` of an archive (.zip, .tar, .tar.gz) or a single SKILL.md, whole or not at all.

    The one folder that wraps everything is taken off. Raises ArchiveError; what is in a temporary folder then is
    removed. Archives inside the archive stay packed.
    """
    partial_folder = folder.with_name(f".{folder.name[:200]}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True, mode=0o700)
    try:
        try:
            with _members(path, folder.parent, limits) as members:
                wanted, left_out = _choose(members, limits, only_skill_files)
                num_bytes = sum(member.num_bytes for _, member in wanted)
                check_totals(len(members), num_bytes, path.stat().st_size, limits)
                for parts, member in wanted:
                    _write_file(member, partial_folder.joinpath(*parts))
        except _BROKEN as error:
            raise ArchiveError("broken_archive", f"cannot be unpacked: {_one_line(error)}") from error
        if not any(file.lower() == "skill.md" for _, _, files in os.walk(partial_folder) for file in files):
            raise ArchiveError("no_skill_file", f"holds no {SKILL_FILE} among {len(wanted):,} files")
        inner = _unwrapped(partial_folder)
        inner.chmod(0o755)
        inner.rename(folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return Unpacked(len(wanted), num_bytes, left_out)


def _one_line(error: BaseException) -> str:
    """A library's message, which may quote a name of the archive, as plain letters."""
    return ascii(str(error) or type(error).__name__)[1:200].rstrip("'\"")


def _unwrapped(folder: Path) -> Path:
    """The single folder in `folder` if there is nothing beside it, else `folder`."""
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else folder


@contextmanager
def _members(path: Path, beside: Path, limits: ArchiveLimits) -> Iterator[Sequence[Member]]:
    """The members of an archive, or a text as the one member SKILL.md; `beside` takes a temporary file."""
    kind = kind_of(path)
    with ExitStack() as stack:
        if kind == "zip":
            yield stack.enter_context(_zip_members(path, limits))
        elif kind == "tar":
            yield stack.enter_context(_tar_members(path, limits))
        elif kind == "gzip":
            plain = stack.enter_context(_decompressed(path, beside, limits))
            if kind_of(plain) != "tar":
                raise ArchiveError("unknown_format", "is compressed with gzip, but what is inside is no tar file")
            yield stack.enter_context(_tar_members(plain, limits))
        elif kind == "text":
            yield [Member(SKILL_FILE, "file", path.stat().st_size, partial(path.open, "rb"))]
        else:
            what = {"html": "an HTML page", "json": "a JSON object"}.get(kind, "neither .zip, .tar, .tar.gz nor text")
            raise ArchiveError("unknown_format", f"is {what}")


@contextmanager
def _zip_members(path: Path, limits: ArchiveLimits) -> Iterator[list[Member]]:
    check_zip_end(path, limits)
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        check_zip_entries(path, infos, archive.start_dir)
        yield [
            # ZipInfo cuts a name at its first NUL; orig_filename is the whole of it
            Member(info.orig_filename, _zip_kind(info), info.file_size, partial(archive.open, info))
            for info in infos
        ]


def _zip_kind(info: zipfile.ZipInfo) -> Literal["file", "folder", "link", "special_file"]:
    mode = stat.S_IFMT(info.external_attr >> 16)
    if mode == stat.S_IFLNK:
        return "link"
    if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "special_file"
    return "folder" if info.orig_filename.endswith("/") or mode == stat.S_IFDIR else "file"


@contextmanager
def _tar_members(path: Path, limits: ArchiveLimits) -> Iterator[list[Member]]:
    check_tar_headers(path, limits)
    with tarfile.open(path, "r:", encoding="utf-8") as archive:
        infos = archive.getmembers()
        yield [Member(info.name, _tar_kind(info), info.size, partial(_open_tar_file, archive, info)) for info in infos]


def _tar_kind(info: tarfile.TarInfo) -> Literal["file", "folder", "link", "special_file"]:
    if info.issym() or info.islnk():
        return "link"
    if info.isdir():
        return "folder"
    return "file" if info.isreg() and not info.issparse() else "special_file"


@contextmanager
def _open_tar_file(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[IO[bytes]]:
    tarfile.data_filter(info, tempfile.gettempdir())  # a second opinion; raises FilterError, which is a TarError
    file = archive.extractfile(info)
    if file is None:
        raise ArchiveError("broken_archive", f"{_one_line(ValueError(info.name))} has no content")
    with file:
        yield file


@contextmanager
def _decompressed(path: Path, beside: Path, limits: ArchiveLimits) -> Iterator[Path]:
    """A gzip file's content as a temporary file, never more of it than the limits allow."""
    num_packed = path.stat().st_size
    most = limits.max_unpacked_bytes + 3 * limits.max_files * tarfile.BLOCKSIZE  # files, and headers for them
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=beside) as folder:
        plain, num_bytes = Path(folder, "archive.tar"), 0
        with gzip.open(path, "rb") as source, plain.open("wb") as target:
            while chunk := source.read(_CHUNK):
                num_bytes += len(chunk)
                if num_bytes > most or num_bytes > max(RATIO_FREE_BYTES, limits.max_ratio * num_packed):
                    check_totals(0, num_bytes, num_packed, limits)  # says which of the two it is
                    raise ArchiveError("bomb", f"unpacks to more than {most:,} bytes", float(num_bytes))
                target.write(chunk)
        yield plain


def _choose(
    members: Sequence[Member], limits: ArchiveLimits, only_skill_files: bool
) -> tuple[list[tuple[tuple[str, ...], Member]], list[LeftOut]]:
    """(the files to write and the parts of their paths, what is left out). Every name is looked at."""
    wanted: list[tuple[tuple[str, ...], Member]] = []
    left_out: dict[str, list[str]] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for parts, member in [(path_parts(member.name), member) for member in members]:
        above = {path_key(parts[:depth]) for depth in range(1, len(parts))}
        key = path_key(parts)
        if member.kind == "folder" and key not in files:
            folders |= {*above, key}
        elif member.kind in ("link", "special_file"):
            left_out.setdefault(member.kind, []).append(member.name)
        elif not parts or key in files or key in folders or files & above:
            left_out.setdefault("collision", []).append(member.name)
        elif only_skill_files and parts[-1].lower() != "skill.md":
            files.add(key)
        elif member.num_bytes > limits.max_file_bytes:
            left_out.setdefault("file_too_big", []).append(member.name)
        else:
            files.add(key)
            folders |= above
            wanted.append((parts, member))
    return wanted, [_left_out_row(filter, names) for filter, names in sorted(left_out.items())]


def _left_out_row(filter: str, names: Sequence[str]) -> LeftOut:
    reason = f"left out {len(names):,} {_LEFT_OUT[filter]}; the first: {names[0][:120]!a}"
    return LeftOut(filter, reason, float(len(names)))


def _write_file(member: Member, path: Path) -> None:
    """Write one file; never over another, never through a link, and never one that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(handle, "wb") as target, member.open() as source:
        num_bytes = 0
        while chunk := source.read(_CHUNK):
            num_bytes += len(chunk)
            if num_bytes > member.num_bytes:
                raise ArchiveError("bomb", f"{member.name[:120]!a} is larger than it declares")
            target.write(chunk)
    if num_bytes < member.num_bytes:
        raise ArchiveError("broken_archive", f"{member.name[:120]!a} is shorter than it declares")
