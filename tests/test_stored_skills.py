import json
from pathlib import Path

import pytest

from skilltrain.data.stored_skills import SKILL_BLOCK, StoredSkills, read_stored, skills_of_table
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, rows_of, write_table

SKILLS_OF_MANY_KINDS = [
    Skill("z", "n", "d", "plain", "c", "en", "s", "MIT"),
    Skill("a", "", "", ""),
    Skill("汉", "名字 \u2028", 'quotes " and \\', "é\n\t\x00\U0001f600", lang="zh"),
    Skill("half", "n", "d", "a lone \ud800 surrogate"),
    Skill("long", "n", "d", "x" * 300_000),
]


def test_skills_come_back_as_they_were(tmp_path: Path):
    stored = StoredSkills.write(iter(SKILLS_OF_MANY_KINDS), tmp_path / "s.jsonl")
    assert list(stored) == SKILLS_OF_MANY_KINDS and len(stored) == 5
    assert stored[1:4] == SKILLS_OF_MANY_KINDS[1:4] and stored[-1] == SKILLS_OF_MANY_KINDS[-1]
    with pytest.raises(IndexError):
        stored[5]
    (tmp_path / "s.jsonl").unlink()
    assert stored[2] == SKILLS_OF_MANY_KINDS[2]


def test_some_skills_in_another_order_and_under_other_ids(tmp_path: Path):
    stored = StoredSkills.write(SKILLS_OF_MANY_KINDS, tmp_path / "s.jsonl")
    assert [skill.skill_id for skill in stored.select([3, 0])] == ["half", "z"]
    renamed = stored.select([2, 1], ["one", "two"])
    assert [(skill.skill_id, skill.lang) for skill in renamed] == [("one", "zh"), ("two", None)]
    assert [skill.name for skill in read_stored(renamed.file, renamed.spans)] == ["名字 \u2028", ""]
    assert list(stored.select([])) == [] == list(StoredSkills.write([], tmp_path / "none.jsonl"))


def test_blocks_are_all_skills_in_order(tmp_path: Path):
    skills = [Skill(f"s{n}", "n", "d", "b" * n) for n in range(2 * SKILL_BLOCK + 1)]
    stored = StoredSkills.write(skills, tmp_path / "s.jsonl")
    assert [len(block) for block in stored.blocks()] == [SKILL_BLOCK, SKILL_BLOCK, 1] and stored.num_blocks == 3
    assert [skill for block in stored.blocks() for skill in block] == skills
    assert [s.body for spans in stored.span_blocks() for s in read_stored(stored.file, spans)] == [
        s.body for s in skills
    ]


def test_the_skills_of_a_table(tmp_path: Path):
    skills = [Skill(f"s{n}", "n", "d", f"b{n}") for n in range(SKILL_BLOCK + 3)]
    write_table(rows_of(skills), SKILLS, tmp_path)
    assert list(skills_of_table(tmp_path)) == list(StoredSkills.of_table(tmp_path, tmp_path)) == skills
    with pytest.raises(SkilltrainError, match="no skills table here"):
        StoredSkills.of_table(tmp_path / "none", tmp_path)


def test_a_disk_that_takes_no_more_is_told(tmp_path: Path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no device that is always full")
    with pytest.raises(SkilltrainError, match="cannot keep the skills while they are read: No space left on device"):
        StoredSkills.write([Skill("a", "n", "d", json.dumps("b"))], full)
