"""Models that bring Python code: refused by default, trained and exported if trusted."""

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from faults import raises
from skilltrain.losses import InfoNCE
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.saving import save_model
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.serving.indexing import check_rankers
from skilltrain.serving.router import Router
from skilltrain.training.export_run import export_run
from skilltrain.training.steps import EncoderStep, StepSettings
from test_export_run import add_checkpoint, config_of, write_run
from tiny_models import save_bert
from training_data import training_set

CPU = torch.device("cpu")
CODE = """
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of a type that transformers does not know, with the code of its classes."""
    folder = save_bert(tmp_path_factory.mktemp("own"), reranker=False)
    (folder / "own_bert.py").write_text(CODE, encoding="utf-8")
    file = folder / "config.json"
    auto_map = {"AutoConfig": "own_bert.OwnConfig", "AutoModel": "own_bert.OwnModel"}
    config = json.loads(file.read_text()) | {"model_type": "own_bert", "auto_map": auto_map}
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def trusted(folder):
    return EncoderConfig(source=str(folder), trust_remote_code=True)


def test_code_of_model_is_refused(folder):
    with raises("remote-code") as caught:
        load_encoder(EncoderConfig(source=str(folder)), CPU)

    assert "set trust_remote_code: true beside source" in str(caught.value)


def test_trusted_model_is_trained_and_saved(folder, tmp_path):
    encoder = load_encoder(trusted(folder), CPU)
    step = EncoderStep(encoder, InfoNCE(), training_set(4), StepSettings(300))
    step(step.data.lists).backward()

    save_model(encoder, tmp_path, base="own")

    plain = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    vectors = plain.encode(["deploy pods"], convert_to_tensor=True)
    with torch.inference_mode():
        expected = encoder(encoder.tokenize_queries(["deploy pods"]))
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


def test_export_names_code_in_card(folder, tmp_path):
    config = config_of(tmp_path, folder).model_copy(update={"model": trusted(folder)})
    add_checkpoint(config, step=2)
    write_run(config, finished=False)

    export_run(config.out, tmp_path / "out")

    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert 'SentenceTransformer(".", trust_remote_code=True)' in card
    assert "Python code of its own" in card
    assert "skilltrain route" not in card


def test_router_refuses_code_of_model(folder):
    ranker = DenseConfig(source=str(folder), trust_remote_code=True)

    with raises("remote-code"):
        check_rankers(SystemConfig(name="router", rankers=(ranker,)))
    with raises("remote-code"):
        Router([{"name": "pdf", "description": "Fill in forms"}], [ranker.model_dump()])
