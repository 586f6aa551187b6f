"""Read skills from SKILL.md files, JSON Lines, parquet and Hugging Face datasets.

Notes:
    - The folder of a pool stores the number of skills of each source. The skills of a source are
      side by side in the pool.
    - Two files that could be the SKILL.md of a skill give none, because the right one is not
      certain.
    - A folder with a SKILLS table and a run file is written by the stage `pool`. Its other files
      hold no further skills.
    - A shard in the folder of a skill is part of that skill.
    - `os.walk` enters no linked folders. A linked folder inside the root is visited at its real
      place. Links that lead out of the root are refused.
    - `Path.resolve` and `Path.is_file` raise in folders that may not be entered; `os.path` does
      not.
    - A damaged dataset can cause any exception.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.arguments import rows_of, wrong_argument
from skilltrain.data.pool.skill_file import (
    BODY_COLUMNS,
    COLUMNS,
    ID_COLUMNS,
    MAX_FILES,
    SKILL_FILE,
    bundled_paths,
    dropped_for_users,
    dropped_skill,
    is_for_users_only,
    parse_skill_file,
    skill_from_row,
)
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import LINE_ERRORS, json_object, numbered_lines, read_local
from skilltrain.records import Dropped, Skill, counted
from skilltrain.runs import RUN_FILE
from skilltrain.tables import SKILLS, read_skills, table_path
from skilltrain.terminal import say, track
from skilltrain.texts import SURROGATES, clean_text, decode_text, language_of, one_line, printable

MAX_BODY_CHARS = 200_000  # longer bodies are cut
MAX_FILE_BYTES = 64 * 2**20  # of a SKILL.md; larger files are not read
CUT = "body_too_long"  # `filter` of a row in DROPPED whose skill is kept with a cut body
HF_PREFIX = "hf:"
_SHARDS = (".jsonl", ".jsonl.gz", ".parquet")
_RENAMED = re.compile(r"~\d+$")  # what `merge_sources` adds to an id that is taken
_BATCH_ROWS = 256  # rows of a parquet file that are converted at once
_LANGUAGE_CHARS = 4_000  # characters of a body from which its language is detected
SOURCE_FILES = ("skill.md", *_SHARDS)
"""Endings of the names of files that may hold skills, in lower case."""

SkillsOrDropped = Iterator[Skill | Dropped]
"""Skills of a source, and a row of DROPPED for everything in it that is no skill."""


def read_pool(source: Any) -> list[Skill]:
    """Read skills, and check that their ids are unique.

    A message gives the number of files, rows and copies of skills that are left out. Copies with
    different ids are kept.

    Args:
        source: A source of the stage `pool`, the folder or file of a SKILLS table, a DataFrame, a
            `datasets.Dataset`, rows, or skills. A row is a dict with `name` and `body`, and perhaps
            `skill_id`, `description`, `category`, `lang`, `source` and `license`.

    Raises:
        SkilltrainError: There is no skill, or a row of a table in memory is no skill.

    >>> row = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}
    >>> read_pool([row])[0].skill_id
    'pdf-merge'
    """
    if not isinstance(source, Path | str):
        return _skills_of_rows(rows_of(source, "skills"))
    if is_table(source):
        return [*chain.from_iterable(read_by_source(Path(source)).values())]

    sources, dropped = read_sources([source])
    # `copies` are rows of DROPPED for copies of a skill with the same id.
    (skills,), copies = merge_sources(sources, drop_duplicates=False)

    # Say what is left out. A skill whose body is cut (filter CUT) is not left out.
    num_by_filter = counted(row.filter for row in dropped + copies if row.filter != CUT)
    if num_by_filter:
        num_dropped = sum(num_by_filter.values())
        reasons = ", ".join(f"{name} {count}" for name, count in num_by_filter.items())
        say(
            f"{source}: {num_dropped} of {len(skills) + num_dropped} left out ({reasons}); "
            f"`skilltrain pool sources={source}` lists them"
        )
    return skills


def is_table(path: Path | str) -> bool:
    """Return whether a path is a SKILLS table, or a folder with one."""
    file = table_path(Path(path), SKILLS)  # `path` itself, if it is a file
    return file.is_file() and file.name == f"{SKILLS.name}.parquet"


def read_by_source(pool: Path) -> dict[Path, list[Skill]]:
    """Read the skills of a pool by the folder or file that they come from.

    If the pool does not store a fitting number of skills for each source, the pool itself is the
    only source.
    """
    if not is_table(pool):
        return {pool.resolve(): read_pool(pool)}
    skills = read_skills(pool)
    # A file in the folder of the pool stores the number of skills of each source.
    num_skills_by_source = read_local(table_path(pool, SKILLS).parent)
    if sum(num_skills_by_source.values()) != len(skills):
        num_skills_by_source = {str(pool.resolve()): len(skills)}

    # The skills of a source are side by side in the pool.
    remaining = iter(skills)
    skills_by_source = {}
    for source, num_skills in num_skills_by_source.items():
        root = Path(source)
        source_skills = islice(remaining, num_skills)
        skills_by_source[root] = [replace(skill, root=root) for skill in source_skills]
    return skills_by_source


def find_skill_file(skill: Skill) -> Path | None:
    """Return the SKILL.md of a skill; None if it is missing or not certain.

    The file is in a folder below `skill.root`. The path of this folder is the id of the skill,
    without a number such as `~2` that `merge_sources` may have added.
    """
    root = skill.root
    if root is None:
        return None
    if root.name.lower() == SKILL_FILE.lower():
        root = root.parent  # the source is a single SKILL.md

    original_id = _RENAMED.sub("", skill.skill_id)
    folders = {root / skill.skill_id, root / original_id}
    if root.name == original_id:
        folders.add(root)  # the folder itself may be the skill
    files = [_skill_file_in(folder, root) for folder in folders]
    existing_files = [file for file in files if file is not None]
    # With two files, it is not certain which file is meant.
    return existing_files[0] if len(existing_files) == 1 else None


def _skill_file_in(folder: Path, root: Path) -> Path | None:
    """Return the file SKILL.md, or else skill.md, of a folder; None if it is outside `root`."""
    for name in (SKILL_FILE, SKILL_FILE.lower()):
        file = folder / name
        # Not Path.is_file, which raises in a folder that may not be entered.
        if os.path.isfile(file) and file.resolve().is_relative_to(root.resolve()):  # noqa: PTH113
            return file
    return None


def _skills_of_rows(rows: list[Any]) -> list[Skill]:
    """Convert rows of a table to skills with unique ids. Skills are returned as they are.

    A repeated id of a row is renamed to ID~2, ID~3 and so on. Equal skills with different ids are
    kept.

    Args:
        rows: Rows, as values by column, or skills.

    Raises:
        SkilltrainError: A row is no skill, or two skills have the same id.
    """
    if not rows:
        raise SkilltrainError("empty-pool", "the pool is empty")
    if all(isinstance(row, Skill) for row in rows):
        if len({skill.skill_id for skill in rows}) < len(rows):
            raise SkilltrainError("repeated-id", "two skills have the same id", where="skills")
        return rows
    skills = [_skill_of_row(row, number) for number, row in enumerate(rows)]
    (merged,), _ = merge_sources([skills], drop_duplicates=False)
    return merged


def _skill_of_row(row: Any, number: int) -> Skill:
    """Convert a row of a table to a skill.

    Args:
        row: Value by column, such as `name` and `body`.
        number: Number of the row, for errors.

    Raises:
        SkilltrainError: The row is no skill.
    """
    where = f"row {number}"
    if not isinstance(row, Mapping):
        raise wrong_argument(f"skills, {where}", "a dict of columns", row)
    skill = skill_from_row(row, where, source="")
    # A row of DROPPED instead of a skill says what is wrong.
    if isinstance(skill, Dropped):
        columns = ", ".join(map(str, row))
        fix = f"a skill has a name, and a body or a description; this row has {columns}"
        raise SkilltrainError("invalid-row", skill.reason, where="skills", fix=fix)
    return _with_language(skill)


def read_sources(sources: Sequence[Path | str]) -> tuple[list[list[Skill]], list[Dropped]]:
    """Read the skills of each source, and cut long bodies to MAX_BODY_CHARS.

    Args:
        sources: Files, folders or other sources that `read_source` accepts.

    Returns:
        Skills of each source. A row of the table DROPPED for everything that is no skill, and for
        each skill whose body was cut.

    Raises:
        SkilltrainError: A source cannot be read, or no skill is left.
    """
    skills_by_source = []
    all_dropped = []
    for source in sources:
        skills, dropped = _read_and_cut(source)
        skills_by_source.append(skills)
        # Name the source in each row. `clean_text` makes its name safe to write to a table.
        all_dropped += [replace(row, source=clean_text(str(source))) for row in dropped]
        # With a single source, the error below says the same.
        if not skills and len(sources) > 1:
            reason = _first_reason(dropped) or "it is empty"
            say(f"warning: the source {source} gives no skill ({reason})")
    if not any(skills_by_source):
        problem = f"no skill is left of {len(sources)} source(s)"
        fix = _first_reason(all_dropped)
        raise SkilltrainError("nothing-left", problem, where=sources[0], fix=fix)
    return skills_by_source, all_dropped


def _read_and_cut(source: Path | str) -> tuple[list[Skill], list[Dropped]]:
    """Read one source, and cut long bodies to MAX_BODY_CHARS; see `read_sources`."""
    skills = []
    dropped = []
    # An item is a skill, or the report of something that is no skill.
    for item in track(read_source(source), "reading skills", None):
        if isinstance(item, Dropped):
            dropped.append(item)
            continue
        # A cut skill gets a row of DROPPED as a report, but stays in the pool.
        if len(item.body) > MAX_BODY_CHARS:
            num_chars = len(item.body)
            reason = f"kept, its body cut from {num_chars:,} to {MAX_BODY_CHARS:,} characters"
            dropped.append(dropped_skill(item.skill_id, CUT, reason, value=float(num_chars)))
        skill = replace(item, body=item.body[:MAX_BODY_CHARS].rstrip())
        skills.append(_with_language(skill))
    return skills, dropped


def _with_language(skill: Skill) -> Skill:
    """Return the skill with its language, which is detected if the skill has none."""
    if skill.lang:
        return skill
    text = f"{skill.name}\n{skill.description}\n{skill.body[:_LANGUAGE_CHARS]}"
    return replace(skill, lang=language_of(text))


def _first_reason(dropped: Sequence[Dropped]) -> str:
    """Return the first reason, for a message; an empty text without dropped rows."""
    return f"the first of {len(dropped)} dropped rows: {dropped[0].reason}" if dropped else ""


def merge_sources(
    sources: Sequence[Sequence[Skill]], drop_duplicates: bool
) -> tuple[list[list[Skill]], list[Dropped]]:
    """Join the skills of sources: drop duplicates, and make ids unique.

    The first skill with an id keeps it. The others are renamed to ID~2, ID~3 and so on.

    Args:
        sources: Skills of each source.
        drop_duplicates: True: drop a skill if its name, description and body are those of an
            earlier skill. False: drop it only if its id is the same too.

    Returns:
        Skills of each source in order of id; a row of DROPPED for each dropped skill.
    """
    first_id_by_content = {}  # final id of the first skill, by hash of its texts
    identities = set()  # (id, content) of the kept skills; the id is empty if it does not count
    taken_ids = {skill.skill_id for skill in chain.from_iterable(sources)}
    numbers = Counter[str]()  # number of skills with an id so far; see `_unique_id`
    merged = []
    dropped = []
    for skills in sources:
        merged.append([])
        for skill in sorted(skills, key=lambda skill: skill.skill_id):
            content = content_digest(skill)
            # With `drop_duplicates`, skills with the same content are copies whatever their ids.
            identity = ("" if drop_duplicates else skill.skill_id, content)
            if identity in identities:
                first_id = first_id_by_content[content]
                reason = f"has the same name, description and body as {first_id}"
                row = dropped_skill(skill.skill_id, "duplicate", reason, other_id=first_id)
                dropped.append(row)
                continue
            identities.add(identity)
            new_id = _unique_id(skill.skill_id, taken_ids, numbers)
            first_id_by_content.setdefault(content, new_id)
            merged[-1].append(replace(skill, skill_id=new_id))
    return merged, dropped


def _unique_id(skill_id: str, taken_ids: set[str], numbers: Counter[str]) -> str:
    """Return the id of a skill, or ID~2, ID~3 and so on if an earlier skill has the id.

    Args:
        skill_id: The id.
        taken_ids: Ids of all skills, and the new ids. A new id is added.
        numbers: Last number of each id. The first skill with an id has the number 1.
    """
    numbers[skill_id] += 1
    if numbers[skill_id] == 1:
        return skill_id
    # The new id must not be the id of another skill.
    while f"{skill_id}~{numbers[skill_id]}" in taken_ids:
        numbers[skill_id] += 1
    new_id = f"{skill_id}~{numbers[skill_id]}"
    taken_ids.add(new_id)
    return new_id


def content_digest(skill: Skill) -> bytes:
    """Hash the texts of a skill to 16 bytes. Case and white space do not count."""
    # NUL separates the texts, because `clean_text` has removed it from them.
    texts = "\x00".join(map(one_line, (skill.name, skill.description, skill.body)))
    return hashlib.blake2b(texts.casefold().encode(), digest_size=16).digest()


def read_source(source: Path | str) -> SkillsOrDropped:
    """Yield the skills of one source, and a row of DROPPED for everything that is no skill.

    Args:
        source: A file or folder, or `hf:` with the name or folder of a dataset.

    Raises:
        SkilltrainError: The source is missing, lacks columns, or is not in the format that its name
            says.
    """
    if isinstance(source, str) and source.startswith(HF_PREFIX):
        return _read_dataset(source.removeprefix(HF_PREFIX))
    path = Path(source)
    name = path.name.lower()
    if not path.exists():
        raise SkilltrainError("not-found", "no such file or folder", where=path)
    if path.is_dir():
        return _read_folder(path.resolve())
    if not path.is_file():
        raise SkilltrainError("special-file", "is a pipe or a device, not a file", where=path)
    if name == "skill.md":
        return iter([_read_skill_file(path.resolve(), path.resolve().parent)])
    if name.endswith(_SHARDS):
        return _read_parquet(path) if name.endswith(".parquet") else _read_jsonl(path)
    fix = f"give a SKILL.md, {' or '.join(_SHARDS)} file"
    raise SkilltrainError("unknown-format", "cannot tell what this file is", where=path, fix=fix)


def _read_folder(root: Path) -> SkillsOrDropped:
    """Read the skills of a folder: its SKILLS table, corpus.jsonl, SKILL.md files, or shards.

    Only one of these kinds is read. Shards are .jsonl, .jsonl.gz and .parquet files. A message
    names the files that are not read.

    Args:
        root: Folder, as an absolute path without links.

    Yields:
        Skills, and a row of DROPPED for each file or folder that cannot be read.

    Raises:
        SkilltrainError: The folder has no file of any kind.
    """
    # The stage `pool` writes a table and a run file. Its folder holds no further skills.
    table = table_path(root, SKILLS)
    is_pool = table.is_file() and (root / RUN_FILE).is_file()
    if is_pool:
        yield from _read_parquet(table)
        return

    # A BEIR folder has queries and judgements beside its corpus. Without them, corpus.jsonl is a
    # shard as any other.
    corpus = root / "corpus.jsonl"
    has_queries = any((root / name).exists() for name in ("queries.jsonl", "queries", "qrels"))
    if corpus.is_file() and has_queries:
        yield from _read_jsonl(corpus)
        return

    # `unreadable` has a row of DROPPED for each link or folder that cannot be followed. These rows
    # are not needed if there is a table, because only the table is read then.
    skill_files, shards, unreadable = _walk(root)
    # A shard in the folder of a skill is part of that skill. Shards elsewhere may hold more skills.
    skill_folders = {file.parent for file in skill_files} - {root}
    separate_shards = [
        file for file in shards if file != table and skill_folders.isdisjoint(file.parents)
    ]
    if table.is_file():
        yield from _read_parquet(table)
        _say_what_is_not_read(skill_files + separate_shards, root)
    elif skill_files:
        yield from unreadable
        yield from (_read_skill_file(file, root) for file in skill_files)
        _say_what_is_not_read(separate_shards, root)
    # Here no folder has a SKILL.md, so no shard is part of a skill, and all shards are read.
    elif shards:
        yield from unreadable
        yield from chain.from_iterable(map(_read_shard, shards))
    else:
        problem = "holds no SKILL.md, .jsonl, .jsonl.gz or .parquet file"
        raise SkilltrainError("no-skill-file", problem, where=root)


def _say_what_is_not_read(files: list[Path], root: Path) -> None:
    """Print the number of files with skills that are not read, and the first one's path."""
    if files:
        first = _relative_path(files[0], root)
        say(
            f"{root}: {len(files)} other files with skills are not read, the first {first}; "
            "name them as sources"
        )


def _walk(root: Path) -> tuple[list[Path], list[Path], list[Dropped]]:
    """Find the files with skills below a folder, without links that lead out of the folder.

    Args:
        root: Folder, as an absolute path without links.

    Returns:
        SKILL.md files; shards; a row of DROPPED for each refused link and each unreadable folder.
    """
    skill_files = []
    shards = []
    refused = []
    errors = []  # an OSError for each folder that cannot be read
    for folder, folder_names, file_names in os.walk(root, onerror=errors.append):
        for path in sorted(Path(folder, name) for name in folder_names + file_names):
            name = path.name.lower()
            is_folder = path.name in folder_names
            is_skill_file = name == "skill.md" and not is_folder
            is_shard = name.endswith(_SHARDS) and not is_folder
            if not (is_folder or is_skill_file or is_shard):
                continue

            # Refuse links that lead out. A linked folder inside `root` needs no step here: os.walk
            # visits the folder at its real place.
            if _leads_out(path, root):
                link = _relative_path(path, root)
                reason = f"{link} is a link that leads out of {clean_text(root.name)} or nowhere"
                refused.append(Dropped("", "", "link", reason))
            elif is_skill_file:
                skill_files.append(path)
            elif is_shard:
                shards.append(path)

    for error in errors:
        reason = clean_text(f"{error.filename}: {error.strerror}")
        refused.append(Dropped("", "", "unreadable", reason))
    return sorted(skill_files), sorted(shards), refused


def _leads_out(path: Path, root: Path) -> bool:
    """Return whether a path is a link that leads out of `root` or nowhere."""
    # Not Path.resolve, which raises for folders that may not be entered.
    target = Path(os.path.realpath(path))
    is_link = target != path
    return is_link and not (target.is_relative_to(root) and target.exists())


def _relative_path(path: Path, root: Path) -> str:
    """Return a path below `root`, with U+FFFD in place of each byte that is not UTF-8."""
    # Python represents such bytes as lone surrogates.
    return clean_text(SURROGATES.sub("\ufffd", path.relative_to(root).as_posix()))


def _read_skill_file(path: Path, root: Path) -> Skill | Dropped:
    """Read a SKILL.md and the names of the files beside it.

    Args:
        path: The SKILL.md.
        root: Folder of the source. The skill's id is the path of its folder below `root`.
    """
    name = _relative_path(path, root)
    source = clean_text(root.name)
    # If the source is itself the folder of the skill, its name is the id.
    parent_of_id = root.parent if path.parent == root else root
    skill_id = _relative_path(path.parent, parent_of_id)
    try:
        if not path.is_file():
            return dropped_skill(skill_id, "unreadable", f"{name} is not a plain file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            reason = f"{name} has {size:,} bytes, more than 64 MiB"
            return dropped_skill(skill_id, "file_too_big", reason, float(size))
        text = decode_text(path.read_bytes())
    except OSError as error:
        return dropped_skill(skill_id, "unreadable", f"{name}: {error.strerror}")
    if text is None:
        return dropped_skill(skill_id, "not_text", f"{name} is not text")
    # The author may forbid that a model starts the skill.
    if is_for_users_only(text):
        return dropped_for_users(skill_id)
    skill = parse_skill_file(text, skill_id, fallback_name=path.parent.name, source=source)
    if not (skill.body or skill.description):
        return dropped_skill(skill_id, "empty_body", "the skill has neither description nor body")

    # Name the files beside the SKILL.md, at most MAX_FILES.
    files = filter(_is_plain_file, bundled_paths(path.parent))
    names = (_relative_path(file, path.parent) for file in islice(files, MAX_FILES))
    return replace(skill, files=tuple(names), root=root)


def _is_plain_file(path: Path) -> bool:
    """Return whether a path is a file that can be reached, and is not a link."""
    return os.path.isfile(path) and not os.path.islink(path)  # noqa: PTH113, PTH114


def _read_shard(path: Path) -> SkillsOrDropped:
    """Read one shard of a folder. A broken shard is reported and left out."""
    try:
        yield from read_source(path)
    except SkilltrainError as error:
        say(f"left out: {error}")
        yield Dropped("", "", "unreadable", clean_text(str(error)))


def _read_jsonl(path: Path) -> SkillsOrDropped:
    """Read a JSON Lines file. A file that breaks off gives the skills before the break.

    Yields:
        A skill for each line, or a row of DROPPED for a line that is no skill.

    Raises:
        SkilltrainError: Not even the first line can be read.
    """
    number = 0  # of the last line read
    name = clean_text(path.name)
    try:
        for number, line in numbered_lines(path):
            where = f"{name}, line {number}"
            try:
                row = json_object(line)
            except ValueError as error:
                yield Dropped("", "", "not_json", f"{where} is no JSON object: {error}")
            else:
                yield skill_from_row(row, where, name)
    except LINE_ERRORS as error:
        if not number:  # no line was read
            problem = f"cannot be read: {reason_of(error)}"
            raise SkilltrainError("unreadable-file", problem, where=path) from error
        reason = f"{name} breaks off after line {number}: {reason_of(error)}"
        yield Dropped("", "", "unreadable", reason)


def _read_parquet(path: Path) -> SkillsOrDropped:
    """Read a parquet file in batches, so that it never is in memory as a whole.

    Yields:
        A skill for each row, or a row of DROPPED for a row that is no skill.

    Raises:
        SkilltrainError: The file is not parquet, or lacks columns.
    """
    name = clean_text(path.name)
    source = clean_text(path.parent.name)
    try:
        with pq.ParquetFile(path) as file:
            columns = _known_columns(file.schema_arrow.names, path)
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield skill_from_row(row, f"{name}, row {number}", source)
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError("not-parquet", f"is not parquet: {error}", where=path) from error


def _known_columns(names: list[str], where: object) -> list[str]:
    """Return the columns of a table that skills have. The others are not read.

    Args:
        names: Names of all columns.
        where: The table, for the error.

    Raises:
        SkilltrainError: The table has no column that names a skill, or no column with its text.
    """
    lacks_id = {*ID_COLUMNS, "name"}.isdisjoint(names)
    lacks_text = {*BODY_COLUMNS, "description"}.isdisjoint(names)
    if lacks_id or lacks_text:
        needed = "skill_id or name, and body, content or skill_md (or description alone: tools)"
        problem = f"holds no skills: needs the columns {needed}; has {', '.join(names[:8])}"
        raise SkilltrainError("missing-column", problem, where=where)
    return [name for name in COLUMNS if name in names]


def _read_dataset(reference: str) -> SkillsOrDropped:
    """Read a Hugging Face dataset.

    Args:
        reference: OWNER/NAME, or a folder that the dataset was saved to. `:SPLIT` may follow.
    """
    name = reference
    split = ""
    where = HF_PREFIX + reference
    # The path of a folder may contain a colon itself, so look for the folder first.
    if not Path(reference).exists() and ":" in reference:
        name, split = reference.rsplit(":", 1)
    rows = _choose_split(_load_splits(name, where), split, name, where)
    # Do not convert the columns that no skill has.
    rows = rows.select_columns(_known_columns(rows.column_names, where))
    source = Path(name).name if Path(name).exists() else name
    for number, row in enumerate(rows, 1):
        yield skill_from_row(row, f"{where}, row {number}", source)


def _load_splits(name: str, where: str) -> dict[Any, Any]:
    """Load the splits of a dataset by name. A dataset without splits has the empty name.

    Args:
        name: OWNER/NAME, or a folder.
        where: The dataset, for the error.

    Returns:
        A `datasets.Dataset` by name of the split.

    Raises:
        SkilltrainError: The dataset cannot be read.
    """
    import datasets

    # The method `save_to_disk` of a dataset writes one of these files.
    is_saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    load: Any = datasets.load_from_disk if is_saved else datasets.load_dataset
    try:
        loaded = load(name)
    except Exception as error:  # a damaged dataset can cause any exception
        problem = f"cannot be read: {printable(reason_of(error), 300)}"
        raise SkilltrainError("unreadable-file", problem, where=where) from error
    # A `DatasetDict` holds several splits, and a `Dataset` only rows.
    return dict(loaded) if isinstance(loaded, dict) else {"": loaded}


def _choose_split(splits: dict[Any, Any], split: str, name: str, where: str) -> Any:
    """Return the rows of a split. The only split of a dataset need not be named.

    Args:
        splits: Rows by name of the split.
        split: Name of the split. Empty: the only split.
        name: Name of the dataset, for advice.
        where: The dataset, for the error.
    """
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        fault = f"has no split '{split}'" if split else "has several splits"
        problem = f"{fault}; its splits: {', '.join(map(str, splits)) or 'none'}"
        fix = f"write {HF_PREFIX}{name}:SPLIT"
        raise SkilltrainError("choose-split", problem, where=where, fix=fix)
    return splits[split]
