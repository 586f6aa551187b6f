"""Skills of several sources under one roof: which are copies, and what each is called; decided without their texts."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skilltrain.data.pool.skill_sources import Refused
from skilltrain.records import Skill

DUPLICATE_REASON = "has the same name and body as "  # and the id of the skill that was kept


@dataclass(frozen=True)
class Merged:
    """The skills that stay, as places in the order of reading and the id of each, and those that were dropped."""

    places: Sequence[int]
    skill_ids: list[str]
    dropped: list[Refused]
    num_renamed: int


def content_digest(skill: Skill) -> bytes:
    """16 bytes that are equal for skills whose name and body differ in case and white space only."""
    parts = (" ".join(part.casefold().split()) for part in (skill.name, skill.body))
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).digest()


def merge_sources(
    skill_ids: Sequence[str], contents: Sequence[bytes], num_found: Sequence[int], drop_duplicates: bool
) -> Merged:
    """The skills of all sources under unique ids, source after source, those of one in order of id.

    A skill is given by its id and its `content_digest`, in the order of reading; of these `num_found[i]` come from
    source i. The same id with the same name and body is one skill. With another content the later skill is called
    `~2`, `~3`, …, passing over names that some source itself uses, so that no id given by a source changes its meaning.
    """
    given = set(skill_ids)
    taken: set[str] = set()
    first_with: dict[bytes, str] = {}
    seen: set[tuple[str, bytes]] = set()
    last_suffix: Counter[str] = Counter()
    places, kept_ids, dropped = array("q"), list[str](), list[Refused]()
    num_renamed = 0
    for place in _by_source_and_id(skill_ids, num_found):
        own_id, content = skill_ids[place], contents[place]
        if content in first_with and (drop_duplicates or (own_id, content) in seen):
            dropped.append(Refused(own_id, "duplicate", DUPLICATE_REASON + first_with[content]))
            continue
        if not drop_duplicates:
            seen.add((own_id, content))
        skill_id = own_id
        while skill_id in taken or (skill_id != own_id and skill_id in given):
            last_suffix[own_id] += 1
            skill_id = f"{own_id}~{last_suffix[own_id] + 1}"
        num_renamed += skill_id != own_id
        first_with.setdefault(content, skill_id)
        taken.add(skill_id)
        kept_ids.append(skill_id)
        places.append(place)
    return Merged(places, kept_ids, dropped, num_renamed)


def _by_source_and_id(skill_ids: Sequence[str], num_found: Sequence[int]) -> Iterator[int]:
    start = 0
    for num in num_found:
        yield from sorted(range(start, start + num), key=skill_ids.__getitem__)
        start += num
