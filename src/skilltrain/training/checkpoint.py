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
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import read_json, sync, write_json
from skilltrain.formats import CHECKPOINT
from skilltrain.metrics.bootstrap import Interval
from skilltrain.training.engine import launch_of, shards_weights

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.json"
_DEEPSPEED_FOLDER = "deepspeed"
_ADAMW_MOMENTS = {"exp_avg", "exp_avg_sq"}  # each as large as its parameter


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
    """Progress of a training run, its best evaluation, its token budget and states of its hooks."""

    step: int = 0
    loss: float = 0.0
    queries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: Best = field(default_factory=Best)
    token_budget: int = 0
    hook_states: list[dict[str, Any]] = field(default_factory=list)


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
        position: Progress of the run: the step N, and what a resumed run needs to know.
        keep: Number of the newest checkpoints to keep. The best checkpoint is kept too.

    Raises:
        SkilltrainError: The checkpoint cannot be written.
    """
    # Write to a temporary folder. A run that is stopped meanwhile leaves no broken checkpoint.
    final = folder / f"step-{position.step}"
    partial = folder / f"{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)  # left behind by a stopped run
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
        _sync_files(partial)
        partial.rename(final)
        sync(folder)
        _delete_old_checkpoints(folder, keep)
    accelerator.wait_for_everyone()


def _sync_files(folder: Path) -> None:
    """Make all files of a folder readable for everyone, and sync them to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors lets only the owner read its file
        sync(path)


def _delete_old_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one."""
    best = best_checkpoint(folder)
    for path in checkpoints(folder)[:-keep]:
        if path != best:
            shutil.rmtree(path)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    path_by_step = {}
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
    """Restore the newest checkpoint of a folder, and return its position.

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
        fix = "resume with that launcher"
        raise SkilltrainError("other-launcher", fault, where=newest, fix=fix)
    _restore(accelerator, model, optimizer, newest)
    return state.position


def _restore(accelerator: Accelerator, model: nn.Module, optimizer: Any, checkpoint: Path) -> None:
    """Restore the weights, the optimiser's state and the random states.

    Under DeepSpeed, its own files hold the weights too, and `_load_states` restores them.

    Raises:
        SkilltrainError: A file is damaged, would run code, or does not fit the model.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        step_module = cast(nn.Module, accelerator.unwrap_model(model))
        load_weights(step_module, prefix="", checkpoint=checkpoint)
    try:
        _load_states(accelerator, model, optimizer, checkpoint)
    except pickle.UnpicklingError as error:
        # Do not show the message of the error: it explains how to switch off the protection.
        raise _damaged(checkpoint, "the checkpoint is damaged, or holds code") from error
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        fault = f"the checkpoint is damaged: {type(error).__name__} {reason_of(error)}"
        raise _damaged(checkpoint, fault) from error


def _damaged(path: Path, fault: str) -> SkilltrainError:
    """Return the error for a damaged checkpoint or file of a checkpoint."""
    fix = "delete it, and resume from the one before it"
    return SkilltrainError("damaged-checkpoint", fault, where=path, fix=fix)


def load_weights(module: nn.Module, prefix: str, checkpoint: Path) -> None:
    """Load a checkpoint's weights into a module. Frozen weights of the module do not change.

    Args:
        module: The step module or its model. Each rank may have a part of its weights.
        prefix: Start of the names in the checkpoint, which is removed: `model.` for the model, an
            empty string for the step module.
        checkpoint: Folder of the checkpoint.

    Raises:
        SkilltrainError: The weights cannot be read, or belong to another model.
    """
    file = checkpoint / WEIGHTS_FILE
    try:
        tensors = _load_tensors(file)
    except (OSError, SafetensorError, ValueError) as error:
        fault = f"cannot read the checkpoint's weights: {reason_of(error)}"
        raise SkilltrainError("damaged-checkpoint", fault, where=file) from error

    # The names become those of the module's own weights.
    weights = {name.removeprefix(prefix): value for name, value in tensors.items()}
    mismatches = _load_into(module, weights)
    if mismatches:
        fault = f"the checkpoint does not fit the recipe's model: {mismatches[0]}"
        raise SkilltrainError("changed-model", fault, where=checkpoint)


def _load_into(module: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Load weights by name into a module, and return the mismatches.

    A mismatch is a name that only the checkpoint or only the module has, or a wrong shape.

    Args:
        module: The step module or its model.
        weights: Full weights of the checkpoint, by name.
    """
    # Leave frozen weights out, and shard the others as the module's weights are sharded.
    # `keep_vars` returns the parameters themselves, which tell tied weights by their identity.
    current = module.state_dict(keep_vars=True)
    named_parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, value in named_parameters if not value.requires_grad}
    stored = {}
    for name, weight in weights.items():
        if name not in frozen:
            stored[name] = _distribute_like(current.get(name), weight)

    # Load the weights. Find the names that only the module or only the checkpoint has.
    try:
        missing, unexpected = module.load_state_dict(stored, strict=False)
    except RuntimeError as error:  # a wrong shape
        return [str(error).splitlines()[-1].strip()]

    # Tied weights are one tensor with several names, and are stored under one of the names. So a
    # missing name is no mismatch if its tensor was loaded under another name.
    loaded_ids = {id(value) for name, value in current.items() if name not in missing}
    mismatches = [*unexpected]
    for name in missing:
        is_tied = id(current[name]) in loaded_ids
        if not is_tied and name not in frozen:
            mismatches.append(name)
    return mismatches


def _distribute_like(current: Tensor | None, weight: Tensor) -> Tensor:
    """Shard a full weight over the ranks if the module's current weight is sharded.

    Args:
        current: Weight of the module. FSDP2 shards it as a DTensor. None: the module has none.
        weight: The full weight.
    """
    if not isinstance(current, DTensor):
        return weight
    # Every rank has read the full weight, so no rank sends it (`src_data_rank=None`).
    return distribute_tensor(
        weight.to(current.device), current.device_mesh, current.placements, src_data_rank=None
    )


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
        # Only FSDP2 needs this module, and importing it takes a third of a second.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

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
        raise _damaged(file, fault)
    return state


def _save_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save the random states of this process, and its part of the optimiser's state.

    Under DeepSpeed, its own files hold the optimiser's state and the weights. If all ranks have the
    same state, only the first rank saves it.
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
        # The key of a value is `<number of the parameter>.<name of the value>`.
        values = {}
        for number, parameter in enumerate(_parameters(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
                # Parameters may share a small value of bitsandbytes, and safetensors refuses shared
                # memory. So small values are copied. Moments are not, because they are large.
                copy = local.cpu() if name in _ADAMW_MOMENTS else local.cpu().clone()
                values[f"{number}.{name}"] = copy.contiguous()
        save_file(values, folder / _optimizer_file(accelerator))


def _load_states(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Restore the optimiser's state and the random states that `_save_states` saved.

    Under DeepSpeed, its own files also hold the weights. Random states are restored last, because
    loading may use random numbers.
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
    _restore_random_states(accelerator, folder / _random_file(accelerator))


def _restore_random_states(accelerator: Accelerator, file: Path) -> None:
    """Restore the random states of this process, unless it is new and has no file.

    A run may resume on more ranks than before, unless the ranks share the weights. A new rank has
    no file, and keeps its current random state.
    """
    may_be_new = accelerator.process_index > 0 and not shards_weights(accelerator)
    if may_be_new and not file.is_file():
        return
    states = load_file(file)
    torch.set_rng_state(states["cpu"])
    device = accelerator.device
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type])


def _random_file(accelerator: Accelerator) -> str:
    return f"random_{accelerator.process_index}.safetensors"


def _optimizer_file(accelerator: Accelerator) -> str:
    """Return the name of this process's file, or of the only file if all have the same state."""
    if shards_weights(accelerator):
        return f"optimizer_{accelerator.process_index}.safetensors"
    return "optimizer.safetensors"


def _restore_optimizer(optimizer: Any, state_values: dict[str, Tensor]) -> None:
    """Restore the values that the optimiser holds for each parameter.

    Args:
        optimizer: The optimiser that the accelerator has prepared.
        state_values: This rank's values by `<number of the parameter>.<name of the value>`, for
            example `3.exp_avg`.

    Raises:
        ValueError: A value is missing, or has another shape than its parameter.
    """
    parameters = _parameters(optimizer)
    states: dict[int, dict[str, Tensor | int]] = {}
    for key, value in state_values.items():
        number_text, _, name = key.partition(".")
        number = int(number_text)
        state = states.setdefault(number, {})
        # Moments are sharded like their parameter. A whole number, such as the number of steps of
        # bitsandbytes, was stored as a tensor and becomes an int again.
        if name in _ADAMW_MOMENTS:
            state[name] = _shard_like(parameters[number], value)
        else:
            is_number = value.ndim == 0 and not value.is_floating_point()
            state[name] = int(value) if is_number else value
    # A damaged file may lack some values of AdamW.
    for number, state in states.items():
        if isinstance(optimizer.optimizer, AdamW) and state.keys() != {"step", *_ADAMW_MOMENTS}:
            raise ValueError(f"the optimiser holds {sorted(state)} for parameter {number}")
    # Only the values of the parameters are restored. Settings, such as betas, stay as they are.
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimiser."""
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def _shard_like(parameter: Tensor, local_values: Tensor) -> Tensor:
    """Return this rank's values as a tensor that is sharded like a parameter.

    Args:
        parameter: The parameter. Under FSDP2, it is a DTensor.
        local_values: Values for this rank's part of the parameter.

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
    """Let torch.load refuse files that could run code, inside the `with` statement.

    DeepSpeed calls torch.load with weights_only=False, which allows code. The environment variable
    sets weights_only=True instead. Three classes of DeepSpeed are allowed, because its files
    contain them. They only hold numbers and settings.
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
