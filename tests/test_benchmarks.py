"""Benchmarks in our tables and in each published form, from files written here in the published layout."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import Files, jsonl, skillrouter, write, write_ours
from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Benchmark, check_pool, join_tiers
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.measures import Relevance, resolve_alternatives
from skilltrain.records import Query, Skill


def ids(benchmark: Benchmark) -> list[str]:
    return [task.query.query_id for task in benchmark.tasks]


def gold(*skill_ids: str, **alternatives: str) -> Relevance:
    return Relevance(frozenset(skill_ids), dict.fromkeys(skill_ids, 1.0), alternatives)


QRELS = "query-id\tcorpus-id\tscore\n"
BEIR: Files = {
    "queries.jsonl": [
        {"_id": f"q{n}", "text": text, "metadata": {}}
        for n, text in enumerate(("one", "two", "x"), 1)
    ],
    "corpus.jsonl": [{"_id": f"d{n}", "title": f"T{n}", "text": f"body {n}"} for n in (1, 2, 3)],
    "qrels/test.tsv": f"{QRELS}q1\td1\t2\nq1\td2\t1\nq1\td3\t0\nq2\td3\t1\n",
}
SKILLRET: Files = {
    f"{kind}/{split}.jsonl": [row]
    for split in ("test", "train")
    for kind, row in {
        "skills": {
            "id": f"s-{split}",
            "name": "N",
            "namespace": "x",
            "description": "D",
            "stars": 3,
            "license": None,
            "repo": "a/b",
            "major": "Software",
            "body": "B",
            "skill_md": "---\nname: N\n---\nB",
        },
        "queries": {
            "id": f"q-{split}",
            "query": "do",
            "skill_ids": [f"s-{split}"],
            "k": 1,
            "generator_model": "m",
        },
        "qrels": {"query_id": f"q-{split}", "skill_id": f"s-{split}", "relevance": 1},
    }.items()
}
R3: Files = {
    "skills_test.jsonl": [
        {"id": "skill-0", "text": "pdf | Reads PDF | Step 1 | Step 2"},
        {"id": "skill-1", "text": "only a name"},
    ],
    "test.jsonl": [
        {"query": "read", "skill_ids": ["skill-0"]},
        {"query": "读 PDF", "skill_ids": ["skill-1", "skill-0"], "lang": "zh2en"},
    ],
}


def mcp_tool(skill_id: str, **more: Any) -> dict[str, Any]:
    server, _, name = skill_id.partition("/")
    return {
        "skill_id": skill_id,
        "server": server,
        "server_description": f"all about {server}",
        "name": name,
        "description": f"does {name}",
        "parameters": ["path"],
        "category": "Office",
        **more,
    }


def mcp_task(task_id: str, *tools: str, **more: Any) -> dict[str, Any]:
    return {"task_id": task_id, "query": f"do {task_id}", "steps": [], "tools": tools, **more}


def live(*tasks: dict[str, Any]) -> Files:
    tools = [mcp_tool("disk/write"), mcp_tool("cloud/write"), mcp_tool("web/fetch", parameters=[])]
    return {"tools.jsonl": tools, "tasks.jsonl": list(tasks)}


def entry(*gold_ids: str, **more: Any) -> dict[str, Any]:
    return {
        "gt_skill_ids": list(gold_ids),
        "relevance": dict.fromkeys(gold_ids, 3),
        "core_gt_ids": list(gold_ids),
        "auxiliary_gt_ids": [],
        "task_type": "clean",
        **more,
    }


def router(task_ids: str, relevance: Any) -> Files:
    """SkillRouter's form: one task for each letter."""
    return skillrouter([(task_id, f"do {task_id}") for task_id in task_ids], relevance)


# Each form ----------------------------------------------------------------------------------------


def test_our_tables_required_is_gold_useful_gains_half(tmp_path: Path):
    queries = [("q1", "do q1", "test"), ("q2", "do q2", "dev"), ("q3", "do q3", "train")]
    judged = {
        "q1": {"a": "required", "b": "useful", "c": "irrelevant", "d": "rejected"},
        "q2": {"a": "required", "b": "required"},
    }
    folder = write_ours(tmp_path / "ours", queries, judged)

    (only,) = load_benchmark(
        folder, split="test"
    ).tasks  # q3 awaits its judgements, but is not asked for

    assert (only.relevance, only.query.text) == (
        Relevance(frozenset("a"), {"a": 1.0, "b": 0.5}),
        "do q1",
    )

    (dev,) = load_benchmark(folder, split="dev").tasks

    assert dev.labels["kind"] == "multi"


def test_beir_scores_are_gains_and_the_corpus_is_the_pool(tmp_path: Path):
    folder = write(tmp_path / "bench", BEIR)
    benchmark = load_benchmark(folder)

    first, second = benchmark.tasks

    assert first.query == Query("q1", "one", "multi", "bench", "test")
    assert second.labels["kind"] == "single"
    assert first.relevance == Relevance(frozenset({"d1", "d2"}), {"d1": 2.0, "d2": 1.0})
    assert benchmark.pool == benchmark.gold_skills
    assert benchmark.unscored == {"q3"}
    assert benchmark.pool[0] == Skill("d1", name="T1", description="", body="body 1")
    assert check_pool(benchmark, ["d1", "d2", "d3"]) == benchmark

    # Windows' line ends, a byte order mark, a blank line, and a score below 0
    text = b"\xef\xbb\xbfquery-id\tcorpus-id\tscore\r\nq1\td1\t1\r\nq1\td2\t-2\r\n\r\nq2\td3\t1\r\n"
    (folder / "qrels" / "test.tsv").write_bytes(text)

    assert [task.relevance for task in load_benchmark(folder).tasks] == [gold("d1"), gold("d3")]

    # What a row says of a query never replaces what we say.
    row = {"_id": "q1", "text": "first", "metadata": {"kind": "odd", "style": "terse", "votes": 3}}
    write(
        folder,
        {
            "queries.jsonl": [
                row,
                {"_id": "q2", "text": "b", "metadata": None},
                {"_id": "q3", "text": "c"},
            ]
        },
    )
    every = {"kind": "single", "origin": "bench", "split": "test"}

    assert [task.labels for task in load_benchmark(folder).tasks] == [
        every | {"style": "terse"},
        every,
    ]

    # Splits are files; without a corpus it is about a pool that is given.
    write(folder, {"qrels/train.tsv": f"{QRELS}q3\td1\t1\n"})

    assert ids(load_benchmark(folder)) == ["q1", "q2", "q3"]
    assert ids(load_benchmark(folder, "train")) == ["q3"]

    (folder / "corpus.jsonl").unlink()

    assert load_benchmark(folder).pool == ()
    with raises("missing-gold-skill"):
        check_pool(load_benchmark(folder), ["d1", "d2"])


def test_skillret_has_a_pool_for_each_split(tmp_path: Path):
    folder = write(tmp_path / "bench" / "data", SKILLRET)
    benchmark, both = load_benchmark(folder, "test"), load_benchmark(folder)

    assert benchmark.name == "bench"  # the folder is called data
    assert benchmark.tasks[0].query == Query("q-test", "do", "single", "skillret", "test")
    assert (benchmark.unscored, benchmark.tasks[0].relevance) == ({"q-train"}, gold("s-test"))

    body = "---\nname: N\n---\nB"

    assert benchmark.pool == (Skill("s-test", "N", "D", body, category="Software", source="a/b"),)
    assert (ids(both), [skill.skill_id for skill in both.pool]) == (
        ["q-test", "q-train"],
        ["s-test", "s-train"],
    )


def test_r3_skill_calls_queries_by_their_line_and_takes_texts_apart(tmp_path: Path):
    benchmark = load_benchmark(write(tmp_path, R3))
    one, two = benchmark.tasks

    assert two.query == Query("test-2", "读 PDF", "multi", "r3", "test")
    assert two.labels["direction"] == "zh2en"
    assert (two.relevance, one.labels) == (
        gold("skill-0", "skill-1"),
        {"kind": "single", "origin": "r3", "split": "test"},
    )
    assert benchmark.pool == (
        Skill("skill-0", name="pdf", description="Reads PDF", body="Step 1 | Step 2", source="r3"),
        Skill("skill-1", name="only a name", description="", body="", source="r3"),
    )


def test_livemcpbench_any_candidate_meets_a_need(tmp_path: Path):
    both = mcp_task("t1", "write", "fetch", "gone", steps=["save", "send"])
    found = load_benchmark(
        write(tmp_path, live(both, mcp_task("t2", "fetch"), mcp_task("t3", "gone")))
    )

    first, second = found.tasks

    assert (ids(found), first.labels["kind"], second.labels["kind"]) == (
        ["t1", "t2"],
        "multi",
        "single",
    )
    assert first.relevance == gold("disk/write", "web/fetch", **{"cloud/write": "disk/write"})
    assert [step.text for step in first.steps] == ["save", "send"]
    assert found.pool[0] == Skill(
        "disk/write",
        "write",
        "does write (disk: all about disk)",
        "Parameters: path",
        "Office",
        source="livemcpbench",
    )
    assert (
        found.pool[2].body == "Takes no parameters." and found.gold_skills == found.pool
    )  # with alternatives
    assert found.notes == (
        "2 of 5 needed tools (2 tasks) have no candidate and are no gold",
        "1 of 3 tasks have no gold and are not scored: t3",
    )

    # A pool with one of the candidates is enough.
    (checked, _) = check_pool(found, ["cloud/write", "web/fetch"]).tasks

    assert resolve_alternatives(["cloud/write"], checked.relevance).gold == {
        "cloud/write",
        "web/fetch",
    }
    with raises("missing-gold-skill"):
        check_pool(found, ["web/fetch"])


def clone(tools: str, steps: str = "") -> Files:
    """The two files of a clone of the published repository that are read."""
    offered = {
        "name": "write",
        "description": "writes",
        "inputSchema": {"properties": {"path": {}, "data": {}}},
    }
    servers = [
        {
            "name": "Disk",
            "description": "files",
            "category": "File",
            "tools": {"disk": {"tools": [offered]}},
        },
        {
            "name": "Cloud",
            "tools": {"cloud": {"tools": [offered, {"name": "fetch", "description": None}]}},
        },
    ]
    about = {"Tools": tools, "Steps": steps}
    task = {"task_id": "t1", "Question": "save it", "answers": "", "Annotator Metadata": about}
    return {
        "tools/LiveMCPTool/tools.json": servers,
        "annotated_data/all_annotations.json": json.dumps([task]),
    }


@pytest.mark.parametrize(
    ("steps", "texts"), [("1. one\n2. two", ["one", "two"]), ("just one", ["just one"]), ("", [])]
)
def test_livemcpbench_as_published_finds_tools_by_name(
    tmp_path: Path, steps: str, texts: list[str]
):
    benchmark = load_benchmark(write(tmp_path, clone("1. write\n2. fetch \n3. lost", steps)))

    assert benchmark.tasks[0].relevance == gold(
        "disk/write", "cloud/fetch", **{"cloud/write": "disk/write"}
    )
    assert [step.text for step in benchmark.tasks[0].steps] == texts
    assert benchmark.pool[0] == Skill(
        "disk/write",
        "write",
        "writes (Disk: files)",
        "Parameters: data, path",
        "File",
        source="livemcpbench",
    )
    assert benchmark.pool[2] == Skill(
        "cloud/fetch", "fetch", "(Cloud)", "Takes no parameters.", source="livemcpbench"
    )
    assert benchmark.notes == ("1 of 3 needed tools (1 tasks) have no candidate and are no gold",)


def test_skillrouter_folder_scores_what_relevance_json_says(tmp_path: Path):
    """Excluded tasks are scored, a generic_only one is not; gold are core_gt_ids, a degraded copy only gains."""
    relevance = {
        "b": entry("g/b", "g/a", core_gt_ids=None),  # then gt_skill_ids stand in
        "a": entry(
            "g/a", "g/aux", core_gt_ids=["g/a"], relevance={"g/a": 3, "g/aux": 1, "copy": 1}
        ),
        "c": entry("g/generic", core_gt_ids=[], task_type="generic_only"),
    }
    skill = {"skill_id": "g/a", "name": "A", "description": "does a", "body": "# A", "stars": 3}

    benchmark = load_benchmark(
        write(tmp_path / "bench", router("abc", relevance) | {"gold_skills.jsonl": [skill]})
    )

    assert benchmark.name == "bench"
    assert benchmark.notes == (
        "1 of 3 tasks want generic skills alone and are not scored",
    )  # 12 of the published 87
    assert benchmark.gold_skills == (Skill("g/a", "A", "does a", "# A"),)

    first, second = benchmark.tasks

    assert first.query == Query("a", "do a", "single", "skillsbench", "test")
    assert first.relevance == Relevance(frozenset({"g/a"}), {"g/a": 3.0, "g/aux": 1.0, "copy": 1.0})
    assert (second.query.query_id, second.query.kind, second.relevance.gold) == (
        "b",
        "multi",
        {"g/a", "g/b"},
    )
    with raises("missing-gold-skill"):
        check_pool(benchmark, ["g/a", "x"])


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """Two tasks over two pools; easy lacks the degraded copy, and task u is judged generic_only."""
    known = entry("gt/a", relevance={"gt/a": 3, "deg/a": 1})
    folder = write(
        tmp_path / "data", router("tu", {"t": known, "u": known | {"task_type": "generic_only"}})
    )
    skills = [
        {"skill_id": i, "name": i, "description": "d", "body": i}
        for i in ("gt/a", "other", "deg/a")
    ]
    for tier, rows in {"easy": skills[:2], "hard": skills}.items():
        (folder / tier).mkdir()
        for number, row in enumerate(rows):
            with gzip.open(folder / tier / f"part-{number}.jsonl.gz", "wt") as file:
                file.write(jsonl(row))
    return folder


def test_a_tier_is_a_pool_of_the_tasks_beside_it(tiers: Path):
    """Easy lacks the degraded copy: it is no part of the best order there, and it is in hard."""
    alone, gains = load_benchmark(tiers), {}
    for tier in ("easy", "hard"):
        benchmark = load_benchmark(tiers / tier)

        assert (benchmark.name, benchmark.tasks, benchmark.unscored) == (tier, alone.tasks, {"u"})

        gains[tier] = (
            check_pool(benchmark, [skill.skill_id for skill in benchmark.pool])
            .tasks[0]
            .relevance.gains
        )

    assert gains == {"easy": {"gt/a": 3.0}, "hard": {"gt/a": 3.0, "deg/a": 1.0}}
    assert load_benchmark([tiers / "easy"]) == load_benchmark(tiers / "easy")

    (tiers / "none").mkdir()

    with raises("no-skill-file"):
        load_benchmark(tiers / "none")


def test_tiers_are_ranked_apart_and_scored_together(tiers: Path):
    benchmark = load_benchmark([tiers / "easy", tiers / "hard"])

    assert (benchmark.name, benchmark.pool, benchmark.unscored) == (
        "easy + hard",
        (),
        {"u@easy", "u@hard"},
    )
    assert [(ids(tier), len(tier.pool)) for tier in benchmark.tiers] == [
        (["t@easy"], 2),
        (["t@hard"], 3),
    ]
    assert benchmark.clusters == {"t@easy": "t", "t@hard": "t"}

    checked = join_tiers(
        [check_pool(tier, [skill.skill_id for skill in tier.pool]) for tier in benchmark.tiers]
    )

    assert [len(task.relevance.gains) for task in checked.tasks] == [1, 2]
    with raises("repeated-name"):
        load_benchmark([tiers / "easy", tiers / "easy"])


# Faults -------------------------------------------------------------------------------------------


def qrels(rows: str) -> Files:
    return BEIR | {"qrels/test.tsv": QRELS + rows}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (qrels("q9\td1\t1\n"), r"test\.tsv, line 2: query 'q9' is not among the queries"),
        (qrels("q1\td1\tgood\n"), r"test\.tsv, line 2: score: "),
        (qrels("q1\td1\tnan\n"), r"test\.tsv: query 'q1': the gain of skill 'd1' is nan"),
        (
            qrels("q1\td1\t1\nq1\td1\t1\n"),
            r"test\.tsv, line 3: query 'q1' and skill 'd1' appear together twice",
        ),
        (qrels("q1\td1\t1\nq2\td2\t0\n"), r"test\.tsv: query 'q2': no skill is gold"),
        (qrels(""), r"holds no query to score"),
        (
            BEIR | {"qrels/dev.tsv": f"{QRELS}q1\td1\t1\n"},
            r"query 'q1' has two splits \(give the split",
        ),
        (
            BEIR | {"qrels/test.tsv": "q2\td1\t1\nq2\td2\t1\n"},
            r"test\.tsv, line 2: query_id: Field required",
        ),
        (
            BEIR | {"queries.jsonl": '{"_id": "q2", "te'},
            r"queries\.jsonl, line 1: is not JSON Lines",
        ),
        (BEIR | {"queries.jsonl": [{"_id": 7, "text": "a"}]}, r"queries\.jsonl, line 1: _id: "),
        (
            R3 | {"test.jsonl": [{"query": "a", "skill_ids": []}]},
            r"line 1: query 'test-1': no skill is gold",
        ),
        (clone("write"), r"entry 1: .*expected a numbered list of tools, found 'write'"),
        (router("t", {}), "relevance.json lacks task 't'"),
        (router("t", {"t": entry("g"), "u": entry("g")}), "tasks.jsonl lacks task 'u'"),
        (router("tt", {"t": entry("g")}), "tasks.jsonl, line 2: task 't' appears twice"),
        (router("t", []), "relevance.json: expected a map"),
        (router("t", {"t": entry()}), "relevance.json: query 't': no skill is gold"),
        (
            router("t", {"t": entry("g", relevance={"g": 0})}),
            "query 't': gold skill 'g' has no positive gain",
        ),
        (
            router("t", {"t": entry("g", gt_skill_ids="g")}),
            "relevance.json, task t: gt_skill_ids: ",
        ),
        (router("t", "[" * 100_000), r"relevance\.json: is not JSON: maximum recursion depth"),
        ({}, r"is not a benchmark \(one holds tasks.jsonl and tools.jsonl"),
    ],
)
def test_faults_are_named_in_one_line(tmp_path: Path, files: Files, message: str):
    """By file, line and id; all forms read their rows by the same functions."""
    with pytest.raises(SkilltrainError, match=message) as fault:
        load_benchmark(write(tmp_path, files))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("judged", "split", "code"),
    [
        ({"q1": {"a": "required"}}, None, "no-gold-skill"),
        ({"q1": {"a": "useful"}}, "test", "no-gold-skill"),
        ({"q9": {"a": "required"}}, "test", "unknown-query"),
        ({"q1": {"a": "perhaps"}}, "test", "invalid-value"),
        ({"q1": {"a": "required"}}, "tset", "empty-split"),
    ],
)
def test_faults_in_our_tables_are_named(tmp_path: Path, judged: Any, split: str | None, code: str):
    folder = write_ours(
        tmp_path / "ours", [("q1", "do q1", "test"), ("q2", "do q2", "dev")], judged
    )
    with raises(code):
        load_benchmark(folder, split)


def test_a_split_or_a_folder_that_is_not_there(tmp_path: Path):
    with raises("empty-split"):
        load_benchmark(write(tmp_path, BEIR), "dev")
    with raises("not-found"):
        load_benchmark(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["tasks.jsonl", "relevance.json", "gold_skills.jsonl", "queries.parquet"]
)
def test_pipes_and_devices_in_place_of_files_are_refused(tiers: Path, tmp_path: Path, name: str):
    folder = tmp_path if name.endswith("parquet") else tiers
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")

    with raises("special-file"):
        load_benchmark(folder)
