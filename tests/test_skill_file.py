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


def parsed(text: str) -> Skill:
    return parse_skill_file(text, "some/id", "folder", "library")


def test_clean_frontmatter_gives_every_field_without_what_no_table_can_hold():
    header = "name: pdf\x00-fill\ndescription: Fill\ud800 it.\nlicense: MIT\nlang: zh-CN\nmetadata:\n  category: Docs\n"
    assert parsed(f"---\n{header}---\n\n# Title\nDo \x00\udfffit.\n") == Skill(
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
def test_descriptions_of_untidy_frontmatter(header: str, description: str):
    assert parsed(f"---\nname: n\n{header}\n---\nBody.").description == description


@pytest.mark.parametrize(
    "mark", ["", "\ufeff", "\n\n", "<!-- made by a machine -->\n", "<!-- a --> <!-- b -->\n\n"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_marks_comments_and_line_ends_before_frontmatter(mark: str, newline: str):
    text = (mark + "---\nname: n\ndescription: d\n---\nOne.\nTwo.").replace("\n", newline)
    skill = parsed(text)
    assert (skill.name, skill.description, skill.body) == ("n", "d", "One.\nTwo.")


@pytest.mark.parametrize(
    ("text", "description"),
    [
        (
            "# Heading\n\n![badge](x.png)\n\n```sh\nrun --it\n```\n\n> Sends mail\n> to people.\n\nMore.",
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
def test_without_frontmatter_name_is_the_folder_and_description_the_first_paragraph(
    text: str, description: str
):
    skill = parsed(text)
    assert (skill.name, skill.description, skill.body) == ("folder", description, text.strip())


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
def test_a_closed_block_with_a_name_is_frontmatter_however_it_is_written(header: str):
    skill = parsed(f"---\n{header}\n---\nBody.")
    assert (skill.name, skill.description, skill.body, skill.category) == ("n", "d", "Body.", "c")


@pytest.mark.parametrize(
    ("header", "keys"),
    [
        ("version: 1.0\nlicense: MIT", ["version", "license"]),
        ("title: What: a title\nlang: en", ["title", "lang"]),
        ("Category: c", ["category"]),
        ("", []),
        *(
            (prose, None)
            for prose in (
                "\nSome prose without keys.\n",
                "Note: this is prose\nmore prose",
                "Note: prose",
                "Warning: hot\n- item",
            )
        ),
    ],
)
def test_a_block_of_our_keys_is_frontmatter_without_a_name_too_and_prose_is_body(
    header: str, keys: list[str] | None
):
    text = f"---\n{header}\n---\nBody."
    fields, body = split_header(text)
    assert (list(fields), body) == ((keys, "\nBody.") if keys is not None else ([], text))


@pytest.mark.parametrize(
    "bomb", ["x: " + "[" * 1_000, "x: " + "{a: " * 2_000, "x:\n" + "- " * 30_000]
)
def test_hostile_nesting_is_read_line_by_line(bomb: str):
    """The last one would end this process if libyaml read it."""
    assert parsed(f"---\nname: n\ndescription: d\n{bomb}\n---\nBody").name == "n"


@pytest.mark.parametrize(
    ("text", "length"), [("A" * 40_000, MAX_HEADER_CHARS), ("\\0" * 3_000, len("folder"))]
)
def test_yaml_aliases_do_not_multiply(text: str, length: int):
    """A list of aliases is cut and never put together, also where nothing is left of its text when it is cleaned."""
    laughs = "a: &a [x, x]\n"
    for previous, letter in itertools.pairwise("abcdefghijkl"):
        laughs += f"{letter}: &{letter} [*{previous}, *{previous}]\n"
    assert parsed(f"---\nname: n\n{laughs}description: [*l, *k, y]\n---\nBody").description == "y"
    header = f'x: &a "{text}"\nname: [{"*a," * 2000}]\ndescription: {{x: [*a, *a]}}'
    tracemalloc.start()
    skill = parsed(f"---\n{header}\n---\nBody")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(skill.name), skill.description, skill.body) == (length, "Body", "Body")
    assert peak < 40e6


def test_lists_are_cut_and_what_is_no_number_is_nothing():
    long = "B" * (MAX_HEADER_CHARS // 2 - 1)
    assert as_text([long, long, "c", "d"]) == f"{long}, {long}"
    assert as_text(["a", ["b"], {"c": 1}, None, 1.5, float("nan"), ""]) == "a, 1.5"
    assert [as_text(float(value)) for value in ("nan", "inf", "-inf", "0.5")] == ["", "", "", "0.5"]


def test_encodings_and_a_broken_byte_in_utf8():
    chinese = "用于处理表格和文档的技能，支持中文。"
    for text, encoding in (
        ("naïve café — “quoted”", "utf-8-sig"),
        ("naïve café 中文", "utf-16"),
        ("中文 utf-32", "utf-32"),
        ("Le café où l’été à Orléans", "cp1252"),
        ("déjà vu, garçon", "latin-1"),
        (chinese, "gb18030"),
    ):
        assert decode_text(text.encode(encoding)) == text
    assert decode_text(chinese.encode() + b"\xff") == chinese + "\ufffd"


@settings(max_examples=100)
@example("---\n: \n---")
@example("---\n? a\n---\n")
@example("---\na:\n\xa0- b\n...")
@given(st.text(alphabet=st.sampled_from("-\n:#ab [{}]|>'\"&*!?\t\x00\ud800é中 "), max_size=80))
def test_any_text_parses_into_storable_text(tail: str):
    skill = parsed("---\n" + tail)
    for part in (skill.name, skill.description, skill.body, skill.category or ""):
        part.encode()
    assert skill.name
