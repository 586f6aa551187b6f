"""Files of queries and judgements become tables. A fault names its file and line."""

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
def pool(tmp_path) -> None:
    """Write skills a to d, and a2 as a dropped duplicate of a."""
    rows = [
        {"skill_id": i, "name": i, "description": "d", "body": "b", "source": "s"} for i in "abcd"
    ]
    write_table(rows, SKILLS, tmp_path / "pool")
    same = {"query_id": "", "skill_id": "a2", "filter": "duplicate", "reason": "r", "other_id": "a"}
    write_table([same], DROPPED, tmp_path / "pool")


def make(tmp_path: Path, rows: Any, **settings: Any) -> Tables:
    """Run the stage on rows, which are written to train.jsonl, or on files.

    Returns:
        The queries, the judgements, the dropped rows and the summary.
    """
    if isinstance(rows, list) and isinstance(rows[0], dict):
        write_jsonl(tmp_path / "train.jsonl", rows)
        rows = tmp_path / "train.jsonl"
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    out.mkdir()
    values = {"files": rows, "pool": tmp_path / "pool", "out": out, **settings}
    summary = Queries.model_validate(values).run(out)
    tables = [read_table(out, spec).to_pylist() for spec in (QUERIES, JUDGEMENTS, DROPPED)]
    return *tables, summary


def dropped_keys(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the query, the skill and the filter of each dropped row."""
    return [(row["query_id"], row["skill_id"], row["filter"]) for row in rows]


def test_query_rows_have_several_forms(tmp_path):
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

    generated_id = queries[1]["query_id"]
    assert generated_id.startswith("train-")
    assert len(generated_id) == len("train-") + 12
    assert queries == [
        {
            "query_id": "q1",
            "text": "Send mail.",
            "kind": "single",
            "origin": "llm",
            "split": "train",
        },
        {
            "query_id": generated_id,
            "text": "Two skills",
            "kind": "multi",
            "origin": "hand",
            "split": "dev",
        },
        {"query_id": "3", "text": "One id", "kind": "multi", "origin": "hand", "split": "train"},
    ]
    assert [(j["query_id"], j["skill_id"], j["verdict"], j["judge"]) for j in judgements] == [
        ("q1", "a", "required", "llm"),
        (generated_id, "a", "required", "hand"),  # a replaces its duplicate a2
        (generated_id, "b", "required", "hand"),
        ("3", "c", "required", "hand"),
    ]
    assert dropped == []
    assert summary["num_by_split"] == {"dev": 1, "train": 2}


def test_split_setting_overrides_rows(tmp_path):
    rows = [{"query": "x", "skill_ids": ["a"], "split": "dev"}]

    (query,), _, _, _ = make(tmp_path, rows, split="test")

    assert query["split"] == "test"


def test_dev_share_splits_rows_by_skill(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"query": f"task {i}", "skill_ids": ["abc"[i % 3]]} for i in range(12)]
    write_jsonl(file, rows)

    queries, judgements, _, _ = make(tmp_path, file, dev_share=0.4)

    skill_of = {row["query_id"]: row["skill_id"] for row in judgements}
    splits = {(skill_of[query["query_id"]], query["split"]) for query in queries}
    assert len(splits) == 3  # one split for each skill
    assert {split for _, split in splits} == {"train", "dev"}


def test_group_becomes_judged_query(tmp_path):
    group = {
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

    (query,), judgements, dropped, summary = make(tmp_path, [group], origin="llm")

    assert (query["query_id"], query["kind"]) == ("g1", "multi")
    verdicts = [(row["skill_id"], row["verdict"]) for row in judgements]
    assert verdicts == [("a", "required"), ("b", "required"), ("d", "useful"), ("c", "rejected")]
    assert [row["reason"] for row in judgements] == [None, None, None, "scope_mismatch"]
    assert [row["why"] for row in judgements] == [None, None, None, "too wide"]
    assert [row["group"] for row in judgements] == [None, None, "twins", None]
    assert dropped_keys(dropped) == [
        ("g1", "a", "contradiction"),
        ("g1", "b", "contradiction"),
        ("g1", "nowhere", "not_in_pool"),
    ]
    assert summary["num_by_verdict"] == {"rejected": 1, "required": 2, "useful": 1}


def test_contradiction_between_files_is_dropped(tmp_path):
    """Both files judge the same text. One requires the skill that the other one rejects."""
    rejecting = tmp_path / "one.jsonl"
    requiring = tmp_path / "two.jsonl"
    row = {"query_id": "q1", "query": "Do it", "required": ["a"], "rejected": ["b", "c"]}
    write_jsonl(rejecting, [row])
    write_jsonl(requiring, [{"query_id": "q2", "query": "Do it", "required": ["b"]}])

    for files in ([rejecting, requiring], [requiring, rejecting]):
        _, judgements, dropped, _ = make(tmp_path, files, split="train")

        verdicts = {(row["query_id"], row["skill_id"]): row["verdict"] for row in judgements}
        assert verdicts == {
            ("q1", "a"): "required",
            ("q1", "c"): "rejected",
            ("q2", "b"): "required",
        }
        assert dropped_keys(dropped) == [("q1", "b", "contradiction")]
        assert "one.jsonl, line 1 says rejected" in dropped[0]["reason"]
        assert "two.jsonl" in dropped[0]["reason"]


def test_generated_ids_do_not_depend_on_line(tmp_path):
    rows = [{"query": "x", "skill_ids": ["a"]}, {"query": "y", "skill_ids": ["a"]}]
    queries, _, _, _ = make(tmp_path, rows)

    reversed_queries, _, dropped, _ = make(tmp_path, [rows[1], rows[0], rows[0]])

    ids = [query["query_id"] for query in queries]
    assert [query["query_id"] for query in reversed_queries] == ids[::-1]
    (duplicate,) = dropped
    assert duplicate["filter"] == "duplicate_query"
    assert "line 3 repeats" in duplicate["reason"]
    assert duplicate["reason"].endswith("line 2")


USABLE_ROW = {"query_id": "ok", "query": "y", "skill_ids": ["b"]}


def test_query_with_missing_gold_may_be_dropped(tmp_path):
    rows: list[dict[str, Any]] = [
        {"query_id": f"q{i}", "query": "x", "skill_ids": ["a", f"gone{i}"]} for i in range(4)
    ]
    with raises("unknown-skill"):
        make(tmp_path, [*rows, USABLE_ROW])

    queries, judgements, dropped, _ = make(tmp_path, [*rows, USABLE_ROW], missing_gold="drop")

    assert [query["query_id"] for query in queries] == ["ok"]
    assert [row["query_id"] for row in judgements] == ["ok"]
    assert dropped_keys(dropped) == [(f"q{i}", f"gone{i}", "missing_gold") for i in range(4)]


EMPTY_ROWS = [
    {"query_id": "e", "query": " ", "skill_ids": ["a"]},
    {"query_id": "n", "query": None, "skill_ids": ["a"]},
    {"query_id": "g", "query": "x", "skill_ids": []},
]
DROPPED_KEYS = [("e", "", "empty_query"), ("n", "", "empty_query"), ("g", "", "no_gold")]


def test_empty_query_is_dropped(tmp_path):
    _, _, dropped, _ = make(tmp_path, [*EMPTY_ROWS, USABLE_ROW])

    assert dropped_keys(dropped) == DROPPED_KEYS


def test_file_without_usable_query_is_refused(tmp_path):
    with raises("nothing-left"):
        make(tmp_path, EMPTY_ROWS)

    dropped = read_table(tmp_path / "out0.dropped.parquet", DROPPED).to_pylist()
    assert dropped_keys(dropped) == DROPPED_KEYS


def test_parquet_gives_the_same_queries(tmp_path):
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
        ("train.txt", "x", "unknown-format"),
        ("train.jsonl", '{"query": "x", "skill_ids": "a"}\n{oops', "not-json"),
        ("a.jsonl", '{"query": "x", "skill_ids": "a"}', "choose-split"),
        ("train.jsonl", None, "special-file"),
    ],
)
def test_wrong_file_is_refused(tmp_path, name: str, content: str | None, code: str):
    file = tmp_path / name
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)

    with raises(code):
        make(tmp_path, file)


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
def test_wrong_row_names_its_line(tmp_path, row: dict[str, Any], message: str):
    with pytest.raises(SkilltrainError, match=rf"train\.jsonl, line 2(, query .*)?: {message}"):
        make(tmp_path, [{"query_id": "q", "query": "x", "skill_ids": "a"}, row])


def test_skill_ids_lose_lone_surrogates(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"query": "x", "skill_ids": ["a\\ud800"]}')

    _, judgements, _, _ = make(tmp_path, file)

    assert [row["skill_id"] for row in judgements] == ["a"]


def test_wrong_row_names_its_id(tmp_path):
    row = {"query_id": "q7", "query": "x", "skill_ids": "a", "split": "valid"}

    with pytest.raises(SkilltrainError, match=r"train\.jsonl, line 1, query q7: split: "):
        make(tmp_path, [row])


@pytest.fixture
def two_files(tmp_path) -> Path:
    """A folder with the files a.jsonl and b.jsonl."""
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"query": name, "skill_ids": "a"}])
    return tmp_path


def test_pattern_matches_files_in_order(two_files: Path):
    queries, _, _, _ = make(two_files, str(two_files / "*.jsonl"), split="train")

    assert [query["text"] for query in queries] == ["a", "b"]


def test_pattern_without_match_is_refused(two_files: Path):
    with raises("not-found"):
        make(two_files, str(two_files / "x*.jsonl"), split="train")


def test_pattern_may_be_relative(two_files: Path, monkeypatch):
    (two_files / "here").mkdir()
    monkeypatch.chdir(two_files / "here")

    config = Queries.model_validate({"files": ["../*.jsonl"], "pool": "../pool", "out": "o"})

    assert config.files == (Path("../a.jsonl"), Path("../b.jsonl"))


def test_tables_keep_all_columns_of_judgements(tmp_path):
    values = {"verdict": "rejected", "reason": "scope_mismatch", "why": "too wide"}
    rejected = {"query_id": "q", "skill_id": "b", "group": "g", "judge": "anna"} | values
    required = dict.fromkeys(rejected) | {"query_id": "q", "skill_id": "a", "judge": "bo"}
    required["verdict"] = "required"
    texts = {"text": "x", "kind": "single", "origin": "hand", "split": "train"}
    queries = [{"query_id": query_id, **texts} for query_id in ("q", "unjudged")]
    write_table(queries, QUERIES, tmp_path / "tables")
    write_table([required, rejected], JUDGEMENTS, tmp_path / "tables")

    _, judgements, dropped, _ = make(tmp_path, tmp_path / "tables")

    assert judgements == [required, rejected]
    assert dropped_keys(dropped) == [("unjudged", "", "no_gold")]
