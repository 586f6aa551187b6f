"""Skills of one or several sources in memory: read, bodies cut, duplicates dropped, ids made unique."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skilltrain.data.pool.skill_file import skill_from_row
from skilltrain.data.pool.skill_sources import read_source
from skilltrain.data.screening.bundled import SKILL_FILE
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.records import Dropped, Skill
from skilltrain.runs import RUN_FILE
from skilltrain.tables import SKILLS, read_table, skills_from_table, table_path
from skilltrain.terminal import say, track
from skilltrain.texts import clean_text, language_of

MAX_BODY_CHARS = 200_000
CUT = "body_too_long"  # in DROPPED, but its skill is kept


def read_pool(path: Path | str) -> list[Skill]:
    """The skills of a SKILLS table, or of any source that the stage `pool` reads, duplicates kept.

    Raises SkilltrainError where `path` holds no skill.
    """
    file = table_path(Path(path), SKILLS)
    if file.is_file() and file.name == f"{SKILLS.name}.parquet":
        return skills_from_table(read_table(file, SKILLS))
    sources, dropped = read_sources([path], MAX_BODY_CHARS)
    skills, repeated = merge_sources(sources, drop_duplicates=False)
    if dropped := [drop for drop in dropped + repeated if drop.filter != CUT]:
        why = ", ".join(f"{name} {num}" for name, num in count_words(drop.filter for drop in dropped).items())
        num_all = len(skills) + len(dropped)
        say(f"{path}: {len(dropped)} of {num_all} left out ({why}); `skilltrain pool sources={path}` lists them")
    return skills


def skill_file(pool: Path, skill_id: str) -> Path | None:
    """Where the SKILL.md of a skill lies, below `pool` or a source that the run in `pool` read; None if it is gone."""
    record = read_json(pool / RUN_FILE) if (pool / RUN_FILE).is_file() else None
    sources = record["recipe"].get("sources", ()) if isinstance(record, dict) else ()
    return find_skill_file([pool, *(Path(source) for source in sources if isinstance(source, str))], skill_id)


def find_skill_file(folders: Sequence[Path], skill_id: str) -> Path | None:
    """The SKILL.md of a skill in the first of `folders` that has it.

    An id that leads out of these folders, by itself or by a link, has none.
    """
    name = Path(skill_id).name
    places = [(folder, place) for folder in folders for place in (folder / skill_id, folder) if place.name == name]
    files = [(folder, place / SKILL_FILE) for folder, place in places]
    found = (file for folder, file in files if file.is_file() and file.resolve().is_relative_to(folder.resolve()))
    return next(found, None)


def skills_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Skill]:
    """Rows of a program as skills with unique ids, duplicates kept. Raises SkilltrainError for a row that is none."""
    skills: list[Skill] = []
    for number, row in enumerate(rows):
        found = skill_from_row(row, f"row {number}", "")
        if isinstance(found, Dropped):
            raise SkilltrainError(found.reason, where="pool")
        skills.append(_with_lang(found))
    if not skills:
        raise SkilltrainError("there is no skill", where="pool")
    return merge_sources([skills], drop_duplicates=False)[0]


def read_sources(sources: Sequence[Path | str], max_body_chars: int) -> tuple[list[list[Skill]], list[Dropped]]:
    """(the skills of each source, what was left out or cut).

    Raises SkilltrainError where a source cannot be read at all or where no skill is left.
    """
    read: list[list[Skill]] = []
    dropped: list[Dropped] = []
    for source in sources:
        skills, refused = _read_one(source, max_body_chars)
        read.append(skills)
        dropped += [replace(drop, source=clean_text(str(source))) for drop in refused]
        if not skills and len(sources) > 1:
            say(f"warning: the source {source} gives no skill ({_first_reason(refused) or 'it is empty'})")
    if not any(read):
        what = f"no skill is left of {len(sources)} source(s)"
        raise SkilltrainError(what, where=sources[0], fix=_first_reason(dropped))
    return read, dropped


def _read_one(source: Path | str, max_body_chars: int) -> tuple[list[Skill], list[Dropped]]:
    skills, dropped = list[Skill](), list[Dropped]()
    for found in track(read_source(source), "reading skills", None):
        if isinstance(found, Dropped):
            dropped.append(found)
        else:
            skill, num_chars = found, len(found.body)
            if num_chars > max_body_chars:
                reason = f"kept, its body cut from {num_chars:,} to {max_body_chars:,} characters"
                dropped.append(Dropped("", found.skill_id, CUT, reason, float(num_chars)))
                skill = replace(found, body=found.body[:max_body_chars].rstrip())
            skills.append(_with_lang(skill))
    return skills, dropped


def _with_lang(skill: Skill) -> Skill:
    said = f"{skill.name}\n{skill.description}\n{skill.body[:4000]}"
    return skill if skill.lang else replace(skill, lang=language_of(said))


def _first_reason(dropped: Sequence[Dropped]) -> str:
    return f"the first of {len(dropped)} dropped rows: {dropped[0].reason}" if dropped else ""


def count_words(words: Iterable[str]) -> dict[str, int]:
    """word → how often, in the order of the words."""
    return dict(sorted(Counter(words).items()))


def merge_sources(sources: Sequence[Sequence[Skill]], drop_duplicates: bool) -> tuple[list[Skill], list[Dropped]]:
    """(the skills of all sources under unique ids, duplicates), source after source, those of one in order of id.

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
        kept.append(replace(skill, skill_id=skill_id))
    return kept, dropped


def _content_digest(skill: Skill) -> bytes:
    """16 bytes, equal for skills whose name and body (of a tool: description) differ in case and white space only."""
    parts = (" ".join(part.casefold().split()) for part in (skill.name, skill.body or skill.description))
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).digest()
