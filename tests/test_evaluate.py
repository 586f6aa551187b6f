"""The stage evaluate: systems and predictions side by side, its analyses, and what it refuses before it ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import skillrouter, write, write_ours, write_pool
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
from skilltrain.runs import dry_run
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
    """pool: four skills; bench: q1 wants s0, q2 wants s1 and s2 and finds s3 useful, q3 (dev) wants s3."""
    queries = [
        ("q1", "apples", "test"),
        ("q2", "bridges and candles", "test"),
        ("q3", "drums", "dev"),
    ]
    wanted = {
        "q1": {"s0": "required"},
        "q2": {"s1": "required", "s2": "required", "s3": "useful"},
        "q3": {"s3": "required"},
    }
    write_ours(tmp_path / "bench", queries, wanted)
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    (tmp_path / "out").mkdir()
    return tmp_path


def predict(folder: Path, values: object, name: str = "mine") -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(values))
    return str(file)


def config_of(folder: Path, **settings: Any) -> Evaluate:
    values = {"stage": "evaluate", "benchmark": folder / "bench", "out": folder / "out", **settings}
    return validate(Evaluate, values, "test")


def evaluate(folder: Path, **settings: Any) -> dict[str, Any]:
    return config_of(folder, **settings).run(folder / "out")


def means(folder: Path, section: str = "metrics") -> dict[str, dict[str, float]]:
    systems = json.loads((folder / "out" / "metrics.json").read_text())["systems"]
    return {
        one["name"]: {measure: value["mean"] for measure, value in one[section].items()}
        for one in systems
        if section in one
    }


def test_systems_and_predictions_side_by_side_with_their_rankings(folder):
    nd = {"name": "nd", "rankers": [{"kind": "lexical", "fields": "nd"}]}
    settings = {"pool": str(folder / "pool"), "systems": [BM25, nd]}

    evaluate(
        folder, predictions=predict(folder, {"q1": ["s1"]}), measures=["Hit@1"], depth=2, **settings
    )

    assert means(folder) == {"bm25": {"Hit@1": 1}, "nd": {"Hit@1": 1}, "mine": {"Hit@1": 0}}

    rankings = read_table(folder / "out", RANKINGS).to_pylist()

    assert {(row["stage"], row["query_id"]) for row in rankings} == {
        (s, q) for s in ("bm25", "nd") for q in ("q1", "q2", "q3")
    }
    assert sorted({row["rank"] for row in rankings}) == [1, 2]

    values = [
        json.loads(line) for line in (folder / "out" / "per_query.jsonl").read_text().splitlines()
    ]

    assert [(row["system"], row["query_id"], row["Hit@1"]) for row in values][-3:] == [
        ("mine", "q1", 0.0),
        ("mine", "q2", 0.0),
        ("mine", "q3", 0.0),
    ]


def test_saved_rankings_stand_beside_live_systems_and_predictions(folder):
    settings = {
        "pool": str(folder / "pool"),
        "measures": ["MRR@10"],
        "predictions": predict(folder, {"q1": ["s1"]}),
    }
    evaluate(folder, systems=[BM25], **settings)
    saved = {
        "kind": "saved",
        "rankings": str((folder / "out").rename(folder / "before")),
        "stage": "bm25",
    }
    (folder / "out").mkdir()
    both = {"kind": "fuse", "of": [saved, {"kind": "lexical"}]}
    evaluate(
        folder,
        systems=[BM25, {"name": "old", "rankers": [saved]}, {"name": "both", "rankers": [both]}],
        **settings,
    )

    found = means(folder)

    assert found["old"] == found["both"] == found["bm25"] == {"MRR@10": 1}
    assert found["mine"] == {"MRR@10": 0}


def test_copies_count_beside_the_strict_measures_everywhere(folder):
    """s3 is a copy of s0 (q1); of q2 it is a judged skill of its own, and of q3 the gold one, whose copy is s0."""
    clusters = [{"skill_id": f"s{n}", "cluster": n % 3} for n in range(4)]
    write_table(clusters, CLUSTERS, folder / "clusters")
    first = predict(folder, {"q1": ["s3", "s0"], "q2": ["s3"], "q3": ["s0", "s3"]}, "first")
    better = predict(folder, {"q1": ["s0"], "q2": ["s1"], "q3": ["s3"]}, "better")
    settings = {
        "pool": str(folder / "pool"),
        "predictions": [first, better],
        "measures": ["Hit@1", "FC@2"],
    }
    evaluate(folder, clusters=str(folder / "clusters"), **settings)

    expected = {"Hit@1": 0, "Hit@1 (copies)": 2 / 3, "FC@2": 2 / 3, "FC@2 (copies)": 2 / 3}

    assert means(folder)["first"] == pytest.approx(expected)
    assert means(folder, "multi")["first"] == dict.fromkeys(expected, 0)

    found = json.loads((folder / "out" / "metrics.json").read_text())

    assert {
        row["measure"]: row["difference"]["mean"] for row in found["differences"]
    } == pytest.approx({"Hit@1": 1, "Hit@1 (copies)": 1 / 3})
    assert found["notes"] == [
        "(copies): near-duplicates of a gold skill count as gold too; 2 of 3 queries have any."
    ]

    pages = [(folder / "out" / name).read_text() for name in ("report.html", "report.md")]

    assert all("Hit@1 (copies)" in page for page in pages)
    assert pages[0].count("copy of gold") == 2


def test_rankings_are_as_long_as_the_measures_look_and_nothing_is_analysed_unasked(folder):
    evaluate(
        folder,
        pool=str(folder / "pool"),
        systems=[BM25],
        measures=["Recall@1", "Recall@3"],
        depth=1,
    )
    rows = read_table(folder / "out", RANKINGS).to_pylist()

    assert max(row["rank"] for row in rows) == 3
    assert means(folder)["bm25"] == {"Recall@1": pytest.approx((1 + 0.5 + 1) / 3), "Recall@3": 1}

    found = json.loads((folder / "out" / "metrics.json").read_text())["analysis"]

    assert {name for name, rows in found.items() if rows} == set(), (
        "without Hit@1 there is no right and wrong"
    )


def test_a_chat_model_that_chose_nothing_is_named_in_the_report(folder):
    with llm_server() as server:
        server.otherwise = lambda request: Reply("I cannot say")
        llm = {
            "kind": "openai",
            "model": "m",
            "base_url": server.base_url,
            "cache": str(folder / "cache"),
        }
        select = {"kind": "select", "llm": llm, "max_retries": 0}
        system = {"name": "selected", "rankers": [{"kind": "lexical"}, select]}
        evaluate(folder, pool=str(folder / "pool"), systems=[BM25, system], measures=["Hit@1"])
    (note,) = json.loads((folder / "out" / "metrics.json").read_text())["notes"]

    assert note.startswith(
        "selected: the chat model gave nothing of use for 3 of 3 queries (no_number 3)"
    )
    assert note.split(" (")[0] in (folder / "out" / "report.html").read_text()


def test_a_benchmarks_own_gold_skills_join_the_pool(tmp_path):
    """SkillRouter's form; a gold skill that the pool has under the same id stays the pool's."""
    relevance = {"gt_skill_ids": ["new"], "relevance": {"new": 3, "s0": 0}, "task_type": "single"}
    gold = [
        {"skill_id": "new", "name": "new", "description": "", "body": "about a zebra"},
        {"skill_id": "s0", "name": "s0", "description": "", "body": "zebra zebra zebra zebra"},
    ]
    write(tmp_path / "bench", skillrouter([("t1", "zebra")], {"t1": relevance}, gold))
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    (tmp_path / "out").mkdir()

    evaluate(tmp_path, pool=str(tmp_path / "pool"), systems=[BM25], measures=["Hit@1"])

    assert means(tmp_path)["bm25"] == {"Hit@1": 1}
    assert read_table(tmp_path / "out", RANKINGS).num_rows == 5


def test_tiers_are_ranked_over_their_own_pools_and_scored_together(folder):
    """Hard adds a copy that says `apples` more often, so Hit@1 is 1 over easy and 0 over hard."""
    entry = {"gt_skill_ids": ["s0"], "relevance": {"s0": 3}, "task_type": "clean"}
    write(folder, skillrouter([("t", "apples")], {"t": entry}))
    copy = Skill("copy", "apples", "apples", "apples")
    for tier, skills in {"easy": SKILLS_OF_POOL, "hard": [*SKILLS_OF_POOL, copy]}.items():
        rows = [
            {key: value for key, value in asdict(one).items() if value is not None}
            for one in skills
        ]
        write(folder / tier, {"part.jsonl": rows})
    predicted = predict(folder, {"t@easy": ["s0"], "t@hard": ["s0"]})
    tiers = [str(folder / "easy"), str(folder / "hard")]

    summary = evaluate(
        folder, benchmark=tiers, systems=[BM25], predictions=predicted, measures=["Hit@1"]
    )

    assert (summary["num_queries"], summary["systems"]) == (
        2,
        {"bm25": {"Hit@1": 0.5}, "mine": {"Hit@1": 1.0}},
    )

    found = json.loads((folder / "out" / "metrics.json").read_text())
    by_tier = {
        part["value"]: part["systems"]["bm25"]["Hit@1"]["mean"]
        for part in found["slices"]
        if part["label"] == "tier"
    }

    assert (found["benchmark"], by_tier) == ("easy + hard", {"easy": 1.0, "hard": 0.0})

    whole = found["systems"][0]["metrics"]["Hit@1"]

    assert (whole["low"], whole["high"], whole["n"]) == (0.5, 0.5, 2), "one task, whatever is drawn"
    assert {row["system"] for row in found["analysis"]["pass_rates"]} == {"bm25", "mine"}, (
        "known for SkillsBench"
    )

    rows = read_table(folder / "out", RANKINGS).to_pylist()

    assert {row["query_id"]: row["skill_id"] for row in rows if row["rank"] == 1} == {
        "t@easy": "s0",
        "t@hard": "copy",
    }
    with raises("missing-pool"):
        evaluate(folder, benchmark=[str(folder), *tiers], systems=[BM25])


def test_a_benchmark_with_a_pool_of_its_own_needs_no_other(tmp_path):
    """BEIR: the corpus is the pool; predictions are held to it as well."""
    (tmp_path / "out").mkdir()
    write(
        tmp_path / "bench",
        {
            "corpus.jsonl": [
                {"_id": skill.skill_id, "title": skill.name, "text": skill.body} for skill in POOL
            ],
            "queries.jsonl": [{"_id": "q1", "text": "the chart report"}],
            "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\ts3\t1\n",
        },
    )

    summary = evaluate(tmp_path, systems=[BM25], measures=["Hit@1"], analysis={"more": [STRUCTURE]})

    assert summary["num_queries"] == 1
    assert summary["systems"] == {"bm25": {"Hit@1": 1.0}}
    with raises("unknown-skill"):
        evaluate(tmp_path, predictions=predict(tmp_path, {"q1": ["elsewhere"]}))


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


@pytest.fixture
def topics(tmp_path):
    """bench (query i wants skill i), pool and out."""
    queries = [(f"q{i}", f"the {TOPICS[i]} report", "test") for i in range(NUM_QUERIES)]
    write_ours(
        tmp_path / "bench", queries, {f"q{i}": {f"s{i}": "required"} for i in range(NUM_QUERIES)}
    )
    write_pool(tmp_path / "pool", POOL)
    (tmp_path / "out").mkdir()
    return tmp_path


def reranked(source: object, name: str = "reranked") -> dict[str, Any]:
    reranker = {"kind": "rerank", "source": str(source), "precision": "float32", "keep": 3}
    return {"name": name, "rankers": [{"kind": "lexical"}, reranker]}


def test_every_analysis_stands_in_json_markdown_and_on_the_page(topics, model_folders):
    """The two rerankers of one source are one model."""
    source = str(model_folders["bert_reranker"])
    analysis = {"num_timed": 3, "truncation": True}
    analysis |= {"more": [PASS_RATES, {"kind": "attention", "num_queries": 4}, STRUCTURE]}
    evaluate(
        topics,
        pool=topics / "pool",
        systems=[BM25, reranked(source), reranked(source, "again")],
        analysis=analysis,
        depth=5,
    )
    saved = json.loads((topics / "out" / "metrics.json").read_text())
    found = saved["analysis"]

    both = [
        (name, stage)
        for name in ("reranked", "again")
        for stage in ("1 lexical", "2 rerank", "total")
    ]

    assert [(row["system"], row["stage"], row["num"]) for row in found["latencies"]] == [
        (*row, 3) for row in (("bm25", "1 lexical"), ("bm25", "total"), *both)
    ]
    assert [(row["system"], row["stage"], row["num_passed"]) for row in found["stages"]] == [
        (name, *stage)
        for name in ("reranked", "again")
        for stage in (("1 lexical", 3), ("2 rerank", 10))
    ]

    recalls = [row["means"]["Recall@10"]["mean"] for row in found["stages"]]

    assert recalls == [1.0] * 4, "the word of each query stands in its skill alone"
    assert [(row["model"], row["num_skills"]) for row in found["truncation"]] == [(source, 10)]

    (attention,) = found["attention"]

    assert (attention["model"], len(attention["layers"])) == (source, 2)
    assert [pair["query_id"] for pair in attention["pairs"]] == ["q0", "q1", "q2", "q3"]
    assert all(
        sum(layer.values()) == pytest.approx(1)
        for layer in [*attention["layers"], attention["tokens"]]
    )
    assert {(row["num_gold"], row["num_others"]) for row in found["structure"]} == {(8, 2)}

    pairs = [(row["baseline"], row["system"]) for row in found["outcomes"]]

    assert pairs == [("bm25", "reranked"), ("reranked", "again")]

    again = found["outcomes"][1]

    assert again["fixed"] == again["broken"] == [], "one reranker scores alike under two names"

    # Descriptions grow with the skill's number: two queries in each quartile.
    parts = [part for part in saved["slices"] if part["label"] == "description length"]
    lengths = [len(POOL[i].description.split()) for i in range(NUM_QUERIES)]

    assert [(part["value"], part["num_queries"]) for part in parts] == [
        (f"Q{n}, {lengths[i]}–{lengths[i + 1]} words", 2) for n, i in enumerate((0, 2, 4, 6), 1)
    ]
    assert [(gap["baseline"], gap["system"], gap["value"][:2]) for gap in saved["gaps"]] == [
        (*pair, f"Q{n}") for pair in pairs for n in (1, 2, 3, 4)
    ]
    assert {gap["difference"]["mean"] for gap in saved["gaps"][4:]} == {0}
    assert found["pass_rates"] == [], (
        "the agents' pass rates are known for SkillsBench's tasks alone"
    )

    markdown, page = ((topics / "out" / name).read_text() for name in ("report.md", "report.html"))

    for title in (
        "Fixed and broken\n",
        "Stage by stage\n",
        "Skills that a model sees whole\n",
        "Latency\n",
        "Description length: Q1",
        "Structure of gold skills (n = 8) and others (n = 2)",
    ):
        assert f"## {title}" in markdown
    assert "(n = 4 pairs)" in markdown
    assert "<dt>Pool</dt><dd>pool, 10 skills</dd>" in page
    assert "with skilltrain 0" in page
    for part in ("flows", "stages", "truncation", "speed", "slices", "attention", "structure"):
        assert f'<section id="{part}">' in page


def test_an_alternative_stands_in_for_a_gold_skill_that_the_pool_lacks():
    """The gold skill `gone` is met by s9, so its description and body are what is looked at."""
    relevance = Relevance(
        frozenset({"gone", "s0"}), {"gone": 1.0, "s0": 1.0}, {"s9": "gone", "absent": "gone"}
    )
    task = task_of(Query("q", "text", "", "t", "test"), relevance, {})
    benchmark, skills = Benchmark("b", (task,), ()), {skill.skill_id: skill for skill in POOL}
    config = AnalysisConfig.model_validate({"more": [STRUCTURE]})

    rows = run_input_analyses(config, Inputs([], benchmark, skills))["structure"]

    assert {(row["num_gold"], row["num_others"]) for row in rows} == {(2, 8)}


def test_queries_that_no_skill_serves_are_told_from_the_others_by_the_best_score(topics):
    rows = [
        {"query": "bake bread at dawn"},
        {"query": f"the {TOPICS[0]} report"},
    ]  # the second is served, in truth
    (topics / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(
        topics,
        pool=topics / "pool",
        systems=[BM25],
        analysis={"unserved": str(topics / "none.jsonl")},
    )

    told = json.loads((topics / "out" / "metrics.json").read_text())["analysis"]["unserved"]["bm25"]

    # All eight find more than the first, and the second finds what one of the eight finds: (8 + .5 ± 7 ties or less).
    assert 0.5 < told["mean"] <= 1
    assert told["low"] <= told["mean"] <= told["high"]
    assert told["n"] == 10
    assert "(n = 8 and 2)" in (topics / "out" / "report.md").read_text()

    ranked = read_table(topics / "out", RANKINGS).column("query_id").to_pylist()

    assert set(ranked) == {f"q{i}" for i in range(NUM_QUERIES)}

    (topics / "none.jsonl").write_text("{}\n")

    with raises("invalid-row"):
        evaluate(
            topics,
            pool=topics / "pool",
            systems=[BM25],
            analysis={"unserved": str(topics / "none.jsonl")},
        )


# What judges and embeddings servers would take ----------------------------------------------------


def api(server: LLMServer, folder: Path, name: str = "api", **changed: Any) -> dict[str, Any]:
    source = {
        "model": "vectors",
        "base_url": server.base_url,
        "cache": str(folder / "cache"),
        "batch_size": 3,
    }
    return {"name": name, "rankers": [{"kind": "api", **source, **changed}]}


def judged(server: LLMServer, folder: Path, **llm: Any) -> dict[str, Any]:
    select = {
        "kind": "select",
        "keep": 4,
        "llm": chat(server, folder / "cache", concurrency=4, **llm),
    }
    return {"name": "judged", "rankers": [{"kind": "lexical"}, select]}


def test_a_dry_run_says_what_is_asked_and_asks_and_writes_nothing(folder, capsys):
    queries = {"q1": "sort my invoices", "q2": "整理发票", "q3": "sort my invoices"}
    wanted = {query_id: {"s1": "required"} for query_id in queries}
    write_ours(folder / "bench", [(*query, "test") for query in queries.items()], wanted)
    with llm_server() as server:
        server.otherwise = lambda request: embeddings(request) if "input" in request else Reply("1")
        price = {"prices": {"prompt": 2, "completion": 0}}
        systems = [
            judged(server, folder, prices={"prompt": 3.0, "completion": 5.0}),
            api(server, folder, **price),
            api(server, folder, "same again", **price),
        ]
        config = config_of(
            folder, pool=folder / "pool", measures=["Hit@1"], systems=[BM25, *systems]
        )
        plan = dry_run(config)

        assert server.requests == []
        assert not (folder / "cache").exists()
        assert not [*(folder / "out").iterdir()]
        assert "3 requests to scripted, about" in capsys.readouterr().err

        config.run(folder / "out")

        assert "4 texts to vectors, about" in (said := capsys.readouterr().err)
        assert "2 texts to vectors, about" in said

        chats = [request for request in server.requests if "messages" in request]
        texts = [request["input"] for request in server.requests if "input" in request]
        again = dry_run(config)["asked"]["api"]["api"]

    assert (plan["num_queries"], plan["num_skills"], plan["num_systems"]) == (3, 4, 4)
    assert plan["asked"].keys() == {"judged", "api"}  # the third asks what the second has asked

    judge, encoding = plan["asked"]["judged"]["select"], plan["asked"]["api"]["api"]
    read = sum(estimate_tokens(m["content"]) + 4 for request in chats for m in request["messages"])

    assert (judge["num_requests"], judge["num_prompt_tokens"], judge["num_completion_tokens"]) == (
        3,
        read,
        12,
    )
    # 4 skills and 2 queries, for one is asked twice.
    assert (encoding["num_requests"], encoding["num_texts"], encoding["num_kept_texts"]) == (
        2,
        6,
        0,
    )
    assert (len(chats), len(texts), sum(map(len, texts))) == (3, 3, 6)
    assert encoding["num_prompt_tokens"] == sum(
        estimate_tokens(text) for some in texts for text in some
    )
    assert plan["dollars"] == round(
        (read * 3 + 12 * 5 + encoding["num_prompt_tokens"] * 2) / 1e6, 6
    )
    assert (
        again["num_requests"],
        again["num_texts"],
        again["num_kept_texts"],
        again["dollars"],
    ) == (0, 0, 6, 0)


def test_a_price_that_is_not_known_makes_the_sum_unknown_and_candidates_are_planned_alike(folder):
    with llm_server() as server:
        systems = [judged(server, folder), api(server, folder, budget={"max_tokens": 500})]
        plan = dry_run(config_of(folder, pool=folder / "pool", systems=systems))
        values = {
            "stage": "candidates",
            "queries": folder / "bench",
            "pool": folder / "pool",
            "split": None,
            "system": api(server, folder, prices={"prompt": 2, "completion": 0}),
            "out": folder / "out",
        }
        found = dry_run(validate(Candidates, values, "test"))
        missing = {"system": {"name": "x", "rankers": [{"kind": "dense", "source": "./nothing"}]}}

        with raises("model-not-found"):
            dry_run(validate(Candidates, values | missing, "test"))
        assert server.requests == []

    assert plan["dollars"] is None
    assert plan["asked"]["api"]["api"]["budget"] == "500 tokens"

    counts = {"num_queries": 3, "num_skills": 4, "num_systems": 1}

    assert dry_run(config_of(folder, pool=folder / "pool", systems=[BM25])) == counts

    asked = found["asked"]["api"]["api"]

    assert (found["num_systems"], asked["num_texts"]) == (1, 7)
    assert found["dollars"] == asked["dollars"] > 0


# Refused before any query is ranked ---------------------------------------------------------------

PREDICTIONS = {"pool": None, "systems": [], "predictions": "mine.json"}
FAULTS = [  # which a dry run tells as well
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


@pytest.mark.parametrize(("settings", "code"), [*FAULTS, *FAULTS_OF_ANALYSES])
def test_what_cannot_be_evaluated_is_refused(folder, monkeypatch, settings, code):
    """The first system cannot rank unnoticed: every text that it encodes is asked of a server."""
    monkeypatch.chdir(folder)
    for name, skill_id in (("mine", "s0"), ("bad", "nowhere"), ("counting", "s0")):
        predict(folder, {"q1": [skill_id]}, name)
    write_table(
        [{"skill_id": f"s{n}", "cluster": n} for n in range(3)], CLUSTERS, folder / "clusters"
    )
    with llm_server() as server:
        api = {
            "kind": "api",
            "model": "scripted",
            "base_url": server.base_url,
            "cache": None,
            "max_retries": 0,
        }
        systems = [{"name": "counting", "rankers": [api]}, *settings.get("systems", [])]
        values = {
            "pool": "pool",
            **settings,
            "systems": systems if settings.get("systems") != [] else [],
        }

        with raises(code):
            evaluate(folder, **values)

        if (settings, code) in FAULTS:
            with raises(code):
                dry_run(config_of(folder, **values))

        assert server.requests == []
