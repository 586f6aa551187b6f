"""Late interaction: MaxSim, its gradient, its loss in training and the ranker of kind late."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from skilltrain.losses import KL, InfoNCE, LateInteraction, WeightedSum
from skilltrain.losses.weighted_sum import WeightedLoss
from skilltrain.models.pooling import max_sim
from skilltrain.records import Query, Skill
from skilltrain.retrieval import late
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.executor import OpenRankers, run_rankers, with_keeps
from skilltrain.retrieval.fusion import FuseConfig, fuse
from skilltrain.retrieval.late import LateConfig, TokenVectors
from skilltrain.training.scores import encoder_scores
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.train import TrainEncoder
from test_steps import gradients
from tiny_models import WORDS
from training_data import training_set

SKILLS = [
    Skill(f"s{i}", f"name {i}", f"{word} task", f"find the {word} " * (i + 1))
    for i, word in enumerate(WORDS[2:14])
]
QUERIES = [
    Query("q1", "deploy pods and review the chart", "", "", ""),
    Query("q2", "pdf", "", "", ""),
]
LEXICAL = {"kind": "lexical"}


def plain_max_sim(queries, skills):
    """Compute MaxSim pair by pair, as the expected scores."""
    scores = torch.empty(len(queries), len(skills), dtype=queries[0].dtype)
    for row, query in enumerate(queries):
        for column, skill in enumerate(skills):
            scores[row, column] = (query @ skill.T).amax(1).mean()
    return scores


def unit_tokens(*lengths):
    """Return random texts of unit token vectors, one text for each length."""
    return [
        torch.nn.functional.normalize(torch.randn(length, 8, dtype=torch.float64), dim=1)
        for length in lengths
    ]


def token_vectors(encoder, token_ids):
    """Encode each text alone and return its token vectors, without the vector of the text."""
    return [encoder.with_tokens([ids], len(ids))[0, 1:] for ids in token_ids]


def test_max_sim_equals_amax():
    texts = [text.requires_grad_() for text in unit_tokens(3, 1, 7, 5, 2, 9, 1)]
    queries = texts[:3]
    skills = texts[3:]
    weights = torch.randn(3, 4, dtype=torch.float64)
    expected = plain_max_sim(queries, skills)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), texts)

    scores = max_sim(queries, skills)
    gradients_of_texts = torch.autograd.grad((scores * weights).sum(), texts)

    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradients_of_texts, expected_gradients, rtol=0, atol=1e-9)


def test_max_sim_takes_no_queries():
    assert max_sim([], unit_tokens(5, 2, 9, 1)).shape == (0, 4)


def test_token_vectors_ignore_batch(open_encoder_of):
    encoder = open_encoder_of("qwen3").double()
    short, long = encoder.tokenize(["deploy pods", "review the chart " * 9], 60)

    both = encoder.with_tokens([short, long], 70)

    # Position 0 holds the vector of the text, the tokens follow, then zeros.
    assert both.shape[1] == 71
    torch.testing.assert_close(both[:, 0], encoder([short, long]))
    short_vectors = encoder.with_tokens([short], len(short))
    torch.testing.assert_close(both[:1, : 1 + len(short)], short_vectors)
    assert not both[0, 1 + len(short) :].any()
    norms = both[1, : 1 + len(long)].norm(dim=1)
    assert torch.allclose(norms, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("token_budget", [120, 10**6])
def test_micro_batches_do_not_change_loss(open_encoder_of, token_budget):
    encoder = open_encoder_of("bert").double()
    data = training_set(8)
    loss = InfoNCE()
    step = EncoderStep(encoder, loss, data, StepSettings(token_budget))

    # The expected loss: all texts in one batch, MaxSim pair by pair.
    skill_ids = sorted(set().union(*[training_list.skill_ids for training_list in data.lists]))
    query_tokens = [step.query_token_ids[training_list.query] for training_list in data.lists]
    skill_tokens = [step.skill_token_ids[skill_id] for skill_id in skill_ids]
    scored = encoder_scores(
        data.lists,
        data.lists,
        encoder(query_tokens),
        None,
        skill_ids,
        encoder(skill_tokens),
        step.context,
    )
    scores = plain_max_sim(
        token_vectors(encoder, query_tokens), token_vectors(encoder, skill_tokens)
    )
    token_loss = InfoNCE(temperature=0.1)(replace(scored, scores=scores))
    expected = loss(scored) + 0.3 * token_loss
    expected_gradients = gradients(encoder, expected)

    settings = StepSettings(
        token_budget,
        recompute=token_budget == 120,
        late_interaction=LateInteraction(weight=0.3, temperature=0.1),
    )
    value = EncoderStep(encoder, loss, data, settings).train()(data.lists)

    assert value.item() == pytest.approx(expected.item(), abs=1e-9)
    assert value.item() != pytest.approx(loss(scored).item())
    torch.testing.assert_close(gradients(encoder, value), expected_gradients, rtol=0, atol=1e-9)


def encoder_settings(model_folders, **settings):
    return {"source": str(model_folders["bert"]), "precision": "float32", **settings}


@pytest.fixture
def ranker(model_folders):
    return LateConfig(**encoder_settings(model_folders, token_budget=64)).ranker(SKILLS, {})


def candidates(*numbers):
    return [(f"s{number}", 1.0) for number in numbers]


CANDIDATES = {"q1": candidates(7, 3, 0, 11), "q2": candidates(3, 5)}


def test_late_scores_candidates_by_max_sim(ranker, open_encoder_of):
    encoder = open_encoder_of("bert")

    rankings = ranker.rank(QUERIES, CANDIDATES, 9)

    for query in QUERIES:
        skills = [ranker.skills[skill_id] for skill_id, _ in CANDIDATES[query.query_id]]
        texts = [encoder.settings.template.skill.render(skill) for skill in skills]
        query_vectors = token_vectors(encoder, encoder.tokenize_queries([query.text]))
        skill_vectors = token_vectors(encoder, encoder.tokenize(texts, 256))
        scores = plain_max_sim(query_vectors, skill_vectors)[0].tolist()
        skill_ids = [skill.skill_id for skill in skills]
        expected = dict(zip(skill_ids, scores, strict=True))
        assert dict(rankings[query.query_id]) == pytest.approx(expected, abs=1e-6)


def test_late_sorts_candidates_by_score(ranker):
    for ranking in ranker.rank(QUERIES, CANDIDATES, 9).values():
        scores = [score for _, score in ranking]
        assert scores == sorted(scores, reverse=True)


def test_late_keeps_best_candidates(ranker):
    whole = ranker.rank(QUERIES, CANDIDATES, 9)

    shortened = ranker.rank(QUERIES, CANDIDATES, 2)

    assert shortened == {query_id: ranking[:2] for query_id, ranking in whole.items()}


def test_late_encodes_each_skill_once(ranker, encoded):
    ranker.rank(QUERIES, CANDIDATES, 9)

    assert len(encoded) == len(QUERIES) + 5


def test_small_batches_do_not_change_late_scores(ranker, monkeypatch):
    expected = ranker.rank(QUERIES, CANDIDATES, 9)
    monkeypatch.setattr(late, "_MAX_QUERY_TOKENS", 1)
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 2)

    rankings = ranker.rank(QUERIES, CANDIDATES, 9)

    assert rankings.keys() == expected.keys()
    for query_id, ranking in rankings.items():
        assert dict(ranking) == pytest.approx(dict(expected[query_id]), abs=1e-6)


def test_late_ranks_no_candidates(ranker):
    nothing = {"q1": [], "q2": []}

    assert ranker.rank(QUERIES, nothing, 9) == nothing


@pytest.fixture
def encoded(ranker, monkeypatch):
    """Return a list that grows with each text whose tokens the ranker really encodes."""
    texts = []
    with_tokens = ranker.encoder.with_tokens

    def recording(batch, length):
        texts.extend(batch)
        return with_tokens(batch, length)

    monkeypatch.setattr(ranker.encoder, "with_tokens", recording)
    return texts


TWINS = {f"t{i}": Skill(f"t{i}", "same", "same text", "") for i in range(3)}


def test_equal_skills_are_encoded_once(ranker, encoded):
    equal_candidates = {"q1": [("t0", 0.0)], "q2": [("t2", 0.0), ("t0", 0.0), ("t1", 0.0)]}

    rankings = ranker.over(TWINS).rank(QUERIES, equal_candidates, 3)

    assert len(encoded) == len(QUERIES) + 1
    assert [skill_id for skill_id, _ in rankings["q2"]] == ["t2", "t0", "t1"]
    assert len({score for _, score in rankings["q2"]}) == 1


def test_equal_skills_share_stored_vectors(ranker, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 2)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    ranker.save_part(tmp_path / "old", [TWINS["t1"]], None, [-1])
    stored = TokenVectors.load(tmp_path / "old")

    ranker.save_part(tmp_path / "new", [*TWINS.values(), SKILLS[0]], stored, [-1, 0, -1, -1])

    assert len(encoded) == 1 + 1
    vectors = TokenVectors.load(tmp_path / "new")
    rows = [vectors.rows_of_skill(position).tobytes() for position in range(3)]
    assert rows[0] == rows[1] == rows[2]


@pytest.fixture
def stored_ranker(ranker, tmp_path, monkeypatch):
    """A ranker over token vectors on disk: first ten skills were stored, then all twelve."""
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 5)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    ranker.save_part(tmp_path / "old", SKILLS[2:], None, [-1] * 10)
    stored = TokenVectors.load(tmp_path / "old")
    positions = [-1, -1, *range(9), -1]  # in `stored`; -1: to encode
    ranker.save_part(tmp_path / "new", SKILLS, stored, positions)
    return ranker.over(ranker.skills, TokenVectors.load(tmp_path / "new"))


def test_stored_skills_are_not_encoded(encoded, stored_ranker):
    assert len(encoded) == 10 + 3
    assert stored_ranker.stored.num_skills == len(SKILLS)
    encoded.clear()

    stored_ranker.rank(QUERIES, CANDIDATES, 9)

    assert len(encoded) == len(QUERIES)


def test_stored_vectors_give_same_scores(ranker, stored_ranker):
    expected = ranker.rank(QUERIES, CANDIDATES, 9)

    rankings = stored_ranker.rank(QUERIES, CANDIDATES, 9)

    assert rankings.keys() == expected.keys()
    for query_id, ranking in rankings.items():
        assert dict(ranking) == pytest.approx(dict(expected[query_id]), abs=3e-3)


def test_late_ranks_in_fuse(model_folders, tmp_path):
    dense = {"kind": "dense", **encoder_settings(model_folders), "cache": tmp_path}
    first = FuseConfig.model_validate({"of": [LEXICAL, dense]})
    legs = [LEXICAL, {"kind": "late", **encoder_settings(model_folders)}]
    second = FuseConfig.model_validate({"of": legs, "weights": [0.4, 0.6], "keep": 5})
    stages = []

    rankings = run_rankers(
        with_keeps([first, second], 8), QUERIES, None, OpenRankers(SKILLS), stages.append
    )

    bm25, late_scores = stages[1].by_leg
    for query_id in ("q1", "q2"):
        assert len(late_scores[query_id]) == 8
        expected = fuse([bm25[query_id], late_scores[query_id]], (0.4, 0.6), "z")[:5]
        assert rankings[query_id] == expected


LATE = {"kind": "late", "source": "m"}


@pytest.mark.parametrize("ranker", [LATE, {"kind": "fuse", "of": [LEXICAL, LATE]}])
def test_late_cannot_be_first_ranker(ranker):
    message = "the first ranker finds skills in the pool; late only orders those"

    with pytest.raises(ValidationError, match=message):
        SystemConfig.model_validate({"name": "late", "rankers": [ranker]})


def test_late_loss_needs_positive_weight():
    with pytest.raises(ValidationError, match="greater than 0"):
        LateInteraction(weight=0)


TEACHER_AND_LABELS = WeightedSum(
    name="sum",
    parts={
        "labels": WeightedLoss(loss=InfoNCE()),
        "teacher": WeightedLoss(loss=KL()),
    },
)


@pytest.mark.parametrize(("loss", "has_in_batch"), [(TEACHER_AND_LABELS, True), (KL(), False)])
def test_late_loss_keeps_in_batch_negatives(open_encoder_of, monkeypatch, loss, has_in_batch):
    batches = []

    def keep_batch(_, batch):
        batches.append(batch)
        return batch.scores.sum()

    monkeypatch.setattr(LateInteraction, "__call__", keep_batch)
    data = training_set(4)
    lists = tuple(replace(each, teacher_scores=each.gains) for each in data.lists)
    settings = StepSettings(512, late_interaction=LateInteraction())
    step = EncoderStep(open_encoder_of("bert"), loss, replace(data, lists=lists), settings)

    step(lists)

    num_own = sum(len(each.skill_ids) for each in lists)
    num_valid = int(batches[0].valid.sum())
    assert num_valid > num_own if has_in_batch else num_valid == num_own


SELF = [{"kind": "dense", "source": "self"}, {"kind": "late", "source": "self"}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"training": {"varlen": True}},
            r"late_interaction needs all tokens' vectors, and training\.varlen",
        ),
        ({"dev": {"benchmark": "b", "rankers": SELF}}, "an encoder in training must be"),
    ],
)
def test_recipe_of_late_interaction_is_refused(settings, message):
    recipe = {
        "stage": "train_encoder",
        "model": {"source": "m"},
        "data": {"pool": "p", "lists": "l"},
        "late_interaction": {},
        "out": "o",
    }

    with pytest.raises(ValidationError, match=message):
        TrainEncoder.model_validate(recipe | settings)


def test_threads_read_stored_vectors(stored_ranker, monkeypatch):
    """Windows has no `os.pread`, so threads share the position in the file."""
    monkeypatch.delattr(os, "pread")
    read = stored_ranker.stored.rows_of_skill
    positions = [*range(len(SKILLS))] * 20
    expected = [read(position).tobytes() for position in positions]

    with ThreadPoolExecutor(8) as threads:
        rows = [array.tobytes() for array in threads.map(read, positions)]

    assert rows == expected
