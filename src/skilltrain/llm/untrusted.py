"""Untrusted texts in a prompt, and what keeps them from steering the model (prompt injection).

Each part is between lines with a mark made of a digest of all texts, so that no text can hold the mark, close its part
or open a false one; tokens that end a turn are broken. A model may still believe what it reads.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE

_NAME_CHARS = 200
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# What is invisible (but for the joiners that scripts and emoji need), controls, lone surrogates, and the tags and
# variation selectors in which whole sentences can be hidden.
_UNSEEN = re.compile(
    f"(?![\u200c\u200d])[{INVISIBLE}\x00-\x08\x0e-\x1f\x7f-\x9f\u180b-\u180f\ud800-\udfff\ufe00-\ufe0f\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)
_TURN = re.compile(
    r"<(?=[|｜]|/?(?:s|think|bos|eos|pad|unk)>|(?:start|end)_of_turn>|</?SYS>)|\[(?=/?(?:INST|SYSTEM_PROMPT)\])",
    re.I,
)


def untrusted_text(text: str, max_chars: int) -> str:
    """The first `max_chars` of a text, fit for a prompt: invisible characters removed, ends of turns broken."""
    return _TURN.sub(r"\g<0> ", _UNSEEN.sub("", _LINE_ENDS.sub("\n", text[:max_chars]))).strip()


def untrusted_line(text: str, max_chars: int = _NAME_CHARS) -> str:
    """As `untrusted_text`, on one line."""
    return " ".join(untrusted_text(text, max_chars).split())


def untrusted_skill(skill: Skill, description_chars: int, body_chars: int | None) -> str:
    """What a model sees of a skill: name, description and body, in the paper's three lines; None: no body."""
    lines = f"Name: {untrusted_line(skill.name)}\nDescription: {untrusted_line(skill.description, description_chars)}"
    return (
        lines if body_chars is None else f"{lines}\nBody: {untrusted_text(skill.body, body_chars)}"
    )


def mark_of(texts: Iterable[str]) -> str:
    """The beginning of a line that can stand in none of `texts`, made of their digest: the same for the same texts."""
    joined = "\x00".join(texts)
    digest = hashlib.sha256(joined.encode()).hexdigest()[:12]
    while digest in joined:  # as good as impossible
        digest = hashlib.sha256(digest.encode()).hexdigest()[:12]
    return f"=== {digest}"


def fenced(text: str) -> str:
    """An untrusted text between two lines that hold the same mark."""
    return framed([("===", text)], "===")[1]


def framed(parts: Sequence[tuple[str, str]], end: str) -> tuple[str, str]:
    """(the mark, one text of all parts): each (title, untrusted text) below a line of mark and title; `end` closes."""
    mark = mark_of(text for _, text in parts)
    return mark, "\n".join([*(f"{mark} {title}\n{text}" for title, text in parts), f"{mark} {end}"])
