"""Write files and folders completely or not at all, and read JSON and tables with clear errors."""

import errno
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from skilltrain.errors import SkilltrainError, reason_of

LOCAL_FILE = "local.json"
"""Absolute paths of this machine, in the folder of a pool or a router. It is never shared."""
LINE_ERRORS = (OSError, EOFError, ValueError, zlib.error)
"""Exceptions that `numbered_lines` and `json_object` raise for a file that is not JSON Lines."""

_HOME_FOLDER = re.compile(r"(/(home|Users)/|[A-Za-z]:\\Users\\|~)[^/\\]*")
_PARENT_FOLDERS = re.compile(r"\A(/|~|[A-Za-z]:\\).*[/\\](?=[^/\\])", re.DOTALL)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_LINE_BYTES = 64 * 2**20
_BLANK_BYTES = b"\xef\xbb\xbf \t\r\n"  # the first three are a byte order mark


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` if the block succeeds.

    If the process is killed, the disk is full or the block raises, the old file stays as it was.

    Args:
        path: The file to write. Missing parent folders are created.

    Raises:
        SkilltrainError: The file cannot be written, or `path` is a folder, a pipe or a device.
    """
    temporary: Path | None = None
    try:
        # The rename would replace a device such as /dev/null by the file.
        check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only a file in the same folder can be renamed to `path` in one step.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary

        # The content must be on the disk before the file gets its name.
        sync(temporary)
        temporary.chmod(0o644)  # `mkstemp` lets only the owner read the file
        temporary.replace(path)
    except OSError as error:
        raise SkilltrainError(
            "cannot-write", f"cannot write: {reason_of(error)}", where=path
        ) from error
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process. The lock is a file beside the folder.

    The system releases the lock when the process ends, even if it is killed.

    Raises:
        SkilltrainError: Another process holds the lock, or the lock file cannot be written.
    """
    lock_file = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(lock_file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If the file cannot be created, say so. FileLock would report a lock of another process.
        lock_file.touch()
        lock.acquire(timeout=0)  # raises Timeout at once if another process holds the lock
    except Timeout as error:
        raise SkilltrainError(
            "folder-in-use",
            "another process is writing this folder",
            where=folder,
            fix="wait for it, or name another folder",
        ) from error
    except (OSError, RecursionError) as error:  # pathlib makes parent folders recursively
        raise SkilltrainError(
            "cannot-write", f"cannot write: {reason_of(error)}", where=folder
        ) from error

    try:
        yield
    finally:
        # Delete the file first. After the release, another process may lock it.
        lock_file.unlink(missing_ok=True)
        lock.release()


def sync(path: Path) -> None:
    """Make sure that the content of a file or a folder is on the disk.

    Windows cannot do this for a folder, and nothing happens.
    """
    if path.is_file():
        with path.open("rb+") as file:  # Windows needs a file that is open for writing
            os.fsync(file.fileno())
    elif sys.platform != "win32":
        # A renamed file is safe only after its folder is on the disk, too.
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def staging_path(folder: Path) -> Path:
    """Return the path of the folder that `staged_folder` yields for `folder`.

    For example, `runs/first` has the staging path `runs/.first.partial`.

    Raises:
        SkilltrainError: `folder` does not end with a name, such as `runs/..`.
    """
    if folder.name in ("", ".."):
        raise SkilltrainError(
            "invalid-output-name",
            "is no name for an output folder",
            where=folder,
            fix="give out=… a name",
        )
    return folder.with_name(f".{folder.name}.partial")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of `atomic_path` that a killed process left in `folder`."""
    leftovers = [path for path in folder.glob(".*.partial") if path.is_file()]
    if leftovers:
        with locked(folder):
            for path in leftovers:
                path.unlink(missing_ok=True)


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` if the block succeeds.

    So `folder` never holds only some of its files. If the block raises, the yielded folder is
    removed.

    Args:
        folder: The folder to write. It may exist if it is empty.

    Raises:
        SkilltrainError: `folder` exists and is not empty, or does not end with a name (such as `/`
            or `..`). Or another process writes it, or the disk is full.
    """
    staged = staging_path(folder)
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty_folder:
        raise SkilltrainError(
            "output-exists",
            "exists, and is no empty folder",
            where=folder,
            fix="name another, or delete it",
        )

    with locked(folder):
        try:
            # A killed process may have left an unfinished folder.
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            yield staged
            if is_empty_folder:
                folder.rmdir()  # Windows does not replace a folder
            staged.rename(folder)
        except BaseException as error:  # also Ctrl-C
            shutil.rmtree(staged, ignore_errors=True)
            # Some libraries do not name the file that they could not write, so name the folder.
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise SkilltrainError(
                    "cannot-write", f"cannot write: {reason_of(error)}", where=folder
                ) from error
            raise


def path_inside(folder: Path, name: str, where: object) -> Path:
    """Return the path `folder/name`, for a name that was read from a file.

    The file may come from a stranger, and a name such as `../../key` must not lead elsewhere.

    Args:
        folder: Folder that the path must not leave.
        name: Relative path.
        where: The file that the name was read from, for the error.

    Raises:
        SkilltrainError: The path leaves `folder`, or contains a NUL character.
    """
    path = folder / name
    if "\0" in name:
        problem = f"the path {name!r} contains a NUL character"
    elif not path.resolve().is_relative_to(folder.resolve()):
        problem = f"the path {name!r} leaves its folder"
    else:
        return path
    raise SkilltrainError("path-outside-folder", problem, where=where)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically.

    Python represents path bytes that are not valid UTF-8 as lone surrogates. They are written as
    escapes, such as `\\udcff`, which are valid in JSON.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises ValueError for NaN."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` as JSON Lines, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_regular(path: Path) -> None:
    """Raise SkilltrainError for a pipe, a device or a folder. Reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise SkilltrainError("special-file", "is not a regular file", where=path)


def check_input_file(path: Path) -> None:
    """Raise SkilltrainError if an input file is missing or not a regular file."""
    check_regular(path)
    if not path.exists():
        raise SkilltrainError("not-found", "no such file", where=path)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        SkilltrainError: The file is missing or is not JSON, or a key appears twice in an object.
    """
    check_input_file(path)
    try:
        # The encoding "utf-8-sig" skips a byte order mark, which some editors write.
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique_keys)
    except SkilltrainError as error:
        # `_unique_keys` does not know the path.
        raise SkilltrainError(error.code, error.problem, where=path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SkilltrainError("not-json", f"is not JSON: {reason_of(error)}", where=path) from error


def read_local(folder: Path) -> dict[str, Any]:
    """Return the content of `LOCAL_FILE` in a folder, or an empty dict without such a file."""
    file = folder / LOCAL_FILE
    return read_json(file) if file.is_file() else {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its keys and values. `json.loads` calls this for each object.

    Raises:
        SkilltrainError: A key appears twice. By default json keeps the last value silently.
    """
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise SkilltrainError("repeated-key", f"'{key}' appears twice")
        values[key] = value
    return values


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the JSON objects of a .jsonl or .jsonl.gz file. Blank lines are skipped.

    Yields:
        Pairs of a position for error messages, `PATH, line NUMBER`, and an object.

    Raises:
        SkilltrainError: The file is missing, or a line is not a JSON object.
    """
    check_input_file(path)
    number = 0  # the line that the error names: the broken line, or the last one before it
    try:
        for number, line in numbered_lines(path):
            yield f"{path}, line {number}", json_object(line)
    except LINE_ERRORS as error:
        raise SkilltrainError(
            "not-json", f"is not JSON Lines: {reason_of(error)}", where=f"{path}, line {number}"
        ) from error


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows of a .jsonl, .jsonl.gz, .parquet or .csv file as dicts.

    All values of a .csv file are texts, and empty cells are None.

    Args:
        path: The file. Its suffix tells the format.

    Yields:
        Pairs of a position for error messages, such as `PATH, line 3`, and a row.

    Raises:
        SkilltrainError: The file is missing, is of another kind, or cannot be read.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    check_input_file(path)
    kind = path.suffix.lower()
    # Every .gz file is read as .jsonl.gz, because no other format is compressed here.
    if kind in (".jsonl", ".gz"):
        yield from read_jsonl(path)
        return
    try:
        if kind == ".parquet":
            table = parquet.read_table(path)
        elif kind == ".csv":
            options = csv.ParseOptions(newlines_in_values=True)
            with csv.open_csv(path, parse_options=options) as file:
                names = file.schema.names
            # Read all cells as texts, because a number would turn the id 007 into 7. Only empty
            # cells are missing values.
            columns = csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
            )
            table = csv.read_csv(path, parse_options=options, convert_options=columns)
        else:
            # This error is no OSError, so the `except` below does not catch it.
            problem = "cannot tell what this file is"
            fix = "give a .jsonl, .jsonl.gz, .parquet or .csv file"
            raise SkilltrainError("unknown-format", problem, where=path, fix=fix)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read as {kind[1:]}: {reason_of(error)}"
        code = "unreadable-file"
        if kind == ".parquet":
            code = "not-parquet"
        raise SkilltrainError(code, problem, where=path) from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}, row {number}", row


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a plain or .gz file that are not blank.

    Yields:
        Pairs of a line number, counted from 1, and the line.

    Raises:
        OSError, EOFError or zlib.error: The file cannot be read.
        ValueError: A line is longer than 64 MiB.
    """
    # Both functions open a file of bytes. `gzip.open` also decompresses the file.
    open_file: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with open_file(path, "rb") as file:
        for number in itertools.count(1):
            # Without a limit, one line of a small .gz file could fill the memory.
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line:  # end of the file; a blank line still has its line break
                return
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError("a line has more than 64 MiB")
            # Skip blank lines, also a line that holds only a byte order mark.
            if line.strip(_BLANK_BYTES):
                yield number, line


def json_object(line: bytes, unique_keys: bool = False) -> dict[str, Any]:
    """Return the JSON object in a line of UTF-8.

    Args:
        line: The bytes of the line, with or without a line break and a byte order mark.
        unique_keys: Whether to refuse an object that repeats a key.

    Raises:
        ValueError: The line is not a JSON object.
        SkilltrainError: A key appears twice, and `unique_keys` is true.
    """
    hook = _unique_keys if unique_keys else None
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


class FileStamp(NamedTuple):
    """A state of a file. A file that is overwritten or replaced gets another stamp.

    Attributes:
        path: Path of the file.
        inode: Number of the file in the file system.
        changed: Nanoseconds of the last change (ctime). Unlike mtime, no program can set it.
    """

    path: str
    inode: int
    changed: int


def file_stamps(folder: Path, suffixes: tuple[str, ...] = ("",)) -> set[FileStamp]:
    """Return the stamps of all files below a folder.

    Two calls return the same stamps if no file was added, removed or changed in between.

    Args:
        folder: The folder. It is searched with its subfolders.
        suffixes: Endings of file names, in lower case. Other files are left out. By default no
            file is left out.
    """
    stamps: set[FileStamp] = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.lower().endswith(suffixes):
                continue
            with suppress(OSError):  # the file may be deleted at this moment
                file = Path(parent, name)
                status = file.stat()
                stamps.add(FileStamp(str(file), inode=status.st_ino, changed=status.st_ctime_ns))
    return stamps


def cache_folder(name: str) -> Path:
    """Return the path of the user's cache `name`, in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "skilltrain" / name


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files below a folder, with their names.

    A changed fingerprint shows that an input of a run has changed. If a file in a folder cannot be
    read, only its name counts.

    Returns:
        The hash as 64 hexadecimal digits.

    Raises:
        SkilltrainError: `path` is missing, or is a file that cannot be read.
    """
    if not path.exists():
        raise SkilltrainError("not-found", "no such file or folder", where=path)
    is_file = path.is_file()
    files = [path]
    if not is_file:
        # Sort the files, because a file system lists them in any order. Path.is_file would raise if
        # a parent folder may not be entered, and os.path.isfile returns False.
        files = sorted(file for file in path.rglob("*") if os.path.isfile(file))  # noqa: PTH113

    digest = hashlib.sha256()
    for file in files:
        # A name may hold bytes that are not UTF-8. Python represents them as surrogates, and
        # "surrogateescape" turns the surrogates back into these bytes.
        name = file.name if is_file else file.relative_to(path).as_posix()
        digest.update(name.encode("utf-8", "surrogateescape"))
        try:
            # `file_digest` reads the file piece by piece, so a large file need not fit into memory.
            with file.open("rb") as source:
                digest.update(hashlib.file_digest(source, "sha256").digest())
        except OSError as error:
            if is_file:
                raise SkilltrainError(
                    "unreadable-file", f"cannot be read: {error.strerror}", where=file
                ) from error
    return digest.hexdigest()


def unused_name(name: str, used: Container[str]) -> str:
    """Return `name`, or the first of `name (2)`, `name (3)`, … that is not used yet."""
    free = name
    number = 1
    while free in used:
        number += 1
        free = f"{name} ({number})"
    return free


def shareable(value: Any) -> Any:
    """Return settings without the parent folders of absolute paths, which may name a user.

    `/data/team/model` becomes `model`, and a home folder becomes `~`. Relative paths, numbers and
    other texts stay as they are.

    Args:
        value: A setting, or a list or map of settings. The keys of a map may be paths, too.
    """
    if isinstance(value, Mapping):
        shared: dict[Any, Any] = {}
        for key, item in value.items():
            # Two paths may end in the same name.
            shared[unused_name(shareable(key), shared)] = shareable(item)
        return shared
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    if not isinstance(value, str):
        return value
    if _HOME_FOLDER.fullmatch(value):
        return "~"
    return _PARENT_FOLDERS.sub("", value)
