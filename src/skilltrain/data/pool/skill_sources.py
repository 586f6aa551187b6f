"""Where skills come from: folders of SKILL.md files, JSON Lines, parquet, and Hugging Face datasets."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.data.pool.skill_file import BODY_COLUMNS, COLUMNS, ID_COLUMNS, parse_skill_file, skill_from_row
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import bounded_lines
from skilltrain.records import Dropped, Skill
from skilltrain.runs import RUN_FILE
from skilltrain.tables import SKILLS, table_path
from skilltrain.terminal import say
from skilltrain.texts import clean_text, decode_text

MAX_FILE_BYTES = 64 * 2**20
HF_PREFIX = "hf:"
SHARD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ROWS = 256  # of a table that become Python objects at once

Found = Iterator[Skill | Dropped]


def read_source(source: Path | str) -> Found:
    """The skills of one source, and what in it is none; a text is `hf:` and a dataset's name or folder.

    Raises SkilltrainError where the source itself is missing, is not what its name says, or has no skills' columns.
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
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _read_jsonl(path)
    if name.endswith(".parquet"):
        return _read_parquet(path)
    if name == "skill.md":
        return iter([_read_skill_file(path.resolve(), path.resolve().parent)])
    fix = "give a SKILL.md, .jsonl, .jsonl.gz or .parquet file"
    raise SkilltrainError("cannot tell what this file is", where=path, fix=fix)


def _read_folder(root: Path) -> Found:
    """A SKILLS table, else all SKILL.md files, else all shards of a folder; it is said what else is there."""
    table = table_path(root, SKILLS)
    if table.is_file() and (root / RUN_FILE).is_file():  # written by a stage: all else there was made beside the table
        yield from _read_parquet(table)
        return
    skill_files, shards, refused = _walk(root)
    own_folders = {file.parent for file in skill_files} - {root}  # what lies in one is part of that skill
    loose = [file for file in shards if file != table and own_folders.isdisjoint(file.parents)]
    if table.is_file():
        yield from _read_parquet(table)
        unread = [*skill_files, *loose]
    elif skill_files:
        yield from refused
        yield from (_read_skill_file(file, root) for file in skill_files)
        unread = loose
    elif shards:
        yield from refused
        yield from _read_shards(shards)
        unread = []
    else:
        raise SkilltrainError("holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file", where=root)
    if unread:
        first = _place(unread[0], root)
        say(f"{root}: {len(unread)} other files with skills are not read, the first {first}; name them as sources")


def _walk(root: Path) -> tuple[list[Path], list[Path], list[Dropped]]:
    """(SKILL.md files, shards, what could not be entered) below `root`; links that lead out are not followed."""
    skill_files, shards, refused = list[Path](), list[Path](), list[Dropped]()

    def unreadable(error: OSError) -> None:
        refused.append(Dropped("", "", "unreadable", clean_text(f"{error.filename}: {error.strerror}")))

    for folder, folder_names, file_names in os.walk(root, onerror=unreadable):
        for path in sorted(Path(folder, name) for name in (*folder_names, *file_names)):
            is_folder, name = path.name in folder_names, path.name.lower()
            if not is_folder and name != "skill.md" and not name.endswith(SHARD_SUFFIXES):
                continue
            if _leads_out(path, root):
                reason = f"{_place(path, root)} is a link that leads out of {clean_text(root.name)} or nowhere"
                refused.append(Dropped("", "", "link", reason))
            elif not is_folder:
                (skill_files if name == "skill.md" else shards).append(path)
    return sorted(skill_files), sorted(shards), refused


def _place(path: Path, root: Path) -> str:
    return clean_text(path.relative_to(root).as_posix())


def _leads_out(path: Path, root: Path) -> bool:
    """Whether `path` is a link out of `root`, which is resolved, or to nowhere."""
    target = Path(os.path.realpath(path))
    return target != path and not (target.is_relative_to(root) and target.exists())


def _read_skill_file(path: Path, root: Path) -> Skill | Dropped:
    place, source = _place(path, root), clean_text(root.name)
    skill_id = source if path.parent == root else _place(path.parent, root)
    try:
        size = path.stat().st_size
        if not path.is_file():
            return Dropped("", skill_id, "unreadable", f"{place} is not a plain file")
        if size > MAX_FILE_BYTES:
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
        opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rb") as lines:
            for number, line in enumerate(bounded_lines(lines), 1):
                if line.strip():
                    yield _skill_from_line(line, f"{name}, line {number}", name)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if not number:
            raise SkilltrainError(f"cannot be read: {reason_of(error)}", where=path) from error
        yield Dropped("", "", "unreadable", f"{name} breaks off after line {number}: {reason_of(error)}")


def _skill_from_line(line: bytes, place: str, source: str) -> Skill | Dropped:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Dropped("", "", "not_json", f"{place} is not JSON: {error}")
    if not isinstance(row, dict):
        return Dropped("", "", "not_json", f"{place} is a {type(row).__name__}, not an object")
    return skill_from_row(row, place, source)


def _read_parquet(path: Path) -> Found:
    try:
        with pq.ParquetFile(path) as file:
            columns = _known_columns(file.schema_arrow.names, path)
            batches = file.iter_batches(batch_size=_ROWS, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _skills_from_rows(rows, clean_text(path.name), clean_text(path.parent.name))
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(f"is not parquet: {error}", where=path) from error


def _known_columns(names: list[str], where: object) -> list[str]:
    """Those of `names` that tell of a skill. Raises SkilltrainError without a body or description, or an id or name."""
    if {*ID_COLUMNS, "name"}.isdisjoint(names) or {*BODY_COLUMNS, "description"}.isdisjoint(names):
        need = "skill_id or name, and body, content or skill_md (or description alone: tools)"
        raise SkilltrainError(f"holds no skills: needs the columns {need}; has {', '.join(names[:8])}", where=where)
    return [name for name in COLUMNS if name in names]


def _skills_from_rows(rows: Iterable[Mapping[str, Any]], place: str, source: str) -> Found:
    return (skill_from_row(row, f"{place}, row {number}", source) for number, row in enumerate(rows, 1))


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
        fix = f"write {HF_PREFIX}{name}:SPLIT"
        raise SkilltrainError(f"{wrong}; its splits: {', '.join(map(str, splits)) or 'none'}", where=where, fix=fix)
    rows = splits[chosen].select_columns(_known_columns(splits[chosen].column_names, where))
    return _skills_from_rows(rows, where, Path(name).name if Path(name).exists() else name)
