"""Front matter means what its author meant: who may start a skill, and when."""

import json

import pytest

from skilltrain.data.pool.read import read_pool
from skilltrain.data.pool.skill_file import MAX_LISTED_CHARS, parse_skill_file
from skilltrain.records import Skill
from skilltrain.serving.router import Router
from skilltrain.tables import DROPPED, JUDGEMENTS, read_table
from small_library import succeeds

DESCRIPTION = "description: Ship the build."


def write_skill(folder, name, *header):
    """Write a SKILL.md with these lines of front matter."""
    file = folder / name / "SKILL.md"
    file.parent.mkdir(parents=True)
    lines = "\n".join([f"name: {name}", DESCRIPTION, *header])
    file.write_text(f"---\n{lines}\n---\nSteps of {name}.\n")
    return folder


def parse(*header: str) -> Skill:
    """Return the skill of a SKILL.md with these lines of front matter."""
    text = "\n".join(["---", *header, "---", "Body."])
    return parse_skill_file(text, "id", "folder")


def dropped_rows(folder):
    """Return the id and the reason's code of each row of DROPPED."""
    rows = read_table(folder, DROPPED).to_pylist()
    return [(row["skill_id"], row["filter"]) for row in rows]


@pytest.mark.parametrize(
    "line",
    [
        "disable-model-invocation: true",
        "Disable_Model_Invocation: 'Yes'",
        "disable-model-invocation: on  # only by hand\nargument-hint: [file] [form]",  # no YAML
    ],
)
def test_skill_for_users_is_never_routed_to(tmp_path, line):
    skills = write_skill(tmp_path / "skills", "deploy", line)
    write_skill(skills, "build")

    succeeds("pool", f"sources={skills}", f"out={tmp_path}/pool")
    router = Router(tmp_path / "pool", "lexical")

    assert [*router.skills] == ["build"]
    assert dropped_rows(tmp_path / "pool") == [("deploy", "for_users_only")]


def test_row_with_file_for_users_is_dropped(tmp_path):
    header = "---\ndisable-model-invocation: true\n---\nBody."
    rows = [{"name": "deploy", "skill_md": header}, {"name": "build", "skill_md": "Body."}]
    file = tmp_path / "skills.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    skills = read_pool(file)

    assert [skill.skill_id for skill in skills] == ["build"]


def test_skill_for_users_is_no_positive(tmp_path):
    skills = write_skill(tmp_path / "skills", "deploy", "disable-model-invocation: true")
    write_skill(skills, "build")
    rows = [{"query": "ship", "skill_ids": ["deploy"]}, {"query": "make", "skill_ids": ["build"]}]
    queries = tmp_path / "train.jsonl"
    queries.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = tmp_path / "pool"
    succeeds("pool", f"sources={skills}", f"out={pool}")

    options = [f"pool={pool}", "missing_gold=drop", f"out={tmp_path}/queries"]
    succeeds("queries", f"files={queries}", *options)

    judgements = read_table(tmp_path / "queries", JUDGEMENTS).column("skill_id").to_pylist()
    assert judgements == ["build"]
    assert [skill_id for skill_id, _ in dropped_rows(tmp_path / "queries")] == ["deploy"]


@pytest.mark.parametrize(
    "line",
    ["user-invocable: false", "user-invocable: true", "disable-model-invocation: false"],
)
def test_skill_for_models_is_routed_to(tmp_path, line):
    skills = write_skill(tmp_path / "skills", "deploy", line)

    assert [skill.name for skill in read_pool(skills)] == ["deploy"]


def test_description_goes_on_with_when_to_use():
    skill = parse(DESCRIPTION, "when_to_use: Use when a release is due.")

    assert skill.description == "Ship the build. Use when a release is due."


def test_when_to_use_follows_first_paragraph():
    assert parse("when-to-use: Use when a release is due.").description == (
        "Body. Use when a release is due."
    )


def test_router_finds_words_of_when_to_use(tmp_path):
    skills = write_skill(tmp_path / "skills", "deploy", "when_to_use: Friday rollouts.")
    write_skill(skills, "build")
    rankers = [{"kind": "lexical", "fields": "description"}]

    answer = Router(skills, rankers).route("rollouts")

    assert [skill.skill_id for skill in answer.skills] == ["deploy"]
    assert "Friday rollouts" in answer.skills[0].description


def test_long_when_to_use_stays_listable():
    skill = parse(DESCRIPTION, f"when_to_use: {'release ' * 300}")

    assert len(skill.description) <= MAX_LISTED_CHARS


@pytest.mark.parametrize(
    "value", ["text", "[a, b]", "1.5", "true", "{a: [1], b: {c: 2}}", "{1: 2}", "{[a]: b}", ""]
)
def test_metadata_may_have_any_type(value):
    skill = parse("name: deploy", DESCRIPTION, f"metadata: {value}")

    assert (skill.name, skill.description) == ("deploy", "Ship the build.")


@pytest.mark.parametrize("tools", ["Bash(git:*) Read", "Read, Grep", "[Read, Grep]", "\n  - Read"])
def test_allowed_tools_are_text_or_list(tools):
    skill = parse("name: deploy", f"allowed-tools: {tools}", DESCRIPTION)

    assert (skill.name, skill.description) == ("deploy", "Ship the build.")


def test_one_field_of_an_agent_makes_a_header():
    assert parse("allowed-tools: Read").body == "Body."
