"""The command `show`: what stands in a table."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from skilltrain.cli.app import app, split_arguments
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.terminal import console
from skilltrain.texts import printable

_CELL_CHARS = 60


@app.command("show")
def show_table(
    file: Annotated[Path, typer.Argument(help="a .parquet file of any stage")],
    where: Annotated[list[str] | None, typer.Argument(help="column=value: only rows whose column holds value")] = None,
    rows: Annotated[int, typer.Option(min=1, help="how many rows to show")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="print all matching rows in full, one JSON object per line")
    ] = False,
) -> None:
    """Show the columns and the first rows of a table, or those rows that hold certain values.

    Example: skilltrain show runs/pool/dropped.parquet filter=duplicate
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        fix = f"its tables: {', '.join(path.name for path in sorted(file.glob('*.parquet')))}" if file.is_dir() else ""
        raise SkilltrainError("no such file", where=file, fix=fix)
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(f"cannot be read as parquet: {reason_of(error)}", where=file) from error
    wanted = dict(item.split("=", 1) for item in split_arguments(where or [])[1])
    if unknown := wanted.keys() - set(table.column_names):
        raise SkilltrainError(
            f"no column '{min(unknown)}'", where=file, fix=f"its columns: {', '.join(table.column_names)}"
        )
    found = [row for batch in table.to_batches() for row in batch.to_pylist() if _fits(row, wanted)]
    if as_json:
        for row in found:
            typer.echo(json.dumps(row, default=str))
        return
    console.print(f"{file}: {len(found):,} of {table.num_rows:,} rows, {table.num_columns} columns", markup=False)
    for row in islice(found, rows):
        typer.echo("")
        for name, value in row.items():
            typer.echo(f"{printable(name):>14}  {printable(_text(value), _CELL_CHARS)}")


def _fits(row: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    return all(
        value in (row[name] if isinstance(row[name], list) else [_text(row[name])]) for name, value in wanted.items()
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
