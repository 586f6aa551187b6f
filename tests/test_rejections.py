"""A chat model's judgements: groups with what is rejected, a second judge, equivalents; and queries rewritten."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark_folders import write_ours, write_pool
from faults import raises
from llm_server import LLMServer, Reply
from skilltrain.data.sampling import split_groups
from skilltrain.llm import AnswerError
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import agreement, cohens_kappa
from skilltrain.metrics.measures import evaluate_query, parse_measure
from skilltrain.papers.r3.rejections import Group, read_request
from skilltrain.records import Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, RANKINGS, read_table, write_table
from small_library import skilltrain, succeeds

TOPICS = ("pods", "charts", "tables", "audio")
POOL = [
    Skill(
        f"{lang}{n}",
        f"tool-{lang}-{n}",
        TOPICS[n % 4] if lang == "en" else "处理音频",
        f"how to do {TOPICS[n % 4]}",
        category=TOPICS[n % 2],
        lang=lang,
    )
    for lang in ("en", "zh")
    for n in range(8)
]
ENGLISH, CHINESE = (
    "Please put the report number {} of the week on my desk",
    "请把第{}号报告放到我的桌子上并且通知同事",
)
VERDICTS = ["required", "required", "useful", "rejected", "irrelevant"]


def answer(request: dict[str, Any], verdicts: list[str] = VERDICTS, **changed: Any) -> Reply:
    """What an honest model says: one verdict for each numbered skill, in the language that it was asked for."""
    system, user = (message["content"] for message in request["messages"])
    num_skills = len(re.findall(r"^Capability \d+$", user, re.M))
    text = (CHINESE if "in Chinese" in system else ENGLISH).format(request["seed"])
    judged = [{"skill": n, "verdict": v} for n, v in enumerate(verdicts[:num_skills], 1)]
    for one in judged:
        if one["verdict"] == "rejected":
            one |= {"reason": "scope_mismatch", "why": "too wide for it"}
    return Reply(json.dumps({"request": text, "verdicts": judged} | changed))


def model(server: LLMServer, folder: Path) -> list[str]:
    """The arguments that name the server, which is asked one thing after the other."""
    return [
        "llm.kind=openai",
        "llm.model=scripted",
        f"llm.base_url={server.base_url}",
        f"llm.cache={folder}/cache",
        "llm.max_retries=0",
        "llm.concurrency=1",
    ]


@pytest.fixture
def asked(server: LLMServer, tmp_path: Path, model_folders):
    """The arguments of a run over POOL and one French skill; the server is honest."""
    french = Skill("fr", "outil", "fait", "corps", lang="fr")
    write_pool(tmp_path / "pool", [*POOL, french])
    server.otherwise = answer
    encoder = f"encoder.source={model_folders['bert']}"
    return [
        "r3",
        "rejections",
        f"pool={tmp_path}/pool",
        encoder,
        *model(server, tmp_path),
        "group_size=5",
        "num_words=12",
        "num_groups=16",
        f"out={tmp_path}/out",
    ]


def tables(folder: Path) -> tuple[list[dict], list[dict], list[dict]]:
    return tuple(read_table(folder, spec).to_pylist() for spec in (QUERIES, JUDGEMENTS, DROPPED))  # type: ignore


def test_every_group_becomes_a_query_and_a_verdict_for_each_skill(
    asked, server: LLMServer, tmp_path: Path
):
    server.script = [Reply("no JSON")]
    summary = json.loads(succeeds(*asked, "dev_share=0.2", "--json").out)
    again = server.requests[16]
    assert "turned down: it is not one JSON object" in again["messages"][1]["content"]
    queries, judgements, dropped = tables(tmp_path / "out")
    assert summary["by_direction"] == {"en2en": 4, "en2zh": 4, "zh2en": 4, "zh2zh": 4}
    kind_of = {query["query_id"]: query["query_id"].split("-")[0] for query in queries}
    assert Counter(kind_of.values()) == dict.fromkeys(
        ("neighbours", "category", "across", "languages"), 4
    )
    assert [(row["skill_id"], row["filter"]) for row in dropped] == [("fr", "language")]
    assert {(query["kind"], query["origin"]) for query in queries} == {("multi", "llm:scripted")}
    reasons = {(row["verdict"] == "rejected", row["reason"], row["why"]) for row in judgements}
    assert reasons == {(True, "scope_mismatch", "too wide for it"), (False, None, None)}
    lang, category = ({s.skill_id: getattr(s, name) for s in POOL} for name in ("lang", "category"))
    for query_id, kind in kind_of.items():
        members = [row["skill_id"] for row in judgements if row["group"] == query_id]
        assert len(set(members)) == len(members)
        langs, categories = {lang[s] for s in members}, Counter(category[s] for s in members)
        assert len(langs) == 1 + (kind == "languages")
        if kind == "category":
            assert (
                len(members) == 4 and len(categories) == 1
            )  # the four of one language and category
        elif kind == "across":
            assert categories[category[members[0]]] == 1
    split = {query["query_id"]: query["split"] for query in queries}
    sides = {(row["skill_id"], split[row["query_id"]]) for row in judgements}
    assert len(sides) == len({skill_id for skill_id, _ in sides}), "a skill is in train and in dev"
    num_before = len(server.requests)
    succeeds(*asked, "num_groups=18", f"out={tmp_path}/more")
    assert len(server.requests) == num_before + 2, "more groups pay for what is new alone"


def test_a_refusal_becomes_rejections_of_all_but_the_anchor(
    asked, server: LLMServer, tmp_path: Path
):
    server.otherwise = lambda asked: answer(
        asked, verdicts=[], refusal="functional_overlap", why="all do the same"
    )
    succeeds(*asked, "num_groups=4")
    queries, judgements, _ = tables(tmp_path / "out")
    assert {query["kind"] for query in queries} == {"single"}
    assert Counter((row["verdict"], row["reason"], row["why"]) for row in judgements) == {
        ("required", None, None): 4,
        ("rejected", "functional_overlap", "all do the same"): len(judgements) - 4,
    }


def test_a_second_judge_is_planned_sees_no_verdict_and_agreement_is_measured(
    asked, server: LLMServer, tmp_path: Path
):
    def second(request: dict[str, Any]) -> Reply:
        return (
            answer(request)
            if request["model"] == "scripted"
            else answer(request, ["irrelevant"] * 5)
        )

    server.otherwise = second
    llm = (
        f"{{kind: openai, model: other, base_url: {server.base_url}, cache: null, max_retries: 0}}"
    )
    command = [*asked, f"second_judge={llm}", "num_judged_twice=5"]
    plan = json.loads(succeeds(*command, "--dry-run").out)["dry_run"]
    assert (plan["num_groups"], plan["num_requests"], plan["second_judge"]["num_requests"]) == (
        16,
        16,
        5,
    )
    assert server.requests == [] and not (tmp_path / "out").exists()
    summary = json.loads(succeeds(*command, "--json").out)
    texts = [r["messages"][1]["content"] for r in server.requests if r["model"] == "other"]
    assert len(texts) == 5 and all(
        "Request: " in text and "scope_mismatch" not in text for text in texts
    )
    assert summary["second_judge"]["num_groups"] == 5
    assert summary["kappa"]["mean"] == 0.0, "one who says the same of all agrees by chance alone"
    _, judgements, _ = tables(tmp_path / "out")
    found = read_table(tmp_path / "out" / "second", JUDGEMENTS).to_pylist()
    assert {row["judge"] for row in found} == {"llm:other"} and len(found) == summary["kappa"]["n"]
    assert {(r["query_id"], r["skill_id"]) for r in found} < {
        (r["query_id"], r["skill_id"]) for r in judgements
    }


GROUP = Group("g", "en", tuple(POOL[:3]))
GOOD = {
    "request": "put the report on my desk",
    "verdicts": [
        {"skill": 1, "verdict": "required"},
        {"skill": 2, "verdict": "required"},
        {"skill": 3, "verdict": "rejected", "reason": "low_quality", "why": "so poor"},
    ],
}


NO_REASON = {"skill": 3, "verdict": "rejected"}


def judged(*verdicts: str) -> list[dict[str, Any]]:
    return [{"skill": n, "verdict": verdict} for n, verdict in enumerate(verdicts, 1)]


TWO = judged("required", "required")


@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"verdicts": [*TWO, TWO[0]]}, "malformed", "[1, 1, 2], not 1 to 3, each once"),
        ({"verdicts": TWO}, "malformed", "not 1 to 3"),
        ({"verdicts": [*TWO, NO_REASON]}, "malformed", "3 is rejected without"),
        ({"verdicts": [*TWO, NO_REASON | {"reason": "blue"}]}, "malformed", "'low_quality'"),
        ({"verdicts": judged("required", "useful", "irrelevant")}, "malformed", "or a refusal"),
        ({"refusal": "blue"}, "malformed", "refusal"),
        ({"request": "把报告放到我的桌子上"}, "language", "not in English"),
        ({"request": "let tool en 1 do the work"}, "name_leak", "named"),
        ({"request": "please " * 40 + "do the work"}, "too_long", "43 words"),
    ],
)
def test_answers_that_cannot_be_used_say_why(changed: dict[str, Any], kind: str, reason: str):
    with pytest.raises((AnswerError, ValueError)) as caught:
        read_request(set(), 30, GROUP, json.dumps(GOOD | changed))
    assert getattr(caught.value, "kind", "malformed") == kind
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["group_size=1"], "group_size: must be greater than or equal to 2"),
        (["languages=[en, fr]"], "languages.1: must be 'en' or 'zh'"),
        (["pool={one}"], "every group would hold one skill alone"),
        (["pool={one}", "languages=[zh]"], "the pool holds no skill of language zh"),
    ],
)
def test_settings_and_pools_that_make_no_group(
    asked, tmp_path: Path, changed: list[str], message: str
):
    one = write_pool(tmp_path / "one", POOL[:1])
    settings = ["languages=[en]", *(part.format(one=one) for part in changed)]
    assert message in skilltrain(*asked, *settings).error_line


# Equivalents ---------------------------------------------------------------------------------------------------------


def test_equivalents_are_judged_and_evaluated(server: LLMServer, tmp_path: Path):
    write_pool(tmp_path / "pool", [Skill(s, f"name-{s}", "d", f"body of {s}") for s in "abcdef"])
    verdicts = {
        "q1": {"a": "required", "d": "rejected"},
        "q2": {"b": "required"},
        "q3": {"c": "required"},
    }
    write_ours(tmp_path / "queries", [(f"q{n}", f"text {n}", "test") for n in (1, 2, 3)], verdicts)
    ranked = [
        {"query_id": query_id, "skill_id": s, "rank": rank, "score": -float(rank), "stage": "x"}
        for query_id in ("q1", "q2")
        for rank, s in enumerate("fdeabc", 1)
    ]
    write_table(ranked[::-1], RANKINGS, tmp_path / "rankings")  # rows stand in no order
    server.otherwise = lambda asked: Reply(
        "[2]" if "text 1" in asked["messages"][1]["content"] else "none of them"
    )
    command = [
        "r3",
        "equivalents",
        f"queries={tmp_path}/queries",
        f"pool={tmp_path}/pool",
        f"rankings={tmp_path}/rankings",
        *model(server, tmp_path),
        "depth=2",
        f"out={tmp_path}/out",
    ]
    plan = json.loads(succeeds(*command, "--dry-run").out)["dry_run"]
    assert plan["num_requests"] == 2 and server.requests == [], "q3 has no candidate"
    summary = json.loads(succeeds(*command, "--json").out)
    assert (summary["num_golds"], summary["num_equivalents"], summary["dropped"]) == (
        2,
        1,
        {"no_list": 1},
    )
    (shown,) = {text for r in server.requests if "text 1" in (text := r["messages"][1]["content"])}
    assert [f"name-{s}" in shown for s in "abcdef"] == [True, False, False, False, True, True], (
        "gold, then unjudged"
    )
    assert read_table(tmp_path / "out", DROPPED).column("skill_id").to_pylist() == ["b"]
    found = [row for row in read_table(tmp_path / "out", JUDGEMENTS).to_pylist() if row["group"]]
    assert [(r["query_id"], r["skill_id"], r["verdict"], r["group"]) for r in found] == [
        ("q1", "f", "required", "a")
    ]
    relevance = load_benchmark(tmp_path / "out", None).tasks[0].relevance
    assert (relevance.gold, relevance.alternatives, relevance.gains) == (
        {"a"},
        {"f": "a"},
        {"a": 1.0},
    )
    measures = [parse_measure("Hit@1"), parse_measure("Recall@2")]
    assert evaluate_query(["f", "a"], relevance, measures) == {"Hit@1": 1.0, "Recall@2": 1.0}
    server.otherwise = lambda asked: Reply("[2]")
    command[2], command[-1], command[-2] = (
        f"queries={tmp_path}/out",
        f"out={tmp_path}/again",
        "depth=4",
    )
    again = json.loads(succeeds(*command, "--json").out)
    assert (again["num_golds"], again["num_equivalents"]) == (2, 2), (
        "what was found before is no gold skill"
    )
    relevance = load_benchmark(tmp_path / "again", None).tasks[0].relevance
    assert (relevance.gold, relevance.alternatives) == ({"a"}, {"f": "a", "e": "a"})


# Agreement and split -------------------------------------------------------------------------------------------------


def test_kappa_by_hand():
    # Agreement 35/50, by chance (25 * 30 + 25 * 20) / 2500 = 0.5: kappa 0.4 (Cohen's textbook case).
    table = np.array([[20.0, 5], [10, 15]])
    assert cohens_kappa(table[None]).tolist() == [pytest.approx(0.4)]
    assert cohens_kappa(np.array([[[7.0]]])).tolist() == [1.0]
    pairs = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15
    alone = agreement([[pair] for pair in pairs])
    together = agreement([pairs[n::5] for n in range(5)])
    assert alone.mean == together.mean == pytest.approx(0.4) and alone.n == 50
    assert alone.low < 0.4 < alone.high and alone.high - alone.low > 0.2
    with raises("nothing-to-score"):
        agreement([])


def test_groups_that_share_a_skill_are_on_one_side():
    groups = {
        f"g{n}": [f"s{n}", f"s{n + 1}" if n < 6 else f"t{n}"] for n in range(20)
    }  # g0 to g6 hang together
    for seed in range(5):
        split = split_groups(groups, 0.3, seed)
        assert Counter(split.values()) == {"dev": 6, "train": 14}
        assert {split[f"g{n}"] for n in range(7)} == {"train"}
    assert split_groups(groups, 0.3, 0) != split_groups(groups, 0.3, 1)
    assert set(split_groups(groups, 1.0, 0).values()) == {"dev"}


# Rewriting -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewritten(asked, server: LLMServer, tmp_path: Path):
    """The arguments of a rewriting of four judged queries."""
    succeeds(*asked, "num_groups=4", "languages=[en]", "kinds=[neighbours]")
    server.requests.clear()
    return [
        "r3",
        "rewrite",
        f"queries={tmp_path}/out",
        f"pool={tmp_path}/pool",
        *model(server, tmp_path),
        f"out={tmp_path}/new",
    ]


def test_rewritten_queries_keep_their_judgements_and_what_cannot_be_rewritten_is_said(
    rewritten, server: LLMServer, tmp_path: Path
):
    server.otherwise = lambda asked: Reply(f"desk, report {asked['seed']}")
    succeeds(*rewritten, "style=terse")
    before, after = tables(tmp_path / "out"), tables(tmp_path / "new")
    assert after[1] == before[1] and [q["query_id"] for q in after[0]] == [
        q["query_id"] for q in before[0]
    ]
    assert {q["origin"] for q in after[0]} == {"terse by llm:scripted"}
    assert all(q["text"].startswith("desk, report") for q in after[0])
    names = [skill.name for skill in POOL]
    assert all(any(name in r["messages"][0]["content"] for name in names) for r in server.requests)
    plan = json.loads(succeeds(*rewritten, "style=typed", "--dry-run").out)["dry_run"]
    assert plan["num_requests"] == 4
    faults = [
        ("typed", before[0][0]["text"], "the same text was written before"),
        ("terse", "report " * 30, "it had 30 words, more than 20"),
        ("terse", "把报告放到我的桌子上去", "it is in another language than the query"),
        (
            "typed",
            f"use {' and '.join(f'tool en {n}' for n in range(8))}",
            "it named the capability",
        ),
    ]
    for number, (style, text, reason) in enumerate(faults):
        server.otherwise = lambda asked, text=text: Reply(text)
        line = skilltrain(
            *rewritten, f"style={style}", "llm.cache=null", f"out={tmp_path}/bad{number}"
        ).error_line
        assert f"rewrote no query; the first reason: {reason}" in line
