"""Skills of any sources in memory: SKILL.md files, JSON Lines, parquet and Hugging Face datasets, under unique ids."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.data.pool.skill_file import (
    BODY_COLUMNS,
    COLUMNS,
    ID_COLUMNS,
    parse_skill_file,
    skill_from_row,
)
from skilltrain.data.screening.bundled import SKILL_FILE
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import BROKEN_LINES, json_object, numbered_lines
from skilltrain.records import Dropped, Skill, counted
from skilltrain.runs import RUN_FILE, record_of
from skilltrain.tables import SKILLS, read_skills, table_path
from skilltrain.terminal import say, track
from skilltrain.texts import clean_text, decode_text, language_of

MAX_BODY_CHARS = 200_000
MAX_FILE_BYTES = 64 * 2**20
CUT = "body_too_long"  # in DROPPED, but its skill is kept
HF_PREFIX = "hf:"
_SHARDS = (".jsonl", ".jsonl.gz", ".parquet")
_ROWS = 256  # of a table that become Python objects at once

Found = Iterator[Skill | Dropped]


def read_pool(path: Path | str) -> list[Skill]:
    """The skills of a SKILLS table, or of any source of the stage `pool`, duplicates kept. SkilltrainError: none."""
    file = table_path(Path(path), SKILLS)
    if file.is_file() and file.name == f"{SKILLS.name}.parquet":
        return read_skills(file)
    sources, dropped = read_sources([path])
    skills, repeated = merge_sources(sources, drop_duplicates=False)
    if dropped := [drop for drop in dropped + repeated if drop.filter != CUT]:
        why = ", ".join(
            f"{name} {num}" for name, num in counted(drop.filter for drop in dropped).items()
        )
        num_all = len(skills) + len(dropped)
        say(
            f"{path}: {len(dropped)} of {num_all} left out ({why}); `skilltrain pool sources={path}` lists them"
        )
    return skills


def skill_file(pool: Path, skill_id: str) -> Path | None:
    """The SKILL.md of a skill, below `pool` or a source that the run in `pool` read; None if it is gone."""
    sources = record_of(pool).get("recipe", {}).get("sources", ())
    return find_skill_file(
        [pool, *(Path(source) for source in sources if isinstance(source, str))], skill_id
    )


def find_skill_file(folders: Iterable[Path], skill_id: str) -> Path | None:
    """The SKILL.md of a skill in the first of `folders` that has it; none where id or link lead out of the folder."""
    for folder in folders:
        for place in (folder / skill_id, folder):
            file = place / SKILL_FILE
            is_its_own = place.name == Path(skill_id).name
            if is_its_own and file.is_file() and file.resolve().is_relative_to(folder.resolve()):
                return file
    return None


def skills_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Skill]:
    """Rows of a program as skills with unique ids, duplicates kept. Raises SkilltrainError for a row that is none."""
    found = [skill_from_row(row, f"row {number}", "") for number, row in enumerate(rows)]
    faults = [one.reason for one in found if isinstance(one, Dropped)]
    if faults or not found:
        raise SkilltrainError(faults[0] if faults else "there is no skill", where="pool")
    return merge_sources(
        [[_with_lang(one) for one in found if isinstance(one, Skill)]], drop_duplicates=False
    )[0]


def read_sources(sources: Sequence[Path | str]) -> tuple[list[list[Skill]], list[Dropped]]:
    """(the skills of each source, what was left out or cut). Raises SkilltrainError where no skill is left."""
    read: list[list[Skill]] = []
    dropped: list[Dropped] = []
    for source in sources:
        skills, refused = list[Skill](), list[Dropped]()
        for found in track(read_source(source), "reading skills", None):
            if isinstance(found, Dropped):
                refused.append(found)
                continue
            if (num_chars := len(found.body)) > MAX_BODY_CHARS:
                reason = f"kept, its body cut from {num_chars:,} to {MAX_BODY_CHARS:,} characters"
                refused.append(Dropped("", found.skill_id, CUT, reason, float(num_chars)))
            skills.append(_with_lang(replace(found, body=found.body[:MAX_BODY_CHARS].rstrip())))
        read.append(skills)
        dropped += [replace(drop, source=clean_text(str(source))) for drop in refused]
        if not skills and len(sources) > 1:
            say(
                f"warning: the source {source} gives no skill ({first_reason(refused) or 'it is empty'})"
            )
    if not any(read):
        what = f"no skill is left of {len(sources)} source(s)"
        raise SkilltrainError(what, where=sources[0], fix=first_reason(dropped))
    return read, dropped


def _with_lang(skill: Skill) -> Skill:
    said = f"{skill.name}\n{skill.description}\n{skill.body[:4000]}"
    return skill if skill.lang else replace(skill, lang=language_of(said))


def first_reason(dropped: Sequence[Dropped]) -> str:
    """Why nothing is left, in words for an error."""
    return f"the first of {len(dropped)} dropped rows: {dropped[0].reason}" if dropped else ""


def merge_sources(
    sources: Sequence[Sequence[Skill]], drop_duplicates: bool
) -> tuple[list[Skill], list[Dropped]]:
    """(the skills of all sources under unique ids, duplicates), source after source, those of one in order of id.

    The same id with the same name and body is one skill. With another content the later skill is called `~2`, `~3`,
    …, passing over names that a source itself uses, so that no id given by a source changes its meaning.
    """
    given = {skill.skill_id for skills in sources for skill in skills}
    first_with, seen, last_suffix = dict[bytes, str](), set[tuple[str, bytes]](), Counter[str]()
    kept, dropped = dict[str, Skill](), list[Dropped]()
    for skill in (
        skill for skills in sources for skill in sorted(skills, key=lambda skill: skill.skill_id)
    ):
        own_id, content = skill.skill_id, _content_digest(skill)
        first = first_with.get(content)
        if first is not None and (drop_duplicates or (own_id, content) in seen):
            reason = f"has the same name and body as {first}"
            dropped.append(Dropped("", own_id, "duplicate", reason, other_id=first))
            continue
        seen.add((own_id, content))
        skill_id = own_id
        while skill_id in kept or (skill_id != own_id and skill_id in given):
            last_suffix[own_id] += 1
            skill_id = f"{own_id}~{last_suffix[own_id] + 1}"
        first_with.setdefault(content, skill_id)
        kept[skill_id] = replace(skill, skill_id=skill_id)
    return list(kept.values()), dropped


def _content_digest(skill: Skill) -> bytes:
    """16 bytes, equal for skills whose name and body (of a tool: description) differ in case and white space only."""
    parts = (
        " ".join(part.casefold().split()) for part in (skill.name, skill.body or skill.description)
    )
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).digest()


def read_source(source: Path | str) -> Found:
    """The skills of one source, and what in it is none; a text is `hf:` and a dataset's name or folder.

    Raises SkilltrainError where the source is missing, is not what its name says, or has no skills' columns.
    """
    if isinstance(source, str) and source.startswith(HF_PREFIX):
        return _read_dataset(source.removeprefix(HF_PREFIX))
    path = Path(source)
    name = path.name.lower()
    if not path.exists():
        raise SkilltrainError("no such file or folder", where=path)
    if path.is_dir():
        return _read_folder(path.resolve())
    if not path.is_file():
        raise SkilltrainError("is a pipe or a device, not a file", where=path)
    if name == "skill.md":
        return iter([_read_skill_file(path.resolve(), path.resolve().parent)])
    if name.endswith(_SHARDS):
        return _read_parquet(path) if name.endswith(".parquet") else _read_jsonl(path)
    fix = f"give a SKILL.md, {' or '.join(_SHARDS)} file"
    raise SkilltrainError("cannot tell what this file is", where=path, fix=fix)


def _read_folder(root: Path) -> Found:
    """A SKILLS table, else all SKILL.md files, else all shards of a folder; it is said what else is there."""
    table = table_path(root, SKILLS)
    if (
        table.is_file() and (root / RUN_FILE).is_file()
    ):  # written by a stage: all else there was made beside the table
        yield from _read_parquet(table)
        return
    skill_files, shards, refused = _walk(root)
    own_folders = {file.parent for file in skill_files} - {
        root
    }  # what lies in one is part of that skill
    unread = [file for file in shards if file != table and own_folders.isdisjoint(file.parents)]
    if table.is_file():
        yield from _read_parquet(table)
        unread = [*skill_files, *unread]
    elif skill_files:
        yield from refused
        yield from (_read_skill_file(file, root) for file in skill_files)
    elif shards:
        yield from refused
        yield from _read_shards(shards)
        unread = []
    else:
        raise SkilltrainError("holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file", where=root)
    if unread:
        first = _place(unread[0], root)
        say(
            f"{root}: {len(unread)} other files with skills are not read, the first {first}; name them as sources"
        )


def _walk(root: Path) -> tuple[list[Path], list[Path], list[Dropped]]:
    """(SKILL.md files, shards, what could not be entered) below `root`; links that lead out are not followed."""
    skill_files, shards, refused, errors = (
        list[Path](),
        list[Path](),
        list[Dropped](),
        list[OSError](),
    )
    for folder, folder_names, file_names in os.walk(root, onerror=errors.append):
        for path in sorted(Path(folder, name) for name in (*folder_names, *file_names)):
            is_folder, name = path.name in folder_names, path.name.lower()
            if not is_folder and name != "skill.md" and not name.endswith(_SHARDS):
                continue
            target = Path(os.path.realpath(path))  # raises nothing where the user may not look
            if target != path and not (target.is_relative_to(root) and target.exists()):
                reason = f"{_place(path, root)} is a link that leads out of {clean_text(root.name)} or nowhere"
                refused.append(Dropped("", "", "link", reason))
            elif not is_folder:
                (skill_files if name == "skill.md" else shards).append(path)
    refused += [
        Dropped("", "", "unreadable", clean_text(f"{e.filename}: {e.strerror}")) for e in errors
    ]
    return sorted(skill_files), sorted(shards), refused


def _place(path: Path, root: Path) -> str:
    return clean_text(path.relative_to(root).as_posix())


def _read_skill_file(path: Path, root: Path) -> Skill | Dropped:
    place, source = _place(path, root), clean_text(root.name)
    skill_id = source if path.parent == root else _place(path.parent, root)
    try:
        if not path.is_file():
            return Dropped("", skill_id, "unreadable", f"{place} is not a plain file")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            reason = f"{place} has {size:,} bytes, more than 64 MiB"
            return Dropped("", skill_id, "file_too_big", reason, float(size))
        text = decode_text(path.read_bytes())
    except OSError as error:
        return Dropped("", skill_id, "unreadable", f"{place}: {error.strerror}")
    if text is None:
        return Dropped("", skill_id, "not_text", f"{place} is not text")
    skill = parse_skill_file(text, skill_id, path.parent.name, source)
    return skill if skill.body else Dropped("", skill_id, "empty_body", "the skill has no body")


def _read_shards(shards: list[Path]) -> Found:
    """The rows of all shards of a folder; a broken one is said and left out."""
    for path in shards:
        try:
            yield from read_source(path)
        except SkilltrainError as error:
            say(f"left out: {error}")
            yield Dropped("", "", "unreadable", clean_text(str(error)))


def _read_jsonl(path: Path) -> Found:
    number, name = 0, clean_text(path.name)
    try:
        for number, line in numbered_lines(path):
            place = f"{name}, line {number}"
            try:
                row = json_object(line)
            except ValueError as error:
                yield Dropped("", "", "not_json", f"{place} is no JSON object: {error}")
            else:
                yield skill_from_row(row, place, name)
    except BROKEN_LINES as error:
        if not number:
            raise SkilltrainError(f"cannot be read: {reason_of(error)}", where=path) from error
        yield Dropped(
            "", "", "unreadable", f"{name} breaks off after line {number}: {reason_of(error)}"
        )


def _read_parquet(path: Path) -> Found:
    place, source = clean_text(path.name), clean_text(path.parent.name)
    try:
        with pq.ParquetFile(path) as file:
            columns = _known_columns(file.schema_arrow.names, path)
            batches = file.iter_batches(batch_size=_ROWS, columns=columns)
            rows = enumerate((row for batch in batches for row in batch.to_pylist()), 1)
            yield from (
                skill_from_row(row, f"{place}, row {number}", source) for number, row in rows
            )
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(f"is not parquet: {error}", where=path) from error


def _known_columns(names: list[str], where: object) -> list[str]:
    """Those of `names` that tell of a skill. Raises SkilltrainError without a body or description, or an id or name."""
    if {*ID_COLUMNS, "name"}.isdisjoint(names) or {*BODY_COLUMNS, "description"}.isdisjoint(names):
        need = "skill_id or name, and body, content or skill_md (or description alone: tools)"
        raise SkilltrainError(
            f"holds no skills: needs the columns {need}; has {', '.join(names[:8])}", where=where
        )
    return [name for name in COLUMNS if name in names]


def _read_dataset(reference: str) -> Found:
    """Skills of a Hugging Face dataset: owner/name, a folder it was saved to, either with `:split` behind."""
    import datasets

    name, split, where = reference, "", HF_PREFIX + reference
    if not Path(reference).exists() and ":" in reference:
        name, split = reference.rsplit(":", 1)
    is_saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    loaded: Any = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name)
    splits: dict[Any, Any] = dict(loaded) if isinstance(loaded, dict) else {"": loaded}
    chosen = split if split or len(splits) > 1 else next(iter(splits))
    if chosen not in splits:
        wrong = f"has no split '{split}'" if split else "has several splits"
        what = f"{wrong}; its splits: {', '.join(map(str, splits)) or 'none'}"
        raise SkilltrainError(what, where=where, fix=f"write {HF_PREFIX}{name}:SPLIT")
    rows = splits[chosen].select_columns(_known_columns(splits[chosen].column_names, where))
    source = Path(name).name if Path(name).exists() else name
    return (
        skill_from_row(row, f"{where}, row {number}", source) for number, row in enumerate(rows, 1)
    )
