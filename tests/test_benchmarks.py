"""Benchmarks in our tables and in each published form, written here in the published layout."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import Files, jsonl, skillrouter, write, write_ours, write_parquet
from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Benchmark, check_pool, join_tiers
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.measures import Relevance, resolve_alternatives
from skilltrain.records import Query, Skill


def ids(benchmark: Benchmark) -> list[str]:
    return [task.query.query_id for task in benchmark.tasks]


def pool_ids(benchmark: Benchmark) -> list[str]:
    return [skill.skill_id for skill in benchmark.pool]


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


def skillret_split(split: str) -> Files:
    """Return the three files of a split in SkillRet's form, with one skill and one query."""
    skill = {
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
    }
    query = {
        "id": f"q-{split}",
        "query": "do",
        "skill_ids": [f"s-{split}"],
        "k": 1,
        "generator_model": "m",
    }
    judgement = {"query_id": f"q-{split}", "skill_id": f"s-{split}", "relevance": 1}
    return {
        f"skills/{split}.jsonl": [skill],
        f"queries/{split}.jsonl": [query],
        f"qrels/{split}.jsonl": [judgement],
    }


SKILLRET: Files = skillret_split("test") | skillret_split("train")
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
    """Return LiveMCPBench's form with three tools and these tasks."""
    tools = [mcp_tool("disk/write"), mcp_tool("cloud/write"), mcp_tool("web/fetch", parameters=[])]
    return {"tools.jsonl": tools, "tasks.jsonl": list(tasks)}


def entry(*gold_ids: str, **more: Any) -> dict[str, Any]:
    """Return a task's entry of relevance.json in SkillRouter's form."""
    return {
        "gt_skill_ids": list(gold_ids),
        "relevance": dict.fromkeys(gold_ids, 3),
        "core_gt_ids": list(gold_ids),
        "auxiliary_gt_ids": [],
        "task_type": "clean",
        **more,
    }


def router(task_ids: str, relevance: Any) -> Files:
    """Return SkillRouter's form with one task for each letter."""
    return skillrouter([(task_id, f"do {task_id}") for task_id in task_ids], relevance)


# Each form ----------------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A benchmark in our tables; q3 awaits its judgements."""
    queries = [("q1", "do q1", "test"), ("q2", "do q2", "dev"), ("q3", "do q3", "train")]
    verdicts = {
        "q1": {"a": "required", "b": "useful", "c": "irrelevant", "d": "rejected"},
        "q2": {"a": "required", "b": "required"},
    }
    return write_ours(tmp_path / "ours", queries, verdicts)


def test_required_is_gold_useful_gains_half(ours: Path):
    (task,) = load_benchmark(ours, split="test").tasks

    assert task.relevance == Relevance(frozenset("a"), {"a": 1.0, "b": 0.5})
    assert task.query.text == "do q1"


def test_two_gold_skills_make_query_multi(ours: Path):
    (task,) = load_benchmark(ours, split="dev").tasks

    assert task.labels["kind"] == "multi"


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    return write(tmp_path / "bench", BEIR)


def test_beir_scores_are_gains(beir: Path):
    benchmark = load_benchmark(beir)

    first, second = benchmark.tasks
    assert first.query == Query("q1", "one", "multi", "bench", "test")
    assert first.relevance == Relevance(frozenset({"d1", "d2"}), {"d1": 2.0, "d2": 1.0, "d3": 0.0})
    assert second.labels["kind"] == "single"
    assert benchmark.unscored == {"q3"}


def test_beir_corpus_is_pool(beir: Path):
    benchmark = load_benchmark(beir)

    assert benchmark.pool[0] == Skill("d1", name="T1", description="", body="body 1")
    assert benchmark.pool == benchmark.gold_skills
    assert check_pool(benchmark, ["d1", "d2", "d3"]) == benchmark


def test_beir_without_corpus_needs_gold_in_pool(beir: Path):
    (beir / "corpus.jsonl").unlink()

    benchmark = load_benchmark(beir)

    assert benchmark.pool == ()
    with raises("missing-gold-skill"):
        check_pool(benchmark, ["d1", "d2"])


def test_beir_qrels_may_come_from_windows(beir: Path):
    # Line ends of Windows, a byte order mark, a blank line and a score below 0.
    text = b"\xef\xbb\xbfquery-id\tcorpus-id\tscore\r\nq1\td1\t1\r\nq1\td2\t-2\r\n\r\nq2\td3\t1\r\n"
    (beir / "qrels" / "test.tsv").write_bytes(text)

    tasks = load_benchmark(beir).tasks

    judged = Relevance(frozenset({"d1"}), {"d1": 1.0, "d2": 0.0})
    assert [task.relevance for task in tasks] == [judged, gold("d3")]


def test_beir_metadata_are_labels(beir: Path):
    # A row never replaces our own label of the kind.
    metadata = {"kind": "odd", "style": "terse", "votes": 3}
    rows = [
        {"_id": "q1", "text": "first", "metadata": metadata},
        {"_id": "q2", "text": "b", "metadata": None},
        {"_id": "q3", "text": "c"},
    ]
    write(beir, {"queries.jsonl": rows, "qrels/test.tsv": f"{QRELS}q1\td1\t1\nq2\td3\t1\n"})

    first, second = load_benchmark(beir).tasks

    labels = {"kind": "single", "origin": "bench", "split": "test"}
    assert first.labels == labels | {"style": "terse"}
    assert second.labels == labels


def test_mteb_qrels_are_json_lines(beir: Path):
    expected = load_benchmark(beir).tasks
    lines: list[str] = []
    for line in (beir / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query_id, skill_id, score = line.split("\t")
        row = {"query-id": query_id, "corpus-id": skill_id, "score": float(score)}
        lines.append(json.dumps(row))
    (beir / "qrels" / "test.tsv").unlink()
    write(beir, {"qrels/test.jsonl": "\n".join(lines)})

    assert load_benchmark(beir).tasks == expected


@pytest.mark.parametrize(
    "qrels",
    [
        "q1\td1\t2\nq1\td2\t1\nq1\td3\t0\nq2\td3\t1\n",  # BEIR without a header
        "q1 0 d1 2\nq1  0  d2  1\nq1 0 d3 0\n\nq2 0 d3 1\n",  # TREC
    ],
)
def test_qrels_need_no_header(beir: Path, qrels: str):
    expected = load_benchmark(beir).tasks

    write(beir, {"qrels/test.tsv": qrels})

    assert load_benchmark(beir).tasks == expected


def test_mteb_parquet_folder_equals_beir(beir: Path, tmp_path: Path):
    expected = load_benchmark(beir)
    folder = tmp_path / "mteb" / "bench"
    rows = [row | {"id": row["_id"]} for row in BEIR["corpus.jsonl"]]
    write_parquet(folder / "corpus" / "corpus-00000-of-00001.parquet", rows)
    queries = [{"_id": row["_id"], "text": row["text"]} for row in BEIR["queries.jsonl"]]
    write_parquet(folder / "queries" / "queries-00000-of-00001.parquet", queries)
    qrels = [("q1", "d1", 2.0), ("q1", "d2", 1.0), ("q1", "d3", 0.0), ("q2", "d3", 1.0)]
    columns = ("query-id", "corpus-id", "score")
    judgements = [dict(zip(columns, values, strict=True)) for values in qrels]
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", judgements)

    benchmark = load_benchmark(folder)

    assert benchmark == expected


def test_mteb_ids_may_be_numbers(tmp_path: Path):
    files: Files = {
        "queries.jsonl": [{"_id": 1, "text": "one"}],
        "corpus.jsonl": [{"_id": 7, "title": None, "text": "body"}],
        "qrels/test.jsonl": [{"query-id": 1, "corpus-id": 7, "score": 1}],
    }

    benchmark = load_benchmark(write(tmp_path / "bench", files))

    assert ids(benchmark) == ["1"]
    assert benchmark.tasks[0].relevance == gold("7")


def test_mteb_split_has_its_files(beir: Path):
    (beir / "corpus.jsonl").unlink()
    for split, number in (("test", 1), ("train", 2)):
        row = {"_id": "d1", "title": "", "text": f"body {number}"}
        write_parquet(beir / "corpus" / f"{split}-00000-of-00001.parquet", [row])

    benchmark = load_benchmark(beir, "test")

    assert [skill.body for skill in benchmark.pool] == ["body 1"]


@pytest.fixture
def toolret(tmp_path: Path) -> Path:
    """Return a folder with a query set for each of the three categories of tools."""
    sets = {"code": "toolink", "customized": "gta", "web": "apibank"}
    for number, (category, query_set) in enumerate(sets.items()):
        labels = [
            {"id": f"tool_{number}", "doc": {}, "relevance": 1},
            {"id": "tool_9", "doc": {}, "relevance": 0},
        ]
        row = {"id": f"{query_set}_1", "query": "do it", "labels": json.dumps(labels)}
        write_parquet(tmp_path / "ToolRet-Queries" / query_set / "queries-0.parquet", [row])
        tools = [{"id": f"tool_{n}", "documentation": f"text {n}"} for n in (number, 9)]
        write_parquet(tmp_path / "ToolRet-Tools" / category / "tools-0.parquet", tools)
    return tmp_path


def test_toolret_category_is_tier(toolret: Path):
    code, customized, web = load_benchmark(toolret).tiers

    assert (ids(code), pool_ids(code)) == (["toolink_1@code"], ["tool_0", "tool_9"])
    assert (ids(customized), pool_ids(customized)) == (["gta_1@customized"], ["tool_1", "tool_9"])
    assert ids(web) == ["apibank_1@web"]
    assert web.tasks[0].relevance == gold("tool_2")
    assert web.tasks[0].labels["origin"] == "apibank"
    assert web.pool[0].body == "text 2"


def test_toolret_without_category_is_refused(toolret: Path):
    (toolret / "ToolRet-Queries" / "gta").rename(toolret / "elsewhere")

    with raises("empty-benchmark"):
        load_benchmark(toolret)


def test_beir_without_qrels_names_folder(beir: Path):
    (beir / "qrels" / "test.tsv").unlink()

    with raises("missing-table"):
        load_benchmark(beir)


def test_beir_splits_are_files(beir: Path):
    write(beir, {"qrels/train.tsv": f"{QRELS}q3\td1\t1\n"})

    assert ids(load_benchmark(beir)) == ["q1", "q2", "q3"]
    assert ids(load_benchmark(beir, "train")) == ["q3"]


def test_skillret_split_has_its_pool(tmp_path: Path):
    folder = write(tmp_path / "bench" / "data", SKILLRET)

    benchmark = load_benchmark(folder, "test")

    assert benchmark.name == "bench"  # not data, the name of the folder
    assert benchmark.unscored == {"q-train"}
    (task,) = benchmark.tasks
    assert task.query == Query("q-test", "do", "single", "skillret", "test")
    assert task.relevance == gold("s-test")
    body = "---\nname: N\n---\nB"
    assert benchmark.pool == (Skill("s-test", "N", "D", body, category="Software", source="a/b"),)


def test_skillret_joins_pools_of_all_splits(tmp_path: Path):
    benchmark = load_benchmark(write(tmp_path, SKILLRET))

    assert ids(benchmark) == ["q-test", "q-train"]
    assert pool_ids(benchmark) == ["s-test", "s-train"]


def test_r3_skill_names_queries_by_line(tmp_path: Path):
    first, second = load_benchmark(write(tmp_path, R3)).tasks

    assert first.labels == {"kind": "single", "origin": "r3", "split": "test"}
    assert second.query == Query("test-2", "读 PDF", "multi", "r3", "test")
    assert second.labels["direction"] == "zh2en"
    assert second.relevance == gold("skill-0", "skill-1")


def test_r3_skill_texts_are_split(tmp_path: Path):
    assert load_benchmark(write(tmp_path, R3)).pool == (
        Skill("skill-0", name="pdf", description="Reads PDF", body="Step 1 | Step 2", source="r3"),
        Skill("skill-1", name="only a name", description="", body="", source="r3"),
    )


@pytest.fixture
def live_benchmark(tmp_path: Path) -> Benchmark:
    tasks = [
        mcp_task("t1", "write", "fetch", "gone", steps=["save", "send"]),
        mcp_task("t2", "fetch"),
        mcp_task("t3", "gone"),
    ]
    return load_benchmark(write(tmp_path, live(*tasks)))


def test_livemcpbench_candidates_are_alternatives(live_benchmark: Benchmark):
    first, second = live_benchmark.tasks

    assert first.relevance == gold("disk/write", "web/fetch", **{"cloud/write": "disk/write"})
    assert first.labels["kind"] == "multi"
    assert [step.text for step in first.steps] == ["save", "send"]
    assert second.labels["kind"] == "single"


def test_livemcpbench_tools_are_pool(live_benchmark: Benchmark):
    assert live_benchmark.pool[0] == Skill(
        "disk/write",
        "write",
        "does write (disk: all about disk)",
        "Parameters: path",
        "Office",
        source="livemcpbench",
    )
    assert live_benchmark.pool[2].body == "Takes no parameters."
    assert live_benchmark.gold_skills == live_benchmark.pool  # with alternatives


def test_livemcpbench_notes_missing_candidates(live_benchmark: Benchmark):
    assert ids(live_benchmark) == ["t1", "t2"]
    assert live_benchmark.notes == (
        "2 of 5 needed tools (2 tasks) are offered by no server, so they cannot be gold",
        "1 of 3 tasks have no gold and are not scored: t3",
    )


def test_pool_needs_one_alternative(live_benchmark: Benchmark):
    task = check_pool(live_benchmark, ["cloud/write", "web/fetch"]).tasks[0]

    relevance = resolve_alternatives(["cloud/write"], task.relevance)
    assert relevance.gold == {"cloud/write", "web/fetch"}
    with raises("missing-gold-skill"):
        check_pool(live_benchmark, ["web/fetch"])


def clone(tools: str, steps: str = "") -> Files:
    """Return the two files that are read of a clone of LiveMCPBench's repository."""
    writer = {
        "name": "write",
        "description": "writes",
        "inputSchema": {"properties": {"path": {}, "data": {}}},
    }
    fetcher = {"name": "fetch", "description": None}
    servers = [
        {
            "name": "Disk",
            "description": "files",
            "category": "File",
            "tools": {"disk": {"tools": [writer]}},
        },
        {"name": "Cloud", "tools": {"cloud": {"tools": [writer, fetcher]}}},
    ]
    metadata = {"Tools": tools, "Steps": steps}
    task = {"task_id": "t1", "Question": "save it", "answers": "", "Annotator Metadata": metadata}
    return {
        "tools/LiveMCPTool/tools.json": servers,
        "annotated_data/all_annotations.json": json.dumps([task]),
    }


def test_published_livemcpbench_finds_tools_by_name(tmp_path: Path):
    benchmark = load_benchmark(write(tmp_path, clone("1. write\n2. fetch \n3. lost")))

    (task,) = benchmark.tasks
    assert task.relevance == gold("disk/write", "cloud/fetch", **{"cloud/write": "disk/write"})
    assert benchmark.notes == (
        "1 of 3 needed tools (1 tasks) are offered by no server, so they cannot be gold",
    )


@pytest.mark.parametrize(
    ("steps", "texts"), [("1. one\n2. two", ["one", "two"]), ("just one", ["just one"]), ("", [])]
)
def test_published_livemcpbench_steps_are_numbered(tmp_path: Path, steps: str, texts: list[str]):
    (task,) = load_benchmark(write(tmp_path, clone("1. write", steps))).tasks

    assert [step.text for step in task.steps] == texts


def test_published_livemcpbench_tools_are_pool(tmp_path: Path):
    pool = load_benchmark(write(tmp_path, clone("1. write"))).pool

    assert pool[0] == Skill(
        "disk/write",
        "write",
        "writes (Disk: files)",
        "Parameters: data, path",
        "File",
        source="livemcpbench",
    )
    assert pool[2] == Skill(
        "cloud/fetch", "fetch", "(Cloud)", "Takes no parameters.", source="livemcpbench"
    )


@pytest.fixture
def skillrouter_benchmark(tmp_path: Path) -> Benchmark:
    relevance = {
        "b": entry("g/b", "g/a", core_gt_ids=None),  # then gt_skill_ids stand in
        "a": entry(
            "g/a", "g/aux", core_gt_ids=["g/a"], relevance={"g/a": 3, "g/aux": 1, "copy": 1}
        ),
        "c": entry("g/generic", core_gt_ids=[], task_type="generic_only"),
    }
    skill = {"skill_id": "g/a", "name": "A", "description": "does a", "body": "# A", "stars": 3}
    files = router("abc", relevance) | {"gold_skills.jsonl": [skill]}
    return load_benchmark(write(tmp_path / "bench", files))


def test_skillrouter_gold_is_core_gt_ids(skillrouter_benchmark: Benchmark):
    first, second = skillrouter_benchmark.tasks

    assert first.query == Query("a", "do a", "single", "skillsbench", "test")
    # An auxiliary skill and a degraded copy gain without being gold.
    assert first.relevance == Relevance(frozenset({"g/a"}), {"g/a": 3.0, "g/aux": 1.0, "copy": 1.0})
    assert second.query.query_id == "b"
    assert second.query.kind == "multi"
    assert second.relevance.gold == {"g/a", "g/b"}


def test_skillrouter_ignores_generic_only_tasks(skillrouter_benchmark: Benchmark):
    # 12 of the published 87 tasks. Tasks that are marked as excluded are scored.
    notes = ("1 of 3 tasks need generic skills only and are not scored",)

    assert skillrouter_benchmark.notes == notes


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["pdf", "pdf", "", 3, "office"], ("pdf", "office")),
        ("pdf, office", ()),
        ({"pdf": 1}, ()),
        (None, ()),
    ],
)
def test_skillrouter_tags_are_distinct_texts(tmp_path: Path, tags: Any, expected: tuple[str, ...]):
    files = router("a", {"a": entry("g/a")})
    files["tasks.jsonl"][0]["tags"] = tags

    [task] = load_benchmark(write(tmp_path / "bench", files)).tasks

    assert task.labels.get("tags", ()) == expected


def test_skillrouter_gold_skills_are_file(skillrouter_benchmark: Benchmark):
    assert skillrouter_benchmark.name == "bench"
    assert skillrouter_benchmark.gold_skills == (Skill("g/a", "A", "does a", "# A"),)
    with raises("missing-gold-skill"):
        check_pool(skillrouter_benchmark, ["g/a", "x"])


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """Two tasks over two pools; easy lacks the degraded copy, and task u is judged generic_only."""
    relevance = entry("gt/a", relevance={"gt/a": 3, "deg/a": 1})
    generic = relevance | {"task_type": "generic_only"}
    folder = write(tmp_path / "data", router("tu", {"t": relevance, "u": generic}))
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


@pytest.mark.parametrize("tier", ["easy", "hard"])
def test_tier_has_tasks_beside_it(tiers: Path, tier: str):
    benchmark = load_benchmark(tiers / tier)

    assert benchmark.name == tier
    assert benchmark.tasks == load_benchmark(tiers).tasks
    assert benchmark.unscored == {"u"}
    assert load_benchmark([tiers / tier]) == benchmark


@pytest.mark.parametrize(
    ("tier", "gains"), [("easy", {"gt/a": 3.0}), ("hard", {"gt/a": 3.0, "deg/a": 1.0})]
)
def test_gains_outside_pool_do_not_count(tiers: Path, tier: str, gains: dict[str, float]):
    benchmark = load_benchmark(tiers / tier)

    (task,) = check_pool(benchmark, pool_ids(benchmark)).tasks

    assert task.relevance.gains == gains


def test_tier_needs_skills(tiers: Path):
    (tiers / "none").mkdir()

    with raises("no-skill-file"):
        load_benchmark(tiers / "none")


def test_tiers_are_loaded_as_one_benchmark(tiers: Path):
    benchmark = load_benchmark([tiers / "easy", tiers / "hard"])

    assert benchmark.name == "easy + hard"
    assert benchmark.pool == ()
    assert benchmark.unscored == {"u@easy", "u@hard"}
    assert benchmark.clusters == {"t@easy": "t", "t@hard": "t"}
    easy, hard = benchmark.tiers
    assert (ids(easy), len(easy.pool)) == (["t@easy"], 2)
    assert (ids(hard), len(hard.pool)) == (["t@hard"], 3)


def test_joined_tiers_keep_their_gains(tiers: Path):
    benchmark = load_benchmark([tiers / "easy", tiers / "hard"])

    joined = join_tiers([check_pool(tier, pool_ids(tier)) for tier in benchmark.tiers])

    assert [len(task.relevance.gains) for task in joined.tasks] == [1, 2]


def test_repeated_tier_is_refused(tiers: Path):
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
        (qrels("q1\td1\tnan\n"), r"test\.tsv, line 2: score: Input should be a finite number"),
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
            BEIR | {"qrels/test.tsv": "q2\td1\n"},
            r"test\.tsv, line 1: has 2 columns \(its columns are query_id skill_id",
        ),
        (
            BEIR | {"qrels/test.tsv": f"{QRELS}q1\td1\t1\nq2\td1\t1\t1\t1\n"},
            r"test\.tsv, line 3: has 5 columns \(",
        ),
        (BEIR | {"qrels/test.tsv": "q1\td1\tgood\n"}, r"test\.tsv, line 1: score: "),
        (
            BEIR | {"queries.jsonl": '{"_id": "q2", "te'},
            r"queries\.jsonl, line 1: is not JSON Lines",
        ),
        (BEIR | {"queries.jsonl": [{"_id": 7.5, "text": "a"}]}, r"queries\.jsonl, line 1: _id: "),
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
        ({}, r"is not a benchmark \(a benchmark holds tasks.jsonl and tools.jsonl"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, files: Files, message: str):
    """The error names file, line and id; the same functions read the rows of all forms."""
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


def test_missing_split_is_refused(tmp_path: Path):
    with raises("empty-split"):
        load_benchmark(write(tmp_path, BEIR), "dev")


def test_missing_folder_is_refused(tmp_path: Path):
    with raises("not-found"):
        load_benchmark(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["tasks.jsonl", "relevance.json", "gold_skills.jsonl", "queries.parquet"]
)
def test_special_files_are_refused(tiers: Path, tmp_path: Path, name: str):
    folder = tmp_path if name.endswith("parquet") else tiers
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")

    with raises("special-file"):
        load_benchmark(folder)
