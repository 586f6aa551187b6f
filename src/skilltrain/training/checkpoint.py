"""Checkpoints that are whole or not there: written aside, synced, then renamed to step-N.

Each holds the whole model (model.safetensors), how far the training is (state.json), and each process's `states`.
"""

import math
import os
import pickle
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.statistics.bootstrap import Interval
from skilltrain.files import read_json, write_json, write_text
from skilltrain.training.engine import whole_weights, zero_stage
from skilltrain.training.gather import highest_on_any_rank
from skilltrain.training.states import load_states, save_states

WEIGHTS_FILE, STATE_FILE = "model.safetensors", "state.json"
_NAME = re.compile(r"step-(\d+)")
_PATIENCE = 60.0  # seconds: a network file system may remember for so long that a file was not there
_DAMAGE = (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError)
_DAMAGED_FIX = "delete it, and resume from the one before it"


@dataclass
class Best:
    """Which step did best on the dev benchmark, and for how many evaluations none has done better."""

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
    """How far a training is, and its best step so far: a resumed run goes on, and stops, as an uninterrupted one."""

    step: int = 0
    loss: float = math.nan
    queries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: Best = field(default_factory=Best)

    def advance(self, loss: float, queries: int, tokens: int, seconds: float) -> None:
        """Count one more optimiser step; `seconds` are those of the whole training so far."""
        self.step, self.loss, self.seconds = self.step + 1, loss, seconds
        self.queries, self.tokens = self.queries + queries, self.tokens + tokens


class _State(Config):
    """What state.json holds: the launch that wrote the checkpoint, and the training's position."""

    written_by: str
    position: Position


def save_checkpoint(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, folder: Path, position: Position
) -> None:
    """Save model, optimiser, position and every random state as `folder`/step-N; all ranks must call it.

    The whole model is always in one file, also where the ranks hold shards of it, so that any checkpoint can be
    exported without the launcher that wrote it; only frozen 4-bit weights are left out, for the base model has them.
    """
    final = folder / f"step-{position.step}"
    if final.exists():
        return
    partial = folder / f"{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = whole_weights(accelerator, model)
    try:
        save_states(accelerator, model, optimizer, partial)
        if accelerator.is_main_process:
            _write_weights(weights, cast(nn.Module, accelerator.unwrap_model(model)), partial / WEIGHTS_FILE)
            state = _State(written_by=_launch(accelerator), position=position)
            write_json(partial / STATE_FILE, state.model_dump(mode="json"))
    except OSError as error:
        raise SkilltrainError(f"cannot save a checkpoint: {error.strerror or error}", where=partial) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for file in (path for path in partial.rglob("*") if path.is_file()):
            _sync(file)
        partial.rename(final)
        _sync(folder)
    accelerator.wait_for_everyone()


def rotate(accelerator: Accelerator, folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    if accelerator.is_main_process:
        best = best_checkpoint(folder)
        for old in checkpoints(folder)[:-keep]:
            if old != best:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that scored best on the dev benchmark, as the newest knows; None where none was evaluated."""
    found = checkpoints(folder)
    path = folder / f"step-{_read_state(found[-1]).position.best.step}" if found else folder / "none"
    return path if path in found else None


def check_shared(accelerator: Accelerator, out: Path, folder: Path) -> None:
    """Raise SkilltrainError, on every rank, unless all ranks see one `out` and the same checkpoints in `folder`.

    Otherwise machines would each keep a part of every checkpoint, and some would resume from other weights. All ranks
    must call it, before any of them loads or saves.
    """
    if accelerator.num_processes == 1:
        return
    fix = "out must be a folder that all machines share"
    newest = max((_step(path) for path in checkpoints(folder)), default=-1)
    highest, lowest = (sign * highest_on_any_rank(sign * newest, accelerator.device) for sign in (1, -1))
    if highest != lowest:
        other = f"step-{lowest}" if lowest >= 0 else "none"
        raise SkilltrainError(f"one process sees step-{highest} as its newest, another {other}", where=folder, fix=fix)
    token = secrets.randbits(48) if accelerator.is_main_process else 0
    if accelerator.is_main_process:
        write_text(_marker(out, token), "")
    marker = _marker(out, highest_on_any_rank(token, accelerator.device))
    blind = highest_on_any_rank(-1 if _appears(marker) else accelerator.process_index, accelerator.device)
    if accelerator.is_main_process:
        marker.unlink(missing_ok=True)
    if blind >= 0:
        raise SkilltrainError(f"process {blind} does not see what process 0 writes here", where=out, fix=fix)


def load_checkpoint(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, folder: Path) -> Position | None:
    """Restore the newest checkpoint of `folder` and give its position; None if there is none.

    Raises SkilltrainError if another number of processes, or another way of sharing the model, wrote it, and where a
    part of it is missing, damaged, or would execute code.
    """
    if not (found := checkpoints(folder)):
        return None
    newest, launch = found[-1], _launch(accelerator)
    state = _read_state(newest)
    if state.written_by != launch:
        what = f"was written by {state.written_by}, not by {launch}"
        raise SkilltrainError(what, where=newest, fix="resume with that launcher")
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        load_weights(cast(nn.Module, accelerator.unwrap_model(model)), "", newest)
    try:
        load_states(accelerator, model, optimizer, newest)
    except pickle.UnpicklingError as error:  # its text is a page of advice to switch the protection off
        raise SkilltrainError("the checkpoint is damaged, or holds code", where=newest, fix=_DAMAGED_FIX) from error
    except _DAMAGE as error:
        what = f"the checkpoint is damaged: {type(error).__name__} {error}"
        raise SkilltrainError(what, where=newest, fix=_DAMAGED_FIX) from error
    return state.position


def load_weights(step_part: nn.Module, name: str, checkpoint: Path) -> None:
    """Put a checkpoint's weights into the part `name` (encoder or reranker) of the step module that wrote it.

    An empty name stands for the step module itself, whose ranks may hold shards.
    """
    from safetensors.torch import load_file

    file = checkpoint / WEIGHTS_FILE
    if not file.is_file():
        raise SkilltrainError("the checkpoint holds no weights", where=file)
    try:
        whole = {key.removeprefix(f"{name}."): value for key, value in load_file(file).items()}
    except SafetensorError as error:
        raise SkilltrainError(f"is no safetensors file: {error}", where=file) from error
    own = step_part.state_dict()
    weights = {key: _own_shard(value, own.get(key)) for key, value in whole.items()}
    try:
        missing, unknown = step_part.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # a shape that differs
        unfit = str(error).splitlines()[-1].strip()
        raise SkilltrainError(f"the checkpoint does not fit the recipe's model: {unfit}", where=checkpoint) from error
    absent = [key for key in missing if not _shares_memory(key, step_part, set(missing))]
    if unfit := [*unknown, *absent]:
        raise SkilltrainError(f"the checkpoint does not fit the recipe's model: {unfit[0]}", where=checkpoint)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _marker(out: Path, token: int) -> Path:
    return out / f".seen-by-all-{token}"


def _appears(file: Path) -> bool:
    """Whether `file` is there, or comes to be seen within the time that a network file system takes."""
    last = time.monotonic() + _PATIENCE
    while not file.is_file():
        if time.monotonic() >= last:
            return False
        time.sleep(1)
    return True


def _shares_memory(key: str, module: nn.Module, missing: set[str]) -> bool:
    """Whether weight `key` is another name of a weight that is not missing (tied embeddings)."""
    state = module.state_dict(keep_vars=True)
    return any(state[key] is value for other, value in state.items() if other not in missing)


def _write_weights(weights: Mapping[str, Tensor], module: nn.Module, file: Path) -> None:
    """Tied weights once, under the name that accelerate keeps too; gathered shards no longer tell that they are one."""
    from safetensors.torch import save_file

    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    kept = {name: value.detach().cpu().contiguous() for name, value in weights.items() if name in names}
    save_file(kept, file, metadata={"format": "pt"})


def _own_shard(whole: Tensor, own: Tensor | None) -> Tensor:
    """This rank's part of a weight where the model is sharded, else all of it."""
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _launch(accelerator: Accelerator) -> str:
    """How many processes share the work, and how."""
    stage = zero_stage(accelerator)
    kind = f"DeepSpeed ZeRO-{stage}" if stage else accelerator.distributed_type.value
    return f"{accelerator.num_processes} x {kind} on {accelerator.device.type}"


def _read_state(checkpoint: Path) -> _State:
    file = checkpoint / STATE_FILE
    return validate(_State, read_json(file), file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
