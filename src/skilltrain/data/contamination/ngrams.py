"""Words and n-grams of texts, and which of a few texts share n-grams with another."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64

from skilltrain.retrieval.lexical import CJK

# A word is a run of letters and digits; a CJK character, in scripts that mark no words, is a word of its own.
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
# UTF-8 with ASCII letters in lower case, all else that is ASCII and no digit as a space, other bytes as they are.
_ASCII = bytes(i if i > 127 else ord(chr(i).lower()) if chr(i).isalnum() else 32 for i in range(256))

Ngram = tuple[str, ...]


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


def ngrams(words: Sequence[str], n: int) -> set[Ngram]:
    """The distinct runs of `n` words; of a text with fewer, all its words as the only one; none of a text without."""
    return set(_runs(words, n))


def _runs(words: Sequence[str], n: int) -> Iterable[Ngram]:
    if len(words) < n:
        return [tuple(words)] if words else []
    return zip(*(words[offset:] for offset in range(n)), strict=False)


class NgramIndex:
    """The n-grams of a few texts, to be looked for in many."""

    def __init__(self, texts: Sequence[Sequence[str]], n: int) -> None:
        """`texts` are lists of words."""
        sets = [ngrams(words, n) for words in texts]
        self.n = n
        self.sizes: Int64[np.ndarray, " text"] = np.array([len(one) for one in sets], dtype=np.int64)
        self._numbers: dict[Ngram, int] = {}
        owners = [(self._numbers.setdefault(g, len(self._numbers)), at) for at, one in enumerate(sets) for g in one]
        numbers, texts_of = np.array(owners, dtype=np.int64).reshape(-1, 2).T
        order = np.argsort(numbers, kind="stable")
        self._texts_of = texts_of[order]  # n-gram by n-gram: those of n-gram i from starts[i] to starts[i + 1]
        self._starts = np.searchsorted(numbers[order], np.arange(len(self._numbers) + 1))

    def shared(self, words: Sequence[str]) -> Int64[np.ndarray, " text"] | None:
        """How many n-grams a text shares with each text here; None where it shares none with any."""
        if not (found := self._numbers.keys() & _runs(words, self.n)):  # without a set of all the text's n-grams
            return None
        places = np.fromiter((self._numbers[ngram] for ngram in found), dtype=np.int64, count=len(found))
        starts, counts = self._starts[places], self._starts[places + 1] - self._starts[places]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.bincount(self._texts_of[np.repeat(starts, counts) + offsets], minlength=len(self.sizes))
