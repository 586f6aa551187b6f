"""Adapters and QLoRA: only they train, and merging changes no score of a saved model."""

import copy
import importlib.util
import signal

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import training_runs
from faults import raises
from skilltrain.losses import InfoNCE
from skilltrain.models.adapters import AdapterConfig, add_adapter, merge_adapter, quantizing_options
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.models.saving import save_model
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate
from skilltrain.training.checkpoint import load_weights
from skilltrain.training.export_run import export_run
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.train import TrainEncoder, load_model
from skilltrain.training.training_set import ListsSource
from test_export_run import write_run
from tiny_models import save_qwen3
from training_data import training_set

CPU = torch.device("cpu")
SMALL = AdapterConfig(rank=4, alpha=8)
TEXTS = [
    "deploy pods",
    "extract text from pdf files",
    "translate the report and review it with care",
]
SKILLS = [Skill(f"s{i}", f"chart {i}", text, text * i) for i, text in enumerate(TEXTS)]
RERANKERS = {"pair": "bert_reranker", "yes_no": "qwen3_reranker"}
BERT_HEAD = {
    f"{part}.{kind}" for part in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")
}


def outputs(model):
    """Vectors of the queries TEXTS, or scores of SKILLS for one query."""
    if isinstance(model, Encoder):
        return model(model.tokenize_queries(TEXTS))
    return model(model.tokenize("review a commit", SKILLS))


def train_a_little(model):
    """Three optimiser steps towards some target, on what can be trained."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    target = torch.randn_like(outputs(model))
    for _ in range(3):
        (outputs(model) - target).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "qwen3", *RERANKERS])
def test_trained_merged_saved_and_read_again(
    open_encoder_of, open_reranker_of, kind, precision, tmp_path
):
    """Only the adapter changes, in float32, and merged the model computes the same."""
    if kind in RERANKERS:
        template = RerankerTemplate(form=kind)
        model = open_reranker_of(RERANKERS[kind], template=template, precision=precision)
    else:
        model = open_encoder_of(kind, precision=precision)
    network, is_exact = model.network, precision == "float32"
    with torch.no_grad():
        plain_names, before = set(network.state_dict()), outputs(model)
    add_adapter(network, SMALL)

    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}

    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert len(trained) > 4
    # A head of two rows, tied to the embeddings, stays whole and frozen.
    assert {name for name in trained if ".lora_" not in name} == (
        BERT_HEAD if kind == "pair" else set()
    )

    frozen = {name: p.clone() for name, p in network.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        assert not is_exact or torch.equal(outputs(model), before)  # B starts at zero
    train_a_little(model)

    assert all(
        torch.equal(p, frozen[name]) for name, p in network.named_parameters() if name in frozen
    )

    if kind == "bert":
        with raises("unmerged-adapter"):
            save_model(model, tmp_path, "base")
    with torch.no_grad():
        trained = outputs(model)

        assert (trained - before).abs().max() > 1e-3
        assert merge_adapter(network) is network

        tolerance = (
            2e-6 * max(1, float(trained.abs().max()))
            if is_exact
            else 0.2 + 0.05 * float(trained.abs().max())
        )

        assert (outputs(model) - trained).abs().max() <= tolerance

    assert set(network.state_dict()) == plain_names

    if is_exact:
        save_model(model, tmp_path, "base")
        source = str(tmp_path)
        again = load_reranker(RerankerConfig(source=source), CPU) if kind in RERANKERS else None
        with torch.no_grad():
            found = outputs(again or load_encoder(EncoderConfig(source=source), CPU))
            torch.testing.assert_close(found, trained, atol=1e-5, rtol=1e-5)


def test_only_the_targets_are_trained(open_encoder_of):
    """Per layer: query is 32 to 32, intermediate 32 to 64; each has rank * (in + out) weights."""
    backbone = open_encoder_of("bert").backbone
    targets = ("attention.self.query", "intermediate.dense")

    add_adapter(backbone, AdapterConfig(rank=2, targets=targets))

    sizes = {name: p.numel() for name, p in backbone.named_parameters() if p.requires_grad}
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in sizes}

    assert layers == {"query", "dense"}
    assert sum(sizes.values()) == 2 * (2 * (32 + 32) + 2 * (32 + 64))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"targets": ("q_proj", "query")}, "unknown-choice"),
        ({"targets": ("proj",)}, "unknown-choice"),  # only a part of a name
        ({"targets": ("embed_tokens",)}, "unknown-choice"),
        ({"rank": 99}, "exceeds-model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(open_encoder_of, settings, code):
    backbone = open_encoder_of("qwen3").backbone

    with raises(code):
        add_adapter(backbone, AdapterConfig(**settings))


@pytest.mark.parametrize("adapter", [None, SMALL])
def test_only_nf4_needs_options(adapter):
    assert quantizing_options(adapter) == {}


def test_missing_bitsandbytes_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with raises("missing-package"):
        quantizing_options(NF4)


# QLoRA from the first step to the model folder ----------------------------------------------------


NF4 = AdapterConfig(rank=4, alpha=8, dropout=0.1, quantize="nf4")


@pytest.fixture(scope="module")
def save_wide(tmp_path_factory):
    """width → the folder of a Qwen3; bitsandbytes needs blocks of 64 on a CPU."""
    pytest.importorskip("bitsandbytes")
    return lambda width: save_qwen3(tmp_path_factory.mktemp("base"), reranker=False, width=width)


@pytest.fixture(scope="module")
def base(save_wide):
    return save_wide(64)


def config_of(base, out):
    """The settings of a run."""
    model, data = (
        EncoderConfig(source=str(base), max_tokens=64),
        ListsSource(pool=out / "pool", lists=out / "lists"),
    )
    return TrainEncoder(stage="train_encoder", model=model, adapter=NF4, data=data, out=out)


def new_step(config):
    """As the stage makes it."""
    data = training_set(training_runs.NUM_LISTS)
    return EncoderStep(load_model(config, CPU), InfoNCE(), data, StepSettings(512))


def of_adapter(parameters):
    return {name: value for name, value in parameters.items() if ".lora_" in name}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """Return settings, trained parameters and step of a run. Its 4-bit weights stay equal."""
    config = config_of(base, tmp_path_factory.mktemp("whole"))
    step = new_step(config)
    packed = {
        name: value.clone() for name, value in step.named_parameters() if value.dtype == torch.uint8
    }
    parameters = training_runs.run(step, config.out, resume=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(packed) == 14
    assert all(torch.equal(parameters[name], value) for name, value in packed.items())
    return config, of_adapter(parameters), step


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_stopped_run_resumes_bit_identically(base, whole, tmp_path):
    config = config_of(base, tmp_path)

    with raises("interrupted"):
        training_runs.run(
            training_runs.signal_in(new_step(config), 5, signal.SIGINT), tmp_path, resume=False
        )

    torch.manual_seed(99)
    resumed = of_adapter(training_runs.run(new_step(config), tmp_path, resume=True))

    assert len(resumed) == 28
    assert resumed.keys() == whole[1].keys()
    assert all(
        torch.equal(resumed[name], whole[1][name]) and resumed[name].any() for name in resumed
    )


def test_checkpoints_hold_no_4_bit_weights_and_export_as_what_was_trained(whole, tmp_path):
    config, parameters, step = whole
    file = config.out / "checkpoints" / "step-6" / "model.safetensors"

    saved = load_file(file)

    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert not any(".base_layer." in name or "quant" in name for name in saved)
    assert all(torch.equal(saved[name], value) for name, value in parameters.items())

    write_run(config, finished=False)
    export_run(config.out, tmp_path / "out", None)
    encoder = copy.deepcopy(step).model.eval()
    merge_adapter(encoder.backbone)
    with torch.inference_mode():
        ours = encoder(encoder.tokenize(TEXTS, 64))
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(
        TEXTS, convert_to_tensor=True
    )

    torch.testing.assert_close(plain, ours, atol=1e-5, rtol=0)

    lost = next(iter(parameters))
    save_file(
        {name: value for name, value in saved.items() if name != lost},
        tmp_path / "model.safetensors",
    )

    with raises("changed-model"):
        load_weights(load_model(config, CPU), "model", tmp_path)


@pytest.fixture
def open_quantized(save_wide):
    """Return a function that opens a Qwen3 of a width with 4-bit weights."""
    options = {"dtype": torch.float32, **quantizing_options(NF4)}
    return lambda width: AutoModel.from_pretrained(save_wide(width), **options).eval()


def test_merging_makes_all_layers_plain(open_quantized):
    network = open_quantized(64)
    add_adapter(network, NF4.model_copy(update={"targets": ("q_proj",)}))

    merge_adapter(network)

    class_names = {type(module).__name__ for module in network.modules()}

    assert {name for name in class_names if "Linear" in name} == {"Linear"}


def test_a_width_without_whole_blocks_is_refused(open_quantized):
    with raises("unsupported-model"):
        add_adapter(open_quantized(96), NF4)
