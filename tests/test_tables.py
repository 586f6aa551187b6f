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
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_keys_of_several_columns_may_repeat_in_part_and_dropped_rows_as_a_whole():
    assert (
        table_from_rows(
            [RANKED, RANKED | {"stage": "y"}, RANKED | {"skill_id": "b"}], RANKINGS
        ).num_rows
        == 3
    )
    dropped = {"query_id": "q", "skill_id": "a", "filter": "f", "value": None, "reason": "r"}
    assert table_from_rows([dropped, dropped], DROPPED).num_rows == 2


def test_what_is_missing_cut_or_another_table_is_refused(tmp_path):
    with raises("missing-table"):
        read_table(tmp_path, QUERIES)
    file = write_table([QUERY], QUERIES, tmp_path)
    with raises("wrong-columns"):
        read_table(file, SKILLS)
    whole, table = file.read_bytes(), pq.read_table(file)
    number = pa.field("text", pa.int64(), nullable=False)
    for other, code in (
        *((whole[:length], "not-parquet") for length in (0, 10, len(whole) - 5)),
        (table.append_column("extra", pa.array(["x"])), "wrong-columns"),
        (table.set_column(1, number, pa.array([5])), "wrong-columns"),
        (table.select(["text", "query_id", "kind", "origin", "split"]), "wrong-columns"),
        (pa.Table.from_pylist([QUERY]), "wrong-columns"),
        (pa.concat_tables([table, table]), "repeated-id"),
    ):
        file.write_bytes(other) if isinstance(other, bytes) else pq.write_table(other, file)
        with raises(code):
            read_table(tmp_path, QUERIES)


def test_writing_an_arrow_table_checks_it_too(tmp_path):
    checked = table_from_rows([QUERY], QUERIES)
    assert read_table(write_table(checked, QUERIES, tmp_path), QUERIES).to_pylist() == [QUERY]
    with raises("wrong-columns"):
        write_table(pa.Table.from_pylist([QUERY]), QUERIES, tmp_path)
    with raises("wrong-columns"):
        write_table(read_table(tmp_path, QUERIES).drop_columns(["split"]), QUERIES, tmp_path)
    with raises("invalid-value"):
        write_table(
            pa.Table.from_pylist([QUERY | {"text": None}], schema=QUERIES.schema), QUERIES, tmp_path
        )
    assert read_table(tmp_path, QUERIES).to_pylist() == [
        QUERY
    ]  # a refused write leaves the old table
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]


def test_what_is_written_is_read_back(tmp_path):
    empty = {name: [] for name in ("skill_ids", "verdicts", "sources", "ranks")}
    lists = [
        LIST,
        LIST | {"query_id": "", "teacher_scores": [0.1, -2.0]},
        {"query_id": "ü", **empty},
    ]
    assert read_table(write_table(lists, LISTS, tmp_path), LISTS).to_pylist() == [
        *lists[:2],
        lists[2] | {"teacher_scores": None},
    ]
    skills = [Skill("a", "n", "d", "b"), Skill("b", "n", "", "", "c", "en", "s", "MIT")]
    queries = [Query("q", "t", "multi", "test", "dev")]
    assert read_skills(write_table(skills, SKILLS, tmp_path)) == skills
    assert read_queries(write_table(queries, QUERIES, tmp_path)) == queries


def test_verdicts_are_read_by_query():
    judged = [
        ("q1", "a", Verdict.REQUIRED),
        ("q2", "a", "rejected"),
        ("q1", "b", "useful"),
        ("q3", "a", "good"),
    ]
    rows = [Judgement(*row, "test") for row in judged]
    found = verdicts_by_query(table_from_rows(rows[:3], JUDGEMENTS))
    assert found == {
        "q1": {"a": Verdict.REQUIRED, "b": Verdict.USEFUL},
        "q2": {"a": Verdict.REJECTED},
    }
    with raises("invalid-value"):
        verdicts_by_query(table_from_rows(rows, JUDGEMENTS))
