"""Characters that a person does not see, and marks that reverse what he reads (CVE-2021-42574, "Trojan Source").

Legitimate uses are let pass: a byte order mark, joiners inside emoji and inside words of scripts that need them,
direction marks in lines with right-to-left letters, a variation selector after what it varies, the flags of England,
Scotland and Wales, single zero-width spaces outside words (editors leave them before code fences), soft hyphens.
"""

import re
import unicodedata

from skilltrain.data.screening.reading import Reading, Rule, Spans
from skilltrain.texts import DIRECTIONS, OVERRIDES, TAGS, ZERO_WIDTH

_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_RUN = re.compile(
    f"(?P<override>[{OVERRIDES}]+)|(?P<direction>[{DIRECTIONS}]+)|(?P<joiner>[{ZERO_WIDTH}]+)|(?P<tag>[{TAGS}]+)"
    f"|(?P<selector>[{_SELECTORS}]{{2,}})"
)
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_FLAG = re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]{2,6}\U000e007f")
_MOST_JOINERS = 2  # a longer run is no typing error


def _find_hidden(reading: Reading, field: str) -> Spans:
    if reading.text.isascii():
        return
    for found in _RUN.finditer(reading.text):
        if _is_hidden(reading.text, found):
            yield found.start(), found.end()


def _is_hidden(text: str, found: re.Match[str]) -> bool:
    """Whether a run of such characters is none of the legitimate uses."""
    run, start, end = found[0], found.start(), found.end()
    if found.lastgroup == "joiner":
        return len(run) > _MOST_JOINERS or _joins_plain_words(text[start - 1 : start], text[end : end + 1])
    if found.lastgroup == "direction":
        line_start = max(text.rfind("\n", max(0, start - 400), start), start - 400, 0)
        return _RIGHT_TO_LEFT.search(text, line_start, end + 400) is None
    if found.lastgroup == "tag":
        return not (text[start - 1 : start] == "\U0001f3f4" and _FLAG.fullmatch(run))
    if found.lastgroup == "selector":
        return len(run) > 2 or ord(run[-1]) > 0xFFFF
    return True


def _joins_plain_words(before: str, after: str) -> bool:
    """Whether both neighbours are letters of a script that writes its words without joiners."""
    return _is_plain_letter(before) and _is_plain_letter(after)


def _is_plain_letter(letter: str) -> bool:
    if not letter or not letter.isalnum():
        return False
    return letter.isascii() or unicodedata.name(letter, "").startswith(("LATIN", "GREEK", "CYRILLIC"))


HIDDEN_TEXT = Rule(
    "hidden_text",
    "holds characters that a reader does not see, or that reverse what he reads",
    (),
    _find_hidden,
)
