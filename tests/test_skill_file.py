"""SKILL.md files with tidy, untidy and hostile frontmatter become skills."""

import itertools
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skilltrain.data.pool.skill_file import (
    MAX_HEADER_CHARS,
    as_text,
    parse_skill_file,
    split_header,
)
from skilltrain.records import Skill
from skilltrain.texts import decode_text


def parse(text: str) -> Skill:
    return parse_skill_file(text, "some/id", "folder", "library")


def test_clean_frontmatter_gives_every_field():
    """Characters that a table cannot hold are removed."""
    header = (
        "name: pdf\x00-fill\ndescription: Fill\ud800 it.\nlicense: MIT\nlang: zh-CN\n"
        "metadata:\n  category: Docs\n"
    )

    skill = parse(f"---\n{header}---\n\n# Title\nDo \x00\udfffit.\n")

    assert skill == Skill(
        "some/id", "pdf-fill", "Fill it.", "# Title\nDo it.", "Docs", "zh", "library", "MIT"
    )


@pytest.mark.parametrize(
    ("header", "description"),
    [
        ("description: Use when: the user says x", "Use when: the user says x"),
        ('description: "Quoted: yes"', "Quoted: yes"),
        ("description: >\n  Folded\n  text", "Folded text"),
        ("description: >-\n  Folded\n  text\nbad: a: b", "Folded text"),
        ("description: |\n  Two\n  lines", "Two lines"),
        ("description: first\n  second: line\n  third", "first second: line third"),
        ("\tdescription:\ttabs", "tabs"),
        ("description: [a, b, c]", "a, b, c"),
        ("description:\n  - a\n  - b", "a, b"),
        ("description: 1.10", "1.10"),
        ("description: yes", "yes"),
        ("description: 2024-13-45", "2024-13-45"),
        ("Description: upper key", "upper key"),
        ("description: @odd *start", "@odd *start"),
        ("description: see https://example.org: there", "see https://example.org: there"),
        ("description: 'it''s' fine: 'really'", "'it''s' fine: 'really'"),
        ("description: bell \x07 rings", "bell rings"),
    ],
)
def test_untidy_description_is_read(header: str, description: str):
    assert parse(f"---\nname: n\n{header}\n---\nBody.").description == description


@pytest.mark.parametrize(
    "mark", ["", "\ufeff", "\n\n", "<!-- made by a machine -->\n", "<!-- a --> <!-- b -->\n\n"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_text_before_frontmatter_is_skipped(mark: str, newline: str):
    text = f"{mark}---\nname: n\ndescription: d\n---\nOne.\nTwo."

    skill = parse(text.replace("\n", newline))

    assert (skill.name, skill.description, skill.body) == ("n", "d", "One.\nTwo.")


@pytest.mark.parametrize(
    ("text", "description"),
    [
        (
            "# Heading\n\n![badge](x.png)\n\n```sh\nrun --it\n```\n\n"
            "> Sends mail\n> to people.\n\nMore.",
            "Sends mail to people.",
        ),
        ("word " * 1000, "word " * 200),
        ("# only\n\n## headings\n```\ncode", ""),
        (
            "---\nname: n\ndescription: d\n\n# Title\n\ntext",
            "name: n description: d",
        ),  # never closed
        (
            "---\nname: n\ndescription: d\n\n# Title\n\nsome prose\n\n---\n\nend",
            "name: n description: d",
        ),
    ],
)
def test_first_paragraph_is_default_description(text: str, description: str):
    skill = parse(text)

    assert skill.name == "folder"
    assert skill.description == description
    assert skill.body == text.strip()


@pytest.mark.parametrize(
    "header",
    [
        "name: n\n\n# --- discovery ---\n\ndescription: d\ncategory: c",
        "name: n\ndescription: d\n\n# --- discovery ---\n\ncategory: c\n",
        "name: n\n\n# Discovery\n\ndescription: d\ncategory: c\n",
        "name: n\ndescription: d\n\n# Discovery\n\ncategory: c",
        '"name": n\n"description": d\ncategory: c',
        '"name": n\ndescription: d\ncategory: c\nnot: yaml: at all',
        "  # made by a machine\nname: n\ndescription: d\ncategory: c",
        "名称: x\nname: n\ndescription: d\ncategory: c",
        "名称: x\nname: n\ndescription: d\ncategory: c\nnot: yaml: at all",
        "{name: n, description: d, category: c}",
        '{\n"name": "n",\n\n"description": "d", "category": "c"\n}',
        "name: n\ndescription: d\nnot: yaml: at all\nmetadata:\n  version: 1\n  category: c",
    ],
)
def test_closed_block_with_name_is_frontmatter(header: str):
    skill = parse(f"---\n{header}\n---\nBody.")

    assert (skill.name, skill.description) == ("n", "d")
    assert (skill.body, skill.category) == ("Body.", "c")


@pytest.mark.parametrize(
    ("header", "keys"),
    [
        ("version: 1.0\nlicense: MIT", ["version", "license"]),
        ("title: What: a title\nlang: en", ["title", "lang"]),
        ("Category: c", ["category"]),
        ("", []),
    ],
)
def test_block_of_known_keys_is_frontmatter(header: str, keys: list[str]):
    fields, body = split_header(f"---\n{header}\n---\nBody.")

    assert list(fields) == keys
    assert body == "\nBody."


@pytest.mark.parametrize(
    "prose",
    [
        "\nSome prose without keys.\n",
        "Note: this is prose\nmore prose",
        "Note: prose",
        "Warning: hot\n- item",
    ],
)
def test_block_of_prose_is_body(prose: str):
    text = f"---\n{prose}\n---\nBody."

    fields, body = split_header(text)

    assert not fields
    assert body == text


@pytest.mark.parametrize(
    "bomb", ["x: " + "[" * 1_000, "x: " + "{a: " * 2_000, "x:\n" + "- " * 30_000]
)
def test_hostile_nesting_is_read_line_by_line(bomb: str):
    """libyaml would end this process at the last one."""
    assert parse(f"---\nname: n\ndescription: d\n{bomb}\n---\nBody").name == "n"


def test_nested_yaml_aliases_do_not_multiply():
    header = "a: &a [x, x]\n"
    for previous, letter in itertools.pairwise("abcdefghijkl"):
        header += f"{letter}: &{letter} [*{previous}, *{previous}]\n"

    skill = parse(f"---\nname: n\n{header}description: [*l, *k, y]\n---\nBody")

    assert skill.description == "y"


@pytest.mark.parametrize(
    ("text", "length"), [("A" * 40_000, MAX_HEADER_CHARS), ("\\0" * 3_000, len("folder"))]
)
def test_repeated_yaml_alias_needs_little_memory(text: str, length: int):
    """The second text is empty after it is cleaned."""
    header = f'x: &a "{text}"\nname: [{"*a," * 2000}]\ndescription: {{x: [*a, *a]}}'

    tracemalloc.start()
    skill = parse(f"---\n{header}\n---\nBody")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (len(skill.name), skill.description, skill.body) == (length, "Body", "Body")
    assert peak_bytes < 40e6


def test_long_list_is_cut_at_an_item():
    long = "B" * (MAX_HEADER_CHARS // 2 - 1)

    assert as_text([long, long, "c", "d"]) == f"{long}, {long}"


def test_values_without_text_are_left_out():
    assert as_text(["a", ["b"], {"c": 1}, None, 1.5, float("nan"), ""]) == "a, 1.5"
    assert as_text(0.5) == "0.5"
    for value in ("nan", "inf", "-inf"):
        assert as_text(float(value)) == ""


CHINESE = "用于处理表格和文档的技能，支持中文。"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("naïve café — “quoted”", "utf-8-sig"),
        ("naïve café 中文", "utf-16"),
        ("中文 utf-32", "utf-32"),
        ("Le café où l’été à Orléans", "cp1252"),
        ("déjà vu, garçon", "latin-1"),
        (CHINESE, "gb18030"),
    ],
)
def test_encoding_is_detected(text: str, encoding: str):
    assert decode_text(text.encode(encoding)) == text


def test_broken_byte_keeps_utf8():
    assert decode_text(CHINESE.encode() + b"\xff") == CHINESE + "\ufffd"


@settings(max_examples=100)
@example("---\n: \n---")
@example("---\n? a\n---\n")
@example("---\na:\n\xa0- b\n...")
@given(st.text(alphabet=st.sampled_from("-\n:#ab [{}]|>'\"&*!?\t\x00\ud800é中 "), max_size=80))
def test_any_text_parses_into_storable_text(tail: str):
    skill = parse("---\n" + tail)

    assert skill.name
    for field in (skill.name, skill.description, skill.body, skill.category or ""):
        field.encode()
