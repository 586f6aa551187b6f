"""Checkpoints that are whole or not there: written aside, synced, then renamed to step-N."""

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from accelerate import Accelerator
from torch import Tensor, nn

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json, write_text
from skilltrain.training.engine import shards_weights, whole_weights, zero_stage
from skilltrain.training.gather import highest_on_any_rank

WEIGHTS_FILE = "model.safetensors"
_WORLD_FILE, _BEST_FILE = "world.json", "best.json"
_NAME = re.compile(r"step-(\d+)")
_PATIENCE = 60.0  # seconds: a network file system may remember for so long that a file was not there


@dataclass
class Position:
    """How far a training is; saved with every checkpoint by accelerate."""

    step: int = 0
    loss: float = math.nan
    queries: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def advance(self, loss: float, queries: int, tokens: int, seconds: float) -> None:
        """Count one more optimiser step; `seconds` are those of the whole training so far."""
        self.step, self.loss, self.seconds = self.step + 1, loss, seconds
        self.queries, self.tokens = self.queries + queries, self.tokens + tokens

    def state_dict(self) -> dict[str, int | float]:
        """The state that accelerate saves."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Restore what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, value)


def save_checkpoint(accelerator: Accelerator, model: nn.Module, folder: Path, step: int) -> None:
    """Save model, optimiser and every random state as `folder`/step-N; all ranks must call it.

    The whole model is always in one file, also where the ranks hold shards of it, so that any checkpoint can be
    exported without the launcher that wrote it; only frozen 4-bit weights are left out, for the base model has them.
    """
    final = folder / f"step-{step}"
    if final.exists():
        return
    partial = folder / f"step-{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = whole_weights(accelerator, model) if not _accelerate_saves_weights(accelerator) else None
    try:
        accelerator.save_state(str(partial))
        if accelerator.is_main_process:
            if weights is not None:
                _write_weights(weights, cast(nn.Module, accelerator.unwrap_model(model)), partial / WEIGHTS_FILE)
            write_json(partial / _WORLD_FILE, _world(accelerator))
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


def mark_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Note which checkpoint scored best on the dev benchmark."""
    write_json(folder / _BEST_FILE, {"step": step, "metric": metric, "value": value})


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that scored best on the dev benchmark; None where none was evaluated."""
    if not (folder / _BEST_FILE).is_file():
        return None
    path = folder / f"step-{read_json(folder / _BEST_FILE)['step']}"
    return path if path.is_dir() else None


def load_checkpoint(accelerator: Accelerator, folder: Path) -> bool:
    """Restore the newest checkpoint of `folder`; False if there is none.

    Raises SkilltrainError if another number of processes, or another way of sharing the model, wrote it.
    """
    found = checkpoints(folder)
    if not found:
        return False
    saved, now = read_json(found[-1] / _WORLD_FILE), _world(accelerator)
    if saved != now:
        was, has = (f"{world['num_processes']} x {world['kind']}" for world in (saved, now))
        raise SkilltrainError(f"was written by {was}, not by {has}", where=found[-1], fix="resume with that launcher")
    states = found[-1] / f"random_states_{accelerator.process_index}.pkl"
    if not states.is_file():  # accelerate would go on silently with other random numbers
        raise SkilltrainError("the checkpoint holds no random state for this rank", where=states)
    accelerator.load_state(str(found[-1]))
    return True


def load_weights(step_part: nn.Module, name: str, checkpoint: Path) -> None:
    """Put a checkpoint's weights into the encoder or reranker, the part `name` of the step module that wrote it."""
    from safetensors.torch import load_file

    file = checkpoint / WEIGHTS_FILE
    if not file.is_file():
        raise SkilltrainError("the checkpoint holds no weights", where=file)
    weights = {key.removeprefix(f"{name}."): value for key, value in load_file(file).items()}
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


def _accelerate_saves_weights(accelerator: Accelerator) -> bool:
    return not shards_weights(accelerator) and not zero_stage(accelerator)


def _write_weights(weights: Mapping[str, Tensor], module: nn.Module, file: Path) -> None:
    """Tied weights once, under the name that accelerate keeps too; gathered shards no longer tell that they are one."""
    from safetensors.torch import save_file

    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    kept = {name: value.detach().cpu().contiguous() for name, value in weights.items() if name in names}
    save_file(kept, file, metadata={"format": "pt"})


def _world(accelerator: Accelerator) -> dict[str, int | str]:
    stage = zero_stage(accelerator)
    kind = f"DeepSpeed ZeRO-{stage}" if stage else accelerator.distributed_type.value
    return {"num_processes": accelerator.num_processes, "kind": kind}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
