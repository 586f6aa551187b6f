"""Where skills come from: folders of SKILL.md files, JSON Lines, parquet, and Hugging Face datasets."""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain import tables
from skilltrain.data.pool.skill_file import parse_skill_file
from skilltrain.data.pool.skill_rows import BODY_COLUMNS, COLUMNS, ID_COLUMNS, skill_from_row
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped, Skill
from skilltrain.tables import SKILLS, TableSpec, table_path
from skilltrain.terminal import say
from skilltrain.texts import clean_text, decode_text

MAX_FILE_BYTES = 64 * 2**20
HF_PREFIX = "hf:"
SHARD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ROWS = 256  # of a table that become Python objects at once
# Beside skills.parquet, these are the project's own files and no source that was forgotten.
_COLLECTED, _UNPACKED = "collected.jsonl", "skills"  # of the stage `collect`: the folders that SKILLS was read from
_OWN_FILES = {f"{spec.name}.parquet" for spec in vars(tables).values() if isinstance(spec, TableSpec)} | {
    _COLLECTED, "origins.jsonl", "pool_copies.parquet",
}  # fmt: skip

Found = Iterator[Skill | Dropped]


def read_source(source: Path | str) -> Found:
    """The skills of one source, and what in it is none; a text is `hf:` and a dataset's name or folder.

    Raises SkilltrainError where the source itself is missing, is not what its name says, or has no skills' columns.
    """
    if isinstance(source, str) and source.startswith(HF_PREFIX):
        return _read_dataset(source.removeprefix(HF_PREFIX))
    path = Path(source)
    if path.is_dir():
        return _read_folder(path.resolve())
    if path.exists():
        return _read_file(path)
    raise SkilltrainError("no such file or folder", where=path)


def _read_file(path: Path) -> Found:
    name = path.name.lower()
    if not path.is_file():
        raise SkilltrainError("is a pipe or a device, not a file", where=path)
    if name.endswith((".jsonl", ".jsonl.gz")):
        return iter(_read_jsonl(path))
    if name.endswith(".parquet"):
        return _read_parquet(path)
    if name == "skill.md":
        return iter([_read_skill_file(path.resolve(), path.resolve().parent)])
    fix = "give a SKILL.md, .jsonl, .jsonl.gz or .parquet file"
    raise SkilltrainError("cannot tell what this file is", where=path, fix=fix)


def _read_folder(root: Path) -> Found:
    """A SKILLS table, else all SKILL.md files, else all shards of a folder; it is said what else is there."""
    table = table_path(root, SKILLS)
    has_collected = (root / _COLLECTED).is_file()
    skip = {*_OWN_FILES, *([_UNPACKED] if has_collected else [])} if table.is_file() else ()
    skill_files, shards, others, refused = _walk(root, skip)
    yield from refused
    if table.is_file():
        yield from _read_parquet(table)
        _say_unread([*skill_files, *_loose(shards, skill_files, root)], root)
    elif skill_files:
        yield from (_read_skill_file(file, root) for file in skill_files)
        _say_unread(_loose(shards, skill_files, root), root)
    elif shards:
        yield from _read_shards(shards, root)
    else:
        kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:3]
        have = ", ".join(f"{count} {kind}" for kind, count in kinds) or "nothing"
        raise SkilltrainError(f"holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file; it holds {have}", where=root)


def _walk(root: Path, skip: Collection[str]) -> tuple[list[Path], list[Path], Counter[str], list[Dropped]]:
    """(SKILL.md files, shards, kinds of other files, what could not be entered) below `root`, in order of path.

    Links that lead out are not followed. What `skip` names in `root` itself is not looked at.
    """
    skill_files, shards, others, refused = list[Path](), list[Path](), Counter[str](), list[Dropped]()

    def unreadable(error: OSError) -> None:
        refused.append(Dropped("", "", "unreadable", clean_text(f"{error.filename}: {error.strerror}")))

    for folder, folder_names, file_names in os.walk(root, onerror=unreadable):
        if folder == str(root):
            folder_names[:] = set(folder_names).difference(skip)
            file_names = set(file_names).difference(skip)
        for path in sorted(Path(folder, name) for name in (*folder_names, *file_names)):
            is_folder, name = path.name in folder_names, path.name.lower()
            is_skill_file, is_shard = name == "skill.md", name.endswith(SHARD_SUFFIXES)
            if (is_folder or is_skill_file or is_shard) and _leads_out(path, root):
                reason = f"{_place(path, root)} is a link that leads out of {clean_text(root.name)} or nowhere"
                refused.append(Dropped("", "", "link", reason))
            elif is_skill_file and not is_folder:
                skill_files.append(path)
            elif is_shard and not is_folder:
                shards.append(path)
            elif not is_folder:
                others[path.suffix or path.name] += 1
    return sorted(skill_files), sorted(shards), others, refused


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
    found = parse_skill_file(text, path.parent.name)
    return Skill(skill_id, found.name, found.description, found.body, found.category, found.lang, source, found.license)


def _loose(shards: list[Path], skill_files: list[Path], root: Path) -> list[Path]:
    """Those shards that lie outside every skill's own folder: what lies inside one is part of that skill."""
    folders = {file.parent for file in skill_files} - {root}
    return [file for file in shards if folders.isdisjoint(file.parents)]


def _say_unread(files: list[Path], root: Path) -> None:
    if files:
        first = _place(files[0], root)
        say(f"{root}: {len(files)} other files with skills are not read, the first {first}; name them as sources")


def _read_shards(shards: list[Path], root: Path) -> Found:
    """The rows of all shards of a folder; a broken one is said and left out unless all are broken."""
    faults: list[SkilltrainError] = []
    for path in shards:
        try:
            yield from _read_file(path)
        except SkilltrainError as error:
            faults.append(error)
            say(f"left out: {error}")
            yield Dropped("", "", "unreadable", clean_text(str(error)))
    if len(faults) == len(shards):
        raise SkilltrainError(f"none of {len(shards)} files holds skills; the first: {faults[0]}", where=root)


def _read_jsonl(path: Path) -> list[Skill | Dropped]:
    """The rows of a JSON Lines file. Raises SkilltrainError where none of them is a skill."""
    found: list[Skill | Dropped] = []
    number, name = 0, clean_text(path.name)
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_skill_from_line(line, f"{name}, line {number}", name))
    except (OSError, EOFError, zlib.error) as error:
        if not number:
            raise SkilltrainError(f"cannot be read: {error}", where=path) from error
        found.append(Dropped("", "", "unreadable", f"{name} breaks off after line {number}: {error}"))
    if not any(isinstance(item, Skill) for item in found):
        first = next((item.reason for item in found if isinstance(item, Dropped)), "the file is empty")
        raise SkilltrainError(f"holds no skill: {first}", where=path)
    return found


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
            names = _known_columns(file.schema_arrow.names, path)
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_ROWS, columns=names))
            yield from _skills_from_batches(batches, clean_text(path.name), clean_text(path.parent.name))
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(f"is not parquet: {error}", where=path) from error


def _known_columns(names: list[str], where: object) -> list[str]:
    """Those of `names` that tell of a skill. Raises SkilltrainError where there is no body, or neither id nor name."""
    lacks_id = not set(names) & {*ID_COLUMNS, "name"}
    if lacks_id or not set(names) & set(BODY_COLUMNS):
        need = "skill_id or name" if lacks_id else "body, content or skill_md"
        raise SkilltrainError(f"holds no skills: no column {need} among {', '.join(names[:8])}", where=where)
    return [name for name in COLUMNS if name in names]


def _skills_from_batches(batches: Iterable[list[dict[str, Any]]], place: str, source: str) -> Found:
    rows = (row for batch in batches for row in batch)
    for number, row in enumerate(rows, 1):
        yield skill_from_row(row, f"{place}, row {number}", source)


def _read_dataset(reference: str) -> Found:
    """Skills of a Hugging Face dataset: owner/name, a folder it was saved to, either with `:split` behind."""
    import datasets
    from datasets.exceptions import DatasetsError

    name, split, where = reference, None, HF_PREFIX + reference
    if not Path(reference).exists() and ":" in reference:
        name, split = reference.rsplit(":", 1)
    try:
        saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
        loaded: Any = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except (OSError, ValueError, DatasetsError) as error:
        raise SkilltrainError(f"cannot be loaded: {error}", where=where) from error
    splits: dict[Any, Any] = dict(loaded) if isinstance(loaded, dict) else {None: loaded}
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        choices = ", ".join(str(key) for key in splits if key) or "none"
        wrong = f"has no split '{split}'" if split else "has several splits"
        raise SkilltrainError(f"{wrong}; its splits: {choices}", where=where, fix=f"write {HF_PREFIX}{name}:SPLIT")
    columns = _known_columns(splits[split].column_names, where)
    batches = splits[split].select_columns(columns).with_format("arrow").iter(batch_size=_ROWS)
    source = Path(name).name if Path(name).exists() else name
    return _skills_from_batches((batch.to_pylist() for batch in batches), where, source)
