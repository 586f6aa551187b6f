"""Tokens, dollars and the budget that no run overshoots."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_server import ASK, LLMServer, Reply, ask, open_client
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, Budget, BudgetConfig, CompletionError, OpenAIConfig, Prices, Request, Usage, prices_of
from skilltrain.llm.answers import estimate_tokens
from skilltrain.llm.budget import most_of

MAX_TOKENS = 26
MOST = 100  # of "Say hello.", 10 bytes: 10 + 32 + 32 tokens read, 26 written


def client(server: LLMServer, cache: Path | None = None, **changed: Any) -> LLM:
    return open_client(server, cache, max_tokens=MAX_TOKENS, **changed)


def kinds(llm: LLM, num_requests: int, first: int = 0) -> str:
    """One letter an answer, by position: the first of its text, or of what went wrong."""
    return "".join(found[0] for found in ask(llm, *range(first, first + num_requests)))


def test_tokens_are_estimated_by_letters() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "整理", "整理PDF")] == [0, 1, 1, 2, 2, 3]
    assert most_of(Request(ASK, 0), MAX_TOKENS) == Usage(74, 26)


def test_dollars_by_hand() -> None:
    assert Budget(BudgetConfig(), Prices(prompt=0.15, completion=0.60)).price(Usage(2_000_000, 500_000)) == (
        pytest.approx(0.60)
    )
    assert Budget(BudgetConfig(), None).price(Usage(1, 1)) is None


def test_prices_are_known_for_openais_own_server_only() -> None:
    assert prices_of(OpenAIConfig(model="gpt-4o-mini")) == Prices(prompt=0.15, completion=0.60)
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", mode="batch")) == Prices(prompt=0.075, completion=0.30)
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", base_url="http://localhost:8000/v1")) is None
    assert prices_of(OpenAIConfig(model="gpt-99")) is None
    own = Prices(prompt=1, completion=2)
    assert prices_of(OpenAIConfig(model="gpt-4o-mini", mode="batch", prices=own)) == own


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)), max_size=30), st.integers(1, 3000))
def test_what_was_reserved_first_is_never_overshot(uses: list[tuple[int, int]], limit: int) -> None:
    budget = Budget(BudgetConfig(max_tokens=limit, max_dollars=1), Prices(prompt=100, completion=500))
    under_way: list[tuple[Usage, Usage]] = []
    for prompt, completion in uses:
        most = Usage(prompt, 100)
        if budget.reserve(most):
            under_way.append((most, Usage(prompt, completion)))
        elif under_way:
            budget.settle(*under_way.pop(0))
        assert (budget.used + budget.reserved).total <= limit
        assert (budget.price(budget.used + budget.reserved) or 0) <= 1


@pytest.mark.parametrize("usage", [None, {}, 0, "much", {"prompt_tokens": 0, "completion_tokens": None},
                                   {"prompt_tokens": -5, "completion_tokens": "7"}])  # fmt: skip
def test_where_the_server_reports_no_tokens_our_estimate_counts(server: LLMServer, usage: Any) -> None:
    server.otherwise = lambda _: Reply("answer text", usage=usage)
    llm = client(server)
    assert kinds(llm, 2) == "aa"
    # 3 tokens and 4 of the chat format read, 3 written, twice.
    assert llm.budget.used == Usage(14, 6)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_requests_that_do_not_fit_are_not_sent_whatever_the_concurrency(server: LLMServer, concurrency: int) -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 10}
    server.otherwise = lambda request: Reply("answer", usage=usage, delay=0.02 * (request["seed"] % 3))
    llm = client(server, budget={"max_tokens": 250}, concurrency=concurrency)
    # 30 each: before the sixth 150 are used, and 100 more fit; before the seventh 180 are, and they do not.
    assert kinds(llm, 10) == "aaaaaabbbb"
    assert len(server.requests) == 6
    assert llm.budget.used.total == 180
    assert kinds(llm, 2, first=20) == "bb"


def test_a_dollar_limit_holds_and_needs_prices(server: LLMServer) -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 10}
    server.otherwise = lambda _: Reply("answer", usage=usage)
    # $74 and $52 at most, $20 and $20 in fact: before the third $80 are used; 126 more fit into 210, into 205 not.
    prices = {"prompt": 1e6, "completion": 2e6}
    llm = client(server, budget={"max_dollars": 206.0}, prices=prices, concurrency=1)
    assert kinds(llm, 4) == "aaab"
    assert llm.budget.price(llm.budget.used) == pytest.approx(120)
    with pytest.raises(SkilltrainError, match=r"set llm\.prices"):
        client(server, budget={"max_dollars": 1.0})


def test_a_run_taken_up_again_ends_where_it_would_have_ended(server: LLMServer, tmp_path: Path) -> None:
    server.otherwise = lambda _: Reply("answer", usage={"prompt_tokens": 20, "completion_tokens": 10})
    budget = {"max_tokens": 250}
    assert kinds(client(server, tmp_path, budget=budget), 3) == "aaa"
    assert kinds(client(server, tmp_path, budget=budget), 10) == "aaaaaabbbb"
    assert kinds(client(server, tmp_path, budget=budget), 10) == "aaaaaabbbb"
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("reply", "used"), [(Reply(cut=True), MOST), (Reply(drop=True), MOST), (Reply(raw="{"), MOST),
                        (Reply(delay=1), MOST), (Reply(status=500), 0), (Reply(status=429), 0), (Reply(status=400), 0)],
)  # fmt: skip
def test_what_the_server_may_charge_for_counts_as_the_longest_answer(
    server: LLMServer, reply: Reply, used: int
) -> None:
    server.otherwise = lambda _: reply
    llm = client(server, timeout=0.3)
    assert kinds(llm, 1) in "fm"
    assert llm.budget.used.total == used
    assert llm.budget.reserved == Usage()


def test_retries_are_paid_from_the_same_budget(server: LLMServer) -> None:
    server.otherwise = lambda _: Reply(cut=True)
    llm = client(server, budget={"max_tokens": 250}, max_retries=9)
    ((_, answer),) = llm.complete_all([Request(ASK, 0)])
    assert isinstance(answer, CompletionError) and answer.kind == "budget"
    assert "250 tokens" in answer.reason
    assert len(server.requests) == 2
