"""The stage evaluate: systems, predictions, analyses, dry runs and refused settings."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import jsonl, skillrouter, write, write_ours, write_pool
from faults import raises
from llm_server import LLMServer, Reply, chat, embeddings, llm_server
from skilltrain.config import validate
from skilltrain.evaluation.analyse import AnalysisConfig, Inputs, run_input_analyses
from skilltrain.evaluation.candidates import Candidates
from skilltrain.evaluation.evaluate import Evaluate
from skilltrain.llm.answers import estimate_tokens
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill
from skilltrain.runs import dry_run, run_stage
from skilltrain.tables import CLUSTERS, RANKINGS, read_table, write_table

SKILLS_OF_POOL = [
    Skill(f"s{i}", f"name {i}", f"about {word}", f"the body says {word}")
    for i, word in enumerate(["apples", "bridges", "candles", "drums"])
]
STRUCTURE = {"kind": "structure"}
PASS_RATES = {"kind": "pass_rates"}
BM25 = {"name": "bm25", "rankers": [{"kind": "lexical"}]}


@pytest.fixture
def folder(tmp_path):
    """A folder with a pool of four skills and a benchmark.

    q1 has the gold skill s0, q2 has s1 and s2 and the useful s3, q3 (dev) has s3.
    """
    queries = [
        ("q1", "says apples", "test"),
        ("q2", "says bridges and candles", "test"),
        ("q3", "says drums", "dev"),
    ]
    verdicts = {
        "q1": {"s0": "required"},
        "q2": {"s1": "required", "s2": "required", "s3": "useful"},
        "q3": {"s3": "required"},
    }
    write_ours(tmp_path / "bench", queries, verdicts)
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    (tmp_path / "out").mkdir()
    return tmp_path


def predict(folder: Path, predictions: object, name: str = "mine") -> str:
    """Write a file of predictions and return its path."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(predictions))
    return str(file)


def config_of(folder: Path, **settings: Any) -> Evaluate:
    values = {"stage": "evaluate", "benchmark": folder / "bench", "out": folder / "out", **settings}
    return validate(Evaluate, values, "test")


def evaluate(folder: Path, **settings: Any) -> dict[str, Any]:
    return config_of(folder, **settings).run(folder / "out")


def saved_metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "metrics.json").read_text())


def means(folder: Path, section: str = "metrics") -> dict[str, dict[str, float]]:
    """Return the saved mean of each measure, by system."""
    means_by_system = {}
    for system in saved_metrics(folder)["systems"]:
        if section in system:
            values = system[section].items()
            means_by_system[system["name"]] = {measure: value["mean"] for measure, value in values}
    return means_by_system


def ranking_rows(folder: Path) -> list[dict[str, Any]]:
    return read_table(folder / "out", RANKINGS).to_pylist()


@pytest.fixture
def two_systems(folder):
    """The folder after an evaluation of two systems and a file of predictions."""
    nd = {"name": "nd", "rankers": [{"kind": "lexical", "fields": "nd"}]}
    evaluate(
        folder,
        pool=folder / "pool",
        systems=[BM25, nd],
        predictions=predict(folder, {"q1": ["s1"]}),
        measures=["Hit@1"],
        depth=2,
    )
    return folder


def test_metrics_include_predictions(two_systems):
    assert means(two_systems) == {"bm25": {"Hit@1": 1}, "nd": {"Hit@1": 1}, "mine": {"Hit@1": 0}}


def test_rankings_of_systems_are_saved(two_systems):
    rows = ranking_rows(two_systems)

    assert {row["stage"] for row in rows} == {"bm25", "nd"}
    for stage in ("bm25", "nd"):
        assert {row["query_id"] for row in rows if row["stage"] == stage} == {"q1", "q2", "q3"}
    assert {row["rank"] for row in rows} == {1, 2}


def test_scores_of_each_query_are_saved(two_systems):
    lines = (two_systems / "out" / "per_query.jsonl").read_text().splitlines()

    rows = [json.loads(line) for line in lines[-3:]]

    assert [(row["system"], row["query_id"], row["Hit@1"]) for row in rows] == [
        ("mine", "q1", 0.0),
        ("mine", "q2", 0.0),
        ("mine", "q3", 0.0),
    ]


NAMES = {"name": "names", "rankers": [{"kind": "lexical", "fields": "nd"}]}
NEVER = {"name": "missing", "rankers": [{"kind": "dense", "source": "no/such-model"}]}


def test_only_named_systems_run(folder):
    settings = {"pool": folder / "pool", "systems": [BM25, NEVER, NAMES]}

    evaluate(folder, **settings, only=["names", "bm25"], measures=["Hit@1"])

    metrics = saved_metrics(folder)
    assert list(means(folder)) == ["bm25", "names"]
    assert metrics["notes"] == [
        "2 of 3 systems ran (only). P-values are corrected as if all had run."
    ]


def test_only_needs_inputs_of_its_rows(folder):
    saved = {"name": "saved", "rankers": [{"kind": "saved", "rankings": folder / "missing"}]}
    (folder / "out").rmdir()
    settings = {"pool": folder / "pool", "systems": [BM25, saved], "measures": ["Hit@1"]}

    run_stage(config_of(folder, **settings, only=["bm25"]), resume=False)

    assert list(means(folder)) == ["bm25"]
    with raises("not-found"):
        run_stage(config_of(folder, **settings, only=["saved"]), resume=False)


def test_only_keeps_comparison_family(folder):
    wrong = {f"q{number}": ["s3", "s2"] for number in (1, 2, 3)}
    settings = {
        "pool": folder / "pool",
        "systems": [BM25, NEVER, NAMES],
        "predictions": predict(folder, wrong),
    }

    evaluate(folder, **settings, only=["bm25"], measures=["Hit@1"])

    # The table compares (bm25, missing), (bm25, names), (bm25, mine), (missing, names) and
    # (names, mine). BM25 wins 2 queries of 3, so p is .5, and 5 times this is 1.
    (row,) = saved_metrics(folder)["differences"]
    assert (row["baseline"], row["system"]) == ("bm25", "mine")
    assert (row["p"], row["p_holm"]) == (0.5, 1.0)


def test_unknown_row_is_refused(folder):
    with raises("invalid-setting") as caught:
        config_of(folder, systems=[BM25], only=["bm26"])

    assert "only: no system is called 'bm26', but bm25" in str(caught.value)


def test_bootstrap_seed_changes_intervals_only(folder):
    rows = []
    for seed in (0, 42):
        predictions = predict(folder, {"q1": ["s0"], "q2": ["s3", "s0", "s1"], "q3": ["s1", "s3"]})
        evaluate(folder, predictions=predictions, measures=["MRR@10"], bootstrap_seed=seed)
        metrics = saved_metrics(folder)
        assert metrics["seed"] == seed
        rows.append(metrics["systems"][0]["metrics"]["MRR@10"])

    assert rows[0]["mean"] == rows[1]["mean"]


def test_saved_rankings_are_a_ranker(folder):
    settings = {
        "pool": folder / "pool",
        "measures": ["MRR@10"],
        "predictions": predict(folder, {"q1": ["s1"]}),
    }
    evaluate(folder, systems=[BM25], **settings)
    rankings = (folder / "out").rename(folder / "first")
    (folder / "out").mkdir()
    saved = {"kind": "saved", "rankings": rankings, "stage": "bm25"}
    fused = {"kind": "fuse", "of": [saved, {"kind": "lexical"}]}
    systems = [BM25, {"name": "saved", "rankers": [saved]}, {"name": "fused", "rankers": [fused]}]

    evaluate(folder, systems=systems, **settings)

    mrr = {name: values["MRR@10"] for name, values in means(folder).items()}
    assert mrr == {"bm25": 1, "saved": 1, "fused": 1, "mine": 0}


@pytest.fixture
def with_clusters(folder):
    """The folder after an evaluation that knows copies of skills.

    s3 is a copy of s0, the gold skill of q1. For q2 it is a judged skill. For q3 it is the gold
    skill, so s0 is its copy.
    """
    clusters = [{"skill_id": f"s{number}", "cluster": number % 3} for number in range(4)]
    write_table(clusters, CLUSTERS, folder / "clusters")
    first = {"q1": ["s3", "s0"], "q2": ["s3"], "q3": ["s0", "s3"]}
    better = {"q1": ["s0"], "q2": ["s1"], "q3": ["s3"]}
    evaluate(
        folder,
        clusters=folder / "clusters",
        pool=folder / "pool",
        predictions=[predict(folder, first, "first"), predict(folder, better, "better")],
        measures=["Hit@1", "FC@2"],
    )
    return folder


def test_copies_have_measures_of_their_own(with_clusters):
    expected = {"Hit@1": 0, "Hit@1 (copies)": 2 / 3, "FC@2": 2 / 3, "FC@2 (copies)": 2 / 3}

    assert means(with_clusters)["first"] == pytest.approx(expected)
    assert means(with_clusters, "multi")["first"] == dict.fromkeys(expected, 0)


def test_copies_count_in_differences(with_clusters):
    rows = saved_metrics(with_clusters)["differences"]

    differences = {row["measure"]: row["difference"]["mean"] for row in rows}
    expected = {"Hit@1": 1, "Hit@1 (copies)": 1 / 3, "FC@2": 0, "FC@2 (copies)": 0}
    assert differences == pytest.approx(expected)


def test_report_explains_copies(with_clusters):
    page = (with_clusters / "out" / "report.html").read_text()
    markdown = (with_clusters / "out" / "report.md").read_text()

    assert saved_metrics(with_clusters)["notes"] == [
        "(copies): near-duplicates of a gold skill count as gold too; 2 of 3 queries have any."
    ]
    assert "Hit@1 (copies)" in page
    assert "Hit@1 (copies)" in markdown
    assert page.count("copy of a gold skill") == 2


@pytest.fixture
def shallow(folder):
    """The folder after an evaluation whose depth is less than a cutoff."""
    measures = ["Recall@1", "Recall@3"]
    evaluate(folder, pool=folder / "pool", systems=[BM25], measures=measures, depth=1)
    return folder


def test_rankings_reach_largest_cutoff(shallow):
    assert max(row["rank"] for row in ranking_rows(shallow)) == 3
    assert means(shallow)["bm25"] == {"Recall@1": pytest.approx((1 + 0.5 + 1) / 3), "Recall@3": 1}


def test_nothing_is_analysed_without_hit_1(shallow):
    assert not any(saved_metrics(shallow)["analysis"].values())


def test_report_names_useless_chat_model(folder):
    with llm_server() as server:
        server.otherwise = lambda request: Reply("I cannot say")
        llm = {
            "kind": "openai",
            "model": "m",
            "base_url": server.base_url,
            "cache": folder / "cache",
        }
        select = {"kind": "select", "llm": llm, "max_retries": 0}
        system = {"name": "selected", "rankers": [{"kind": "lexical"}, select]}

        evaluate(folder, pool=folder / "pool", systems=[BM25, system], measures=["Hit@1"])

    (note,) = saved_metrics(folder)["notes"]
    message = "selected: the chat model gave no usable answer to 3 of 3 questions"
    assert note.startswith(f"{message} (no_number 3)")
    assert message in (folder / "out" / "report.html").read_text()


def test_gold_skills_of_benchmark_join_pool(tmp_path):
    """SkillRouter's form; a gold skill that the pool has under the same id stays the pool's."""
    relevance = {"gt_skill_ids": ["new"], "relevance": {"new": 3, "s0": 0}, "task_type": "single"}
    gold = [
        {"skill_id": "new", "name": "new", "description": "", "body": "about a zebra"},
        {"skill_id": "s0", "name": "s0", "description": "", "body": "zebra zebra zebra zebra"},
    ]
    write(tmp_path / "bench", skillrouter([("t1", "says zebra")], {"t1": relevance}, gold))
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    (tmp_path / "out").mkdir()

    evaluate(tmp_path, pool=tmp_path / "pool", systems=[BM25], measures=["Hit@1"])

    assert means(tmp_path)["bm25"] == {"Hit@1": 1}
    assert len(ranking_rows(tmp_path)) == 5


@pytest.fixture
def tiers(folder):
    """A benchmark of two tiers, as a map of settings.

    The pool of hard has one more skill, which says `apples` more often than the gold skill. So
    Hit@1 is 1 over easy and 0 over hard.
    """
    entry = {"gt_skill_ids": ["s0"], "relevance": {"s0": 3}, "task_type": "clean"}
    write(folder, skillrouter([("t", "apples")], {"t": entry}))
    distractor = Skill("copy", "apples", "apples", "apples")
    for tier, skills in {"easy": SKILLS_OF_POOL, "hard": [*SKILLS_OF_POOL, distractor]}.items():
        rows = [
            {"skill_id": s.skill_id, "name": s.name, "description": s.description, "body": s.body}
            for s in skills
        ]
        write(folder / tier, {"part.jsonl": rows})
    return {"benchmark": [folder / "easy", folder / "hard"], "systems": [BM25]}


@pytest.fixture
def tier_metrics(folder, tiers):
    predictions = predict(folder, {"t@easy": ["s0"], "t@hard": ["s0"]})
    summary = evaluate(folder, **tiers, predictions=predictions, measures=["Hit@1"])
    assert summary["num_queries"] == 2
    assert summary["systems"] == {"bm25": {"Hit@1": 0.5}, "mine": {"Hit@1": 1.0}}
    return saved_metrics(folder)


def test_tiers_are_ranked_over_own_pools(folder, tier_metrics):
    best = {row["query_id"]: row["skill_id"] for row in ranking_rows(folder) if row["rank"] == 1}

    assert best == {"t@easy": "s0", "t@hard": "copy"}


def test_tiers_have_means_of_their_own(tier_metrics):
    means_by_tier = {
        row["value"]: row["systems"]["bm25"]["Hit@1"]["mean"]
        for row in tier_metrics["slices"]
        if row["label"] == "tier"
    }

    assert tier_metrics["benchmark"] == "easy + hard"
    assert means_by_tier == {"easy": 1.0, "hard": 0.0}


def test_bootstrap_samples_tasks_of_tiers_together(tier_metrics):
    hit = tier_metrics["systems"][0]["metrics"]["Hit@1"]

    # There is one task, so each sample is the same.
    assert (hit["low"], hit["high"], hit["n"]) == (0.5, 0.5, 2)


def test_pass_rates_of_skillsbench_are_analysed(tier_metrics):
    rows = tier_metrics["analysis"]["pass_rates"]

    assert {row["system"] for row in rows} == {"bm25", "mine"}


def test_tiers_beside_plain_benchmark_need_pool(folder, tiers):
    with raises("missing-pool"):
        evaluate(folder, benchmark=[folder, *tiers["benchmark"]], systems=[BM25])


@pytest.fixture
def beir(tmp_path):
    """A folder with a benchmark in BEIR's form, whose corpus is the pool."""
    corpus = [{"_id": skill.skill_id, "title": skill.name, "text": skill.body} for skill in POOL]
    files = {
        "corpus.jsonl": corpus,
        "queries.jsonl": [{"_id": "q1", "text": "the chart report"}],
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\ts3\t1\n",
    }
    write(tmp_path / "bench", files)
    (tmp_path / "out").mkdir()
    return tmp_path


def test_benchmark_with_pool_needs_no_other(beir):
    summary = evaluate(beir, systems=[BM25], measures=["Hit@1"], analysis={"more": [STRUCTURE]})

    assert summary["num_queries"] == 1
    assert summary["systems"] == {"bm25": {"Hit@1": 1.0}}


def test_predictions_must_be_of_benchmarks_pool(beir):
    with raises("unknown-skill"):
        evaluate(beir, predictions=predict(beir, {"q1": ["elsewhere"]}))


# Analyses -----------------------------------------------------------------------------------------

TOPICS = ["deploy", "pods", "kubernetes", "chart", "table", "pdf", "text", "audio", "video", "clip"]
POOL = [
    Skill(
        f"s{i}",
        f"{word} skill",
        "how to " * (i + 1),
        f"# Find\n\n- the {word} in files\n- the report\n",
    )
    for i, word in enumerate(TOPICS)
]
NUM_QUERIES = 8


def write_topics(folder: Path) -> Path:
    """Write a pool and a benchmark in which query i has the gold skill i."""
    queries = [(f"q{i}", f"the {TOPICS[i]} report", "test") for i in range(NUM_QUERIES)]
    verdicts = {f"q{i}": {f"s{i}": "required"} for i in range(NUM_QUERIES)}
    write_ours(folder / "bench", queries, verdicts)
    write_pool(folder / "pool", POOL)
    (folder / "out").mkdir()
    return folder


@pytest.fixture
def topics(tmp_path):
    return write_topics(tmp_path)


def reranked(source: object, name: str = "reranked") -> dict[str, Any]:
    reranker = {"kind": "rerank", "source": str(source), "precision": "float32", "keep": 3}
    return {"name": name, "rankers": [{"kind": "lexical"}, reranker]}


@dataclass(frozen=True)
class Analysed:
    """An evaluation with every analysis, of BM25 and of one reranker under two names."""

    source: str
    metrics: dict[str, Any]
    markdown: str
    page: str

    def rows(self, analysis: str, *keys: str) -> list[tuple[Any, ...]]:
        """Return these values of each row of an analysis."""
        return [tuple(map(row.get, keys)) for row in self.metrics["analysis"][analysis]]


@pytest.fixture(scope="module")
def analysed(tmp_path_factory, model_folders):
    folder = write_topics(tmp_path_factory.mktemp("analysed"))
    source = str(model_folders["bert_reranker"])
    more = [PASS_RATES, {"kind": "attention", "num_queries": 4}, STRUCTURE]
    evaluate(
        folder,
        pool=folder / "pool",
        systems=[BM25, reranked(source), reranked(source, "again")],
        analysis={"num_timed": 3, "truncation": True, "more": more},
        depth=5,
    )
    report = folder / "out" / "report"
    return Analysed(
        source,
        saved_metrics(folder),
        report.with_suffix(".md").read_text(),
        report.with_suffix(".html").read_text(),
    )


def test_latencies_are_of_every_ranker(analysed):
    assert analysed.rows("latencies", "system", "stage", "num") == [
        ("bm25", "1 lexical", 3),
        ("bm25", "total", 3),
        ("reranked", "1 lexical", 3),
        ("reranked", "2 rerank", 3),
        ("reranked", "total", 3),
        ("again", "1 lexical", 3),
        ("again", "2 rerank", 3),
        ("again", "total", 3),
    ]


def test_stages_are_of_reranked_systems(analysed):
    assert analysed.rows("stages", "system", "stage", "num_passed") == [
        ("reranked", "1 lexical", 3),
        ("reranked", "2 rerank", 10),
        ("again", "1 lexical", 3),
        ("again", "2 rerank", 10),
    ]
    # The word of each query is in its gold skill only.
    recalls = [means["Recall@10"]["mean"] for (means,) in analysed.rows("stages", "means")]
    assert recalls == [1.0] * 4


def test_truncation_is_of_each_model(analysed):
    assert analysed.rows("truncation", "model", "num_skills") == [(analysed.source, 10)]


def test_attention_is_of_each_model(analysed):
    (attention,) = analysed.metrics["analysis"]["attention"]

    assert attention["model"] == analysed.source
    assert len(attention["layers"]) == 2
    assert [pair["query_id"] for pair in attention["pairs"]] == ["q0", "q1", "q2", "q3"]
    for shares in (*attention["layers"], attention["tokens"]):
        assert sum(shares.values()) == pytest.approx(1)


def test_structure_compares_gold_with_other_skills(analysed):
    assert set(analysed.rows("structure", "num_gold", "num_others")) == {(8, 2)}


def test_outcomes_compare_neighbouring_systems(analysed):
    assert analysed.rows("outcomes", "baseline", "system") == [
        ("bm25", "reranked"),
        ("reranked", "again"),
    ]
    # One reranker under two names fixes and breaks nothing.
    assert analysed.rows("outcomes", "fixed", "broken")[1] == ([], [])


def test_descriptions_are_sliced_by_quartile(analysed):
    # Descriptions grow with the number of the skill: two queries in each quartile.
    slices = [row for row in analysed.metrics["slices"] if row["label"] == "description length"]

    assert [(row["value"], row["num_queries"]) for row in slices] == [
        ("Q1, 2–4 words", 2),
        ("Q2, 6–8 words", 2),
        ("Q3, 10–12 words", 2),
        ("Q4, 14–16 words", 2),
    ]


def test_gaps_are_of_each_slice(analysed):
    gaps = analysed.metrics["gaps"]
    quartiles = ["Q1", "Q2", "Q3", "Q4"]

    assert [gap["value"][:2] for gap in gaps] == 2 * quartiles
    systems = [(gap["baseline"], gap["system"]) for gap in gaps]
    assert systems == [("bm25", "reranked")] * 4 + [("reranked", "again")] * 4
    assert {gap["difference"]["mean"] for gap in gaps[4:]} == {0}


def test_pass_rates_need_skillsbench(analysed):
    assert analysed.metrics["analysis"]["pass_rates"] == []


@pytest.mark.parametrize(
    "title",
    [
        "Fixed and broken\n",
        "Stage by stage\n",
        "Skills that a model reads whole\n",
        "Latency\n",
        "Description length: Q1",
        "Structure of gold skills (n = 8) and others (n = 2)",
    ],
)
def test_markdown_has_every_analysis(analysed, title):
    assert f"## {title}" in analysed.markdown


def test_markdown_counts_pairs_of_attention(analysed):
    assert "(n = 4 pairs)" in analysed.markdown


@pytest.mark.parametrize(
    "section", ["flows", "stages", "truncation", "speed", "slices", "attention", "structure"]
)
def test_page_has_every_analysis(analysed, section):
    assert f'<section id="{section}">' in analysed.page


def test_page_says_what_was_evaluated(analysed):
    assert "<dt>Pool</dt><dd>pool, 10 skills</dd>" in analysed.page
    assert "with skilltrain 0" in analysed.page


def test_alternative_replaces_missing_gold_skill():
    """s9 does the same as the gold skill `gone`, so its texts are analysed."""
    gains = {"gone": 1.0, "s0": 1.0}
    relevance = Relevance(frozenset(gains), gains, {"s9": "gone", "absent": "gone"})
    task = task_of(Query("q", "text", "", "t", "test"), relevance, {})
    skills = {skill.skill_id: skill for skill in POOL}
    config = AnalysisConfig.model_validate({"more": [STRUCTURE]})

    analysis = run_input_analyses(config, Inputs([], Benchmark("b", (task,), ()), skills))

    counts = {(row["num_gold"], row["num_others"]) for row in analysis["structure"]}
    assert counts == {(2, 8)}


def evaluate_unserved(folder: Path, *rows: dict[str, str]) -> None:
    """Evaluate BM25 with these rows as queries that no skill serves."""
    file = folder / "none.jsonl"
    file.write_text(jsonl(*rows))
    analysis = {"unserved": file}
    evaluate(folder, pool=folder / "pool", systems=[BM25], analysis=analysis)


def test_refusals_are_reported_with_intervals(topics):
    rows = [{"query": f"bake bread at dawn {number}"} for number in range(4)]

    # In truth s0 serves the last query.
    evaluate_unserved(topics, *rows, {"query": "the deploy report"})

    (row,) = saved_metrics(topics)["analysis"]["unserved"]
    assert row["answered_unserved"]["n"] == 5
    assert row["answered_unserved"]["mean"] < 0.5  # only the last query has words of a skill
    assert row["refused_served"]["n"] == row["exact_set"]["n"] == NUM_QUERIES
    assert row["calibration_error"]["n"] == row["separation"]["n"] == NUM_QUERIES + 5
    # All eight queries score more than the first four; the last scores as one of the eight.
    assert 0.5 < row["separation"]["mean"] <= 1
    assert row["risk_coverage"][-1][0] == 1
    markdown = (topics / "out" / "report.md").read_text()
    assert "answered of 5 queries without a skill | refused of 8 others" in markdown
    page = (topics / "out" / "report.html").read_text()
    assert "Wrong answers by share answered" in page


def test_refusals_need_two_skills(folder):
    write_ours(folder / "bench", [("q1", "says apples", "")], {"q1": {"s0": "required"}})

    evaluate_unserved(folder, {"query": "bake bread"})

    metrics = saved_metrics(folder)
    assert metrics["analysis"]["unserved"] == []
    assert "Refusals are not analysed: all 1 queries" in " ".join(metrics["notes"])


def test_unserved_queries_have_no_saved_rankings(topics):
    evaluate_unserved(topics, {"query": "bake bread at dawn"})

    query_ids = {row["query_id"] for row in ranking_rows(topics)}
    assert query_ids == {f"q{i}" for i in range(NUM_QUERIES)}


def test_unserved_query_needs_text(topics):
    with raises("invalid-row"):
        evaluate_unserved(topics, {})


# What judges and embeddings servers would take ----------------------------------------------------


def api(server: LLMServer, folder: Path, name: str = "api", **changed: Any) -> dict[str, Any]:
    """Return a system that ranks by vectors of the server."""
    ranker = {
        "kind": "api",
        "model": "vectors",
        "base_url": server.base_url,
        "cache": folder / "cache",
        "batch_size": 3,
    }
    return {"name": name, "rankers": [ranker | changed]}


def judged(server: LLMServer, folder: Path, **llm: Any) -> dict[str, Any]:
    """Return a system whose chat model selects from BM25's candidates."""
    llm = chat(server, folder / "cache", concurrency=4, **llm)
    select = {"kind": "select", "keep": 4, "llm": llm}
    return {"name": "judged", "rankers": [{"kind": "lexical"}, select]}


API_PRICES = {"prices": {"prompt": 2, "completion": 0}}
JUDGE_PRICES = {"prompt": 3.0, "completion": 5.0}


@pytest.fixture
def priced(folder):
    """A server, and the settings of an evaluation that sends requests for which it knows prices."""
    queries = [
        ("q1", "the body says invoice", "test"),
        ("q2", "the body says 整理发票", "test"),
        ("q3", "the body says invoice", "test"),
    ]
    verdicts = {query_id: {"s1": "required"} for query_id, _, _ in queries}
    write_ours(folder / "bench", queries, verdicts)
    with llm_server() as server:
        server.otherwise = lambda request: embeddings(request) if "input" in request else Reply("1")
        systems = [
            BM25,
            judged(server, folder, prices=JUDGE_PRICES),
            api(server, folder, **API_PRICES),
            api(server, folder, "same again", **API_PRICES),
        ]
        config = config_of(folder, pool=folder / "pool", measures=["Hit@1"], systems=systems)
        yield server, config


def test_dry_run_sends_nothing(priced, folder, capsys):
    server, config = priced

    plan = dry_run(config)

    assert server.requests == []
    assert not (folder / "cache").exists()
    assert not [*(folder / "out").iterdir()]
    assert "3 requests to scripted, about" in capsys.readouterr().err
    assert (plan["num_queries"], plan["num_skills"], plan["num_systems"]) == (3, 4, 4)
    assert plan["asked"].keys() == {"judged", "api"}  # the third asks for what the second has


def test_dry_run_counts_requests(priced, folder, capsys):
    server, config = priced
    plan = dry_run(config)

    config.run(folder / "out")

    messages = capsys.readouterr().err
    assert "4 texts to vectors, about" in messages
    assert "2 texts to vectors, about" in messages
    chats = [request["messages"] for request in server.requests if "messages" in request]
    num_read = sum(estimate_tokens(message["content"]) + 4 for message in chain(*chats))
    judge = plan["asked"]["judged"]["select"]
    assert judge["num_requests"] == len(chats) == 3
    assert judge["num_prompt_tokens"] == num_read
    assert judge["num_completion_tokens"] == 12
    # 4 skills and 2 queries: two of the three queries are equal.
    batches = [request["input"] for request in server.requests if "input" in request]
    texts = [*chain(*batches)]
    encoding = plan["asked"]["api"]["api"]
    assert len(batches) == 3
    assert encoding["num_requests"] == 2
    assert encoding["num_texts"] == len(texts) == 6
    assert encoding["num_kept_texts"] == 0
    num_encoded = sum(map(estimate_tokens, texts))
    assert encoding["num_prompt_tokens"] == num_encoded
    assert plan["dollars"] == round((num_read * 3 + 12 * 5 + num_encoded * 2) / 1e6, 6)


def test_dry_run_knows_cached_texts(priced, folder):
    _, config = priced
    config.run(folder / "out")

    encoding = dry_run(config)["asked"]["api"]["api"]

    assert encoding["num_requests"] == 0
    assert encoding["num_texts"] == 0
    assert encoding["num_kept_texts"] == 6
    assert encoding["dollars"] == 0


def test_unknown_price_makes_dollars_unknown(folder):
    with llm_server() as server:
        systems = [judged(server, folder), api(server, folder, budget={"max_tokens": 500})]
        plan = dry_run(config_of(folder, pool=folder / "pool", systems=systems))

        assert server.requests == []

    assert plan["dollars"] is None
    assert plan["asked"]["api"]["api"]["budget"] == "500 tokens"


def test_dry_run_without_requests_has_counts(folder):
    plan = dry_run(config_of(folder, pool=folder / "pool", systems=[BM25]))

    assert plan == {"num_queries": 3, "num_skills": 4, "num_systems": 1}


def plan_candidates(folder: Path, system: dict[str, Any]) -> dict[str, Any]:
    """Plan the stage candidates with this system."""
    values = {
        "stage": "candidates",
        "queries": folder / "bench",
        "pool": folder / "pool",
        "split": None,
        "system": system,
        "out": folder / "out",
    }
    return dry_run(validate(Candidates, values, "test"))


def test_dry_run_plans_candidates(folder):
    with llm_server() as server:
        plan = plan_candidates(folder, api(server, folder, **API_PRICES))

        assert server.requests == []

    encoding = plan["asked"]["api"]["api"]
    assert plan["num_systems"] == 1
    assert encoding["num_texts"] == 7
    assert plan["dollars"] == encoding["dollars"] > 0


def test_dry_run_needs_the_models(folder):
    ranker = {"kind": "dense", "source": "./nothing"}

    with raises("model-not-found"):
        plan_candidates(folder, {"name": "x", "rankers": [ranker]})


# Refused before any query is ranked ---------------------------------------------------------------

PREDICTIONS = {"pool": None, "systems": [], "predictions": "mine.json"}
FAULTS = [  # a dry run finds them too
    ({"pool": None, "systems": []}, "nothing-to-score"),
    ({"pool": None}, "missing-pool"),
    ({"pool": "none"}, "not-found"),
    ({"split": "nowhere"}, "empty-split"),
    ({"measures": []}, "invalid-setting"),
    ({"measures": ["hit@1"]}, "invalid-setting"),
    ({"measures": ["Hit@1 (copies)"]}, "invalid-setting"),
    ({"clusters": "clusters"}, "missing-clusters"),
    (PREDICTIONS | {"clusters": "clusters"}, "missing-pool"),
    ({"systems": [BM25, BM25]}, "repeated-name"),
    (
        {"systems": [{"name": "e", "rankers": [{"kind": "dense", "source": "./nothing"}]}]},
        "model-not-found",
    ),
    ({"systems": [reranked("bench")]}, "not-a-model"),
    ({"predictions": "bad.json"}, "unknown-skill"),
    ({"predictions": "counting.json"}, "repeated-name"),
]
FAULTS_OF_ANALYSES = [
    ({"analysis": {"more": [{"kind": "attention"}]}}, "nothing-to-analyse"),
    (PREDICTIONS | {"analysis": {"more": [STRUCTURE]}}, "nothing-to-analyse"),
]


@pytest.fixture
def faulty_values(folder, monkeypatch):
    """Return a function that adds settings to an evaluation whose first system asks a server.

    So no query can be ranked unnoticed. The server must have got no request in the end.
    """
    monkeypatch.chdir(folder)
    for name, skill_id in (("mine", "s0"), ("bad", "nowhere"), ("counting", "s0")):
        predict(folder, {"q1": [skill_id]}, name)
    clusters = [{"skill_id": f"s{number}", "cluster": number} for number in range(3)]
    write_table(clusters, CLUSTERS, folder / "clusters")

    def add(settings):
        counting = api(server, folder, "counting", max_retries=0)
        values = {"pool": "pool", "systems": [counting], **settings}
        if settings.get("systems"):
            values["systems"] = [counting, *settings["systems"]]
        return values

    with llm_server() as server:
        yield add
    assert server.requests == []


@pytest.mark.parametrize(("settings", "code"), [*FAULTS, *FAULTS_OF_ANALYSES])
def test_invalid_evaluation_is_refused(folder, faulty_values, settings, code):
    with raises(code):
        evaluate(folder, **faulty_values(settings))


@pytest.mark.parametrize(("settings", "code"), FAULTS)
def test_dry_run_refuses_invalid_evaluation(folder, faulty_values, settings, code):
    with raises(code):
        dry_run(config_of(folder, **faulty_values(settings)))
