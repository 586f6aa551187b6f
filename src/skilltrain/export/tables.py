"""Pushes the tables that stages write to the Hub, as a data set with a card."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published, write_card
from skilltrain.export.push import PushOptions, RepositoryKind, push_files
from skilltrain.files import shareable, unused_name, write_json
from skilltrain.runs import record_of
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    QUERIES,
    SKILLS,
    read_skills,
    read_table,
    table_path,
)

_TABLES = (LISTS, QUERIES, JUDGEMENTS, SKILLS)
_CARD = Path(__file__).parent / "templates" / "dataset_card.md.j2"
_DATASET = RepositoryKind("data set", "dataset", marker="provenance.json")


def find_tables(folders: Sequence[Path]) -> dict[str, pa.Table]:
    """Read the tables LISTS, QUERIES, JUDGEMENTS and SKILLS in folders.

    Returns:
        Tables by name, such as `queries`.

    Raises:
        SkilltrainError: A path is that of a file, two folders have a table of the same name, or a
            table is damaged.
    """
    tables: dict[str, pa.Table] = {}
    for folder in folders:
        if folder.is_file():
            problem = "is a file, and only folders are pushed"
            fix = "give the folder of the stage that wrote the file"
            raise SkilltrainError("conflicting-settings", problem, where=folder, fix=fix)
        for spec in _TABLES:
            if not table_path(folder, spec).is_file():
                continue
            if spec.name in tables:
                problem = f"has a table {spec.name}, and an earlier folder too"
                raise SkilltrainError("conflicting-settings", problem, where=folder)
            tables[spec.name] = read_table(folder, spec)
    return tables


def push_tables(
    tables: dict[str, pa.Table],
    folders: Sequence[Path],
    published: Published,
    options: PushOptions,
) -> dict[str, Any]:
    """Upload tables of stages to the dataset repository `published.repo` on the Hub.

    Args:
        tables: Tables by name, as `find_tables` returns them. Training lists refer to skills by id,
            and the table of these skills is not added automatically.
        folders: Folders of these tables, with the records of the stages that wrote them.
        published: Name and licence of the repository.
        options: How to write to the repository.

    Returns:
        `url` (None if nothing was sent), `files` (size in bytes by name) and `card`.

    Raises:
        SkilltrainError: A table holds a secret, or the Hub refuses the upload.
    """
    # With --no-bodies, the column `body` is left out.
    if options.no_bodies and SKILLS.name in tables:
        tables = tables | {SKILLS.name: tables[SKILLS.name].drop_columns(["body"])}
    # `shareable` removes parent folders from paths, because they may name a user.
    records: dict[str, Any] = {}
    for folder in folders:
        # The paths `.` and `..` have no names, so resolve them.
        name = unused_name(folder.resolve().name, records)
        records[name] = shareable(record_of(folder))
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        for name, table in tables.items():
            pq.write_table(table, Path(scratch, f"{name}.parquet"))
        # `marker` is a file name. Later pushes recognise a data set of skilltrain by this file.
        write_json(Path(scratch, _DATASET.marker), records)
        write_card(
            Path(scratch, "README.md"),
            _CARD,
            published=published,
            tables=tables,
            records=records,
            licenses=_count_licenses(folders),
        )
        paths = {path.name: path for path in Path(scratch).iterdir()}
        return push_files(paths, published, options, _DATASET)


def _count_licenses(folders: Sequence[Path]) -> dict[Path, Counter[tuple[str, str | None]]]:
    """Count the skills of each source and licence in the pools that tables were made from.

    Returns:
        Number of skills by source and licence, for each pool that is still on this machine.
    """
    counts_by_pool = {}
    for folder in folders:
        # The record of a stage names its pool. The folder of a pool holds the skills itself.
        # The pool of a recipe may be null.
        pool = Path(record_of(folder).get("recipe", {}).get("pool") or folder).resolve()
        if table_path(pool, SKILLS).is_file():
            skills = read_skills(pool)
            counts_by_pool[pool] = Counter((skill.source, skill.license) for skill in skills)
    return counts_by_pool
