"""Draws that come out the same in every process and on every machine."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from skilltrain.records import Skill


def stable_number(*parts: object) -> int:
    """A 64-bit number drawn from `parts`."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:8])


def is_drawn(share: float, *parts: object) -> bool:
    """Whether a draw that `parts` decide falls into the first `share` of all."""
    return stable_number(*parts) < share * 2**64


def draw(
    allowed: Int64[np.ndarray, " position"], count: int, key: str
) -> Int64[np.ndarray, " drawn"]:
    """`count` of `allowed` (all where there are fewer), uniform, in no order and without repetition."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    chosen = np.random.default_rng(seed).choice(
        len(allowed), size=min(count, len(allowed)), replace=False
    )
    return allowed[chosen]


def sample_skills(pool: Sequence[Skill], max_skills: int | None, seed: int) -> list[Skill]:
    """At most `max_skills` of the pool, in its order; each (category, lang) keeps its share by largest remainder."""
    if max_skills is None or max_skills >= len(pool):
        return list(pool)
    strata: dict[tuple[str, str], list[str]] = defaultdict(list)
    for skill in pool:
        strata[skill.category or "", skill.lang or ""].append(skill.skill_id)
    quotas = largest_remainder(
        {key: len(skill_ids) for key, skill_ids in strata.items()}, max_skills
    )
    chosen: set[str] = set()
    for key, skill_ids in strata.items():
        chosen.update(
            random.Random(stable_number(seed, "sample", *key)).sample(
                sorted(skill_ids), quotas[key]
            )
        )
    return [skill for skill in pool if skill.skill_id in chosen]


def split_groups(groups: Mapping[str, Collection[str]], share: float, seed: int) -> dict[str, str]:
    """Group → dev or train, so that no skill is on both sides: groups that share a skill stay together.

    About `share` of the groups are dev; what hangs together and would exceed that is train.
    """
    from scipy.cluster.hierarchy import DisjointSet

    linked = DisjointSet(groups)
    first: dict[str, str] = {}
    for name, skill_ids in groups.items():
        for skill_id in skill_ids:
            linked.merge(first.setdefault(skill_id, name), name)
    room, split = round(share * len(groups)), dict.fromkeys(groups, "train")
    for names in sorted(
        linked.subsets(), key=lambda names: stable_number(seed, "split", min(names))
    ):
        if len(names) <= room:
            room -= len(names)
            split |= dict.fromkeys(names, "dev")
    return split


def largest_remainder(
    sizes: Mapping[tuple[str, str], int], total: int
) -> dict[tuple[str, str], int]:
    """`total` seats shared in proportion to `sizes` (Hamilton's method); equal remainders go to the smaller key."""
    whole = sum(sizes.values())
    quotas = {key: size * total // whole for key, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda key: (-(sizes[key] * total % whole), key))
    for key in by_remainder[: total - sum(quotas.values())]:
        quotas[key] += 1
    return quotas
