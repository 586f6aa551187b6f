"""What a source leaves out is told, whatever its files are called; see test_skill_pool.py for what it gives."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skilltrain.data.pool.read import read_source
from skilltrain.data.pool.skill_file import MAX_HEADER_CHARS
from skilltrain.data.pool.skill_pool import PoolConfig, run_pool
from skilltrain.files import write_text
from skilltrain.records import Dropped, Skill
from skilltrain.runs import RUN_FILE
from skilltrain.tables import DROPPED, SKILLS, read_table, write_table

ODD_NAME = os.fsdecode(b"caf\xe9")  # Latin-1, as in many a zip


def read(source: Path) -> tuple[list[Skill], list[Dropped]]:
    found = list(read_source(source))
    return [item for item in found if isinstance(item, Skill)], [item for item in found if isinstance(item, Dropped)]


def write_skills(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"name": "one", "body": "Body."}]), folder / "skills.parquet")
    return folder


def write_lines(path: Path, *rows: dict[str, Any]) -> Path:
    write_text(path, "\n".join(map(json.dumps, rows)))
    return path


def test_shards_and_skill_files_beside_skills_parquet_are_said_and_not_read(tmp_path: Path, capsys: Any):
    root = write_skills(tmp_path / "pool")
    write_lines(root / "more.jsonl", {"name": "two", "body": "Body."})
    write_skills(root / "deep")
    write_text(root / "skills" / "a" / "SKILL.md", "Body.")
    write_lines(root / "skills" / "a" / "bundled.jsonl", {})
    write_text(root / "readme.txt", "no skill")
    skills, refused = read(root)
    assert [skill.name for skill in skills] == ["one"]
    assert not refused
    said = " ".join(capsys.readouterr().err.split())
    assert "3 other files with skills are not read, the first skills/a/SKILL.md; name them as sources" in said


def test_shards_beside_skill_files_are_said_and_those_inside_a_skill_belong_to_it(tmp_path: Path, capsys: Any):
    write_text(tmp_path / "a" / "SKILL.md", "Body.")
    for file in ("more.jsonl", "a/sample.jsonl"):
        write_lines(tmp_path / file, {"name": "two", "body": "Body."})
    assert [skill.skill_id for skill in read(tmp_path)[0]] == ["a"]
    assert "1 other files with skills are not read, the first more.jsonl" in " ".join(capsys.readouterr().err.split())


def test_what_a_stage_wrote_beside_its_table_and_links_there_are_no_skills_left_out(tmp_path: Path, capsys: Any):
    root = write_skills(tmp_path / "collected")
    write_table([], DROPPED, root)
    write_text(root / RUN_FILE, "{}")
    write_text(root / "skills" / "a" / "SKILL.md", "Body.")
    (root / "skills" / "away").symlink_to(tmp_path)
    skills, refused = read(root)
    assert ([skill.name for skill in skills], refused) == (["one"], [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["folder", "shard", "broken shard"])
def test_names_that_are_not_utf8_pass_into_the_tables(tmp_path: Path, kind: str):
    root = tmp_path / ODD_NAME
    out = tmp_path / "out"
    out.mkdir()
    if kind == "folder":
        write_text(root / "a" / "SKILL.md", "Body.")
    else:
        write_lines(root / "a.jsonl", {"name": "a", "body": "Body."})
        write_lines(root / f"{ODD_NAME}.jsonl", *[{"name": "b", "body": "Other."}] * (kind == "shard"), {})
    run_pool(PoolConfig(sources=[root], out=out), out)
    sources = read_table(out, SKILLS).column("source").to_pylist()
    reasons = read_table(out, DROPPED).column("reason").to_pylist()
    assert sources == {"folder": ["caf"], "shard": ["a.jsonl", "caf.jsonl"], "broken shard": ["a.jsonl"]}[kind]
    assert len(reasons) == (kind != "folder") and all("caf.jsonl" in reason for reason in reasons)


def test_a_folder_that_may_be_listed_and_not_entered_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "library"
    write_text(root / "a" / "SKILL.md", "Body.")
    write_text(root / "locked" / "SKILL.md", "Body.")
    whole_stat = Path.stat  # made to fail here: the tests may run as root, for whom chmod locks nothing

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent.name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return whole_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    skills, refused = read(root)
    assert [skill.skill_id for skill in skills] == ["a"]
    assert refused == [Dropped("", "locked", "unreadable", "locked/SKILL.md: Permission denied")]


def test_rows_with_no_numbers_and_endless_names(tmp_path: Path):
    nan, inf = float("nan"), float("inf")
    fields = {"description": nan, "category": inf, "lang": nan, "license": -inf, "source": nan}
    long = "x" * (MAX_HEADER_CHARS + 1)
    file = write_lines(
        tmp_path / "s.jsonl",
        {"skill_id": "a", "name": "n", "body": "First paragraph.", **fields},
        {"skill_id": "b", "name": long, "description": long, "body": long},
        {"skill_id": nan, "name": nan, "body": "Body."},
    )
    (first, second), (third,) = read(file)
    assert first == Skill("a", "n", "First paragraph.", "First paragraph.", None, None, "s.jsonl", None)
    assert (len(second.name), len(second.description), second.body) == (MAX_HEADER_CHARS, MAX_HEADER_CHARS, long)
    assert third.filter == "no_id"


def test_a_linked_table_is_read_and_not_left_out(tmp_path: Path):
    """As in a snapshot of the Hub's cache, where every file is a link out of its folder."""
    blob = write_skills(tmp_path / "blobs") / "skills.parquet"
    (root := tmp_path / "snapshot").mkdir()
    (root / "skills.parquet").symlink_to(blob)
    skills, refused = read(root)
    assert len(skills) == 1 and refused == []
