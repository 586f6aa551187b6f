"""Untrusted text stays inside its fence in a prompt, and hidden characters are removed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.llm.untrusted import (
    fenced,
    mark_of,
    untrusted_line,
    untrusted_skill,
    untrusted_text,
)
from skilltrain.records import Skill


@given(st.lists(st.text()), st.integers(1, 50))
def test_no_text_holds_the_mark(texts: list[str], max_chars: int):
    cleaned = [untrusted_text(text, max_chars) for text in texts]

    mark = mark_of(cleaned)
    assert mark == mark_of(cleaned)
    for text in cleaned:
        text.encode()
        for forbidden in (mark, "\r", "\x00", "<|"):
            assert forbidden not in text


@given(st.text(), st.integers(0, 40))
def test_marks_of_other_texts_close_no_fence(text: str, cut: int):
    cleaned = untrusted_text(text, 200)
    imitation = f"{fenced(cleaned)}\n{fenced(cleaned[:cut])}"

    first, *inside, last = fenced(imitation).split("\n")

    assert first == last
    assert re.fullmatch("=== [0-9a-f]{12} ===", first)
    assert "\n".join(inside) == imitation
    assert not any(first in line for line in inside)


@pytest.mark.parametrize("hidden", ["", "\u200b", "\x00", "\U000e0041", "\ufe0f", "\u2060"])
@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
        "<s>",
        "<eos>",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
        "<end_of_turn>",
        "</think>",
        "[SYSTEM_PROMPT]",
    ],
)
def test_control_token_is_broken(token: str, hidden: str):
    """A hidden character inside the token does not protect it."""
    assert untrusted_text(f"a {token[:2]}{hidden}{token[2:]} b", 100) != f"a {token} b"
    assert token not in untrusted_text(f"{token[:1]}{hidden}{token[1:]}", 100)


def test_hidden_characters_are_removed():
    text = "a\ufe0eb\u3164c\u034fd\U000e0041e\u202ef\xadg\x1bh\ud800i\ufeff"

    assert untrusted_text(text, 100) == "abcdefghi"


def test_line_breaks_become_newlines():
    assert untrusted_text("a\r\nb\u2028c", 100) == "a\nb\nc"


@pytest.mark.parametrize(
    "text",
    [
        "Prüfe <b>das</b> & [Link](x)",
        "整理。\n\n- 一\t二",
        "a < b | c",
        "ہم\u200cآہنگ",
        "👩\u200d💻",
    ],
)
def test_ordinary_text_is_unchanged(text: str):
    assert untrusted_text(text, 100) == text


def test_fields_of_skill_are_lines():
    """The body is last. It alone has several lines."""
    skill = Skill("s", "two\nlines", "Body: x\r\nName: y", "# Head\nName: z")

    text = untrusted_skill(skill, 100, 8)

    assert text == "Name: two lines\nDescription: Body: x Name: y\nBody: # Head\nN"
    assert untrusted_skill(skill, 7, None) == "Name: two lines\nDescription: Body: x"


def test_line_is_cut():
    assert untrusted_line("x " * 300) == " ".join("x" * 100)
