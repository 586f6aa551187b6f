"""Late interaction: MaxSim and its gradient, trained beside the cosines, and the ranker of kind late."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from skilltrain.losses import InfoNCE, LateInteraction
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
    return torch.stack([torch.stack([(q @ s.T).amax(1).mean() for s in skills]) for q in queries])


def unit_tokens(*lengths):
    return [
        torch.nn.functional.normalize(torch.randn(n, 8, dtype=torch.float64), dim=1)
        for n in lengths
    ]


def test_max_sim_and_its_gradient_are_those_of_amax():
    texts = [text.requires_grad_() for text in unit_tokens(3, 1, 7, 5, 2, 9, 1)]
    queries, skills, weights = texts[:3], texts[3:], torch.randn(3, 4, dtype=torch.float64)

    scores, plain = max_sim(queries, skills), plain_max_sim(queries, skills)

    torch.testing.assert_close(scores, plain, rtol=0, atol=1e-9)

    got, expected = (torch.autograd.grad((each * weights).sum(), texts) for each in (scores, plain))

    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    assert max_sim([], skills).shape == (0, 4)


def test_tokens_stand_behind_their_texts_vector_whatever_is_beside_them(open_encoder_of):
    encoder = open_encoder_of("qwen3").double()
    short, long = encoder.tokenize(["deploy pods", "review the chart " * 9], 60)

    both = encoder.with_tokens([short, long], 70)

    torch.testing.assert_close(both[:, 0], encoder([short, long]))
    torch.testing.assert_close(both[:1, : 1 + len(short)], encoder.with_tokens([short], len(short)))
    assert both.shape[1] == 71
    assert not both[0, 1 + len(short) :].any()
    assert torch.allclose(both[1, : 1 + len(long)].norm(dim=1), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("token_budget", [120, 10**6])
def test_both_losses_are_the_naive_ones_whole_and_in_chunks(open_encoder_of, token_budget):
    encoder = open_encoder_of("bert").double()
    data = training_set(8)
    loss = InfoNCE()
    step = EncoderStep(encoder, loss, data, StepSettings(token_budget))
    skill_ids = sorted({skill_id for one in data.lists for skill_id in one.skill_ids})
    ids = (
        [step.query_ids[one.query] for one in data.lists],
        [step.skill_ids[skill_id] for skill_id in skill_ids],
    )
    vectors = [encoder(texts) for texts in ids]
    scored = encoder_scores(
        data.lists, data.lists, vectors[0], None, skill_ids, vectors[1], step.context
    )
    tokens = [[encoder.with_tokens([text], len(text))[0, 1:] for text in texts] for texts in ids]
    of_tokens = replace(scored, scores=plain_max_sim(*tokens))
    expected = loss(scored) + 0.3 * InfoNCE(temperature=0.1)(of_tokens)
    expected_gradients = gradients(encoder, expected)
    settings = StepSettings(
        token_budget,
        recompute=token_budget == 120,
        late_interaction=LateInteraction(weight=0.3, temperature=0.1),
    )

    got = EncoderStep(encoder, loss, data, settings).train()(data.lists)

    assert got.item() == pytest.approx(expected.item(), abs=1e-9)
    assert got.item() != pytest.approx(loss(scored).item())
    torch.testing.assert_close(gradients(encoder, got), expected_gradients, rtol=0, atol=1e-9)


def sourced(model_folders, **settings):
    return {"source": str(model_folders["bert"]), "precision": "float32", **settings}


@pytest.fixture
def ranker(model_folders):
    return LateConfig(**sourced(model_folders, token_budget=64)).ranker(SKILLS, {})


def candidates(*numbers):
    return [(f"s{number}", 1.0) for number in numbers]


def test_late_orders_candidates_by_max_sim(
    ranker, encoded, open_encoder_of, model_folders, monkeypatch
):
    encoder, given = (
        open_encoder_of("bert"),
        {"q1": candidates(7, 3, 0, 11), "q2": candidates(3, 5)},
    )
    found = ranker.rank(QUERIES, given, 9)
    for query in QUERIES:
        ids = encoder.tokenize_queries([query.text])
        skills = [SKILLS[int(skill_id[1:])] for skill_id, _ in given[query.query_id]]
        texts = encoder.tokenize(
            [encoder.settings.template.skill.render(skill) for skill in skills], 256
        )
        tokens = [
            [encoder.with_tokens([text], len(text))[0, 1:] for text in some]
            for some in (ids, texts)
        ]
        expected = plain_max_sim(*tokens)[0].tolist()

        assert dict(found[query.query_id]) == pytest.approx(
            {skill.skill_id: score for skill, score in zip(skills, expected, strict=True)}, abs=1e-6
        )

        scores = [score for _, score in found[query.query_id]]

        assert scores == sorted(scores, reverse=True)

    encoded.clear()

    assert ranker.rank(QUERIES, given, 2) == {
        query_id: ranking[:2] for query_id, ranking in found.items()
    }
    assert len(encoded) == 2 + 5, "each distinct skill is encoded once"

    monkeypatch.setattr(late, "_MAX_QUERY_TOKENS", 1)
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 2)

    for query_id, ranking in ranker.rank(QUERIES, given, 9).items():
        assert dict(ranking) == pytest.approx(dict(found[query_id]), abs=1e-6)
    assert ranker.rank(QUERIES, {"q1": [], "q2": []}, 9) == {"q1": [], "q2": []}


@pytest.fixture
def encoded(ranker, monkeypatch):
    """The texts whose tokens the ranker really encodes."""
    texts, with_tokens = [], ranker.encoder.with_tokens
    monkeypatch.setattr(
        ranker.encoder, "with_tokens", lambda t, n: texts.extend(t) or with_tokens(t, n)
    )
    return texts


TWINS = {f"t{i}": Skill(f"t{i}", "same", "same text", "") for i in range(3)}


def test_equal_skills_are_compared_once(ranker, encoded):
    given = {"q1": [("t0", 0.0)], "q2": [("t2", 0.0), ("t0", 0.0), ("t1", 0.0)]}

    found = ranker.over(TWINS).rank(QUERIES, given, 3)

    assert len(encoded) == len(QUERIES) + 1
    assert [skill_id for skill_id, _ in found["q2"]] == ["t2", "t0", "t1"]
    assert len({score for _, score in found["q2"]}) == 1


def test_equal_skills_share_stored_vectors(ranker, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 2)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    ranker.save_part(tmp_path / "old", [TWINS["t1"]], None, [-1])
    stored = TokenVectors.load(tmp_path / "old")

    ranker.save_part(tmp_path / "new", [*TWINS.values(), SKILLS[0]], stored, [-1, 0, -1, -1])

    assert len(encoded) == 1 + 1

    vectors = TokenVectors.load(tmp_path / "new")

    assert (
        vectors.rows_of_skill(0).tobytes()
        == vectors.rows_of_skill(1).tobytes()
        == vectors.rows_of_skill(2).tobytes()
    )


def test_stored_vectors_of_tokens_give_the_scores_and_are_encoded_once(
    ranker, encoded, tmp_path, monkeypatch
):
    given = {"q1": candidates(7, 3, 0, 11), "q2": candidates(3, 5)}
    expected = ranker.rank(QUERIES, given, 9)
    encoded.clear()
    monkeypatch.setattr(late, "_SKILLS_AT_ONCE", 5)
    for name, skills, at in (
        ("old", SKILLS[2:], [-1] * 10),
        ("new", SKILLS, [-1, -1, *range(9), -1]),
    ):
        (tmp_path / name).mkdir()
        kept = TokenVectors.load(tmp_path / "old") if name == "new" else None
        ranker.save_part(tmp_path / name, skills, kept, at)

    assert len(encoded) == 10 + 3

    stored = ranker.over(ranker.skills, TokenVectors.load(tmp_path / "new"))

    assert stored.stored.num_skills == len(SKILLS)

    found = stored.rank(QUERIES, given, 9)

    assert len(encoded) == 10 + 3 + 2, "only the queries"
    for query_id, ranking in expected.items():
        assert dict(found[query_id]) == pytest.approx(dict(ranking), abs=3e-3)


def test_a_leg_of_fuse(model_folders, tmp_path):
    legs = [LEXICAL, {"kind": "late", **sourced(model_folders)}]
    first = FuseConfig.model_validate(
        {"of": [LEXICAL, {"kind": "dense", **sourced(model_folders), "cache": tmp_path}]}
    )
    second = FuseConfig.model_validate({"of": legs, "weights": [0.4, 0.6], "keep": 5})
    runs = []

    rankers = with_keeps([first, second], 8)

    ranking = run_rankers(rankers, QUERIES, None, OpenRankers(SKILLS), runs.append)

    bm25, of_late = runs[1].by_leg

    for query_id in ("q1", "q2"):
        assert len(of_late[query_id]) == 8
        assert ranking[query_id] == fuse([bm25[query_id], of_late[query_id]], (0.4, 0.6), "z")[:5]


def test_what_late_interaction_cannot_do_is_refused(model_folders):
    leg = {"kind": "late", **sourced(model_folders)}

    for first in (leg, {"kind": "fuse", "of": [LEXICAL, leg]}):
        with pytest.raises(
            ValidationError,
            match="the first ranker finds skills in the pool; late only orders those",
        ):
            SystemConfig.model_validate({"name": "late", "rankers": [first]})

    recipe = {
        "stage": "train_encoder",
        "model": {"source": leg["source"]},
        "data": {"pool": "p", "lists": "l"},
    }

    with pytest.raises(ValidationError, match="greater than 0"):
        LateInteraction(weight=0)

    recipe |= {"late_interaction": {}, "out": "o", "training": {"varlen": True}}

    with pytest.raises(
        ValidationError, match=r"late_interaction needs all tokens' vectors, and training\.varlen"
    ):
        TrainEncoder.model_validate(recipe)

    rankers = [{"kind": "dense", "source": "self"}, {"kind": "late", "source": "self"}]

    with pytest.raises(ValidationError, match="an encoder in training is"):
        TrainEncoder.model_validate(
            recipe | {"training": {}, "dev": {"benchmark": "b", "rankers": rankers}}
        )
