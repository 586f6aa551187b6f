"""Arguments of the Python API. They may be plain values, paths or tables of other packages.

Notes:
    - pandas is optional. Whoever has a DataFrame has imported it already.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError


def path_of(value: Any, name: str) -> Path:
    """Return an argument as a path.

    Args:
        value: The argument.
        name: Name of the argument, for the error.

    Raises:
        SkilltrainError: The argument is no path.
    """
    try:
        return Path(value)
    except TypeError:
        raise wrong_argument(name, "a path", value) from None


def rows_of(source: Any, name: str) -> list[Any]:
    """Return the rows of a table. Missing values of a DataFrame are left out.

    Args:
        source: A DataFrame of pandas, a `datasets.Dataset`, an iterable of rows, or a single dict.
        name: Name of the argument, for the error.
    """
    if isinstance(source, Mapping):
        return [source]
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise wrong_argument(name, "a table, or a list of rows", source)

    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(source, pandas.DataFrame):
        return list(source)
    frame: Any = source
    content = frame.to_json(orient="records", date_format="iso", double_precision=15)
    rows: list[Any] = []
    for row in json.loads(content):
        rows.append({column: value for column, value in row.items() if value is not None})
    return rows


def wrong_argument(name: str, expected: str, value: Any) -> SkilltrainError:
    """Return the error for an argument that is not what is expected."""
    return SkilltrainError(
        "invalid-setting", f"must be {expected}, found {value!r:.60}", where=name
    )
