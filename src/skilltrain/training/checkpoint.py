"""Saves and restores checkpoints of training runs, as folders step-N that are complete or absent.

A checkpoint is written to a temporary folder, synced to disk, and then renamed. It may come from
someone else, so reading it never runs code. DeepSpeed's own files are only read as tensors and
numbers.
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
from skilltrain.files import read_json, sync, write_json
from skilltrain.formats import CHECKPOINT
from skilltrain.metrics.bootstrap import Interval
from skilltrain.training.engine import launch_of, shards_weights

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.json"
_DEEPSPEED_FOLDER = "deepspeed"
_ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}  # values that AdamW holds for a parameter
_DAMAGED_FIX = "delete it, and resume from the one before it"


@dataclass
class Best:
    """The best evaluation on the dev benchmark so far.

    Attributes:
        step: Step of the evaluation; 0 if there is none.
        value: Value of the metric that decides.
        num_bad: Number of evaluations since then. None of them was better.
        figures: All metrics of the evaluation, by name.
    """

    step: int = 0
    value: float = -1.0  # below the value of every measure
    num_bad: int = 0
    figures: dict[str, Interval] = field(default_factory=dict)

    def update(self, step: int, metric: str, figures: Mapping[str, Interval]) -> bool:
        """Record the evaluation at `step`, and return whether it is better than all before it."""
        value = figures[metric].mean
        is_better = value > self.value
        if is_better:
            self.step = step
            self.value = value
            self.figures = dict(figures)
        self.num_bad = 0 if is_better else self.num_bad + 1
        return is_better


@dataclass
class Position:
    """Progress of a training run, its best evaluation so far, and its token budget."""

    step: int = 0
    loss: float = 0.0
    queries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: Best = field(default_factory=Best)
    token_budget: int = 0


class _State(Config):
    """Content of state.json."""

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
    """Save the model, the optimiser, the position and all random states as `folder`/step-N.

    All ranks must call this. One file holds all weights that train, even if each rank has a part
    of them, so that every checkpoint can be exported. Frozen weights are not saved, because the
    base model has them.

    Args:
        accelerator: Accelerator of the run.
        model: The model that the accelerator has prepared.
        optimizer: The optimiser that the accelerator has prepared.
        folder: Folder of the run's checkpoints.
        position: Progress of the run.
        keep: Number of the newest checkpoints to keep. The best one is kept too. All others are
            deleted.

    Raises:
        SkilltrainError: The checkpoint cannot be written.
    """
    # Write all files to a temporary folder.
    final = folder / f"step-{position.step}"
    partial = folder / f"{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()

    weights = _gather_weights(accelerator, model)
    try:
        _save_states(accelerator, model, optimizer, partial)
        if accelerator.is_main_process:
            save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            state = _State(written_by=launch_of(accelerator), position=position)
            write_json(partial / STATE_FILE, state.model_dump(mode="json"))
    except (OSError, SafetensorError) as error:  # a full disk can cause either
        fault = f"cannot save a checkpoint: {reason_of(error)}"
        raise SkilltrainError("cannot-write", fault, where=partial) from error
    accelerator.wait_for_everyone()

    # Rename the folder once all files are on the disk, and delete old checkpoints.
    if accelerator.is_main_process:
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors lets only the owner read its file
            sync(path)
        partial.rename(final)
        sync(folder)

        best = best_checkpoint(folder)
        for old in checkpoints(folder)[:-keep]:
            if old != best:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    path_by_step: dict[int, Path] = {}
    for path in folder.glob("step-*"):
        # An incomplete checkpoint has another name: step-N.partial.
        step = path.name.removeprefix("step-")
        if step.isascii() and step.isdecimal():
            path_by_step[int(step)] = path
    return [path_by_step[step] for step in sorted(path_by_step)]


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that scored best on the dev benchmark.

    The newest checkpoint records which one it is. Without an evaluation, return None.
    """
    paths = checkpoints(folder)
    if not paths:
        return None
    best = folder / f"step-{_read_state(paths[-1]).position.best.step}"
    return best if best in paths else None


def load_checkpoint(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path
) -> Position | None:
    """Restore the newest checkpoint of `folder`, and return its position.

    Without a checkpoint, do nothing and return None.

    Raises:
        SkilltrainError: The checkpoint was written with another launcher, device or number of
            processes (`launch_of`), or one of its files is missing, damaged, or would run code.
    """
    paths = checkpoints(folder)
    if not paths:
        return None

    # Check that the launcher, the device and the number of processes are the same.
    newest = paths[-1]
    state = _read_state(newest)
    launch = launch_of(accelerator)
    if state.written_by != launch:
        fault = f"was written by {state.written_by}, not by {launch}"
        raise SkilltrainError(
            "other-launcher", fault, where=newest, fix="resume with that launcher"
        )

    # Restore the weights, the optimiser and the random states. Under DeepSpeed, `_load_states`
    # restores the weights too.
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        step_module = cast(nn.Module, accelerator.unwrap_model(model))
        load_weights(step_module, prefix="", checkpoint=newest)
    try:
        _load_states(accelerator, model, optimizer, newest)
    except pickle.UnpicklingError as error:
        # Do not show the message of the error: it explains how to switch off the protection.
        fault = "the checkpoint is damaged, or holds code"
        raise SkilltrainError(
            "damaged-checkpoint", fault, where=newest, fix=_DAMAGED_FIX
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        fault = f"the checkpoint is damaged: {type(error).__name__} {reason_of(error)}"
        raise SkilltrainError(
            "damaged-checkpoint", fault, where=newest, fix=_DAMAGED_FIX
        ) from error
    return state.position


def load_weights(module: nn.Module, prefix: str, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into a module. Frozen weights of the module do not change.

    Args:
        module: The step module or its model. Each rank may have a part of its weights.
        prefix: Prefix of the names in the checkpoint: `model.` for the model, an empty string for
            the step module. A name without the prefix does not fit the model.
        checkpoint: Folder of the checkpoint.

    Raises:
        SkilltrainError: The weights cannot be read, or belong to another model.
    """
    file = checkpoint / WEIGHTS_FILE
    try:
        stored = {key.removeprefix(prefix): value for key, value in _load_tensors(file).items()}
    except (OSError, SafetensorError, ValueError) as error:
        fault = f"cannot read the checkpoint's weights: {reason_of(error)}"
        raise SkilltrainError("damaged-checkpoint", fault, where=file) from error

    # Leave frozen weights out, and shard a stored weight like the weight of the module.
    current = module.state_dict(keep_vars=True)
    frozen = set()
    for key, value in current.items():
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            frozen.add(key)
            stored.pop(key, None)
        elif isinstance(value, DTensor) and key in stored:
            full_weight = stored[key].to(value.device)
            # Every rank has read the full weight, so no rank sends it (`src_data_rank=None`).
            stored[key] = distribute_tensor(
                full_weight, value.device_mesh, value.placements, src_data_rank=None
            )

    # Load the weights. Find those that only the checkpoint or only the module has.
    try:
        missing, unexpected = module.load_state_dict(stored, strict=False)
        mismatches = [*unexpected]
        # Tied weights are one tensor with several names, and are stored under one of the names.
        loaded_ids = {id(value) for key, value in current.items() if key not in missing}
        for key in missing:
            is_tied = id(current[key]) in loaded_ids
            if not is_tied and key not in frozen:
                mismatches.append(key)
    except RuntimeError as error:  # a weight has another shape
        last_line = str(error).splitlines()[-1]
        mismatches = [last_line.strip()]
    if mismatches:
        fault = f"the checkpoint does not fit the recipe's model: {mismatches[0]}"
        raise SkilltrainError("changed-model", fault, where=checkpoint)


def _load_tensors(file: Path) -> dict[str, Tensor]:
    """Load a safetensors file. Raises ValueError if a tensor holds NaN."""
    tensors = load_file(file)
    for name, value in tensors.items():
        if value.isnan().any():
            raise ValueError(f"{name} holds NaN")
    return tensors


def _gather_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Collect the trained weights and the buffers on the first rank. All ranks must call this.

    Returns:
        Weights by name, on the CPU. A tied weight has one name. Other ranks return no weights.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        weights: Any = get_model_state_dict(model, options=options)
    else:
        weights = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return {}

    # The gathered weights have a tied weight under all its names. `named_parameters` lists it once.
    module = cast(nn.Module, accelerator.unwrap_model(model))
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    names.update(name for name, _ in module.named_buffers())
    return {
        name: value.detach().cpu().contiguous() for name, value in weights.items() if name in names
    }


def _read_state(checkpoint: Path) -> _State:
    """Read and check state.json of a checkpoint."""
    file = checkpoint / STATE_FILE
    state = read_json(file)
    CHECKPOINT.check(state, file, "train again into another folder: skilltrain train RECIPE out=…")
    state = validate(_State, state, file)
    if checkpoint.name != f"step-{state.position.step}":
        fault = f"is of step {state.position.step}, which is not that of its folder"
        raise SkilltrainError("damaged-checkpoint", fault, where=file, fix=_DAMAGED_FIX)
    return state


def _save_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save the random states of this process, and its part of the optimiser's state.

    Under DeepSpeed, its own files hold the optimiser's state and the weights.
    """
    device = accelerator.device
    random_states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        random_states[device.type] = torch.get_device_module(device).get_rng_state()
    save_file(random_states, folder / _random_file(accelerator))

    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        model.save_checkpoint(
            str(folder), _DEEPSPEED_FOLDER, save_latest=False, exclude_frozen_parameters=True
        )  # type: ignore[operator]
    elif accelerator.is_main_process or shards_weights(accelerator):
        moments: dict[str, Tensor] = {}
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                moments[f"{number}.{name}"] = local.cpu().contiguous()
        save_file(moments, folder / _optimizer_file(accelerator))


def _load_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Restore the optimiser's state and the random states that `_save_states` saved.

    Under DeepSpeed, its own files also hold the weights. Random states come last, because loading
    may use random numbers.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        with _plain_data_only():
            path, _ = model.load_checkpoint(  # type: ignore[operator]
                str(folder), _DEEPSPEED_FOLDER, load_module_strict=False
            )
        if path is None:
            raise SkilltrainError("not-found", "no such folder", where=folder / _DEEPSPEED_FOLDER)
    else:
        _restore_optimizer(optimizer, _load_tensors(folder / _optimizer_file(accelerator)))

    # A run may resume on more ranks than before, unless the ranks share the weights. A new rank has
    # no file, and keeps its current random state.
    random_file = folder / _random_file(accelerator)
    may_lack_file = accelerator.process_index > 0 and not shards_weights(accelerator)
    is_new_rank = may_lack_file and not random_file.is_file()
    if not is_new_rank:
        random_states = load_file(random_file)
        torch.set_rng_state(random_states["cpu"])
        device = accelerator.device
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(random_states[device.type])


def _random_file(accelerator: Accelerator) -> str:
    return f"random_{accelerator.process_index}.safetensors"


def _optimizer_file(accelerator: Accelerator) -> str:
    """Return the name of this process's file, or of the only file if all have the same state."""
    if shards_weights(accelerator):
        return f"optimizer_{accelerator.process_index}.safetensors"
    return "optimizer.safetensors"


def _restore_optimizer(optimizer: Any, state_values: dict[str, Tensor]) -> None:
    """Restore the state of the optimiser: two moments and a number of steps per parameter.

    Args:
        optimizer: The optimiser that the accelerator has prepared.
        state_values: This rank's moments and numbers of steps. A key is
            `<number of the parameter>.<name of the value>`.

    Raises:
        ValueError: A value is missing, or has another shape than its parameter.
    """
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]

    states: dict[int, dict[str, Tensor]] = {}
    for key, value in state_values.items():
        number_text, _, name = key.partition(".")
        number = int(number_text)
        if value.ndim:  # a moment; the number of steps has no dimension
            value = _shard_like(parameters[number], value)
        states.setdefault(number, {})[name] = value
    for number, state in states.items():
        if state.keys() != _ADAMW_STATE:
            raise ValueError(f"the optimiser holds {sorted(state)} for parameter {number}")
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _shard_like(parameter: Tensor, local_values: Tensor) -> Tensor:
    """Return values of a parameter as a tensor that is sharded over the ranks like the parameter.

    Args:
        parameter: The parameter. Under FSDP2, it is a DTensor.
        local_values: This rank's part of the values.

    Raises:
        ValueError: This rank's part of the parameter has another shape.
    """
    result = torch.zeros_like(parameter)
    local_part = result.to_local() if isinstance(result, DTensor) else result  # shares the memory
    if local_values.shape != local_part.shape:
        raise ValueError(
            f"the optimiser holds {tuple(local_values.shape)} for a weight of "
            f"{tuple(local_part.shape)}"
        )
    local_part.copy_(local_values)
    return result


@contextmanager
def _plain_data_only() -> Iterator[None]:
    """Let torch.load refuse a file that could run code, in the body of the `with` statement.

    DeepSpeed calls torch.load with weights_only=False, which allows code. The environment variable
    sets weights_only=True instead.
    Three classes of DeepSpeed are allowed, because its files contain them. They only hold numbers
    and settings.
    """
    # DeepSpeed is an optional dependency.
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # pyright: ignore
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
