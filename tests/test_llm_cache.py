"""The cache: nobody pays twice, whatever was torn, whoever else writes, whichever order the answers come in."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_server import LLMServer, Reply, llm_server
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm import (
    LLM,
    Completion,
    CompletionCache,
    CompletionError,
    Message,
    OpenAIConfig,
    Request,
    cost_of,
    open_llm,
)
from skilltrain.llm import cache as cache_module

KEY = "sk-secret-0123456789"
ASK = (Message("user", "Say hello."),)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with llm_server() as running:
        running.otherwise = lambda request: Reply(f"answer {request['seed']}")
        yield running


def client(server: LLMServer, cache: Path, model: str = "m", concurrency: int = 1) -> LLM:
    return open_llm(
        OpenAIConfig(model=model, base_url=server.base_url, cache=cache, max_retries=0, concurrency=concurrency)
    )


def ask(llm: LLM, *seeds: int) -> list[str]:
    """Texts, by position."""
    found = dict(llm.complete_all(Request(ASK, seed) for seed in seeds))
    return [answer.text if isinstance(answer, Completion) else answer.kind for _, answer in sorted(found.items())]


def test_a_question_is_asked_once_for_each_model_prompt_and_seed(server: LLMServer, tmp_path: Path) -> None:
    assert ask(client(server, tmp_path), 0) == ask(client(server, tmp_path), 0) == ["answer 0"]
    assert len(server.requests) == 1
    ask(client(server, tmp_path), 1)
    ask(client(server, tmp_path, model="n"), 0)
    list(client(server, tmp_path).complete_all([Request((*ASK, Message("user", "!")), 0)]))
    assert len(server.requests) == 4
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert kept.count(b"\n") == 4
    assert KEY.encode() not in kept


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"temperature": None}, {"max_tokens": 7}, {"base_url": "x"}])
def test_whatever_decides_an_answer_asks_anew_and_nothing_else_does(
    server: LLMServer, tmp_path: Path, changed: dict[str, Any]
) -> None:
    def texts(**values: Any) -> list[str]:
        settings = {"model": "m", "base_url": server.base_url, "cache": tmp_path, "max_retries": 0}
        return ask(open_llm(validate(OpenAIConfig, settings | values, "test")), 0)

    texts()
    texts(concurrency=3, timeout=7, requests_per_minute=600, budget={"max_tokens": 10**6}, batch={"max_open": 1})
    assert len(server.requests) == 1
    with llm_server() as other:
        texts(**changed | ({"base_url": other.base_url} if "base_url" in changed else {}))
        assert len(server.requests) + len(other.requests) == 2


def test_failures_are_not_kept(server: LLMServer, tmp_path: Path) -> None:
    server.script = [Reply(status=500), Reply(raw="{torn")]
    llm = client(server, tmp_path)
    assert [ask(llm, 0), ask(llm, 0), ask(llm, 0)] == [["failed"], ["malformed"], ["answer 0"]]


def test_answers_that_come_out_of_order_are_kept_each_under_its_own_question(server: LLMServer, tmp_path: Path) -> None:
    server.otherwise = lambda request: Reply(f"answer {request['seed']}", delay=0.05 * (7 - request["seed"]))
    texts = [f"answer {seed}" for seed in range(8)]
    assert ask(client(server, tmp_path, concurrency=8), *range(8)) == texts
    assert ask(client(server, tmp_path, concurrency=8), *range(8)) == texts
    assert len(server.requests) == 8


@pytest.mark.parametrize("num_lost", [1, 2, 30])
def test_a_torn_last_line_costs_one_answer(server: LLMServer, tmp_path: Path, num_lost: int) -> None:
    ask(client(server, tmp_path), 0, 1, 2)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-num_lost])
    assert ask(client(server, tmp_path), 0, 1, 2) == ["answer 0", "answer 1", "answer 2"]
    # A lost newline alone leaves the last answer whole.
    assert len(server.requests) == (3 if num_lost == 1 else 4)


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    lines = (
        b'\xff\n[]\n{"key": 1}\n\n{"key": "n", "completion": {"text": 5}}\n{"key": "k", "completion": {"text": "t"}}\n'
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    cache = CompletionCache(tmp_path)
    assert cache.get("k") == Completion("t")
    assert cache.get("n") is None


def test_two_at_once_share_their_answers(server: LLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SECONDS_BETWEEN_LOOKS", 0.0)
    one, other = client(server, tmp_path), client(server, tmp_path)
    assert ask(one, 0, 1) == ask(other, 0, 1)
    assert ask(other, 2) == ask(one, 2)
    assert len(server.requests) == 3
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_many_writers_never_mix(tmp_path: Path) -> None:
    cache = CompletionCache(tmp_path / "shared")

    def fill(start: int) -> None:
        for number in range(start, start + 50):
            cache.put(f"k{number}", Completion("x" * number))

    threads = [threading.Thread(target=fill, args=(50 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = CompletionCache(tmp_path / "shared")
    assert all(again.get(f"k{number}") == Completion("x" * number) for number in range(200))


def test_what_the_disk_refuses_ends_the_run(server: LLMServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SkilltrainError, match="cannot write"):
        ask(client(server, tmp_path / "cache"), 0)


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompletionCache(tmp_path)
    cache.put("a", Completion("kept"))
    write = cache_module.os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) <= 10:
            raise OSError(28, "No space left on device")
        return write(handle, data[:-10])

    monkeypatch.setattr(cache_module.os, "write", full)
    with pytest.raises(SkilltrainError, match="No space left"):
        cache.put("b", Completion("lost"))
    monkeypatch.undo()
    cache.put("c", Completion("kept too"))
    again = CompletionCache(tmp_path)
    assert [again.get(key) for key in "abc"] == [Completion("kept"), None, Completion("kept too")]


def test_an_estimate_asks_nobody_and_knows_what_is_kept(server: LLMServer, tmp_path: Path) -> None:
    llm = client(server, tmp_path)
    ask(llm, 0, 1)
    found = cost_of(llm, (Request(ASK, seed) for seed in range(5)), num_completion_tokens=100)
    assert len(server.requests) == 2
    # "Say hello." has 10 letters: 3 tokens, and 4 of the chat format; three requests are new.
    assert found == {
        "model": "m", "num_requests": 3, "num_answered_before": 2, "num_prompt_tokens": 21,
        "num_completion_tokens": 300, "dollars": None, "budget": None,
    }  # fmt: skip


def test_an_estimate_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = cost_of(open_llm(OpenAIConfig(cache=None)), [Request(ASK, 0)], num_completion_tokens=1000)
    # 7 tokens at $0.15 and 1,000 at $0.60 a million.
    assert found["dollars"] == round(7 * 0.15e-6 + 1000 * 0.60e-6, 6)


def test_a_failed_request_is_one_requests_fault(server: LLMServer, tmp_path: Path) -> None:
    server.script = [Reply(status=400)]
    ((_, answer),) = client(server, tmp_path).complete_all([Request(ASK, 0)])
    assert isinstance(answer, CompletionError) and "scripted 400" in answer.reason
