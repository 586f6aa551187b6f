"""Choosing some skills of a pool so that the choice looks like the pool, the same on every machine."""

import hashlib
import random
from collections.abc import Mapping, Sequence

from skilltrain.records import Skill


def sample_skills(pool: Sequence[Skill], max_skills: int | None, seed: int) -> list[Skill]:
    """At most `max_skills` of the pool, in its order; each (category, lang) keeps its share by largest remainder."""
    if max_skills is None or max_skills >= len(pool):
        return list(pool)
    strata: dict[tuple[str, str], list[Skill]] = {}
    for skill in pool:
        strata.setdefault((skill.category or "", skill.lang or ""), []).append(skill)
    quotas = largest_remainder({key: len(skills) for key, skills in strata.items()}, max_skills)
    chosen: set[str] = set()
    for key, skills in strata.items():
        skills = sorted(skills, key=lambda skill: skill.skill_id)
        chosen.update(
            s.skill_id for s in random.Random(stable_number(seed, "sample", *key)).sample(skills, quotas[key])
        )
    return [skill for skill in pool if skill.skill_id in chosen]


def largest_remainder(sizes: Mapping[tuple[str, str], int], total: int) -> dict[tuple[str, str], int]:
    """`total` seats shared in proportion to `sizes` (Hamilton's method); equal remainders go to the smaller key."""
    whole = sum(sizes.values())
    quotas = {key: size * total // whole for key, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda key: (-(sizes[key] * total % whole), key))
    for key in by_remainder[: total - sum(quotas.values())]:
        quotas[key] += 1
    return quotas


def stable_number(*parts: object) -> int:
    """A 64-bit number drawn from `parts`, the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:8])
