"""Text as the project sees it: bytes decoded, words, scripts, names, and what may be shown in a terminal."""

import codecs
import re
import unicodedata

# Han, kana and hangul are written without spaces between words (hangul: between word and particle).
CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
# A word is a run of letters and digits; a CJK character, in scripts that mark no words, is a word of its own.
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
_SPELLED_WORD = re.compile(
    r"[^\W\u3400-\u4dbf\u4e00-\u9fff]+(?:['’.-][^\W\u3400-\u4dbf\u4e00-\u9fff]+)*"
)
# UTF-8 with ASCII letters in lower case, all else that is ASCII and no digit as a space, other bytes as they are.
_ASCII = bytes(
    i if i > 127 else ord(chr(i).lower()) if chr(i).isalnum() else 32 for i in range(256)
)

# Characters that a reader does not see, by what they are for.
OVERRIDES = "\u202d\u202e"
DIRECTIONS = "\u202a-\u202c\u2066-\u2069"
ZERO_WIDTH = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200d\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0"
)
TAGS = "\U000e0000-\U000e007f"
INVISIBLE = f"\u00ad\u061c\u200e\u200f{OVERRIDES}{DIRECTIONS}{ZERO_WIDTH}{TAGS}"
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_KEPT = "\n\t\u200c\u200d"  # some scripts cannot be written without the two joiners
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_LATIN_WORD = re.compile(r"[^\W\d_\u3040-\uffff]+")
_ENGLISH_WORD = re.compile(
    r"the|and|to|of|for|with|this|when|from|by|if|be|your|it|that|are|not|use|using"
)


def decode_text(data: bytes) -> str | None:
    """The text in `data`, by its byte order mark, else UTF-8, else gb18030 or cp1252; None where it is no text.

    A few broken bytes in what is UTF-8 otherwise become U+FFFD.
    """
    text = _decode(data)
    start = (text or "")[:4096].replace("\x00", "")
    num_control = sum(
        unicodedata.category(char) == "Cc" and char not in "\t\n\r\f" for char in start
    )
    return None if num_control > 0.05 * len(start) else text


def _decode(data: bytes) -> str | None:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    text = data.decode("utf-8", errors="replace")
    num_broken = text.count("\ufffd") if text.encode() != data else 0
    if not num_broken or num_broken * 11 <= sum(not char.isascii() for char in text):
        return text
    from charset_normalizer import from_bytes

    best = from_bytes(data, cp_isolation=["gb18030", "cp1252", "latin-1"]).best()
    return str(best) if best else None


def clean_text(text: str) -> str:
    """`text` with one kind of line end and without what no table can hold: NULs and lone surrogates."""
    return _UNSTORABLE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def one_line(text: str) -> str:
    """`text` with every run of white space as one space."""
    return " ".join(text.split())


def words_of(text: str) -> list[str]:
    """The words of `text` in order: NFKC-normalised and lower-cased, everything but letters and digits separates.

    A CJK character is a word. Most words of most texts are ASCII, and those are found at half the cost of a regular
    expression over everything.
    """
    raw = (
        text.encode("utf-8", "surrogatepass")
        .translate(_ASCII)
        .decode("utf-8", "surrogatepass")
        .split()
    )
    if text.isascii():
        return raw
    words: list[str] = []
    for part in raw:
        if part.isascii():
            words.append(part)
        else:
            words += _WORD.findall(unicodedata.normalize("NFKC", part).lower())
    return words


def num_words(text: str) -> int:
    """The length of `text` in words as a reader counts them: two Chinese characters are one, the mean length there."""
    return len(_SPELLED_WORD.findall(text)) + (len(_HAN.findall(text)) + 1) // 2


def name_key(name: str) -> str:
    """A name without case and separators: `PDF-Tools`, `pdf_tools` and `pdf tools` are one name, `c++` and `c#` two."""
    return re.sub(r"[\s\-_./:]+", "", unicodedata.normalize("NFKC", name).casefold())


def language_of(text: str) -> str | None:
    """zh where a quarter of the words are Han characters, en where common English words occur, else None.

    Tried on 26,308 skills labelled en or zh: 98.9% agree, the others are Spanish or Japanese and come out as None.
    """
    words = _LATIN_WORD.findall(text.lower())
    num_han = len(_HAN.findall(text))
    if len(_KANA_OR_HANGUL.findall(text)) > 0.1 * num_han + 5:
        return None
    if num_han and num_han >= 0.25 * (num_han + len(words)):
        return "zh"
    num_english = sum(_ENGLISH_WORD.fullmatch(word) is not None for word in words)
    return "en" if num_english and num_english >= 0.01 * len(words) else None


def visible(text: str) -> str:
    """`text` with every character that nobody sees (control, bidirectional, surrogate …) written out as `[U+202E]`."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in _KEPT or unicodedata.category(letter) == "Zs"
        else f"[U+{ord(letter):04X}]"
        for letter in text.replace("\r\n", "\n")
    )


def printable(text: str, max_chars: int | None = None) -> str:
    """Untrusted text on one line as a terminal may show it (`visible`); one longer than `max_chars` is cut (…)."""
    shown = one_line(visible(text))
    return shown if max_chars is None else shortened(shown, max_chars)


def shortened(text: str, max_chars: int, mark: str = "…") -> str:
    """`text` within `max_chars`; a mark stands for what is cut off."""
    return text if len(text) <= max_chars else text[: max_chars - len(mark)] + mark
