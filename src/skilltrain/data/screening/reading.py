"""What a rule is and what it reads: a text as a person or a shell would, disguises taken off, places known."""

import html
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skilltrain.texts import INVISIBLE

_ENTITY = r"&(?:#\d{1,7}|#x[0-9a-f]{1,6}|[a-z]{2,8});"
_CONTINUED_LINE = r"\\\n"
_DISGUISE = re.compile(f"{_ENTITY}|{_CONTINUED_LINE}|[{INVISIBLE}]+")
_DISGUISE_ASCII = re.compile(f"{_ENTITY}|{_CONTINUED_LINE}")
_FULL_WIDTH = re.compile("[\uff01-\uff5e\u3000\u00a0\u2002-\u200a\u202f]")
_SPACES = dict.fromkeys((0x3000, 0xA0, 0x202F, *range(0x2002, 0x200B)), " ")
_TO_HALF_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | _SPACES
_OPENING_QUOTES = "\"'`“‘「『«"
_PAIRS = (("“", "”"), ("「", "」"), ("『", "』"), ("«", "»"))
_REPORTED = re.compile(
    r"(?:\b(?:like|such as|including|say(?:s|ing)?|detect(?:s|ing|ion of)?|never|not|or)|e\.g\.,?|/scan"
    r"|\b(?:ask|tell|instruct|order|trick|urge|attempt|tr[yi]|want|design|intend|need|request)[a-z]{0,4}"
    r"(?: (?:you|it|them|the (?:agent|model|assistant|ai|llm)))?(?: to(?: [^.!?\n]{0,60})?)?"
    r"|\binstructions? to(?: [^.!?\n]{0,60})?|例如|比如|诸如|试图|要求你?|尝试|检测)[\s:,]{0,3}$",
    re.ASCII,
)
_OF_ATTACKS = re.compile(
    r"attack|inject|malicious|jailbreak|block|detect|scan|\btr(?:y|ies)\b|threat|suspicious|adversarial|攻击|注入|恶意|检测"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """`text` as written, and `plain`: lower case, half-width, HTML entities resolved, invisible characters and broken
    shell lines (backslash, line end) taken out. `origins[i]` is where `plain[i]` stands in `text`; None: the same.
    """

    text: str
    plain: str
    origins: array | None

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where `plain[start:end]` stands in `text`."""
        if self.origins is None or start >= end:
            return start, end
        return self.origins[start], self.origins[end - 1] + 1

    def around(self, start: int, end: int, width: int) -> str:
        """`plain[start:end]` with `width` characters on either side."""
        return self.plain[max(0, start - width) : end + width]

    def line_before(self, start: int, width: int) -> str:
        """What stands before `start` in its line, at most `width` characters."""
        return self.plain[max(self.plain.rfind("\n", max(0, start - width), start) + 1, start - width, 0) : start]


Spans = Iterator[tuple[int, int]]
"""(start, end) in the text as written."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One finding: `text[start:end]` of the skill's `field` is what `rule` is about.

    `span` is that text (of a secret only its beginning), at most 400 characters of it.
    """

    rule: str
    field: str
    start: int
    end: int
    span: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """A named check. `find` gives the spans in a field's text, in order.

    `show` makes of a span what the flag says.
    `hints` are lower-case texts of which every find holds at least one: most skills hold none and are done with.
    """

    name: str
    reason: str
    hints: tuple[str, ...]
    find: Callable[[Reading, str], Spans]
    show: Callable[[str], str] = str


def read_text(text: str) -> Reading:
    """`text` with its plain form, in time linear in its length."""
    plain = _lower(text)
    pattern = _DISGUISE_ASCII if text.isascii() else _DISGUISE
    if not text.isascii() and _FULL_WIDTH.search(plain):
        plain = plain.translate(_TO_HALF_WIDTH)
    if pattern.search(plain) is None:
        return Reading(text, plain, None)
    parts: list[str] = []
    origins = array("l")
    done = 0
    for found in pattern.finditer(plain):
        shown = html.unescape(found[0]).lower() if found[0][0] == "&" else ""
        if len(shown) > 1:
            continue  # no entity, or one that stands for two letters
        parts += (plain[done : found.start()], shown)
        origins.extend(range(done, found.start()))
        origins.extend([found.start()] * len(shown))
        done = found.end()
    parts.append(plain[done:])
    origins.extend(range(done, len(plain)))
    return Reading(text, "".join(parts), origins)


def _lower(text: str) -> str:
    """`text` in lower case, as long as before: a letter that would become two stays."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def windows(anchor: re.Pattern[str], plain: str, reach: int) -> Iterator[tuple[int, int]]:
    """Stretches of `plain` within `reach` characters of an `anchor`, in order and never overlapping."""
    start = end = -1
    for found in anchor.finditer(plain):
        if found.start() - reach > end:
            if end > 0:
                yield start, end
            start = max(0, found.start() - reach)
        end = found.end() + reach
    if end > 0:
        yield start, min(end, len(plain))


def is_quoted(reading: Reading, start: int) -> bool:
    """Whether a phrase at `start` of the plain text is cited, not said: in quotes or code, or after "such as", "asks
    you to", "never". It is how a skill that warns of an attack differs from the attack; an attacker who quotes his own
    order hides it from this check, and from many models too.
    """
    before = reading.line_before(start, 300)
    if before.rstrip(" *_-❌✗>")[-1:] in tuple(_OPENING_QUOTES):
        return True
    if before.count('"') % 2 or before.count("`") % 2 or _in_sample(reading.plain[max(0, start - 500) : start]):
        return True
    return any(before.count(left) > before.count(right) for left, right in _PAIRS) or bool(_REPORTED.search(before))


def _in_sample(before: str) -> bool:
    """Whether `before` ends inside a code block that words on attacks introduce."""
    parts = before.split("```")
    return len(parts) % 2 == 0 and bool(_OF_ATTACKS.search(parts[-2][-200:]))
