"""Hooks: called after steps and evaluations, restored by a resumed run."""

import signal

import pytest
from accelerate.state import AcceleratorState
from pydantic import ValidationError

import training_runs
from faults import raises
from skilltrain.training.hooks import Hook
from skilltrain.training.loop import Run, train
from skilltrain.training.settings import TrainingConfig
from test_loop import dev_rows, read_log, scripted_dev
from training_runs import CONFIG, new_step

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Sums(Hook):
    """Logs the sum of all losses and of all evaluations."""

    def __init__(self):
        self.loss = 0.0
        self.mrr = 0.0

    def on_step(self, step, metrics, model):
        self.loss += metrics["loss"]
        metrics["total_loss"] = self.loss
        metrics["total_mrr"] = self.mrr

    def on_eval(self, step, metrics, model):
        self.mrr += metrics["MRR@10"].mean

    def state_dict(self):
        return {"loss": self.loss, "mrr": self.mrr}

    def load_state_dict(self, state):
        self.loss = state["loss"]
        self.mrr = state["mrr"]


def run(step, folder, resume):
    """Train with the hook, and evaluate after every step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = CONFIG.model_copy(update={"hooks": (f"{__name__}:Sums",)})
    dev = scripted_dev([1, 2, 1, 2, 1, 2], folder, max_skills=None)
    train(training_runs.accelerator(), step, config, Run(folder, resume, {}, dev))


@pytest.fixture(scope="module")
def whole(model_folders, tmp_path_factory):
    """The folder of a training run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(new_step(model_folders["bert"]), folder, resume=False)
    return folder


def step_rows(folder):
    return [row for row in read_log(folder) if "loss" in row]


def test_hook_sees_steps_and_evaluations(whole):
    rows = step_rows(whole)

    losses = [row["loss"] for row in rows]
    values = [value for _, value in dev_rows(whole)]
    assert rows[-1]["total_loss"] == pytest.approx(sum(losses), rel=1e-5)
    assert rows[-1]["total_mrr"] == pytest.approx(sum(values[:-1]))


def test_resumed_run_restores_hook(whole, model_folders, tmp_path):
    folder = model_folders["bert"]

    with raises("interrupted"):
        cut_step = training_runs.signal_in(new_step(folder), 3, signal.SIGINT)
        run(cut_step, tmp_path, resume=False)
    run(new_step(folder), tmp_path, resume=True)

    totals = [row["total_loss"] for row in step_rows(whole)]
    assert [row["total_loss"] for row in step_rows(tmp_path)] == totals


@pytest.mark.parametrize(
    ("path", "message"),
    [("json:dumps", "is no subclass of .*Hook"), ("no.such:Hook", "cannot import no.such:Hook")],
)
def test_invalid_hook_is_refused(path, message):
    with pytest.raises(ValidationError, match=message):
        TrainingConfig.model_validate({"hooks": [path]})
