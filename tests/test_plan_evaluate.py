"""`--dry-run` of what ranks says what judges and embeddings APIs would take, and neither asks nor writes anything."""

from pathlib import Path
from typing import Any

import pytest

from benchmark_folders import write_ours, write_pool
from llm_server import LLMServer, Reply, chat, embeddings, llm_server
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import estimate_tokens
from skilltrain.records import Skill
from skilltrain.routing.candidates import CandidatesConfig
from skilltrain.routing.evaluate import EvaluateConfig, run_evaluate
from skilltrain.stages import dry_run

POOL = [Skill(f"s{i}", f"skill-{i}", "Sorts.", "Sorts invoices by month.") for i in range(7)]
TEXTS = {"q1": "sort my invoices", "q2": "整理发票", "q3": "sort my invoices"}
BM25 = {"name": "bm25", "rankers": [{"kind": "lexical"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    queries = [(query_id, text, "test") for query_id, text in TEXTS.items()]
    write_ours(tmp_path / "bench", queries, {query_id: {"s1": "required"} for query_id in TEXTS})
    write_pool(tmp_path / "pool", POOL)
    return tmp_path


def config_of(folder: Path, *systems: dict[str, Any]) -> EvaluateConfig:
    values = {
        "stage": "evaluate", "benchmark": str(folder / "bench"), "pool": str(folder / "pool"), "measures": ["Hit@1"],
        "out": str(folder / "out"), "systems": [BM25, *systems],
    }  # fmt: skip
    return validate(EvaluateConfig, values, "test")


def judged(server: LLMServer, cache: Path, **llm: Any) -> dict[str, Any]:
    select = {"kind": "select", "keep": 4, "llm": chat(server, cache, concurrency=4, **llm)}
    return {"name": "judged", "rankers": [{"kind": "lexical"}, select]}


def api(server: LLMServer, cache: Path, name: str = "api", **changed: Any) -> dict[str, Any]:
    source = {"model": "vectors", "base_url": server.base_url, "cache": str(cache), "batch_size": 3, **changed}
    return {"name": name, "rankers": [{"kind": "api"} | source]}


def test_what_is_planned_is_what_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = folder / "cache"
    with llm_server() as server:
        server.otherwise = lambda request: embeddings(request) if "input" in request else Reply("1")
        prices = {"prompt": 3.0, "completion": 5.0}
        config = config_of(
            folder, judged(server, cache, prices=prices), api(server, cache, prices={"prompt": 2, "completion": 0}),
            api(server, cache, "same again", prices={"prompt": 2, "completion": 0}),
        )  # fmt: skip
        plan = dry_run(config)
        assert server.requests == [] and not cache.exists() and not (folder / "out").exists()

        (folder / "out").mkdir()
        said_before = len(capsys.readouterr().err)
        run_evaluate(config, folder / "out")
        chats = [request for request in server.requests if "messages" in request]
        texts = [text for request in server.requests if "input" in request for text in request["input"]]
        num_vectors = len(server.requests) - len(chats)
        again = dry_run(config)["asked"]
    assert said_before and "9 texts" not in (said := capsys.readouterr().err)
    assert "7 texts to vectors, about" in said and "2 texts to vectors, about" in said
    assert (plan["num_queries"], plan["num_skills"], plan["num_systems"]) == (3, 7, 4)
    assert plan["asked"].keys() == {"judged", "api"}  # the third asks what the second has asked
    judge, encoding = plan["asked"]["judged"]["select"], plan["asked"]["api"]["api"]
    # All skills are of one length, so that any four cost the same.
    read = sum(estimate_tokens(m["content"]) + 4 for request in chats for m in request["messages"])
    assert (judge["num_requests"], judge["num_prompt_tokens"], judge["num_completion_tokens"]) == (3, read, 12)
    assert len(chats) == 3
    # 7 skills in 3 requests, and 2 queries, for one is asked twice.
    assert (encoding["num_requests"], encoding["num_texts"], encoding["num_kept_texts"]) == (3 + 1, 9, 0)
    assert (num_vectors, len(texts)) == (4, 9)
    assert encoding["num_prompt_tokens"] == sum(map(estimate_tokens, texts))
    assert plan["dollars"] == round((read * 3 + 12 * 5 + encoding["num_prompt_tokens"] * 2) / 1e6, 6)
    kept = again["api"]["api"]
    assert (kept["num_requests"], kept["num_texts"], kept["num_kept_texts"], kept["dollars"]) == (0, 0, 9, 0)


def test_what_is_not_known_costs_nothing_or_finds_candidates(folder: Path) -> None:
    cache = folder / "cache"
    with llm_server() as server:
        plan = dry_run(config_of(folder, judged(server, cache), api(server, cache, budget={"max_tokens": 500})))
        values = {
            "stage": "candidates", "queries": str(folder / "bench"), "pool": str(folder / "pool"), "split": None,
            "system": api(server, cache, prices={"prompt": 2, "completion": 0}), "out": str(folder / "out"),
        }  # fmt: skip
        found = dry_run(validate(CandidatesConfig, values, "test"))
        missing = {"system": {"name": "x", "rankers": [{"kind": "dense", "source": "./nothing"}]}}
        with pytest.raises(SkilltrainError, match=r"\./nothing: no such model"):
            dry_run(validate(CandidatesConfig, values | missing, "test"))
        assert server.requests == [] and not (folder / "out").exists()
    assert plan["dollars"] is None and plan["asked"]["api"]["api"]["budget"] == "500 tokens"
    assert dry_run(config_of(folder)) == {"num_queries": 3, "num_skills": 7, "num_systems": 1}
    asked = found["asked"]["api"]["api"]
    assert (found["num_systems"], asked["num_texts"]) == (1, 9) and found["dollars"] == asked["dollars"] > 0
