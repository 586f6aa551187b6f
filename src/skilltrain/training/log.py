"""What a training leaves to read: one dict of figures a step, for train_log.jsonl, the terminal and the trackers."""

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import write_text
from skilltrain.metrics.bootstrap import Interval
from skilltrain.terminal import is_main_process

TrackerName = Literal["wandb", "tensorboard"]
_SHOWN = (
    "stage",
    "loss",
    "adapter",
    "training",
)  # of a recipe, in wandb; paths in the others tell of the machine


def note_of(figures: Mapping[str, float]) -> str:
    """The figures of a step in one line."""
    return (
        f"loss {figures['loss']:.4f}  lr {figures['learning_rate']:.1e}  |g| {figures['grad_norm']:.2f}  "
        f"{figures['queries_per_second']:,.1f} queries/s  {figures['tokens_per_second']:,.0f} tokens/s  "
        f"padding {figures['padding_share']:.0%}"
        + (f"  peak {figures['peak_gib']:.1f} GiB" if "peak_gib" in figures else "")
    )


class TrainingLog:
    """Keeps figures in a file and in trackers, which it closes; on processes but the first it keeps nothing."""

    def __init__(self, path: Path, resumed_step: int, trackers: Sequence[GeneralTracker]) -> None:
        self.path, self.active, self.trackers = path, is_main_process(), trackers
        if self.active:
            kept = _kept_lines(path, resumed_step) if resumed_step and path.is_file() else ()
            write_text(path, "".join(f"{line}\n" for line in kept))
            self.file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> "TrainingLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()
        for tracker in self.trackers:
            tracker.finish()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._keep(
            step, _rounded(figures), {f"train/{name}": value for name, value in figures.items()}
        )

    def write_dev(self, step: int, figures: Mapping[str, Interval]) -> None:
        """Keep the figures of a dev evaluation after `step`, each with its interval."""
        shown: dict[str, float] = {}
        for name, one in figures.items():
            shown |= {
                f"dev/{name}": one.mean,
                f"dev/{name}/low": one.low,
                f"dev/{name}/high": one.high,
            }
        self._keep(
            step,
            {"dev": {name: _rounded(asdict(one)) | {"n": one.n} for name, one in figures.items()}},
            shown,
        )

    def _keep(self, step: int, row: Mapping[str, Any], shown: dict[str, float]) -> None:
        if not self.active:
            return
        try:
            self.file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        except OSError as error:
            raise SkilltrainError(f"cannot write: {reason_of(error)}", where=self.path) from error
        for tracker in self.trackers:
            tracker.log(shown, step=step)


def open_trackers(
    names: Sequence[TrackerName], folder: Path, recipe: Mapping[str, Any]
) -> list[GeneralTracker]:
    """accelerate's trackers of a run, whose files lie in its `folder`; none on processes but the first.

    wandb is told the figures and how it is trained, but no console output, source code, git state, packages or host
    name; WANDB_PROJECT names the project. Raises SkilltrainError where a tracker's package is not installed.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        if (
            found is None or found.origin is None
        ):  # a folder `wandb` that runs have left is no package
            raise SkilltrainError(
                f"{name} is not installed", fix="pip install 'skilltrain[trackers]'"
            )
    trackers = list[GeneralTracker]()
    if not is_main_process():
        return trackers
    if "wandb" in names:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        settings = wandb.Settings(
            console="off",
            host="",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        shown = {key: recipe[key] for key in _SHOWN if key in recipe}
        project, name = os.environ.get("WANDB_PROJECT", "skilltrain"), folder.resolve().name
        trackers.append(
            WandBTracker(project, name=name, dir=str(folder), config=shown, settings=settings)
        )
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker("tensorboard", folder))
    for tracker in trackers:
        tracker.start()
    return trackers


def _kept_lines(path: Path, resumed_step: int) -> Iterator[str]:
    """The whole lines of a run up to the step that it resumes from; later steps are done again."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row["step"] <= resumed_step:
                yield line


def _rounded(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Seven digits of each figure, all that float32 holds; null for what is no number, which JSON lacks."""
    return {
        name: float(f"{value:.7g}") if math.isfinite(value) else None
        for name, value in figures.items()
    }
