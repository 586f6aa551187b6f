import importlib.util
import json
import math
import socket
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.bootstrap import Interval
from skilltrain.training.log import TrainingLog, open_trackers

FIGURES = {"loss": 0.5, "learning_rate": 2e-5, "padding_share": 0.25}
DEV = {"MRR@10": Interval(0.625, 0.5, 0.75, 40)}
RECIPE = {
    "stage": "train_encoder",
    "data": {"pool": "/secret/place/pool", "lists": Path("runs/lists")},
    "training": {"epochs": 1, "recompute": False, "betas": (0.9, 0.999), "adapter": None},
}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(name, folder):
    return open_trackers([name], folder, RECIPE)


@pytest.fixture(autouse=True)
def one_process():
    """accelerate's trackers ask which process they are in."""
    PartialState(cpu=True)


class Recorder(GeneralTracker):
    """A tracker that remembers what it is told."""

    name, requires_logging_directory, tracker = "recorder", False, None

    def __init__(self):
        super().__init__()
        self.told, self.is_closed = [], False

    def log(self, values, step=None, **_):
        self.told.append((step, dict(values)))

    def finish(self):
        self.is_closed = True


def test_a_line_a_step_and_one_an_evaluation(tmp_path):
    path, tracker = tmp_path / "out" / "train_log.jsonl", Recorder()
    with TrainingLog(path, 0, [tracker]) as log:
        log.write(1, {"loss": 0.123456789, "grad_norm": math.inf})
        log.write_dev(1, DEV)
        assert len(rows(path)) == 2  # at once, not at the end
    assert rows(path) == [
        {"step": 1, "loss": 0.1234568, "grad_norm": None},
        {"step": 1, "dev": {"MRR@10": {"mean": 0.625, "low": 0.5, "high": 0.75, "n": 40}}},
    ]
    assert tracker.told == [
        (1, {"train/loss": 0.123456789, "train/grad_norm": math.inf}),
        (1, {"dev/MRR@10": 0.625, "dev/MRR@10/low": 0.5, "dev/MRR@10/high": 0.75}),
    ]
    assert tracker.is_closed


def test_resuming_drops_all_lines_after_the_step_and_torn_ones(tmp_path):
    path = tmp_path / "train_log.jsonl"
    with TrainingLog(path, 0, []) as log:
        for step in (1, 2, 3):
            log.write(step, FIGURES)
            log.write_dev(step, DEV)
    with path.open("a") as file:
        file.write('{"step": 1, "lo\n[3]\n')
        file.write('{"step": 2, "loss": 0.')
    with TrainingLog(path, 2, []) as log:
        assert [(row["step"], "dev" in row) for row in rows(path)] == [
            (1, False),
            (1, True),
            (2, False),
            (2, True),
        ]
        log.write(3, FIGURES)
    assert [row["step"] for row in rows(path)] == [1, 1, 2, 2, 3]
    with TrainingLog(path, 0, []):
        assert rows(path) == []


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_only_the_main_process_writes(tmp_path, monkeypatch):
    tracker = Recorder()
    assert [one.name for one in opened("tensorboard", tmp_path / "shown")] == ["tensorboard"]
    monkeypatch.setenv("RANK", "1")
    assert opened("tensorboard", tmp_path) == []
    with TrainingLog(tmp_path / "log.jsonl", 0, [tracker]) as log:
        log.write(1, FIGURES)
        log.write_dev(1, DEV)
    assert not (tmp_path / "log.jsonl").exists() and not tracker.told


def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch):
    for found in (None, ModuleSpec("wandb", None)):  # nothing, and a folder of runs
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(
                SkilltrainError, match=r"^wandb is not installed \(.*skilltrain\[trackers\]'\)$"
            ):
                opened("wandb", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_needs_neither_key_nor_network(tmp_path, monkeypatch):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "",
        "HF_TOKEN": "very-secret",
    }.items():
        monkeypatch.setenv(name, value)
    # A real name may be so short that random bytes hold it.
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-this-machine")
    with TrainingLog(tmp_path / "log.jsonl", 0, opened("wandb", tmp_path)) as log:
        log.write(1, FIGURES)
        log.write_dev(1, DEV)
    files = [*tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(files) == 1
    last = time.monotonic() + 20  # wandb's own process may write on for a moment
    while not all(
        b"train/loss" in file.read_bytes() and b'"betas"' in file.read_bytes() for file in files
    ):
        assert time.monotonic() < last
        time.sleep(0.1)
    contents = [file.read_bytes() for file in files]
    assert any(b"dev/MRR@10" in content for content in contents)
    secrets = (b"very-secret", b"/secret", bytes(tmp_path), b"name-of-this-machine", b"pytest")
    assert [secret for secret in secrets if any(secret in content for content in contents)] == []
