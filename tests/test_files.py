"""Files are written completely or not at all, and errors name the broken file and line."""

import errno
import gzip
import json
import os
import random
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.files import (
    atomic_path,
    fingerprint,
    locked,
    read_json,
    read_jsonl,
    read_records,
    staged_folder,
    sync,
    write_json,
    write_text,
)

# Writing ------------------------------------------------------------------------------------------


def test_text_is_written_as_utf8_with_open_permissions(tmp_path: Path):
    file = tmp_path / "new" / "folder" / "a.txt"

    write_text(file, "Fähre")

    assert file.read_bytes() == "Fähre".encode()
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("fault", "raised", "message"),
    [
        (RuntimeError("stopped"), RuntimeError, "stopped"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            SkilltrainError,
            "cannot write: No space left on device",
        ),
    ],
)
def test_failed_write_leaves_old_file(
    tmp_path: Path, fault: Exception, raised: type[Exception], message: str
):
    file = tmp_path / "a.txt"
    write_text(file, "old")

    with pytest.raises(raised, match=message), atomic_path(file) as temporary:
        temporary.write_text("half")
        raise fault

    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_open_file_keeps_its_old_text(tmp_path: Path):
    file = tmp_path / "a.txt"
    write_text(file, "old")

    with file.open() as opened_before:
        write_text(file, "new")
        old_text = opened_before.read()

    assert old_text == "old"
    assert file.read_text() == "new"


@pytest.mark.parametrize("name", ["below.txt", "below/deep.txt"])
def test_write_below_file_is_refused(tmp_path: Path, name: str):
    file = tmp_path / "a.txt"
    write_text(file, "old")

    with raises("cannot-write") as failure:
        write_text(file / name, "new")

    assert failure.value.where == file / name


def test_pipe_is_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with raises("special-file"):
        write_text(pipe, "new")

    assert pipe.is_fifo()


def test_full_disk_names_the_folder(tmp_path: Path):
    folder = tmp_path / "out"

    with raises("cannot-write") as failure, staged_folder(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert failure.value.where == folder
    assert [*tmp_path.iterdir()] == []


def test_too_deep_folder_is_refused(tmp_path: Path):
    folder = tmp_path.joinpath(*["d"] * 1900)

    with raises("cannot-write"), staged_folder(folder):
        pass


# JSON ---------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path):
    value = {"a": [1, None, "ü"]}

    write_json(tmp_path / "a.json", value)

    assert read_json(tmp_path / "a.json") == value


def test_json_keeps_paths_of_any_bytes(tmp_path: Path):
    value = {"path": os.fsdecode(b"a\xff")}

    write_json(tmp_path / "a.json", value)

    assert read_json(tmp_path / "a.json") == value


def test_refused_nan_keeps_old_json(tmp_path: Path):
    file = tmp_path / "a.json"
    write_json(file, 1)

    with pytest.raises(ValueError, match="JSON"):
        write_json(file, float("nan"))

    assert read_json(file) == 1


@pytest.mark.parametrize(
    ("text", "code"), [("{", "not-json"), ('{"a": 1, "a": 2}', "repeated-key")]
)
def test_broken_json_is_refused(tmp_path: Path, text: str, code: str):
    file = tmp_path / "a.json"
    file.write_text(text)

    with raises(code):
        read_json(file)


@pytest.mark.parametrize(
    ("read", "name"), [(read_json, "a.json"), (lambda path: list(read_jsonl(path)), "a.jsonl")]
)
def test_missing_file_is_named(tmp_path: Path, read: Callable[[Path], Any], name: str):
    with raises("not-found") as failure:
        read(tmp_path / name)

    assert failure.value.where == tmp_path / name


# JSON Lines ---------------------------------------------------------------------------------------

GZIP_OR_PLAIN = pytest.mark.parametrize(
    ("suffix", "pack"), [(".jsonl", bytes), (".jsonl.gz", gzip.compress)]
)
Pack = Callable[[bytes], bytes]


@GZIP_OR_PLAIN
def test_json_lines_have_line_numbers(tmp_path: Path, suffix: str, pack: Pack):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(pack('\ufeff{"a": 1}\n\n  \n{"a": "ü"}\r\n{"a": 3}'.encode()))

    rows = dict(read_jsonl(path))

    assert rows == {
        f"{path}, line 1": {"a": 1},
        f"{path}, line 4": {"a": "ü"},
        f"{path}, line 5": {"a": 3},
    }


@GZIP_OR_PLAIN
@pytest.mark.parametrize(
    "line",
    [
        b'{"a": ',
        b"[1]",
        b"[" * 100_000,
        b'{"a": "\xff"}',
        b'{"a": "' + b"x" * 10**6,
    ],
    ids=["cut", "list", "nested", "not_utf8", "long"],
)
def test_broken_line_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    pack: Pack,
    line: bytes,
):
    monkeypatch.setattr("skilltrain.files._MAX_LINE_BYTES", 200_000)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(pack(b'{"a": 1}\n' + line + b"\n"))

    with raises("not-json") as failure:
        list(read_jsonl(path))

    assert str(failure.value).startswith(f"{path}, line ")


ROWS = [json.dumps({"a": random.Random(number).randbytes(8).hex()}) for number in range(500)]
COMPRESSED = gzip.compress("\n".join(ROWS).encode())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(
    "content",
    [
        COMPRESSED[: len(COMPRESSED) // 2],
        COMPRESSED[:200] + bytes(60) + COMPRESSED[260:],
        b"not gzip",
    ],
    ids=["cut", "overwritten", "not_gzip"],
)
def test_broken_gzip_is_refused(tmp_path: Path, suffix: str, content: bytes):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)

    with raises("not-json"):
        list(read_jsonl(path))


# Fingerprints -------------------------------------------------------------------------------------


def test_fingerprint_of_folder_by_hand(tmp_path: Path):
    """The formula may not change, because the records of finished runs hold fingerprints."""
    write_text(tmp_path / "x" / "ä.txt", "1")
    write_text(tmp_path / "b.txt", "2")

    names_and_digests = [
        b"b.txt",
        sha256(b"2").digest(),
        "x/ä.txt".encode(),
        sha256(b"1").digest(),
    ]

    assert fingerprint(tmp_path) == sha256(b"".join(names_and_digests)).hexdigest()


def test_fingerprint_needs_existing_path(tmp_path: Path):
    with raises("not-found"):
        fingerprint(tmp_path / "none")


@pytest.fixture
def latin1_file(tmp_path: Path) -> Path:
    """A file whose name is not UTF-8."""
    file = tmp_path / os.fsdecode(b"caf\xe9")
    file.write_bytes(b"3")
    return file


@pytest.fixture
def unreadable_file(latin1_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that cannot be opened. `chmod` would not do, because root may read everything."""

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    return latin1_file


def test_fingerprint_takes_names_of_any_bytes(latin1_file: Path):
    expected = sha256(b"caf\xe9" + sha256(b"3").digest())

    assert fingerprint(latin1_file.parent) == expected.hexdigest()


def test_unreadable_file_in_folder_counts_by_name(unreadable_file: Path):
    assert fingerprint(unreadable_file.parent) == sha256(b"caf\xe9").hexdigest()


def test_fingerprint_of_unreadable_file_is_refused(unreadable_file: Path):
    with raises("unreadable-file") as failure:
        fingerprint(unreadable_file)

    assert failure.value.where == unreadable_file


@pytest.fixture
def limits_of_windows(monkeypatch: pytest.MonkeyPatch):
    """Refuse what Windows refuses: to open a folder, and to sync a file that is read-only."""
    fcntl = pytest.importorskip("fcntl")
    open_file = os.open
    sync_file = os.fsync

    def refuse_folder(path: str, *arguments: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(path)
        return open_file(path, *arguments, **options)

    def refuse_read_only(descriptor: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        sync_file(descriptor)

    monkeypatch.setattr(os, "open", refuse_folder)
    monkeypatch.setattr(os, "fsync", refuse_read_only)
    monkeypatch.setattr(sys, "platform", "win32")


@pytest.mark.usefixtures("limits_of_windows")
def test_file_is_written_on_windows(tmp_path: Path):
    write_text(tmp_path / "file", "text")

    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.usefixtures("limits_of_windows")
def test_folder_sync_is_skipped_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    sync(tmp_path)

    assert synced == []


def test_empty_folder_is_removed_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Windows does not rename a folder to the name of an empty one."""
    folder = tmp_path / "out"
    folder.mkdir()
    existed: list[bool] = []
    rename = Path.rename

    def observe(self: Path, target: Path) -> Path:
        existed.append(target.exists())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", observe)
    with staged_folder(folder) as staged:
        (staged / "file").touch()

    assert existed == [False]


def test_csv_cells_stay_texts(tmp_path: Path):
    (tmp_path / "t.csv").write_text("query_id,text,split\n007,true,\n008,2020-01-01,\n")

    rows = [row for _, row in read_records(tmp_path / "t.csv")]

    assert rows == [
        {"query_id": "007", "text": "true", "split": None},
        {"query_id": "008", "text": "2020-01-01", "split": None},
    ]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux has this folder without files")
def test_lock_needs_folder_that_can_be_written():
    with raises("cannot-write"), locked(Path("/proc/run")):
        pass
