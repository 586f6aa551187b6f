import numpy as np
import torch

from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, _identity, encode_queries, encode_skills, open_encoder
from skilltrain.templates import EncoderTemplate

LENGTHS = {"pods": 3, "chart": 60, "clip": 1, "audio": 20, "pdf": 9, "table": 0}
SKILLS = [Skill(f"id of {name}", name, f"find the {name}", "task " * length) for name, length in LENGTHS.items()]


def source(model_folders, name="bert", **settings):
    return EncoderSource(source=str(model_folders[name]), precision="float32", **settings)


def test_skills_and_queries_become_unit_vectors(model_folders):
    encoder = open_encoder(source(model_folders, token_budget=64))
    skills, queries = encode_skills(encoder, SKILLS), encode_queries(encoder, ["deploy pods", "chart"])
    assert skills.shape == (6, 32) and queries.shape == (2, 32) and skills.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(np.vstack([skills, queries]), axis=1), 1, atol=1e-6)
    texts = [encoder.model.settings.template.skill.render(skill) for skill in SKILLS]
    with torch.inference_mode():
        alone = torch.cat([encoder.model([ids]) for ids in encoder.model.tokenize(texts, 256)])
    np.testing.assert_allclose(skills, alone.numpy(), atol=1e-5)


def test_the_query_prompt_is_applied_here(model_folders):
    plain = open_encoder(source(model_folders, "qwen3"))
    prompted = open_encoder(source(model_folders, "qwen3", template=EncoderTemplate(instruction="find the skill")))
    by_hand = encode_queries(plain, ["Instruct: find the skill\nQuery:deploy pods"])
    np.testing.assert_allclose(encode_queries(prompted, ["deploy pods"]), by_hand, atol=1e-6)


def counted(encoder, monkeypatch):
    """The texts that the model really encodes, as they come."""
    seen, forward = [], encoder.model.forward
    monkeypatch.setattr(encoder.model, "forward", lambda texts: seen.extend(texts) or forward(texts))
    return seen


def test_equal_texts_are_encoded_once(model_folders, monkeypatch):
    encoder = open_encoder(source(model_folders))
    seen = counted(encoder, monkeypatch)
    vectors = encode_skills(encoder, [SKILLS[0], SKILLS[1], SKILLS[0]])
    assert len(seen) == 2 and (vectors[0] == vectors[2]).all()


def test_the_cache_is_asked_first_and_never_mixes_models_or_settings(model_folders, tmp_path, monkeypatch):
    first = open_encoder(source(model_folders, cache=tmp_path))
    vectors = encode_skills(first, SKILLS[:4])
    again = open_encoder(source(model_folders, cache=tmp_path))
    seen = counted(again, monkeypatch)
    assert (encode_skills(again, SKILLS)[:4] == vectors).all()
    assert len(seen) == 2
    for other in (
        source(model_folders, "qwen3", cache=tmp_path),
        source(model_folders, cache=tmp_path, max_tokens=8),
        source(model_folders, "bert_dropout", cache=tmp_path, template=EncoderTemplate(query_chars=3)),
    ):
        encoder = open_encoder(other)
        seen = counted(encoder, monkeypatch)
        encode_skills(encoder, SKILLS)
        assert len(seen) == len(SKILLS)


def test_changed_weights_are_another_model(model_folders, tmp_path, open_encoder_of):
    model = open_encoder_of("bert")
    before = _identity(model)
    assert open_encoder(source(model_folders, cache=tmp_path)).identity == before
    for weights in (
        model.backbone.embeddings.word_embeddings.weight,
        model.backbone.encoder.layer[1].output.dense.bias,
    ):
        with torch.no_grad():
            weights.flatten()[5] += 1e-3
        assert _identity(model) != before
        before = _identity(model)


def test_repeats_known_and_new_texts_come_in_order(model_folders, tmp_path, monkeypatch):
    plain = encode_skills(open_encoder(source(model_folders)), SKILLS)
    encoder = open_encoder(source(model_folders, cache=tmp_path))
    encode_skills(encoder, SKILLS[2:4])
    seen = counted(encoder, monkeypatch)
    order = [5, 2, 0, 3, 5, 0, 1]
    np.testing.assert_allclose(encode_skills(encoder, [SKILLS[n] for n in order]), plain[order], atol=1e-6)
    assert len(seen) == 3


TWO = [Skill("a", "pdf", "find text", "deploy pods"), Skill("b", "pdf", "find text", "review the chart")]


def test_without_bodies_skills_that_differ_only_there_are_one(model_folders):
    full, nd = (encode_skills(open_encoder(source(model_folders, fields=fields)), TWO) for fields in ("full", "nd"))
    assert (nd[0] == nd[1]).all() and not np.allclose(full[0], full[1])
    plain = encode_skills(open_encoder(source(model_folders)), TWO)
    np.testing.assert_array_equal(full, plain)
    bare = [Skill(skill.skill_id, skill.name, skill.description, "") for skill in TWO]
    np.testing.assert_allclose(nd, encode_skills(open_encoder(source(model_folders)), bare), atol=1e-6)
