"""Rows of foreign files, checked: a fault names file and row."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl

Text = Annotated[str, Field(min_length=1)]
Label = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, str | int) else "")
]
"""What a row says of a query; anything but a text or a whole number says nothing, and is no fault."""


class Row(BaseModel):
    """What we read of a foreign file; keys we do not need are allowed there."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class NamedRow(Row):
    """A row with an id that stands once in a file."""

    row_id: Text = Field(alias="id")


RowT = TypeVar("RowT", bound=Row)
NamedRowT = TypeVar("NamedRowT", bound=NamedRow)


def parse_row(row_class: type[RowT], values: Any, where: str) -> RowT:
    """`values` as a row. Raises SkilltrainError naming `where` and the key at fault."""
    try:
        return row_class.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise SkilltrainError(
            "invalid-row", f"{key}: {fault['msg']}" if key else fault["msg"], where=where
        ) from error


def read_rows(row_class: type[RowT], *files: Path) -> Iterator[tuple[str, RowT]]:
    """Yield (file and line, row) of JSON Lines files."""
    for file in files:
        for where, values in read_jsonl(file):
            yield where, parse_row(row_class, values, where)


def unique(what: str, rows: Iterable[tuple[str, NamedRowT]]) -> dict[str, NamedRowT]:
    """id → row, in order. Raises SkilltrainError for an id that appears twice; `what` has it."""
    found: dict[str, NamedRowT] = {}
    for where, row in rows:
        if found.setdefault(row.row_id, row) is not row:
            raise SkilltrainError(
                "repeated-id", f"{what} '{row.row_id}' appears twice", where=where
            )
    return found
