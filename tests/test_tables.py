import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill, Verdict
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    queries_from_table,
    read_table,
    rows_of,
    skills_from_table,
    table_from_rows,
    verdicts_by_query,
    write_table,
)

QUERY = {"query_id": "q1", "text": "t", "kind": "single", "origin": "test", "split": "train"}
LIST = {"query_id": "q1", "skill_ids": ["a", "b"], "verdicts": ["required", "rejected"], "sources": ["gold", "mined"],
        "ranks": [0, 3], "teacher_scores": None}  # fmt: skip


def refusal(rows, spec):
    with pytest.raises(SkilltrainError) as error:
        table_from_rows(rows, spec)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lang": "en"}, "row 1: unknown column 'lang' in a row for table queries"),
        ({"text": None}, "queries: column 'text' of table queries holds a null"),
        ({"query_id": "q1"}, "queries: table queries holds 'q1' more than once"),
        *(({"text": text}, "row 1: a value does not fit column 'text' of table queries")
          for text in (5, ["x"], {"a": 1}, "\ud800", b"\xff\xfe")),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_refused(changed, message):
    assert refusal([QUERY, QUERY | {"query_id": "q2"} | changed], QUERIES).startswith(message)
    lacks = {name: value for name, value in QUERY.items() if name != "split"}
    assert refusal([lacks], QUERIES) == "row 0: missing column 'split' in a row for table queries"


@pytest.mark.parametrize(
    ("change", "has_null"),
    [
        *((change, False) for change in ({"ranks": [1.5]}, {"ranks": [2**40]}, {"skill_ids": "ab"})),
        *((change, True) for change in ({"skill_ids": ["a", None]}, {"ranks": [None, 1]}, {"teacher_scores": [None]})),
    ],
)
def test_a_list_of_another_type_or_with_a_null_is_refused(change, has_null):
    (name,) = change
    null = f"lists: a list in column '{name}' of table lists holds a null"
    fault = null if has_null else f"row 0: a value does not fit column '{name}'"
    assert refusal([LIST | change], LISTS).startswith(fault)


def test_keys_of_several_columns_may_repeat_in_part():
    row = {"query_id": "q", "skill_id": "a", "rank": 1, "score": 1.0, "stage": "x"}
    assert table_from_rows([row, row | {"stage": "y"}, row | {"skill_id": "b"}], RANKINGS).num_rows == 3
    assert "holds 'x', 'q', 'a' more than once" in refusal([row, row], RANKINGS)
    dropped = {"query_id": "q", "skill_id": "a", "filter": "f", "value": None, "reason": "r"}
    assert table_from_rows([dropped, dropped], DROPPED).num_rows == 2


def test_a_missing_truncated_or_foreign_file_is_named(tmp_path):
    with pytest.raises(SkilltrainError, match=r"queries\.parquet: no queries table here"):
        read_table(tmp_path, QUERIES)
    file = write_table([QUERY], QUERIES, tmp_path)
    whole = file.read_bytes()
    for length in (0, 10, len(whole) - 5):
        file.write_bytes(whole[:length])
        with pytest.raises(SkilltrainError, match=r"queries\.parquet: is not parquet"):
            read_table(tmp_path, QUERIES)


def test_a_parquet_of_another_table_is_refused(tmp_path):
    file = write_table([QUERY], QUERIES, tmp_path)
    with pytest.raises(SkilltrainError, match="is not a skills table: it lacks column 'skill_id'"):
        read_table(file, SKILLS)
    table = pq.read_table(file)
    number = pa.field("text", pa.int64(), nullable=False)
    for other, fault in (
        (table.append_column("extra", pa.array(["x"])), "column 'extra' is unknown; the columns are query_id, text"),
        (
            table.set_column(1, number, pa.array([5])),
            "is 'text: int64 not null', not 'text: string not",
        ),
        (table.select(["text", "query_id", "kind", "origin", "split"]), "order of the columns is not query_id, text"),
        (pa.Table.from_pylist([QUERY]), "its column is 'query_id: string', not 'query_id: string not null'"),
        (pa.concat_tables([table, table]), "holds 'q1' more than once"),
    ):
        pq.write_table(other, file)
        with pytest.raises(SkilltrainError, match=fault):
            read_table(file, QUERIES)


def test_writing_an_arrow_table_checks_it_too(tmp_path):
    loose = pa.Table.from_pylist([QUERY])
    assert read_table(write_table(loose, QUERIES, tmp_path), QUERIES).to_pylist() == [QUERY]
    with pytest.raises(SkilltrainError, match="it lacks column 'split'"):
        write_table(loose.drop_columns(["split"]), QUERIES, tmp_path)
    with pytest.raises(SkilltrainError, match="null"):
        write_table(pa.Table.from_pylist([QUERY | {"text": None}], schema=loose.schema), QUERIES, tmp_path)
    assert read_table(tmp_path, QUERIES).to_pylist() == [QUERY]  # a refused write leaves the old table
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]


words = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)


def list_row(query_id, n, scored):
    return {
        "query_id": query_id, "skill_ids": [f"s{i}" for i in range(n)], "verdicts": ["useful"] * n,
        "sources": ["x"] * n, "ranks": list(range(n)), "teacher_scores": [0.1] * n if scored else None,
    }  # fmt: skip


lists = st.builds(list_row, words, st.integers(0, 4), st.booleans())


@given(st.lists(lists, max_size=5, unique_by=lambda row: row["query_id"]))
def test_what_is_written_is_read_back(tmp_path_factory, rows):
    folder = tmp_path_factory.getbasetemp()
    assert read_table(write_table(rows, LISTS, folder), LISTS).to_pylist() == rows


def test_records_round_trip():
    skills = [Skill("a", "n", "d", "b"), Skill("b", "n", "", "", "c", "en", "s", "MIT")]
    queries = [Query("q", "t", "multi", "test", "dev")]
    assert skills_from_table(table_from_rows(rows_of(skills), SKILLS)) == skills
    assert queries_from_table(table_from_rows(rows_of(queries), QUERIES)) == queries


def test_verdicts_are_read_by_query():
    judged = [("q1", "a", Verdict.REQUIRED), ("q2", "a", "rejected"), ("q1", "b", "useful"), ("q3", "a", "good")]
    rows = [dict(zip(("query_id", "skill_id", "verdict", "judge"), (*row, "test"), strict=True)) for row in judged]
    found = verdicts_by_query(table_from_rows(rows[:3], JUDGEMENTS))
    assert found == {"q1": {"a": Verdict.REQUIRED, "b": Verdict.USEFUL}, "q2": {"a": Verdict.REJECTED}}
    with pytest.raises(SkilltrainError, match=r"^q3: 'good' is no verdict; choose from required, useful, irrelevant"):
        verdicts_by_query(table_from_rows(rows, JUDGEMENTS))
