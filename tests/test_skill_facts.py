"""Facts of a skill that no model sees: author, url, stars, updated_at, tags and others."""

import json
import os
from dataclasses import asdict, replace

import numpy as np
import pyarrow.parquet as pq
import pytest

import skilltrain
from skilltrain.config import validate
from skilltrain.data.pool.read import merge_sources, read_pool
from skilltrain.data.pool.skill_file import parse_skill_file, skill_text
from skilltrain.records import SKILL_FACTS, Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.runs import run_stage
from skilltrain.serving.index import Contents
from skilltrain.serving.indexing import write_index
from skilltrain.serving.router import Router
from skilltrain.stage import parse_recipe
from skilltrain.tables import SKILLS, read_skills, read_table, write_table
from small_library import succeeds

FACTS = {
    "author": "Ada",
    "url": "https://example.org/pdf",
    "stars": 12,
    "updated_at": "2026-08-03T10:00:00Z",
    "when_to_use": "When pages must be joined.",
    "files": ["scripts/run.py", "b.md"],
    "tags": ["pdf", "merge"],
}
PLAIN = Skill("pdf", "pdf", "Merge PDFs.", "Use pypdf.", lang="en")
FULL = replace(PLAIN, **FACTS)
ROW = {"name": "pdf", "description": "Merge PDFs.", "body": "Use pypdf."}


def facts(skill):
    return {name: getattr(skill, name) for name in SKILL_FACTS}


def parsed(header):
    return parse_skill_file(f"---\nname: n\n{header}\n---\nBody.", "id", "folder")


# Where they are read ----------------------------------------------------------


@pytest.mark.parametrize("below", ["", "metadata:\n  "])
def test_header_gives_facts(below):
    lines = ["author: Ada", "stars: '7'", "updated_at: 2026-08-03", "when_to_use: Often."]
    header = "\n".join(lines) if not below else below + "\n  ".join(lines)

    skill = parsed(header)

    expected = {"author": "Ada", "stars": 7, "updated_at": "2026-08-03", "when_to_use": "Often."}
    assert facts(skill) == dict.fromkeys(SKILL_FACTS) | expected


@pytest.mark.parametrize("tags", ["[pdf, merge]", "pdf, merge,", "\n  - pdf\n  - merge"])
def test_header_gives_tags(tags):
    assert parsed(f"tags: {tags}").tags == ("pdf", "merge")


def test_header_goes_before_its_metadata():
    assert parsed("author: Ada\nmetadata:\n  author: Bob").author == "Ada"


def test_homepage_is_url():
    assert parsed("homepage: https://example.org").url == "https://example.org"


def test_facts_alone_make_no_header():
    skill = parse_skill_file("---\nauthor: Ada\nstars: 5\n---\nBody.", "id", "folder")

    assert skill.author is None
    assert skill.body == "---\nauthor: Ada\nstars: 5\n---\nBody."


@pytest.mark.parametrize("kind", ["json", "parquet", "frame"])
def test_rows_give_facts(tmp_path, kind):
    if kind == "frame":
        pandas = pytest.importorskip("pandas")
        row = ROW | FACTS | {"files": np.array(FACTS["files"])}
        skills = skilltrain.read_pool(pandas.DataFrame([row, {"name": "other", "body": "b"}]))
        assert facts(skills[0]) == dict.fromkeys(SKILL_FACTS)
        skills = skills[1:]
    elif kind == "json":
        (tmp_path / "s.jsonl").write_text(json.dumps(ROW | FACTS))
        skills = read_pool(tmp_path / "s.jsonl")
    else:
        skills = read_pool(write_table([FULL], SKILLS, tmp_path).rename(tmp_path / "s.parquet"))

    assert facts(skills[0]) == facts(FULL)


def test_row_goes_before_its_skill_md():
    text = "---\nname: n\nauthor: Bob\nstars: 3\n---\nBody."

    (skill,) = read_pool([{"name": "n", "skill_md": text, "author": "Ada"}])

    assert (skill.author, skill.stars) == ("Ada", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("author", {"name": "Ada"}),
        ("author", float("nan")),
        ("url", "javascript:alert(1)"),
        ("url", "https://a b"),
        ("url", 5),
        ("stars", -1),
        ("stars", 1.5),
        ("stars", "many"),
        ("stars", True),
        ("stars", 10**12),
        ("stars", float("inf")),
        ("updated_at", "yesterday"),
        ("updated_at", "2026-13-01"),
        ("updated_at", 1712010112123),
        ("when_to_use", " \n"),
        ("files", "a.py"),
        ("files", ["../a.py"]),
        ("files", ["/etc/passwd"]),
        ("files", [None]),
        ("files", {"a": 1}),
        ("files", 3),
    ],
)
def test_bad_fact_is_null(name, value):
    (skill,) = read_pool([ROW | {name: value}])

    assert facts(skill) == dict.fromkeys(SKILL_FACTS)


def test_facts_are_cleaned_lines():
    (skill,) = read_pool([ROW | {"author": "Ada\x00\n \ud800Lovelace", "files": ["a\x00.py"]}])

    assert skill.author == "Ada Lovelace"
    assert skill.files == ("a.py",)


def test_files_beside_skill_are_listed(tmp_path):
    folder = tmp_path / "skills" / "pdf"
    names = ["SKILL.md", "b.md", "scripts/run.py", ".env", ".git/config", "inner/SKILL.md"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("Body.")
    (folder / "link.md").symlink_to(folder / "b.md")
    os.mkfifo(folder / "pipe")

    skills = {skill.skill_id: skill for skill in read_pool(tmp_path / "skills")}

    assert skills["pdf"].files == ("b.md", "scripts/run.py")
    assert skills["pdf/inner"].files == ()


# Where they are kept ----------------------------------------------------------


def test_table_keeps_facts(tmp_path):
    write_table([PLAIN, replace(FULL, skill_id="full")], SKILLS, tmp_path)

    assert read_skills(tmp_path) == [PLAIN, replace(FULL, skill_id="full")]
    hash(FULL)


def test_older_table_reads_as_null(tmp_path):
    file = write_table([FULL], SKILLS, tmp_path)
    pq.write_table(read_table(file, SKILLS).drop_columns([*SKILL_FACTS]), file)

    assert read_skills(file) == [PLAIN]
    assert read_table(file, SKILLS).schema == SKILLS.schema


def test_pool_keeps_facts(tmp_path):
    (tmp_path / "s.jsonl").write_text(json.dumps(ROW | FACTS))
    sources = {"stage": "pool", "sources": str(tmp_path / "s.jsonl"), "out": str(tmp_path / "pool")}

    run_stage(parse_recipe(sources, "test"))

    (skill,) = read_skills(tmp_path / "pool")
    text = succeeds("show", tmp_path / "pool" / "skills.parquet").out
    assert facts(skill) == facts(FULL)
    assert "https://example.org/pdf" in text
    assert '["scripts/run.py", "b.md"]' in text


def test_router_keeps_facts(tmp_path):
    system = validate(SystemConfig, {"name": "x", "rankers": [{"kind": "lexical"}]}, "test")
    write_index(tmp_path, system, Contents(tmp_path, {tmp_path: [FULL]}, ()), {})

    router = Router.load(tmp_path)

    assert router.skills["pdf"] == FULL
    assert router.update([replace(FULL, stars=13)])["num_changed"] == 1
    assert router.skills["pdf"].stars == 13


# What they do not change ------------------------------------------------------


def test_facts_make_no_other_skill():
    other = replace(FULL, stars=99, author="Bob")

    ((merged,), dropped) = merge_sources([[FULL, other]], drop_duplicates=False)

    assert merged == [FULL]
    assert [drop.filter for drop in dropped] == ["duplicate"]


def test_skill_md_for_agents_has_no_facts():
    assert skill_text(FULL) == skill_text(PLAIN)
    assert asdict(FULL).keys() == asdict(PLAIN).keys()
