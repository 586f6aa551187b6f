"""Untrusted texts in a prompt, disarmed so that they do not steer the model (prompt injection).

Each part is between lines with a mark made of a digest of all texts. No text can hold the mark,
close its part or open a false one. Tokens that end a turn are broken. A model may still believe
what it reads.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE

_NAME_CHARS = 200
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# Invisible characters (but for the joiners that scripts and emoji need), controls, lone surrogates,
# and the tags and variation selectors in which whole sentences can be hidden.
_UNSEEN = re.compile(
    f"(?![\u200c\u200d])[{INVISIBLE}\x00-\x08\x0e-\x1f\x7f-\x9f\u180b-\u180f\ud800-\udfff"
    "\ufe00-\ufe0f\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_TURN = re.compile(
    r"<(?=[|｜]|/?(?:s|think|bos|eos|pad|unk)>|(?:start|end)_of_turn>|</?SYS>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT)\])",
    re.I,
)


def untrusted_text(text: str, max_chars: int) -> str:
    """Remove invisible characters from a text and break tokens that end a turn."""
    lines = _LINE_ENDS.sub("\n", text[:max_chars])
    return _TURN.sub(r"\g<0> ", _UNSEEN.sub("", lines)).strip()


def untrusted_line(text: str, max_chars: int = _NAME_CHARS) -> str:
    """Disarm a text and put it on one line."""
    return " ".join(untrusted_text(text, max_chars).split())


def untrusted_skill(skill: Skill, description_chars: int, body_chars: int | None) -> str:
    """Render a skill in the paper's three lines, without body if `body_chars` is None."""
    name = untrusted_line(skill.name)
    description = untrusted_line(skill.description, description_chars)
    lines = f"Name: {name}\nDescription: {description}"
    if body_chars is None:
        return lines
    return f"{lines}\nBody: {untrusted_text(skill.body, body_chars)}"


def mark_of(texts: Iterable[str]) -> str:
    """Return the start of a line that occurs in none of `texts`; equal texts give equal marks."""
    joined = "\x00".join(texts)
    digest = hashlib.sha256(joined.encode()).hexdigest()[:12]
    while digest in joined:  # practically impossible
        digest = hashlib.sha256(digest.encode()).hexdigest()[:12]
    return f"=== {digest}"


def fenced(text: str) -> str:
    """Put an untrusted text between two lines with the same mark."""
    return framed([("===", text)], "===")[1]


def framed(parts: Sequence[tuple[str, str]], end: str) -> tuple[str, str]:
    """Join untrusted texts, each below a line with a mark and its title.

    Args:
        parts: Titles and texts.
        end: Title of the closing line.

    Returns:
        The mark and the joined text.
    """
    mark = mark_of(text for _, text in parts)
    sections = [f"{mark} {title}\n{text}" for title, text in parts]
    return mark, "\n".join([*sections, f"{mark} {end}"])
