"""Arguments of the Python API. They may be plain values, paths or tables of other packages."""

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
    """Return the rows of a table. The rows themselves are not checked.

    Args:
        source: A DataFrame of pandas, a `datasets.Dataset`, another iterable of rows, or a dict,
            which is a single row. Missing values of a DataFrame are left out.
        name: Name of the argument, for the error.

    Returns:
        The rows in their order. A row of a DataFrame is a dict: value by column.

    Raises:
        SkilltrainError: The argument is no table.
    """
    # A dict is a single row.
    if isinstance(source, Mapping):
        return [source]
    # A text is iterable too, but its characters are no rows.
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise wrong_argument(name, "a table, or a list of rows", source)

    # pandas is optional, so do not import it. A user who has a DataFrame has imported pandas.
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(source, pandas.DataFrame):
        return list(source)

    # JSON turns the DataFrame's numbers, dates and missing values into plain Python values.
    # 15 is the largest number of decimals that `to_json` can write.
    frame: Any = source
    content = frame.to_json(orient="records", date_format="iso", double_precision=15)
    rows: list[Any] = []
    for row in json.loads(content):
        # A missing value is null in JSON, and None here.
        rows.append({column: value for column, value in row.items() if value is not None})
    return rows


def wrong_argument(name: str, expected: str, value: Any) -> SkilltrainError:
    """Return the error for an argument that is not what is expected.

    Args:
        name: Name of the argument.
        expected: What the argument must be, such as "a path".
        value: The argument. Its first 60 characters are shown.
    """
    return SkilltrainError(
        "invalid-setting", f"must be {expected}, found {value!r:.60}", where=name
    )
