"""Exported forms give the scores of the model that they were made from, in the programs that they are for."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from skilltrain.errors import SkilltrainError
from skilltrain.export.card import RunRecord, model_card
from skilltrain.export.forms import ONNX, ONNX_INT8, write_form
from skilltrain.export.push import check_round_trip
from skilltrain.models.pooling import max_sim
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.models.saving import save_model
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate
from test_export import scores_of
from test_model_card import QUERY, SKILLS, run_program

CPU = torch.device("cpu")
MANY = [*SKILLS, Skill("3", "运行 💥", "", "yes</think> no"), Skill("4", "", "", "")]


@pytest.fixture
def reranker(tmp_path, open_reranker_of):
    """A Qwen3 reranker, saved in tmp_path/model."""
    found = open_reranker_of("qwen3_reranker", max_tokens=400)
    save_model(found, tmp_path / "model", base="b")
    return found


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_one_output_in_place_of_a_vocabulary_gives_the_same_scores(tmp_path, reranker):
    """In plain transformers, padded on either side; in CrossEncoder, cut texts included; and read back by us."""
    folder, wanted = tmp_path / "model", scores_of(reranker, QUERY, MANY[1:])
    write_form(folder, "sequence_classification")
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (
        network.config.num_labels == 1
        and type(network).__name__ == "Qwen3ForSequenceClassification"
    )
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
        chats = [
            [
                {"role": "query", "content": QUERY},
                {"role": "document", "content": reranker.settings.template.render_skill(skill)},
            ]
            for skill in MANY[1:]
        ]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        with torch.inference_mode():
            found = network(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
        # The third skill's control token is broken up by a space in the chat template.
        assert torch.allclose(found[[0, 2]], wanted[[0, 2]], atol=1e-5)
    cut = Skill("5", "cut", "table", "review the commit and merge " * 60)
    pairs = [(QUERY, reranker.settings.template.render_skill(skill)) for skill in (*SKILLS, cut)]
    plain = CrossEncoder(str(folder), device="cpu").predict(pairs, convert_to_tensor=True)
    assert torch.allclose(plain, scores_of(reranker, QUERY, [*SKILLS, cut]), atol=1e-5)
    again = load_reranker(RerankerConfig(source=str(folder)), CPU)
    assert again.is_packed and torch.allclose(
        scores_of(again, QUERY, MANY), scores_of(reranker, QUERY, MANY), atol=1e-5
    )
    check_round_trip(folder)
    # What vLLM and TEI read: the task, the number of outputs, what follows the head, and how two texts become one.
    config, record = read(folder, "config.json"), read(folder, "skilltrain.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]  # both: the task
    assert (config["id2label"], config["label2id"]) == (
        {"0": "LABEL_0"},
        {"LABEL_0": 0},
    )  # one label: a reranker
    assert config["pad_token_id"] == reranker.tokenizer.pad_token_id
    assert (
        config["use_sep_token"] is config["use_pad_token"] is False
    )  # vLLM: query and document are one text
    assert (
        config["sentence_transformers"]["activation_fn"] == "torch.nn.modules.linear.Identity"
    )  # vLLM: no sigmoid
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert "{%- set INSTRUCTION" in (folder / "chat_template.jinja").read_text(
        encoding="utf-8"
    )  # vLLM --chat-template
    weights = load_file(folder / "model.safetensors")
    assert weights["score.weight"].shape == (1, 32)  # vLLM: a head named score, without bias
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    assert record["form"] == "sequence_classification" and not any(
        "LogitScore" in name for name in files
    )
    assert set(record["files"]) == files.keys()
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o644}


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "last_token")]
)
def test_the_keys_that_tei_and_vllm_read_of_an_encoder(tmp_path, open_encoder_of, name, pooling):
    """Both know a limit by max_seq_length (vLLM only beside do_lower_case) and the pooling by 1_Pooling's flags."""
    template = EncoderTemplate(instruction="Find the skill")
    save_model(
        open_encoder_of(name, pooling=pooling, max_tokens=32, template=template),
        tmp_path,
        base=name,
    )
    transformer, own = (
        read(tmp_path, "sentence_bert_config.json"),
        read(tmp_path, "1_Pooling/config.json"),
    )
    assert (transformer["max_seq_length"], transformer["do_lower_case"]) == (32, False)
    flag = {"cls": "cls_token", "mean": "mean_tokens", "last_token": "lasttoken"}[pooling]
    for each in ("cls_token", "mean_tokens", "lasttoken", "max_tokens", "mean_sqrt_len_tokens"):
        assert own[f"pooling_mode_{each}"] is (each == flag)
    assert "word_embedding_dimension" not in own
    kinds = [
        module["type"] for module in read(tmp_path, "modules.json")
    ]  # the names that both compare with
    assert kinds == [
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "sentence_transformers.base.modules.normalize.Normalize",
    ]
    prompts = read(tmp_path, "config_sentence_transformers.json")[
        "prompts"
    ]  # TEI: a map of strings
    assert prompts == {"query": "Instruct: Find the skill\nQuery:", "document": ""}
    config = read(tmp_path, "config.json")
    assert config["architectures"][0].endswith("Model") and config["max_position_embeddings"] >= 32
    assert config.get("pad_token_id", 0) is not None  # TEI takes none, but no null
    if name == "qwen3":
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (tmp_path / "tokenizer.json").is_file()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {
        0o644
    }


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_late_interaction_opens_as_a_multi_vector_encoder(
    tmp_path, open_encoder_of, monkeypatch, name
):
    encoder = open_encoder_of(name, max_tokens=32, query_max_tokens=24)
    save_model(encoder, tmp_path, base=name)
    write_form(tmp_path, "multi_vector")
    plain = MultiVectorEncoder(str(tmp_path), device="cpu")
    texts = [encoder.settings.template.skill.render(skill) for skill in MANY]
    queries = [QUERY, "deploy the pods " * 20, "运行"]
    ids = encoder.tokenize(texts, 32), encoder.tokenize_queries(queries)
    with torch.inference_mode():
        skills, asked = (
            [encoder.with_tokens([text], len(text))[0][1:] for text in some] for some in ids
        )
    found = plain.similarity(plain.encode_query(queries), plain.encode_document(texts))
    assert torch.allclose(found, max_sim(asked, skills), atol=1e-5)
    check_round_trip(tmp_path)
    card = model_card(
        RunRecord(encoder.settings, {"model": {"source": name}}, {}, form="multi_vector")
    )
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    ours = max_sim(asked[:1], skills[:2])[0]
    assert np.allclose(run_program(card, tmp_path, monkeypatch), ours.numpy(), atol=1e-5)
    assert "kind: late" in card and not (tmp_path / "1_Pooling").exists()


def run_onnx(file, inputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    return onnxruntime.InferenceSession(file).run(None, inputs)[0]


def arrays(tokenizer, *texts):
    return {
        name: value.numpy()
        for name, value in tokenizer(*texts, padding=True, return_tensors="pt").items()
    }


@pytest.mark.slow
def test_onnx_computes_an_encoders_token_vectors(tmp_path, open_encoder_of):
    """Under the names that TEI and sentence-transformers give inputs and output, for texts of any length."""
    pytest.importorskip("onnxscript")
    encoder = open_encoder_of("bert", max_tokens=32)
    save_model(encoder, tmp_path, base="b")
    write_form(tmp_path, "onnx")
    inputs = arrays(
        AutoTokenizer.from_pretrained(tmp_path),
        ["deploy pods", "review the commit and merge it", "a"],
    )
    with torch.inference_mode():
        wanted = encoder.backbone(
            **{name: torch.from_numpy(value) for name, value in inputs.items()}
        )
    real = inputs["attention_mask"].astype(bool)
    found = run_onnx(tmp_path / ONNX, inputs)
    assert np.allclose(found[real], wanted.last_hidden_state.numpy()[real], atol=1e-4)
    rough = run_onnx(tmp_path / ONNX_INT8, inputs)[real]
    exact = found[real]
    cosines = (rough * exact).sum(1) / np.linalg.norm(rough, axis=1) / np.linalg.norm(exact, axis=1)
    assert not np.array_equal(rough, exact) and cosines.min() > 0.95
    assert {ONNX, ONNX_INT8} <= set(read(tmp_path, "skilltrain.json")["files"])


@pytest.mark.slow
def test_onnx_computes_the_scores_of_a_chat_reranker(tmp_path, reranker):
    """TEI takes the folder for a reranker by its architecture and its one label."""
    pytest.importorskip("onnxscript")
    folder = tmp_path / "model"
    documents = [reranker.settings.template.render_skill(skill) for skill in SKILLS]

    write_form(folder, "onnx")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        for document in documents
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    logits = run_onnx(folder / ONNX, arrays(tokenizer, texts))
    assert np.allclose(logits[:, 0], scores_of(reranker, QUERY, SKILLS).numpy(), atol=1e-4)
    config = read(folder, "config.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    check_round_trip(folder)


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("encoder", "sequence_classification", r"only a reranker with template\.form=yes_no has"),
        ("pair", "sequence_classification", "one of form pair is a classifier already"),
        ("pair", "multi_vector", "form multi_vector: only an encoder has this form"),
    ],
)
def test_a_model_without_the_form_is_refused(
    tmp_path, open_reranker_of, open_encoder_of, name, form, message
):
    is_encoder = name == "encoder"
    model = open_encoder_of("bert") if is_encoder else open_reranker_of("bert_reranker")
    save_model(model, tmp_path, base="b")

    with pytest.raises(SkilltrainError, match=message) as caught:
        write_form(tmp_path, form)

    assert str(tmp_path) not in str(caught.value)  # a hidden folder while a run is exported


def test_a_missing_package_is_named(tmp_path, open_encoder_of, monkeypatch):
    save_model(open_encoder_of("bert"), tmp_path, base="b")
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    message = r"needs the package onnxscript \(pip install 'skilltrain\[onnx\]'\)"
    with pytest.raises(SkilltrainError, match=message):
        write_form(tmp_path, "onnx")
