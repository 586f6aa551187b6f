"""Log of a training run: metrics of each step for train_log.jsonl, the terminal and trackers."""

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

from skilltrain.errors import SkilltrainError, install_command, reason_of
from skilltrain.files import write_text
from skilltrain.metrics.bootstrap import Interval
from skilltrain.terminal import is_main_process

TrackerName = Literal["wandb", "tensorboard"]
# Sections of a recipe that wandb gets. Paths in the other sections reveal the machine.
_PUBLIC_SECTIONS = ("stage", "loss", "adapter", "training")


def note_of(metrics: Mapping[str, float]) -> str:
    """Format the metrics of a step as one line, such as `loss 0.5312  lr 2.0e-05  |g| 1.07  …`."""
    texts = [
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['learning_rate']:.1e}",
        f"|g| {metrics['grad_norm']:.2f}",
        f"{metrics['queries_per_second']:,.1f} queries/s",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"padding {metrics['padding_share']:.0%}",
    ]
    if "peak_gib" in metrics:  # only on a GPU
        texts.append(f"peak {metrics['peak_gib']:.1f} GiB")
    return "  ".join(texts)


class TrainingLog:
    """Writes metrics to a file and to trackers. On all processes but the first, it does nothing.

    Args:
        path: File to write, one JSON object per line.
        resumed_step: Step that the run resumes from. Later lines of the file are removed. 0 starts
            a new file.
        trackers: Trackers to write to, and to close at the end.
    """

    def __init__(self, path: Path, resumed_step: int, trackers: Sequence[GeneralTracker]) -> None:
        """Open the file. Lines after `resumed_step` are removed."""
        self.path = path
        self.active = is_main_process()
        self.trackers = trackers
        if self.active:
            # Keep the lines of the steps that are not run again.
            lines = _read_lines(path, resumed_step) if path.is_file() else ()
            write_text(path, "".join(f"{line}\n" for line in lines))
            self.file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> "TrainingLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()
        for tracker in self.trackers:
            tracker.finish()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a training step."""
        tracked = {f"train/{name}": value for name, value in metrics.items()}
        self._write(step, _round(metrics), tracked)

    def write_dev(self, step: int, metrics: Mapping[str, Interval]) -> None:
        """Write the metrics of an evaluation after `step`, with the interval of each."""
        row = {}  # the file gets all figures of each interval
        tracked = {}  # trackers get plain numbers
        for name, interval in metrics.items():
            row[name] = _round(asdict(interval)) | {"n": interval.n}
            tracked[f"dev/{name}"] = interval.mean
            tracked[f"dev/{name}/low"] = interval.low
            tracked[f"dev/{name}/high"] = interval.high
        self._write(step, {"dev": row}, tracked)

    def _write(self, step: int, row: Mapping[str, Any], tracked: dict[str, float]) -> None:
        """Write the metrics of a step.

        Args:
            step: Number of the step.
            row: Metrics as the file gets them.
            tracked: Metrics as the trackers get them.

        Raises:
            SkilltrainError: The file cannot be written.
        """
        if not self.active:
            return
        try:
            self.file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        except OSError as error:
            fault = f"cannot write: {reason_of(error)}"
            raise SkilltrainError("cannot-write", fault, where=self.path) from error
        for tracker in self.trackers:
            tracker.log(tracked, step=step)


def open_trackers(
    names: Sequence[TrackerName], folder: Path, recipe: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Open accelerate's trackers of a run. Only the first process gets them.

    Args:
        names: Trackers to open.
        folder: Folder of the run, and of the trackers' files.
        recipe: Recipe of the run. wandb gets only its public sections.

    Raises:
        SkilltrainError: The package of a tracker is not installed.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # Earlier runs may have left a folder ./wandb. Python finds it as a package without a file,
        # whose origin is None.
        if spec is None or spec.origin is None:
            fix = install_command("trackers")
            raise SkilltrainError("missing-package", f"{name} is not installed", fix=fix)
    trackers = []
    if not is_main_process():
        return trackers
    if "wandb" in names:
        trackers.append(_wandb_tracker(folder, recipe))
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker("tensorboard", folder))
    for tracker in trackers:
        tracker.start()
    return trackers


def _wandb_tracker(folder: Path, recipe: Mapping[str, Any]) -> WandBTracker:
    """Return a tracker that sends metrics and public settings to wandb, and nothing else.

    wandb gets no console output, source code, git state, packages or host name. The environment
    variable WANDB_PROJECT sets the project.
    """
    import wandb  # pyright: ignore[reportMissingImports]  # an extra

    return WandBTracker(
        os.environ.get("WANDB_PROJECT", "skilltrain"),
        name=folder.resolve().name,
        dir=str(folder),
        # Paths in the other sections reveal the machine.
        config={key: recipe[key] for key in _PUBLIC_SECTIONS if key in recipe},
        settings=wandb.Settings(
            console="off",
            host="",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_save_requirements=False,
        ),
    )


def _read_lines(path: Path, last_step: int) -> Iterator[str]:
    """Yield the lines of a log up to `last_step`. Incomplete lines are skipped."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # an incomplete line is no JSON
            row = json.loads(line)
            if isinstance(row, dict) and row["step"] <= last_step:
                yield line


def _round(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Round to seven digits, the precision of float32. NaN and infinity become None."""
    rounded = {}
    for name, value in metrics.items():
        rounded[name] = float(f"{value:.7g}") if math.isfinite(value) else None
    return rounded
