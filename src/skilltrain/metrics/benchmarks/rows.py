"""Read and check rows of published files. Errors name file and row."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_records

Text = Annotated[str, Field(min_length=1)]
Label = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, str | int) else "")
]
"""Label of a query. A value that is neither a text nor a whole number is read as empty."""


class Row(BaseModel):
    """The keys of a published file that we read. Others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class NamedRow(Row):
    """A row with an id that is unique in its file."""

    row_id: Text = Field(alias="id")


RowT = TypeVar("RowT", bound=Row)
NamedRowT = TypeVar("NamedRowT", bound=NamedRow)


def parse_row(row_class: type[RowT], values: Any, where: str) -> RowT:
    """Check the values of a row.

    Raises:
        SkilltrainError: A value is wrong. The error names `where` and the key.
    """
    try:
        return row_class.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        problem = f"{key}: {fault['msg']}" if key else fault["msg"]
        raise SkilltrainError("invalid-row", problem, where=where) from error


def read_rows(row_class: type[RowT], *files: Path) -> Iterator[tuple[str, RowT]]:
    """Yield (file and line, row) of .jsonl, .jsonl.gz, .parquet and .csv files."""
    for file in files:
        for where, values in read_records(file):
            yield where, parse_row(row_class, values, where)


def rows_by_id(noun: str, rows: Iterable[tuple[str, NamedRowT]]) -> dict[str, NamedRowT]:
    """Return rows by id, in order.

    Args:
        noun: What the row is, for errors, such as `query`.
        rows: Pairs of a row's file and line, and the row.

    Raises:
        SkilltrainError: An id appears twice.
    """
    by_id = {}
    for where, row in rows:
        if row.row_id in by_id:
            problem = f"{noun} '{row.row_id}' appears twice"
            raise SkilltrainError("repeated-id", problem, where=where)
        by_id[row.row_id] = row
    return by_id
