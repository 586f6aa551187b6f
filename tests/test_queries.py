import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skilltrain.data.queries import QueriesConfig, run_queries
from skilltrain.errors import SkilltrainError
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, SKILLS, read_table, write_table


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    folder = tmp_path / "pool"
    folder.mkdir()
    rows = [{"skill_id": i, "name": i, "description": "d", "body": "b", "source": "s"} for i in "abcd"]
    write_table(rows, SKILLS, folder)
    same = {"query_id": "", "skill_id": "a2", "filter": "duplicate", "reason": "r", "other_id": "a"}
    write_table([same], DROPPED, folder)
    return folder


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def make(tmp_path: Path, files: Any, **settings: Any) -> tuple[list[dict], list[dict], list[dict], dict]:
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    out.mkdir()
    summary = run_queries(QueriesConfig(files=files, pool=tmp_path / "pool", out=out, **settings), out)
    return *(read_table(out, spec).to_pylist() for spec in (QUERIES, JUDGEMENTS, DROPPED)), summary  # type: ignore[return-value]


def test_shapes_of_query_rows(tmp_path: Path, pool: Path):
    train = write_jsonl(tmp_path / "train.jsonl", [
        {"query_id": "q1", "query": " Send mail. ", "skill_ids": ["a"], "origin": "llm", "lang_pair": "en2zh"},
        {"text": "Two\x00 skills", "skill_ids": ["a", "b", "a"], "split": "dev"},
        {"query_id": 3, "query": "One id", "skill_id": "c", "kind": "multi"},
    ])  # fmt: skip
    queries, judgements, dropped, summary = make(tmp_path, train, origin="hand")
    made_up = queries[1]["query_id"]
    assert made_up.startswith("train-") and len(made_up) == len("train-") + 12
    assert queries == [
        {"query_id": "q1", "text": "Send mail.", "kind": "single", "origin": "llm", "split": "train"},
        {"query_id": made_up, "text": "Two skills", "kind": "multi", "origin": "hand", "split": "dev"},
        {"query_id": "3", "text": "One id", "kind": "multi", "origin": "hand", "split": "train"},
    ]
    assert [(j["query_id"], j["skill_id"], j["verdict"], j["judge"]) for j in judgements] == [
        ("q1", "a", "required", "llm"), (made_up, "a", "required", "hand"),
        (made_up, "b", "required", "hand"), ("3", "c", "required", "hand"),
    ]  # fmt: skip
    assert dropped == []
    assert summary["num_by_split"] == {"dev": 1, "train": 2}
    forced, _, _, _ = make(tmp_path, train, split="test")
    assert {query["split"] for query in forced} == {"test"}


def test_a_rejected_skill_that_another_file_calls_an_answer_of_the_same_text(tmp_path: Path, pool: Path):
    row = {"query_id": "q1", "query": "Do it", "required": ["a"], "rejected": ["b", "c"]}
    one = write_jsonl(tmp_path / "one.jsonl", [row])
    two = write_jsonl(tmp_path / "two.jsonl", [{"query_id": "q2", "query": "Do it", "required": ["b"]}])
    for files in ([one, two], [two, one]):
        _, judgements, dropped, summary = make(tmp_path, files, split="train")
        found = {(j["query_id"], j["skill_id"]): j["verdict"] for j in judgements}
        assert found == {("q1", "a"): "required", ("q1", "c"): "rejected", ("q2", "b"): "required"}
        assert [(d["query_id"], d["skill_id"], d["filter"]) for d in dropped] == [("q1", "b", "contradiction")]
        assert "one.jsonl, line 1 says rejected" in dropped[0]["reason"] and "two.jsonl" in dropped[0]["reason"]
        assert summary["num_dropped"] == {"contradiction": 1}


def test_a_reason_is_one_of_eight(tmp_path: Path, pool: Path):
    rows = [{"query": "x", "required": ["a"], "rejected": [{"skill_id": "b", "reason": "too blue"}]}]
    with pytest.raises(SkilltrainError, match=r"train\.jsonl, line 1: rejected\.0\.reason: .*'low_quality'.*too blue"):
        make(tmp_path, write_jsonl(tmp_path / "train.jsonl", rows))


def test_made_up_ids_do_not_depend_on_the_line(tmp_path: Path, pool: Path):
    rows = [{"query": "x", "skill_ids": ["a"]}, {"query": "y", "skill_ids": ["a"]}]
    first, _, _, _ = make(tmp_path, write_jsonl(tmp_path / "train.jsonl", rows))
    again, _, dropped, _ = make(tmp_path, write_jsonl(tmp_path / "train.jsonl", [*reversed(rows), rows[0]]))
    assert [query["query_id"] for query in again] == [query["query_id"] for query in reversed(first)]
    assert [row["filter"] for row in dropped] == ["duplicate_query"]
    assert "line 3 repeats" in dropped[0]["reason"] and dropped[0]["reason"].endswith("line 2")


def test_judgement_files(tmp_path: Path, pool: Path):
    file = write_jsonl(tmp_path / "judgements.jsonl", [{
        "group_id": "g1", "query": "Do it", "required": ["a", "b"], "useful": [{"skill_id": "d", "group": "twins"}],
        "irrelevant": ["nowhere", "b"],
        "rejected": [{"skill_id": "c", "reason": "scope_mismatch", "why": "too wide"}, {"skill_id": "a2"}],
    }])  # fmt: skip
    queries, judgements, dropped, summary = make(tmp_path, [file], split="train", origin="llm")
    assert (queries[0]["query_id"], queries[0]["kind"]) == ("g1", "multi")
    assert [(j["skill_id"], j["verdict"], j["reason"], j["why"], j["group"]) for j in judgements] == [
        ("a", "required", None, None, None), ("b", "required", None, None, None), ("d", "useful", None, None, "twins"),
        ("c", "rejected", "scope_mismatch", "too wide", None),
    ]  # fmt: skip
    assert [(row["skill_id"], row["filter"]) for row in dropped] == [
        ("a", "contradiction"), ("b", "contradiction"), ("nowhere", "not_in_pool"),
    ]  # fmt: skip
    assert summary["num_by_verdict"] == {"rejected": 1, "required": 2, "useful": 1}


def test_gold_that_was_a_duplicate_goes_to_the_kept_skill(tmp_path: Path, pool: Path):
    file = write_jsonl(tmp_path / "dev.jsonl", [{"query": "x", "skill_ids": ["a2", "a"]}])
    queries, judgements, _, _ = make(tmp_path, file)
    assert [j["skill_id"] for j in judgements] == ["a"]
    assert queries[0]["kind"] == "single"


def test_missing_gold(tmp_path: Path, pool: Path):
    rows = [{"query_id": f"q{i}", "query": "x", "skill_ids": ["a", f"gone{i}"]} for i in range(4)]
    file = write_jsonl(tmp_path / "train.jsonl", [*rows, {"query_id": "ok", "query": "y", "skill_ids": ["b"]}])
    with pytest.raises(
        SkilltrainError, match=r"train.jsonl, line 1: query 'q0' requires skill 'gone0'.*\(and 3 more\)"
    ):
        make(tmp_path, file)
    queries, judgements, dropped, _ = make(tmp_path, file, missing_gold="drop")
    assert [query["query_id"] for query in queries] == ["ok"]
    assert [j["query_id"] for j in judgements] == ["ok"]
    assert [(row["query_id"], row["skill_id"], row["filter"]) for row in dropped] == [
        (f"q{i}", f"gone{i}", "missing_gold") for i in range(4)
    ]


def test_empty_queries_and_queries_without_gold_are_dropped(tmp_path: Path, pool: Path):
    rows = [
        {"query_id": "e", "query": " ", "skill_ids": ["a"]},
        {"query_id": "n", "query": None, "skill_ids": ["a"]},
        {"query_id": "g", "query": "x", "skill_ids": []},
    ]
    file = write_jsonl(tmp_path / "train.jsonl", [*rows, {"query_id": "ok", "query": "y", "skill_ids": ["b"]}])
    _, _, dropped, _ = make(tmp_path, file)
    assert [(row["query_id"], row["filter"]) for row in dropped] == [
        ("e", "empty_query"), ("n", "empty_query"), ("g", "no_gold"),
    ]  # fmt: skip
    with pytest.raises(SkilltrainError, match=r"left of 1 file\(s\), 3 dropped rows; the first: empty_query"):
        make(tmp_path, write_jsonl(tmp_path / "train.jsonl", rows))
    assert read_table(tmp_path / "out1.dropped.parquet", DROPPED).column("query_id").to_pylist() == ["e", "n", "g"]


def test_the_same_queries_from_any_kind_of_file(tmp_path: Path, pool: Path):
    rows = [
        {"query_id": "1", "query": 'Two, "quoted"', "required": ["a", "b"], "rejected": [], "split": None},
        {"query_id": "2", "query": "One", "required": ["c"], "rejected": ["a"], "split": "dev"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "required": json.dumps(row["required"]), "rejected": json.dumps(row["rejected"])}
                         for row in rows)  # fmt: skip
    expected = make(tmp_path, write_jsonl(tmp_path / "train.jsonl", rows))
    assert [query["split"] for query in expected[0]] == ["train", "dev"] and len(expected[1]) == 4
    for kind in ("json", "parquet", "csv"):
        assert make(tmp_path, tmp_path / f"train.{kind}") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.json", "{}", "is a dict, not a list of queries"),
        ("train.json", "[1]", "row 1: is a int, not an object"),
        ("train.parquet", "x", "cannot be read as parquet"),
        ("train.csv", 'query,skill_ids\nx,"[a"', "cannot be read as csv"),
        ("train.txt", "x", "cannot tell what this file is"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path: Path, pool: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(SkilltrainError, match=message):
        make(tmp_path, tmp_path / name)


def test_a_pipe_is_refused_and_not_opened(tmp_path: Path, pool: Path):
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(SkilltrainError, match="is not a regular file"):
        make(tmp_path, tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"task": "x"}], r"line 1: is no query: no key query or text among task"),
        ([{"query": "x", "golds": []}], r"no key skill_ids, skill_id or required among query, golds"),
        ([{"query": ["x"], "skill_ids": ["a"]}], r"text: .*valid string, found \['x'\]"),
        ([{"query": "x", "skill_ids": "a", "query_id": {"n": 1}}], "query_id.*valid string, found {'n': 1}"),
        ([{"query": "x", "skill_ids": [{}, 1]}], r"skill_ids.0.skill_id: Field required"),
        ([{"query": "x", "rejected": [{"id": "a"}]}], r"rejected.0.skill_id: Field required"),
        ([{"query": "x", "skill_ids": "a", "split": "valid"}], "split: .*'train', 'dev' or 'test', found 'valid'"),
        ([{"query": "x", "skill_ids": "a", "kind": ["x"]}], "kind: .*'single' or 'multi'"),
        (
            [{"query_id": "q", "query": t, "skill_ids": "a"} for t in "xy"],
            r"line 2: query_id 'q' stands in .*line 1 too",
        ),
    ],
)
def test_wrong_rows_name_file_and_line(tmp_path: Path, pool: Path, rows: list[dict[str, Any]], message: str):
    file = write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(SkilltrainError, match=message) as caught:
        make(tmp_path, file)
    assert "train.jsonl, line" in str(caught.value)


def test_files_and_patterns(tmp_path: Path, pool: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"query": name, "skill_ids": "a"}])
    queries, _, _, _ = make(tmp_path, str(tmp_path / "*.jsonl"), split="train")
    assert [query["text"] for query in queries] == ["a", "b"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = QueriesConfig.model_validate({"files": ["../*.jsonl"], "pool": "../pool", "out": "o"})
    assert config.files == [Path("../a.jsonl"), Path("../b.jsonl")]
    with pytest.raises(SkilltrainError, match="neither its rows nor its file name give a split"):
        make(tmp_path, tmp_path / "a.jsonl")
    with pytest.raises(SkilltrainError, match=r"x\*.jsonl: no such file"):
        make(tmp_path, str(tmp_path / "x*.jsonl"), split="train")
    (tmp_path / "bad.jsonl").write_text('{"query": "x", "skill_ids": "a"}\n{oops')
    with pytest.raises(SkilltrainError, match=r"bad.jsonl, line 2: is not JSON Lines"):
        make(tmp_path, tmp_path / "bad.jsonl", split="train")


@pytest.mark.parametrize("row", [{"skill_ids": [3]}, {"skill_ids": [["a"]]}, {"skill_id": True}, {"query_id": 1.5}])
def test_ids_are_no_other_values(tmp_path: Path, pool: Path, row: dict[str, Any]):
    file = write_jsonl(tmp_path / "train.jsonl", [{"query": "x", "skill_ids": ["a"], **row}])
    with pytest.raises(SkilltrainError, match=r"train\.jsonl, line 1: "):
        make(tmp_path, file)
