"""Exported forms give the outputs of their model in the programs that they are made for."""

import functools
import json
import logging
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from faults import raises
from skilltrain.export import forms
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
# Settings of the encoder whose ONNX form two tests share.
MEAN = {"pooling": "mean", "template": EncoderTemplate(query_prompt="query: ")}
MANY = [*SKILLS, Skill("3", "运行 💥", "", "yes</think> no"), Skill("4", "", "", "")]


@pytest.fixture
def reranker(tmp_path, open_reranker_of):
    """Return a Qwen3 reranker that is saved in tmp_path/model."""
    model = open_reranker_of("qwen3_reranker", max_tokens=400)
    save_model(model, tmp_path / "model", base="b")
    return model


@pytest.fixture
def classifier(tmp_path, reranker):
    """Return the folder of a sequence classifier, made from the reranker."""
    write_form(tmp_path / "model", "sequence_classification")
    return tmp_path / "model"


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def file_modes(folder):
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_gives_a_classifiers_scores(classifier, reranker, side):
    network = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier, padding_side=side)
    # The chat template would break up the control token of the skill between these two.
    skills = [MANY[1], MANY[3]]
    documents = [reranker.settings.template.render_skill(skill) for skill in skills]
    chats = [
        [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        for document in documents
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)

    with torch.inference_mode():
        logits = network(**tokenizer(texts, padding=True, return_tensors="pt")).logits

    assert type(network).__name__ == "Qwen3ForSequenceClassification"
    assert network.config.num_labels == 1
    assert torch.allclose(logits[:, 0], scores_of(reranker, QUERY, skills), atol=1e-5)


def test_cross_encoder_gives_classifiers_scores(classifier, reranker):
    long_skill = Skill("5", "cut", "table", "review the commit and merge " * 60)
    skills = [*SKILLS, long_skill]
    pairs = [(QUERY, reranker.settings.template.render_skill(skill)) for skill in skills]

    scores = CrossEncoder(str(classifier), device="cpu").predict(pairs, convert_to_tensor=True)

    assert torch.allclose(scores, scores_of(reranker, QUERY, skills), atol=1e-5)


def test_our_reader_gives_classifiers_scores(classifier, reranker):
    again = load_reranker(RerankerConfig(source=str(classifier)), CPU)

    assert again.is_packed

    scores = scores_of(again, QUERY, MANY)

    assert torch.allclose(scores, scores_of(reranker, QUERY, MANY), atol=1e-5)

    check_round_trip(classifier)


def test_servers_can_read_a_classifier(classifier, reranker):
    config = read(classifier, "config.json")

    # vLLM and TEI: a reranker is a sequence classifier with one label.
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert config["label2id"] == {"LABEL_0": 0}
    assert config["pad_token_id"] == reranker.tokenizer.pad_token_id
    # vLLM: query and document are one text, and no sigmoid is applied.
    assert config["use_sep_token"] is False
    assert config["use_pad_token"] is False

    activation = config["sentence_transformers"]["activation_fn"]

    assert activation == "torch.nn.modules.linear.Identity"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]

    # vLLM --chat-template
    template = (classifier / "chat_template.jinja").read_text(encoding="utf-8")

    assert "{%- set INSTRUCTION" in template


def test_classifier_has_one_output_row(classifier):
    weights = load_file(classifier / "model.safetensors")

    assert weights["score.weight"].shape == (1, 32)  # vLLM: a head named score, without bias
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def test_record_lists_classifiers_files(classifier):
    record = read(classifier, "skilltrain.json")

    paths = [path for path in classifier.rglob("*") if path.is_file()]
    names = {path.relative_to(classifier).as_posix() for path in paths}

    assert record["form"] == "sequence_classification"
    assert set(record["files"]) == names
    assert not any("LogitScore" in name for name in names)
    assert file_modes(classifier) == {0o644}


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "last_token")]
)
def test_servers_can_read_an_encoder(tmp_path, open_encoder_of, name, pooling):
    template = EncoderTemplate(instruction="Find the skill")
    encoder = open_encoder_of(name, pooling=pooling, max_tokens=32, template=template)

    save_model(encoder, tmp_path, base=name)

    # vLLM reads max_seq_length only beside do_lower_case.
    transformer = read(tmp_path, "sentence_bert_config.json")

    assert (transformer["max_seq_length"], transformer["do_lower_case"]) == (32, False)

    pooling_config = read(tmp_path, "1_Pooling/config.json")
    flag = {"cls": "cls_token", "mean": "mean_tokens", "last_token": "lasttoken"}[pooling]

    for mode in ("cls_token", "mean_tokens", "lasttoken", "max_tokens", "mean_sqrt_len_tokens"):
        assert pooling_config[f"pooling_mode_{mode}"] is (mode == flag)
    assert "word_embedding_dimension" not in pooling_config
    # vLLM compares these names. Its older releases know only those of sentence-transformers 5.
    assert [module["type"] for module in read(tmp_path, "modules.json")] == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
        "sentence_transformers.models.Normalize",
    ]

    # TEI takes a map of strings.
    prompts = read(tmp_path, "config_sentence_transformers.json")["prompts"]

    assert prompts == {"query": "Instruct: Find the skill\nQuery:", "document": ""}

    config = read(tmp_path, "config.json")

    assert config["architectures"][0].endswith("Model")
    assert config["max_position_embeddings"] >= 32
    assert config.get("pad_token_id", 0) is not None  # TEI allows a missing key, but no null

    if name == "qwen3":
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]

    assert (tmp_path / "tokenizer.json").is_file()
    assert file_modes(tmp_path) == {0o644}


@pytest.fixture(params=["bert", "qwen3"])
def multi_vector(request, tmp_path, open_encoder_of):
    """Return an encoder, whose multi_vector form is saved in tmp_path."""
    encoder = open_encoder_of(request.param, max_tokens=32, query_max_tokens=24)
    save_model(encoder, tmp_path, base=request.param)
    write_form(tmp_path, "multi_vector")
    return encoder


def token_vectors(encoder, texts):
    """Return the vectors of each text's tokens; the first row of `with_tokens` is the text's."""
    with torch.inference_mode():
        return [encoder.with_tokens([ids], len(ids))[0][1:] for ids in texts]


def test_multi_vector_encoder_gives_our_scores(tmp_path, multi_vector):
    queries = [QUERY, "deploy the pods " * 20, "运行"]
    texts = [multi_vector.settings.template.skill.render(skill) for skill in MANY]

    plain = MultiVectorEncoder(str(tmp_path), device="cpu")
    scores = plain.similarity(plain.encode_query(queries), plain.encode_document(texts))

    query_vectors = token_vectors(multi_vector, multi_vector.tokenize_queries(queries))
    skill_vectors = token_vectors(multi_vector, multi_vector.tokenize(texts, 32))

    assert torch.allclose(scores, max_sim(query_vectors, skill_vectors), atol=1e-5)

    check_round_trip(tmp_path)

    assert not (tmp_path / "1_Pooling").exists()


def test_multi_vector_card_gives_our_scores(tmp_path, multi_vector, monkeypatch):
    recipe = {"model": {"source": "owner/base"}}
    card = model_card(RunRecord(multi_vector.settings, recipe, {}, form="multi_vector"))

    scores = run_program(card, tmp_path, monkeypatch)

    query_vectors = token_vectors(multi_vector, multi_vector.tokenize_queries([QUERY]))
    skill_vectors = token_vectors(multi_vector, multi_vector.tokenize_skills(SKILLS))
    expected = max_sim(query_vectors, skill_vectors)[0]

    assert np.allclose(scores, expected.numpy(), atol=1e-5)
    assert "kind: late" in card


def run_onnx(file, inputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    return onnxruntime.InferenceSession(file).run(None, inputs)[0]


def arrays(tokenizer, *texts):
    inputs = tokenizer(*texts, padding=True, return_tensors="pt")
    return {name: value.numpy() for name, value in inputs.items()}


def test_onnx_export_prints_no_warnings(tmp_path, open_encoder_of, monkeypatch, recwarn, caplog):
    def export_noisily(folder):
        warnings.warn("the axis name will not be used", stacklevel=1)
        logging.getLogger("torch.onnx").warning("torchvision is not installed")

    monkeypatch.setattr(forms, "_add_onnx", export_noisily)
    save_model(open_encoder_of("bert", max_tokens=32), tmp_path, base="b")

    write_form(tmp_path, "onnx")

    assert not [warning for warning in recwarn if "axis name" in str(warning.message)]
    assert not caplog.records


@pytest.fixture(scope="module")
def onnx_of(open_encoder_of, open_reranker_of, tmp_path_factory):
    """Return a function that returns a model, and a folder with its ONNX form, by name.

    The export takes seconds, so it is made once for each model and its settings.
    """
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")

    @functools.cache
    def export(name, **settings):
        open_model = open_reranker_of if name.endswith("reranker") else open_encoder_of
        model = open_model(name, **settings)
        folder = tmp_path_factory.mktemp("onnx")
        save_model(model, folder, base="b")
        write_form(folder, "onnx")
        return model, folder

    return export


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", MEAN),
        ("bert", {"pooling": "cls", "template": EncoderTemplate(skill_prompt="passage: ")}),
        ("qwen3", {"pooling": "last_token"}),
        ("bert_reranker", {}),
        ("qwen3_reranker", {}),
    ],
)
def test_onnx_program_of_card_gives_our_scores(onnx_of, monkeypatch, name, settings):
    model, folder = onnx_of(name, **settings)
    is_reranker = name.endswith("reranker")
    card = model_card(RunRecord(model.settings, {"model": {"source": "o/base"}}, {}, form="onnx"))

    scores = run_program(card, folder, monkeypatch)

    with torch.inference_mode():
        if is_reranker:
            expected = model(model.tokenize(QUERY, SKILLS))
        else:
            vectors = model(model.tokenize_skills(SKILLS))
            expected = (model(model.tokenize_queries([QUERY])) @ vectors.T)[0]
    assert np.allclose(scores, expected.numpy(), atol=1e-4)


@pytest.mark.slow
def test_onnx_computes_encoders_token_vectors(onnx_of):
    """TEI and sentence-transformers know inputs and output by these names."""
    encoder, folder = onnx_of("bert", **MEAN)

    texts = ["deploy pods", "review the commit and merge it", "a"]
    inputs = arrays(AutoTokenizer.from_pretrained(folder), texts)
    is_token = inputs["attention_mask"].astype(bool)
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    with torch.inference_mode():
        expected = encoder.backbone(**tensors).last_hidden_state.numpy()
    exact = run_onnx(folder / ONNX, inputs)[is_token]

    assert np.allclose(exact, expected[is_token], atol=1e-4)

    rough = run_onnx(folder / ONNX_INT8, inputs)[is_token]
    norms = np.linalg.norm(rough, axis=1) * np.linalg.norm(exact, axis=1)

    assert not np.array_equal(rough, exact)
    assert ((rough * exact).sum(1) / norms).min() > 0.95
    assert {ONNX, ONNX_INT8} <= set(read(folder, "skilltrain.json")["files"])


def test_failed_onnx_export_names_folder(tmp_path, reranker, monkeypatch):
    pytest.importorskip("onnxscript")

    def write_nothing(*_, **__):
        raise ValueError("Error parsing message")

    monkeypatch.setattr(torch.onnx, "export", write_nothing)

    with raises("cannot-write") as failure:
        write_form(tmp_path / "model", "onnx")
    assert failure.value.where == tmp_path / "model"


@pytest.mark.slow
def test_onnx_computes_scores_of_chat_reranker(onnx_of):
    """TEI takes the folder for a reranker by its architecture and its one label."""
    reranker, folder = onnx_of("qwen3_reranker")
    documents = [reranker.settings.template.render_skill(skill) for skill in SKILLS]

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
    ("name", "form"),
    [
        ("encoder", "sequence_classification"),
        ("pair", "sequence_classification"),
        ("pair", "multi_vector"),
    ],
)
def test_model_without_form_is_refused(tmp_path, open_reranker_of, open_encoder_of, name, form):
    is_encoder = name == "encoder"
    model = open_encoder_of("bert") if is_encoder else open_reranker_of("bert_reranker")
    save_model(model, tmp_path, base="b")

    with raises("unsupported-form") as caught:
        write_form(tmp_path, form)

    assert str(tmp_path) not in str(caught.value)  # a hidden folder while a run is exported


def test_a_missing_package_is_named(tmp_path, open_encoder_of, monkeypatch):
    save_model(open_encoder_of("bert"), tmp_path, base="b")
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    with raises("missing-package"):
        write_form(tmp_path, "onnx")
