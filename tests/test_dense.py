"""Vectors of skills and queries: each text is encoded once, in micro-batches, with a cache."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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


def encode_one_by_one(model, texts, max_tokens):
    """Encode each text alone, as the expected vectors."""
    with torch.inference_mode():
        vectors = [model([ids]) for ids in model.tokenize(texts, max_tokens)]
    return torch.cat(vectors).numpy()


def test_vectors_have_unit_length(model_folders):
    encoder = open_encoder(source(model_folders, token_budget=64))

    skills = encoder.encode_skills(SKILLS)
    queries = encoder.encode_queries(["deploy pods", "chart"])

    assert skills.shape == (6, 32)
    assert queries.shape == (2, 32)
    assert skills.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(np.vstack([skills, queries]), axis=1), 1, atol=1e-6)


def test_micro_batches_do_not_change_vectors(model_folders):
    encoder = open_encoder(source(model_folders, token_budget=64))
    texts = [encoder.model.settings.template.skill.render(skill) for skill in SKILLS]
    expected = encode_one_by_one(encoder.model, texts, 256)

    vectors = encoder.encode_skills(SKILLS)

    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_encoder_applies_query_prompt(model_folders):
    plain = open_encoder(source(model_folders, "qwen3"))
    template = EncoderTemplate(instruction="find the skill")
    prompted = open_encoder(source(model_folders, "qwen3", template=template))
    expected = plain.encode_queries(["Instruct: find the skill\nQuery:deploy pods"])

    vectors = prompted.encode_queries(["deploy pods"])

    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def record_encoded_texts(encoder, monkeypatch):
    """Return a list that grows with each text that the model really encodes."""
    texts = []
    forward = encoder.model.forward

    def recording(batch):
        texts.extend(batch)
        return forward(batch)

    monkeypatch.setattr(encoder.model, "forward", recording)
    return texts


def test_cached_texts_are_not_encoded(model_folders, tmp_path, monkeypatch):
    plain = open_encoder(source(model_folders)).encode_skills(SKILLS)
    open_encoder(source(model_folders, cache=tmp_path)).encode_skills(SKILLS[2:4])
    encoder = open_encoder(source(model_folders, cache=tmp_path))
    texts = record_encoded_texts(encoder, monkeypatch)
    order = [5, 2, 0, 3, 5, 0, 1]  # repeated, cached and new texts

    vectors = encoder.encode_skills([SKILLS[position] for position in order])

    np.testing.assert_allclose(vectors, plain[order], atol=1e-6)
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen3", {}),
        ("bert", {"max_tokens": 8}),
        ("bert_dropout", {"template": EncoderTemplate(query_chars=3)}),
    ],
)
def test_cache_separates_models(model_folders, tmp_path, monkeypatch, model, settings):
    open_encoder(source(model_folders, cache=tmp_path)).encode_skills(SKILLS)
    encoder = open_encoder(source(model_folders, model, cache=tmp_path, **settings))
    texts = record_encoded_texts(encoder, monkeypatch)

    encoder.encode_skills(SKILLS)

    assert len(texts) == len(SKILLS)


def test_changed_weights_change_identity(model_folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folders["bert"], folder)
    old_identity = open_encoder(EncoderSource(source=str(folder), cache=tmp_path)).identity
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).flatten()[5] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    identity = open_encoder(EncoderSource(source=str(folder), cache=tmp_path)).identity

    assert identity != old_identity


def test_precision_changes_identity(model_folders, tmp_path):
    float32 = EncoderSource(source=str(model_folders["bert"]), precision="float32", cache=tmp_path)
    bfloat16 = float32.model_copy(update={"precision": "bfloat16"})

    assert open_encoder(float32).identity != open_encoder(bfloat16).identity


SAME_BUT_BODY = [
    Skill("a", "pdf", "find text", "deploy pods"),
    Skill("b", "pdf", "find text", "review the chart"),
]


def test_fields_nd_ignores_bodies(model_folders):
    full = open_encoder(source(model_folders, fields="full"))
    nd = open_encoder(source(model_folders, fields="nd"))
    without_bodies = [replace(skill, body="") for skill in SAME_BUT_BODY]

    full_vectors = full.encode_skills(SAME_BUT_BODY)
    nd_vectors = nd.encode_skills(SAME_BUT_BODY)

    assert not np.allclose(full_vectors[0], full_vectors[1])
    assert (nd_vectors[0] == nd_vectors[1]).all()
    np.testing.assert_allclose(nd_vectors, full.encode_skills(without_bodies), atol=1e-6)


# Micro-batches ------------------------------------------------------------------------------------


def test_cache_keys_depend_on_limit():
    texts = ["pods", "", "pods ", "日本", "pods"]

    keys = text_keys(texts, 32).tolist()
    keys_of_other_limit = text_keys(texts, 33).tolist()

    assert keys[0] == keys[4]
    assert len({*keys, *keys_of_other_limit}) == 8


@pytest.mark.parametrize(
    ("lengths", "budget", "enough", "groups"),
    [
        # Three texts of four tokens fill a group; the others share what they pad to.
        ([4, 2, 4, 4, 3, 2], 12, 12, [[0, 2, 3], [4, 1, 5]]),
        ([4, 2, 4, 4, 3, 2], 8, 8, [[0, 2], [3, 4], [1, 5]]),
        ([4, 2, 4, 4, 3, 2], 8, 1, [[0, 2], [3], [4], [1, 5]]),
        ([50, 0], 8, 8, [[0], [1]]),
        ([], 8, 8, []),
    ],
)
def test_groups_by_hand(lengths, budget, enough, groups):
    assert even_groups(lengths, budget, min_tokens=enough) == groups


def test_groups_hold_every_text_within_budget():
    lengths = np.random.default_rng(0).integers(1, 60, size=500)

    groups = even_groups(lengths.tolist(), 100, min_tokens=40)

    assert sorted(np.concatenate(groups).tolist()) == list(range(500))
    longest_lengths = [lengths[group].max() for group in groups]
    assert longest_lengths == sorted(longest_lengths, reverse=True)
    for group, longest in zip(groups, longest_lengths, strict=True):
        assert lengths[group[0]] == longest
        assert longest * len(group) <= 100


def texts_of(num):
    """Return random texts of up to 23 words, the longest first."""
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(WORDS, size=number % 23 + 1)) for number in range(num)]
    return sorted(texts, key=len, reverse=True)


def encode_in_parts(model, texts, token_budget, count=None):
    """Yield positions and vectors of texts; `count` gets the numbers of texts and tokens."""
    encoder = SkillEncoder(model, "", token_budget, None, "")
    return encoder.encode_texts(texts, 24, "encoding", Counter() if count is None else count)


@pytest.mark.parametrize(("name", "packed"), [("bert", True), ("qwen3", False)])
def test_small_blocks_do_not_change_vectors(open_encoder_of, monkeypatch, name, packed):
    model = open_encoder_of(name)
    texts = texts_of(50)
    expected = encode_one_by_one(model, texts, 24)
    num_tokens = sum(map(len, model.tokenize(texts, 24)))
    monkeypatch.setattr(dense, "_TEXTS_PER_BLOCK", 16)
    monkeypatch.setattr(dense, "_TOKENIZED_AT_ONCE", 5)
    monkeypatch.setattr(dense, "_ENOUGH_TOKENS", 40)
    if packed:
        pack_linear_layers(model.backbone, 64)

    vectors = np.full_like(expected, np.nan)
    count = Counter()
    for positions, part in encode_in_parts(model, texts, 64, count):
        vectors[positions] = part

    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert count["texts"] == 50
    assert count["tokens"] == num_tokens
    assert num_tokens <= count["slots"] < 1.3 * num_tokens


def test_slow_model_yields_before_block_ends(open_encoder_of, monkeypatch):
    monkeypatch.setattr(dense, "_MAX_SECONDS_BETWEEN_YIELDS", 0)

    blocks = list(encode_in_parts(open_encoder_of("bert"), texts_of(30), 48))

    positions = np.concatenate([part for part, _ in blocks])
    assert len(blocks) > 5
    assert sorted(positions.tolist()) == list(range(30))


def test_tokenizing_ahead_gives_same_tokens(open_encoder_of, monkeypatch):
    model = open_encoder_of("bert")
    texts = texts_of(30)
    monkeypatch.setattr(dense, "_TEXTS_PER_BLOCK", 8)
    expected = list(dense._tokenize_blocks(model, texts, 24))
    monkeypatch.setattr(type(model), "device", torch.device("meta"))  # as if on a GPU

    blocks = list(dense._tokenize_blocks(model, texts, 24))

    assert [start for start, _ in blocks] == [0, 8, 16, 24]
    for (_, token_ids), (_, expected_ids) in zip(blocks, expected, strict=True):
        for ids, expected_of_text in zip(token_ids, expected_ids, strict=True):
            assert ids.tolist() == expected_of_text.tolist()
