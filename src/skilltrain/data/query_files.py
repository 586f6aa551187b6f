"""Rows of query files: JSON Lines, JSON, parquet and CSV, each with its place for errors."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import check_regular, read_json, read_jsonl


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a file. Raises SkilltrainError where it cannot be read as what its name says."""
    check_regular(path)
    kind = path.suffix.lower()
    if kind in (".jsonl", ".gz"):
        yield from ((f"{path}, line {number}", row) for number, row in read_jsonl(path))
        return
    readers = {".json": read_json, ".parquet": lambda path: pq.read_table(path).to_pylist(), ".csv": _read_csv}
    if kind not in readers:
        fix = "give a .jsonl, .jsonl.gz, .json, .parquet or .csv file"
        raise SkilltrainError("cannot tell what this file is", where=path, fix=fix)
    try:
        rows = readers[kind](path)
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise SkilltrainError(f"cannot be read as {kind[1:]}: {reason_of(error)}", where=path) from error
    if not isinstance(rows, list):
        raise SkilltrainError(f"is a {type(rows).__name__}, not a list of queries", where=path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise SkilltrainError(f"is a {type(row).__name__}, not an object", where=f"{path}, row {number}")
        yield f"{path}, row {number}", row


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; an empty cell is None, a cell that begins with a bracket is JSON."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, restkey="too many cells"))
    return [{key: _cell(value) for key, value in row.items()} for row in rows]


def _cell(value: Any) -> Any:
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    return (json.loads(value) if is_json else value) or None
