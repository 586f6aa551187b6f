"""Files of queries and judgements become tables over a pool; what is wrong with a row is told by file and line."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults import raises
from skilltrain.data.queries import Queries
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_jsonl
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, SKILLS, read_table, write_table

Tables = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]


@pytest.fixture(autouse=True)
def pool(tmp_path: Path) -> None:
    """Skills a to d, and the row of a2, which was a duplicate of a."""
    rows = [
        {"skill_id": i, "name": i, "description": "d", "body": "b", "source": "s"} for i in "abcd"
    ]
    write_table(rows, SKILLS, tmp_path / "pool")
    same = {"query_id": "", "skill_id": "a2", "filter": "duplicate", "reason": "r", "other_id": "a"}
    write_table([same], DROPPED, tmp_path / "pool")


def make(tmp_path: Path, rows: Any, **settings: Any) -> Tables:
    """(queries, judgements, dropped rows, summary) of the rows of train.jsonl, or of files."""
    if isinstance(rows, list) and isinstance(rows[0], dict):
        write_jsonl(tmp_path / "train.jsonl", rows)
        rows = tmp_path / "train.jsonl"
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    out.mkdir()
    values = {"files": rows, "pool": tmp_path / "pool", "out": out, **settings}
    summary = Queries.model_validate(values).run(out)
    queries, judgements, dropped = (
        read_table(out, spec).to_pylist() for spec in (QUERIES, JUDGEMENTS, DROPPED)
    )
    return queries, judgements, dropped, summary


def what_was_dropped(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["query_id"], row["skill_id"], row["filter"]) for row in rows]


def test_shapes_of_query_rows(tmp_path: Path) -> None:
    rows = [
        {
            "query_id": "q1",
            "query": " Send mail. ",
            "skill_ids": ["a"],
            "origin": "llm",
            "lang_pair": "en2zh",
        },
        {"text": "Two\x00 skills", "skill_ids": ["a", "b", "a2"], "split": "dev"},
        {"query_id": 3, "query": "One id", "skill_ids": "c", "kind": "multi"},
    ]
    queries, judgements, dropped, summary = make(tmp_path, rows, origin="hand")
    made_up = queries[1]["query_id"]
    assert made_up.startswith("train-") and len(made_up) == len("train-") + 12
    assert queries == [
        {
            "query_id": "q1",
            "text": "Send mail.",
            "kind": "single",
            "origin": "llm",
            "split": "train",
        },
        {
            "query_id": made_up,
            "text": "Two skills",
            "kind": "multi",
            "origin": "hand",
            "split": "dev",
        },
        {"query_id": "3", "text": "One id", "kind": "multi", "origin": "hand", "split": "train"},
    ]
    assert [(j["query_id"], j["skill_id"], j["verdict"], j["judge"]) for j in judgements] == [
        ("q1", "a", "required", "llm"),
        (made_up, "a", "required", "hand"),  # of a2, too, which a stands for
        (made_up, "b", "required", "hand"),
        ("3", "c", "required", "hand"),
    ]
    assert dropped == []
    assert summary["num_by_split"] == {"dev": 1, "train": 2}
    assert {query["split"] for query in make(tmp_path, rows, split="test")[0]} == {"test"}


def test_judgement_files(tmp_path: Path) -> None:
    queries, judgements, dropped, summary = make(
        tmp_path,
        [
            {
                "group_id": "g1",
                "query": "Do it",
                "required": ["a", "b"],
                "useful": [{"skill_id": "d", "group": "twins"}],
                "irrelevant": ["nowhere", "b"],
                "rejected": [
                    {"skill_id": "c", "reason": "scope_mismatch", "why": "too wide"},
                    {"skill_id": "a2"},
                ],
            }
        ],
        origin="llm",
    )
    assert (queries[0]["query_id"], queries[0]["kind"]) == ("g1", "multi")
    assert [
        (j["skill_id"], j["verdict"], j["reason"], j["why"], j["group"]) for j in judgements
    ] == [
        ("a", "required", None, None, None),
        ("b", "required", None, None, None),
        ("d", "useful", None, None, "twins"),
        ("c", "rejected", "scope_mismatch", "too wide", None),
    ]
    assert what_was_dropped(dropped) == [
        ("g1", "a", "contradiction"),
        ("g1", "b", "contradiction"),
        ("g1", "nowhere", "not_in_pool"),
    ]
    assert summary["num_by_verdict"] == {"rejected": 1, "required": 2, "useful": 1}


def test_a_rejected_skill_that_another_file_calls_an_answer_of_the_same_text(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    write_jsonl(
        one, [{"query_id": "q1", "query": "Do it", "required": ["a"], "rejected": ["b", "c"]}]
    )
    write_jsonl(two, [{"query_id": "q2", "query": "Do it", "required": ["b"]}])
    for files in ([one, two], [two, one]):
        _, judgements, dropped, _ = make(tmp_path, files, split="train")
        found = {(j["query_id"], j["skill_id"]): j["verdict"] for j in judgements}
        assert found == {("q1", "a"): "required", ("q1", "c"): "rejected", ("q2", "b"): "required"}
        assert what_was_dropped(dropped) == [("q1", "b", "contradiction")]
        assert (
            "one.jsonl, line 1 says rejected" in dropped[0]["reason"]
            and "two.jsonl" in dropped[0]["reason"]
        )


def test_made_up_ids_do_not_depend_on_the_line(tmp_path: Path) -> None:
    rows = [{"query": "x", "skill_ids": ["a"]}, {"query": "y", "skill_ids": ["a"]}]
    first, _, _, _ = make(tmp_path, rows)
    again, _, dropped, _ = make(tmp_path, [*reversed(rows), rows[0]])
    assert [query["query_id"] for query in again] == [
        query["query_id"] for query in reversed(first)
    ]
    assert [row["filter"] for row in dropped] == ["duplicate_query"]
    assert "line 3 repeats" in dropped[0]["reason"] and dropped[0]["reason"].endswith("line 2")


def test_what_asks_or_requires_nothing_or_a_skill_outside_the_pool(tmp_path: Path) -> None:
    ok = {"query_id": "ok", "query": "y", "skill_ids": ["b"]}
    rows: list[dict[str, Any]] = [
        {"query_id": f"q{i}", "query": "x", "skill_ids": ["a", f"gone{i}"]} for i in range(4)
    ]
    with raises("unknown-skill"):
        make(tmp_path, [*rows, ok])
    queries, judgements, dropped, _ = make(tmp_path, [*rows, ok], missing_gold="drop")
    assert [query["query_id"] for query in queries] == [j["query_id"] for j in judgements] == ["ok"]
    assert what_was_dropped(dropped) == [(f"q{i}", f"gone{i}", "missing_gold") for i in range(4)]
    rows = [
        {"query_id": query_id, "query": text, "skill_ids": ["a"]}
        for query_id, text in (("e", " "), ("n", None))
    ]
    rows.append({"query_id": "g", "query": "x", "skill_ids": []})
    expected = [("e", "", "empty_query"), ("n", "", "empty_query"), ("g", "", "no_gold")]
    assert what_was_dropped(make(tmp_path, [*rows, ok])[2]) == expected
    with raises("nothing-left"):
        make(tmp_path, rows)
    assert (
        what_was_dropped(read_table(tmp_path / "out3.dropped.parquet", DROPPED).to_pylist())
        == expected
    )


def test_parquet_gives_the_same_queries(tmp_path: Path) -> None:
    rows = [
        {"query_id": "1", "query": "Two", "required": ["a", "b"], "rejected": [], "split": None},
        {"query_id": "2", "query": "One", "required": ["c"], "rejected": ["a"], "split": "dev"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")

    result = make(tmp_path, tmp_path / "train.parquet")

    assert result == make(tmp_path, rows)
    assert [query["split"] for query in result[0]] == ["train", "dev"]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("train.json", "[]", "unknown-format"),
        ("train.parquet", "x", "not-parquet"),
        ("train.csv", "x", "unknown-format"),
        ("train.jsonl", '{"query": "x", "skill_ids": "a"}\n{oops', "not-json"),
        ("a.jsonl", '{"query": "x", "skill_ids": "a"}', "choose-split"),
        ("train.jsonl", None, "special-file"),
    ],
)
def test_files_that_are_not_what_they_say(
    tmp_path: Path, name: str, content: str | None, code: str
) -> None:
    (tmp_path / name).write_text(content) if content is not None else os.mkfifo(tmp_path / name)
    with raises(code):
        make(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task": "x"}, "is no query: no key skill_ids or required among task"),
        ({"task": "x", "skill_ids": ["a"]}, "missing key 'query'"),
        (
            {"query": "x", "golds": []},
            "is no query: no key skill_ids or required among query, golds",
        ),
        ({"query": ["x"], "skill_ids": ["a"]}, r"query: .*valid string, found \['x'\]"),
        (
            {"query": "x", "skill_ids": "a", "query_id": {"n": 1}},
            "query_id: .*valid string, found {'n': 1}",
        ),
        ({"query": "x", "skill_ids": "a", "query_id": 1.5}, "query_id: "),
        ({"query": "x", "skill_ids": [{}, 1]}, "missing key 'skill_ids.0.skill_id'"),
        ({"query": "x", "rejected": [{"id": "a"}]}, "missing key 'rejected.0.skill_id'"),
        ({"query": "x", "skill_ids": [3]}, "skill_ids.0.*valid string, found 3"),
        ({"query": "x", "skill_ids": [["a"]]}, "skill_ids.0.*valid string"),
        (
            {"query": "x", "skill_id": "a"},
            "is no query: no key skill_ids or required among query, skill_id",
        ),
        (
            {
                "query": "x",
                "required": ["a"],
                "rejected": [{"skill_id": "b", "reason": "too blue"}],
            },
            "rejected.0.reason: .*'low_quality'.*too blue",
        ),
        (
            {"query": "x", "skill_ids": "a", "split": "valid"},
            "split: .*'train', 'dev' or 'test', found 'valid'",
        ),
        ({"query": "x", "skill_ids": "a", "kind": ["x"]}, "kind: .*'single' or 'multi'"),
        ({"query_id": "q", "query": "y", "skill_ids": "a"}, "query_id 'q' stands in .*line 1 too"),
        (
            {"group_id": "g", "query": "y", "required": ["a"]},
            r"group 'g' holds 1 skill\(s\): a group is judged",
        ),
    ],
)
def test_wrong_rows_name_file_and_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(SkilltrainError, match=rf"train\.jsonl, line 2(, query .*)?: {message}"):
        make(tmp_path, [{"query_id": "q", "query": "x", "skill_ids": "a"}, row])


def test_wrong_row_names_its_id(tmp_path: Path) -> None:
    row = {"query_id": "q7", "query": "x", "skill_ids": "a", "split": "valid"}

    with pytest.raises(SkilltrainError, match=r"train\.jsonl, line 1, query q7: split: "):
        make(tmp_path, [row])


def test_patterns_name_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"query": name, "skill_ids": "a"}])
    queries, _, _, _ = make(tmp_path, str(tmp_path / "*.jsonl"), split="train")
    assert [query["text"] for query in queries] == ["a", "b"]
    with raises("not-found"):
        make(tmp_path, str(tmp_path / "x*.jsonl"), split="train")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = Queries.model_validate({"files": ["../*.jsonl"], "pool": "../pool", "out": "o"})
    assert config.files == (Path("../a.jsonl"), Path("../b.jsonl"))
