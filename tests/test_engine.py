"""Launches that cannot work are refused in one line, before anything is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import default_device, resolve_dtype
from skilltrain.training import engine
from skilltrain.training.engine import new_accelerator
from skilltrain.training.settings import TrainingConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Launched(Accelerator):
    """What accelerate makes of a launch, as far as it is looked at."""

    distributed_type: Any = None
    num_processes: Any = 0

    def __init__(self, kind, num_processes=2, stage=None):
        self.distributed_type, self.num_processes = kind, num_processes
        self.state = SimpleNamespace(
            deepspeed_plugin=None if stage is None else SimpleNamespace(zero_stage=stage)
        )


GIVE = "(give training.batch_size={} training.accumulation={}, {} queries per update; or --num_processes 1 to acc"


@pytest.mark.parametrize(
    ("launch", "settings", "quantized", "message"),
    [
        ((DistributedType.MULTI_GPU, 3), {}, False, GIVE.format(9, 4, 36)),
        (
            (DistributedType.MULTI_GPU, 4),
            {"batch_size": 1, "accumulation": 16},
            False,
            GIVE.format(4, 4, 16),
        ),
        (
            (DistributedType.MEGATRON_LM,),
            {},
            False,
            "the launcher asks for MEGATRON_LM, which is not supported",
        ),
        ((DistributedType.DEEPSPEED, 2, 0), {}, False, "DeepSpeed's ZeRO stage 0 shares nothing"),
        (
            (DistributedType.FSDP,),
            {},
            True,
            "4-bit weights (adapter.quantize) cannot be combined with FSDP",
        ),
        (
            (DistributedType.DEEPSPEED, 2, 2),
            {},
            True,
            "4-bit weights (adapter.quantize) cannot be combined with DEEP",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(launch, settings, quantized, message):
    with pytest.raises(SkilltrainError) as error:
        engine._refuse_unsupported(Launched(*launch), TrainingConfig(**settings), quantized)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("asked", "version", "message"),
    [
        ("FSDP", "1", r"FSDP version 1 is not supported \(set fsdp_version: 2"),
        pytest.param(
            "FSDP",
            "2",
            "accelerate would run FSDP on a CPU, or in one process, as plain DDP",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it"),
        ),
        ("DEEPSPEED", "", r"DeepSpeed is not installed .pip install 'skilltrain\[deepspeed\]'"),
    ],
)
def test_what_would_not_run_as_asked_is_refused(monkeypatch, asked, version, message):
    monkeypatch.setenv(f"ACCELERATE_USE_{asked}", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SkilltrainError, match=message):
        new_accelerator(TrainingConfig(batch_size=8), quantized=False)


def test_the_launchers_cpu_is_the_cpu_also_beside_a_gpu(monkeypatch):
    """With launch/cpu.yaml `accelerate launch` sets this variable; the model must lie where accelerate computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    capabilities = {"avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert default_device().type == "cuda"
    for value, expected in (
        ("False", "cuda"),
        ("0", "cuda"),
        ("True", "cpu"),
        ("1", "cpu"),
        ("yes", "cpu"),
    ):
        monkeypatch.setenv("ACCELERATE_USE_CPU", value)
        assert default_device().type == expected
    accelerator = new_accelerator(TrainingConfig(batch_size=8, precision="auto"), quantized=False)
    assert (accelerator.device.type, accelerator.mixed_precision) == ("cpu", "no")


@pytest.mark.parametrize(
    ("generation", "expected"), [(7, torch.float32), (8, torch.bfloat16), (9, torch.bfloat16)]
)
def test_auto_is_bfloat16_only_where_a_gpu_multiplies_it_itself(monkeypatch, generation, expected):
    """PyTorch calls it supported on T4 and V100 (7.x) too, where it is emulated and slower than float32."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=generation)
    )
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert torch.cuda.is_bf16_supported()
    assert resolve_dtype("auto", torch.device("cuda")) == expected
    assert resolve_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16
