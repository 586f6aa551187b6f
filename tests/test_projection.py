"""Encoders with a linear layer behind the pooling, and encoders with bidirectional attention."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)

import training_runs
from faults import raises
from skilltrain.export.card import RunRecord, model_card
from skilltrain.export.forms import write_form
from skilltrain.losses import InfoNCE, LateInteraction
from skilltrain.models.adapters import AdapterConfig
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.saving import save_model
from skilltrain.retrieval import dense
from skilltrain.training.loop import Run, train
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.train import TrainEncoder, load_model
from skilltrain.training.training_set import ListsSource
from training_data import training_set
from training_runs import CONFIG

CPU = torch.device("cpu")
TEXTS = ["deploy the pods", "chart", "review the commit and merge the data " * 3]


def open_encoder(folder, **settings):
    return load_encoder(EncoderConfig(source=str(folder), **settings), CPU)


def vectors_of(encoder):
    with torch.inference_mode():
        return encoder(encoder.tokenize(TEXTS, 512))


@pytest.fixture
def projected(model_folders, tmp_path):
    """The folder of a sentence-transformers model whose Dense maps 32 to 12 numbers."""
    torch.manual_seed(1)
    modules = [Transformer(str(model_folders["bert"])), Pooling(32, "mean"), Dense(32, 12)]
    folder = tmp_path / "projected"
    SentenceTransformer(modules=[*modules, Normalize()]).save(str(folder))
    return folder


@pytest.fixture
def colbert(model_folders, tmp_path):
    """A checkpoint of ColBERT's authors, with a layer of 32 to 12 numbers."""
    folder = shutil.copytree(model_folders["bert"], tmp_path / "colbert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": value for name, value in weights.items()}
    weights["linear.weight"] = torch.randn(12, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_dense_gives_vectors_of_sentence_transformers(projected):
    encoder = open_encoder(projected)

    vectors = vectors_of(encoder)

    plain = SentenceTransformer(str(projected), device="cpu")
    assert encoder.dim == vectors.shape[1] == 12
    assert torch.allclose(vectors, plain.encode(TEXTS, convert_to_tensor=True), atol=1e-5)


def test_projection_changes_identity_of_vectors(projected):
    source = dense.EncoderSource(source=str(projected), cache=projected.parent / "cache")
    old_identity = dense.open_encoder(source).identity
    (file,) = projected.glob("*_Dense/model.safetensors")
    weights = load_file(file)
    weights["linear.bias"] += 1
    save_file(weights, file, metadata={"format": "pt"})

    identity = dense.open_encoder(source).identity

    assert identity != old_identity


@pytest.mark.usefixtures("fresh_accelerate")
def test_trained_projection_is_saved(colbert, tmp_path):
    encoder = open_encoder(colbert)
    first = encoder.projection[0].linear.weight.detach().clone()
    settings = StepSettings(150, late_interaction=LateInteraction())
    step = EncoderStep(encoder, InfoNCE(), training_set(8), settings)

    train(training_runs.accelerator(), step, CONFIG, Run(tmp_path / "run", False, {}))
    save_model(encoder.eval(), tmp_path / "saved", base="colbert")

    vectors = vectors_of(encoder)
    plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert not torch.equal(encoder.projection[0].linear.weight, first)
    assert torch.allclose(vectors_of(open_encoder(tmp_path / "saved")), vectors, atol=1e-6)
    assert torch.allclose(vectors, plain.encode(TEXTS, convert_to_tensor=True), atol=1e-5)


def test_token_vectors_are_those_of_multi_vector_encoder(projected, tmp_path):
    encoder = open_encoder(projected)
    save_model(encoder, tmp_path / "saved", base="projected")

    write_form(tmp_path / "saved", "multi_vector")

    plain = MultiVectorEncoder(str(tmp_path / "saved"), device="cpu")
    ids = encoder.tokenize(TEXTS, 512)
    with torch.inference_mode():
        rows = encoder.with_tokens(ids, max(map(len, ids)))
    for text, text_ids, text_rows in zip(TEXTS, ids, rows, strict=True):
        token_vectors = plain.encode_document([text])[0]
        assert torch.allclose(token_vectors, text_rows[1 : 1 + len(text_ids)], atol=1e-5)
        assert not text_rows[1 + len(text_ids) :].any()


def test_colbert_layer_projects_tokens(colbert, model_folders):
    encoder = open_encoder(colbert)
    plain = open_encoder(model_folders["bert"])
    ids = encoder.tokenize(TEXTS[:1], 512)

    with torch.inference_mode():
        rows = encoder.with_tokens(ids, len(ids[0]))[0]
        hidden, _ = plain._hidden(ids)

    weight = load_file(colbert / "model.safetensors")["linear.weight"]
    expected = torch.nn.functional.normalize(hidden[0] @ weight.T, dim=-1)
    assert torch.allclose(rows[1:], expected, atol=1e-5)


def test_adapter_freezes_projection(projected, tmp_path):
    config = TrainEncoder(
        stage="train_encoder",
        model=EncoderConfig(source=str(projected)),
        adapter=AdapterConfig(rank=2),
        data=ListsSource(pool=tmp_path / "pool", lists=tmp_path / "lists"),
        out=tmp_path / "out",
    )

    encoder = load_model(config, CPU)

    trained = [name for name, value in encoder.named_parameters() if value.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


def test_card_states_projected_dimension(projected):
    encoder = open_encoder(projected)
    recipe = {"model": {"source": "owner/base"}}

    card = model_card(RunRecord(encoder.settings, recipe, summary={}, model=encoder))

    assert "| vectors | one per text, 12 dimensions," in card


def test_projection_has_no_onnx_form(projected, tmp_path):
    save_model(open_encoder(projected), tmp_path / "saved", base="projected")

    with raises("unsupported-form"):
        write_form(tmp_path / "saved", "onnx")


def test_unknown_activation_is_refused(projected):
    file = projected / "2_Dense" / "config.json"
    config = json.loads(file.read_text()) | {"activation_function": "other.Swish"}
    file.write_text(json.dumps(config))

    with raises("unsupported-model"):
        open_encoder(projected)


def test_colbert_without_layer_is_refused(colbert):
    weights = load_file(colbert / "model.safetensors")
    del weights["linear.weight"]
    save_file(weights, colbert / "model.safetensors", metadata={"format": "pt"})

    with raises("unreadable-model"):
        open_encoder(colbert)


def test_damaged_dense_is_refused(projected):
    (projected / "2_Dense" / "model.safetensors").write_bytes(b"nothing")

    with raises("unreadable-model"):
        open_encoder(projected)


# Bidirectional attention --------------------------------------------------------------------------


def first_state(encoder, texts):
    """Return the hidden state of the first token of the first text."""
    ids = encoder.tokenize(texts, 512)
    with torch.inference_mode():
        hidden, _ = encoder._hidden(ids)
    return hidden[0, 0]


@pytest.mark.parametrize("other", [[], ["a longer text than the first so that padding is added"]])
def test_early_tokens_attend_to_later_ones(model_folders, other):
    causal = open_encoder(model_folders["qwen3"])
    bidirectional = open_encoder(model_folders["qwen3"], bidirectional=True)

    pairs = []
    for encoder in (causal, bidirectional):
        states = [first_state(encoder, [text, *other]) for text in ("find chart", "find table")]
        pairs.append(torch.allclose(*states, atol=1e-5))

    assert pairs == [True, False]


def test_saved_encoder_stays_bidirectional(model_folders, tmp_path):
    encoder = open_encoder(model_folders["qwen3"], bidirectional=True, pooling="mean")
    save_model(encoder, tmp_path, base="qwen3")

    vectors = vectors_of(open_encoder(tmp_path))

    plain = SentenceTransformer(str(tmp_path), device="cpu")
    assert torch.equal(vectors, vectors_of(encoder))
    assert torch.allclose(vectors, plain.encode(TEXTS, convert_to_tensor=True), atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["is_causal"] is False


def test_bidirectional_encoder_cannot_be_packed(model_folders):
    encoder = open_encoder(model_folders["qwen3"], bidirectional=True)

    with raises("unsupported-model"):
        encoder.enable_packing()
