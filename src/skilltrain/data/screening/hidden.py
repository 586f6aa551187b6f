"""What a reader does not see: characters, letters of another script, and keywords that say nothing of the skill.

Hidden characters (CVE-2021-42574, "Trojan Source") are let pass where scripts need them: a byte order mark, joiners
inside emoji and inside words of scripts that join, direction marks in lines with right-to-left letters, a variation
selector after what it varies, flags, single zero-width spaces outside words, soft hyphens.
"""

import re
import unicodedata
from collections import Counter

from skilltrain.data.screening.reading import Reading, Spans
from skilltrain.texts import DIRECTIONS, OVERRIDES, TAGS, ZERO_WIDTH, language_of

_ITEM = re.compile(
    r"(?:^|[,;|、，\n:])\s{0,3}(?P<item>[\w+#./&'-]{2,24}(?:\s[\w+#./&'-]{2,16})?)(?=\s{0,2}(?:[,;|、，.\n]|$))"
)
_MOST_FOREIGN = 0.75


def stuffed(reading: Reading) -> Spans:
    """A long list of keywords that the body knows nothing of, or one word again and again."""
    plain, body = reading.plain, reading.skill.body.lower() if reading.skill else ""
    items = list(_ITEM.finditer(plain))
    foreign = [found for found in items if found["item"].isascii() and found["item"] not in body]
    is_list = len(items) >= 30 and len(foreign) >= _MOST_FOREIGN * len(items)
    words = re.findall(r"[a-z]{4,20}", plain if plain.isascii() else "")
    word, count = (
        Counter(word.rstrip("s") for word in words).most_common(1)[0] if words else ("", 0)
    )
    is_repeated = count >= 8 and count > 0.5 * len(words)
    if not (is_list or is_repeated) or language_of(plain) != language_of(body):
        return
    if is_list:
        yield items[0].start("item"), items[-1].end("item")
    if is_repeated:
        yield plain.find(word), len(plain)


_RUN = re.compile(
    f"(?P<override>[{OVERRIDES}]+)|(?P<direction>[{DIRECTIONS}]+)|(?P<joiner>[{ZERO_WIDTH}]+)|(?P<tag>[{TAGS}]+)"
    "|(?P<selector>[\ufe00-\ufe0f\U000e0100-\U000e01ef]{2,})"
)
_SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]{2}")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_FLAG = re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]{2,6}\U000e007f")
_MOST_JOINERS = 2  # a longer run is no typing error


def hidden_characters(reading: Reading) -> Spans:
    """Places in the text as written: the plain text has none of these characters."""
    any_hidden = reading.origins is not None or _SELECTORS.search(reading.text)
    for found in _RUN.finditer(reading.text) if any_hidden and not reading.text.isascii() else ():
        if _is_hidden(reading.text, found):
            yield found.span()


def _is_hidden(text: str, found: re.Match[str]) -> bool:
    """Whether a run of such characters is none of the legitimate uses."""
    run, start, end = found[0], found.start(), found.end()
    if found.lastgroup == "joiner":
        plain = all(
            _is_plain_letter(letter)
            for letter in (text[max(0, start - 1) : start], text[end : end + 1])
        )
        return len(run) > _MOST_JOINERS or plain
    if found.lastgroup == "direction":
        line_start = max(text.rfind("\n", max(0, start - 400), start), start - 400, 0)
        return _RIGHT_TO_LEFT.search(text, line_start, end + 400) is None
    if found.lastgroup == "tag":
        return not (text[max(0, start - 1) : start] == "\U0001f3f4" and _FLAG.fullmatch(run))
    return found.lastgroup == "override" or len(run) > 2 or ord(run[-1]) > 0xFFFF


def _is_plain_letter(letter: str) -> bool:
    """Whether a letter belongs to a script that writes its words without joiners."""
    if not letter or not letter.isalnum():
        return False
    return letter.isascii() or unicodedata.name(letter, "").startswith(
        ("LATIN", "GREEK", "CYRILLIC")
    )


def disguised_words(reading: Reading) -> Spans:
    """Words with letters of two scripts; one alone may be a typing error."""
    yield from reading.mixed if len(reading.mixed) > 1 else ()
