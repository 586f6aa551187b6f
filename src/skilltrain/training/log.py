"""What a training leaves to read: one dict of figures a step, for train_log.jsonl, the terminal and the trackers."""

import importlib.util
import json
import math
import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import Interval
from skilltrain.files import write_text
from skilltrain.terminal import say

TrackerName = Literal["wandb", "tensorboard"]
_WINDOW = 20  # steps that a rate looks back on: long enough to be steady, short enough to show a change


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step: its loss and gradient norm before clipping, and the work of all ranks in `seconds`.

    `num_tokens` are the texts' own tokens, `num_slots` those that the model computed, padding included.
    """

    loss: float
    learning_rate: float
    grad_norm: float
    num_queries: int
    num_tokens: int
    num_slots: int
    seconds: float


class Meter:
    """Figures of the newest step, with rates over the last 20 steps.

    The first step after a start or a resume warms up (memory, kernels, caches): it counts only until there is a
    second one. Time between steps, for a checkpoint or an evaluation, does not count.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch, self._is_warm = steps_per_epoch, False
        self._recent: deque[StepResult] = deque(maxlen=_WINDOW)

    def update(self, step: int, result: StepResult) -> dict[str, float]:
        """Take in step number `step` (counted from 1) and give its figures."""
        if self._recent and not self._is_warm:
            self._recent.clear()
            self._is_warm = True
        self._recent.append(result)
        seconds = sum(one.seconds for one in self._recent) or math.inf
        return {
            "epoch": step / self._steps_per_epoch,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "queries_per_second": sum(one.num_queries for one in self._recent) / seconds,
            "tokens_per_second": sum(one.num_tokens for one in self._recent) / seconds,
            "padding_share": 1 - result.num_tokens / result.num_slots if result.num_slots else 0.0,
        }


def note_of(figures: Mapping[str, float]) -> str:
    """The figures of a step in one line."""
    return (
        f"loss {figures['loss']:.4f}  lr {figures['learning_rate']:.1e}  |g| {figures['grad_norm']:.2f}  "
        f"{figures['queries_per_second']:,.1f} queries/s  {figures['tokens_per_second']:,.0f} tokens/s  "
        f"padding {figures['padding_share']:.0%}"
    )


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
                    if isinstance(tracker, WandBTracker):  # which marks a run that failed or was broken off
                        tracker.run.finish(exit_code=int(kind is not None))
                    else:
                        tracker.finish()
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
            rows = {name: _rounded(asdict(one)) | {"n": one.n} for name, one in figures.items()}
            self._append({"step": step, "dev": rows})
            shown: dict[str, float] = {}
            for name, one in figures.items():
                shown |= {f"dev/{name}": one.mean, f"dev/{name}/low": one.low, f"dev/{name}/high": one.high}
            self._track(step, shown)

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

    file = run.folder / "wandb" / "run_id"
    if not run.resumed_step or not file.is_file():
        write_text(file, secrets.token_hex(4))
    settings = wandb.Settings(
        silent=True, console="off", host="", disable_git=True, disable_code=True, save_code=False,
        x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    tracker = WandBTracker(
        run.project, name=run.folder.resolve().name, id=file.read_text(encoding="utf-8").strip(), resume="allow",
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
