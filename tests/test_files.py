import errno
import gzip
import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path, fingerprint, read_json, read_jsonl, write_json, write_text


def test_a_write_is_whole_or_leaves_the_old_file_and_an_impossible_place_is_one_line(tmp_path):
    file = tmp_path / "x" / "y" / "a.txt"
    write_text(file, "Fähre")
    assert file.read_text(encoding="utf-8") == "Fähre" and file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(RuntimeError), atomic_path(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with (
        pytest.raises(SkilltrainError, match="cannot write: No space left on device"),
        atomic_path(file),
    ):
        raise OSError(28, os.strerror(28))
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]
    with file.open() as old:  # whoever has it open goes on reading what was there
        write_text(file, "new")
        assert (old.read(), file.read_text()) == ("Fähre", "new")
    for path in (file / "below.txt", file / "below" / "deep.txt"):
        with pytest.raises(SkilltrainError, match="cannot write") as error:
            write_text(path, "y")
        assert error.value.where == path


def test_json_round_trip_and_refusals(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, None, "ü"]})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", float("nan"))
    assert read_json(tmp_path / "a.json") == {"a": [1, None, "ü"]}
    for name, text, fault in (
        ("b", "{", "is not JSON"),
        ("c", '{"a": 1, "a": 2}', "'a' appears twice"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(SkilltrainError, match=fault):
            read_json(tmp_path / name)
    with pytest.raises(SkilltrainError, match="no such file"):
        read_json(tmp_path / "d")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_come_with_their_numbers_and_what_is_none_is_named(
    tmp_path, monkeypatch, suffix
):
    monkeypatch.setattr("skilltrain.files._MAX_LINE_BYTES", 200_000)
    pack = gzip.compress if suffix.endswith("gz") else bytes
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(pack('\ufeff{"a": 1}\n\n  \n{"a": "ü"}\r\n{"a": 3}'.encode()))
    rows = {1: {"a": 1}, 4: {"a": "ü"}, 5: {"a": 3}}
    assert dict(read_jsonl(path)) == {f"{path}, line {number}": row for number, row in rows.items()}
    for line, what in (
        (b'{"a": ', "is not JSON Lines"),
        (b"[1]", "expected an object, found list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "is not JSON Lines"),
        (b'{"a": "' + b"x" * 10**6, "a line has more than 64 MiB"),
    ):
        path.write_bytes(pack(b'{"a": 1}\n' + line + b"\n"))
        with pytest.raises(SkilltrainError, match=what) as error:
            list(read_jsonl(path))
        assert str(error.value).startswith(f"{path}, line ")
    with pytest.raises(SkilltrainError, match="no such file"):
        list(read_jsonl(tmp_path / "none"))
    whole = gzip.compress(
        "\n".join(json.dumps({"a": os.urandom(8).hex()}) for _ in range(500)).encode()
    )
    for broken in (whole[: len(whole) // 2], whole[:200] + bytes(60) + whole[260:], b"not gzip"):
        path.write_bytes(broken)
        with pytest.raises(SkilltrainError, match="is not JSON Lines"):
            list(read_jsonl(path))


def test_the_fingerprint_of_a_folder_is_worked_by_hand_and_takes_names_of_any_bytes(
    tmp_path, monkeypatch
):
    """The formula may not change: the records of finished runs hold it."""
    write_text(tmp_path / "one" / "x" / "ä.txt", "1")
    write_text(tmp_path / "one" / "b.txt", "2")
    parts = [b"b.txt", sha256(b"2").digest(), "x/ä.txt".encode(), sha256(b"1").digest()]
    assert fingerprint(tmp_path / "one") == sha256(b"".join(parts)).hexdigest()
    with pytest.raises(SkilltrainError, match="no such file or folder"):
        fingerprint(tmp_path / "two")
    (tmp_path / "two").mkdir()
    odd = tmp_path / "two" / os.fsdecode(b"caf\xe9")
    odd.write_bytes(b"3")
    assert fingerprint(tmp_path / "two") == sha256(b"caf\xe9" + sha256(b"3").digest()).hexdigest()

    # One that cannot be read counts by its name; the tests may run as root, for whom chmod locks nothing.
    def refusing(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refusing)
    assert fingerprint(tmp_path / "two") == sha256(b"caf\xe9").hexdigest()
    with pytest.raises(SkilltrainError, match="cannot be read: Permission denied") as error:
        fingerprint(odd)
    assert error.value.where == odd
