"""Files that are never half-written, and readers that say which line is broken."""

import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from skilltrain.errors import SkilltrainError, reason_of

_HOME = re.compile(r"(/(home|Users)/|[A-Za-z]:\\Users\\|~)[^/\\]*")
_PARENTS = re.compile(r"\A(/|~|[A-Za-z]:\\).*[/\\](?=[^/\\])", re.DOTALL)
LOCAL_FILE = "local.json"
"""Absolute paths of this machine, in the folder of a pool or a router; whatever shares the folder leaves it out."""
_MAX_LINE = 64 * 2**20
_BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, too
BROKEN_LINES = (OSError, EOFError, ValueError, zlib.error)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` only if the block succeeds.

    A kill, a full disk or an exception leaves the old file as it was.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise SkilltrainError(f"cannot write: {reason_of(error)}", where=path) from error
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep `folder` to this process, by a lock file beside it that the system frees however the process ends.

    Raises SkilltrainError at once where another process holds it.
    """
    file = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        fix = "wait for it, or name another folder"
        raise SkilltrainError(
            "another process is writing this very folder", where=folder, fix=fix
        ) from error
    except OSError as error:
        raise SkilltrainError(f"cannot write: {reason_of(error)}", where=folder) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def staged_name(folder: Path) -> Path:
    """Where `staged_folder` lets what becomes `folder` be written."""
    return folder.with_name(f".{folder.name}.partial")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left behind of files that it was writing into `folder` (`atomic_path`)."""
    if leftovers := [path for path in folder.glob(".*.partial") if path.is_file()]:
        with locked(folder):
            for path in leftovers:
                path.unlink(missing_ok=True)


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; it takes the name `folder` only if the block succeeds.

    What a killed process left behind is removed first. Raises SkilltrainError where `folder` is neither absent nor
    empty, or another process writes it.
    """
    if folder.name in ("", ".."):
        raise SkilltrainError("is no name for an output folder", where=folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise SkilltrainError(
            "exists, and is no empty folder", where=folder, fix="name another, or delete it"
        )
    staged = staged_name(folder)
    with locked(folder):
        try:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            yield staged
            staged.rename(folder)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise


def inside(folder: Path, name: str, where: object) -> Path:
    """The path `folder/name`, where `name` was read from data. Raises SkilltrainError where it leaves `folder`."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SkilltrainError(f"the path {name!r} leaves its folder", where=where)
    return path


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN is refused, for JSON has none."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` as JSON Lines, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_regular(path: Path) -> None:
    """Raise SkilltrainError for a pipe, a device or a folder in place of a file: reading it might never end."""
    if path.exists() and not path.is_file():
        raise SkilltrainError("is not a regular file", where=path)


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises SkilltrainError for a key that appears twice in an object: plain json keeps the
    last and says nothing.
    """
    check_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique_keys)
    except SkilltrainError as error:
        raise SkilltrainError(error.what, where=path) from error
    except FileNotFoundError as error:
        raise SkilltrainError("no such file", where=path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SkilltrainError(f"is not JSON: {reason_of(error)}", where=path) from error


def read_local(folder: Path) -> dict[str, Any]:
    """Read the local file of a folder; empty where there is none."""
    file = folder / LOCAL_FILE
    return read_json(file) if file.is_file() else {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise SkilltrainError(f"'{key}' appears twice")
        values[key] = value
    return values


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Raises SkilltrainError naming file and line where a line is not a JSON object.
    """
    check_regular(path)
    number = 0
    try:
        for number, line in numbered_lines(path):
            yield f"{path}, line {number}", json_object(line)
    except FileNotFoundError as error:
        raise SkilltrainError("no such file", where=path) from error
    except BROKEN_LINES as error:
        raise SkilltrainError(
            f"is not JSON Lines: {reason_of(error)}", where=f"{path}, line {number}"
        ) from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, plain or .gz, that are not blank, counted from 1; what is wrong with it is BROKEN_LINES.

    A line of more than 64 MiB is refused: a small .gz may hold gigabytes.
    """
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), 1):
            if len(line) > _MAX_LINE:
                raise ValueError("a line has more than 64 MiB")
            if line.strip(_BLANK):
                yield number, line


def json_object(line: bytes, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in a line. Raises ValueError where it is none.

    With `unique_keys`, SkilltrainError where a key appears twice.
    """
    hook = _unique_keys if unique_keys else None
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def stamps(folder: Path, endings: tuple[str, ...] = ("",)) -> set[tuple[str, int, int]]:
    """Return path, inode and time of change of the files below a folder whose names end so, in lower case.

    The time of change cannot be set, so a file that is overwritten or replaced gets another stamp.
    """
    found: set[tuple[str, int, int]] = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.lower().endswith(endings):
                with suppress(OSError):
                    file = Path(parent, name)
                    status = file.stat()
                    found.add((str(file), status.st_ino, status.st_ctime_ns))
    return found


def cache_folder(name: str) -> Path:
    """The user's folder for what can be made again: $XDG_CACHE_HOME/skilltrain/`name`."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "skilltrain" / name


def fingerprint(path: Path) -> str:
    """SHA-256 over a file, or over the names and contents of all files below a folder.

    A file of a folder that cannot be read counts by its name: whoever reads the folder says what comes of it. Raises
    SkilltrainError where `path` is missing, or is a file that cannot be read.
    """
    if not path.exists():
        raise SkilltrainError("no such file or folder", where=path)
    digest = hashlib.sha256()
    # Path.is_file raises where it may not look.
    files = [path]
    if not path.is_file():
        files = sorted(file for file in path.rglob("*") if os.path.isfile(file))  # noqa: PTH113
    for file in files:
        # Names need not be UTF-8: Python keeps their odd bytes as surrogates, which stand for those bytes here too.
        name = str(file.relative_to(path) if file != path else path.name)
        digest.update(name.encode("utf-8", "surrogateescape"))
        try:
            with file.open("rb") as source:
                digest.update(hashlib.file_digest(source, "sha256").digest())
        except OSError as error:
            if file == path:
                raise SkilltrainError(f"cannot be read: {error.strerror}", where=file) from error
    return digest.hexdigest()


def shareable(value: Any) -> Any:
    """Return settings with absolute paths cut to their last part: they name users and machines."""
    if isinstance(value, Mapping):
        return {key: shareable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    if not isinstance(value, str):
        return value
    return "~" if _HOME.fullmatch(value) else _PARENTS.sub("", value)
