"""The stage evaluate with its analyses on, and what it refuses before hours of ranking rather than after."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl, write_ours, write_pool
from llm_server import LLMServer, llm_server
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, task_of
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill
from skilltrain.routing.analyse import AnalysisConfig, analyse_inputs
from skilltrain.routing.evaluate import EvaluateConfig, run_evaluate
from skilltrain.tables import RANKINGS, read_table

TOPICS = ["deploy", "pods", "kubernetes", "chart", "table", "pdf", "text", "audio", "video", "clip"]
POOL = [
    Skill(f"s{i}", f"{word} skill", "how to " * (i + 1), f"# Find\n\n- the {word} in files\n- the report\n")
    for i, word in enumerate(TOPICS)
]
NUM_QUERIES = 8
NOWHERE = {"kind": "dense", "source": "./nothing"}
BM25 = {"name": "bm25", "rankers": [{"kind": "lexical"}]}


@pytest.fixture
def folder(tmp_path):
    """bench (query i wants skill i), pool and out."""
    queries = [(f"q{i}", f"the {TOPICS[i]} report", "test") for i in range(NUM_QUERIES)]
    write_ours(tmp_path / "bench", queries, {f"q{i}": {f"s{i}": "required"} for i in range(NUM_QUERIES)})
    write_pool(tmp_path / "pool", POOL)
    (tmp_path / "out").mkdir()
    return tmp_path


def evaluate(folder: Path, **settings: Any) -> dict[str, Any]:
    values = {
        "stage": "evaluate", "benchmark": str(folder / "bench"), "pool": str(folder / "pool"),
        "out": str(folder / "out"), **settings,
    }  # fmt: skip
    return run_evaluate(validate(EvaluateConfig, values, "test"), folder / "out")


def reranked(source: object, name: str = "reranked", **changed: Any) -> dict[str, Any]:
    reranker = {"kind": "rerank", "source": str(source), "precision": "float32", "keep": 3}
    return {"name": name, "rankers": [{"kind": "lexical"}, reranker | changed]}


def counting(server: LLMServer) -> dict[str, Any]:
    """A first stage that cannot rank unnoticed: every text that it encodes is asked of `server`."""
    source = {"kind": "api", "model": "scripted", "base_url": server.base_url, "cache": None, "max_retries": 0}
    return {"name": "counting", "rankers": [source]}


def predict(folder: Path, name: str, values: object) -> str:
    (folder / f"{name}.json").write_text(json.dumps(values))
    return str(folder / f"{name}.json")


# All analyses, in all forms of the report -----------------------------------------------------------------------------


@pytest.fixture
def analysed(folder, model_folders):
    """The folder of a report with every analysis on; the two rerankers of one source are one model."""
    systems = [BM25, reranked(model_folders["bert_reranker"]), reranked(model_folders["bert_reranker"], "again")]
    analysis = {"num_timed": 3, "num_attention": 4, "truncation": True, "structure": True}
    evaluate(folder, systems=systems, analysis=analysis, depth=5)
    return folder / "out"


def test_every_analysis_stands_in_json_markdown_and_on_the_page(analysed, model_folders):
    saved = json.loads((analysed / "metrics.json").read_text())
    found = saved["analysis"]
    assert [(row["system"], row["stage"], row["num"]) for row in found["latencies"]] == [
        ("bm25", "1 lexical", 3), ("bm25", "total", 3),
        ("reranked", "1 lexical", 3), ("reranked", "2 rerank", 3), ("reranked", "total", 3),
        ("again", "1 lexical", 3), ("again", "2 rerank", 3), ("again", "total", 3),
    ]  # fmt: skip
    assert [(row["system"], row["stage"], row["num_passed"]) for row in found["stages"]] == [
        ("reranked", "1 lexical", 3), ("reranked", "2 rerank", 10),
        ("again", "1 lexical", 3), ("again", "2 rerank", 10),
    ]  # fmt: skip
    recalls = [row["means"]["Recall@10"]["mean"] for row in found["stages"]]
    assert recalls == [1.0] * 4, "the word of each query stands in its skill alone"
    (truncated,) = found["truncation"]
    assert (truncated["model"], truncated["num_skills"]) == (str(model_folders["bert_reranker"]), 10)
    (attention,) = found["attention"]
    assert (attention["model"], len(attention["pairs"])) == (str(model_folders["bert_reranker"]), 4)
    assert len(attention["layers"]) == 2
    assert all(sum(layer.values()) == pytest.approx(1) for layer in [*attention["layers"], attention["tokens"]])
    assert {(row["num_gold"], row["num_others"]) for row in found["structure"]} == {(8, 2)}
    pairs = [(row["baseline"], row["system"]) for row in found["outcomes"]]
    assert pairs == [("bm25", "reranked"), ("reranked", "again")]
    again = found["outcomes"][1]
    assert again["fixed"] == again["broken"] == [], "one reranker scores alike under two names"
    # Descriptions grow with the skill's number: two queries in each quartile.
    parts = [part for part in saved["slices"] if part["label"] == "description length"]
    lengths = [len(POOL[i].description.split()) for i in range(NUM_QUERIES)]
    bounds = [(lengths[i], lengths[i + 1]) for i in (0, 2, 4, 6)]
    assert [part["value"] for part in parts] == [f"Q{n}, {a}–{b} words" for n, (a, b) in enumerate(bounds, 1)]
    assert [part["num_queries"] for part in parts] == [2, 2, 2, 2]
    assert [(gap["system"], gap["baseline"], gap["value"][:2]) for gap in saved["gaps"]] == [
        (after, before, f"Q{n}")
        for before, after in (("bm25", "reranked"), ("reranked", "again"))
        for n in (1, 2, 3, 4)
    ]
    assert {gap["difference"]["mean"] for gap in saved["gaps"][4:]} == {0}
    assert [pair["query_id"] for pair in attention["pairs"]] == ["q0", "q1", "q2", "q3"]
    assert found["pass_rates"] == [], "the agents' pass rates are known for SkillsBench's tasks alone"
    markdown = (analysed / "report.md").read_text()
    for title in ("Fixed and broken", "Stage by stage", "Skills that a model sees whole", "Latency"):
        assert f"## {title}\n" in markdown
    assert (
        "## Description length: Q1" in markdown
        and "(n = 4 pairs)" in markdown
        and "## Structure of gold skills (n = 8) and others (n = 2)" in markdown
    )
    page = (analysed / "report.html").read_text()
    assert "<dt>Pool</dt><dd>pool, 10 skills</dd>" in page and "with skilltrain 0" in page
    for part in ("flows", "stages", "truncation", "speed", "slices", "attention", "structure"):
        assert f'<section id="{part}">' in page


def test_nothing_more_is_analysed_than_was_asked_for(folder):
    evaluate(folder, systems=[BM25], measures=["Recall@3"])
    found = json.loads((folder / "out" / "metrics.json").read_text())["analysis"]
    assert {name for name, rows in found.items() if rows} == set(), "without Hit@1 there is no right and wrong"


def test_an_alternative_stands_in_for_a_gold_skill_that_the_pool_lacks():
    """The gold skill `gone` is met by s9, so its description and body are what is looked at."""
    relevance = Relevance(frozenset({"gone", "s0"}), {"gone": 1.0, "s0": 1.0}, {"s9": "gone", "absent": "gone"})
    task = task_of(Query("q", "text", "", "t", "test"), relevance, {})
    benchmark, skills = Benchmark("b", (task,), ()), {skill.skill_id: skill for skill in POOL}
    inputs = analyse_inputs(AnalysisConfig(structure=True), [], benchmark, skills)
    assert {(row["num_gold"], row["num_others"]) for row in inputs["structure"]} == {(2, 8)}


def test_queries_that_no_skill_serves_are_told_from_the_others_by_the_best_score(folder):
    rows = [{"query": "bake bread at dawn"}, {"query": f"the {TOPICS[0]} report"}]  # the second is served, in truth
    (folder / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(folder, systems=[BM25], analysis={"unserved": str(folder / "none.jsonl")})
    told = json.loads((folder / "out" / "metrics.json").read_text())["analysis"]["unserved"]["bm25"]
    # All eight find more than the first, and the second finds what one of the eight finds: (8 + .5 ± 7 ties or less).
    assert 0.5 < told["mean"] <= 1 and told["low"] <= told["mean"] <= told["high"] and told["n"] == 10
    assert "(n = 8 and 2)" in (folder / "out" / "report.md").read_text()
    ranked = read_table(folder / "out", RANKINGS).column("query_id").to_pylist()
    assert set(ranked) == {f"q{i}" for i in range(NUM_QUERIES)}
    (folder / "none.jsonl").write_text("{}\n")
    with pytest.raises(SkilltrainError, match=r"line 1: has no text under the key 'query'"):
        evaluate(folder, systems=[BM25], analysis={"unserved": str(folder / "none.jsonl")})


# Refused before any query is ranked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"predictions": "bad"}, "1 of 1 predicted skills are not in the pool, first 'nowhere'"),
        ({"predictions": "counting"}, "another system is called 'counting' as well"),
        ({"analysis": {"num_attention": 1}}, "analysis.num_attention: is measured in rerankers, and no system has one"),
        ({"systems": [reranked("no/such/model")]}, "no/such/model"),
        (
            {"systems": [{"name": "e", "rankers": [NOWHERE]}]},
            "./nothing: no such model",
        ),
        ({"measures": ["Hit@1", "MRR@tenn"]}, "MRR@tenn"),
    ],
)
def test_faults_are_found_before_ranking(folder, settings, message):
    (folder / "no").mkdir()
    values = {"bad": {"q0": ["nowhere"]}, "counting": {"q0": ["s0"]}}
    if name := settings.get("predictions"):
        settings = settings | {"predictions": predict(folder, name, values[name])}
    with llm_server() as server:
        systems = [counting(server), *settings.pop("systems", [])] if "systems" in settings else [counting(server)]
        if message.startswith("no/such"):
            systems[1]["rankers"][1]["source"] = str(folder / "no")
            message = "is no model folder"
        with pytest.raises(SkilltrainError, match=message):
            evaluate(folder, **(settings | {"systems": systems}))
        assert server.requests == []


def test_an_analysis_without_what_it_needs_is_refused(folder):
    mine = predict(folder, "mine", {"q0": ["s0"]})
    with pytest.raises(SkilltrainError, match=r"analysis.structure: needs the skills' texts \(give pool=…\)"):
        evaluate(folder, pool=None, predictions=mine, analysis={"structure": True})
    with pytest.raises(SkilltrainError, match=r"analysis\.num_timed: there are no systems to time"):
        evaluate(folder, predictions=mine, analysis={"num_timed": 3})


# Whose pool, and whose rankings ---------------------------------------------------------------------------------------


def test_several_predictions_files_in_one_report_without_models(folder):
    good = predict(folder, "good", {f"q{i}": [f"s{i}"] for i in range(NUM_QUERIES)})
    poor = predict(folder, "poor", {f"q{i}": ["s9", f"s{i}"] for i in range(NUM_QUERIES)})
    summary = evaluate(folder, pool=None, predictions=[poor, good], measures=["Hit@1", "MRR@10"])
    assert summary["systems"] == {"poor": {"Hit@1": 0, "MRR@10": 0.5}, "good": {"Hit@1": 1, "MRR@10": 1}}
    found = json.loads((folder / "out" / "metrics.json").read_text())
    assert [(row["system"], row["baseline"]) for row in found["differences"]] == [("good", "poor")] * 2
    (fixed,) = found["analysis"]["outcomes"]
    assert len(fixed["fixed"]) == NUM_QUERIES
    assert not (folder / "out" / "rankings.parquet").exists(), "nothing was ranked"
    with pytest.raises(SkilltrainError, match=r"good\.json: another system is called 'good' as well"):
        evaluate(folder, predictions=[good, good])


def test_a_benchmark_with_a_pool_of_its_own_needs_no_other(tmp_path):
    """BEIR: the corpus is the pool; predictions are held to it as well."""
    bench = tmp_path / "bench"
    (bench / "qrels").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    corpus = [{"_id": skill.skill_id, "title": skill.name, "text": skill.body} for skill in POOL]
    (bench / "corpus.jsonl").write_text(jsonl(*corpus))
    (bench / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "the chart report"}) + "\n")
    (bench / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\ts3\t1\n")
    summary = evaluate(tmp_path, pool=None, systems=[BM25], measures=["Hit@1"], analysis={"structure": True})
    assert summary["num_queries"] == 1 and summary["systems"] == {"bm25": {"Hit@1": 1.0}}
    with pytest.raises(SkilltrainError, match="1 of 1 predicted skills are not in the pool, first 'elsewhere'"):
        evaluate(tmp_path, pool=None, predictions=predict(tmp_path, "mine", {"q1": ["elsewhere"]}))
