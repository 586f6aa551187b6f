"""A GPU's memory: probed before the first step, and one line where it runs out. The rest is in test_gpu.py."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE
from skilltrain.models.adapters import AdapterConfig
from skilltrain.models.encoder import Encoder, EncoderConfig
from skilltrain.training import loop
from skilltrain.training.engine import new_accelerator
from skilltrain.training.memory import out_of_memory_in_one_line
from skilltrain.training.settings import TrainEncoderConfig, TrainingConfig, load_model
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.training_plan import check_fits
from skilltrain.training.training_set import ListsSource
from training_data import training_set
from training_runs import CONFIG, new_step, run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CPU = torch.device("cpu")


class OnGpu(Accelerator):
    """A launch on GPUs, as far as it is looked at."""

    device: Any = torch.device("cuda")
    distributed_type: Any = None
    num_processes: Any = 1

    def __init__(self, launch, num_processes):
        self.distributed_type, self.num_processes = launch, num_processes


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "train_log.jsonl").read_text().splitlines()]


def test_the_probe_runs_the_largest_batch_and_changes_nothing(model_folders, tmp_path, monkeypatch):
    step = new_step(model_folders["bert_dropout"])
    expected = run(step, tmp_path / "plain", resume=False)
    batches = [batch for of_step in loop.step_batches(step.data.lists, CONFIG) for batch in of_step]
    sizes = [sum(len(step.skill_ids[skill]) for one in batch for skill in one.skill_ids) for batch in batches]
    monkeypatch.setattr(loop, "can_probe", lambda _: True)
    probed, seen = new_step(model_folders["bert_dropout"]), []
    forward = probed.forward
    probed.forward = lambda batch: seen.append(batch) or forward(batch)
    found = run(probed, tmp_path / "probed", resume=False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert losses(tmp_path / "probed") == losses(tmp_path / "plain")
    assert seen[0] == batches[sizes.index(max(sizes))] and len(seen) == len(batches) + 1


def test_memory_that_runs_out_is_one_line_with_what_to_lower(model_folders, tmp_path):
    step = new_step(model_folders["bert"])

    def full(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB …")

    step.forward = full
    with pytest.raises(SkilltrainError) as error:
        run(step, tmp_path, resume=False)
    assert str(error.value) == (
        "the GPU's memory has run out (a training.token_budget below 150 or a model.max_tokens below 256 or a "
        "training.batch_size below 4 (with more accumulation) or an adapter (LoRA))"
    )
    step.settings = StepSettings(150, recompute=False)
    with (
        pytest.raises(SkilltrainError, match=r"\(training.recompute=true or a"),
        out_of_memory_in_one_line(CONFIG, step),
    ):
        full(None)


@pytest.mark.parametrize(
    ("adapter", "launch", "num_processes", "bytes_each"),
    [
        (None, DistributedType.NO, 1, (16, 0)),
        (None, DistributedType.MULTI_GPU, 4, (16, 0)),
        (None, DistributedType.FSDP, 4, (4, 0)),
        (AdapterConfig(), DistributedType.NO, 1, (4, 16)),
    ],
)
def test_a_model_that_cannot_fit_the_card_is_refused_before_it_is_loaded(
    model_folders, tmp_path, monkeypatch, adapter, launch, num_processes, bytes_each
):
    source = model_folders["bert"]
    config = TrainEncoderConfig(
        stage="train_encoder", model=EncoderConfig(source=str(source)), adapter=adapter,
        data=ListsSource(pool=tmp_path, lists=tmp_path), out=tmp_path,
    )  # fmt: skip
    sizes = {name: value.numel() for name, value in load_model(config, CPU).named_parameters()}
    of_adapter = sum(size for name, size in sizes.items() if ".lora_" in name)
    least = bytes_each[0] * (sum(sizes.values()) - of_adapter) + bytes_each[1] * of_adapter
    properties = SimpleNamespace(total_memory=least)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    check_fits(config, OnGpu(launch, num_processes))
    properties.total_memory -= 1
    with pytest.raises(SkilltrainError, match=r"bert: its weights.* take 0\.0 GiB on each GPU, which has 0\.0 \("):
        check_fits(config, OnGpu(launch, num_processes))


def test_what_a_recipe_leaves_out_follows_from_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    silent, says = TrainingConfig(), TrainingConfig(token_budget=512, precision="float32")
    for device, budget, dtype in ((CPU, 4096, torch.float32), (torch.device("cuda"), 16384, torch.bfloat16)):
        assert (silent.token_budget_on(device), silent.dtype_on(device)) == (budget, dtype)
        assert (says.token_budget_on(device), says.dtype_on(device)) == (512, torch.float32)
    assert TrainingConfig(precision="auto").dtype_on(CPU) == torch.bfloat16


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_whole_training_moves_the_weights_whatever_the_models_precision(
    model_folders, tmp_path, precision, monkeypatch
):
    """In bfloat16 steps of 2e-5 are lost on nearly all weights."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    model = EncoderConfig(source=str(model_folders["bert"]), precision=precision)
    data, training = ListsSource(pool=tmp_path, lists=tmp_path), TrainingConfig(batch_size=4, precision="bfloat16")
    config = TrainEncoderConfig(stage="train_encoder", model=model, data=data, training=training, out=tmp_path)
    encoder, lists = load_model(config, CPU), training_set(20)
    assert isinstance(encoder, Encoder)
    step = EncoderStep(encoder, InfoNCE(), lists, StepSettings(150))
    before = {name: value.detach().clone() for name, value in step.named_parameters() if "embeddings" not in name}
    loop.train(new_accelerator(training, False), step, lists.lists, training, loop.Run(tmp_path, False, {}))
    after = dict(step.named_parameters())
    assert {value.dtype for value in after.values()} == {torch.float32}
    moved = torch.cat([(after[name] != value).flatten() for name, value in before.items()])
    assert moved.float().mean() > 0.9
