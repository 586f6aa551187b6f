"""The Batch API against a real server on loopback: no request submitted twice, none unaccounted for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llm_server import ASK, KEY, LLMServer, Reply, ask, assert_no_key, open_client, texts
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLM, Answers, Request, Usage

BUSY = Reply(status=500, headers={"Retry-After": "0.01"})


def client(server: LLMServer, cache: Path | None, **changed: Any) -> LLM:
    return open_client(
        server, cache, **{"mode": "batch", "max_retries": 2, "poll_seconds": 0.01, **changed}
    )


def notes(server: LLMServer, cache: Path) -> dict[str, list[str]]:
    return Answers(cache, {}).batches(server.base_url)


def seeds_sent(server: LLMServer) -> Counter[int]:
    return Counter(request["seed"] for request in server.batched)


def test_a_batch_goes_up_is_waited_for_and_fetched(server: LLMServer, tmp_path: Path) -> None:
    llm = client(server, tmp_path)
    assert ask(llm, *range(5)) == texts(*range(5))
    assert server.calls == [
        "POST /files",
        "GET /batches",
        "POST /batches",
        *["GET /batches/id"] * 3,
        "GET /files",
    ]
    (batch,) = server.batches.values()
    assert (batch["endpoint"], batch["completion_window"]) == ("/v1/chat/completions", "24h")
    line = json.loads(server.files["file-0"].splitlines()[0])
    assert (line["method"], line["url"], line["body"]["model"]) == (
        "POST",
        "/v1/chat/completions",
        "m",
    )
    assert llm.budget.used.prompt > 0 and llm.budget.reserved == Usage()
    assert notes(server, tmp_path) == {}
    assert_no_key(tmp_path)


def test_live_and_batch_share_their_answers(server: LLMServer, tmp_path: Path) -> None:
    assert ask(client(server, tmp_path), 0, 1) == texts(0, 1)
    assert ask(client(server, tmp_path, mode="live"), 0, 1, 2) == texts(0, 1, 2)
    assert ask(client(server, tmp_path), 2, 0) == texts(2, 0)
    assert [request["seed"] for request in server.requests] == [2] and len(server.batches) == 1


def test_many_requests_go_in_several_batches_one_after_the_other(
    server: LLMServer, tmp_path: Path
) -> None:
    assert ask(client(server, tmp_path, batch_size=3), *range(10)) == texts(*range(10))
    assert [batch["request_counts"]["total"] for batch in server.batches.values()] == [3, 3, 3, 1]
    second = [i for i, call in enumerate(server.calls) if call == "POST /batches"][1]
    assert "GET /files" in server.calls[:second]


def test_partial_failures_are_each_requests_own(server: LLMServer, tmp_path: Path) -> None:
    replies = {1: Reply(status=500), 2: Reply(raw="no completion"), 3: Reply(refusal="no")}
    server.otherwise = lambda request: replies.get(
        request["seed"], Reply(f"answer {request['seed']}")
    )
    server.leaves_out = lambda request: request["seed"] == 4
    llm = client(server, tmp_path)
    found = dict(llm.complete_all(Request(*ASK, seed) for seed in range(6)))
    assert [getattr(found[i], "kind", "") for i in range(6)] == [
        "",
        "failed",
        "malformed",
        "",
        "failed",
        "",
    ]
    assert "scripted 500 (status 500)" in str(found[1])
    assert "hold no answer" in str(found[4])
    assert llm.budget.reserved == Usage()
    server.otherwise, server.leaves_out = (
        (lambda request: Reply(f"answer {request['seed']}")),
        (lambda request: False),
    )
    assert ask(client(server, tmp_path), 0, 1, 2, 4, 5) == [*texts(0, 1), "malformed", *texts(4, 5)]
    assert seeds_sent(server) == {0: 1, 1: 2, 2: 1, 3: 1, 4: 2, 5: 1}


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_what_a_batch_did_not_get_to_is_said_to_be_expired(
    server: LLMServer, tmp_path: Path, end: str
) -> None:
    server.batch_steps = ["in_progress", end]
    server.leaves_out = lambda request: request["seed"] > 1
    assert ask(client(server, tmp_path), *range(4)) == [*texts(0, 1), "expired", "expired"]
    server.leaves_out, server.batch_steps = (lambda request: False), ["completed"]
    assert ask(client(server, tmp_path), *range(4)) == texts(*range(4))
    assert seeds_sent(server) == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_run_that_was_stopped_takes_its_batch_up_again(server: LLMServer, tmp_path: Path) -> None:
    server.faults = {"GET /batches/id": [BUSY] * 3}
    with pytest.raises(SkilltrainError, match="none is submitted twice"):
        ask(client(server, tmp_path), 0, 1)
    assert [*notes(server, tmp_path)] == ["file-0"]
    # Another choice of requests: what is under way is waited for, what is new goes up.
    assert ask(client(server, tmp_path), 3, 1, 2, 0) == texts(3, 1, 2, 0)
    assert seeds_sent(server) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert notes(server, tmp_path) == {}


@pytest.mark.parametrize("was_created", [True, False])
def test_a_kill_while_a_batch_is_created_submits_it_once(
    server: LLMServer, tmp_path: Path, was_created: bool
) -> None:
    """The note knows the file: what a kill between the server's answers leaves."""
    for number in range(5):
        ask(client(server, tmp_path), 10 + number)  # the server's list has several pages
    server.faults = {"POST /batches": [BUSY] * 3}
    with pytest.raises(SkilltrainError, match="cannot create a batch"):
        ask(client(server, tmp_path), 0, 1)
    (file_id,) = notes(server, tmp_path)
    if was_created:
        server.create_batch({"input_file_id": file_id})
        for _ in range(3):
            server.create_batch({"input_file_id": "file-0"})
    num_batches = len(server.batches)
    assert ask(client(server, tmp_path), 0, 1) == texts(0, 1)
    assert len(server.batches) == num_batches + (not was_created)
    assert seeds_sent(server)[0] == seeds_sent(server)[1] == 1


def test_passing_faults_are_waited_off_and_make_no_second_batch(
    server: LLMServer, tmp_path: Path
) -> None:
    server.faults = {
        name: [BUSY] for name in ("POST /files", "POST /batches", "GET /batches/id", "GET /files")
    }
    server.faults["POST /batches"].append(
        Reply(drop=True)
    )  # it has made the batch, and we do not know
    assert ask(client(server, tmp_path), 0, 1) == texts(0, 1)
    assert len(server.batches) == 1 and seeds_sent(server) == {0: 1, 1: 1}


def test_a_reply_that_is_no_batch_is_named_and_the_batch_stays_noted(
    server: LLMServer, tmp_path: Path
) -> None:
    for seed, raw in enumerate(("{torn", '{"no": "batch"}', "[]")):
        server.faults = {"GET /batches/id": [Reply(raw=raw)]}
        with pytest.raises(SkilltrainError, match="cannot look at a batch"):
            ask(client(server, tmp_path), seed)
        assert (
            ask(client(server, tmp_path), seed) == texts(seed) and len(server.batches) == seed + 1
        )
    server.faults = {
        "GET /files": [Reply(raw='{"custom_id": "x"}\n{torn\n\n[]\n')]
    }  # an output file's lines
    assert ask(client(server, tmp_path), 8, 9) == ["failed", "failed"]


def test_the_budget_holds_over_batches(server: LLMServer, tmp_path: Path) -> None:
    server.otherwise = lambda request: Reply(
        f"answer {request['seed']}", usage={"prompt_tokens": 20, "completion_tokens": 10}
    )
    llm = client(server, tmp_path, max_tokens=26, budget={"max_tokens": 250})
    # 100 at most, 30 in fact: two fit at first; when 60 are used one more, at 90 one, at 120, at 150; at 180 none.
    assert ask(llm, *range(8)) == [*texts(*range(6)), "budget", "budget"]
    assert llm.budget.used.total == 180
    assert len(server.batched) == 6


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        (
            "POST /files",
            Reply(status=401, raw=json.dumps({"error": {"message": f"bad {KEY}"}})),
            "the key was refused",
        ),
        ("POST /files", Reply(status=404), r"no Batch API: llm\.mode=live"),
        ("POST /batches", Reply(status=400), r"cannot create a batch: .*scripted 400"),
        (None, None, r"refused batch batch-0: line is bad \(line 2\)"),
    ],
)
def test_what_the_server_refuses_is_explained_and_leaves_no_note(
    server: LLMServer, tmp_path: Path, name: str | None, fault: Reply | None, message: str
) -> None:
    server.faults, server.batch_steps = (
        ({name: [fault]} if name and fault else {}),
        ["validating", "failed"],
    )
    with pytest.raises(SkilltrainError, match=message) as failure:
        ask(client(server, tmp_path), 0)
    assert KEY not in str(failure.value) and notes(server, tmp_path) == {}


def test_a_batch_needs_a_folder_for_its_notes(server: LLMServer) -> None:
    with pytest.raises(SkilltrainError, match=r"set llm\.cache"):
        client(server, None)
