"""The recipes of examples/own_code: a loss on vectors, and a hook."""

import json
import sys
from pathlib import Path

import pytest

from small_library import succeeds

FOLDER = Path(__file__).parents[1] / "examples" / "own_code"


@pytest.fixture
def example_modules(monkeypatch):
    """Make the modules of the examples importable."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in ("align", "steps_since_best"):
        sys.modules.pop(name, None)


def train(name, runs, model, out, *settings):
    """Train with a recipe of the examples on a small library. Return the rows of the log."""
    data = f"data={{pool: {runs}/pool, lists: {runs}/encoder_lists}}"
    succeeds("train", FOLDER / name, f"model.source={model}", data, f"out={out}", *settings)
    return [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]


def test_distilled_vectors_move_to_teacher(example_modules, runs, model_folders, tmp_path):
    import align

    file = tmp_path / "teacher.npz"
    align.write_vectors(str(runs / "encoder"), runs / "pool", runs / "queries", file)

    rows = train(
        "align.yaml",
        runs,
        model_folders["bert"],
        tmp_path / "out",
        f"loss.parts.teacher.loss.teacher={file}",
        "loss.parts.teacher.weight=5",
        "training={epochs: 4, batch_size: 12, accumulation: 1, learning_rate: 1.0e-3}",
    )

    # An epoch is one step with all queries, so that the values of steps can be compared.
    distances = [row["loss/teacher"] for row in rows]
    assert len(distances) == 4
    assert 0 < distances[-1] < 0.8 * distances[0]


def test_hook_logs_steps_since_best_evaluation(example_modules, runs, model_folders, tmp_path):
    rows = train(
        "steps_since_best.yaml",
        runs,
        model_folders["bert"],
        tmp_path / "out",
        f"dev={{benchmark: {runs}/queries, split: test, every: 2}}",
        "training.batch_size=4",
        "training.epochs=2",
    )

    steps = [row["steps_since_best"] for row in rows if "loss" in row]
    assert steps[:3] == [1, 2, 1]  # the first evaluation follows step 2
