"""How much two skill bodies say the same, and which skills of a pool are copies of one another."""

import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

import numpy as np
from jaxtyping import UInt64

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.lexical import CJK
from skilltrain.terminal import track

# A word is a run of letters and digits; a CJK character, in scripts that mark no words, is a word of its own.
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)

NUM_PERMUTATIONS = 128
MIN_RECALL = 0.99

Trigrams = UInt64[np.ndarray, " trigram"]


class TrigramReader:
    """Bodies as sets of word trigrams, each skill's read once; the sets that filters and clusters compare.

    SkillRouter (section 4.2) says "trigram" and not of what. Words, because character trigrams of a language are
    few and shared by all long texts in it (two unrelated 10,000-character bodies already reach a third), which
    would make the threshold depend on length; words also survive a change of layout. Text is NFKC-normalised and
    lower-cased, everything but letters and digits separates words. A body of one or two words is one "trigram".
    A trigram is kept as a 64-bit hash, the same in every process; among 10^8 trigrams of a pool a collision is
    possible, within two bodies it is not in practice (10^-11).
    """

    def __init__(self, skills: Sequence[Skill]) -> None:
        self._skills = skills
        self._words: dict[str, int] = {}
        self._sets: dict[int, Trigrams] = {}

    def __getitem__(self, position: int) -> Trigrams:
        """The sorted distinct trigrams of the skill at `position`."""
        if position not in self._sets:
            self._sets[position] = self._read(self._skills[position].body)
        return self._sets[position]

    def _read(self, body: str) -> Trigrams:
        words = _WORD.findall(unicodedata.normalize("NFKC", body).lower())
        hashes = np.fromiter((self._hash(word) for word in words), dtype=np.uint64, count=len(words))
        width = min(3, len(hashes))
        if not width:
            return hashes
        mixed = np.zeros(len(hashes) - width + 1, dtype=np.uint64)
        for offset in range(width):
            # Multiplying by odd constants modulo 2^64 tells the order of the words apart; the shift spreads high bits.
            part = (hashes[offset : offset + len(mixed)] + np.uint64(offset)) * _MIX[offset]
            mixed = (mixed ^ (part ^ (part >> np.uint64(29)))) * _MIX[0]
        return np.unique(mixed)

    def _hash(self, word: str) -> int:
        value = self._words.get(word)
        if value is None:
            value = int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")
            self._words[word] = value
        return value


def jaccard(left: Trigrams, right: Trigrams) -> float:
    """Shared over all trigrams of two sets, between 0 and 1; 0 where one is empty, for nothing shows a likeness."""
    if not len(left) or not len(right):
        return 0.0
    small, large = sorted((left, right), key=len)
    places = np.minimum(np.searchsorted(large, small), len(large) - 1)
    shared = int(np.count_nonzero(large[places] == small))
    return shared / (len(left) + len(right) - shared)


def near_duplicate_clusters(skills: Sequence[Skill], threshold: float) -> dict[str, int]:
    """skill_id → cluster, so that copies of a positive can be told from negatives.

    Two skills are in one cluster where a chain of pairs with a body trigram Jaccard of at least `threshold` links
    them. Pairs are proposed by MinHash LSH (datasketch; finds at least 99% of the pairs at the threshold, more
    above it) and confirmed exactly. A skill without copies is a cluster of one. Clusters are numbered in the order
    of their lowest skill_id, so the answer does not depend on the order of `skills`.
    """
    if not 0 < threshold <= 1:
        raise SkilltrainError(f"the near-duplicate threshold lies above 0 and at most at 1, found {threshold}")
    ordered = sorted(skills, key=lambda skill: skill.skill_id)
    parent = _link(TrigramReader(ordered), len(ordered), threshold)
    roots = [_root(parent, position) for position in range(len(ordered))]
    number = {root: cluster for cluster, root in enumerate(dict.fromkeys(roots))}
    return {skill.skill_id: number[root] for skill, root in zip(ordered, roots, strict=True)}


def _link(trigrams: TrigramReader, num_skills: int, threshold: float) -> list[int]:
    """The union-find parents of all skills; a root is the lowest position of its cluster."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=NUM_PERMUTATIONS, params=bands_and_rows(threshold))
    empty = MinHash(num_perm=NUM_PERMUTATIONS, seed=1, hashfunc=int)
    parent = list(range(num_skills))
    for position in track(range(num_skills), "near-duplicates", num_skills):
        if not len(trigrams[position]):
            continue
        sketch = empty.copy()
        sketch.update_batch(trigrams[position] & np.uint64(0xFFFFFFFF))
        for other in sorted(cast(list[int], index.query(sketch))):
            here, there = _root(parent, position), _root(parent, other)
            # Copies already linked through others need no comparison: large clusters stay cheap.
            if here != there and jaccard(trigrams[position], trigrams[other]) >= threshold:
                parent[max(here, there)] = min(here, there)
        index.insert(position, sketch)
    return parent


def _root(parent: list[int], position: int) -> int:
    while parent[position] != position:
        parent[position] = parent[parent[position]]
        position = parent[position]
    return position


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """The LSH layout with the fewest false proposals that still finds 99% of the pairs at `threshold`.

    A pair of Jaccard s is proposed with probability 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive
    Datasets, section 3.4.2); more rows propose fewer pairs.
    """
    for rows in range(NUM_PERMUTATIONS // 2, 1, -1):
        bands = NUM_PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= MIN_RECALL:
            return bands, rows
    return NUM_PERMUTATIONS, 1
