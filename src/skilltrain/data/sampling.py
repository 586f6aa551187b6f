"""Random choices that are the same in every process and on every machine."""

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
    # Python's own `hash` differs between processes, so the seed is a hash of another kind.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(allowed), size=min(count, len(allowed)), replace=False)
    return allowed[chosen]


def sample_skills(pool: Sequence[Skill], max_skills: int | None, seed: int) -> list[Skill]:
    """Sample at most `max_skills` skills and return them in the order of the pool.

    The sample is stratified by category and language: each pair keeps its share of the pool.

    Args:
        pool: Skills to sample from.
        max_skills: Size of the sample. None takes all skills.
        seed: Seed of the sample.
    """
    if max_skills is None or max_skills >= len(pool):
        return list(pool)

    strata: dict[tuple[str, str], list[str]] = defaultdict(list)  # by category and language
    for skill in pool:
        strata[skill.category or "", skill.lang or ""].append(skill.skill_id)
    sizes = {key: len(skill_ids) for key, skill_ids in strata.items()}
    # A stratum is the skills with the same category and language. Its quota is its number of skills
    # in the sample.
    quotas = largest_remainder(sizes, max_skills)

    # Sample each stratum with a random stream of its own.
    chosen: set[str] = set()
    for key, skill_ids in strata.items():
        rng = random.Random(stable_number(seed, "sample", *key))
        # Sort the ids, so that the sample does not depend on the order of the pool.
        chosen.update(rng.sample(sorted(skill_ids), quotas[key]))
    return [skill for skill in pool if skill.skill_id in chosen]


def split_groups(groups: Mapping[str, Collection[str]], share: float, seed: int) -> dict[str, str]:
    """Split groups of skills into dev and train so that no skill is on both sides.

    Groups that share a skill stay together. About `share` of the groups are dev. Linked groups
    that would exceed this share are train.

    Args:
        groups: Skill ids by name of the group. A group is a set of skills that must stay together,
            such as the skills of one request.
        share: Share of the groups that go into dev, from 0 to 1.
        seed: Seed of the order in which linked groups are put into dev.

    Returns:
        "dev" or "train" by name of the group.
    """
    from scipy.cluster.hierarchy import DisjointSet

    # Link the groups that share a skill. Groups can also be linked by way of other groups.
    linked = DisjointSet(groups)
    first_group_of: dict[str, str] = {}  # by skill id
    for name, skill_ids in groups.items():
        for skill_id in skill_ids:
            first_group = first_group_of.setdefault(skill_id, name)
            linked.merge(first_group, name)

    # Order the sets of linked groups by a pseudo-random number, so that the order depends only on
    # the seed and the names. The first name of a set stands for the set.
    components = linked.subsets()
    components.sort(key=lambda names: stable_number(seed, "split", min(names)))

    # Put linked groups into dev as long as there is room for them.
    num_free = round(share * len(groups))  # groups that dev can still take
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

    For example, three keys of size 1 and a total of 2 get 1, 1 and 0.

    Args:
        sizes: Size of each group by its key.
        total: Number to divide among the keys.

    Returns:
        Share of `total` by key. The shares add up to `total`.
    """
    whole = sum(sizes.values())
    quotas = {key: size * total // whole for key, size in sizes.items()}
    # The largest remainder comes first.
    by_remainder = sorted(sizes, key=lambda key: (-(sizes[key] * total % whole), key))
    num_missing = total - sum(quotas.values())
    for key in by_remainder[:num_missing]:
        quotas[key] += 1
    return quotas
