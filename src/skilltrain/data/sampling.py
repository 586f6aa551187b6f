"""Random choices that are the same in every process and on every machine.

Notes:
- Each stratum of a sample has a random stream of its own.
- Groups that share a skill are split together. Linked groups that would exceed the share of dev are
  train. The seed decides their order.
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from skilltrain.records import Skill


def stable_number(*key: object) -> int:
    """Return a pseudo-random 64-bit number that depends only on `key`."""
    text = "\x1f".join(map(str, key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def is_drawn(share: float, *key: object) -> bool:
    """Return True with probability `share`, always the same for the same `key`."""
    return stable_number(*key) < share * 2**64


def draw(
    allowed: Int64[np.ndarray, " position"], count: int, key: str
) -> Int64[np.ndarray, " drawn"]:
    """Sample `count` positions without repetition, or all if there are fewer.

    Args:
        allowed: Positions to choose from.
        count: Number of positions to sample.
        key: Text that decides the sample.

    Returns:
        The sampled positions, in random order.
    """
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(allowed), size=min(count, len(allowed)), replace=False)
    return allowed[chosen]


def sample_skills(pool: Sequence[Skill], max_skills: int | None, seed: int) -> list[Skill]:
    """Sample at most `max_skills` skills and return them in the order of the pool.

    Each pair of category and language keeps its share of the pool.
    """
    if max_skills is None or max_skills >= len(pool):
        return list(pool)

    strata: dict[tuple[str, str], list[str]] = defaultdict(list)  # by category and language
    for skill in pool:
        strata[skill.category or "", skill.lang or ""].append(skill.skill_id)
    sizes = {key: len(skill_ids) for key, skill_ids in strata.items()}
    quotas = largest_remainder(sizes, max_skills)

    chosen: set[str] = set()
    for key, skill_ids in strata.items():
        rng = random.Random(stable_number(seed, "sample", *key))
        chosen.update(rng.sample(sorted(skill_ids), quotas[key]))
    return [skill for skill in pool if skill.skill_id in chosen]


def split_groups(groups: Mapping[str, Collection[str]], share: float, seed: int) -> dict[str, str]:
    """Split groups of skills into dev and train so that no skill is on both sides.

    Args:
        groups: Skill ids by name of the group.
        share: Largest share of dev.

    Returns:
        "dev" or "train" by name of the group.
    """
    from scipy.cluster.hierarchy import DisjointSet

    linked = DisjointSet(groups)
    first_group_of: dict[str, str] = {}  # by skill id
    for name, skill_ids in groups.items():
        for skill_id in skill_ids:
            first_group = first_group_of.setdefault(skill_id, name)
            linked.merge(first_group, name)

    components = linked.subsets()
    components.sort(key=lambda names: stable_number(seed, "split", min(names)))
    num_free = round(share * len(groups))
    splits = dict.fromkeys(groups, "train")
    for names in components:
        if len(names) <= num_free:
            num_free -= len(names)
            splits |= dict.fromkeys(names, "dev")
    return splits


def largest_remainder(
    sizes: Mapping[tuple[str, str], int], total: int
) -> dict[tuple[str, str], int]:
    """Divide `total` in whole numbers in proportion to `sizes` (Hamilton's method).

    Each key gets its exact share rounded down. The keys with the largest remainders get one more;
    of equal remainders, the smaller key.
    """
    whole = sum(sizes.values())
    quotas = {key: size * total // whole for key, size in sizes.items()}
    # The largest remainder comes first.
    by_remainder = sorted(sizes, key=lambda key: (-(sizes[key] * total % whole), key))
    num_missing = total - sum(quotas.values())
    for key in by_remainder[:num_missing]:
        quotas[key] += 1
    return quotas
