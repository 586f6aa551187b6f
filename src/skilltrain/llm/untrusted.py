"""Put untrusted texts into a prompt so that they do not steer the model (prompt injection).

Every text is between two lines with a mark. The mark is a digest of all texts, so no text can
contain it. Therefore no text can end early, or pretend that another text begins. Tokens that end a
turn are broken up. A model may still believe what it reads.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE

MAX_LINE_CHARS = 200
"""Longest name of a skill in a prompt, in characters."""
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# Invisible characters (except the joiners that scripts and emoji need), control characters, lone
# surrogates, and the tags and variation selectors that can hide whole sentences.
_INVISIBLE = re.compile(
    f"(?![\u200c\u200d])[{INVISIBLE}\x00-\x08\x0e-\x1f\x7f-\x9f\u180b-\u180f\ud800-\udfff"
    "\ufe00-\ufe0f\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# Beginnings of the tokens that chat templates put between turns: `<|im_end|>`, `</s>`, `[INST]`.
_TURN_TOKEN = re.compile(
    r"<(?=[|｜]|/?(?:s|think|bos|eos|pad|unk)>|(?:start|end)_of_turn>|</?SYS>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT)\])",
    re.I,
)


def untrusted_text(text: str, max_chars: int) -> str:
    """Cut a text, remove its invisible characters, and break up tokens that end a turn."""
    lines = _LINE_ENDS.sub("\n", text[:max_chars])
    return _TURN_TOKEN.sub(r"\g<0> ", _INVISIBLE.sub("", lines)).strip()


def untrusted_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """Make a text safe like `untrusted_text`, and put it on one line."""
    return " ".join(untrusted_text(text, max_chars).split())


def untrusted_skill(skill: Skill, description_chars: int, body_chars: int | None) -> str:
    """Return the untrusted text of a skill, in lines `Name:`, `Description:` and `Body:`.

    Args:
        skill: The skill.
        description_chars: Longest description, in characters.
        body_chars: Longest body, in characters. None: there is no line `Body:`.
    """
    name = untrusted_line(skill.name)
    description = untrusted_line(skill.description, description_chars)
    lines = f"Name: {name}\nDescription: {description}"
    if body_chars is None:
        return lines
    return f"{lines}\nBody: {untrusted_text(skill.body, body_chars)}"


def mark_of(texts: Iterable[str]) -> str:
    """Return a mark that occurs in none of `texts`. Equal texts have equal marks."""
    joined = "\x00".join(texts)
    digest = hashlib.sha256(joined.encode()).hexdigest()[:12]
    while digest in joined:  # practically impossible
        digest = hashlib.sha256(digest.encode()).hexdigest()[:12]
    return f"=== {digest}"


def fenced(text: str) -> str:
    """Put an untrusted text between two lines with the same mark."""
    _, fenced_text = framed([("===", text)], "===")
    return fenced_text


def framed(titled_texts: Sequence[tuple[str, str]], end: str) -> tuple[str, str]:
    """Join untrusted texts. Above each text is a line with the mark and the title of the text.

    Args:
        titled_texts: Pairs of title and text.
        end: Title of the last line.

    Returns:
        The mark and the joined text.
    """
    mark = mark_of(text for _, text in titled_texts)
    sections = [f"{mark} {title}\n{text}" for title, text in titled_texts]
    return mark, "\n".join([*sections, f"{mark} {end}"])
