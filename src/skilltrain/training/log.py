"""What a training leaves to read: one dict of figures a step, for train_log.jsonl, the terminal and the trackers."""

import importlib.util
import json
import math
import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from skilltrain.errors import SkilltrainError, reason_of
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
        + (f"  peak {figures['peak_gib']:.1f} GiB" if "peak_gib" in figures else "")
    )


class TrainingLog:
    """Keeps figures in a file and in trackers, on the main process only (`active`).

    Lines after the step that a run resumes from are dropped first, torn ones too: their steps are done again. The log
    closes its trackers. One that fails while training is left out from then on: figures are not worth a run.
    """

    def __init__(self, path: Path, resumed_step: int, active: bool, trackers: Sequence[GeneralTracker]) -> None:
        self.path, self.active, self.trackers = path, active, [*trackers]
        if active:
            kept = _kept_lines(path, resumed_step) if resumed_step and path.is_file() else ()
            write_text(path, "".join(f"{line}\n" for line in kept))
            self.file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> "TrainingLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        self._keep(step, _rounded(figures), {f"train/{name}": value for name, value in figures.items()})

    def write_dev(self, step: int, figures: Mapping[str, Interval]) -> None:
        """Keep the figures of a dev evaluation after `step`, each with its interval."""
        shown: dict[str, float] = {}
        for name, one in figures.items():
            shown |= {f"dev/{name}": one.mean, f"dev/{name}/low": one.low, f"dev/{name}/high": one.high}
        self._keep(step, {"dev": {name: _rounded(asdict(one)) | {"n": one.n} for name, one in figures.items()}}, shown)

    def _keep(self, step: int, row: Mapping[str, Any], shown: dict[str, float]) -> None:
        """Append `row` to the file, and tell the trackers what is to be `shown`."""
        if not self.active:
            return
        try:
            self.file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        except OSError as error:
            raise SkilltrainError(f"cannot write: {reason_of(error)}", where=self.path) from error
        for tracker in [*self.trackers]:
            try:
                tracker.log(shown, step=step)
            except Exception as error:
                self.trackers.remove(tracker)
                say(f"warning: {type(tracker).__name__} failed at step {step} and is left out from now on: {error}")


def open_trackers(
    names: Sequence[TrackerName],
    project: str,
    folder: Path,
    recipe: Mapping[str, Any],
    resumed_step: int,
    active: bool,
) -> list[GeneralTracker]:
    """The trackers of a run, whose files lie in its `folder`; none where this process is not the one that logs.

    `resumed_step` is 0 for a fresh start. Raises SkilltrainError, on every process, where a tracker's package is not
    installed, and where one cannot start.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder `wandb` that runs have left is no package
            raise SkilltrainError(f"{name} is not installed", fix="pip install 'skilltrain[trackers]'")
    if not active:
        return []
    told, trackers = _public(recipe), list[GeneralTracker]()
    try:
        if "wandb" in names:
            trackers.append(_wandb(project, folder, told, resumed_step))
        if "tensorboard" in names:  # a resumed run's later events take the place of those it does again
            purge = resumed_step + 1 if resumed_step else None
            tracker = TensorBoardTracker("tensorboard", folder, purge_step=purge)
            tracker.start()
            if not resumed_step:
                lines = json.dumps(told, indent=4).splitlines()
                tracker.log({"recipe": "".join(f"    {line}\n" for line in lines)}, step=0)  # Markdown: code
            trackers.append(tracker)
    except Exception as error:
        fix = "for wandb run `wandb login` first, or set WANDB_MODE=offline"
        raise SkilltrainError(f"a tracker cannot start: {error}", where=folder, fix=fix) from error
    return trackers


def _wandb(project: str, folder: Path, recipe: Mapping[str, Any], resumed_step: int) -> WandBTracker:
    """A run of wandb, online or offline (WANDB_MODE=offline), with its files in `folder`/wandb.

    Its id is kept in `folder`/wandb/run_id, so that a resumed training goes on in the same run. wandb is told the
    figures and the recipe: no console output, source code, git state, command line, packages or host name.
    """
    import wandb  # pyright: ignore[reportMissingImports]  # an extra

    file = folder / "wandb" / "run_id"
    if not resumed_step or not file.is_file():
        write_text(file, secrets.token_hex(4))
    settings = wandb.Settings(
        silent=True, console="off", host="", disable_git=True, disable_code=True, save_code=False,
        x_disable_meta=True, x_save_requirements=False,
    )  # fmt: skip
    tracker = WandBTracker(
        project, name=folder.resolve().name, id=file.read_text(encoding="utf-8").strip(), resume="allow",
        dir=str(folder), config=recipe, settings=settings,
    )  # fmt: skip
    tracker.start()
    if not tracker.run.disabled:
        here = f"offline in {folder / 'wandb'}; `wandb sync` uploads it" if tracker.run.offline else tracker.run.url
        say(f"wandb: run {tracker.run.id}, {here}")
    return tracker


def _kept_lines(path: Path, resumed_step: int) -> Iterator[str]:
    """The whole lines of an earlier part of the run, up to the step that it resumes from."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = json.loads(line)
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
