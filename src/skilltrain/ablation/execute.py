"""Cells are run: each missing step once, a failure noted and the rest gone on with."""

import fcntl
import gc
import shutil
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from skilltrain.ablation.plan import Cell, Plan, StepRun
from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.files import write_text
from skilltrain.runs import CHECKPOINTS
from skilltrain.stages import run_recipe
from skilltrain.terminal import say

_PATIENCE = 2.0  # seconds between looks at runs that another process is busy with


class BusyError(Exception):
    """Another process is at this run."""


def run_cells(plan: Plan) -> dict[tuple[str, int], str]:
    """Run what is missing; (variant, seed) → why it failed, for the cells that did.

    Several processes may run one ablation, say one a GPU: a cell that waits for another process's run is put off.
    Raises SkilltrainError, as what it was stopped by, for Ctrl-C in a training.
    """
    worker = _Worker(plan)
    waiting = deque(cell for cell in plan.cells if plan.chain(cell, only_missing=True))
    if num_done := len(plan.cells) - len(waiting):
        say(f"{num_done} of {len(plan.cells)} cells are done already")
    in_vain = 0
    while waiting:
        cell = waiting.popleft()
        try:
            worker.run(cell, waiting)
            in_vain = 0
        except BusyError:
            waiting.append(cell)
            in_vain += 1
            if in_vain >= len(waiting):
                time.sleep(_PATIENCE)
    return {key: error for key, error in worker.failed_cells.items() if error}


class _Worker:
    """Runs cells one by one and remembers what failed and how long each step takes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed_runs: dict[Path, str] = {}
        self.failed_cells: dict[tuple[str, int], str] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, cell: Cell, later: Iterable[Cell]) -> None:
        """Run what the cell lacks and say how it went. Raises BusyError if another process is at one of its runs."""
        taken: list[str] = []
        for run in self.plan.chain(cell, only_missing=True):
            error = self.failed_runs.get(run.folder) or self._run(run, taken)
            if error:
                self.failed_runs[run.folder] = self.failed_cells[cell.variant, cell.seed] = error
                say(f"cell ({cell}) failed: {error}")
                return
        left = list(later)
        say(f"cell ({cell}) done: {', '.join(taken) or 'by another process'}; {len(left)} to go{self._eta(left)}")

    def _run(self, run: StepRun, taken: list[str]) -> str:
        """Run a step; the one-line error if it fails."""
        started = time.monotonic()
        try:
            run_step(run)
        except BusyError:
            raise
        except StoppedError as error:
            raise StoppedError(error.what, where=run.folder, fix="run the same command to go on") from error
        except SkilltrainError as error:
            return f"step {run.step}: {error}"
        except Exception as error:  # a fault of ours, or of the machine: the others may still run
            notes = self.plan.grid.out / "errors" / f"{run.folder.name}.txt"
            write_text(notes, traceback.format_exc())
            first = (str(error).splitlines() or [""])[0]
            return f"step {run.step}: {type(error).__name__}: {first} (see {notes})"
        seconds = time.monotonic() - started
        self.seconds[run.step].append(seconds)
        taken.append(f"{run.step} {seconds:.1f} s")
        return ""

    def _eta(self, cells: Iterable[Cell]) -> str:
        """How long the missing runs of `cells` will take, by what such steps took; nothing where none is missing."""
        missing = {run.folder: run for cell in cells for run in self.plan.chain(cell, only_missing=True)}
        every = [seconds for taken in self.seconds.values() for seconds in taken]
        if not every or not missing:
            return ""
        typical = {step: sum(taken) / len(taken) for step, taken in self.seconds.items()}
        mean = sum(every) / len(every)
        total = sum(typical.get(run.step, mean) for run in missing.values())
        return f", eta {timedelta(seconds=round(total))}"


def run_step(run: StepRun) -> None:
    """Run a step to its end, a training from its newest checkpoint. Raises BusyError if another process is at it."""
    with _alone(run.folder):
        state = run.state()
        if state == "done":
            return
        say(f"{run.step}: {run.folder}")
        if state == "to run":
            shutil.rmtree(run.folder, ignore_errors=True)  # a training killed before it had a record
        try:
            run_recipe(run.config, resume=state == "begun")
        finally:
            _forget(run)
        shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)  # three times the model's size


def _forget(run: StepRun) -> None:
    """Give memory back, and let the next training of this process set accelerate up anew."""
    import torch

    if run.trains:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, which the system takes back when the process ends, however it ends."""
    file = folder.parent / ".locks" / folder.name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise SkilltrainError(f"cannot write: {error.strerror or error}", where=file) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError from error
        yield
