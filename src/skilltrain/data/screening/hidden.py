"""Find text that a reader does not see or that is not what it looks like.

These are invisible characters ("Trojan Source", CVE-2021-42574), words that mix letters of two
scripts, and lists of keywords that are unrelated to the skill.
"""

import re
import unicodedata
from collections import Counter

from skilltrain.data.screening.normalize import NormalizedText, Spans
from skilltrain.texts import DIRECTIONS, OVERRIDES, TAGS, ZERO_WIDTH, language_of

# One or two words between separators such as commas, bars and line ends.
_LIST_ITEM = re.compile(
    r"(?:^|[,;|、，\n:])\s{0,3}(?P<item>[\w+#./&'-]{2,24}(?:\s[\w+#./&'-]{2,16})?)"
    r"(?=\s{0,2}(?:[,;|、，.\n]|$))"
)
_MIN_LIST_ITEMS = 30
_MIN_UNRELATED_SHARE = 0.75  # share of list items that the body does not mention
_MIN_REPEATS = 8
_MIN_REPEATED_SHARE = 0.5  # share of the description's words that are the same word

_VARIATION_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_TWO_SELECTORS = re.compile(f"[{_VARIATION_SELECTORS}]{{2}}")
_INVISIBLE_RUN = re.compile(
    f"(?P<override>[{OVERRIDES}]+)"
    f"|(?P<direction>[{DIRECTIONS}]+)"
    f"|(?P<joiner>[{ZERO_WIDTH}]+)"
    f"|(?P<tag>[{TAGS}]+)"
    f"|(?P<selector>[{_VARIATION_SELECTORS}]{{2,}})"
)
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_BLACK_FLAG = "\U0001f3f4"  # begins the emoji of a regional flag
_FLAG_TAGS = re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]{2,6}\U000e007f")
_MAX_JOINERS = 2  # a longer run is not a typing error
_MAX_SELECTORS = 2
_DIRECTION_CONTEXT_CHARS = 400


def find_keyword_stuffing(text: NormalizedText) -> Spans:
    """Find keywords in a description that make the router select the skill for any task.

    They are a long list of words that the body does not mention, or one word again and again.

    Args:
        text: A description, with the skill that it belongs to.

    Yields:
        Spans of the keywords in the normalised description.
    """
    description = text.normalized
    body = text.skill.body.lower() if text.skill else ""
    spans = [*_unrelated_list(description, body), *_repeated_word(description)]

    # A description in another language than the body shares no words with it anyway.
    if spans and language_of(description) == language_of(body):
        yield from spans


def _unrelated_list(description: str, body: str) -> Spans:
    """Yield the span of the list items if there are many and the body mentions few of them."""
    items = list(_LIST_ITEM.finditer(description))
    words = [match["item"] for match in items]
    unrelated = [word for word in words if word.isascii() and word not in body]
    is_list = len(items) >= _MIN_LIST_ITEMS
    if is_list and len(unrelated) >= _MIN_UNRELATED_SHARE * len(items):
        yield items[0].start("item"), items[-1].end("item")


def _repeated_word(description: str) -> Spans:
    """Yield the span from the most common word to the end, if most words are this word."""
    words = re.findall(r"[a-z]{4,20}", description) if description.isascii() else []
    singulars = (word.rstrip("s") for word in words)
    for word, count in Counter(singulars).most_common(1):
        if count >= _MIN_REPEATS and count > _MIN_REPEATED_SHARE * len(words):
            yield description.find(word), len(description)


def find_hidden_characters(text: NormalizedText) -> Spans:
    """Find invisible characters in the original text that no script or emoji needs."""
    original = text.original
    if original.isascii():
        return
    if text.offsets is None and not _TWO_SELECTORS.search(original):
        return  # no character was removed, so only selectors could be found
    for run in _INVISIBLE_RUN.finditer(original):
        if not _is_legitimate(original, run):
            yield run.span()


def _is_legitimate(text: str, run: re.Match[str]) -> bool:
    """Return whether a run of invisible characters has a common use at its position in `text`.

    Args:
        text: The original text.
        run: Match of `_INVISIBLE_RUN`. Its group says the kind of characters.
    """
    characters = run[0]
    # The characters beside the run. They are empty at the ends of the text.
    previous = text[max(0, run.start() - 1) : run.start()]
    following = text[run.end() : run.end() + 1]
    # A lesson about invisible characters may show one, after its number: `U+202E`.
    if len(characters) == 1 and _is_explained(text, run):
        return True
    match run.lastgroup:
        case "joiner":
            # Emojis and some scripts need joiners. Between Latin letters they only split a word.
            splits_word = all(map(_is_written_without_joiners, (previous, following)))
            return len(characters) <= _MAX_JOINERS and not splits_word
        case "direction":
            return _is_near_right_to_left_letters(text, run)
        case "tag":
            # A regional flag is the emoji of a black flag with tags.
            return previous == _BLACK_FLAG and bool(_FLAG_TAGS.fullmatch(characters))
        case "selector":
            # A run has at least two selectors. Two in a row may be a slip, such as a repeated
            # emoji selector U+FE0F. Selectors above U+FFFF choose a variant of a Han character. A
            # Han character takes only one selector, so a run that ends in one is not a slip.
            return len(characters) <= _MAX_SELECTORS and ord(characters[-1]) <= 0xFFFF
        case _:
            return False  # direction overrides have no common use


def _is_written_without_joiners(character: str) -> bool:
    """Return whether a character belongs to a script that writes its words without joiners."""
    if not character or not character.isalnum():
        return False
    if character.isascii():
        return True
    return unicodedata.name(character, "").startswith(("LATIN", "GREEK", "CYRILLIC"))


def _is_explained(text: str, run: re.Match[str]) -> bool:
    """Return whether the text before a character states its number, as a lesson does: `U+202E`."""
    window_start = max(0, run.start() - _DIRECTION_CONTEXT_CHARS)
    return f"u+{ord(run[0]):04x}" in text[window_start : run.start()].lower()


def _is_near_right_to_left_letters(text: str, run: re.Match[str]) -> bool:
    """Return whether right-to-left letters precede a run in its line, or follow it."""
    window_start = max(0, run.start() - _DIRECTION_CONTEXT_CHARS)
    line_start = max(text.rfind("\n", window_start, run.start()), window_start)
    return bool(_RIGHT_TO_LEFT.search(text, line_start, run.end() + _DIRECTION_CONTEXT_CHARS))


def find_disguised_words(text: NormalizedText) -> Spans:
    """Find words that mix letters of two scripts. A single one may be a typing error."""
    if len(text.mixed_words) > 1:
        yield from text.mixed_words
