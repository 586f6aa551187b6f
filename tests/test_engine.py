"""Launches that cannot work are refused in one line, before anything is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import default_device, resolve_dtype
from skilltrain.training import engine
from skilltrain.training.engine import new_accelerator
from skilltrain.training.settings import TrainingConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Launched(Accelerator):
    """The properties of an accelerator that `_refuse_unsupported` reads."""

    distributed_type: Any = None
    num_processes: Any = 0

    def __init__(self, kind, num_processes=2, stage=None):
        self.distributed_type = kind
        self.num_processes = num_processes
        plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
        self.state = SimpleNamespace(deepspeed_plugin=plugin)


FIX = (
    "(give training.batch_size={} training.accumulation={}, {} queries per update; "
    "or --num_processes 1 to acc"
)


@pytest.mark.parametrize(
    ("launch", "settings", "quantized", "message"),
    [
        ((DistributedType.MULTI_GPU, 3), {}, False, FIX.format(9, 4, 36)),
        (
            (DistributedType.MULTI_GPU, 4),
            {"batch_size": 1, "accumulation": 16},
            False,
            FIX.format(4, 4, 16),
        ),
        (
            (DistributedType.MEGATRON_LM,),
            {},
            False,
            "the launcher asks for MEGATRON_LM, which is not supported",
        ),
        ((DistributedType.DEEPSPEED, 2, 0), {}, False, "DeepSpeed's ZeRO stage 0 shares nothing"),
        (
            (DistributedType.DEEPSPEED, 2, 2),
            {},
            True,
            "4-bit weights (adapter.quantize) cannot be combined with DEEP",
        ),
    ],
)
def test_unsupported_launches_are_refused(launch, settings, quantized, message):
    with pytest.raises(SkilltrainError) as error:
        engine._refuse_unsupported(Launched(*launch), TrainingConfig(**settings), quantized)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("backend", "version", "code"),
    [
        ("FSDP", "1", "unsupported-launcher"),
        pytest.param(
            "FSDP",
            "2",
            "unsupported-launcher",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it"),
        ),
        ("DEEPSPEED", "", "missing-package"),
    ],
)
def test_unavailable_backends_are_refused(monkeypatch, backend, version, code):
    monkeypatch.setenv(f"ACCELERATE_USE_{backend}", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)

    with raises(code):
        new_accelerator(TrainingConfig(batch_size=8), quantized=False)


@pytest.fixture
def has_gpu(monkeypatch):
    """Pretend that there is a GPU with bfloat16, and a CPU without."""
    capabilities = {"avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


@pytest.mark.usefixtures("has_gpu")
def test_gpu_is_default_device():
    assert default_device().type == "cuda"


def test_apple_gpu_is_default_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)

    assert default_device().type == "mps"


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("value", "expected"),
    [("False", "cuda"), ("0", "cuda"), ("True", "cpu"), ("1", "cpu"), ("yes", "cpu")],
)
def test_launcher_can_choose_cpu(monkeypatch, value, expected):
    """With launch/cpu.yaml, `accelerate launch` sets this variable."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)

    assert default_device().type == expected


@pytest.mark.usefixtures("has_gpu")
def test_accelerator_uses_launchers_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")

    accelerator = new_accelerator(TrainingConfig(batch_size=8, precision="auto"), quantized=False)

    assert accelerator.device.type == "cpu"
    assert accelerator.mixed_precision == "no"


@pytest.fixture
def set_gpu_generation(monkeypatch):
    """Return a function that sets the major compute capability of the GPU."""

    def set_generation(generation):
        properties = SimpleNamespace(major=generation)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)

    return set_generation


@pytest.mark.parametrize(
    ("generation", "expected"), [(7, torch.float32), (8, torch.bfloat16), (9, torch.bfloat16)]
)
def test_auto_needs_native_bfloat16(set_gpu_generation, generation, expected):
    """T4 and V100 (7.x) only emulate bfloat16, although PyTorch calls it supported."""
    set_gpu_generation(generation)

    assert torch.cuda.is_bf16_supported()

    assert resolve_dtype("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize("generation", [7, 8])
def test_bfloat16_can_be_chosen_on_any_gpu(set_gpu_generation, generation):
    set_gpu_generation(generation)

    assert resolve_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16
