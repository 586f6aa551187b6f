"""A faulty plug-in of another package gives one line that names it."""

import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import training_runs
from faults import raises
from skilltrain.cli import as_program
from skilltrain.losses import InfoNCE, Loss, call_loss
from skilltrain.losses.weighted_sum import WeightedLoss, WeightedSum
from skilltrain.plugins import LOADED, load_plugin, plugin_fault
from skilltrain.training.loop import Run, train
from small_library import skilltrain
from test_losses import batch
from training_runs import CONFIG, new_step

MODULE = """\
from skilltrain.losses import Loss
from skilltrain.retrieval.rankers import Keep, RankerConfig


class Raises(Loss):
    name: str

    def __call__(self, batch):
        raise KeyError("my key")  # line 9


class Exits(Raises):
    def __call__(self, batch):
        raise SystemExit(0)  # line 14


class Signature(Raises):
    def __call__(self, scores, gains):
        return scores.sum()


class Constructor(Raises):
    def __init__(self, **settings):
        raise RuntimeError("no memory left")  # line 24


class Declares(Raises):
    @property
    def needs(self):
        return {"vectors": True}


class Ranker(RankerConfig):
    kind: str
    keep: Keep = None

    def open(self, opened):
        return 1 / 0  # line 38


def command():
    raise SystemExit(0)


def half(ranking, relevance, k):
    return relevance.nothing  # line 46


class Reads(Raises):
    def __call__(self, batch):
        return open("nowhere.txt")  # line 51
"""


@pytest.fixture(autouse=True)
def acme(tmp_path, monkeypatch):
    """A module of faulty plug-ins. Errors do not name plug-ins that other tests have loaded."""
    file = tmp_path / "acme_faulty.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict(LOADED, clear=True):
        yield file
    for name in ("acme_faulty", "acme_broken", "zeta_outer"):
        sys.modules.pop(name, None)


@pytest.fixture
def train_with(runs, model_folders, tmp_path):
    """A function that trains with a loss of the module, and returns the outcome."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"stage: train_encoder\nmodel: {{source: {model_folders['bert']}}}\n"
        f"data: {{pool: {runs}/pool, lists: {runs}/encoder_lists}}\nout: {tmp_path / 'out'}\n"
    )
    return lambda name: skilltrain("train", recipe, f"loss.name={name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "KeyError: 'my key' ({file}, line 9) [unusable-plugin]"),
        ("Exits", "SystemExit: 0 ({file}, line 14) [unusable-plugin]"),
        ("Constructor", "RuntimeError: no memory left ({file}, line 24) [unusable-plugin]"),
        ("Reads", "directory: 'nowhere.txt' ({file}, line 51) [unusable-plugin]"),
    ],
)
def test_faulty_loss_is_named(train_with, acme, name: str, message: str):
    line = train_with(f"acme_faulty:{name}").error_line

    assert f"error: loss acme_faulty:{name}: " in line
    assert message.format(file=acme) in line
    assert "unexpected" not in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Signature", "TypeError: Signature.__call__() missing 1 required positional arg"),
        ("Declares", "AttributeError: 'dict' object has no attribute"),
    ],
)
def test_loss_in_use_is_said(train_with, name: str, message: str):
    line = train_with(f"acme_faulty:{name}").error_line

    assert line.startswith(f"error: {message}")
    assert line.endswith(f" where it happened; plug-ins in use: loss acme_faulty:{name})")


def test_idle_plugin_is_not_blamed(runs, tmp_path, monkeypatch):
    def fail(config, out):
        raise KeyError("our key")

    load_plugin("loss", "acme_faulty:Raises")
    load_plugin("loss", "skilltrain.losses.infonce:InfoNCE")
    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", fail)

    line = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path / 'out'}").error_line

    assert line.startswith("error: KeyError: 'our key' (unexpected: add --debug ")
    assert line.endswith("; plug-ins in use: loss acme_faulty:Raises)")


def test_innermost_plugin_is_named(acme):
    # The caller's path is the greater text.
    acme.with_name("zeta_outer.py").write_text("def call(function):\n    function(0, 0, 0)\n")
    outer = load_plugin("measure", "zeta_outer:call")
    inner = load_plugin("measure", "acme_faulty:half")

    with pytest.raises(AttributeError) as caught:
        outer(inner)

    fault = plugin_fault(caught.value)
    assert fault.where == "measure acme_faulty:half"
    assert f"({acme}, line 46)" in fault.problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def x(:\n", "loss: cannot import acme_broken:X: SyntaxError: "),
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere' ({file}, line 1)"),
        ("\nraise SystemExit(0)\n", "SystemExit: 0 ({file}, line 2)"),
        ("open('nowhere.txt')\n", "No such file or directory: 'nowhere.txt' ({file}, line 1)"),
    ],
)
def test_broken_module_names_setting(train_with, acme, text: str, message: str):
    file = acme.with_name("acme_broken.py")
    file.write_text(text)

    line = train_with("acme_broken:X").error_line

    assert "loss: cannot import acme_broken:X: " in line
    assert message.format(file=file) in line


def test_faulty_ranker_is_named(runs, acme, tmp_path):
    systems = "systems=[{name: a, rankers: [{kind: 'acme_faulty:Ranker'}]}]"
    data = (f"benchmark={runs}/queries", f"pool={runs}/pool", f"out={tmp_path / 'out'}")

    line = skilltrain("evaluate", *data, systems).error_line

    assert "ranker acme_faulty:Ranker: ZeroDivisionError: division by zero" in line
    assert f"({acme}, line 38)" in line


def test_faulty_measure_is_named(runs, acme, tmp_path):
    data = (f"benchmark={runs}/queries", f"pool={runs}/pool", f"out={tmp_path / 'out'}")

    outcome = skilltrain("evaluate", *data, "measures=['acme_faulty:half@3']")

    assert "measure acme_faulty:half: AttributeError: " in outcome.error_line
    assert f"({acme}, line 46)" in outcome.error_line


def test_sigterm_is_no_plugin_fault(runs, acme, tmp_path, monkeypatch):
    raise_signal = "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
    acme.with_name("acme_broken.py").write_text(raise_signal)

    def load(config, out):
        load_plugin("loss", "acme_broken:X")

    monkeypatch.setattr("skilltrain.data.pool.skill_pool.Pool.run", load)

    outcome = skilltrain("pool", f"sources={runs}/pool", f"out={tmp_path / 'out'}")

    assert outcome.code == 143
    assert outcome.err == ""


def test_own_command_may_exit(monkeypatch):
    command = load_plugin("command", "acme_faulty:command")
    monkeypatch.setattr("skilltrain.cli.plugin_paths", lambda kind: {"leave": "acme_faulty"})

    with pytest.raises(SystemExit) as leaving:
        as_program(lambda words: command(), ["leave"])

    assert leaving.value.code == 0


class Constant(Loss):
    """A loss with a value that a test chooses."""

    name: str = "constant"
    value: object = None

    def __call__(self, batch):
        return self.value if self.value is not None else batch.scores.detach().sum()


@pytest.mark.parametrize(
    "value",
    [1.0, torch.tensor(3), torch.zeros(2, requires_grad=True), None],
    ids=["number", "integer", "vector", "detached"],
)
def test_loss_without_gradient_is_refused(value):
    scored = batch([[2.0, 1.0]], [[1, 0]])
    scored.scores.requires_grad_()
    loss = Constant(value=value)
    sums = WeightedSum(parts={"a": WeightedLoss(loss=loss), "b": WeightedLoss(loss=InfoNCE())})

    for tested_loss in (loss, sums):
        with raises("unusable-plugin") as caught:
            call_loss(tested_loss, scored)
        assert caught.value.where == f"loss {__name__}:Constant"


def test_loss_may_be_constant_zero():
    scored = batch([[2.0, 1.0]], [[0, 0]])
    scored.scores.requires_grad_()

    value = call_loss(Constant(value=torch.zeros(())), scored)

    assert value == 0


@pytest.mark.parametrize("number", [0, 0.0])
def test_part_may_be_number_zero(number: float):
    scored = batch([[2.0, 1.0]], [[1, 0]])
    no_pairs = WeightedLoss(loss=Constant(value=number))

    value = call_loss(WeightedSum(parts={"a": no_pairs, "b": WeightedLoss(loss=InfoNCE())}), scored)

    assert value == InfoNCE()(scored)
    assert scored.scalars["a"] == 0


def test_loss_of_number_zero_runs_backward():
    scored = batch([[2.0, 1.0]], [[1, 0]])

    # A reranker's step adds nothing to the loss that could have a gradient.
    call_loss(Constant(value=0), scored).backward()

    assert not scored.scores.grad.any()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("zero", [torch.zeros((), requires_grad=True), 0], ids=["tensor", "number"])
def test_zero_gradient_gives_a_warning(model_folders, tmp_path, capsys, zero):
    step = new_step(model_folders["bert"])
    step.loss = Constant(value=zero)
    step.data = replace(step.data, lists=step.data.lists[:2])
    config = CONFIG.model_copy(update={"epochs": 2})

    train(training_runs.accelerator(), step, config, Run(tmp_path, False, {}))

    assert capsys.readouterr().err.count("warning: the gradient of the first step is 0") == 1
