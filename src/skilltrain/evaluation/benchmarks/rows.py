"""Rows of foreign files, checked: a fault names file and row."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl
from skilltrain.records import Skill

Text = Annotated[str, Field(min_length=1)]


class Row(BaseModel):
    """What we read of a foreign file; keys we do not need are allowed there."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class SkillRow(Row):
    """A skill in a JSON Lines file."""

    skill_id: Text
    name: str
    description: str
    body: str
    category: str | None = None
    lang: str | None = None
    source: str = ""
    license: str | None = None


RowT = TypeVar("RowT", bound=Row)


def parse_row(row_class: type[RowT], values: Any, where: str) -> RowT:
    """`values` as a row. Raises SkilltrainError naming `where` and the key at fault."""
    try:
        return row_class.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise SkilltrainError(f"{key}: {fault['msg']}" if key else fault["msg"], where=where) from error


def read_unique_json(file: Path) -> Any:
    """The value in a JSON file. Raises SkilltrainError for a key that stands twice in an object: plain json keeps the
    last and says nothing.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique_keys)
    except FileNotFoundError as error:
        raise SkilltrainError("no such file", where=file) from error
    except SkilltrainError as error:
        raise SkilltrainError(error.what, where=file) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SkilltrainError(f"is not JSON: {error}", where=file) from error


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise SkilltrainError(f"'{key}' stands twice")
        values[key] = value
    return values


def read_skills(file: Path) -> tuple[Skill, ...]:
    """The skills of a JSON Lines file; none where there is no file."""
    if not file.exists():
        return ()
    rows = unique_rows(SkillRow, file, "skill", lambda row: row.skill_id)
    return tuple(Skill(**row.model_dump()) for _, row in rows)


def unique_rows(
    row_class: type[RowT], file: Path, what: str, id_of: Callable[[RowT], str]
) -> Iterator[tuple[str, RowT]]:
    """Yield (id, row) of a JSON Lines file, in order. Raises SkilltrainError for an id that stands twice."""
    seen: set[str] = set()
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        row = parse_row(row_class, values, where)
        row_id = id_of(row)
        if row_id in seen:
            raise SkilltrainError(f"{what} '{row_id}' stands twice", where=where)
        seen.add(row_id)
        yield row_id, row
