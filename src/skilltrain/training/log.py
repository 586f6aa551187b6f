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
from typing import Any, Literal, Protocol, runtime_checkable

from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.terminal import say
from skilltrain.training.dev import DevFigure

TrackerName = Literal["wandb", "tensorboard"]


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run. They keep their files in `folder`; `resumed_step` is 0 for a fresh start."""

    project: str
    folder: Path
    recipe: Mapping[str, Any]
    resumed_step: int


@runtime_checkable
class Tracker(Protocol):
    """A service that draws figures over steps."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step."""
        ...

    def close(self, exit_code: int) -> None:
        """Write everything out; a code other than 0 marks the run as failed or broken off."""
        ...


class TrainingLog:
    """Keeps figures in a file and in trackers, on the main process only (`active`).

    Lines after the step that a run resumes from are dropped first, torn ones too: their steps are done again. The log
    owns its trackers and closes them. One that fails while training is left out from then on: figures are not worth
    a run.
    """

    def __init__(self, path: Path, resumed_step: int, active: bool, trackers: Sequence[Tracker]) -> None:
        self.path, self.resumed_step, self.active, self.trackers = path, resumed_step, active, [*trackers]

    def __enter__(self) -> "TrainingLog":
        if not self.active:
            return self
        try:
            write_text(self.path, "".join(f"{line}\n" for line in _kept_lines(self.path, self.resumed_step)))
            self.file = self.path.open("a", encoding="utf-8", buffering=1)
        except BaseException:
            self._close_trackers(1)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.active:
            self.file.close()
            self._close_trackers(0 if kind is None else 1)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep a training step's figures."""
        if self.active:
            self._append({"step": step, **_rounded(figures)})
            self._track(step, {f"train/{name}": value for name, value in figures.items()})

    def write_dev(self, step: int, figures: Mapping[str, DevFigure]) -> None:
        """Keep the figures of a dev evaluation after `step`, each with its interval."""
        if self.active:
            rows = {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in figures.items()}
            counts = {name: {"n": one.n} for name, one in figures.items()}
            self._append({"step": step, "dev": {name: _rounded(row) | counts[name] for name, row in rows.items()}})
            parts = (("", "mean"), ("/low", "low"), ("/high", "high"))
            self._track(step, {f"dev/{name}{end}": row[key] for name, row in rows.items() for end, key in parts})

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            self.file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise SkilltrainError(f"cannot write: {error.strerror or error}", where=self.path) from error

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        for tracker in [*self.trackers]:
            try:
                tracker.write(step, figures)
            except Exception as error:
                self.trackers.remove(tracker)
                say(f"warning: {_name(tracker)} failed at step {step} and is left out from now on: {error}")

    def _close_trackers(self, exit_code: int) -> None:
        for tracker in self.trackers:
            try:
                tracker.close(exit_code)
            except Exception as error:
                say(f"warning: {_name(tracker)} could not be closed: {error}")


def open_trackers(names: Sequence[TrackerName], run: TrackedRun, active: bool) -> list[Tracker]:
    """The trackers of a run, to be given to its TrainingLog; none where this process is not the one that logs.

    Raises SkilltrainError, on every process, where a tracker's package is not installed, and where wandb cannot
    start.
    """
    for name in names:
        _require(name)
    opened: list[Tracker] = []
    try:
        for name in names if active else ():
            opened.append(WandbTracker(run) if name == "wandb" else TensorboardTracker(run))
    except BaseException:
        for tracker in opened:
            tracker.close(1)
        raise
    return opened


class TensorboardTracker:
    """Event files in `folder`/tensorboard; a resumed run's later events take the place of those it does again."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = run.resumed_step + 1 if run.resumed_step else None
        folder = run.folder / "tensorboard"
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=20)
        except OSError as error:
            raise SkilltrainError(f"cannot write: {error.strerror or error}", where=folder) from error
        if not run.resumed_step:
            for summary in hparams(dict(flattened(_public(run.recipe))), {}):
                self._writer._get_file_writer().add_summary(summary)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> None:
        """Write everything out; tensorboard knows no exit codes."""
        self._writer.close()


class WandbTracker:
    """A run of wandb, online or offline (WANDB_MODE=offline), with its files in `folder`/wandb.

    Its id is kept in `folder`/wandb/run_id, so that a resumed training goes on in the same run. wandb is told the
    figures and the recipe: no console output, source code, git state, command line, packages or host name.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        settings = wandb.Settings(
            silent=True, console="off", host="", disable_git=True, disable_code=True, save_code=False,
            x_disable_meta=True, x_save_requirements=False,
        )  # fmt: skip
        name = run.folder.resolve().name
        run_id = _run_id(run.folder / "wandb" / "run_id")
        try:
            self._run = wandb.init(
                project=run.project, name=name, id=run_id, resume="allow", dir=str(run.folder),
                config=_public(run.recipe), settings=settings,
            )  # fmt: skip
        except (wandb.Error, OSError) as error:
            fix = "run `wandb login` first, or set WANDB_MODE=offline"
            raise SkilltrainError(f"wandb cannot start: {error}", fix=fix) from error
        if not self._run.disabled:
            here = f"offline in {run.folder / 'wandb'}; `wandb sync` uploads it"
            say(f"wandb: run {run_id}, {here if self._run.offline else self._run.url}")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step; what a resumed run does again wandb keeps from the first time."""
        self._run.log(dict(figures), step=step)

    def close(self, exit_code: int) -> None:
        """Write, and upload, everything that is left."""
        self._run.finish(exit_code=exit_code)


def flattened(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """(key path, value) of nested settings, in the types that tensorboard takes: lists and null as JSON."""
    for key, value in values.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flattened(value, place)
        else:
            yield place, value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


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


def _require(name: TrackerName) -> None:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder `wandb` that runs have left is no package
        raise SkilltrainError(f"{name} is not installed", fix="pip install 'skilltrain[trackers]'")


def _name(tracker: Tracker) -> str:
    return type(tracker).__name__.removesuffix("Tracker").lower()


def _run_id(file: Path) -> str:
    """The run's id in wandb, made once: eight random letters, since a run begun anew must not continue another."""
    if file.is_file() and (found := file.read_text(encoding="utf-8").strip()):
        return found
    run_id = secrets.token_hex(4)
    write_text(file, run_id + "\n")
    return run_id
