"""What a training leaves to read: one JSON line a step in train_log.jsonl, and the same for wandb and tensorboard."""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.statistics.bootstrap import Interval
from skilltrain.files import write_text
from skilltrain.terminal import say

TrackerName = Literal["wandb", "tensorboard"]


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run. They keep their files in `folder`; `resumed_step` is 0 for a fresh start."""

    project: str
    folder: Path
    recipe: Mapping[str, Any]
    resumed_step: int


class TrainingLog:
    """Keeps figures in a file and in trackers, on the main process only (`active`).

    Lines after the step that a run resumes from are dropped first, torn ones too: their steps are done again. The log
    owns its trackers and closes them. One that fails while training is left out from then on: figures are not worth
    a run.
    """

    def __init__(self, path: Path, resumed_step: int, active: bool, trackers: Sequence[GeneralTracker]) -> None:
        self.path, self.resumed_step, self.active, self.trackers = path, resumed_step, active, [*trackers]

    def __enter__(self) -> "TrainingLog":
        if self.active:
            write_text(self.path, "".join(f"{line}\n" for line in _kept_lines(self.path, self.resumed_step)))
            self.file = self.path.open("a", encoding="utf-8", buffering=1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.active:
            self.file.close()
            for tracker in self.trackers:
                try:
                    _close(tracker, failed=kind is not None)
                except Exception as fault:
                    say(f"warning: {type(tracker).__name__} could not be closed: {fault}")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep a training step's figures."""
        if self.active:
            self._append({"step": step, **_rounded(figures)})
            self._track(step, {f"train/{name}": value for name, value in figures.items()})

    def write_dev(self, step: int, figures: Mapping[str, Interval]) -> None:
        """Keep the figures of a dev evaluation after `step`, each with its interval."""
        if self.active:
            rows = {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in figures.items()}
            self._append({"step": step, "dev": {name: _rounded(rows[name]) | {"n": figures[name].n} for name in rows}})
            parts = (("", "mean"), ("/low", "low"), ("/high", "high"))
            self._track(step, {f"dev/{name}{end}": row[key] for name, row in rows.items() for end, key in parts})

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            self.file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise SkilltrainError(f"cannot write: {error.strerror or error}", where=self.path) from error

    def _track(self, step: int, figures: dict[str, float]) -> None:
        for tracker in [*self.trackers]:
            try:
                tracker.log(figures, step=step)
            except Exception as error:
                self.trackers.remove(tracker)
                say(f"warning: {type(tracker).__name__} failed at step {step} and is left out from now on: {error}")


def open_trackers(names: Sequence[TrackerName], run: TrackedRun, active: bool) -> list[GeneralTracker]:
    """The trackers of a run, to be given to its TrainingLog; none where this process is not the one that logs.

    Raises SkilltrainError, on every process, where a tracker's package is not installed, and where one cannot start.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder `wandb` that runs have left is no package
            raise SkilltrainError(f"{name} is not installed", fix="pip install 'skilltrain[trackers]'")
    opens = {"wandb": _wandb, "tensorboard": _tensorboard}
    return [opens[name](run) for name in names] if active else []


def _tensorboard(run: TrackedRun) -> TensorBoardTracker:
    """Event files in `folder`/tensorboard; a resumed run's later events take the place of those it does again."""
    purge = run.resumed_step + 1 if run.resumed_step else None
    tracker = TensorBoardTracker("tensorboard", run.folder, purge_step=purge)
    try:
        tracker.start()
    except OSError as error:
        raise SkilltrainError(f"cannot write: {error.strerror or error}", where=run.folder) from error
    if not run.resumed_step:
        text = json.dumps(_public(run.recipe), indent=4)
        tracker.log({"recipe": "".join(f"    {line}\n" for line in text.splitlines())}, step=0)  # Markdown: code
    return tracker


def _wandb(run: TrackedRun) -> WandBTracker:
    """A run of wandb, online or offline (WANDB_MODE=offline), with its files in `folder`/wandb.

    Its id is kept in `folder`/wandb/run_id, so that a resumed training goes on in the same run. wandb is told the
    figures and the recipe: no console output, source code, git state, command line, packages or host name.
    """
    import wandb  # pyright: ignore[reportMissingImports]  # an extra

    settings = wandb.Settings(
        silent=True, console="off", host="", disable_git=True, disable_code=True, save_code=False,
        x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    tracker = WandBTracker(
        run.project, name=run.folder.resolve().name, id=_run_id(run.folder / "wandb" / "run_id"), resume="allow",
        dir=str(run.folder), config=_public(run.recipe), settings=settings,
    )  # fmt: skip
    try:
        tracker.start()
    except (wandb.Error, OSError) as error:
        fix = "run `wandb login` first, or set WANDB_MODE=offline"
        raise SkilltrainError(f"wandb cannot start: {error}", fix=fix) from error
    if not tracker.run.disabled:
        here = f"offline in {run.folder / 'wandb'}; `wandb sync` uploads it"
        say(f"wandb: run {tracker.run.id}, {here if tracker.run.offline else tracker.run.url}")
    return tracker


def _close(tracker: GeneralTracker, failed: bool) -> None:
    """Write everything out; wandb marks a run that failed or was broken off."""
    if isinstance(tracker, WandBTracker):
        tracker.run.finish(exit_code=int(failed))
    else:
        tracker.finish()


def _kept_lines(path: Path, resumed_step: int) -> Iterator[str]:
    """The whole lines of an earlier part of the run, up to the step that it resumes from."""
    if not (resumed_step and path.is_file()):
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row["step"] <= resumed_step:
            yield line


def _rounded(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Seven digits of each figure, all that float32 holds; null for what is no number, which JSON lacks."""
    return {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in figures.items()}


def _public(value: Any) -> Any:
    """Settings as trackers may see them: of a path only its name, for the folders above it tell of the machine."""
    if isinstance(value, Mapping):
        return {str(key): _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    is_path = isinstance(value, Path) or (isinstance(value, str) and value.startswith((os.sep, "~")))
    return Path(value).name if is_path else value


def _run_id(file: Path) -> str:
    """The run's id in wandb, made once: eight random letters, since a run begun anew must not continue another."""
    if file.is_file() and (found := file.read_text(encoding="utf-8").strip()):
        return found
    run_id = secrets.token_hex(4)
    write_text(file, run_id + "\n")
    return run_id
