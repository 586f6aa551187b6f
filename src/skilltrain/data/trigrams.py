"""Skill bodies as sets of word trigrams: of one text, and of a whole pool."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from skilltrain.texts import words_of
from skilltrain.workers import WorkersConfig, map_blocks

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_BLOCK = 512  # bodies that a worker reads at once

Trigrams = UInt64[np.ndarray, " trigram"]
Positions = Int64[np.ndarray, " position"]


@lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def word_trigrams(text: str) -> Trigrams:
    """The sorted distinct word trigrams of `text`, as 64-bit hashes.

    SkillRouter (section 4.2) says "trigram" and not of what. Words, because character trigrams of a language are
    few and shared by all long texts in it (two unrelated 10,000-character bodies already reach a third), which
    would make the threshold depend on length; words also survive a change of layout. Text is NFKC-normalised and
    lower-cased, everything but letters and digits separates words. A text of one or two words is one "trigram".
    Among 10^8 trigrams of a pool a collision is possible, within two bodies it is not in practice (10^-11).
    """
    words = words_of(text)
    numbers = np.fromiter(map(_word_hash, words), dtype=np.uint64, count=len(words))
    width = min(3, len(numbers))
    if not width:
        return numbers
    mixed = np.zeros(len(numbers) - width + 1, dtype=np.uint64)
    for offset in range(width):
        # Multiplying by odd constants modulo 2^64 tells the order of the words apart; the shift spreads high bits.
        part = (numbers[offset : offset + len(mixed)] + np.uint64(offset)) * _MIX[offset]
        mixed = (mixed ^ (part ^ (part >> np.uint64(29)))) * _MIX[0]
    mixed.sort()
    return mixed[np.concatenate([[True], mixed[1:] != mixed[:-1]])]


def jaccard(left: Trigrams, right: Trigrams) -> float:
    """Shared over all trigrams of two sets, between 0 and 1; 0 where one is empty, for nothing shows a likeness."""
    if not len(left) or not len(right):
        return 0.0
    both = np.concatenate([left, right])
    both.sort()
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared)


def numbered(values: Iterable[str]) -> Positions:
    """A number for each value, equal ones alike; -1 for an empty one."""
    numbers = {"": -1}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


@dataclass(frozen=True)
class TrigramSets:
    """The trigram sets of a pool, one after the other in one array; a position is a skill's place in the pool."""

    trigrams: Trigrams
    starts: Int64[np.ndarray, " boundary"]

    @classmethod
    def of(cls, bodies: Sequence[str], workers: WorkersConfig) -> "TrigramSets":
        """The sets of `bodies`, read by `workers`."""
        blocks = [bodies[start : start + _BLOCK] for start in range(0, len(bodies), _BLOCK)]
        found = list(map_blocks(_read_block, blocks, workers, "reading bodies"))
        starts = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *(sizes for sizes, _ in found)]))
        return cls(np.concatenate([np.zeros(0, dtype=np.uint64), *(trigrams for _, trigrams in found)]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, position: int) -> Trigrams:
        """The sorted distinct trigrams of one skill."""
        return self.trigrams[self.starts[position] : self.starts[position + 1]]

    @property
    def sizes(self) -> Positions:
        """The number of trigrams of each skill."""
        return np.diff(self.starts)

    def without_templates(self, names: Positions, max_names: int) -> "TrigramSets":
        """These sets without the trigrams that stand under more than `max_names` different names.

        Many skills are filled into one template ("Automate … tasks via Rube MCP"): they share most of their trigrams
        and not their function. Copies of one skill share as much, but under one name, or under few. So a trigram is
        counted by the distinct `names` (one number per skill) of the skills that hold it.
        """
        keep = ~self._of_templates(names, max_names)
        kept_before = np.concatenate([[0], np.cumsum(keep)])
        return TrigramSets(self.trigrams[keep], kept_before[self.starts])

    def _of_templates(self, names: Positions, max_names: int) -> Bool[np.ndarray, " trigram"]:
        result = np.zeros(len(self.trigrams), dtype=bool)
        ordered = np.sort(self.trigrams)  # only a trigram of many skills can stand under many names
        frequent = np.unique(ordered[max_names:][ordered[max_names:] == ordered[: len(ordered) - max_names]])
        if len(frequent):
            numbers = np.minimum(np.searchsorted(frequent, self.trigrams), len(frequent) - 1)
            places = np.flatnonzero(frequent[numbers] == self.trigrams)
            owners = names[np.searchsorted(self.starts, places, side="right") - 1]
            pairs = np.unique(np.stack([numbers[places], owners]), axis=1)
            is_template = np.bincount(pairs[0], minlength=len(frequent)) > max_names
            result[places[is_template[numbers[places]]]] = True
        return result


def _read_block(bodies: Sequence[str]) -> tuple[Positions, Trigrams]:
    """Sizes and trigrams of some bodies."""
    sets = [word_trigrams(body) for body in bodies]
    return np.array([len(one) for one in sets], dtype=np.int64), np.concatenate(sets)
