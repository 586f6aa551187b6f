"""The log of a training run: its file, its trackers, and what wandb is not told."""

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

METRICS = {"loss": 0.5, "learning_rate": 2e-5, "padding_share": 0.25}
DEV = {"MRR@10": Interval(0.625, 0.5, 0.75, 40)}
RECIPE = {
    "stage": "train_encoder",
    "data": {"pool": "/secret/place/pool", "lists": Path("runs/lists")},
    "training": {"epochs": 1, "recompute": False, "betas": (0.9, 0.999), "adapter": None},
}


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def process_state():
    """Set the state from which accelerate's trackers read their process."""
    PartialState(cpu=True)


class Recorder(GeneralTracker):
    """A tracker that records its calls."""

    name = "recorder"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.logged = []
        self.is_closed = False

    def log(self, values, step=None, **_):
        self.logged.append((step, dict(values)))

    def finish(self):
        self.is_closed = True


def test_each_record_is_a_line(tmp_path):
    path = tmp_path / "out" / "train_log.jsonl"

    with TrainingLog(path, 0, []) as log:
        log.write(1, {"loss": 0.123456789, "grad_norm": math.inf})
        log.write_dev(1, DEV)
        rows = read_rows(path)  # lines are written at once

    assert rows == [
        {"step": 1, "loss": 0.1234568, "grad_norm": None},
        {"step": 1, "dev": {"MRR@10": {"mean": 0.625, "low": 0.5, "high": 0.75, "n": 40}}},
    ]


def test_trackers_get_all_metrics(tmp_path):
    tracker = Recorder()

    with TrainingLog(tmp_path / "train_log.jsonl", 0, [tracker]) as log:
        log.write(1, {"loss": 0.123456789, "grad_norm": math.inf})
        log.write_dev(1, DEV)

    assert tracker.logged == [
        (1, {"train/loss": 0.123456789, "train/grad_norm": math.inf}),
        (1, {"dev/MRR@10": 0.625, "dev/MRR@10/low": 0.5, "dev/MRR@10/high": 0.75}),
    ]
    assert tracker.is_closed


@pytest.fixture
def torn_log(tmp_path):
    """Return the log of three steps, with torn lines at the end."""
    path = tmp_path / "train_log.jsonl"
    with TrainingLog(path, 0, []) as log:
        for step in (1, 2, 3):
            log.write(step, METRICS)
            log.write_dev(step, DEV)
    with path.open("a") as file:
        file.write('{"step": 1, "lo\n[3]\n')
        file.write('{"step": 2, "loss": 0.')
    return path


def test_resuming_drops_later_lines(torn_log):
    with TrainingLog(torn_log, 2, []) as log:
        rows = read_rows(torn_log)
        log.write(3, METRICS)

    is_dev_by_row = [(row["step"], "dev" in row) for row in rows]
    assert is_dev_by_row == [(1, False), (1, True), (2, False), (2, True)]
    assert [row["step"] for row in read_rows(torn_log)] == [1, 1, 2, 2, 3]


def test_new_run_empties_log(torn_log):
    with TrainingLog(torn_log, 0, []):
        assert read_rows(torn_log) == []


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_only_main_process_opens_trackers(tmp_path, monkeypatch):
    first = open_trackers(["tensorboard"], tmp_path / "first", RECIPE)
    monkeypatch.setenv("RANK", "1")

    second = open_trackers(["tensorboard"], tmp_path / "second", RECIPE)

    assert [tracker.name for tracker in first] == ["tensorboard"]
    assert second == []


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    tracker = Recorder()

    with TrainingLog(tmp_path / "log.jsonl", 0, [tracker]) as log:
        log.write(1, METRICS)
        log.write_dev(1, DEV)

    assert not (tmp_path / "log.jsonl").exists()
    assert not tracker.logged


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "spec", [None, ModuleSpec("wandb", None)], ids=["nothing", "a folder of runs"]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, spec, rank):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("RANK", rank)

    with pytest.raises(SkilltrainError, match=r"^wandb is not installed") as caught:
        open_trackers(["wandb"], tmp_path, RECIPE)

    assert ".[trackers]" in str(caught.value)


@pytest.fixture
def wandb_file(tmp_path, monkeypatch):
    """Return the content of the file that wandb writes offline, without a key."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    # A real name may be so short that random bytes hold it.
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-this-machine")
    trackers = open_trackers(["wandb"], tmp_path, RECIPE)
    with TrainingLog(tmp_path / "log.jsonl", 0, trackers) as log:
        log.write(1, METRICS)
        log.write_dev(1, DEV)

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20  # wandb's own process may still be writing
    while not all(part in file.read_bytes() for part in (b"train/loss", b'"betas"')):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return file.read_bytes()


NEEDS_WANDB = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)


@NEEDS_WANDB
def test_wandb_gets_metrics_offline(wandb_file):
    assert b"train/loss" in wandb_file
    assert b"dev/MRR@10" in wandb_file


@NEEDS_WANDB
def test_wandb_gets_no_secrets(wandb_file, tmp_path):
    secrets = (b"very-secret", b"/secret", bytes(tmp_path), b"name-of-this-machine", b"pytest")

    assert [secret for secret in secrets if secret in wandb_file] == []
