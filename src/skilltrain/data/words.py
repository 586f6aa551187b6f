"""The words of a text, by which bodies and queries are compared."""

import re
import unicodedata

from skilltrain.retrieval.lexical import CJK

# A word is a run of letters and digits; a CJK character, in scripts that mark no words, is a word of its own.
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
# UTF-8 with ASCII letters in lower case, all else that is ASCII and no digit as a space, other bytes as they are.
_ASCII = bytes(i if i > 127 else ord(chr(i).lower()) if chr(i).isalnum() else 32 for i in range(256))


def words_of(text: str) -> list[str]:
    """The words of `text` in order: NFKC-normalised and lower-cased, everything but letters and digits separates.

    A CJK character is a word. Most words of most texts are ASCII, and those are found at half the cost of a regular
    expression over everything.
    """
    raw = text.encode("utf-8", "surrogatepass").translate(_ASCII).decode("utf-8", "surrogatepass").split()
    if text.isascii():
        return raw
    words: list[str] = []
    for part in raw:
        if part.isascii():
            words.append(part)
        else:
            words += _WORD.findall(unicodedata.normalize("NFKC", part).lower())
    return words
