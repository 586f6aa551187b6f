"""A chat model judges groups of skills, finds equivalent skills and rewrites queries."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark_folders import write_ours, write_pool, write_rankings
from faults import raises
from llm_server import LLMServer, Reply
from skilltrain.data.sampling import split_groups
from skilltrain.llm import AnswerError
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import agreement, cohens_kappa
from skilltrain.metrics.measures import evaluate_query, parse_measure
from skilltrain.papers.r3.rejections import Group, read_request
from skilltrain.records import Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, read_table
from small_library import skilltrain, succeeds

TOPICS = ("pods", "charts", "tables", "audio")


def skill(lang: str, n: int) -> Skill:
    """Make the skill number `n` of a language."""
    return Skill(
        f"{lang}{n}",
        f"tool-{lang}-{n}",
        TOPICS[n % 4] if lang == "en" else "处理音频",
        f"how to do {TOPICS[n % 4]}",
        category=TOPICS[n % 2],
        lang=lang,
    )


POOL = [skill("en", n) for n in range(8)] + [skill("zh", n) for n in range(8)]
ENGLISH = "Please put the report number {} of the week on my desk"
CHINESE = "请把第{}号报告放到我的桌子上并且通知同事"
VERDICTS = ["required", "required", "useful", "rejected", "irrelevant"]


def verdict_list(*verdicts: str) -> list[dict[str, Any]]:
    """Return the verdicts as a chat model writes them."""
    return [{"skill": number, "verdict": verdict} for number, verdict in enumerate(verdicts, 1)]


def user_text(request: dict[str, Any]) -> str:
    """Return the prompt of a request without its system message."""
    return request["messages"][1]["content"]


def answer(request: dict[str, Any], verdicts: list[str] = VERDICTS, **changed: Any) -> Reply:
    """Answer as an honest model: in the requested language, with a verdict for each skill."""
    system = request["messages"][0]["content"]
    num_skills = len(re.findall(r"^Capability \d+$", user_text(request), re.M))
    text = CHINESE if "in Chinese" in system else ENGLISH
    judged = verdict_list(*verdicts[:num_skills])
    for row in judged:
        if row["verdict"] == "rejected":
            row |= {"reason": "scope_mismatch", "why": "too wide for it"}
    written = {"request": text.format(request["seed"]), "verdicts": judged}
    return Reply(json.dumps(written | changed))


def model(server: LLMServer, folder: Path) -> list[str]:
    """Return the settings of a model that answers one request at a time."""
    return [
        "llm.kind=openai",
        "llm.model=scripted",
        f"llm.base_url={server.base_url}",
        f"llm.cache={folder}/cache",
        "llm.max_retries=0",
        "llm.concurrency=1",
    ]


@pytest.fixture
def rejections_command(server, tmp_path, model_folders):
    """Judge the skills of POOL and a French one. The server gives honest answers."""
    french = Skill("fr", "outil", "fait", "corps", lang="fr")
    write_pool(tmp_path / "pool", [*POOL, french])
    server.otherwise = answer
    return [
        "r3",
        "rejections",
        f"pool={tmp_path}/pool",
        f"encoder.source={model_folders['bert']}",
        *model(server, tmp_path),
        "group_size=5",
        "num_words=12",
        "num_groups=16",
        f"out={tmp_path}/out",
    ]


def tables(folder: Path) -> list[list[dict]]:
    """Return the rows of the queries, the judgements and the dropped skills."""
    return [read_table(folder, spec).to_pylist() for spec in (QUERIES, JUDGEMENTS, DROPPED)]


def dry_run(command: list[str]) -> dict[str, Any]:
    """Return the plan of a command."""
    return json.loads(succeeds(*command, "--dry-run").out)["dry_run"]


def test_unusable_answer_is_returned_to_model(rejections_command, server):
    server.script = [Reply("no JSON")]

    succeeds(*rejections_command)

    assert "turned down: it is not one JSON object" in user_text(server.requests[16])


def test_unusable_groups_name_first_reason(rejections_command, server):
    """The model is asked about both groups in each round. The faults of the groups differ."""
    server.script = [Reply("no JSON"), Reply("{}")] * 3

    line = skilltrain(*rejections_command, "num_groups=2").error_line

    assert "made no request for 2 groups; the first reason: it is not one JSON object" in line


def test_every_group_becomes_judged_query(rejections_command, server, tmp_path):
    summary = json.loads(succeeds(*rejections_command, "dev_share=0.2", "--json").out)
    queries, judgements, dropped = tables(tmp_path / "out")

    # Queries: four of each kind and four of each direction.
    assert summary["by_direction"] == {"en2en": 4, "en2zh": 4, "zh2en": 4, "zh2zh": 4}
    kinds = {query["query_id"]: query["query_id"].split("-")[0] for query in queries}
    num_by_kind = dict.fromkeys(("neighbours", "category", "across", "languages"), 4)
    assert Counter(kinds.values()) == num_by_kind
    assert {(query["kind"], query["origin"]) for query in queries} == {("multi", "llm:scripted")}
    assert [(row["skill_id"], row["filter"]) for row in dropped] == [("fr", "language")]

    # Judgements: only a rejection has a reason.
    reasons = {(row["verdict"] == "rejected", row["reason"], row["why"]) for row in judgements}
    assert reasons == {(True, "scope_mismatch", "too wide for it"), (False, None, None)}

    # Groups: their kind limits languages and categories.
    skills = {skill.skill_id: skill for skill in POOL}
    for query_id, kind in kinds.items():
        skill_ids = [row["skill_id"] for row in judgements if row["group"] == query_id]
        assert len(set(skill_ids)) == len(skill_ids)
        langs = {skills[skill_id].lang for skill_id in skill_ids}
        assert len(langs) == (2 if kind == "languages" else 1)
        categories = [skills[skill_id].category for skill_id in skill_ids]
        if kind == "category":
            # Only four skills share a language and a category.
            assert categories == [categories[0]] * 4
        elif kind == "across":
            assert categories.count(categories[0]) == 1

    # Split: no skill is in both train and dev.
    splits = {query["query_id"]: query["split"] for query in queries}
    pairs = {(row["skill_id"], splits[row["query_id"]]) for row in judgements}
    assert len(pairs) == len({skill_id for skill_id, _ in pairs})


def test_more_groups_reuse_cached_answers(rejections_command, server, tmp_path):
    succeeds(*rejections_command)
    server.requests.clear()

    succeeds(*rejections_command, "num_groups=18", f"out={tmp_path}/more")

    assert len(server.requests) == 2


def test_refusal_rejects_all_skills_but_anchor(rejections_command, server, tmp_path):
    refusal = {"verdicts": [], "refusal": "functional_overlap", "why": "all do the same"}
    server.otherwise = partial(answer, **refusal)

    succeeds(*rejections_command, "num_groups=4")

    queries, judgements, _ = tables(tmp_path / "out")
    assert {query["kind"] for query in queries} == {"single"}
    assert Counter((row["verdict"], row["reason"], row["why"]) for row in judgements) == {
        ("required", None, None): 4,
        ("rejected", "functional_overlap", "all do the same"): len(judgements) - 4,
    }


@pytest.fixture
def second_judge_command(rejections_command, server):
    """Judge five groups twice. The second judge calls every skill irrelevant."""

    def answer_both(request: dict[str, Any]) -> Reply:
        verdicts = VERDICTS if request["model"] == "scripted" else ["irrelevant"] * 5
        return answer(request, verdicts)

    server.otherwise = answer_both
    llm = {"kind": "openai", "model": "other", "base_url": server.base_url, "max_retries": 0}
    second_judge = json.dumps(llm | {"cache": None})
    return [*rejections_command, f"second_judge={second_judge}", "num_judged_twice=5"]


def test_dry_run_counts_requests_of_both_judges(second_judge_command, server, tmp_path):
    plan = dry_run(second_judge_command)

    assert (plan["num_groups"], plan["num_requests"]) == (16, 16)
    assert plan["second_judge"]["num_requests"] == 5
    assert server.requests == []
    assert not (tmp_path / "out").exists()


def test_second_judge_measures_agreement(second_judge_command, server, tmp_path):
    summary = json.loads(succeeds(*second_judge_command, "--json").out)

    # The second judge does not see the first verdicts.
    prompts = [user_text(request) for request in server.requests if request["model"] == "other"]
    assert len(prompts) == 5
    assert all("Request: " in prompt for prompt in prompts)
    assert not any("scope_mismatch" in prompt for prompt in prompts)

    # A judge with one verdict for everything agrees only by chance.
    assert summary["second_judge"]["num_groups"] == 5
    assert summary["kappa"]["mean"] == 0.0

    second_rows = read_table(tmp_path / "out" / "second", JUDGEMENTS).to_pylist()
    assert {row["judge"] for row in second_rows} == {"llm:other"}
    assert len(second_rows) == summary["kappa"]["n"]
    _, first_rows, _ = tables(tmp_path / "out")
    first_pairs = {(row["query_id"], row["skill_id"]) for row in first_rows}
    assert {(row["query_id"], row["skill_id"]) for row in second_rows} < first_pairs


GROUP = Group("g", "en", tuple(POOL[:3]))
NO_REASON = {"skill": 3, "verdict": "rejected"}
TWO = verdict_list("required", "required")
USABLE_ANSWER = {
    "request": "put the report on my desk",
    "verdicts": [*TWO, NO_REASON | {"reason": "low_quality", "why": "so poor"}],
}


@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"verdicts": [*TWO, TWO[0]]}, "malformed", "[1, 1, 2], not 1 to 3, each once"),
        ({"verdicts": TWO}, "malformed", "not 1 to 3"),
        ({"verdicts": [*TWO, NO_REASON]}, "malformed", "3 is rejected without"),
        ({"verdicts": [*TWO, NO_REASON | {"reason": "blue"}]}, "malformed", "'low_quality'"),
        (
            {"verdicts": verdict_list("required", "useful", "irrelevant")},
            "malformed",
            "or a refusal",
        ),
        ({"refusal": "blue"}, "malformed", "refusal"),
        ({"request": "把报告放到我的桌子上"}, "language", "not in English"),
        ({"request": "let tool en 1 do the work"}, "name_leak", "named"),
        ({"request": "please " * 40 + "do the work"}, "too_long", "43 words"),
    ],
)
def test_unusable_answer_gives_reason(changed: dict[str, Any], kind: str, reason: str):
    with pytest.raises((AnswerError, ValueError)) as error:
        read_request(set(), 30, GROUP, json.dumps(USABLE_ANSWER | changed))

    message = str(error.value)
    assert getattr(error.value, "kind", "malformed") == kind
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["group_size=1"], "group_size: must be greater than or equal to 2"),
        (["languages=[en, fr]"], "languages.1: must be 'en' or 'zh'"),
        (["pool={small}"], "every group would hold one skill alone"),
        (["pool={small}", "languages=[en, zh]"], "no skill of language zh, for en2zh, zh2zh (name"),
    ],
)
def test_settings_without_groups_are_refused(
    rejections_command, tmp_path, changed: list[str], message: str
):
    small_pool = write_pool(tmp_path / "small", POOL[:1])
    settings = [setting.format(small=small_pool) for setting in changed]

    line = skilltrain(*rejections_command, "languages=[en]", *settings).error_line

    assert message in line


# Equivalents ------------------------------------------------------------------


QUERY_IDS = ("q1", "q2", "q3")


def answer_about_q1(request: dict[str, Any]) -> Reply:
    """Call the second candidate of q1 an equivalent. Give no usable answer about other queries."""
    return Reply("[2]" if "text q1" in user_text(request) else "none of them")


@pytest.fixture
def equivalents_command(server, tmp_path):
    """Judge two candidates of q1 and q2. q3 has no ranking."""
    write_pool(tmp_path / "pool", [Skill(s, f"name-{s}", "d", f"body of {s}") for s in "abcdef"])
    verdicts = {
        "q1": {"a": "required", "d": "rejected"},
        "q2": {"b": "required"},
        "q3": {"c": "required"},
    }
    queries = [(query_id, f"text {query_id}", "test") for query_id in QUERY_IDS]
    write_ours(tmp_path / "queries", queries, verdicts)
    ranking = [(skill_id, -float(rank)) for rank, skill_id in enumerate("fdeabc", 1)]
    write_rankings(tmp_path / "rankings", {"x": dict.fromkeys(("q1", "q2"), ranking)})
    server.otherwise = answer_about_q1
    return [
        "r3",
        "equivalents",
        f"queries={tmp_path}/queries",
        f"pool={tmp_path}/pool",
        f"rankings={tmp_path}/rankings",
        *model(server, tmp_path),
        "depth=2",
        f"out={tmp_path}/out",
    ]


def test_query_without_candidates_is_not_judged(equivalents_command, server):
    plan = dry_run(equivalents_command)

    assert plan["num_requests"] == 2
    assert server.requests == []


def test_prompt_shows_gold_skill_before_unjudged_candidates(equivalents_command, server):
    succeeds(*equivalents_command)

    prompts = map(user_text, server.requests)
    (prompt,) = [prompt for prompt in prompts if "text q1" in prompt]
    assert re.findall(r"name-(\w)", prompt) == ["a", "f", "e"]


def test_equivalents_become_alternatives_of_gold_skill(equivalents_command, tmp_path):
    summary = json.loads(succeeds(*equivalents_command, "--json").out)

    assert (summary["num_golds"], summary["num_equivalents"]) == (2, 1)
    assert summary["dropped"] == {"no_list": 1}
    _, judgements, dropped = tables(tmp_path / "out")
    assert [row["skill_id"] for row in dropped] == ["b"]
    (equivalent,) = [row for row in judgements if row["group"]]
    assert (equivalent["query_id"], equivalent["skill_id"]) == ("q1", "f")
    assert (equivalent["verdict"], equivalent["group"]) == ("required", "a")

    relevance = load_benchmark(tmp_path / "out", None).tasks[0].relevance
    assert relevance.gold == {"a"}
    assert relevance.alternatives == {"f": "a"}
    assert relevance.gains == {"a": 1.0}
    measures = [parse_measure("Hit@1"), parse_measure("Recall@2")]
    assert evaluate_query(["f", "a"], relevance, measures) == {"Hit@1": 1.0, "Recall@2": 1.0}


def test_equivalents_are_no_gold_skills_in_second_run(equivalents_command, server, tmp_path):
    succeeds(*equivalents_command)
    server.otherwise = lambda request: Reply("[2]")
    settings = [f"queries={tmp_path}/out", "depth=4", f"out={tmp_path}/again"]

    summary = json.loads(succeeds(*equivalents_command, *settings, "--json").out)

    assert (summary["num_golds"], summary["num_equivalents"]) == (2, 2)
    relevance = load_benchmark(tmp_path / "again", None).tasks[0].relevance
    assert relevance.gold == {"a"}
    assert relevance.alternatives == {"f": "a", "e": "a"}


# Agreement and split ----------------------------------------------------------


def test_kappa_equals_textbook_case():
    # Agreement 35/50, by chance (25 * 30 + 25 * 20) / 2500 = 0.5, kappa 0.4 (Cohen).
    table = np.array([[20.0, 5], [10, 15]])

    assert cohens_kappa(table[None]).tolist() == [pytest.approx(0.4)]


def test_kappa_of_one_class_is_one():
    assert cohens_kappa(np.array([[[7.0]]])).tolist() == [1.0]


def test_agreement_resamples_groups():
    pairs = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15

    one_each = agreement([[pair] for pair in pairs])
    ten_each = agreement([pairs[n::5] for n in range(5)])

    assert one_each.mean == ten_each.mean == pytest.approx(0.4)
    assert one_each.n == 50
    assert one_each.low < 0.4 < one_each.high
    assert one_each.high - one_each.low > 0.2


def test_agreement_without_pairs_is_refused():
    with raises("nothing-to-score"):
        agreement([])


def test_groups_that_share_a_skill_share_a_split():
    chained = {
        f"g{n}": [f"s{n}", f"s{n + 1}"] for n in range(6)
    }  # each shares a skill with the next
    groups = chained | {f"g{n}": [f"s{n}", f"t{n}"] for n in range(6, 20)}  # g6 holds s6 as g5 does

    for seed in range(5):
        splits = split_groups(groups, 0.3, seed)

        assert Counter(splits.values()) == {"dev": 6, "train": 14}
        assert {splits[f"g{n}"] for n in range(7)} == {"train"}


def test_seed_changes_split():
    groups = {f"g{n}": [f"s{n}"] for n in range(20)}

    assert split_groups(groups, 0.3, 0) != split_groups(groups, 0.3, 1)


def test_dev_share_of_one_leaves_no_train_group():
    splits = split_groups({"g1": ["s1"], "g2": ["s2"]}, 1.0, 0)

    assert set(splits.values()) == {"dev"}


# Rewriting --------------------------------------------------------------------


@pytest.fixture
def rewrite_command(rejections_command, server, tmp_path):
    """Rewrite four judged queries."""
    succeeds(*rejections_command, "num_groups=4", "languages=[en]", "kinds=[neighbours]")
    server.requests.clear()
    return [
        "r3",
        "rewrite",
        f"queries={tmp_path}/out",
        f"pool={tmp_path}/pool",
        *model(server, tmp_path),
        f"out={tmp_path}/new",
    ]


def test_rewritten_queries_keep_judgements(rewrite_command, server, tmp_path):
    server.otherwise = lambda request: Reply(f"desk, report {request['seed']}")

    succeeds(*rewrite_command, "style=terse")

    old_queries, old_judgements, _ = tables(tmp_path / "out")
    queries, judgements, _ = tables(tmp_path / "new")
    assert judgements == old_judgements
    assert [query["query_id"] for query in queries] == [query["query_id"] for query in old_queries]
    assert {query["origin"] for query in queries} == {"terse by llm:scripted"}
    assert all(query["text"].startswith("desk, report") for query in queries)
    for request in server.requests:
        assert any(skill.name in request["messages"][0]["content"] for skill in POOL)


def test_rewrite_dry_run_counts_requests(rewrite_command):
    assert dry_run([*rewrite_command, "style=typed"])["num_requests"] == 4


def test_unusable_rewriting_names_reason(rewrite_command, server, tmp_path):
    queries, _, _ = tables(tmp_path / "out")
    names = " and ".join(f"tool en {n}" for n in range(8))
    faults = [
        ("typed", queries[0]["text"], "the same text was written before"),
        ("terse", "report " * 30, "it had 30 words, more than 20"),
        ("terse", "把报告放到我的桌子上去", "it is in another language than the query"),
        ("typed", f"use {names}", "it named the capability"),
    ]

    for style, text, reason in faults:
        server.otherwise = lambda request, text=text: Reply(text)
        line = skilltrain(*rewrite_command, f"style={style}", "llm.cache=null").error_line
        assert f"rewrote no query; the first reason: {reason}" in line
