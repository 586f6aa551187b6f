"""An embeddings API as an encoder, against a real server on loopback."""

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from faults import raises
from llm_server import KEY, LLMServer, Reply, embeddings, llm_server, vector_of, vectors_body
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Usage
from skilltrain.llm.settings import BudgetConfig
from skilltrain.records import Query, Skill
from skilltrain.retrieval.api import ApiConfig, ApiEncoder
from skilltrain.retrieval.cascade import SystemConfig, run_systems
from skilltrain.retrieval.executor import OpenRankers, run_ranker
from skilltrain.retrieval.fusion import FuseConfig
from skilltrain.templates import SkillTemplate

SKILLS = [Skill(f"id of {n}", f"skill-{n}", "Sorts.", "Sorts by month. " * n) for n in range(10)]


def source(server: LLMServer, cache: Path | None = None, **changed: object) -> ApiConfig:
    values = {
        "model": "m",
        "base_url": server.base_url,
        "cache": cache,
        "max_retries": 2,
        "timeout": 20,
        "batch_size": 4,
    }
    return validate(ApiConfig, values | changed, "test")


def open_api(server: LLMServer, cache: Path | None = None, **changed: object) -> ApiEncoder:
    return ApiEncoder(source(server, cache, **changed))


def expected_vectors(texts: Sequence[str]) -> np.ndarray:
    """Return the server's vectors of these texts, divided by their lengths."""
    vectors = np.array([vector_of(text, 4) for text in texts])
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def texts_sent(server: LLMServer) -> list[str]:
    """Return every text that the server got, in order and with repeats."""
    return list(chain(*(request["input"] for request in server.requests)))


API_QUERIES = [
    Query(f"q{number}", text, "single", "test", "test")
    for number, text in enumerate(("month", "sorts skills", "x"))
]


def test_system_ranks_by_cosines(server: LLMServer, tmp_path: Path):
    api = source(server, tmp_path, query_prompt="query: ")
    skill_vectors = expected_vectors([api.render_skill(skill) for skill in SKILLS])
    query_vectors = expected_vectors([f"query: {query.text}" for query in API_QUERIES])
    cosines = query_vectors @ skill_vectors.T  # [query, skill]

    (stage,) = run_systems([SystemConfig(name="api", rankers=(api,))], API_QUERIES, SKILLS, 5)[
        "api"
    ]

    for query, row in zip(API_QUERIES, cosines, strict=True):
        best = np.argsort(-row)[:5]
        skill_ids, scores = zip(*stage.rankings[query.query_id], strict=True)
        assert list(skill_ids) == [SKILLS[position].skill_id for position in best]
        np.testing.assert_allclose(scores, row[best], atol=1e-6)


def test_legs_send_a_request_once(server: LLMServer):
    full = source(server)
    nd = source(server, skill=SkillTemplate(fields="nd"))
    ranker = validate(FuseConfig, {"of": [full, nd], "keep": 5}, "test")
    pool = OpenRankers(SKILLS)
    legs = [leg.ranker(SKILLS, pool.opened) for leg in (full, nd)]
    expected = [leg.rank(API_QUERIES, None, 5) for leg in legs]
    num_sent = len(texts_sent(server))

    run = run_ranker(ranker, API_QUERIES, None, pool)

    sent = texts_sent(server)[num_sent:]
    assert sorted(sent) == sorted(query.text for query in API_QUERIES)
    assert [ranking["q0"][:5] for ranking in run.by_leg] == [one["q0"] for one in expected]


def test_system_keeps_vectors(server: LLMServer, tmp_path: Path):
    system = SystemConfig(name="api", rankers=(source(server, tmp_path),))
    (first,) = run_systems([system], API_QUERIES, SKILLS, 5)["api"]

    (second,) = run_systems([system], API_QUERIES, SKILLS, 5)["api"]

    assert second.rankings == first.rankings
    assert len(texts_sent(server)) == len(SKILLS) + len(API_QUERIES)


def test_system_is_not_timed(server: LLMServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Timing would pay for the texts again."""
    system = SystemConfig(name="api", rankers=(source(server, tmp_path),))

    (stage,) = run_systems([system], API_QUERIES, SKILLS, 5, num_timed=2)["api"]

    assert stage.latencies == ()
    assert "api: not timed, for it asks a server" in capsys.readouterr().err


def test_late_answers_keep_order_of_texts(server: LLMServer):
    server.otherwise = lambda request: Reply(
        raw=embeddings(request).raw, delay=0.1 * (len(server.requests) % 2)
    )
    encoder = open_api(server, concurrency=3)

    vectors = encoder.encode_chunks(SKILLS).vectors

    assert vectors.shape == (10, 4)
    assert vectors.dtype == np.float32
    expected = expected_vectors([SkillTemplate().render(skill) for skill in SKILLS])
    np.testing.assert_allclose(vectors, expected, atol=1e-7)


def test_texts_are_sent_in_concurrent_batches(server: LLMServer):
    open_api(server, concurrency=3).encode_chunks(SKILLS)

    assert 1 <= server.most_busy <= 3
    assert sorted(len(request["input"]) for request in server.requests) == [2, 4, 4]
    assert server.requests[0]["model"] == "m"
    assert set(server.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.parametrize("is_base64", [True, False])
def test_vectors_by_hand(server: LLMServer, is_base64: bool):
    server.script = [Reply(raw=vectors_body([[3, 4], [0, -2], [1e30, 0]], 9, is_base64))]

    vectors = open_api(server).encode_queries(["one", "four", "three"])

    (request,) = server.requests
    assert request["input"] == ["three", "four", "one"]  # longest first
    assert request["encoding_format"] == "base64"
    np.testing.assert_allclose(vectors, [[1, 0], [0, -1], [0.6, 0.8]], atol=1e-7)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ({}, "S: pdf | Reads files. | Long body"),
        ({"fields": "nd"}, "S: pdf | Reads files."),
        ({"body_chars": 4, "description_chars": 5}, "S: pdf | Reads | Long"),
    ],
)
def test_template_renders_skill(server: LLMServer, template: dict[str, object], text: str):
    skill = Skill("s", "pdf", "Reads files.", "Long body")

    open_api(server, skill_prompt="S: ", skill=template).encode_chunks([skill])

    assert texts_sent(server) == [text]


def test_query_is_cut_after_prompt(server: LLMServer):
    open_api(server, query_prompt="Q: ", query_chars=5).encode_queries(["merge these"])

    assert texts_sent(server) == ["Q: merge"]


def test_failing_server_ends_run(server: LLMServer, tmp_path: Path):
    server.otherwise = lambda request: (
        embeddings(request) if len(server.requests) <= 1 else Reply(status=500)
    )

    with raises("server-failing") as failure:
        open_api(server, tmp_path, max_retries=1, concurrency=1).encode_chunks(SKILLS)

    assert "\n" not in str(failure.value)
    assert failure.value.where == server.base_url
    assert len(server.requests) == 1 + 2


def test_vectors_before_failure_are_kept(server: LLMServer, tmp_path: Path):
    server.otherwise = lambda request: (
        embeddings(request) if len(server.requests) <= 1 else Reply(status=500)
    )
    with raises("server-failing"):
        open_api(server, tmp_path, max_retries=0, concurrency=1).encode_chunks(SKILLS)
    server.requests.clear()
    server.otherwise = embeddings

    open_api(server, tmp_path).encode_chunks(SKILLS)

    assert len(texts_sent(server)) == 6


ONE = [1.0, 1, 1, 1]
NESTED = json.dumps({"data": [{"index": index, "embedding": [ONE] * 4} for index in range(3)]})
NO_VECTORS = "does not hold one vector for each|holds no vectors"


def error_body(message: str) -> str:
    return json.dumps({"error": {"message": f"{message} {KEY}"}})


@pytest.mark.parametrize(
    ("reply", "message", "where"),
    [
        (Reply(raw="{not json"), NO_VECTORS, ""),
        (Reply(raw='{"data": null}'), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE] * 2, 1)), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE] * 3, 1).replace('"index": 1', '"index": 0')), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE, ONE, ONE[1:]], 1)), NO_VECTORS, ""),
        (Reply(raw=NESTED), NO_VECTORS, ""),
        (
            Reply(status=400),
            "refused 3 texts, the longest of 50 characters: .*body_chars",
            "skill id of 2",
        ),
        (Reply(status=401, raw=error_body("bad key")), "set OPENAI_API_KEY", ""),
        (Reply(status=404), r"no model 'm' here.*embeddings\.model and embeddings\.base_url", ""),
        (Reply(status=429, code="insufficient_quota"), "no credit left", ""),
        (Reply(status=422, raw=error_body("you sent")), r"you sent \[key\]", "skill id of 2"),
    ],
)
def test_invalid_reply_ends_run(server: LLMServer, reply: Reply, message: str, where: str):
    check_invalid_reply(server, reply, message, where or server.base_url)


@pytest.mark.parametrize("is_base64", [True, False])
@pytest.mark.parametrize("vector", [[0.0] * 4, [1.0, math.nan, 0, 0], [math.inf, 0.0, 0, 0]])
def test_vector_without_direction_ends_run(server: LLMServer, vector: list[float], is_base64: bool):
    # The longest text is sent first, so the second is skill 1.
    reply = Reply(raw=vectors_body([ONE, vector, ONE], 1, is_base64))

    check_invalid_reply(server, reply, "zero or holds no number", "skill id of 1")


def check_invalid_reply(server: LLMServer, reply: Reply, message: str, where: str) -> None:
    """Check that a reply ends the run with one line that does not show the key."""
    server.otherwise = lambda _: reply
    encoder = open_api(server, concurrency=1, max_retries=0)

    with pytest.raises(SkilltrainError, match=message) as failure:
        encoder.encode_chunks(SKILLS[:3])

    assert failure.value.where == where
    assert len(server.requests) == 1
    assert "\n" not in str(failure.value)
    assert KEY not in str(failure.value)


def test_empty_text_is_never_sent(server: LLMServer):
    # The texts before it are not paid for either.
    with raises("empty-text"):
        open_api(server, batch_size=1).encode_queries(["one", "two", "three", ""])

    assert server.requests == []


def test_cache_needs_no_server(tmp_path: Path):
    with llm_server() as stopped:
        vectors = open_api(stopped, tmp_path).encode_chunks(SKILLS[:6]).vectors

    cached = open_api(stopped, tmp_path, batch_size=2).encode_chunks(SKILLS[:6]).vectors

    assert (cached == vectors).all()
    with raises("server-unreachable"):
        open_api(stopped, tmp_path, max_retries=0).encode_chunks(SKILLS)


def test_only_new_texts_are_sent(server: LLMServer, tmp_path: Path):
    first = open_api(server, tmp_path).encode_chunks([*SKILLS[:6], SKILLS[0]]).vectors

    vectors = open_api(server, tmp_path).encode_chunks(SKILLS).vectors

    assert len(texts_sent(server)) == 10
    assert (first == vectors[[*range(6), 0]]).all()


def test_cache_separates_fields(server: LLMServer, tmp_path: Path):
    full = open_api(server, tmp_path).encode_chunks(SKILLS).vectors
    server.requests.clear()
    texts = [SkillTemplate(fields="nd").render(skill) for skill in SKILLS]

    nd = open_api(server, tmp_path, skill={"fields": "nd"}).encode_chunks(SKILLS).vectors

    np.testing.assert_allclose(nd, expected_vectors(texts), atol=1e-7)
    # Skill 0 has no body, so its text is in the cache.
    assert sorted(texts_sent(server)) == sorted(texts[1:])
    assert (nd[0] == full[0]).all()
    assert (nd[1:] != full[1:]).any(axis=1).all()


def test_cache_separates_models(server: LLMServer, tmp_path: Path):
    open_api(server, tmp_path).encode_chunks(SKILLS)

    open_api(server, tmp_path, model="other").encode_chunks(SKILLS)

    assert len(texts_sent(server)) == 10 + 10


def test_changed_dimension_is_refused(server: LLMServer, tmp_path: Path):
    open_api(server, tmp_path).encode_chunks(SKILLS)
    server.otherwise = lambda _: Reply(raw=vectors_body([[1.0, 2, 3]], 1))

    with raises("changed-model"):
        open_api(server, tmp_path).encode_queries(["one"])


TEXTS = [f"{number} " * 60 for number in range(6)]  # 120 bytes, 40 tokens for the server


@pytest.fixture
def limited_encoder(server: LLMServer, tmp_path: Path) -> ApiEncoder:
    """An encoder that has spent its budget on four of six texts."""
    encoder = open_api(server, tmp_path, batch_size=1, concurrency=1, budget={"max_tokens": 160})
    with raises("budget-exceeded"):
        encoder.encode_queries(TEXTS)
    return encoder


def test_budget_is_never_exceeded(server: LLMServer, limited_encoder: ApiEncoder):
    assert len(server.requests) == 4
    assert limited_encoder.server.budget.used.total == 160


def test_paid_vectors_are_kept(server: LLMServer, limited_encoder: ApiEncoder, tmp_path: Path):
    open_api(server, tmp_path).encode_queries(TEXTS)

    assert sorted(texts_sent(server)) == sorted(TEXTS)


def test_budget_in_dollars_needs_price(server: LLMServer):
    with raises("missing-setting"):
        open_api(server, budget={"max_dollars": 1})


def test_dollars_by_price(server: LLMServer):
    encoder = open_api(server, budget={"max_dollars": 1}, prices={"prompt": 2.5, "completion": 0})

    encoder.encode_queries(["a" * 300])

    assert encoder.server.budget.price(encoder.server.budget.used) == pytest.approx(100 * 2.5e-6)


def test_prices_of_known_models():
    config = ApiConfig(model="text-embedding-3-small", budget=BudgetConfig(max_dollars=1))

    assert ApiEncoder(config).server.budget.price(Usage(500_000, 0)) == 0.01
