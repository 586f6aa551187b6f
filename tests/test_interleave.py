"""A chat model searches for skills in rounds (papers/skillflow/interleave.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from faults import raises
from llm_server import LLMServer, Reply, chat
from skilltrain import Router
from skilltrain.config import validate
from skilltrain.llm import estimate_cost
from skilltrain.papers.skillflow.interleave import InterleaveConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, run_systems

TOPICS = ("apple", "bread", "cloud", "apple bread", "apple cloud")
SKILLS = [Skill(f"s{n}", f"skill-{n}", topic, "") for n, topic in enumerate(TOPICS)]
BM25 = {"kind": "lexical"}


def ranker_of(server: LLMServer, **settings: Any) -> dict[str, Any]:
    """Return the settings of a ranker that searches in rounds."""
    values = {"kind": "interleave", "llm": chat(server), "of": BM25, "max_retries": 0}
    return {**values, "per_round": 1, **settings}


def run(server: LLMServer, *texts: str, **settings: Any) -> RankedStage:
    """Rank for tasks named q0, q1 and so on."""
    rankers = [ranker_of(server, **settings)]
    system = validate(SystemConfig, {"name": "rounds", "rankers": rankers}, "test")
    queries = [Query(f"q{n}", text, "single", "test", "test") for n, text in enumerate(texts)]
    (stage,) = run_systems([system], queries, SKILLS, depth=10)["rounds"]
    return stage


def search(text: str) -> Reply:
    """Return an answer that searches for a text."""
    return Reply(json.dumps({"search": text}))


def user_text(request: dict[str, Any]) -> str:
    """Return the user message of a request."""
    return request["messages"][1]["content"]


def test_each_round_brings_new_skills(server):
    server.script = [search("apple"), search("apple"), search("cloud")]

    stage = run(server, "make a pie", per_round=2)

    # The second search brings only the third of the skills about apples.
    skill_ids = stage.skill_ids()["q0"]
    assert set(skill_ids[:3]) == {"s0", "s3", "s4"}
    assert skill_ids[3:] == ["s2"]
    assert [score for _, score in stage.rankings["q0"]] == [-1, -2, -3, -4]


def test_model_sees_task_and_its_skills(server):
    server.script = [search("bread"), search("")]

    run(server, "make a pie")

    first, second = map(user_text, server.requests)
    assert "make a pie" in first and "none" in first
    assert "make a pie" in second and "skill-1: bread" in second


def test_empty_search_ends_rounds_of_its_task(server):
    server.otherwise = lambda request: search("" if "stop" in user_text(request) else "apple")

    stage = run(server, "stop now", "go on", rounds=3)

    assert {task: len(ids) for task, ids in stage.skill_ids().items()} == {"q0": 0, "q1": 3}
    assert len(server.requests) == 4


@pytest.mark.parametrize("answer", ["no object", "{}", '{"search": 3}', '["apple"]'])
def test_unusable_answer_searches_with_task(server, answer: str):
    server.script = [Reply(answer), search("cloud")]

    stage = run(server, "bread", rounds=2)

    assert stage.skill_ids()["q0"] == ["s1", "s2"]
    assert (stage.counts["num_asked"], stage.counts["num_unusable"]) == (2, 1)


def test_rounds_survive_unreachable_model(capsys):
    stage = run(LLMServer("http://127.0.0.1:9/v1"), "bread", rounds=2)

    assert stage.skill_ids()["q0"] == ["s1", "s3"]
    assert stage.counts["unusable"] == {"down": 1}
    assert "goes on without the chat model" in capsys.readouterr().err


def test_dead_server_is_asked_once(server):
    server.script = [search("cloud")]
    server.otherwise = lambda request: Reply(status=401)

    stage = run(server, "apple", rounds=4)

    # One search for the task brings the skills of the other three rounds.
    skill_ids = stage.skill_ids()["q0"]
    assert skill_ids[0] == "s2"
    assert set(skill_ids[1:]) == {"s0", "s3", "s4"}
    assert len(server.requests) == 2


def test_keep_limits_depth_of_search(server):
    server.script = [search("apple"), search("apple"), search("bread")]

    stage = run(server, "make a pie", of={**BM25, "keep": 1}, per_round=2)

    assert stage.skill_ids()["q0"] == ["s0", "s1"]


def test_fused_rankers_answer_searches(server):
    server.script = [search("bread"), search("cloud")]
    fused = {"kind": "fuse", "of": [BM25, {"kind": "lexical", "fields": "description"}]}

    stage = run(server, "make a pie", rounds=2, of=fused)

    assert stage.skill_ids()["q0"] == ["s1", "s2"]


def test_cost_counts_all_rounds(server):
    config = validate(InterleaveConfig, ranker_of(server, rounds=3), "test")
    queries = [Query(f"q{n}", "task", "single", "test", "test") for n in range(2)]

    cost = estimate_cost(config.asks(queries, SKILLS))

    assert cost["num_requests"] == 6
    assert server.requests == []


def test_prompt_file_replaces_messages(server, tmp_path: Path):
    file = tmp_path / "prompt.yaml"
    file.write_text("system: Search.\nuser: '{{ query }} with {{ skills }}'\n")
    server.script = [search("bread"), search("")]

    run(server, "make a pie", prompt=str(file), query_chars=6)

    assert [user_text(request) for request in server.requests] == [
        "make a with none",
        "make a with skill-1: bread",
    ]


def test_prompt_file_needs_skills(server, tmp_path: Path):
    file = tmp_path / "prompt.yaml"
    file.write_text("system: Search.\nuser: '{{ query }}'\n")

    with raises("invalid-recipe") as error:
        run(server, "make a pie", prompt=str(file))

    assert "does not use the placeholder skills" in str(error.value)
    assert server.requests == []


@pytest.mark.parametrize("kind", ["select", "rerank", "late", "saved"])
def test_only_searching_ranker_answers(server, kind: str):
    with raises("unknown-choice") as error:
        run(server, "make a pie", of={"kind": kind})

    complaint = f"unknown choice '{kind}'; choose from api, dense, fuse, lexical"
    assert complaint in str(error.value)
    assert server.requests == []


def test_router_refuses_interleave(server):
    with raises("conflicting-settings") as error:
        Router([{"name": "pdf", "description": "Fill in forms"}], [ranker_of(server)])

    assert str(error.value) == (
        "rankers: a router cannot contain the ranker interleave, which is for experiments "
        "(use another ranker; skilltrain evaluate takes this one)"
    )
