"""An embeddings API as an encoder, against a real server on loopback: every text gets its vector, or one clear line."""

import json
import math
from collections import Counter
from collections.abc import Sequence
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


def expected(texts: Sequence[str]) -> np.ndarray:
    """The honest server's vectors of these texts, divided by their lengths."""
    vectors = np.array([vector_of(text, 4) for text in texts])
    return (vectors / np.sqrt((vectors**2).sum(axis=1, keepdims=True))).astype(np.float32)


def sent(server: LLMServer) -> list[str]:
    """Every text that came in, as often as it did."""
    return [text for request in server.requests for text in request["input"]]


def test_a_system_ranks_by_the_cosines_of_what_the_server_answers(
    server: LLMServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api = source(server, tmp_path, query_prompt="query: ")
    queries = [
        Query(f"q{n}", text, "single", "test", "test")
        for n, text in enumerate(("month", "sorts skills", "x"))
    ]
    system = SystemConfig(name="api", rankers=(api,))
    (stage,) = run_systems([system], queries, SKILLS, 5, num_timed=2)["api"]

    found, said = stage.rankings, capsys.readouterr().err

    assert stage.alone == () and "api: not timed, for it asks a server" in said, (
        "texts would be paid for again"
    )
    assert run_systems([system], queries, SKILLS, 5)["api"][-1].rankings == found
    assert len(sent(server)) == len(SKILLS) + 3, "all vectors are kept"

    skills = expected([api.render_skill(skill) for skill in SKILLS])
    cosines = expected([f"query: {query.text}" for query in queries]) @ skills.T
    for query, row in zip(queries, cosines, strict=True):
        best = np.argsort(-row)[:5]

        assert [skill_id for skill_id, _ in found[query.query_id]] == [
            SKILLS[place].skill_id for place in best
        ]
        np.testing.assert_allclose(
            [score for _, score in found[query.query_id]], row[best], atol=1e-6
        )


def test_texts_become_unit_vectors_in_their_order_whatever_the_answers_order(
    server: LLMServer,
) -> None:
    server.otherwise = lambda request: Reply(
        raw=embeddings(request).raw, delay=0.1 * (len(server.requests) % 2)
    )
    encoder = open_api(server, concurrency=3)

    vectors = encoder.encode_chunks(SKILLS).vectors

    assert vectors.shape == (10, 4)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(
        vectors, expected([SkillTemplate().render(skill) for skill in SKILLS]), atol=1e-7
    )
    assert 1 <= server.most_busy <= 3
    assert sorted(len(request["input"]) for request in server.requests) == [2, 4, 4]
    assert server.requests[0]["model"] == "m"
    assert set(server.authorizations) == {f"Bearer {KEY}"}


def test_vectors_by_hand_from_base64_and_from_numbers(server: LLMServer) -> None:
    for is_base64 in (True, False):
        server.script = [Reply(raw=vectors_body([[3, 4], [0, -2], [1e30, 0]], 9, is_base64))]
        vectors = open_api(server).encode_queries(["one", "four", "three"])

        assert server.requests[-1]["input"] == ["three", "four", "one"]  # longest first
        np.testing.assert_allclose(vectors, [[1, 0], [0, -1], [0.6, 0.8]], atol=1e-7)
        assert server.requests[-1]["encoding_format"] == "base64"


def test_prompts_caps_and_fields_decide_what_is_sent(server: LLMServer) -> None:
    skill = Skill("s", "pdf", "Reads files.", "Long body")
    changed = {"query_prompt": "Q: ", "skill_prompt": "S: ", "query_chars": 5}
    for template, text in (
        ({}, "S: pdf | Reads files. | Long body"),
        ({"fields": "nd"}, "S: pdf | Reads files."),
        ({"body_chars": 4, "description_chars": 5}, "S: pdf | Reads | Long"),
    ):
        open_api(server, **changed, skill=template).encode_chunks([skill])
        assert server.requests[-1]["input"] == [text]

    open_api(server, **changed).encode_queries(["merge these"])

    assert server.requests[-1]["input"] == ["Q: merge"]


def test_a_server_that_stays_broken_ends_the_run_in_one_line_and_what_came_is_kept(
    server: LLMServer, tmp_path: Path
) -> None:
    server.otherwise = lambda request: (
        embeddings(request) if len(server.requests) <= 1 else Reply(status=500)
    )
    encoder = open_api(server, tmp_path, max_retries=1, concurrency=1)

    with raises("server-failing") as failure:
        encoder.encode_chunks(SKILLS)
    assert "\n" not in str(failure.value)
    assert failure.value.where == server.base_url
    assert len(server.requests) == 1 + 2

    server.otherwise = embeddings
    open_api(server, tmp_path).encode_chunks(SKILLS)

    assert sum(len(request["input"]) for request in server.requests[3:]) == 6


ONE, NAN, INF = [1.0, 1, 1, 1], [1.0, math.nan, 0, 0], [math.inf, 0.0, 0, 0]
NO_VECTORS = "does not hold one vector for each|holds no vectors"
ZERO = "zero or holds no number"


def told(text: str) -> str:
    return json.dumps({"error": {"message": f"{text} {KEY}"}})


@pytest.mark.parametrize(
    ("reply", "message", "where"),
    [
        (Reply(raw="{not json"), NO_VECTORS, ""),
        (Reply(raw='{"data": null}'), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE] * 2, 1)), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE] * 3, 1).replace('"index": 1', '"index": 0')), NO_VECTORS, ""),
        (Reply(raw=vectors_body([ONE, ONE, ONE[1:]], 1)), NO_VECTORS, ""),
        (
            Reply(
                raw=json.dumps({"data": [{"index": n, "embedding": [ONE] * 4} for n in range(3)]})
            ),
            NO_VECTORS,
            "",
        ),
        *(
            (
                Reply(raw=vectors_body([ONE, bad, ONE], 1, is_base64)),
                ZERO,
                "skill id of 1",
            )  # longest first: 2, 1, 0
            for bad in ([0.0] * 4, NAN, INF)
            for is_base64 in (True, False)
        ),
        (
            Reply(status=400),
            "refused 3 texts, the longest of 50 characters: .*body_chars",
            "skill id of 2",
        ),
        (Reply(status=401, raw=told("bad key")), "set OPENAI_API_KEY", ""),
        (Reply(status=404), r"no model 'm' here.*embeddings\.model and embeddings\.base_url", ""),
        (Reply(status=429, code="insufficient_quota"), "no credit left", ""),
        (Reply(status=422, raw=told("you sent")), r"you sent \[key\]", "skill id of 2"),
    ],
)
def test_what_is_no_vector_ends_the_run_in_one_line_without_the_key(
    server: LLMServer, reply: Reply, message: str, where: str
) -> None:
    server.otherwise = lambda _: reply

    with pytest.raises(SkilltrainError, match=message) as failure:
        open_api(server, concurrency=1, max_retries=0).encode_chunks(SKILLS[:3])
    assert failure.value.where == (where or server.base_url)
    assert len(server.requests) == 1
    assert "\n" not in str(failure.value)
    assert KEY not in str(failure.value)


def test_an_empty_text_is_named_and_never_sent(server: LLMServer) -> None:
    with raises("empty-text"):  # before the first request is paid for
        open_api(server, batch_size=1).encode_queries(["one", "two", "three", ""])
    assert server.requests == []


def test_the_cache_needs_no_server(tmp_path: Path) -> None:
    with llm_server() as gone:
        first = open_api(gone, tmp_path).encode_chunks(SKILLS[:6]).vectors

    assert (open_api(gone, tmp_path, batch_size=2).encode_chunks(SKILLS[:6]).vectors == first).all()
    with raises("server-unreachable"):
        open_api(gone, tmp_path, max_retries=0).encode_chunks(SKILLS)


def test_only_what_is_new_to_the_cache_is_sent_and_models_and_fields_never_mix(
    server: LLMServer, tmp_path: Path
) -> None:
    twice = open_api(server, tmp_path).encode_chunks([*SKILLS[:6], SKILLS[0]]).vectors
    more = open_api(server, tmp_path).encode_chunks(SKILLS).vectors

    assert len(sent(server)) == 10
    assert (twice == more[[*range(6), 0]]).all()

    # Skill 0 has no body: what it is without one is known.
    nd = open_api(server, tmp_path, skill={"fields": "nd"}).encode_chunks(SKILLS).vectors
    texts = [SkillTemplate(fields="nd").render(skill) for skill in SKILLS]

    assert sorted(sent(server)[10:]) == sorted(texts[1:])
    np.testing.assert_allclose(nd, expected(texts), atol=1e-7)
    assert (nd[0] == more[0]).all()
    assert (nd[1:] != more[1:]).any(axis=1).all()

    open_api(server, tmp_path, model="other").encode_chunks(SKILLS)

    assert len(sent(server)) == 10 + 9 + 10

    server.otherwise = lambda request: Reply(
        raw=vectors_body([[1.0, 2, 3]] * len(request["input"]), 1)
    )

    with raises("changed-model"):
        open_api(server, tmp_path).encode_queries(["one"])


def test_nothing_is_sent_over_budget_and_paid_vectors_are_kept(
    server: LLMServer, tmp_path: Path
) -> None:
    texts = [f"{n} " * 60 for n in range(6)]  # 120 bytes, 40 tokens by the server's account
    encoder = open_api(server, tmp_path, batch_size=1, concurrency=1, budget={"max_tokens": 160})

    with raises("budget-exceeded"):
        encoder.encode_queries(texts)
    assert len(server.requests) == 4
    assert encoder.server.budget.used.total == 160

    open_api(server, tmp_path).encode_queries(texts)

    assert Counter(sent(server)).most_common(1)[0][1] == 1


def test_dollars_need_a_price(server: LLMServer) -> None:
    with raises("missing-setting"):
        open_api(server, budget={"max_dollars": 1})

    encoder = open_api(server, budget={"max_dollars": 1}, prices={"prompt": 2.5, "completion": 0})
    encoder.encode_queries(["a" * 300])

    assert encoder.server.budget.price(encoder.server.budget.used) == pytest.approx(100 * 2.5e-6)

    own = ApiEncoder(ApiConfig(model="text-embedding-3-small", budget=BudgetConfig(max_dollars=1)))

    assert own.server.budget.price(Usage(500_000, 0)) == 0.01
