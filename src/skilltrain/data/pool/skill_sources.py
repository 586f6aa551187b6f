"""Where skills come from: folders of SKILL.md files, JSON Lines, parquet, and Hugging Face datasets."""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.data.pool.skill_file import (
    as_text,
    clean_text,
    decode_text,
    first_paragraph,
    one_line,
    parse_skill_file,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, table_path
from skilltrain.terminal import say

MAX_FILE_BYTES = 64 * 2**20
HF_PREFIX = "hf:"
ID_COLUMNS = ("skill_id", "id")
BODY_COLUMNS = ("body", "content", "skill_md")
COLUMNS = (*ID_COLUMNS, "name", "description", *BODY_COLUMNS, "category", "lang", "source", "license")
SHARD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ROWS = 256  # of a table in memory at once


@dataclass(frozen=True, slots=True)
class Refused:
    """Something in a source that did not become a skill, and why."""

    skill_id: str
    filter: str
    reason: str
    value: float | None = None


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
        return
    files, others, refused = _walk(root)
    yield from refused
    skill_files = [file for file in files if _is_skill_file(file)]
    shards = [root / file for file in files if not _is_skill_file(file)]
    if skill_files:
        yield from (_read_skill_file(root / file, root) for file in skill_files)
        if shards:
            yield from _left_unread(shards, skill_files, root)
    elif shards:
        yield from _read_shards(shards, root)
    else:
        kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:3]
        have = ", ".join(f"{count} {kind}" for kind, count in kinds) or "nothing"
        raise SkilltrainError(f"holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file; it holds {have}", where=root)


def _is_skill_file(file: str) -> bool:
    return Path(file).name.lower() == "skill.md"


def _walk(root: Path) -> tuple[list[str], Counter[str], list[Refused]]:
    """(SKILL.md files and shards below `root` in order of path, kinds of other files, what could not be entered).

    Paths are texts, relative to `root`: of these a million fit into memory. Links that lead out are not followed.
    """
    files: list[str] = []
    others: Counter[str] = Counter()
    refused: list[Refused] = []

    def unreadable(error: OSError) -> None:
        refused.append(Refused("", "unreadable", f"{error.filename}: {error.strerror}"))

    for folder, folder_names, file_names in os.walk(root, onerror=unreadable):
        links = [name for name in folder_names if (Path(folder) / name).is_symlink()]
        wanted = {name for name in file_names if _is_skill_file(name) or name.lower().endswith(SHARD_SUFFIXES)}
        leaving = {name for name in (*links, *wanted) if not _stays_below(Path(folder) / name, root)}
        for name in sorted(leaving):
            place = clean_text((Path(folder) / name).relative_to(root).as_posix())
            refused.append(Refused("", "link", f"{place} is a link that leads out of {root.name} or nowhere"))
        files += [str(Path(folder).relative_to(root) / name) for name in wanted - leaving]
        others.update(Path(name).suffix or name for name in file_names if name not in wanted)
    return sorted(files, key=lambda file: Path(file).parts), others, refused


def _stays_below(path: Path, root: Path) -> bool:
    if not path.is_symlink():
        return True
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # a broken link; a loop
        return False


def _read_skill_file(path: Path, root: Path) -> Skill | Refused:
    place = clean_text(path.relative_to(root).as_posix())
    skill_id = clean_text(path.parent.relative_to(root).as_posix())
    skill_id = clean_text(root.name) if skill_id == "." else skill_id
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
    return Skill(
        skill_id, found.name, found.description, found.body, found.category, found.lang, root.name, found.license
    )


def _left_unread(shards: list[Path], skill_files: list[str], root: Path) -> list[Refused]:
    """The shards that lie outside every skill's own folder: perhaps skills too, but the folder was read by SKILL.md."""
    folders = {str(Path(file).parent) for file in skill_files} - {"."}
    inside = [path.relative_to(root) for path in shards]
    loose = [path for path in inside if not folders & set(map(str, path.parents))]
    if loose:
        say(
            f"{root}: read {len(skill_files)} SKILL.md files, not {len(loose)} .jsonl or .parquet files beside them, "
            f"the first {loose[0].name}; name these as sources of their own to read them"
        )
    why = "lies beside SKILL.md files and was not read; name it as a source of its own"
    return [Refused("", "not_read", f"{clean_text(path.as_posix())} {why}") for path in loose]


def _read_shards(shards: list[Path], root: Path) -> Iterator[Skill | Refused]:
    """The rows of all shards of a folder; a broken one is told and left out unless all are broken."""
    faults: list[SkilltrainError] = []
    for path in shards:
        try:
            yield from _read_file(path)
        except SkilltrainError as error:
            faults.append(error)
            say(f"left out: {error}")
            yield Refused("", "unreadable", str(error))
    if len(faults) == len(shards):
        raise SkilltrainError(f"none of {len(shards)} files holds skills; the first: {faults[0]}", where=root)


def _read_jsonl(path: Path) -> Iterator[Skill | Refused]:
    number, has_skill = 0, False
    refused: list[Refused] = []  # held back until there is a skill: a file without one is told of as a whole
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = _skill_from_line(line, f"{path.name}, line {number}", path)
                if isinstance(found, Refused):
                    refused.append(found)
                else:
                    yield from refused
                    refused, has_skill = [], True
                    yield found
    except (OSError, EOFError, zlib.error) as error:
        if not number:
            raise SkilltrainError(f"cannot be read: {error}", where=path) from error
        refused.append(Refused("", "unreadable", f"{path.name} breaks off after line {number}: {error}"))
    if not has_skill:
        raise SkilltrainError(f"holds no skill: {refused[0].reason if refused else 'the file is empty'}", where=path)
    yield from refused


def _skill_from_line(line: bytes, place: str, path: Path) -> Skill | Refused:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Refused("", "not_json", f"{place} is not JSON: {error}")
    if not isinstance(row, dict):
        return Refused("", "not_json", f"{place} is a {type(row).__name__}, not an object")
    return skill_from_row(row, place, path.name)


def _read_parquet(path: Path) -> Iterator[Skill | Refused]:
    try:
        with pq.ParquetFile(path) as file:
            names = _known_columns(file.schema_arrow.names, path)
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_ROWS, columns=names))
            yield from _skills_from_batches(batches, path.name, path.parent.name)
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


def skill_from_row(row: Mapping[str, Any], place: str, source: str) -> Skill | Refused:
    """A skill from a row of a table in SkillRouter's shape, or why it is none.

    `content` and `skill_md` may hold a whole SKILL.md, whose frontmatter then fills what the row leaves out.
    """
    values = {key: _cell(row[key]) for key in COLUMNS if key in row}
    skill_id = next((one_line(values[key]) for key in (*ID_COLUMNS, "name") if values.get(key)), "")
    body_key = next((key for key in BODY_COLUMNS if values.get(key)), "")
    if not skill_id:
        return Refused("", "no_id", f"{place} has neither skill_id nor name")
    if not body_key:
        return Refused(skill_id, "empty_body", f"{place} has no body")
    if not isinstance(row[body_key], str | bytes):
        return Refused(skill_id, "not_text", f"{place}: {body_key} is a {type(row[body_key]).__name__}, not text")
    fallback_name = one_line(values.get("name") or skill_id.rsplit("/", 1)[-1])
    if body_key == "body":
        body, inner = values["body"].strip(), None
    else:
        inner = parse_skill_file(values[body_key], fallback_name)
        body = inner.body
    return Skill(
        skill_id=skill_id,
        name=one_line(values.get("name") or "") or (inner.name if inner else fallback_name),
        description=(values.get("description") or "").strip()
        or (inner.description if inner else first_paragraph(body)),
        body=body,
        category=one_line(values.get("category") or "") or (inner.category if inner else None),
        lang=one_line(values.get("lang") or "") or (inner.lang if inner else None),
        source=one_line(values.get("source") or source),
        license=one_line(values.get("license") or "") or (inner.license if inner else None),
    )


def _cell(value: Any) -> str:
    return clean_text(value.decode("utf-8", "replace")) if isinstance(value, bytes) else as_text(value)


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
