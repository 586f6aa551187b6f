"""Skills of several sources under one roof: which are copies, and what each is called."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skilltrain.records import Dropped, Skill


@dataclass(frozen=True, slots=True)
class Merged:
    """The skills that stay, those that were dropped, and how many were given another id."""

    skills: list[Skill]
    dropped: list[Dropped]
    num_renamed: int


def merge_sources(sources: Sequence[Sequence[Skill]], drop_duplicates: bool) -> Merged:
    """The skills of all sources under unique ids, source after source, those of one in order of id.

    The same id with the same name and body is one skill. With another content the later skill is called `~2`, `~3`,
    …, passing over names that some source itself uses, so that no id given by a source changes its meaning.
    """
    given = {skill.skill_id for skills in sources for skill in skills}
    taken: set[str] = set()
    first_with: dict[bytes, str] = {}
    seen: set[tuple[str, bytes]] = set()
    last_suffix: Counter[str] = Counter()
    kept, dropped = list[Skill](), list[Dropped]()
    for skill in (skill for skills in sources for skill in sorted(skills, key=lambda skill: skill.skill_id)):
        own_id, content = skill.skill_id, _content_digest(skill)
        if content in first_with and (drop_duplicates or (own_id, content) in seen):
            first = first_with[content]
            reason = f"has the same name and body as {first}"
            dropped.append(Dropped("", own_id, "duplicate", reason, other_id=first))
            continue
        seen.add((own_id, content))
        skill_id = own_id
        while skill_id in taken or (skill_id != own_id and skill_id in given):
            last_suffix[own_id] += 1
            skill_id = f"{own_id}~{last_suffix[own_id] + 1}"
        first_with.setdefault(content, skill_id)
        taken.add(skill_id)
        kept.append(skill if skill_id == own_id else replace(skill, skill_id=skill_id))
    return Merged(kept, dropped, len(taken - given))


def _content_digest(skill: Skill) -> bytes:
    """16 bytes that are equal for skills whose name and body differ in case and white space only."""
    parts = (" ".join(part.casefold().split()) for part in (skill.name, skill.body))
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).digest()
