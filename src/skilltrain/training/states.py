"""What a process keeps of a training beside the weights: its random states, and its part of the optimiser.

A run folder may come from elsewhere, so nothing here is read in a way that could execute code: random states are
JSON, the optimiser's moments safetensors, and DeepSpeed's own files are opened as plain tensors and numbers.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.training.engine import shards_weights

_DEEPSPEED = "deepspeed"


def save_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write this process's random states and optimiser into `folder`; all ranks must call it."""
    from safetensors.torch import save_file

    write_json(_random_file(accelerator, folder), _random_states(accelerator.device))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.save_checkpoint(str(folder), _DEEPSPEED, save_latest=False)  # type: ignore[operator]
    elif accelerator.is_main_process or shards_weights(accelerator):
        save_file(_moments(optimizer), _optimizer_file(accelerator, folder))


def load_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Restore what `save_states` wrote; under DeepSpeed the weights too. Random states come last: loading may draw."""
    from safetensors.torch import load_file

    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        with _plain_data_only():
            path, _ = model.load_checkpoint(str(folder), _DEEPSPEED)  # type: ignore[operator]
        if path is None:
            raise SkilltrainError("no such folder", where=folder / _DEEPSPEED)
    else:
        _restore_moments(optimizer, load_file(_optimizer_file(accelerator, folder)))
    _restore_random_states(read_json(_random_file(accelerator, folder)), accelerator.device)


def _random_file(accelerator: Accelerator, folder: Path) -> Path:
    return folder / f"random_{accelerator.process_index}.json"


def _optimizer_file(accelerator: Accelerator, folder: Path) -> Path:
    """One file where every rank holds the same, one for each rank where they hold shards."""
    ending = f"_{accelerator.process_index}" if shards_weights(accelerator) else ""
    return folder / f"optimizer{ending}.safetensors"


def _random_states(device: torch.device) -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    states = {"python": random.getstate(), "numpy": numpy_state, "torch": _hex(torch.get_rng_state())}
    if device.type != "cpu":
        states[device.type] = _hex(torch.get_device_module(device).get_rng_state())
    return states


def _restore_random_states(states: Any, device: torch.device) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(_from_hex(states["torch"]))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_from_hex(states[device.type]))


def _hex(state: Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _moments(optimizer: Any) -> dict[str, Tensor]:
    """`<number of the parameter>.<name>` → this rank's part of the optimiser's tensors."""
    return {
        f"{number}.{name}": (value.to_local() if isinstance(value, DTensor) else value).cpu().contiguous()
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def _restore_moments(optimizer: Any, moments: dict[str, Tensor]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        states.setdefault(int(number), {})[name] = _as_shard(value, parameter) if value.ndim else value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _as_shard(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` as this rank's part of a tensor that is shared as `parameter` is. Raises ValueError for other shapes."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if value.shape != own.shape:
        raise ValueError(f"the optimiser holds {tuple(value.shape)} for a weight of {tuple(own.shape)}")
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value.to(own.device), parameter.device_mesh, parameter.placements, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


@contextmanager
def _plain_data_only() -> Iterator[None]:
    """Within, torch.load refuses whatever would execute code, also where its caller (DeepSpeed) asks it not to."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(_harmless_classes()):
            yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]


def _harmless_classes() -> list[Any]:
    """The classes in DeepSpeed's files: numbers and settings, which do nothing when they are made."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # pyright: ignore[reportMissingImports]  # an extra
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore[reportMissingImports]

    return [LossScaler, ZeroStageEnum, fragment_address]
