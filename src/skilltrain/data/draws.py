"""Draws from the pool by category: of a positive's own, and of others."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, Int64

Positions = Int64[np.ndarray, " skill"]
"""Places in the pool, ascending unless something else is said."""


@dataclass(frozen=True)
class PoolGroups:
    """Each skill's category and name as numbers; a category of -1: it has none."""

    categories: Positions
    names: Positions

    def alike(self, positives: Positions) -> Positions:
        """The skills that share a category with one of `positives` and a name with none."""
        members = np.flatnonzero(self._share_category(positives))
        return members[~np.isin(self.names[members], self.names[positives])]

    def elsewhere(self, positives: Positions) -> Positions:
        """The skills that share no category with `positives`; those without a category are among them."""
        away = ~self._share_category(positives)
        away[positives] = False
        return np.flatnonzero(away)

    def _share_category(self, positives: Positions) -> Bool[np.ndarray, " skill"]:
        return np.isin(self.categories, self.categories[positives]) & (self.categories >= 0)


def draw(allowed: Positions, count: int, key: str) -> Positions:
    """`count` of `allowed` (all where there are fewer), in no order and without repetition.

    Uniform, and the same for the same `key`.
    """
    generator = np.random.default_rng(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    return allowed[generator.choice(len(allowed), size=min(count, len(allowed)), replace=False)]
