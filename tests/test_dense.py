"""Skills and queries as vectors: each text once, in micro-batches of one length, and through the cache."""

from collections import Counter

import numpy as np
import pytest
import torch

from skilltrain.models.cpu_linear import pack_linear_layers
from skilltrain.records import Skill
from skilltrain.retrieval import dense
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, even_groups, open_encoder
from skilltrain.retrieval.vectors import text_keys
from skilltrain.templates import EncoderTemplate
from tiny_models import WORDS

LENGTHS = {"pods": 3, "chart": 60, "clip": 1, "audio": 20, "pdf": 9, "table": 0}
SKILLS = [
    Skill(f"id of {name}", name, f"find the {name}", "task " * length)
    for name, length in LENGTHS.items()
]


def source(model_folders, name="bert", **settings):
    return EncoderSource(source=str(model_folders[name]), precision="float32", **settings)


def test_skills_and_queries_become_unit_vectors(model_folders):
    encoder = open_encoder(source(model_folders, token_budget=64))
    skills, queries = (
        encoder.encode_skills(SKILLS),
        encoder.encode_queries(["deploy pods", "chart"]),
    )

    assert skills.shape == (6, 32)
    assert queries.shape == (2, 32)
    assert skills.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(np.vstack([skills, queries]), axis=1), 1, atol=1e-6)

    texts = [encoder.model.settings.template.skill.render(skill) for skill in SKILLS]
    with torch.inference_mode():
        alone = torch.cat([encoder.model([ids]) for ids in encoder.model.tokenize(texts, 256)])

    np.testing.assert_allclose(skills, alone.numpy(), atol=1e-5)


def test_the_query_prompt_is_applied_here(model_folders):
    plain = open_encoder(source(model_folders, "qwen3"))
    prompted = open_encoder(
        source(model_folders, "qwen3", template=EncoderTemplate(instruction="find the skill"))
    )

    by_hand = plain.encode_queries(["Instruct: find the skill\nQuery:deploy pods"])

    np.testing.assert_allclose(prompted.encode_queries(["deploy pods"]), by_hand, atol=1e-6)


def counted(encoder, monkeypatch):
    """The texts that the model really encodes, as they come."""
    seen, forward = [], encoder.model.forward
    monkeypatch.setattr(
        encoder.model, "forward", lambda texts: seen.extend(texts) or forward(texts)
    )
    return seen


def test_the_cache_is_asked_first_and_never_mixes_models_or_settings(
    model_folders, tmp_path, monkeypatch
):
    plain = open_encoder(source(model_folders)).encode_skills(SKILLS)
    open_encoder(source(model_folders, cache=tmp_path)).encode_skills(SKILLS[2:4])
    again = open_encoder(source(model_folders, cache=tmp_path))
    seen = counted(again, monkeypatch)

    order = [5, 2, 0, 3, 5, 0, 1]  # repeats, known and new texts

    np.testing.assert_allclose(
        again.encode_skills([SKILLS[n] for n in order]), plain[order], atol=1e-6
    )
    assert len(seen) == 3

    for other in (
        source(model_folders, "qwen3", cache=tmp_path),
        source(model_folders, cache=tmp_path, max_tokens=8),
        source(
            model_folders, "bert_dropout", cache=tmp_path, template=EncoderTemplate(query_chars=3)
        ),
    ):
        encoder = open_encoder(other)
        seen = counted(encoder, monkeypatch)
        encoder.encode_skills(SKILLS)

        assert len(seen) == len(SKILLS)


def test_changed_weights_are_another_model(model_folders, tmp_path, open_encoder_of):
    model = open_encoder_of("bert")
    before = dense._identity(model)

    assert open_encoder(source(model_folders, cache=tmp_path)).identity == before

    for weights in (
        model.backbone.embeddings.word_embeddings.weight,
        model.backbone.encoder.layer[1].output.dense.bias,
    ):
        with torch.no_grad():
            weights.flatten()[5] += 1e-3

        assert dense._identity(model) != before

        before = dense._identity(model)


TWO = [
    Skill("a", "pdf", "find text", "deploy pods"),
    Skill("b", "pdf", "find text", "review the chart"),
]


def test_without_bodies_skills_that_differ_only_there_are_one(model_folders):
    full, nd = (
        open_encoder(source(model_folders, fields=fields)).encode_skills(TWO)
        for fields in ("full", "nd")
    )

    assert (nd[0] == nd[1]).all()
    assert not np.allclose(full[0], full[1])

    bare = [Skill(skill.skill_id, skill.name, skill.description, "") for skill in TWO]

    np.testing.assert_allclose(
        nd, open_encoder(source(model_folders)).encode_skills(bare), atol=1e-6
    )


# Micro-batches ------------------------------------------------------------------------------------


def test_keys_tell_texts_and_limits_apart_and_no_more():
    texts = ["pods", "", "pods ", "日本", "pods"]
    keys = text_keys(texts, 32)

    assert keys[0] == keys[4]
    assert len({*keys.tolist(), *text_keys(texts, 33).tolist()}) == 8


def test_groups_by_hand():
    lengths = [4, 2, 4, 4, 3, 2]

    # Three texts of four tokens are enough for themselves; the others share what they pad to.
    assert even_groups(lengths, 12, enough=12) == [[0, 2, 3], [4, 1, 5]]
    assert even_groups(lengths, 8, enough=8) == [[0, 2], [3, 4], [1, 5]]
    assert even_groups(lengths, 8, enough=1) == [[0, 2], [3], [4], [1, 5]]
    assert even_groups([50, 0], 8, enough=8) == [[0], [1]]
    assert even_groups([], 8, enough=8) == []


def test_every_text_is_in_one_group_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 60, size=500).tolist()
    groups = even_groups(lengths, 100, enough=40)

    assert sorted(position for group in groups for position in group) == list(range(500))

    for group in groups:
        longest = max(lengths[position] for position in group)
        assert longest * len(group) <= 100
        assert lengths[group[0]] == longest

    assert [lengths[group[0]] for group in groups] == sorted(
        (lengths[group[0]] for group in groups), reverse=True
    )


def texts_of(num):
    generator = np.random.default_rng(1)
    return sorted(
        (" ".join(generator.choice(WORDS, size=n % 23 + 1)) for n in range(num)),
        key=len,
        reverse=True,
    )


def encoded(model, texts, token_budget, count=None):
    encoder = SkillEncoder(model, "", token_budget, None, "")
    return encoder.encode_texts(texts, 24, "encoding", Counter() if count is None else count)


@pytest.mark.parametrize(("name", "packed"), [("bert", True), ("qwen3", False)])
def test_blocks_groups_and_packed_layers_give_each_texts_own_vector(
    open_encoder_of, monkeypatch, name, packed
):
    model, texts = open_encoder_of(name), texts_of(50)
    with torch.inference_mode():
        alone = torch.cat([model([ids]) for ids in model.tokenize(texts, 24)]).numpy()
    monkeypatch.setattr(dense, "_BLOCK", 16)
    monkeypatch.setattr(dense, "_TOKENIZED_AT_ONCE", 5)
    monkeypatch.setattr(dense, "_ENOUGH_TOKENS", 40)
    if packed:
        pack_linear_layers(model.backbone, 64)
    found, count = np.full_like(alone, np.nan), Counter()
    for part, vectors in encoded(model, texts, 64, count):
        found[part] = vectors

    np.testing.assert_allclose(found, alone, atol=1e-6)

    tokens = sum(map(len, model.tokenize(texts, 24)))

    assert (count["texts"], count["tokens"]) == (50, tokens)
    assert tokens <= count["slots"] < 1.3 * tokens


def test_a_slow_models_vectors_come_before_the_block_is_done(open_encoder_of, monkeypatch):
    monkeypatch.setattr(dense, "_MAX_SECONDS_BETWEEN_YIELDS", 0)
    parts = [part for part, _ in encoded(open_encoder_of("bert"), texts_of(30), 48)]

    assert len(parts) > 5
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))


def test_tokenising_ahead_gives_the_same(open_encoder_of, monkeypatch):
    model, texts = open_encoder_of("bert"), texts_of(30)
    monkeypatch.setattr(dense, "_BLOCK", 8)
    here = list(dense._tokenized(model, texts, 24))
    monkeypatch.setattr(type(model), "device", torch.device("meta"))  # as if beside a GPU

    there = list(dense._tokenized(model, texts, 24))

    assert [start for start, _ in there] == [0, 8, 16, 24]
    assert [[ids.tolist() for ids in block] for _, block in there] == [
        [i.tolist() for i in block] for _, block in here
    ]
