import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.records import Judgement, Query, Skill, Verdict
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_queries,
    read_skills,
    read_table,
    table_from_rows,
    verdicts_by_query,
    write_table,
)

QUERY = {"query_id": "q1", "text": "t", "kind": "single", "origin": "test", "split": "train"}
LIST = {
    "query_id": "q1",
    "skill_ids": ["a", "b"],
    "verdicts": ["required", "rejected"],
    "sources": ["gold", "mined"],
    "ranks": [0, 3],
    "teacher_scores": None,
}
RANKED = {"query_id": "q", "skill_id": "a", "rank": 1, "score": 1.0, "stage": "x"}
NULL_IN_LIST = "lists: a list in column '{}' of table lists holds a null"
MISFIT = "row {}: a value does not fit column '{}' of table "


@pytest.mark.parametrize(
    ("rows", "spec", "message"),
    [
        (
            [QUERY, QUERY | {"query_id": "q2", "lang": "en"}],
            QUERIES,
            "row 1: unknown column 'lang' in a row for table",
        ),
        (
            [{**QUERY, "text": None}],
            QUERIES,
            "queries: column 'text' of table queries holds a null",
        ),
        ([QUERY, QUERY], QUERIES, "queries: table queries holds 'q1' more than once"),
        ([RANKED, RANKED], RANKINGS, "rankings: table rankings holds 'x', 'q', 'a' more than once"),
        ([{"query_id": "q1"}], QUERIES, "row 0: missing column 'kind' in a row for table queries"),
        *(
            ([QUERY, QUERY | {"query_id": "q2", "text": text}], QUERIES, MISFIT.format(1, "text"))
            for text in (5, ["x"], {"a": 1}, "\ud800", b"\xff\xfe")
        ),
        *(
            ([LIST | {name: value}], LISTS, MISFIT.format(0, name))
            for name, value in (("ranks", [1.5]), ("ranks", [2**40]), ("skill_ids", "ab"))
        ),
        *(
            ([LIST | {name: value}], LISTS, NULL_IN_LIST.format(name))
            for name, value in (
                ("skill_ids", ["a", None]),
                ("ranks", [None, 1]),
                ("teacher_scores", [None]),
            )
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, spec, message):
    with pytest.raises(SkilltrainError) as error:
        table_from_rows(rows, spec)

    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_part_of_a_key_may_repeat():
    rows = [RANKED, RANKED | {"stage": "y"}, RANKED | {"skill_id": "b"}]

    assert table_from_rows(rows, RANKINGS).num_rows == 3


def test_dropped_rows_may_repeat():
    row = {"query_id": "q", "skill_id": "a", "filter": "f", "value": None, "reason": "r"}

    assert table_from_rows([row, row], DROPPED).num_rows == 2


def test_table_paths_may_be_text(tmp_path):
    folder = str(tmp_path / "my_lists")

    file = write_table([LIST], LISTS, folder)

    assert file == tmp_path / "my_lists" / "lists.parquet"
    assert read_table(folder, LISTS).to_pylist() == [LIST]


def test_missing_table_is_refused(tmp_path):
    with raises("missing-table"):
        read_table(tmp_path, QUERIES)


@pytest.mark.parametrize("end", [0, 10, -5])
def test_cut_file_is_refused(tmp_path, end):
    file = write_table([QUERY], QUERIES, tmp_path)
    file.write_bytes(file.read_bytes()[:end])

    with raises("not-parquet"):
        read_table(tmp_path, QUERIES)


def test_table_with_other_columns_is_refused(tmp_path):
    file = write_table([QUERY], QUERIES, tmp_path)
    table = pq.read_table(file)
    number = pa.field("text", pa.int64(), nullable=False)
    wrong_tables = [
        table.append_column("extra", pa.array(["x"])),
        table.set_column(1, number, pa.array([5])),
        table.drop_columns(["split"]),
    ]

    with raises("wrong-columns"):
        read_table(file, SKILLS)
    for wrong_table in wrong_tables:
        pq.write_table(wrong_table, file)
        with raises("wrong-columns"):
            read_table(tmp_path, QUERIES)


def test_repeated_id_is_refused(tmp_path):
    file = write_table([QUERY], QUERIES, tmp_path)
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table, table]), file)

    with raises("repeated-id"):
        read_table(tmp_path, QUERIES)


def test_arrow_table_is_written(tmp_path):
    table = table_from_rows([QUERY], QUERIES)

    file = write_table(table, QUERIES, tmp_path)

    assert read_table(file, QUERIES).to_pylist() == [QUERY]


def test_refused_write_leaves_old_table(tmp_path):
    table = read_table(write_table([QUERY], QUERIES, tmp_path), QUERIES)
    without_text = pa.Table.from_pylist([QUERY | {"text": None}], schema=QUERIES.schema)

    with raises("wrong-columns"):
        write_table(table.drop_columns(["split"]), QUERIES, tmp_path)
    with raises("invalid-value"):
        write_table(without_text, QUERIES, tmp_path)

    assert read_table(tmp_path, QUERIES).to_pylist() == [QUERY]
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]


def test_written_lists_are_read_back(tmp_path):
    empty = {name: [] for name in ("skill_ids", "verdicts", "sources", "ranks")}
    lists = [
        LIST,
        LIST | {"query_id": "", "teacher_scores": [0.1, -2.0]},
        {"query_id": "ü", "teacher_scores": None, **empty},
    ]

    file = write_table(lists, LISTS, tmp_path)

    assert read_table(file, LISTS).to_pylist() == lists


def test_data_frame_is_read_back(tmp_path):
    pandas = pytest.importorskip("pandas")
    lists = [LIST, LIST | {"query_id": "q2", "teacher_scores": None}]

    file = write_table(pandas.DataFrame(lists), LISTS, tmp_path)

    rows = read_table(file, LISTS).to_pylist()
    assert rows == [{"teacher_scores": None} | row for row in lists]


def test_table_of_pandas_is_read(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [QUERY, QUERY | {"query_id": "q2"}]
    frame = pandas.DataFrame(rows)[["text", "query_id", "kind", "origin", "split"]]
    frame.to_parquet(tmp_path / "queries.parquet")  # large_string, and null is allowed

    assert read_table(tmp_path, "queries").to_pylist() == rows


def test_lists_of_pandas_are_read(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([LIST]).to_parquet(tmp_path / "lists.parquet")  # int64, and nulls only

    table = read_table(tmp_path, "lists")

    assert table.to_pylist() == [LIST]
    assert table.schema.equals(LISTS.schema)


def test_large_number_of_pandas_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([RANKED | {"rank": 2**40}]).to_parquet(tmp_path / "rankings.parquet")

    with raises("invalid-value") as error:
        read_table(tmp_path, "rankings")

    assert "does not fit column 'rank'" in error.value.problem


@pytest.mark.parametrize("missing", [float("nan"), None])
def test_missing_text_is_null(tmp_path, missing):
    skill = {"skill_id": "a", "name": "n", "description": "d", "body": "b", "source": "s"}

    file = write_table([skill | {"category": missing, "stars": missing}], "skills", tmp_path)

    assert read_skills(file) == [Skill("a", "n", "d", "b", source="s")]
    with raises("invalid-value") as error:
        write_table([QUERY | {"text": missing}], "queries", tmp_path)
    assert error.value.fix == "leave out the row, or fill the value"


def test_dataset_and_arrow_table_are_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([QUERY])

    first = write_table(dataset, "queries", tmp_path / "first")
    second = write_table(pa.Table.from_pylist([QUERY]), "queries", tmp_path / "second")

    assert read_table(first, "queries").to_pylist() == [QUERY]
    assert read_table(second, "queries").to_pylist() == [QUERY]


def test_unknown_table_names_all(tmp_path):
    with raises("unknown-choice") as error:
        read_table(tmp_path, "list")

    assert "choose from skills, queries, judgements" in error.value.problem


def test_written_records_are_read_back(tmp_path):
    skills = [Skill("a", "n", "d", "b"), Skill("b", "n", "", "", "c", "en", "s", "MIT")]
    queries = [Query("q", "t", "multi", "test", "dev")]

    assert read_skills(write_table(skills, SKILLS, tmp_path)) == skills
    assert read_queries(write_table(queries, QUERIES, tmp_path)) == queries


def test_verdicts_are_read_by_query():
    judged = [("q1", "a", Verdict.REQUIRED), ("q2", "a", "rejected"), ("q1", "b", "useful")]
    rows = [Judgement(*row, "test") for row in judged]

    verdicts = verdicts_by_query(table_from_rows(rows, JUDGEMENTS))

    assert verdicts == {
        "q1": {"a": Verdict.REQUIRED, "b": Verdict.USEFUL},
        "q2": {"a": Verdict.REJECTED},
    }


def test_unknown_verdict_is_refused():
    table = table_from_rows([Judgement("q3", "a", "good", "test")], JUDGEMENTS)

    with raises("invalid-value"):
        verdicts_by_query(table)
