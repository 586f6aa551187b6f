"""Two filters of a chat model, and queries that it writes: what they ask, what they make of answers, what without."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llm_server import LLMServer, Reply, llm_server
from skilltrain.config import validate
from skilltrain.records import Dropped, Query, Rankings, Skill
from skilltrain.retrieval.admit import Admit, AdmitConfig, read_relevant, read_verdict
from skilltrain.retrieval.cascade import SystemConfig, run_systems
from skilltrain.retrieval.expand import Expand, ExpandConfig, joined, read_queries
from skilltrain.retrieval.select import Choice
from skilltrain.routing.router import Router

SKILLS = {letter: Skill(letter, f"name-{letter}", f"Topic {letter * 3}.", f"Body of {letter}.") for letter in "abcdef"}
TASK = Choice("q", "task", tuple(SKILLS[letter] for letter in "abc"))


def llm_of(server: LLMServer | None, cache: Path | None = None) -> dict[str, Any]:
    url = server.base_url if server else "http://127.0.0.1:9/v1"  # nothing listens there
    return {"kind": "openai", "model": "scripted", "base_url": url, "cache": str(cache) if cache else None,
            "temperature": 0, "max_retries": 0, "concurrency": 1}  # fmt: skip


def queries_of(**texts: str) -> list[Query]:
    return [Query(query_id, text, "single", "test", "test") for query_id, text in texts.items()]


def user_text(request: dict[str, Any]) -> str:
    return request["messages"][1]["content"]


def is_second_filter(request: dict[str, Any]) -> bool:
    return "INJECT" in user_text(request)


# The filters ----------------------------------------------------------------------------------------------------------


def admitted(server: LLMServer | None, candidates: str = "abcdef", **settings: Any) -> tuple[str, dict[str, Any]]:
    """The ids that are left of the candidates of one query, and what the ranker counts."""
    config = validate(AdmitConfig, {"llm": llm_of(server), "max_retries": 1, **settings}, "test")
    ranker = Admit(config, SKILLS)
    before = {"q": [(letter, 1 - place / 10) for place, letter in enumerate(candidates)]}
    (ranking,) = ranker.rank(queries_of(q="Fill a form"), before, config.keep).values()
    assert [pair for pair in before["q"] if pair in ranking] == ranking, "in their order, with their scores"
    return "".join(skill_id for skill_id, _ in ranking), ranker.counts


@pytest.mark.parametrize(
    ("answer", "settings", "left"),
    [
        ("[4, 2]", {}, "bd"),
        ("[]", {}, ""),
        ("```json\n[1]\n```", {}, "a"),
        ("[1, 2, 3, 4, 5, 6]", {}, "abcde"),
        ("[1, 2, 3]", {"keep": 3, "most": 2}, "ab"),
    ],
)
def test_the_relevant_candidates_stay_in_their_order(answer: str, settings: dict[str, Any], left: str) -> None:
    with llm_server() as server:
        server.otherwise = lambda request: Reply(answer)
        found, counts = admitted(server, **settings)
        assert len(server.requests) == 1
    assert found == left
    assert counts["accepted"]["relevancy"] == (len(json.loads(answer.strip("`json\n"))), settings.get("keep", 6))
    assert counts["accepted"]["specificity"] == (0, 0) and counts["num_unusable"] == 0


def test_the_second_filter_sees_each_relevant_skill_alone_and_whole() -> None:
    def reply(request: dict[str, Any]) -> Reply:
        if not is_second_filter(request):
            return Reply("[1, 2, 3]")
        return Reply("**INJECT**" if "name-a" in user_text(request) else "reject." if "name-b" in user_text(request)
                     else "who knows")  # fmt: skip

    with llm_server() as server:
        server.otherwise = reply
        found, counts = admitted(server, specificity=True)
        first, *second = server.requests
    assert found == "ac", "no verdict on c, which is relevant"
    assert counts["accepted"] == {"relevancy": (3, 6), "specificity": (1, 2)}
    assert all(f"Body of {letter}." in user_text(first) for letter in "abcdef")
    assert [re.findall(r"Name: name-(\w)", user_text(request)) for request in second] == [["a"], ["b"], ["c"], ["c"]]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply("1, 2"), "no_list"), (Reply('{"relevant": [1]}'), "no_list"), (Reply("[7]"), "no_list"),
        (Reply("[0]"), "no_list"), (Reply('["1"]'), "no_list"), (Reply("[true]"), "no_list"),
        (Reply("[1.0]"), "no_list"), (Reply("[" * 5000), "no_list"), (Reply(""), "empty"),
        (Reply(status=500), "failed"), (Reply(status=401), "down"), (None, "down"),
    ],
)  # fmt: skip
def test_without_a_usable_answer_the_first_candidates_stand(
    reply: Reply | None, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with llm_server() as server:
        server.otherwise = lambda request: reply or Reply()
        found, counts = admitted(server if reply else None, specificity=True)
    assert found == "abcde" and counts["unusable"] == {kind: 1}
    said = capsys.readouterr().err
    assert ("goes on without the chat model" in said) == (kind == "down")


def test_a_query_without_candidates_asks_nobody() -> None:
    with llm_server() as server:
        assert admitted(server, "")[0] == "" and server.requests == []


@pytest.mark.parametrize("text", ["INJECT", "inject", " **Reject** ", '"REJECT".'])
def test_a_verdict_is_read_however_it_is_dressed(text: str) -> None:
    assert read_verdict(TASK, text) is ("inject" in text.lower())


@pytest.mark.parametrize("text", ["INJECT or REJECT", "I inject", "yes", "[1]", "notinject"])
def test_what_is_no_verdict_is_not_guessed_at(text: str) -> None:
    assert isinstance(read_verdict(TASK, text), Dropped)
    assert isinstance(read_relevant(TASK, text.replace("[1]", "x")), Dropped)


# Written queries ------------------------------------------------------------------------------------------------------


class Remembers:
    """A ranker that ranks by the letters of a query: those it holds, first letters best; it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.given: Rankings | None = None
        self.keep = 0

    def rank(self, queries: list[Query], candidates: Rankings | None, keep: int) -> Rankings:
        self.asked += [(query.query_id, query.text) for query in queries]
        self.given, self.keep = candidates, keep
        return {query.query_id: [(letter, 1.0 - place / 10) for place, letter in enumerate(query.text)][:keep]
                for query in queries}  # fmt: skip


def expanded(server: LLMServer | None, cache: Path | None = None, **settings: Any) -> Expand:
    values = {"llm": llm_of(server, cache), "of": {"kind": "lexical", "keep": 2}, "max_retries": 1, **settings}
    return Expand(validate(ExpandConfig, values, "test"), Remembers())  # type: ignore[arg-type]


def test_each_task_is_asked_with_its_queries_and_their_answers_are_joined(tmp_path: Path) -> None:
    with llm_server() as server:
        server.otherwise = lambda request: Reply('["abx", "bay"]' if "first" in user_text(request) else '["cd", "cd"]')
        for _ in range(2):  # the second time from the cache
            ranker = expanded(server, tmp_path, count=2, keep=3)
            found = ranker.rank(queries_of(q="first task", r="another"), None, 3)
        assert len(server.requests) == 2
        assert "problem domain" in server.requests[0]["messages"][0]["content"]
    inner: Any = ranker.ranker
    assert inner.asked == [("q#1", "abx"), ("q#2", "bay"), ("r#1", "cd")]
    assert (inner.given, inner.keep) == (None, 2), "the depth of each query is that of the ranker"
    assert found == {"q": [("a", 1.0), ("b", 1.0)], "r": [("c", 1.0), ("d", 0.9)]}
    assert ranker.counts["num_asked"] == 2 and ranker.counts["num_unusable"] == 0


def test_candidates_go_to_every_query_of_their_task() -> None:
    with llm_server() as server:
        server.otherwise = lambda request: Reply('["ab", "ba"]')
        ranker = expanded(server, count=2)
        ranker.rank(queries_of(q="task"), {"q": [("a", 0.5)]}, 3)
    assert ranker.ranker.given == {"q#1": [("a", 0.5)], "q#2": [("a", 0.5)]}  # type: ignore[attr-defined]


ONE, TWO = [("a", 0.9), ("b", 0.5)], [("c", 0.8), ("b", 0.7)]


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        ("union", [("a", 0.9), ("c", 0.8), ("b", 0.7)]),
        ("max", [("a", 0.9), ("c", 0.8), ("b", 0.7)]),
        # a is not in the second, whose lowest is .7; c not in the first, whose lowest is .5
        ("mean", [("a", 0.8), ("c", 0.65), ("b", 0.6)]),
        ("rrf", [("b", 2 / 62), ("a", 1 / 61), ("c", 1 / 61)]),
    ],
)
def test_joined_by_hand(join: str, expected: list[tuple[str, float]]) -> None:
    found = joined([ONE, TWO], join)
    assert [skill_id for skill_id, _ in found] == [skill_id for skill_id, _ in expected]
    assert dict(found) == pytest.approx(dict(expected))
    assert joined([ONE], join) == ONE and joined([ONE, []], join)[0][0] == "a" and joined([[]], join) == []


@pytest.mark.parametrize(
    ("replies", "asked", "counts"),
    [
        (['["ab"]'], ["ab"], {"num_unusable": 0}),
        (["no list", '["ab"]'], ["ab"], {"num_unusable": 0}),
        (["no list", "no list", "cd"], ["cd"], {"num_unusable": 0, "num_single": 1, "unusable": {"no_list": 1}}),
        (["[]", "[3]", " ", "x" * 400], ["do 这个"], {"num_unusable": 1, "num_single": 0}),
        ([f'{["ab", "", *(f"q{n}" for n in range(50))]}'.replace("'", '"')], ["ab", "q0", "q1"], {"num_unusable": 0}),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_asked_for_again_then_one_query_then_the_task(
    replies: list[str], asked: list[str], counts: dict[str, Any]
) -> None:
    with llm_server() as server:
        server.script = [Reply(text) for text in replies]
        ranker = expanded(server, count=3)
        ranker.rank(queries_of(q="do 这个"), None, 3)
        assert server.script == []
    assert [text for _, text in ranker.ranker.asked] == asked  # type: ignore[attr-defined]
    assert ranker.counts.items() >= counts.items()


@pytest.mark.parametrize("answer", ['"pdf forms in Python"', "“pdf forms in Python”\n", "pdf forms in Python"])
def test_a_single_query_is_read_without_its_quotation_marks(answer: str) -> None:
    assert read_queries(1, TASK, answer) == ["pdf forms in Python"]


# In a cascade ---------------------------------------------------------------------------------------------------------


def cascade(server: LLMServer | None) -> SystemConfig:
    llm = llm_of(server)
    values = {"name": "cascade", "rankers": [
        {"kind": "expand", "llm": llm, "count": 2, "keep": 5, "of": {"kind": "lexical", "keep": 4}},
        {"kind": "lexical", "fields": "description", "keep": 4},
        {"kind": "admit", "llm": llm, "keep": 3, "most": 2},
    ]}  # fmt: skip
    return validate(SystemConfig, values, "test")


def test_a_cascade_goes_on_without_a_model_that_is_down_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    skills, queries = list(SKILLS.values()), queries_of(q="topic bbb and body")
    plain = validate(SystemConfig, {"name": "plain", "rankers": [
        {"kind": "lexical", "keep": 4}, {"kind": "lexical", "fields": "description", "keep": 4},
    ]}, "test")  # fmt: skip
    found = run_systems([cascade(None), plain], queries, skills, 10, num_timed=1)
    first, second, last = found["cascade"]
    assert last.rankings["q"] == found["plain"][-1].rankings["q"][:2]
    assert first.counts["unusable"] == last.counts["unusable"] == {"down": 1}
    assert (first.num_passed, second.num_passed, last.num_passed) == (None, 3, None)
    assert first.alone == () and len(found["plain"][0].alone) == 1
    said = capsys.readouterr().err
    assert said.count("goes on without the chat model") == 2 and "cascade: not timed" in said


def test_a_cascade_may_choose_nothing() -> None:
    with llm_server() as server:
        server.otherwise = lambda request: Reply("[]" if "candidate 1" in user_text(request) else '["bbb", "eee"]')
        found = run_systems([cascade(server)], queries_of(q="task"), list(SKILLS.values()), 10)["cascade"]
    assert [skill_id for skill_id, _ in found[0].rankings["q"]][:2] == ["b", "e"] and found[-1].rankings == {"q": []}


def test_a_router_may_hold_the_whole_cascade() -> None:
    with llm_server() as server:
        server.otherwise = lambda request: Reply("[2]" if "candidate 1" in user_text(request) else '["bbb", "eee"]')
        router = Router([*SKILLS.values()], cascade(server))
        assert [routed.skill_id for routed in router.route("task").skills] == ["e"]
        server.otherwise = lambda request: Reply("[]")
        assert router.route("another task").skills == ()
