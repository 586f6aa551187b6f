"""Checkpoints: whole or not there, for they are written aside, synced, then renamed to step-N.

A run folder may come from elsewhere, so nothing here is read in a way that could execute code; DeepSpeed's own files
are opened as plain tensors and numbers.
"""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import read_json, write_json
from skilltrain.formats import CHECKPOINT
from skilltrain.metrics.bootstrap import Interval
from skilltrain.training.engine import launch_of, shards_weights

WEIGHTS_FILE, STATE_FILE, _DEEPSPEED = "model.safetensors", "state.json", "deepspeed"
_DAMAGED_FIX = "delete it, and resume from the one before it"


@dataclass
class Best:
    """Which step did best on the dev benchmark, and how many evaluations since then did not do better."""

    step: int = 0
    value: float = -1.0  # below every measure
    num_bad: int = 0
    figures: dict[str, Interval] = field(default_factory=dict)

    def update(self, step: int, metric: str, figures: Mapping[str, Interval]) -> bool:
        """Whether the evaluation at `step` is the best so far; an equal one is not better."""
        value = figures[metric].mean
        improved = value > self.value
        self.num_bad = 0 if improved else self.num_bad + 1
        if improved:
            self.step, self.value, self.figures = step, value, dict(figures)
        return improved


@dataclass
class Position:
    """How far a training is, and its best step so far."""

    step: int = 0
    loss: float = 0.0
    queries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: Best = field(default_factory=Best)


class _State(Config):
    """What state.json holds."""

    format: int = CHECKPOINT.number
    written_by: str
    position: Position


def save_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    folder: Path,
    position: Position,
    keep: int,
) -> None:
    """Save model, optimiser, position and every random state as `folder`/step-N; all ranks must call it.

    The weights that train are in one file, also where ranks hold shards of them: any checkpoint can be exported. The
    base model has the frozen ones. All but the newest `keep` checkpoints and the best one are deleted.
    """
    final = folder / f"step-{position.step}"
    partial = folder / f"{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = _weights(accelerator, model)
    try:
        _save_states(accelerator, model, optimizer, partial)
        if accelerator.is_main_process:
            save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            state = _State(written_by=launch_of(accelerator), position=position)
            write_json(partial / STATE_FILE, state.model_dump(mode="json"))
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise SkilltrainError(
            f"cannot save a checkpoint: {reason_of(error)}", where=partial
        ) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors writes its file for its owner alone
            _sync(path)
        partial.rename(final)
        _sync(folder)
        for old in {*checkpoints(folder)[:-keep]} - {best_checkpoint(folder)}:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    found = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that scored best on the dev benchmark, as the newest knows; None where none was evaluated."""
    if not (found := checkpoints(folder)):
        return None
    path = folder / f"step-{_read_state(found[-1]).position.best.step}"
    return path if path in found else None


def load_checkpoint(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path
) -> Position | None:
    """Restore the newest checkpoint of `folder` and give its position; None if there is none.

    Raises SkilltrainError if another launch wrote it (`launch_of`), and where a part of it is missing, damaged, or
    would execute code.
    """
    if not (found := checkpoints(folder)):
        return None
    newest, launch = found[-1], launch_of(accelerator)
    state = _read_state(newest)
    if state.written_by != launch:
        what = f"was written by {state.written_by}, not by {launch}"
        raise SkilltrainError(what, where=newest, fix="resume with that launcher")
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        load_weights(cast(nn.Module, accelerator.unwrap_model(model)), "", newest)
    try:
        _load_states(accelerator, model, optimizer, newest)
    except (
        pickle.UnpicklingError
    ) as error:  # its text is a page of advice to switch the protection off
        raise SkilltrainError(
            "the checkpoint is damaged, or holds code", where=newest, fix=_DAMAGED_FIX
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        what = f"the checkpoint is damaged: {type(error).__name__} {reason_of(error)}"
        raise SkilltrainError(what, where=newest, fix=_DAMAGED_FIX) from error
    return state.position


def load_weights(step_part: nn.Module, name: str, checkpoint: Path) -> None:
    """Put a checkpoint's weights into the part `name` of a step module, or, without a name, into the module itself.

    Its ranks may hold shards. Frozen weights stay as they are.
    """
    file = checkpoint / WEIGHTS_FILE
    try:
        whole = {key.removeprefix(f"{name}."): value for key, value in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise SkilltrainError(
            f"cannot read the checkpoint's weights: {reason_of(error)}", where=file
        ) from error
    held = step_part.state_dict(keep_vars=True)
    frozen = {
        key for key, own in held.items() if isinstance(own, nn.Parameter) and not own.requires_grad
    }
    whole = {key: value for key, value in whole.items() if key not in frozen}
    for key, own in held.items():
        if isinstance(own, DTensor) and key in whole:
            value = whole[key].to(own.device)
            whole[key] = distribute_tensor(
                value, own.device_mesh, own.placements, src_data_rank=None
            )
    try:
        missing, unknown = step_part.load_state_dict(whole, strict=False)
        present = {id(value) for key, value in held.items() if key not in missing}
        # Tied weights are held under one name.
        unfit = [
            *unknown,
            *(key for key in missing if key not in frozen and id(held[key]) not in present),
        ]
    except RuntimeError as error:  # a shape that differs
        unfit = [str(error).splitlines()[-1].strip()]
    if unfit:
        raise SkilltrainError(
            f"the checkpoint does not fit the recipe's model: {unfit[0]}", where=checkpoint
        )


def _weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """What trains, and buffers, whole on the first rank, tied weights once; all ranks must call it."""
    if accelerator.distributed_type == DistributedType.FSDP:  # frozen weights are not even gathered
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        weights: Any = get_model_state_dict(model, options=options)
    else:
        weights = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return {}
    module = cast(nn.Module, accelerator.unwrap_model(model))
    # Gathered shards no longer tell which of them are tied: the model does.
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    names |= {name for name, _ in module.named_buffers()}
    return {
        name: value.detach().cpu().contiguous() for name, value in weights.items() if name in names
    }


def _read_state(checkpoint: Path) -> _State:
    file = checkpoint / STATE_FILE
    state = read_json(file)
    CHECKPOINT.check(state, file, "train again into another folder: skilltrain train RECIPE out=…")
    return validate(_State, state, file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _save_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write this process's random states and its part of the optimiser into `folder`."""
    states, device = {"cpu": torch.get_rng_state()}, accelerator.device
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    save_file(states, folder / _file_of(accelerator, "random"))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.save_checkpoint(
            str(folder), _DEEPSPEED, save_latest=False, exclude_frozen_parameters=True
        )  # type: ignore[operator]
    elif accelerator.is_main_process or shards_weights(accelerator):
        moments = {
            f"{number}.{name}": (value.to_local() if isinstance(value, DTensor) else value)
            .cpu()
            .contiguous()
            for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        save_file(moments, folder / _file_of(accelerator, "optimizer"))


def _load_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Restore what `_save_states` wrote; under DeepSpeed the weights too. Random states come last: loading may draw."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        with _plain_data_only():
            path, _ = model.load_checkpoint(str(folder), _DEEPSPEED, load_module_strict=False)  # type: ignore[operator]
        if path is None:
            raise SkilltrainError("no such folder", where=folder / _DEEPSPEED)
    else:
        _restore_moments(optimizer, load_file(folder / _file_of(accelerator, "optimizer")))
    random_file, device = folder / _file_of(accelerator, "random"), accelerator.device
    if accelerator.process_index and not random_file.is_file() and not shards_weights(accelerator):
        return  # a rank that the run did not have before: it draws as at the start
    states = load_file(random_file)
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type])


def _file_of(accelerator: Accelerator, what: str) -> str:
    """This process's own file; of the optimiser there is one for all where all hold the same."""
    own = what == "random" or shards_weights(accelerator)
    return f"{what}_{accelerator.process_index}.safetensors" if own else f"{what}.safetensors"


def _restore_moments(optimizer: Any, moments: dict[str, Tensor]) -> None:
    """Take up `<number of the parameter>.<name>` → this rank's part of it. Raises ValueError for another shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, _, name = key.partition(".")
        if value.ndim:
            whole = torch.zeros_like(parameters[int(number)])
            own = whole.to_local() if isinstance(whole, DTensor) else whole
            if value.shape != own.shape:
                raise ValueError(
                    f"the optimiser holds {tuple(value.shape)} for a weight of {tuple(own.shape)}"
                )
            own.copy_(value)
            value = whole
        states.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )


@contextmanager
def _plain_data_only() -> Iterator[None]:
    """Within, torch.load refuses whatever would execute code, also where its caller (DeepSpeed) asks it not to.

    The classes let through are numbers and settings in DeepSpeed's files, which do nothing when they are made.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # pyright: ignore[reportMissingImports]  # an extra
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore[reportMissingImports]

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
