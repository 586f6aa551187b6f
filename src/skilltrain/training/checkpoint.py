"""Checkpoints that are whole or not there: written aside, synced, then renamed to step-N."""

import math
import os
import re
import shutil
from pathlib import Path

from accelerate import Accelerator

from skilltrain.errors import SkilltrainError

_NAME = re.compile(r"step-(\d+)")


class Position:
    """How many optimiser steps are done, and the last one's loss; saved with every checkpoint by accelerate."""

    def __init__(self) -> None:
        self.step, self.loss = 0, math.nan

    def state_dict(self) -> dict[str, int | float]:
        """The state that accelerate saves."""
        return {"step": self.step, "loss": self.loss}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Restore what `state_dict` gave."""
        self.step, self.loss = int(state["step"]), state["loss"]


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, keep: int) -> None:
    """Save model, optimiser, schedule and every random state as `folder`/step-N.

    Then delete all but the newest `keep`.
    """
    final = folder / f"step-{step}"
    if final.exists():
        return
    partial = folder / f"step-{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(partial))
    except OSError as error:
        raise SkilltrainError(f"cannot save a checkpoint: {error.strerror or error}", where=partial) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for file in (path for path in partial.rglob("*") if path.is_file()):
            _sync(file)
        partial.rename(final)
        _sync(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(accelerator: Accelerator, folder: Path) -> bool:
    """Restore the newest checkpoint of `folder`; False if there is none."""
    found = checkpoints(folder)
    if not found:
        return False
    states = found[-1] / f"random_states_{accelerator.process_index}.pkl"
    if not states.is_file():  # accelerate would go on silently with other random numbers
        raise SkilltrainError("the checkpoint holds no random state for this rank", where=states)
    accelerator.load_state(str(found[-1]))
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
