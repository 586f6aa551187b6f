"""Published benchmark forms, each read from files written here in the published layout."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, check_pool, joined
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.bootstrap import Interval
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import Relevance, parse_measures, per_query
from skilltrain.evaluation.slices import labels_of, means_by_slice
from skilltrain.records import Query, Skill

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the folder `bench`; the folder comes back."""

    def write_file(name: str, text: str) -> Path:
        file = tmp_path / "bench" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return tmp_path / "bench"

    return write_file


def ids(benchmark: Benchmark) -> list[str]:
    return [task.query.query_id for task in benchmark.tasks]


# BEIR


def beir(write: Write, test: str = "q1\td1\t2\nq1\td2\t1\nq1\td3\t0\nq2\td3\t1\n", **more: str) -> Path:
    """Three documents and queries; q3 is judged in no split but `train`."""
    texts = [("q1", "first"), ("q2", "second"), ("q3", "third")]
    folder = write("queries.jsonl", jsonl(*({"_id": i, "text": text, "metadata": {}} for i, text in texts)))
    write("corpus.jsonl", jsonl(*({"_id": f"d{i}", "title": f"T{i}", "text": f"body {i}"} for i in (1, 2, 3))))
    for split, rows in {"test": test, **more}.items():
        write(f"qrels/{split}.tsv", f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def test_beir_scores_are_gains_and_the_corpus_is_the_pool(write: Write):
    benchmark = load_benchmark(beir(write))
    first, second = benchmark.tasks
    assert first.query == Query("q1", "first", "multi", "bench", "test")
    assert first.relevance == Relevance(frozenset({"d1", "d2"}), {"d1": 2.0, "d2": 1.0})
    assert second.labels["kind"] == "single"
    assert benchmark.pool[0] == Skill("d1", name="T1", description="", body="body 1")
    assert [skill.skill_id for skill in benchmark.pool] == ["d1", "d2", "d3"]
    assert benchmark.gold_skills == benchmark.pool
    assert check_pool(benchmark, [skill.skill_id for skill in benchmark.pool]) == benchmark


def test_beir_splits_are_files(write: Write):
    folder = beir(write, train="q3\td1\t1\n")
    assert ids(load_benchmark(folder)) == ["q1", "q2", "q3"]
    assert ids(load_benchmark(folder, "train")) == ["q3"]
    with pytest.raises(SkilltrainError, match=r"qrels: holds no split 'dev' \(its splits are test, train\)"):
        load_benchmark(folder, "dev")


def test_beir_without_a_corpus_is_about_a_pool_that_is_given(write: Write):
    folder = beir(write)
    (folder / "corpus.jsonl").unlink()
    benchmark = load_benchmark(folder)
    assert benchmark.pool == benchmark.gold_skills == ()
    with pytest.raises(SkilltrainError, match="gold skill 'd3' of query 'q2' is not among the 2 skills"):
        check_pool(benchmark, ["d1", "d2"])


def test_beir_with_windows_line_ends_a_byte_order_mark_and_negative_scores(write: Write):
    folder = beir(write)
    file = folder / "qrels" / "test.tsv"
    file.write_bytes(b"\xef\xbb\xbfquery-id\tcorpus-id\tscore\r\nq1\td1\t1\r\nq1\td2\t-2\r\n\r\n")
    (only,) = load_benchmark(folder).tasks
    assert only.relevance == Relevance(frozenset({"d1"}), {"d1": 1.0})


def test_faults_in_other_beir_files_are_named(write: Write):
    folder = beir(write, dev="q1\td1\t1\n")
    with pytest.raises(SkilltrainError, match=r"query 'q1' has two splits \(give the split"):
        load_benchmark(folder)
    write("qrels/dev.tsv", "q2\td1\t1\nq2\td2\t1\n")
    with pytest.raises(SkilltrainError, match=r"dev\.tsv, line 2: query_id: Field required"):
        load_benchmark(folder, "dev")


# SkillRet


def beir_queries(write: Write, text: str) -> Path:
    beir(write)
    return write("queries.jsonl", text)


def skillret(write: Write, **changed: str) -> Path:
    """One query and one skill in each split, with the published columns."""
    folder = write("data/README.md", "")
    for split in ("test", "train"):
        skill = {"id": f"s-{split}", "name": "N", "namespace": "x", "description": "D", "stars": 3, "license": None,
                 "repo": "a/b", "major": "Software", "body": "B", "skill_md": "---\nname: N\n---\nB"}  # fmt: skip
        query = {"id": f"q-{split}", "query": "do", "skill_ids": [f"s-{split}"], "k": 1, "generator_model": "m"}
        files = {
            f"data/skills/{split}.jsonl": jsonl(skill),
            f"data/queries/{split}.jsonl": jsonl(query),
            f"data/qrels/{split}.jsonl": jsonl({"query_id": f"q-{split}", "skill_id": f"s-{split}", "relevance": 1}),
        }
        for name, text in files.items():
            write(name, changed.get(name.removeprefix("data/"), text))
    return folder / "data"


def test_skillret_has_a_pool_for_each_split(write: Write):
    benchmark = load_benchmark(skillret(write), "test")
    assert benchmark.name == "bench"  # the folder is called data
    assert benchmark.tasks[0].query == Query("q-test", "do", "single", "skillret", "test")
    assert "q-test" not in benchmark.unscored and benchmark.unscored
    assert benchmark.tasks[0].relevance == Relevance(frozenset({"s-test"}), {"s-test": 1.0})
    body = "---\nname: N\n---\nB"
    assert benchmark.pool == (Skill("s-test", "N", "D", body, category="Software", source="a/b"),)
    both = load_benchmark(skillret(write))
    assert ids(both) == ["q-test", "q-train"]
    assert [skill.skill_id for skill in both.pool] == ["s-test", "s-train"]


def test_skillret_queries_without_a_row_are_refused(write: Write):
    with pytest.raises(SkilltrainError, match=r"qrels/test\.jsonl: query 'q-test': no skill is gold"):
        load_benchmark(skillret(write, **{"qrels/test.jsonl": ""}), "test")


def test_a_skillret_query_in_two_splits_needs_a_split(write: Write):
    folder = skillret(write, **{
        "queries/train.jsonl": jsonl({"id": "q-test", "query": "do"}),
        "qrels/train.jsonl": jsonl({"query_id": "q-test", "skill_id": "s-train", "relevance": 1}),
    })  # fmt: skip
    with pytest.raises(SkilltrainError, match=r"query 'q-test' has two splits \(give the split to score"):
        load_benchmark(folder)
    assert ids(load_benchmark(folder, "train")) == ["q-test"]


# R3-Skill


def r3_skill(write: Write, tests: str = "") -> Path:
    skills = [{"id": "skill-0", "text": "pdf | Reads PDF | Step 1 | Step 2"}, {"id": "skill-1", "text": "only a name"}]
    write("skills_test.jsonl", jsonl(*skills))
    row = {"query": "读 PDF", "skill_ids": ["skill-1", "skill-0"], "lang": "zh2en"}
    return write("test.jsonl", tests or jsonl({"query": "read", "skill_ids": ["skill-0"]}, row))


def test_r3_skill_calls_queries_by_their_line_and_takes_texts_apart(write: Write):
    benchmark = load_benchmark(r3_skill(write))
    assert benchmark.tasks[1].query == Query("test-2", "读 PDF", "multi", "r3", "test")
    assert benchmark.tasks[1].relevance == Relevance(frozenset({"skill-0", "skill-1"}), {"skill-0": 1, "skill-1": 1})
    assert benchmark.pool == (
        Skill("skill-0", name="pdf", description="Reads PDF", body="Step 1 | Step 2", source="r3"),
        Skill("skill-1", name="only a name", description="", body="", source="r3"),
    )
    with pytest.raises(SkilltrainError, match=r"no query of split 'dev' \(its splits are test \(2\)\)"):
        load_benchmark(r3_skill(write), "dev")


def group(group_id: str, required: list[str], **more: Any) -> dict[str, Any]:
    rejected = [{"skill_id": "x", "reason": "scope_mismatch", "why": "too broad"}]
    return {"group_id": group_id, "anchor": "a", "query": f"do {group_id}", "required": required,
            "rejected": rejected, "irrelevant": ["y"], **more}  # fmt: skip


def groups(write: Write, rows: list[Any]) -> Path:
    return write("judgements.jsonl", jsonl(*rows))


def test_groups_of_judgements_required_is_gold(write: Write):
    benchmark = load_benchmark(groups(write, [group("g1", ["a", "b"]), group("g2", ["c"])]))
    first, second = benchmark.tasks
    assert first.query == Query("g1", "do g1", "multi", "r3", "test")
    assert first.relevance == Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0})
    assert second.labels["kind"] == "single"
    assert benchmark.pool == ()


# LiveMCPBench


def mcp_tool(skill_id: str, **more: Any) -> dict[str, Any]:
    server, _, name = skill_id.partition("/")
    return {"skill_id": skill_id, "server": server, "server_description": f"all about {server}", "name": name,
            "description": f"does {name}", "parameters": ["path"], "category": "Office", **more}  # fmt: skip


def mcp_task(task_id: str, *candidates: list[str], **more: Any) -> dict[str, Any]:
    tools = [found[0].partition("/")[2] if found else "gone" for found in candidates]
    return {"task_id": task_id, "query": f"do {task_id}", "steps": [], "tools": tools,
            "tool_skill_ids": list(candidates), **more}  # fmt: skip


def livemcp(write: Write, tasks: list[Any]) -> Path:
    write("tools.jsonl", jsonl(mcp_tool("disk/write"), mcp_tool("cloud/write"), mcp_tool("web/fetch", parameters=[])))
    return write("tasks.jsonl", jsonl(*tasks))


def test_livemcpbench_any_candidate_meets_a_need(write: Write):
    both = mcp_task("t1", ["disk/write", "cloud/write"], ["web/fetch"], [])
    benchmark = load_benchmark(livemcp(write, [both, mcp_task("t2", ["web/fetch"]), mcp_task("t3", [])]))
    assert ids(benchmark) == ["t1", "t2"]
    assert [task.labels["kind"] for task in benchmark.tasks] == ["multi", "single"]
    relevance = benchmark.tasks[0].relevance
    assert relevance == Relevance(
        frozenset({"disk/write", "web/fetch"}), {"disk/write": 1.0, "web/fetch": 1.0}, {"cloud/write": "disk/write"}
    )
    assert benchmark.pool[0] == Skill(
        "disk/write", "write", "does write (disk: all about disk)", "Parameters: path", "Office", source="livemcpbench"
    )
    assert benchmark.pool[2].body == "Takes no parameters."
    assert benchmark.gold_skills == benchmark.pool  # alternatives come along
    assert benchmark.notes == (
        "2 of 5 needed tools (2 tasks) have no candidate and are no gold",
        "1 of 3 tasks have no gold and are not scored: t3",
    )
    rankings = {"t1": ["cloud/write", "web/fetch"], "t2": ["disk/write", "web/fetch"]}
    values = per_query(rankings, {t.query.query_id: t.relevance for t in benchmark.tasks}, parse_measures(["FC@2"]))
    assert values == {"t1": {"FC@2": 1.0}, "t2": {"FC@2": 1.0}}


def test_a_pool_with_one_of_the_candidates_is_enough(write: Write):
    benchmark = load_benchmark(livemcp(write, [mcp_task("t1", ["disk/write", "cloud/write"])]))
    checked = check_pool(benchmark, ["cloud/write"])
    values = per_query({"t1": ["cloud/write"]}, {"t1": checked.tasks[0].relevance}, parse_measures(["nDCG@1", "Hit@1"]))
    assert values == {"t1": {"nDCG@1": 1.0, "Hit@1": 1.0}}
    with pytest.raises(SkilltrainError, match="gold skill 'disk/write' of query 't1' is not among the 1 skills"):
        check_pool(benchmark, ["web/fetch"])


def clone(write: Write, tools: str) -> Path:
    """The two files of a clone of the published repository that are read."""
    offered = {"name": "write", "description": "writes", "inputSchema": {"properties": {"path": {}, "data": {}}}}
    servers = [
        {"name": "Disk", "description": "files", "category": "File", "tools": {"disk": {"tools": [offered]}}},
        {"name": "Cloud", "tools": {"cloud": {"tools": [offered, {"name": "fetch", "description": None}]}}},
    ]
    write("tools/LiveMCPTool/tools.json", json.dumps(servers))
    task = {"task_id": "t1", "Question": "save it", "answers": "", "Annotator Metadata": {"Tools": tools}}
    return write("annotated_data/all_annotations.json", json.dumps([task]))


def test_livemcpbench_as_published_finds_tools_by_name(write: Write):
    benchmark = load_benchmark(clone(write, "1. write\n2. fetch \n3. lost"))
    assert benchmark.tasks[0].relevance == Relevance(
        frozenset({"disk/write", "cloud/fetch"}), {"disk/write": 1.0, "cloud/fetch": 1.0}, {"cloud/write": "disk/write"}
    )
    assert benchmark.pool[0] == Skill(
        "disk/write", "write", "writes (Disk: files)", "Parameters: data, path", "File", source="livemcpbench"
    )
    assert benchmark.pool[2] == Skill("cloud/fetch", "fetch", "(Cloud)", "Takes no parameters.", source="livemcpbench")
    assert benchmark.notes == ("1 of 3 needed tools (1 tasks) have no candidate and are no gold",)
    with pytest.raises(SkilltrainError, match=r"entry 1: .*expected a numbered list of tools, found 'write'"):
        load_benchmark(clone(write, "write"))


# Faults


@pytest.mark.parametrize(
    ("form", "given", "message"),
    [
        (beir, "q9\td1\t1\n", r"test\.tsv, line 2: query 'q9' is not among the queries"),
        (beir, "q1\td1\t1\nq1\td9\t1\n", r"test\.tsv, line 3: skill 'd9' of query 'q1' is not among the"),
        (beir, "q1\td1\tgood\n", r"test\.tsv, line 2: score: "),
        (beir, "q1\td1\tnan\n", r"test\.tsv: query 'q1': the gain of skill 'd1' is nan"),
        (beir, "q1\td1\t1\nq1\td1\t1\n", r"test\.tsv, line 3: query 'q1' and skill 'd1' appear together twice"),
        (beir, "q1\td1\t1\nq2\td", r"test\.tsv, line 3: score: "),
        (beir, "q1\td1\t1\nq2\td2\t0\n", r"test\.tsv: query 'q2': no skill is gold"),
        (beir, "", r"bench: holds no query to score"),
        (beir_queries, '{"_id": "q2", "te', r"queries\.jsonl, line 1: is not JSON Lines"),
        (beir_queries, jsonl({"_id": 7, "text": "a"}), r"queries\.jsonl, line 1: _id: "),
        (r3_skill, jsonl({"query": "a", "skill_ids": []}), r"test\.jsonl, line 1: query 'test-1': no skill is gold"),
        (r3_skill, jsonl({"query": "a", "skill_ids": ["skill-9"]}), r"line 1: skill 'skill-9' is not in skills_"),
        (groups, [group("g1", [])], r"judgements\.jsonl, line 1: query 'g1': no skill is gold"),
        (groups, [group("g1", ["a"]), group("g1", ["b"])], r"judgements\.jsonl, line 2: group 'g1' appears twice"),
        (groups, [group("g1", ["a", "x"])], "line 1: skill 'x' of group 'g1' is judged twice"),
        (groups, [group("g1", ["a"], rejected=["x"])], r"line 1: rejected\.0: "),
        (livemcp, [mcp_task("t", ["a/b"])], r"tasks\.jsonl, line 1: skill 'a/b' of task 't' is not among"),
        (livemcp, [mcp_task("t", ["web/fetch"])] * 2, r"tasks\.jsonl, line 2: task 't' appears twice"),
        (livemcp, [mcp_task("t", ["web/fetch"], tools=[])], "line 1: task 't' has 0 tools and 1 lists of candidates"),
        (
            livemcp,
            [mcp_task("t", ["disk/write", "web/fetch"], ["disk/write"])],
            "'disk/write' of task 't' is a candidate for",
        ),
    ],
)
def test_faults_are_named(write: Write, form: Callable[[Write, Any], Path], given: Any, message: str):
    """By file, line and id; all forms read their rows by the same functions."""
    with pytest.raises(SkilltrainError, match=message):
        load_benchmark(form(write, given))


# SkillRouter's tiers


@pytest.fixture
def tiers(write: Write) -> Path:
    """Two tasks over two pools; easy lacks the degraded copy, and task u is judged generic_only."""
    entry = {"gt_skill_ids": ["gt/a"], "core_gt_ids": ["gt/a"], "relevance": {"gt/a": 3, "deg/a": 1}, "task_type": "c"}
    write("data/relevance.json", json.dumps({"t": entry, "u": entry | {"task_type": "generic_only"}}))
    texts = [{"task_id": i, "instruction_text": "do", "difficulty": "medium"} for i in "tu"]
    folder = write("data/tasks.jsonl", jsonl(*texts)) / "data"
    skills = [{"skill_id": i, "name": i, "description": "d", "body": i} for i in ("gt/a", "other", "deg/a")]
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
        gains[tier] = check_pool(benchmark, [skill.skill_id for skill in benchmark.pool]).tasks[0].relevance.gains
    assert gains == {"easy": {"gt/a": 3.0}, "hard": {"gt/a": 3.0, "deg/a": 1.0}}
    assert load_benchmark([tiers / "easy"]) == load_benchmark(tiers / "easy")
    (tiers / "none").mkdir()
    with pytest.raises(SkilltrainError, match=r"none: holds no \.jsonl or \.jsonl\.gz file with"):
        load_benchmark(tiers / "none")


def test_tiers_are_ranked_apart_and_scored_together(tiers: Path):
    """Hit@1 of a system that errs in hard alone is a half, over two queries that are one task."""
    benchmark = load_benchmark([tiers / "easy", tiers / "hard"])
    assert (benchmark.name, benchmark.pool, benchmark.unscored) == ("easy + hard", (), {"u@easy", "u@hard"})
    assert [(ids(tier), len(tier.pool)) for tier in benchmark.tiers] == [(["t@easy"], 2), (["t@hard"], 3)]
    assert benchmark.clusters == {"t@easy": "t", "t@hard": "t"}
    checked = joined([check_pool(tier, [skill.skill_id for skill in tier.pool]) for tier in benchmark.tiers])
    assert [len(task.relevance.gains) for task in checked.tasks] == [1, 2]
    relevances = {task.query.query_id: task.relevance for task in checked.tasks}
    values = per_query({"t@easy": ["gt/a"], "t@hard": ["deg/a", "gt/a"]}, relevances, parse_measures(["Hit@1"]))
    results, labels = [SystemResult("one", values, {})], labels_of(checked.tasks, {})
    found = means_by_slice(results, labels, ["Hit@1"], seed=0, clusters=checked.clusters)
    means = {part.value: part.means["one"]["Hit@1"] for part in found if part.label in ("all", "tier")}
    assert means == {"all": Interval(0.5, 0.5, 0.5, 2), "easy": Interval(1, 1, 1, 1), "hard": Interval(0, 0, 0, 1)}
    with pytest.raises(SkilltrainError, match="two tiers are named 'easy'"):
        load_benchmark([tiers / "easy", tiers / "easy"])


# Labels


def test_labels_are_what_the_files_say_of_a_query(write: Write, tmp_path: Path):
    every = {"kind": "single", "origin": "r3", "split": "test"}
    one, two = load_benchmark(r3_skill(write)).tasks
    assert (one.labels, two.labels["direction"]) == (every, "zh2en")
    rows = group("g", ["a"], rejected=[{"skill_id": s, "reason": r} for s, r in (("b", "low_quality"), ("c", 7.5))])
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "judgements.jsonl").write_text(jsonl(rows))
    assert load_benchmark(tmp_path / "groups").tasks[0].labels == every | {"reason": ("low_quality",)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (group("g", ["a"], rejected=[], irrelevant=[]), "group 'g' holds 1 skill"),
        (
            group("g", ["a"], rejected=[{"skill_id": "b", "reason": "too blue"}]),
            "'too blue' is no reason; choose from functional_",
        ),
        (group("g", ["a"], rejected=[{"skill_id": "a", "reason": None}]), "skill 'a' of group 'g' is judged twice"),
    ],
)
def test_groups_that_judge_nothing_or_twice_are_refused(tmp_path: Path, row: Any, message: str):
    (tmp_path / "judgements.jsonl").write_text(jsonl(row))
    with pytest.raises(SkilltrainError, match=message) as error:
        load_benchmark(tmp_path)
    assert "judgements.jsonl, line 1" in str(error.value) and "\n" not in str(error.value)


def test_labels_of_beir_never_replace_our_own(write: Write):
    folder = beir(write)
    row = {"_id": "q1", "text": "first", "metadata": {"kind": "odd", "style": "terse", "votes": 3}}
    write("queries.jsonl", jsonl(row, {"_id": "q2", "text": "b", "metadata": None}, {"_id": "q3", "text": "c"}))
    labels = [task.labels for task in load_benchmark(folder).tasks]
    assert labels[0] == {"kind": "multi", "style": "terse", "origin": "bench", "split": "test"}
    assert labels[1] == {"kind": "single", "origin": "bench", "split": "test"}


# Odd files


@pytest.mark.parametrize("name", ["tasks.jsonl", "relevance.json", "gold_skills.jsonl", "queries.parquet"])
def test_pipes_and_devices_in_place_of_files_are_refused(tiers: Path, tmp_path: Path, name: str):
    folder = tmp_path if name.endswith("parquet") else tiers
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(SkilltrainError, match=rf"{name}: is not a regular file"):
        load_benchmark(folder)
