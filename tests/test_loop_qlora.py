"""QLoRA from the first step to the model folder: stopped, resumed and exported; what does not fit is still refused."""

import copy
import signal

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import Qwen3Config, Qwen3Model

import training_runs
from skilltrain.config import to_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json, write_text
from skilltrain.losses import InfoNCE
from skilltrain.models.adapters import AdapterConfig, merge_adapter
from skilltrain.models.encoder import Encoder, EncoderConfig
from skilltrain.training.checkpoint import load_weights
from skilltrain.training.publish import export_run
from skilltrain.training.settings import TrainEncoderConfig, load_model
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.training_set import ListsSource
from tiny_models import qwen3_tokenizer
from training_data import training_set

pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CPU = torch.device("cpu")
NF4 = AdapterConfig(rank=4, alpha=8, dropout=0.1, quantize="nf4")
TEXTS = ["deploy pods", "review the commit and merge it"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen3 whose layers are blocks of 64 wide, as bitsandbytes needs them on a CPU."""
    folder, tokenizer = tmp_path_factory.mktemp("base"), qwen3_tokenizer(True)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, intermediate_size=128, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    Qwen3Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(base, out, adapter=NF4):
    """The settings of a run, with dropout in its adapter."""
    model = EncoderConfig(source=str(base), max_tokens=64, query_max_tokens=32)
    data = ListsSource(pool=out / "pool", lists=out / "lists")
    return TrainEncoderConfig(stage="train_encoder", model=model, adapter=adapter, data=data, out=out)


def new_step(config):
    """As the stage makes it."""
    encoder = load_model(config, CPU)
    assert isinstance(encoder, Encoder)
    return EncoderStep(encoder, InfoNCE(), training_set(training_runs.NUM_LISTS), StepSettings(512))


def trained(parameters):
    """What an adapter changed."""
    return {name: value for name, value in parameters.items() if ".lora_" in name}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """(settings, trained parameters, the step module) of an undisturbed run; 4-bit weights stay as they were."""
    config = config_of(base, tmp_path_factory.mktemp("whole"))
    step = new_step(config)
    packed = {name: value.clone() for name, value in step.named_parameters() if value.dtype == torch.uint8}
    parameters = training_runs.run(step, config.out, resume=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(packed) == 14 and all(torch.equal(parameters[name], value) for name, value in packed.items())
    return config, trained(parameters), step


def newest(config):
    return config.out / "checkpoints" / "step-6"


def test_a_stopped_run_resumes_bit_identically(base, whole, tmp_path):
    config = config_of(base, tmp_path)
    with pytest.raises(SkilltrainError, match="interrupted after step 3 of 6"):
        training_runs.run(training_runs.signal_in(new_step(config), 3, signal.SIGINT), tmp_path, resume=False)
    torch.manual_seed(99)
    resumed = trained(training_runs.run(new_step(config), tmp_path, resume=True))
    assert len(resumed) == 28 and resumed.keys() == whole[1].keys()
    assert all(torch.equal(resumed[name], whole[1][name]) for name in resumed)
    assert all(value.abs().max() > 0 for value in resumed.values())


def test_checkpoints_hold_no_4_bit_weights_and_export_as_what_was_trained(whole, tmp_path):
    config, parameters, step = whole
    saved = load_file(newest(config) / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert not any(".base_layer." in name or "quant" in name for name in saved)
    assert all(torch.equal(saved[name], value) for name, value in parameters.items())
    write_text(config.out / "recipe.yaml", to_yaml(config))
    write_json(config.out / "run.json", {"skilltrain": "0", "recipe": {}, "inputs": {}, "finished": False})
    export_run(config.out, tmp_path / "out", None)
    encoder = copy.deepcopy(step).model.eval()
    merge_adapter(encoder.backbone)
    with torch.inference_mode():
        ours = encoder(encoder.tokenize(TEXTS, 64))
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(plain, ours, atol=1e-5, rtol=0)


def test_an_adapter_that_lacks_a_weight_is_refused(whole, tmp_path):
    config, parameters, _ = whole
    weights, lost = load_file(newest(config) / "model.safetensors"), next(iter(parameters))
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(SkilltrainError, match=lost.removeprefix("model.").replace(".", r"\.")):
        load_weights(load_model(config, CPU), "model", tmp_path)
