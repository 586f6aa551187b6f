"""How long queries wait: percentiles by hand on a clock of our own, and which stages of a system are timed at all."""

import numpy as np
import pytest

from llm_server import llm_server
from skilltrain.records import Skill
from skilltrain.retrieval.api_encoder import ApiEncoderSource
from skilltrain.retrieval.dense import EncoderSource
from skilltrain.retrieval.rerank import RerankerSource
from skilltrain.routing.latency import time_steps
from skilltrain.routing.systems import LexicalSource, SystemConfig, ask_systems
from skilltrain.terminal import console
from tiny_models import WORDS

SKILLS = [Skill(f"s{i}", f"name {i}", f"{word} task", f"find the {word}") for i, word in enumerate(WORDS[2:14])]
QUERIES = {f"q{i}": f"find the {WORDS[i]} and the {WORDS[-i]}" for i in range(2, 7)}


class Clock:
    """Stands still but for what work adds to it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: dict[str, float]):
        """A step that takes so long for each query, and hands the query's id and what it was given on."""

        def step(query_id: str, given: object) -> tuple[str, object]:
            self.now += seconds[query_id]
            return query_id, given

        return step


def test_percentiles_and_rates_by_hand_with_the_warm_up_left_out():
    clock, asked = Clock(), []
    seconds = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 10.0}

    def first(query_id: str, given: object) -> str:
        clock.now += seconds[query_id] if asked else 1000.0  # the very first time everything is slow
        asked.append((query_id, given))
        return f"found of {query_id}"

    def second(query_id: str, given: object) -> None:
        assert given == f"found of {query_id}"
        clock.now += 0.5

    one, two, total = time_steps("mine", [("encode query", first), ("search", second)], list(seconds), clock)
    assert asked == [(query_id, None) for query_id in "aabcde"]
    assert [(row.system, row.stage, row.num) for row in (one, two, total)] == [
        ("mine", "encode query", 5), ("mine", "search", 5), ("mine", "total", 5),
    ]  # fmt: skip
    # Sorted 1, 2, 3, 4, 10: the middle is 3; .95 of the way from the first to the last is .8 of the way from 4 to 10.
    assert (one.p50, one.p95, one.qps) == pytest.approx((3, 8.8, 5 / 20))
    assert (two.p50, two.p95, two.qps) == pytest.approx((0.5, 0.5, 2))
    assert (total.p50, total.p95, total.qps) == pytest.approx((3.5, 9.3, 5 / 22.5))


def test_total_is_of_queries_and_not_of_percentiles():
    """Two stages that are slow for different queries: their p95 do not add up."""
    clock = Clock()
    steps = [("one", clock.work({"a": 9.0, "b": 1.0})), ("two", clock.work({"a": 1.0, "b": 9.0}))]
    one, two, total = time_steps("mine", steps, ["a", "b"], clock)
    assert total.p50 == total.p95 == 10 < one.p95 + two.p95 == pytest.approx(2 * 8.6)


@pytest.mark.parametrize("fails", [False, True])
def test_no_bar_is_drawn_while_the_clock_runs_and_the_console_speaks_again(fails):
    quiet, clock = [], Clock()

    def step(query_id: str, given: object) -> None:
        quiet.append(console.quiet)
        clock.now += 1
        if fails:
            raise ValueError("broken")

    assert not console.quiet
    if fails:
        with pytest.raises(ValueError, match="broken"):
            time_steps("mine", [("search", step)], ["a"], clock)
    else:
        time_steps("mine", [("search", step)], ["a", "b"], clock)
    assert all(quiet) and not console.quiet


def stages(systems, num_timed=3):
    asked = ask_systems(systems, QUERIES, SKILLS, 5, num_timed)
    for ranked in asked.values():
        for row in ranked.latencies:
            assert 0 < row.p50 <= row.p95 and row.qps > 0 and row.num == min(num_timed, len(QUERIES))
    return {name: [row.stage for row in ranked.latencies] for name, ranked in asked.items()}


def test_every_stage_of_a_system_is_timed(model_folders):
    encoder = EncoderSource(source=str(model_folders["bert"]), precision="float32")
    reranker = RerankerSource(source=str(model_folders["bert_reranker"]), precision="float32")
    systems = [
        SystemConfig(name="bm25", lexical=LexicalSource()),
        SystemConfig(name="bm25, reranked", lexical=LexicalSource(), reranker=reranker),
        SystemConfig(name="encoder", encoder=encoder),
        SystemConfig(name="both", encoder=encoder, reranker=reranker, num_candidates=2),
    ]
    expected = {
        "bm25": ["search", "total"], "bm25, reranked": ["search", "rerank", "total"],
        "encoder": ["encode query", "search", "total"], "both": ["encode query", "search", "rerank", "total"],
    }  # fmt: skip
    assert stages(systems) == expected
    assert stages(systems, num_timed=99) == expected
    assert stages(systems, num_timed=0) == {name: [] for name in expected}


def test_a_query_is_encoded_anew_though_a_cache_holds_its_vector(model_folders, tmp_path):
    """Else the time would be that of a look into the cache, and another one the second time it is asked."""
    encoder = EncoderSource(source=str(model_folders["bert"]), precision="float32", cache=tmp_path / "vectors")
    system = SystemConfig(name="cached", encoder=encoder)
    for _ in range(2):
        assert stages([system]) == {"cached": ["encode query", "search", "total"]}
        before = sorted((path, path.stat().st_size) for path in (tmp_path / "vectors").rglob("*") if path.is_file())
        stages([system])
        after = sorted((path, path.stat().st_size) for path in (tmp_path / "vectors").rglob("*") if path.is_file())
        assert before == after


def test_systems_that_ask_a_server_are_not_timed(capsys):
    with llm_server() as server:
        source = ApiEncoderSource(model="scripted", base_url=server.base_url, cache=None, max_retries=0)
        found = stages([SystemConfig(name="api", embeddings=source), SystemConfig(name="own", lexical=LexicalSource())])
        texts = [text for request in server.requests for text in request["input"]]
    assert found == {"api": [], "own": ["search", "total"]}
    assert "api: not timed, for it asks a server" in capsys.readouterr().err
    assert sorted(set(texts)) == sorted(texts), "a text that is timed would be sent, and paid for, again"


def test_timing_changes_no_ranking(model_folders):
    reranker = RerankerSource(source=str(model_folders["bert_reranker"]), precision="float32")
    systems = [SystemConfig(name="both", lexical=LexicalSource(), reranker=reranker, num_candidates=4)]
    plain, timed = (ask_systems(systems, QUERIES, SKILLS, 6, num)["both"].rankings for num in (0, 5))
    assert plain.keys() == timed.keys() == QUERIES.keys()
    for query_id in QUERIES:
        assert [skill_id for skill_id, _ in plain[query_id]] == [skill_id for skill_id, _ in timed[query_id]]
        assert np.allclose([score for _, score in plain[query_id]], [score for _, score in timed[query_id]])
