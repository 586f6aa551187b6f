"""Draws from the pool by category: of a positive's own, and of others."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from jaxtyping import Int64

Positions = Int64[np.ndarray, " skill"]
"""Places in the pool, ascending unless something else is said."""


@dataclass(frozen=True)
class PoolGroups:
    """Each skill's category and name as numbers (a category of -1: it has none), and the members of each category."""

    categories: Positions
    names: Positions
    by_category: Positions
    starts: Int64[np.ndarray, " category"]

    @classmethod
    def build(cls, categories: Positions, names: Positions) -> "PoolGroups":
        """The members of category c are `by_category[starts[c]:starts[c + 1]]`."""
        order = np.argsort(categories, kind="stable").astype(np.int64)
        starts = np.searchsorted(categories[order], np.arange(categories.max(initial=-1) + 2))
        return cls(categories, names, order, starts.astype(np.int64))

    def alike(self, positives: Positions) -> Positions:
        """The skills that share a category with one of `positives` and a name with none."""
        members = self._members(positives)
        return members[~np.isin(self.names[members], self.names[positives])]

    def draw_elsewhere(self, positives: Positions, count: int, key: str) -> Positions:
        """`count` skills that share no category with `positives`, as `draw`; those without a category are among them.

        These are nearly the whole pool, so they are never spelled out: the n-th is n plus the number of the excluded
        before it.
        """
        excluded = np.union1d(self._members(positives), positives)
        drawn = draw(len(self.categories) - len(excluded), count, key)
        return drawn + np.searchsorted(excluded - np.arange(len(excluded)), drawn, side="right")

    def _members(self, positives: Positions) -> Positions:
        """All skills of the categories of `positives`."""
        known = np.unique(self.categories[positives])
        parts = [self.by_category[self.starts[c] : self.starts[c + 1]] for c in known[known >= 0].tolist()]
        return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))


def draw(num_allowed: int, count: int, key: str) -> Int64[np.ndarray, " candidate"]:
    """`count` of the numbers below `num_allowed` (all where there are fewer), in no order and without repetition.

    Uniform, and the same for the same `key`.
    """
    generator = np.random.default_rng(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    return generator.choice(num_allowed, size=min(count, num_allowed), replace=False)
