"""No untrusted text gets out of its part of a prompt, and none hides from who reads it."""

import re

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
def test_no_text_can_hold_the_mark_or_what_cannot_be_sent(texts: list[str], most: int) -> None:
    clean = [untrusted_text(text, most) for text in texts]
    assert mark_of(clean) == mark_of(clean)
    for text in clean:
        assert mark_of(clean) not in text
        text.encode()
        assert "\r" not in text and "\x00" not in text and "<|" not in text


@given(st.text(), st.integers(0, 40))
def test_a_text_that_holds_the_marks_of_other_texts_cannot_open_or_close_its_fence(
    text: str, cut: int
) -> None:
    clean = untrusted_text(text, 200)
    imitation = f"{fenced(clean)}\n{fenced(clean[:cut])}"
    first, *inside, last = fenced(imitation).split("\n")
    assert first == last and re.fullmatch("=== [0-9a-f]{12} ===", first)
    assert "\n".join(inside) == imitation and not any(first in line for line in inside)


def test_signs_that_end_a_turn_are_broken_also_where_something_unseen_hides_them() -> None:
    for turn in (
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
    ):
        for unseen in ("", "\u200b", "\x00", "\U000e0041", "\ufe0f", "\u2060"):
            assert untrusted_text(f"a {turn[:2]}{unseen}{turn[2:]} b", 100) != f"a {turn} b"
            assert turn not in untrusted_text(f"{turn[:1]}{unseen}{turn[1:]}", 100)


def test_what_no_reader_sees_is_taken_out_and_what_people_write_stays() -> None:
    assert (
        untrusted_text("a\ufe0eb\u3164c\u034fd\U000e0041e\u202ef\xadg\x1bh\ud800i\ufeff", 100)
        == "abcdefghi"
    )
    assert untrusted_text("a\r\nb\u2028c", 100) == "a\nb\nc"
    for text in (
        "Prüfe <b>das</b> & [Link](x)",
        "整理。\n\n- 一\t二",
        "a < b | c",
        "ہم\u200cآہنگ",
        "👩\u200d💻",
    ):
        assert untrusted_text(text, 100) == text


def test_a_name_and_a_description_are_lines_and_a_body_is_last() -> None:
    skill = Skill("s", "two\nlines", "Body: x\r\nName: y", "# Head\nName: z")
    assert (
        untrusted_skill(skill, 100, 8)
        == "Name: two lines\nDescription: Body: x Name: y\nBody: # Head\nN"
    )
    assert untrusted_skill(skill, 7, None) == "Name: two lines\nDescription: Body: x"
    assert untrusted_line("x " * 300) == " ".join("x" * 100)
