"""Rankers with one model share its network and the vectors of each request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from skilltrain.config import validate
from skilltrain.models.encoder import Encoder
from skilltrain.records import Query, Skill
from skilltrain.retrieval import dense
from skilltrain.retrieval.cascade import SystemConfig, run_systems
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.serving.router import Router

TOPICS = ("pdf form", "chart table", "pod deploy", "pdf chart", "form table", "pdf pod")
SKILLS = [
    Skill(f"s{number}", topic, f"work on a {topic}", f"deploy the {topic} " * (number + 1))
    for number, topic in enumerate(TOPICS)
]
QUERIES = [Query("q1", "fill the pdf form", "", "", ""), Query("q2", "draw a chart", "", "", "")]
LEXICAL = {"kind": "lexical"}


@pytest.fixture
def leg(model_folders):
    """Return a function that makes a dense leg with the tiny BERT."""

    def make_leg(**settings: Any) -> dict[str, Any]:
        source = str(model_folders["bert"])
        return {"kind": "dense", "source": source, "precision": "float32", **settings}

    return make_leg


@pytest.fixture
def loaded_configs(monkeypatch) -> list[Any]:
    """Return a list that grows with each network that is loaded."""
    configs: list[Any] = []
    load = dense.load_encoder

    def recording(config: Any, device: Any) -> Encoder:
        configs.append(config)
        return load(config, device)

    monkeypatch.setattr(dense, "load_encoder", recording)
    return configs


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """Return a list that grows with the number of texts of each micro-batch."""
    sizes: list[int] = []
    forward = Encoder.forward

    def recording(self: Encoder, texts: Sequence[Any]) -> Any:
        sizes.append(len(texts))
        return forward(self, texts)

    monkeypatch.setattr(Encoder, "forward", recording)
    return sizes


def fuse_legs(*legs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"kind": "fuse", "of": list(legs)}]


def new_system(name: str, rankers: list[dict[str, Any]]) -> SystemConfig:
    return validate(SystemConfig, {"name": name, "rankers": rankers}, "test")


def rank_alone(leg: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Rank the first query with a leg that loads a network of its own."""
    ranker = validate(DenseConfig, leg, "test").ranker(SKILLS, {})
    return ranker.rank(QUERIES[:1], None, 6)


def test_legs_share_one_network(leg, loaded_configs):
    router = Router(SKILLS, fuse_legs(LEXICAL, leg(fields="nd"), leg(), leg(max_tokens=9)))

    encoders = [part.model for part in router._current.models.values() if hasattr(part, "model")]
    assert len(loaded_configs) == 1
    assert len(encoders) == 3
    assert len({id(encoder.backbone) for encoder in encoders}) == 1
    assert [encoder.settings.max_tokens for encoder in encoders] == [256, 256, 9]


def test_late_leg_shares_the_network(leg, loaded_configs):
    late = {**leg(), "kind": "late"}

    Router(SKILLS, [*fuse_legs(LEXICAL, leg(fields="nd")), *fuse_legs(leg(fields="nd"), late)])

    assert len(loaded_configs) == 1


def test_other_precision_is_loaded_apart(leg, loaded_configs):
    Router(SKILLS, fuse_legs(leg(), leg(precision="bfloat16"), leg(token_budget=64)))

    assert len(loaded_configs) == 3


def test_request_is_encoded_once(leg, batches):
    router = Router(SKILLS, fuse_legs(LEXICAL, leg(fields="nd"), leg()))
    batches.clear()

    router.route(QUERIES[0].text, k=3)

    assert batches == [1]


def test_shared_legs_score_like_single_ones(leg):
    legs = [leg(fields="nd"), leg(), leg(max_tokens=9)]
    router = Router(SKILLS, fuse_legs(*legs))
    expected = [rank_alone(leg_settings)["q1"] for leg_settings in legs]

    rankings = router.trace(QUERIES[0].text).rankings_by_ranker

    assert [*rankings.values()] == expected
    assert expected[0] != expected[1] != expected[2]


@pytest.mark.parametrize(
    "settings", [{"template": {"instruction": "find the chart"}}, {"query_max_tokens": 8}]
)
def test_other_request_text_is_encoded_apart(leg, loaded_configs, batches, settings):
    legs = [leg(), leg(**settings)]
    router = Router(SKILLS, fuse_legs(*legs))
    expected = [rank_alone(leg_settings)["q1"] for leg_settings in legs]
    num_loaded = len(loaded_configs)
    batches.clear()

    rankings = router.trace(QUERIES[0].text).rankings_by_ranker

    assert [*rankings.values()] == expected
    assert num_loaded == 3  # one for both legs, and one for each expected ranking
    assert batches == [1, 1]


def test_caches_keep_fields_apart(leg, tmp_path):
    legs = [leg(fields="nd", cache=tmp_path), leg(cache=tmp_path)]
    opened: dict[str, Any] = {}
    for _ in range(2):  # the second round reads the cache
        opened.clear()
        encoders = [
            validate(DenseConfig, leg_settings, "test").open(opened) for leg_settings in legs
        ]

        vectors = [encoder.encode_skills(SKILLS) for encoder in encoders]

        for leg_settings, leg_vectors in zip(legs, vectors, strict=True):
            alone = validate(DenseConfig, leg_settings | {"cache": None}, "test").open({})
            np.testing.assert_array_equal(leg_vectors, alone.encode_skills(SKILLS))
    assert len({encoder.identity for encoder in encoders}) == 2


def test_evaluation_encodes_queries_once_per_system(leg, loaded_configs, batches):
    systems = [new_system("full", [leg()]), new_system("both", fuse_legs(leg(fields="nd"), leg()))]

    run_systems(systems, QUERIES, SKILLS, 5)

    # Skills are encoded for each leg. The queries of the second system are encoded again, because
    # its latency must not depend on the first system.
    assert len(loaded_configs) == 1
    assert [size for size in batches if size == 2] == [2, 2]
