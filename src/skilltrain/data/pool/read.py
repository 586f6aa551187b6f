"""Skills of one or several sources in memory: read, bodies cut, duplicates dropped, ids made unique."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skilltrain.data.pool.merge import content_digest, merge_sources
from skilltrain.data.pool.skill_sources import Refused, read_source
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped, Skill
from skilltrain.tables import SKILLS, read_table, skills_from_table, table_path
from skilltrain.terminal import progress, say
from skilltrain.texts import language_of

MAX_BODY_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class SourcesRead:
    """The skills of all sources under unique ids, how many each source gave, and what was left out of them."""

    skills: list[Skill]
    num_found: list[int]
    dropped: list[Dropped]
    num_renamed: int


def read_pool(path: Path | str) -> list[Skill]:
    """The skills of a SKILLS table, or of any source that the stage `pool` reads, duplicates kept.

    Raises SkilltrainError where `path` holds no skill.
    """
    file = table_path(Path(path), SKILLS)
    if file.is_file() and file.name == f"{SKILLS.name}.parquet":
        return skills_from_table(read_table(file, SKILLS))
    found = read_sources([path], MAX_BODY_CHARS, drop_duplicates=False)
    if not found.skills:
        raise SkilltrainError("holds no skill", where=path, fix=first_reason(found.dropped))
    if found.dropped:
        why = ", ".join(f"{name} {num}" for name, num in count_words(drop.filter for drop in found.dropped).items())
        num_all = len(found.skills) + len(found.dropped)
        say(f"{path}: {len(found.dropped)} of {num_all} left out ({why}); `skilltrain pool sources={path}` lists them")
    return found.skills


def read_sources(sources: Sequence[Path | str], max_body_chars: int, drop_duplicates: bool) -> SourcesRead:
    """All skills of `sources` that have a body, merged; see `merge_sources`.

    Raises SkilltrainError where a source cannot be read at all.
    """
    skills: list[Skill] = []
    dropped: list[Dropped] = []
    num_found: list[int] = []
    with progress("reading skills", None) as (bar, task):
        for source in sources:
            num_before = len(skills)
            for found in read_source(source):
                bar.advance(task)
                if isinstance(found, Refused):
                    dropped.append(Dropped("", found.skill_id, found.filter, found.reason, found.value, str(source)))
                elif not found.body:
                    dropped.append(
                        Dropped("", found.skill_id, "empty_body", "the skill has no body", source=str(source))
                    )
                elif len(found.body) > max_body_chars:
                    dropped.append(_told_cut(found, max_body_chars, str(source)))
                    skills.append(_with_lang(replace(found, body=found.body[:max_body_chars].rstrip())))
                else:
                    skills.append(_with_lang(found))
            num_found.append(len(skills) - num_before)
    ids, contents = [skill.skill_id for skill in skills], [content_digest(skill) for skill in skills]
    merged = merge_sources(ids, contents, num_found, drop_duplicates)
    kept = [
        skills[place] if skills[place].skill_id == skill_id else replace(skills[place], skill_id=skill_id)
        for place, skill_id in zip(merged.places, merged.skill_ids, strict=True)
    ]
    duplicates = [Dropped("", drop.skill_id, drop.filter, drop.reason) for drop in merged.dropped]
    return SourcesRead(kept, num_found, dropped + duplicates, merged.num_renamed)


def _with_lang(skill: Skill) -> Skill:
    return skill if skill.lang else replace(skill, lang=guess_lang(skill))


def guess_lang(skill: Skill) -> str | None:
    """The language of a skill, zh or en, from its name, its description and the start of its body."""
    return language_of(f"{skill.name}\n{skill.description}\n{skill.body[:4000]}")


def _told_cut(skill: Skill, max_chars: int, source: str) -> Dropped:
    reason = f"kept, its body cut from {len(skill.body):,} to {max_chars:,} characters"
    return Dropped("", skill.skill_id, "body_too_long", reason, float(len(skill.body)), source)


def count_words(words: Iterable[str]) -> dict[str, int]:
    """word → how often, in the order of the words."""
    return dict(sorted(Counter(words).items()))


def first_reason(dropped: Sequence[Dropped]) -> str:
    """Why nothing is left, for an error."""
    return f"the first of {len(dropped)} refused: {dropped[0].reason}" if dropped else "the sources are empty"
