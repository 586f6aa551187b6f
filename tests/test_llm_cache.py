"""The cache: nobody pays twice, whoever else writes, whichever order the answers come in; and asking in rounds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llm_server import ASK, LLMServer, Reply, ask, assert_no_key, llm_server, open_client, texts
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, Message, OpenAIConfig, Questions, Request, ask_until, cost_of, open_llm
from skilltrain.records import Dropped


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"temperature": None}, {"max_tokens": 7}, {"model": "n"}])
def test_whatever_decides_an_answer_asks_anew_and_nothing_else_does(
    server: LLMServer, tmp_path: Path, changed: dict[str, Any]
) -> None:
    others = {"requests_per_minute": 600, "budget": {"max_tokens": 10**6}, "batch": {"max_requests": 1}}
    one, other = open_client(server, tmp_path), open_client(server, tmp_path, concurrency=3, timeout=7, **others)
    assert ask(one, 0) == ask(other, 0) == ["answer 0"] and len(server.requests) == 1
    assert ask(other, 1) == ask(one, 1) and len(server.requests) == 2
    list(one.complete_all([Request((*ASK, Message("user", "!")), 0)]))
    ask(open_client(server, tmp_path, **changed), 0)
    assert len(server.requests) == 4
    with llm_server() as elsewhere:
        ask(open_client(elsewhere, tmp_path), 0)
        assert len(elsewhere.requests) == 1
    assert_no_key(tmp_path)


def test_failures_are_not_kept_and_malformed_replies_are(server: LLMServer, tmp_path: Path) -> None:
    server.script = [Reply(status=500), Reply("answer 0"), Reply(raw="{torn")]
    llm = open_client(server, tmp_path)
    assert [ask(llm, 0), ask(llm, 0), ask(llm, 1)] == [["failed"], ["answer 0"], ["malformed"]]
    again = open_client(server, tmp_path)
    assert ask(again, 0, 1) == ["answer 0", "malformed"] and len(server.requests) == 3
    assert again.budget.used == llm.budget.used


def test_answers_that_come_out_of_order_are_kept_each_under_its_own_question(server: LLMServer, tmp_path: Path) -> None:
    server.otherwise = lambda request: Reply(f"answer {request['seed']}", delay=0.05 * (7 - request["seed"]))
    for _ in range(2):
        assert ask(open_client(server, tmp_path, concurrency=8), *range(8)) == texts(*range(8))
    assert len(server.requests) == 8


def test_what_the_disk_refuses_ends_the_run(server: LLMServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SkilltrainError, match="cannot use the cache of answers"):
        ask(open_client(server, tmp_path / "cache"), 0)


@dataclass(frozen=True)
class Number:
    """A question of tests: an answer must hold its number."""

    number: int
    query_id: str = "q"
    skill_id: str = "s"


def questions(llm: LLM, count: int, attempts: int = 3) -> Questions[Number, str]:
    def check(question: Number, answer: str) -> str | Dropped:
        return answer if str(question.number) in answer else Dropped("q", "s", "wrong", "another number")

    def request(question: Number, attempt: int, fault: Dropped | None) -> Request:
        return Request(ASK, question.number + 1000 * attempt)

    return Questions(llm, [Number(n) for n in range(count)], request, check, attempts, 100, "asking")


def test_an_estimate_asks_nobody_and_knows_what_is_kept(server: LLMServer, tmp_path: Path) -> None:
    llm = open_client(server, tmp_path)
    ask(llm, 0, 1)
    found = cost_of(questions(llm, 5))
    assert len(server.requests) == 2
    # "Say hello." has 10 letters: 3 tokens, and 4 of the chat format; three requests are new.
    assert found == {
        "model": "m", "num_requests": 3, "num_answered_before": 2, "num_prompt_tokens": 21,
        "num_completion_tokens": 300, "dollars": None, "budget": None,
    }  # fmt: skip


def test_an_estimate_needs_no_key_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = cost_of(questions(open_llm(OpenAIConfig(cache=tmp_path / "cache")), 1))
    # 7 tokens at $0.15 and 100 at $0.60 a million.
    assert found["dollars"] == round(7 * 0.15e-6 + 100 * 0.60e-6, 6)
    assert list(tmp_path.iterdir()) == []


def test_asking_goes_on_until_each_answer_passes_or_the_attempts_are_used_up(server: LLMServer, tmp_path: Path) -> None:
    wrong = {2: Reply("no"), 1002: Reply(raw="{torn"), 3: Reply(""), 4: Reply(refusal="no"), 5: Reply(status=400)}
    never = {7: Reply("no"), 1007: Reply("x", finish_reason="length"), 2007: Reply("no")}
    server.otherwise = lambda request: (wrong | never).get(request["seed"], Reply(f"answer {request['seed'] % 1000}"))
    asked = ask_until(questions(open_client(server, tmp_path, concurrency=4), 8))
    assert [(question.number, text) for question, text in asked.values] == [
        (number, f"answer {number}") for number in (0, 1, 2, 3, 4, 6)
    ]
    assert [fault.filter for fault in asked.dropped] == ["failed", "wrong"]
    assert len(server.requests) == 8 + 4 + 2
    # Over a finished cache only the failure is asked for again.
    again = ask_until(questions(open_client(server, tmp_path), 8))
    assert again.values == asked.values and len(server.requests) == 8 + 4 + 2 + 1
