"""Where a run was computed is recorded and does not matter; which plug-ins it used does."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from skilltrain import __version__, plugins, provenance
from skilltrain.evaluation.ablate import read_grid
from skilltrain.files import read_json, write_json
from skilltrain.models import loading
from skilltrain.provenance import HUB_REVISIONS, plugin_fingerprints, provenance_of
from skilltrain.runs import input_fingerprint
from skilltrain.stage import parse_recipe
from small_library import encoder_recipe, forget_ranks, skilltrain, succeeds, write_recipe
from test_ablation import grid, write_grid

HINGE = """
import torch
from skilltrain.losses import Loss

class Hinge(Loss):
    name: str

    def __call__(self, batch):
        return torch.relu(batch.scores).sum()
"""


def forget(module):
    """As another process would: import the module again when it is next named."""
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        del sys.modules[name]


@pytest.fixture
def hinge(tmp_path, monkeypatch):
    """The file of a loss outside skilltrain."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "hinge_for_test.py"
    file.write_text(HINGE)
    yield file
    forget("hinge_for_test")


def train_config(loss="hinge_for_test:Hinge", source="some/model"):
    """Return the settings of a training run with this loss."""
    recipe = {
        "stage": "train_encoder",
        "model": {"source": source},
        "data": {"pool": "pool", "lists": "lists"},
        "loss": {"name": loss},
        "out": "out",
    }
    return parse_recipe(recipe, "test")


# Where a run was computed -----------------------------------------------------


def test_record_says_where_run_was_computed(runs):
    record = read_json(runs / "encoder" / "run.json")["provenance"]

    device = record.pop("device")
    commit = record.pop("commit")
    assert isinstance(device, str) and device
    assert commit is None or len(commit) == 40
    assert isinstance(record.pop("is_dirty"), bool)
    assert record == {
        "skilltrain": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "num_processes": 1,
        "hub_revisions": {},
    }


def test_record_of_commit_names_no_path(runs):
    text = json.dumps(read_json(runs / "encoder" / "run.json")["provenance"])

    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert platform.node() not in text


def test_hub_revision_is_recorded(tmp_path, monkeypatch):
    folder = tmp_path / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    loading._download.cache_clear()

    loading._download("some/model", weights=False, code=False)

    try:
        config = train_config("infonce")
        other = train_config("infonce", source="other/model")
        assert provenance_of(config)["hub_revisions"] == {"some/model": "a" * 40}
        assert provenance_of(other)["hub_revisions"] == {}
    finally:
        loading._download.cache_clear()
        del HUB_REVISIONS["some/model"]


def test_package_in_foreign_checkout_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_CHECKOUT", tmp_path)
    provenance.checkout_commit.cache_clear()

    commit = provenance.checkout_commit()

    provenance.checkout_commit.cache_clear()
    assert commit == ""


def test_other_provenance_is_same_run(runs, tmp_path):
    file = runs / "filtered" / "run.json"
    text = file.read_text()
    fingerprint = input_fingerprint(runs / "filtered")
    record = json.loads(text)

    try:
        write_json(file, record | {"provenance": {"python": "3.99"}})
        elsewhere = input_fingerprint(runs / "filtered")
        again = succeeds("train", runs / "recipes" / "encoder.yaml")
        write_json(file, record | {"recipe": {}})
        other = input_fingerprint(runs / "filtered")
    finally:
        file.write_text(text)

    assert elsewhere == fingerprint != other
    assert "nothing to do" in again.err


# Plug-ins ---------------------------------------------------------------------


def test_own_settings_have_no_fingerprint():
    assert plugin_fingerprints(train_config("infonce")) == {}


def test_changed_loss_is_another_run(runs, tmp_path, model_folders, hinge):
    recipe = encoder_recipe(runs, model_folders["bert"])
    recipe = recipe.replace("{name: infonce, temperature: 0.05}", "{name: 'hinge_for_test:Hinge'}")
    file = write_recipe(tmp_path / "r.yaml", recipe)
    command = ("train", file, "training.epochs=1", f"out={tmp_path}/out")
    succeeds(*command)
    forget_ranks()

    again = succeeds(*command)
    hinge.write_text(HINGE.replace("scores)", "scores + 1)"))
    forget("hinge_for_test")
    line = skilltrain(*command, "--resume").only_line

    assert "nothing to do" in again.err
    expected = "holds another run: the source of the plug-in hinge_for_test:Hinge differs"
    assert expected in line


def test_ablation_runs_changed_loss_again(tmp_path, hinge):
    values = grid(tmp_path)
    values["steps"]["train"]["loss"] = {"name": "hinge_for_test:Hinge"}
    file = write_grid(tmp_path, values)

    _, old_cells = read_grid(file, [])
    hinge.write_text(HINGE + "# changed\n")
    forget("hinge_for_test")
    _, new_cells = read_grid(file, [])

    old_runs = old_cells[0].runs
    new_runs = new_cells[0].runs
    changed = [step for step in old_runs if old_runs[step].out != new_runs[step].out]
    assert changed == ["train", "evaluate"]


def test_named_plug_in_counts(hinge):
    config = train_config("infonce").model_copy(update={"out": Path("measured@10")})
    plugins.load_plugin("ranker", "hinge_for_test:Hinge")

    ours = plugin_fingerprints(config)
    plugins.LOADED["measured"] = plugins.LOADED.pop("hinge_for_test:Hinge")
    named = plugin_fingerprints(config)
    del plugins.LOADED["measured"]

    assert ours == {}
    assert named.keys() == {"measured"}


def test_all_files_of_package_count(tmp_path, hinge):
    package = tmp_path / "hinge_for_test"
    package.mkdir()
    hinge.rename(package / "loss.py")
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("")

    old = plugin_fingerprints(train_config("hinge_for_test.loss:Hinge"))
    (package / "helper.py").write_text("x = 1\n")
    forget("hinge_for_test")
    new = plugin_fingerprints(train_config("hinge_for_test.loss:Hinge"))

    assert old.keys() == new.keys() == {"hinge_for_test.loss:Hinge"}
    assert old != new
