"""Systems that ask a server: an embeddings API that finds, a chat model that selects; against servers on loopback."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_server import LLMServer, Reply, embeddings, llm_server, vector_of
from skilltrain.config import validate
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig, run_systems
from skilltrain.routing.evaluate import EvaluateConfig, run_evaluate
from skilltrain.tables import JUDGEMENTS, QUERIES, SKILLS, rows_of, write_table

FRUITS = ["apples", "bridges", "candles", "drums", "engines", "flags"]
POOL = [Skill(f"s{i}", f"name {i}", f"about {word}", f"the body says {word}") for i, word in enumerate(FRUITS)]
TEXTS = {"q1": "apples and candles", "q2": "drums", "q3": "engines with flags"}


def system_of(server: LLMServer, *between: dict[str, Any], name: str = "selected", keep: int = 3) -> SystemConfig:
    """BM25, what stands `between`, and the chat model of `server` that selects."""
    llm = {"kind": "openai", "model": "scripted", "base_url": server.base_url, "cache": None, "max_retries": 0,
           "temperature": 0, "concurrency": 1}  # fmt: skip
    select = {"kind": "select", "llm": llm, "max_retries": 0, "keep": keep}
    return validate(SystemConfig, {"name": name, "rankers": [{"kind": "lexical"}, *between, select]}, "test")


PLAIN = validate(SystemConfig, {"name": "plain", "rankers": [{"kind": "lexical"}]}, "test")


def api_system(server: LLMServer, cache: Path | None, **settings: Any) -> SystemConfig:
    source = {"kind": "api", "model": "scripted", "base_url": server.base_url, "cache": str(cache) if cache else None}
    return validate(SystemConfig, {"name": "api", "rankers": [source | {"max_retries": 0} | settings]}, "test")


def asked(systems: list[SystemConfig], depth: int = 5, num_timed: int = 0) -> dict[str, RankedStage]:
    """System → what its last ranker answers."""
    queries = [Query(query_id, text, "single", "test", "test") for query_id, text in TEXTS.items()]
    return {name: stages[-1] for name, stages in run_systems(systems, queries, POOL, depth, num_timed).items()}


def ids(stage: RankedStage) -> dict[str, list[str]]:
    return {query_id: [skill_id for skill_id, _ in ranking] for query_id, ranking in stage.rankings.items()}


def shown(request: dict[str, Any]) -> list[str]:
    """The skill ids of the candidates, in the order in which the model saw them."""
    names = re.findall(r"^=== [0-9a-f]{12} candidate \d+\nName: name (\d)$", request["messages"][1]["content"], re.M)
    return [f"s{number}" for number in names]


@pytest.fixture
def bench(tmp_path):
    """pool, bench (q1 wants s2, q2 wants s3, q3 wants s5) and out."""
    queries = [Query(query_id, text, "single", "test", "test") for query_id, text in TEXTS.items()]
    gold = {"q1": "s2", "q2": "s3", "q3": "s5"}
    rows = [{"query_id": q, "skill_id": s, "verdict": "required", "judge": "test"} for q, s in gold.items()]
    for name in ("bench", "pool", "out"):
        (tmp_path / name).mkdir()
    write_table(rows_of(queries), QUERIES, tmp_path / "bench")
    write_table(rows, JUDGEMENTS, tmp_path / "bench")
    write_table(rows_of(POOL), SKILLS, tmp_path / "pool")
    return tmp_path


def evaluate(folder: Path, *systems: SystemConfig, **settings: Any) -> dict[str, Any]:
    values = {
        "stage": "evaluate", "benchmark": str(folder / "bench"), "pool": str(folder / "pool"),
        "systems": [system.model_dump() for system in systems], "out": str(folder / "out"), **settings,
    }  # fmt: skip
    return run_evaluate(validate(EvaluateConfig, values, "test"), folder / "out")


# An embeddings API ----------------------------------------------------------------------------------------------------


def test_an_embeddings_api_ranks_by_cosine_of_what_it_answers(tmp_path):
    with llm_server() as server:
        system = api_system(server, tmp_path / "vectors", query_prompt="query: ")
        found = asked([system])["api"]
        texts = {text for request in server.requests for text in request["input"]}
        num_requests = len(server.requests)
        again = asked([system])["api"]
        assert len(server.requests) == num_requests, "all vectors are kept"
    rendered = {skill.skill_id: next(text for text in texts if skill.body in text) for skill in POOL}
    unit = {key: np.array(vector_of(text, 4)) for key, text in rendered.items()}
    unit = {key: vector / np.linalg.norm(vector) for key, vector in unit.items()}
    for query_id, text in TEXTS.items():
        assert f"query: {text}" in texts
        query = np.array(vector_of(f"query: {text}", 4))
        cosines = {key: float(vector @ query / np.linalg.norm(query)) for key, vector in unit.items()}
        best = sorted(cosines, key=lambda key: -cosines[key])[:5]
        assert [skill_id for skill_id, _ in found.rankings[query_id]] == best
        scores = [score for _, score in found.rankings[query_id]]
        assert scores == pytest.approx([cosines[key] for key in best], abs=1e-6)
    assert again.rankings == found.rankings and found.counts == {}


# A chat model ---------------------------------------------------------------------------------------------------------


def test_the_model_moves_one_of_its_candidates_to_the_front():
    with llm_server() as server:
        server.otherwise = lambda request: Reply("3")
        found = asked([PLAIN, system_of(server)])
        requests = list(server.requests)
    before, after = ids(found["plain"]), ids(found["selected"])
    assert [shown(request) for request in requests] == [ranking[:3] for ranking in before.values()]
    for query_id, (first, second, third, *rest) in before.items():
        assert after[query_id] == [third, first, second, *rest]
        assert [score for _, score in found["selected"].rankings[query_id]] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert found["plain"].counts == {} and found["selected"].counts["num_asked"] == 3


def test_a_chat_model_is_not_timed(capsys):
    with llm_server() as server:
        server.otherwise = lambda request: Reply("1")
        found = asked([system_of(server)], num_timed=3)
        assert len(server.requests) == 3
    assert found["selected"].alone == ()
    assert "selected, from select on: not timed, for it asks a server" in capsys.readouterr().err


def test_a_chat_model_in_an_evaluation_is_counted_in_the_summary(bench):
    """It names the gold skill of q1 and q3 and says nothing of use on q2, whose gold skill stands first anyway."""
    gold = {"apples": "s2", "engines": "s5"}

    def answer(request: dict[str, Any]) -> Reply:
        if "input" in request:
            return embeddings(request)
        task = request["messages"][1]["content"].split("\n")[1]
        wanted = gold.get(task.split()[0])
        return Reply(str(shown(request).index(wanted) + 1) if wanted else "I cannot say")

    with llm_server() as server:
        server.otherwise = answer
        summary = evaluate(bench, PLAIN, system_of(server, keep=2), measures=["Hit@1", "Recall@10"])
    assert summary["systems"]["selected"] == {"Hit@1": 1.0, "Recall@10": 1.0}
    (counts,) = summary["asked"].values()
    assert list(summary["asked"]) == ["selected"] and counts["unusable"] == {"no_number": 1}
    assert counts["num_asked"] == 3 and counts["num_prompt_tokens"] > 100
    analysis = json.loads((bench / "out" / "metrics.json").read_text())["analysis"]
    fixed = analysis["outcomes"][0]
    assert (fixed["baseline"], fixed["system"]) == ("plain", "selected") and fixed["broken"] == []
