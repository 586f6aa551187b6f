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
from skilltrain.data.pool.skill_file import clean_text, decode_text, parse_skill_file
from skilltrain.data.pool.skill_rows import BODY_COLUMNS, COLUMNS, ID_COLUMNS, Refused, skill_from_row
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, TableSpec, table_path
from skilltrain.terminal import say

MAX_FILE_BYTES = 64 * 2**20
HF_PREFIX = "hf:"
SHARD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ROWS = 256  # of a table in memory at once
_COLLECTED, _UNPACKED = "collected.jsonl", "skills"  # of the stage `collect`: the folders that SKILLS was read from
_OWN_FILES = {f"{spec.name}.parquet" for spec in vars(tables).values() if isinstance(spec, TableSpec)} | {
    _COLLECTED, "origins.jsonl", "pool_copies.parquet",
}  # fmt: skip


def read_source(source: Path | str) -> Iterator[Skill | Refused]:
    """The skills of one source, and what in it is none; a text is `hf:` and a dataset's name or folder.

    Raises SkilltrainError where the source itself is missing, is not what its name says, or has no skills' columns.
    """
    if isinstance(source, str):
        return _read_dataset(source.removeprefix(HF_PREFIX))
    if source.is_dir():
        return _read_folder(source.resolve())
    if source.is_file():
        return _read_file(source)
    raise SkilltrainError("no such file or folder", where=source)


def _read_file(path: Path) -> Iterator[Skill | Refused]:
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return _read_jsonl(path)
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    if path.name.lower() == "skill.md":
        return iter([_read_skill_file(path.resolve(), path.resolve().parent)])
    raise SkilltrainError(
        "cannot tell what this file is", where=path, fix="give a SKILL.md, .jsonl, .jsonl.gz or .parquet file"
    )


def _read_folder(root: Path) -> Iterator[Skill | Refused]:
    table = table_path(root, SKILLS)
    if table.is_file():
        yield from _read_parquet(table)
        files, _, refused = _walk(root, {*_OWN_FILES, *([_UNPACKED] if (root / _COLLECTED).is_file() else [])})
        yield from refused
        skill_files, shards = _sorted_by_kind(files)
        yield from _left_unread([*skill_files, *_loose(shards, skill_files)], root, table.name)
        return
    files, others, refused = _walk(root)
    yield from refused
    skill_files, shards = _sorted_by_kind(files)
    if skill_files:
        yield from (_read_skill_file(root / file, root) for file in skill_files)
        yield from _left_unread(_loose(shards, skill_files), root, "the SKILL.md files")
    elif shards:
        yield from _read_shards([root / file for file in shards], root)
    else:
        kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:3]
        have = ", ".join(f"{count} {kind}" for kind, count in kinds) or "nothing"
        raise SkilltrainError(f"holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file; it holds {have}", where=root)


def _is_skill_file(file: str) -> bool:
    return Path(file).name.lower() == "skill.md"


def _sorted_by_kind(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """(SKILL.md files, shards)."""
    kinds: tuple[list[str], list[str]] = [], []
    for file in files:
        kinds[not _is_skill_file(file)].append(file)
    return kinds


def _walk(root: Path, skip: Collection[str] = ()) -> tuple[list[str], Counter[str], list[Refused]]:
    """(SKILL.md files and shards below `root` in order of path, kinds of other files, what could not be entered).

    Paths are texts, relative to `root`: of these a million fit into memory. Links that lead out are not followed. What
    `skip` names in `root` itself is not looked at.
    """
    files: list[str] = []
    others: Counter[str] = Counter()
    refused: list[Refused] = []

    def unreadable(error: OSError) -> None:
        refused.append(Refused("", "unreadable", clean_text(f"{error.filename}: {error.strerror}")))

    for folder, folder_names, file_names in os.walk(root, onerror=unreadable):
        if folder == str(root):
            folder_names[:] = [name for name in folder_names if name not in skip]
            file_names = [name for name in file_names if name not in skip]
        links = [name for name in folder_names if _is_link(Path(folder) / name)]
        wanted = {name for name in file_names if _is_skill_file(name) or name.lower().endswith(SHARD_SUFFIXES)}
        leaving = {name for name in (*links, *wanted) if not _stays_below(Path(folder) / name, root)}
        for name in sorted(leaving):
            place = clean_text((Path(folder) / name).relative_to(root).as_posix())
            refused.append(Refused("", "link", f"{place} is a link that leads out of {root.name} or nowhere"))
        files += [str(Path(folder).relative_to(root) / name) for name in wanted - leaving]
        others.update(Path(name).suffix or name for name in file_names if name not in wanted)
    return sorted(files, key=lambda file: Path(file).parts), others, refused


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # its folder may be listed and not entered: whoever opens the file tells of that
        return False


def _stays_below(path: Path, root: Path) -> bool:
    if not _is_link(path):
        return True
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # a broken link; a loop
        return False


def _read_skill_file(path: Path, root: Path) -> Skill | Refused:
    place = clean_text(path.relative_to(root).as_posix())
    skill_id = clean_text(path.parent.relative_to(root).as_posix())
    source = clean_text(root.name)
    skill_id = source if skill_id == "." else skill_id
    try:
        if not path.is_file():
            return Refused(skill_id, "unreadable", f"{place} is not a plain file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return Refused(skill_id, "file_too_big", f"{place} has {size:,} bytes, more than 64 MiB", float(size))
        found = parse_skill_file(decode_text(path.read_bytes()), path.parent.name)
    except OSError as error:
        return Refused(skill_id, "unreadable", f"{place}: {error.strerror}")
    except SkilltrainError as error:
        return Refused(skill_id, "not_text", f"{place} {error.what}")
    return Skill(skill_id, found.name, found.description, found.body, found.category, found.lang, source, found.license)


def _loose(shards: list[str], skill_files: list[str]) -> list[str]:
    """Those shards that lie outside every skill's own folder: what lies inside one is part of that skill."""
    folders = {str(Path(file).parent) for file in skill_files} - {"."}
    return [file for file in shards if not folders & set(map(str, Path(file).parents))]


def _left_unread(files: list[str], root: Path, read: str) -> list[Refused]:
    """A row for each of `files`: perhaps skills too, but of the folder `read` was read."""
    if files:
        say(
            f"{root}: read {read}, not {len(files)} SKILL.md, .jsonl or .parquet files beside that, "
            f"the first {files[0]}; name these as sources of their own to read them"
        )
    why = f"lies beside {read} and was not read; name it as a source of its own"
    return [Refused("", "not_read", f"{clean_text(Path(file).as_posix())} {why}") for file in files]


def _read_shards(shards: list[Path], root: Path) -> Iterator[Skill | Refused]:
    """The rows of all shards of a folder; a broken one is told and left out unless all are broken."""
    faults: list[SkilltrainError] = []
    for path in shards:
        try:
            yield from _read_file(path)
        except SkilltrainError as error:
            faults.append(error)
            say(f"left out: {error}")
            yield Refused("", "unreadable", clean_text(str(error)))
    if len(faults) == len(shards):
        raise SkilltrainError(f"none of {len(shards)} files holds skills; the first: {faults[0]}", where=root)


def _read_jsonl(path: Path) -> Iterator[Skill | Refused]:
    number, has_skill, name = 0, False, clean_text(path.name)
    refused: list[Refused] = []  # held back until there is a skill: a file without one is told of as a whole
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = _skill_from_line(line, f"{name}, line {number}", name)
                if isinstance(found, Refused):
                    refused.append(found)
                else:
                    yield from refused
                    refused, has_skill = [], True
                    yield found
    except (OSError, EOFError, zlib.error) as error:
        if not number:
            raise SkilltrainError(f"cannot be read: {error}", where=path) from error
        refused.append(Refused("", "unreadable", f"{name} breaks off after line {number}: {error}"))
    if not has_skill:
        raise SkilltrainError(f"holds no skill: {refused[0].reason if refused else 'the file is empty'}", where=path)
    yield from refused


def _skill_from_line(line: bytes, place: str, source: str) -> Skill | Refused:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Refused("", "not_json", f"{place} is not JSON: {error}")
    if not isinstance(row, dict):
        return Refused("", "not_json", f"{place} is a {type(row).__name__}, not an object")
    return skill_from_row(row, place, source)


def _read_parquet(path: Path) -> Iterator[Skill | Refused]:
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
        have = ", ".join(names[:8])
        raise SkilltrainError(f"holds no skills: no column {need} among {have}", where=where)
    return [name for name in COLUMNS if name in names]


def _skills_from_batches(batches: Iterable[list[dict[str, Any]]], place: str, source: str) -> Iterator[Skill | Refused]:
    rows = (row for batch in batches for row in batch)
    for number, row in enumerate(rows, 1):
        yield skill_from_row(row, f"{place}, row {number}", source)


def _read_dataset(reference: str) -> Iterator[Skill | Refused]:
    """Skills of a Hugging Face dataset: owner/name, a folder it was saved to, either with `:split` behind."""
    import datasets
    from datasets.exceptions import DatasetsError

    name, split = reference, None
    if not Path(reference).exists() and ":" in reference:
        name, split = reference.rsplit(":", 1)
    where = HF_PREFIX + reference
    try:
        saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
        loaded: Any = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except (OSError, ValueError, DatasetsError) as error:
        raise SkilltrainError(f"cannot be loaded: {error}", where=where) from error
    splits: dict[Any, Any] = dict(loaded) if isinstance(loaded, dict) else {"": loaded}
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        choices = ", ".join(str(key) for key in splits if key) or "none"
        wrong = f"has no split '{split}'" if split else "has several splits"
        raise SkilltrainError(f"{wrong}; its splits: {choices}", where=where, fix=f"write {HF_PREFIX}{name}:SPLIT")
    columns = _known_columns(splits[split].column_names, where)
    tables = splits[split].select_columns(columns).with_format("arrow").iter(batch_size=_ROWS)
    source = Path(name).name if Path(name).exists() else name
    return _skills_from_batches((table.to_pylist() for table in tables), where, source)
