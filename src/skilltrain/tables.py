"""Declared tables that stages exchange, with strict reading and writing.

Rows that do not fit a table are errors. Without the checks here, pyarrow would silently change or
drop values.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64

from skilltrain.arguments import rows_of
from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.records import Dropped, Judgement, Query, Skill, Verdict


@dataclass(frozen=True)
class TableSpec:
    """File name, columns and unique key of a table.

    Files of earlier versions may lack the last columns that may be null. They are read as null.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]


Rows = Iterable[Mapping[str, Any] | Skill | Query | Judgement | Dropped]
"""Rows of a table: mappings, or records."""
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Arrow type by the name of a kind of column. `texts` is a list of `text`, and so on.
_ARROW_TYPES = {"text": pa.string(), "int": pa.int32(), "float": pa.float64()}
_ARROW_TYPES |= {
    f"{kind}s": pa.list_(pa.field("item", arrow_type, nullable=False))
    for kind, arrow_type in _ARROW_TYPES.items()
}
# Kind of column by the type of a record's field.
_KINDS = {
    str: "text",
    Verdict: "text",
    str | None: "text?",
    int | None: "int?",
    float | None: "float?",
    tuple[str, ...] | None: "texts?",
}


def _spec(name: str, key: str, /, **columns: str) -> TableSpec:
    """Declare a table from the kinds of its columns.

    Args:
        name: Name of the table and of its file.
        key: Names of the columns that identify a row. Empty: rows may repeat.
        columns: Kind by column, such as `text` or `texts?`. A column whose kind ends with `?` may
            be null.
    """
    fields = [
        pa.field(column, _ARROW_TYPES[kind.rstrip("?")], nullable=kind.endswith("?"))
        for column, kind in columns.items()
    ]
    return TableSpec(name, pa.schema(fields), tuple(key.split()))


def _spec_of(record: type, name: str, key: str, order: str = "") -> TableSpec:
    """Declare a table with a column for each field of a dataclass.

    A field of type `str | None`, for example, becomes a text column that may be null.

    Args:
        record: The dataclass.
        name: Name of the table and of its file.
        key: Names of the columns that identify a row. Empty: rows may repeat.
        order: Names of all columns in order. Empty: the order of the fields.
    """
    types = get_type_hints(record)
    names = order.split() if order else types
    return _spec(name, key, **{column: _KINDS[types[column]] for column in names})


SKILLS = _spec_of(
    Skill,
    "skills",
    "skill_id",
    order="skill_id name description body category lang source license author url stars "
    "updated_at when_to_use files tags",
)
QUERIES = _spec_of(Query, "queries", "query_id")
JUDGEMENTS = _spec_of(
    Judgement,
    "judgements",
    "query_id skill_id",
    order="query_id skill_id verdict reason why group judge",
)
DROPPED = _spec_of(
    Dropped, "dropped", "", order="query_id skill_id filter value reason source other_id"
)
RANKINGS = _spec(
    "rankings",
    "stage query_id skill_id",
    query_id="text",
    skill_id="text",
    rank="int",
    score="float",
    stage="text",
)
LISTS = _spec(
    "lists",
    "query_id",
    query_id="text",
    skill_ids="texts",
    verdicts="texts",
    sources="texts",
    ranks="ints",
    teacher_scores="floats?",
)
PLANS = _spec(
    "plans",
    "query_id step_id",
    query_id="text",
    step_id="text",
    text="text",
    depends_on="texts",
    skill_id="text?",
)
CLUSTERS = _spec("clusters", "skill_id", skill_id="text", cluster="int")
FLAGS = _spec(
    "flags",
    "skill_id rule field start",
    skill_id="text",
    rule="text",
    field="text",
    start="int",
    end="int",
    span="text",
    reason="text",
)
TABLES = {
    spec.name: spec
    for spec in (SKILLS, QUERIES, JUDGEMENTS, DROPPED, RANKINGS, LISTS, PLANS, CLUSTERS, FLAGS)
}
"""Declaration of each table by name."""


def _declared(spec: TableSpec | str) -> TableSpec:
    """Return the declaration of a table that is given by its name or its declaration.

    Raises:
        SkilltrainError: There is no table of this name.
    """
    if isinstance(spec, TableSpec):
        return spec
    if spec not in TABLES:
        problem = f"there is no table {spec!r}; choose from {', '.join(TABLES)}"
        raise SkilltrainError("unknown-choice", problem)
    return TABLES[spec]


def table_from_rows(rows: Rows, spec: TableSpec) -> pa.Table:
    """Make a checked table from rows.

    Args:
        rows: A DataFrame, or dicts or records.
        spec: Declaration of the table.

    Raises:
        SkilltrainError: A column is unknown or missing, or a value is null or has the wrong type.
    """
    mappings = []
    for row in rows_of(rows, f"table {spec.name}"):
        if isinstance(row, Mapping):
            mappings.append(row)
        else:  # a record may have fields that are not stored
            mappings.append({name: getattr(row, name) for name in spec.schema.names})
    _check_row_columns(mappings, spec)

    # A row may lack a column that may be null.
    columns = []
    for field in spec.schema:
        values = [row.get(field.name) for row in mappings]
        columns.append(_column(values, field, spec))
    return _check_table(pa.Table.from_arrays(columns, schema=spec.schema), spec, spec.name)


def _check_row_columns(rows: Iterable[Mapping[str, Any]], spec: TableSpec) -> None:
    """Raise SkilltrainError if a row has an unknown column, or lacks one."""
    names = {*spec.schema.names}
    required = {field.name for field in spec.schema if not field.nullable}
    for position, row in enumerate(rows):
        unknown = row.keys() - names
        missing = required - row.keys()
        wrong_columns = unknown if unknown else missing
        if wrong_columns:
            # Name only the first column in alphabetical order.
            fault = "unknown" if unknown else "missing"
            problem = f"{fault} column {min(wrong_columns)!r} in a row for table {spec.name}"
            raise SkilltrainError("wrong-columns", problem, where=f"row {position}")


def _column(values: list[Any], field: pa.Field, spec: TableSpec) -> pa.Array:
    """Convert the values of a column, or raise SkilltrainError for the first row that is wrong."""
    # pandas has NaN for a missing value. Only in a column of floats, NaN is a value.
    if not pa.types.is_floating(field.type):
        values = [None if isinstance(value, float) and isnan(value) else value for value in values]
    try:
        return _array(values, field.type)
    except _CONVERSION_ERRORS:
        # Arrow does not say which row is wrong. Convert each value alone to find the row.
        for position, value in enumerate(values):
            try:
                _array([value], field.type)
            except _CONVERSION_ERRORS as error:
                column = f"column '{field.name}' of table {spec.name}"
                problem = f"a value does not fit {column}: {error}"
                raise SkilltrainError("invalid-value", problem, where=f"row {position}") from error
        raise  # every value fits alone, but not together with the others


def _array(values: list[Any], arrow_type: pa.DataType) -> pa.Array:
    """Convert values to an Arrow array. Raises ValueError if Arrow would change a value."""
    if any(_would_change(value, arrow_type) for value in values):
        raise ValueError(f"{arrow_type} would change it")
    return pa.array(values, arrow_type)


def _would_change(value: Any, arrow_type: pa.DataType) -> bool:
    """Return whether Arrow would truncate a float to an int, or split a text into letters."""
    if pa.types.is_list(arrow_type) and value is not None:
        # A list column takes lists of values. Arrow would accept a text as a list of its letters.
        item_type = arrow_type.value_type
        return isinstance(value, str) or any(_would_change(item, item_type) for item in value)
    return pa.types.is_integer(arrow_type) and isinstance(value, float)


def _with_declared_types(table: pa.Table, spec: TableSpec, where: object) -> pa.Table:
    """Return a table with the declared order and types of columns.

    For example, pandas writes large_string for string, int64 for int32, and allows nulls. Such
    types are cast. They are of the declared kind: a kind is a type without its size.

    Args:
        table: The table, as it was read or made.
        spec: Declaration of the table.
        where: Path of the table, for the error.

    Raises:
        SkilltrainError: A column is missing or unknown, or has a type of another kind, such as
            numbers instead of texts, or a number is too large.
    """
    # Names that only the table or only the declaration has.
    wrong_names = {*table.column_names} ^ {*spec.schema.names}
    if wrong_names:
        name = min(wrong_names)
        problem = f"is not a {spec.name} table: the column '{name}' is missing or unknown"
        fix = f"its columns are {', '.join(spec.schema.names)}"
        raise SkilltrainError("wrong-columns", problem, where=where, fix=fix)

    columns: list[pa.ChunkedArray] = []
    for field in spec.schema:
        column = table.column(field.name)
        # A column of pandas has the type null if no row has a value, and list<null> if all lists of
        # the column are empty.
        if _kind_of(column.type) not in (_kind_of(field.type), "null", "list<null>"):
            problem = f"column '{field.name}' has the type {column.type} instead of {field.type}"
            raise SkilltrainError("wrong-columns", problem, where=where)
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            problem = f"a value does not fit column '{field.name}': {error}"
            raise SkilltrainError("invalid-value", problem, where=where) from error
    return pa.table(columns, schema=spec.schema)


def _kind_of(arrow_type: pa.DataType) -> str:
    """Return the kind of a type: its name without its size.

    For example, int32 and int64 have the kind `int`, string and large_string the kind `string`, and
    a list of large_string the kind `list<string>`.
    """
    # Also remove the name that Arrow gives to the items of a list, as in `list<item: string>`.
    name = re.sub(r"large_|[0-9]+|\w+: | not null", "", str(arrow_type))
    return name.replace("double", "float")


def _check_table(table: pa.Table, spec: TableSpec, where: object) -> pa.Table:
    """Check the nulls and the keys of a table, and return the table unchanged.

    Args:
        table: The table, with the declared columns.
        spec: Declaration of the table: its columns, and which of them may hold nulls.
        where: Path or name of the table, for errors.

    Raises:
        SkilltrainError: A value is null that may not be, or a key is repeated.
    """
    for field, column in zip(spec.schema, table.columns, strict=True):
        # Text of both errors below.
        problem = f"column '{field.name}' of table {spec.name} holds a null"
        # A value of a required column may not be null.
        if column.null_count and not field.nullable:
            fix = "leave out the row, or fill the value"
            raise SkilltrainError("invalid-value", problem, where=where, fix=fix)
        # An item of a list may never be null, even if the column allows nulls.
        if pa.types.is_list(field.type) and pc.call_function("list_flatten", [column]).null_count:
            raise SkilltrainError("invalid-value", f"a list in {problem}", where=where)
    _check_keys(table, spec, where)
    return table


def _check_keys(table: pa.Table, spec: TableSpec, where: object) -> None:
    """Raise SkilltrainError if two rows have the same key."""
    if not spec.key:
        return
    # Make one row per key. The column `count_all` holds the number of the key's rows. It is counted
    # over no particular column, so the list of columns is empty.
    groups = table.group_by(list(spec.key)).aggregate([([], "count_all")])
    # A repeated key makes fewer groups than rows. The error names the most frequent key.
    if groups.num_rows < table.num_rows:
        most_rows_first = groups.sort_by([("count_all", "descending")])
        repeated = most_rows_first.slice(0, 1).to_pylist()[0]
        key = ", ".join(repr(repeated[name]) for name in spec.key)
        raise SkilltrainError(
            "repeated-id", f"table {spec.name} holds {key} more than once", where=where
        )


def table_path(path: Path | str, spec: TableSpec) -> Path:
    """Return the file of a table: `path` itself, or the table's file in the folder `path`.

    A path without a suffix is a folder, even if it does not exist yet.
    """
    path = Path(path)
    is_folder = path.is_dir() or not path.suffix
    return path / f"{spec.name}.parquet" if is_folder else path


def write_table(rows: pa.Table | Rows, spec: TableSpec | str, path: Path | str) -> Path:
    """Write a checked parquet table, and return the path of its file.

    Args:
        rows: A pyarrow Table, a DataFrame, a `datasets.Dataset`, or dicts or records.
        spec: The table, or its name such as `lists`.
        path: Folder of the table, or its file.

    Raises:
        SkilltrainError: There is no such table, or a row does not fit the table.

    Examples:
        >>> row = {"query_id": "q1", "skill_id": "a", "rank": 1, "score": 2.5, "stage": "mine"}
        >>> write_table([row], "rankings", "runs/mine")
        PosixPath('runs/mine/rankings.parquet')
    """
    spec = _declared(spec)
    if isinstance(rows, pa.Table):
        table = _check_table(_with_declared_types(rows, spec, path), spec, path)
    else:
        table = table_from_rows(rows, spec)
    file = table_path(path, spec)
    with atomic_path(file) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return file


def read_table(path: Path | str, spec: TableSpec | str) -> pa.Table:
    """Read and check a table. Columns that are missing and may be null are added.

    Args:
        path: Folder of the table, or its file.
        spec: The table, or its name such as `lists`.

    Raises:
        SkilltrainError: There is no such table, or the file is missing or is not this table.

    Examples:
        >>> read_table("runs/lists", "lists").to_pandas()
    """
    spec = _declared(spec)
    file = table_path(path, spec)
    try:
        table = pq.read_table(file)
    except FileNotFoundError as error:
        raise SkilltrainError("missing-table", f"no {spec.name} table here", where=file) from error
    except (pa.ArrowInvalid, OSError) as error:
        raise SkilltrainError("not-parquet", f"is not parquet: {error}", where=file) from error

    # Tables of earlier versions lack columns that may be null. Add these columns, full of nulls.
    for field in spec.schema:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    table = _with_declared_types(table.replace_schema_metadata(None), spec, file)
    return _check_table(table, spec, file)


def read_lists(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a LISTS table, in order.

    Raises:
        SkilltrainError: A list has not as many verdicts, sources, ranks or scores as skills, or a
            value is no verdict.
    """
    rows = read_table(path, LISTS).to_pylist()
    for row in rows:
        where = f"{table_path(path, LISTS)}, the list of query {row['query_id']!r}"
        # Each of these columns has a value per skill. Only the teacher scores may be null.
        num_skills = len(row["skill_ids"])
        for name in ("verdicts", "sources", "ranks", "teacher_scores"):
            values = row[name]
            if values is not None and len(values) != num_skills:
                problem = f"holds {num_skills} skills, but {len(values)} {name}"
                raise SkilltrainError("invalid-list", problem, where=where)
        # Raise an error if a value is no verdict. The rows keep the plain texts.
        for verdict in row["verdicts"]:
            _as_verdict(verdict, where)
    return rows


def read_skills(path: Path) -> list[Skill]:
    """Read the skills of a SKILLS table, in order."""
    skills = [Skill(**row) for row in read_table(path, SKILLS).to_pylist()]
    # Otherwise Arrow would keep as much memory as the texts take.
    pa.default_memory_pool().release_unused()
    return skills


def read_queries(path: Path) -> list[Query]:
    """Read the queries of a QUERIES table, in order."""
    return [Query(**row) for row in read_table(path, QUERIES).to_pylist()]


def select_queries(folder: Path, split: str | None) -> list[Query]:
    """Read the queries of one split, in order of id.

    Args:
        folder: Folder with the QUERIES table.
        split: Name of the split. None: all splits.

    Raises:
        SkilltrainError: There is no such query.
    """
    queries = read_queries(folder)
    selected = [query for query in queries if split in (None, query.split)]
    if not selected:
        splits = "none, the table is empty"
        if queries:
            splits = ", ".join(sorted({query.split for query in queries}))
        raise SkilltrainError(
            "empty-split",
            f"no query of split '{split}' (splits here: {splits})",
            where=folder,
            fix="set split",
        )
    return sorted(selected, key=lambda query: query.query_id)


def select_judged(folder: Path, split: str | None) -> list[tuple[Query, dict[str, Verdict]]]:
    """Read the queries of one split, in order of id, each with its verdicts by skill id.

    The arguments are those of `select_queries`.
    """
    queries = select_queries(folder, split)
    verdicts = read_verdicts(folder)
    return [(query, verdicts.get(query.query_id, {})) for query in queries]


def rows_by_query(rankings: pa.Table) -> dict[str, Int64[np.ndarray, " row"]]:
    """Group the rows of a RANKINGS table by query.

    Returns:
        Positions of rows by query id. The ids are sorted, and the rows of a query are in the order
        of the table.
    """
    # Number the distinct query ids. `query_numbers` holds the number of each row's query.
    encoded = rankings.column("query_id").combine_chunks().dictionary_encode()
    query_ids = encoded.dictionary.to_pylist()
    query_numbers = encoded.indices.to_numpy(zero_copy_only=False)  # [row]

    # A stable sort puts the rows of each query side by side, in the order of the table.
    rows_in_query_order = np.argsort(query_numbers, kind="stable")
    # The end of each query's rows in this order
    ends = np.cumsum(np.bincount(query_numbers, minlength=len(query_ids)))  # [query]
    rows = np.split(rows_in_query_order, ends[:-1])
    # An empty table splits into one array of rows, but has no query id (`strict=False`).
    return dict(sorted(zip(query_ids, rows, strict=False)))


def check_ranked(rankings: pa.Table, pool_ids: Collection[str], where: object) -> None:
    """Raise SkilltrainError if a ranked skill is not in the pool.

    Args:
        rankings: RANKINGS table.
        pool_ids: Ids of the pool's skills.
        where: Folder of the pool, for the error.
    """
    ranked_ids = rankings.column("skill_id").unique().to_pylist()
    unknown = set(ranked_ids).difference(pool_ids)
    if unknown:
        problem = (
            f"{len(unknown)} ranked skill(s) are not in this pool, '{min(unknown)}' among them"
        )
        raise SkilltrainError(
            "unknown-skill", problem, where=where, fix="give the pool that was ranked"
        )


def texts_of(column: pa.ChunkedArray) -> list[str]:
    """Return a text column as a list. Equal texts are the same object, to save memory."""
    # Arrow numbers the distinct texts. Python then makes one object per distinct text.
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    return [texts[number] for number in encoded.indices.to_numpy(zero_copy_only=False).tolist()]


def verdicts_by_query(judgements: pa.Table) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts of a JUDGEMENTS table by query id and skill id.

    Raises:
        SkilltrainError: A value of the column `verdict` is no verdict.
    """
    verdicts: dict[str, dict[str, Verdict]] = {}
    for row in judgements.select(["query_id", "skill_id", "verdict"]).to_pylist():
        query_id = row["query_id"]
        verdict = _as_verdict(row["verdict"], query_id)
        verdicts.setdefault(query_id, {})[row["skill_id"]] = verdict
    return verdicts


def _as_verdict(value: str, where: str) -> Verdict:
    """Return the verdict with this value, or raise SkilltrainError."""
    try:
        return Verdict(value)
    except ValueError as error:
        problem = f"'{value}' is no verdict; choose from {', '.join(Verdict)}"
        raise SkilltrainError("invalid-value", problem, where=where) from error


def read_verdicts(folder: Path) -> dict[str, dict[str, Verdict]]:
    """Read the verdicts by query id and skill id from the JUDGEMENTS table in a folder."""
    return verdicts_by_query(read_table(folder, JUDGEMENTS))


def write_queries(
    queries: Iterable[Query], judgements: Rows, dropped: Iterable[Dropped], out: Path
) -> None:
    """Write the QUERIES, JUDGEMENTS and DROPPED tables of a stage that makes queries."""
    write_table(queries, QUERIES, out)
    write_table(judgements, JUDGEMENTS, out)
    write_table(dropped, DROPPED, out)
