"""The chat-model client against a loopback server: retries, budget, cache and many requests."""

import json
import sqlite3
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults import raises
from llm_server import KEY, LLMServer, Reply, assert_no_key, llm_server, open_client
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, AnswerError, LLMConfig, Outcome, Questions, ask_all, estimate_cost
from skilltrain.llm.answers import DATABASE, Completion, Request, Usage, estimate_tokens
from skilltrain.llm.budget import Budget
from skilltrain.llm.client import in_threads
from skilltrain.llm.settings import BudgetConfig, Prices
from skilltrain.papers.r3.rewrite import Rewrite

SOON = {"Retry-After": "0.01"}
THIRTY = {"prompt_tokens": 20, "completion_tokens": 10}


@dataclass(frozen=True)
class Number:
    """An item of a toy stage. A usable answer holds its number."""

    number: int
    query_id: str = "q"
    skill_id: str = "s"


def number_questions(llm: LLM, num_items: int, max_attempts: int = 1) -> Questions[Number, str]:
    """Questions whose seed is the item's number, plus 1,000 for each further attempt."""

    def read(item: Number, answer: str) -> str:
        if str(item.number) not in answer:
            raise AnswerError("wrong", "another number")
        return answer

    return Questions(
        llm=llm,
        items=[Number(number) for number in range(num_items)],
        prompt=lambda item: ("Be brief.", "Say hello."),
        seed=lambda item, attempt: item.number + 1000 * attempt,
        read=read,
        max_attempts=max_attempts,
        answer_tokens=100,
        description="asking",
    )


def ask_numbers(llm: LLM, num_items: int) -> Outcome[Number, str]:
    return ask_all(number_questions(llm, num_items))


def faults(outcome: Outcome[Number, str]) -> list[str]:
    return [row.filter for row in outcome.dropped]


def complete(llm: LLM, seed: int = 0, system: str = "", user: str = "Say hello.") -> Completion:
    return llm.complete(Request(system, user, seed))


def config_of(**settings: Any) -> LLMConfig:
    return validate(LLMConfig, {"model": "m", **settings}, "recipe.yaml")


# One request --------------------------------------------------------------------------------------


def test_completion_has_text_with_usage(server: LLMServer):
    server.script = [Reply("Hello.", finish_reason="length")]

    answer = complete(open_client(server), system="Be brief.")

    # Three bytes a token and eight a message: ceil(9/3) + ceil(10/3) + 16 read, ceil(6/3) written.
    assert answer == Completion("Hello.", "length", 23, 2)


def test_request_carries_all_parameters(server: LLMServer):
    complete(open_client(server, temperature=0.5, top_p=0.9, max_tokens=7), 3, "Be brief.")

    assert server.authorizations == [f"Bearer {KEY}"]
    assert server.requests == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Say hello."},
            ],
            "seed": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 7,
        }
    ]


@pytest.mark.parametrize(
    ("reply", "text", "finish_reason"),
    [
        (Reply(f"Your key is {KEY}."), "Your key is [key].", "stop"),
        (Reply("<think>One\nor two?</think>\n3"), "\n3", "stop"),
        (Reply("<think>cut"), "<think>cut", "stop"),
        (Reply(raw='{"choices": [{"message": {"content": "\\ud83d"}}]}'), "\ufffd", "stop"),
        (Reply(refusal="I won't."), "I won't.", "refusal"),
        (Reply("", finish_reason="content_filter"), "", "refusal"),
    ],
)
def test_answer_text_is_cleaned(server: LLMServer, reply: Reply, text: str, finish_reason: str):
    server.script = [reply]

    answer = complete(open_client(server))

    assert (answer.text, answer.finish_reason) == (text, finish_reason)


def test_thoughts_count_as_written_tokens(server: LLMServer):
    server.script = [Reply("<think>One or two?</think>3", usage=None)]

    answer = complete(open_client(server))

    assert answer.num_completion_tokens == estimate_tokens("<think>One or two?</think>3")


def test_passing_errors_are_tried_again(server: LLMServer):
    server.script = [
        Reply(status=429, headers=SOON),
        Reply(status=500, headers=SOON),
        Reply(drop=True),
        Reply("ok"),
    ]

    answer = complete(open_client(server, max_retries=3))

    assert answer.text == "ok"
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "num_requests"),
    [
        (Reply(status=500, headers=SOON), 2),
        (Reply(status=503, headers={"Retry-After": "inf"}), 2),
        (Reply(status=429, headers=SOON), 2),
        (Reply(status=400), 1),
        (Reply(status=413), 1),
        (Reply(delay=1.0), 2),  # timed out
        (Reply(cut=True), 2),
        (Reply(drop=True), 2),
    ],
)
def test_lasting_error_drops_one_item(server: LLMServer, reply: Reply, num_requests: int):
    server.otherwise = lambda request: reply
    # A slow machine must not time out for other replies.
    llm = open_client(server, max_retries=1, timeout=0.2 if reply.delay else 60.0)

    outcome = ask_numbers(llm, 1)

    assert faults(outcome) == ["failed"]
    assert len(server.requests) == num_requests
    assert llm.budget.used == Usage()


@pytest.mark.parametrize(
    "raw",
    [
        "{torn",
        '{"choices": []}',
        '{"choices": null}',
        '{"choices": [{"message": {"content": 3}}]}',
        "[]",
        '"text"',
        '{"error": 1}',
        "<html>",
        "[" * 100_000,
    ],
)
def test_malformed_reply_drops_one_item(server: LLMServer, raw: str):
    server.otherwise = lambda request: Reply(raw=raw)

    outcome = ask_numbers(open_client(server, max_retries=1), 1)

    assert faults(outcome) == ["malformed"]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (
            Reply(status=401, raw=json.dumps({"error": {"message": f"bad key {KEY}"}})),
            "key-refused",
        ),
        (Reply(status=403), "key-refused"),
        (Reply(status=404), "unknown-model"),
        (Reply(status=429, code="insufficient_quota"), "no-credit"),
    ],
)
def test_error_of_every_request_ends_run(server: LLMServer, reply: Reply, code: str):
    server.otherwise = lambda request: reply

    with raises(code) as failure:
        ask_numbers(open_client(server, concurrency=1), 9)

    assert failure.value.where == server.base_url
    assert len(server.requests) == 1
    assert KEY not in "".join(traceback.format_exception(failure.value))  # shown by --debug


def test_failed_request_never_shows_key(server: LLMServer):
    server.otherwise = lambda request: Reply(
        status=400, raw=json.dumps({"error": {"message": f"Bearer {KEY}"}})
    )

    with pytest.raises(AnswerError, match=r"Bearer \[key\]") as failure:
        complete(open_client(server))

    assert KEY not in "".join(traceback.format_exception(failure.value))


def test_missing_server_is_named():
    with llm_server() as stopped:
        llm = open_client(stopped)

    with raises("server-unreachable") as failure:
        complete(llm)

    assert failure.value.where == stopped.base_url


def test_only_openai_needs_key(server: LLMServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY")

    with raises("missing-key"):
        complete(LLM(config_of(cache=None)))

    assert complete(open_client(server)).text == "answer 0"


@pytest.mark.parametrize("key", ["schlüssel-1234", "sk-1234\nsk-5678"])
def test_key_unfit_for_header_is_refused(monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("OPENAI_API_KEY", key)

    with raises("invalid-key") as failure:
        LLM(config_of(cache=None))

    assert key not in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key_env": KEY}, "api_key_env"),
        ({"api_key_env": "skabcdef"}, "api_key_env"),
        ({"base_url": f"http://u:{KEY}@h/v1"}, "base_url"),
        ({"base_url": f"http://h/v1?key={KEY}"}, "base_url"),
        ({"base_url": "localhost:11434"}, "give a URL"),
        ({"base_url": "http://h:x/v1"}, "give a URL"),
    ],
)
def test_key_or_broken_url_in_recipe_is_refused(settings: dict[str, str], message: str):
    with pytest.raises(SkilltrainError, match=message) as failure:
        config_of(**settings)

    assert KEY not in str(failure.value)
    assert "skabcdef" not in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "smollm2"}, "removed: use kind openai with the base_url of a local server"),
        ({"mode": "batch"}, r"unknown key 'llm.mode' \(removed: .*no Batch API"),
        ({"poll_seconds": 5}, r"unknown key 'llm.poll_seconds' \(removed: .*no Batch API"),
        ({"batch_size": 5}, r"unknown key 'llm.batch_size' \(removed: .*no Batch API"),
    ],
)
def test_removed_setting_names_its_replacement(settings: dict[str, Any], message: str):
    values = {"queries": "queries", "pool": "pool", "llm": settings, "out": "out"}

    with pytest.raises(SkilltrainError, match=message):
        validate(Rewrite, values, "recipe.yaml")


# Many requests ------------------------------------------------------------------------------------


def test_threads_yield_every_result():
    results = in_threads(abs, range(-50, 0), 8)

    assert sorted(results) == list(range(1, 51))


def test_one_thread_keeps_the_order():
    results = in_threads(str, range(20), 1)

    assert list(results) == [str(number) for number in range(20)]


def test_threads_are_no_more_than_items():
    num_threads = threading.active_count()
    counts = in_threads(lambda _: threading.active_count() - num_threads, range(3), 1000)

    # The pool has three threads of its own besides.
    assert max(counts) <= 6


def test_error_stops_threads():
    started: list[int] = []
    finished: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        if item == 5:
            raise ValueError("five")
        time.sleep(0.001)
        return item

    with pytest.raises(ValueError, match="five"):
        finished.extend(in_threads(work, range(10_000), 3))

    assert len(started) < 1000
    assert sorted([*finished, 5]) == sorted(started)


def test_too_many_parallel_requests_are_refused():
    with raises("invalid-setting"):
        config_of(concurrency=100_000)


def test_requests_keep_to_concurrency(server: LLMServer):
    server.otherwise = lambda request: Reply(delay=0.05)

    ask_numbers(open_client(server, concurrency=3), 12)

    assert 1 <= server.most_busy <= 3


def test_many_failures_in_row_end_run(server: LLMServer):
    server.script = [*[Reply(status=500)] * 19, Reply("ok")]
    server.otherwise = lambda request: Reply(status=500)

    with raises("server-failing"):
        ask_numbers(open_client(server, concurrency=1), 50)

    assert len(server.requests) == 20 + 20


def test_answers_under_way_survive_end_of_run(server: LLMServer, tmp_path: Path):
    slow = Reply("0 is kept", delay=0.2, until=lambda: len(server.requests) == 21)
    server.otherwise = lambda request: slow if request["seed"] == 0 else Reply(status=500)

    with raises("server-failing"):
        ask_numbers(open_client(server, tmp_path, concurrency=2), 50)

    outcome = ask_numbers(open_client(server, tmp_path), 1)

    assert outcome.values == [(Number(0), "0 is kept")]
    assert len(server.requests) == 21


# Tokens, dollars and the budget -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("整理", 2), ("整理PDF", 3)],
)
def test_tokens_are_estimated_by_hand(text: str, num_tokens: int):
    assert estimate_tokens(text) == num_tokens


@pytest.mark.parametrize(
    ("settings", "dollars"),
    [
        ({"prices": {"prompt": 1, "completion": 2}}, 3.0),
        ({"model": "gpt-4o-mini"}, 0.75),
        ({"model": "gpt-4o-mini", "prices": {"prompt": 1, "completion": 2}}, 3.0),
        ({"model": "gpt-4o-mini", "base_url": "http://localhost:8000/v1"}, None),
        ({"model": "gpt-99"}, None),
    ],
)
def test_price_of_two_million_tokens(settings: dict[str, Any], dollars: float | None):
    budget = Budget(config_of(**settings))

    assert budget.price(Usage(10**6, 10**6)) == dollars


def test_dollar_limit_needs_price():
    with raises("missing-setting"):
        Budget(LLMConfig(model="m", budget=BudgetConfig(max_dollars=1.0)))


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        0,
        "much",
        {"prompt_tokens": 0, "completion_tokens": None},
        {"prompt_tokens": -5, "completion_tokens": "7"},
    ],
)
def test_unreported_tokens_are_estimated(server: LLMServer, usage: Any):
    server.otherwise = lambda request: Reply("answer text", usage=usage)
    llm = open_client(server)

    complete(llm)

    # 3 tokens and 4 of the chat format read, 3 written.
    assert llm.budget.used == Usage(7, 3)


@pytest.mark.parametrize(
    ("limit", "prices"),
    [({"max_tokens": 150}, None), ({"max_dollars": 0.0002}, {"prompt": 1.0, "completion": 2.0})],
)
def test_nothing_is_sent_over_budget(
    server: LLMServer, limit: dict[str, float], prices: dict[str, float] | None
):
    server.otherwise = lambda request: Reply(str(request["seed"]), usage=THIRTY)
    llm = open_client(server, concurrency=1, budget=limit, prices=prices)

    outcome = ask_numbers(llm, 10)

    # 30 tokens or 0.00004 dollars each.
    assert faults(outcome) == ["budget"] * 5
    assert len(server.requests) == 5


def test_budget_is_exceeded_by_concurrency_at_most(server: LLMServer):
    server.otherwise = lambda request: Reply(str(request["seed"]), usage=THIRTY, delay=0.02)
    llm = open_client(server, concurrency=4, budget={"max_tokens": 150})

    outcome = ask_numbers(llm, 30)

    assert 5 <= len(server.requests) < 5 + 4
    assert len(outcome.values) == len(server.requests)


def test_cached_answers_count_towards_budget(server: LLMServer, tmp_path: Path):
    server.otherwise = lambda request: Reply(str(request["seed"]), usage=THIRTY)
    settings = {"budget": {"max_tokens": 150}, "concurrency": 4}
    first = ask_numbers(open_client(server, tmp_path, **settings), 30)
    num_requests = len(server.requests)

    second = ask_numbers(open_client(server, tmp_path, **settings), 30)

    assert second == first
    assert len(server.requests) == num_requests


# The cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.5},
        {"temperature": None},
        {"top_p": 0.9},
        {"max_tokens": 7},
        {"model": "n"},
    ],
)
def test_other_parameters_ask_again(server: LLMServer, tmp_path: Path, changed: dict[str, Any]):
    ask_numbers(open_client(server, tmp_path), 1)

    ask_numbers(open_client(server, tmp_path, **changed), 1)

    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "changed",
    [{"concurrency": 3}, {"timeout": 7}, {"max_retries": 1}],
)
def test_other_pace_asks_nothing_again(server: LLMServer, tmp_path: Path, changed: dict[str, Any]):
    ask_numbers(open_client(server, tmp_path), 1)

    ask_numbers(open_client(server, tmp_path, **changed), 1)

    assert len(server.requests) == 1


def test_other_server_is_asked_again(server: LLMServer, tmp_path: Path):
    ask_numbers(open_client(server, tmp_path), 1)

    with llm_server() as other:
        ask_numbers(open_client(other, tmp_path), 1)

    assert len(other.requests) == 1


@pytest.mark.parametrize(
    ("reply", "is_cached"), [(Reply(status=500), False), (Reply(raw="{torn"), True)]
)
def test_only_answers_are_cached(server: LLMServer, tmp_path: Path, reply: Reply, is_cached: bool):
    server.script = [reply]
    first = ask_numbers(open_client(server, tmp_path), 1)

    second = ask_numbers(open_client(server, tmp_path), 1)

    assert (second == first) == is_cached
    assert len(server.requests) == 2 - is_cached


def test_cache_row_without_text_is_asked_again(server: LLMServer, tmp_path: Path):
    ask_numbers(open_client(server, tmp_path), 1)
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("""UPDATE answers SET answer = '{"malformed": "no completion"}'""")

    outcome = ask_numbers(open_client(server, tmp_path), 1)

    assert outcome.values == [(Number(0), "answer 0")]
    assert len(server.requests) == 2


def test_cache_holds_no_key(server: LLMServer, tmp_path: Path):
    server.otherwise = lambda request: Reply(f"{request['seed']} {KEY}")

    ask_numbers(open_client(server, tmp_path), 3)

    assert_no_key(tmp_path)


def test_refusing_disk_ends_run(server: LLMServer, tmp_path: Path):
    (tmp_path / "cache").write_text("a file where the folder should be")

    with raises("cannot-write"):
        ask_numbers(open_client(server, tmp_path / "cache"), 1)


# Asking about many items --------------------------------------------------------------------------


def test_estimate_counts_cached_answers(server: LLMServer, tmp_path: Path):
    llm = open_client(server, tmp_path)
    ask_numbers(llm, 2)

    cost = estimate_cost(number_questions(llm, 5))

    # "Be brief." and "Say hello." have 9 and 10 letters: 3 tokens each, and 4 of the chat format.
    assert cost == {
        "model": "m",
        "num_requests": 3,
        "num_answered_before": 2,
        "num_prompt_tokens": 3 * 14,
        "num_completion_tokens": 3 * 100,
        "dollars": None,
        "budget": None,
    }
    assert len(server.requests) == 2


def test_estimate_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    llm = LLM(LLMConfig(cache=tmp_path / "none", prices=Prices(prompt=1, completion=2)))

    cost = estimate_cost(number_questions(llm, 1))

    assert cost["dollars"] == pytest.approx((14 + 2 * 100) / 1e6)
    assert not (tmp_path / "none").exists()


def test_unusable_answers_are_asked_again_with_reason(server: LLMServer):
    script = {0: Reply("no"), 1000: Reply(raw="{torn")}
    server.otherwise = lambda request: script.get(request["seed"], Reply("0 it is"))

    outcome = ask_all(number_questions(open_client(server), 1, max_attempts=3))

    prompts = [request["messages"][1]["content"] for request in server.requests]
    again = "Say hello.\nAn earlier answer was turned down: {}. Write another one."

    assert outcome.values == [(Number(0), "0 it is")]
    assert outcome.dropped == []
    assert prompts == [
        "Say hello.",
        again.format("another number"),
        again.format("the server's reply is no chat completion"),
    ]


@pytest.mark.parametrize(
    ("reply", "fault", "num_requests"),
    [
        (Reply("no"), "wrong", 3),
        (Reply(""), "empty", 3),
        (Reply(refusal="no"), "refused", 3),
        (Reply("0 cut o", finish_reason="length"), "truncated", 3),
        (Reply(raw="{torn"), "malformed", 3),
        (Reply(status=400), "failed", 1),
    ],
)
def test_item_without_usable_answer_is_dropped(
    server: LLMServer, reply: Reply, fault: str, num_requests: int
):
    server.otherwise = lambda request: reply

    outcome = ask_all(number_questions(open_client(server), 1, max_attempts=3))

    assert faults(outcome) == [fault]
    assert len(server.requests) == num_requests


def test_outcome_ignores_speed_of_server(server: LLMServer):
    def reply(request: dict[str, Any]) -> Reply:
        number = request["seed"] % 1000
        is_wrong = request["seed"] < 1000 and number % 3 == 1
        return Reply("no" if is_wrong else f"answer {number}", delay=0.02 * (8 - number))

    server.otherwise = reply

    outcome = ask_all(number_questions(open_client(server), 8, max_attempts=2))

    assert outcome.values == [(Number(number), f"answer {number}") for number in range(8)]


def test_finished_run_repeats_only_failures(server: LLMServer, tmp_path: Path):
    replies = {2: Reply("no"), 5: Reply(status=400)}
    server.otherwise = lambda request: replies.get(
        request["seed"], Reply(f"answer {request['seed'] % 1000}")
    )
    first = ask_all(number_questions(open_client(server, tmp_path), 8, max_attempts=3))
    server.requests.clear()

    second = ask_all(number_questions(open_client(server, tmp_path), 8, max_attempts=3))

    assert second == first
    assert [request["seed"] for request in server.requests] == [5]


def test_missing_server_can_drop_all_items(capsys: pytest.CaptureFixture[str]):
    with llm_server() as stopped:
        questions = number_questions(open_client(stopped), 3)

    outcome = ask_all(questions, drop_if_down=True)

    assert faults(outcome) == ["down"] * 3
    assert "warning: asking: the run goes on without the chat model" in capsys.readouterr().err
