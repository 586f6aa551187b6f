"""N-grams of texts, and which of a few texts share n-grams with another."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64

Ngram = tuple[str, ...]


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
