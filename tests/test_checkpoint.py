"""Checkpoints: which are kept, loaded and refused, and that none can run code."""

import io
import threading
from itertools import product

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load as tensors_in
from safetensors.torch import save as tensors

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.bootstrap import Interval
from skilltrain.training import checkpoint, engine
from skilltrain.training.checkpoint import (
    Best,
    Position,
    best_checkpoint,
    checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from training_runs import malicious_pickle


@pytest.fixture
def run():
    """Return accelerator, model and optimizer after one step."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return accelerator, model, optimizer


def save(run, folder, *steps, best=0, keep=10):
    for step in steps:
        save_checkpoint(*run, folder, Position(step, loss=0.1, best=Best(best)), keep)


def names(folder):
    return [path.name for path in checkpoints(folder)]


def test_empty_folder_has_no_checkpoint(run, tmp_path):
    assert load_checkpoint(*run, tmp_path) is None
    assert best_checkpoint(tmp_path) is None


@pytest.mark.parametrize("name", ["step-100.partial", "step-x", "step-", "other"])
def test_an_incomplete_checkpoint_is_ignored(run, tmp_path, name):
    save(run, tmp_path, 2)
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("half")

    position = load_checkpoint(*run, tmp_path)

    assert names(tmp_path) == ["step-2"]
    assert position is not None
    assert position.step == 2


def test_a_partial_checkpoint_is_replaced(run, tmp_path):
    partial = tmp_path / "step-100.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")

    save(run, tmp_path, 100)

    assert names(tmp_path) == ["step-100"]
    assert not partial.exists()


def test_the_newest_checkpoints_are_kept(run, tmp_path):
    save(run, tmp_path, 2, 9, 10, keep=2)

    assert names(tmp_path) == ["step-9", "step-10"]
    assert best_checkpoint(tmp_path) is None


def test_the_best_checkpoint_is_kept(run, tmp_path):
    save(run, tmp_path, 9, 10)

    save(run, tmp_path, 100, best=9, keep=1)

    assert names(tmp_path) == ["step-9", "step-100"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-9"


def test_the_newest_checkpoint_is_loaded(run, tmp_path):
    save(run, tmp_path, 9, 10, 100)

    position = load_checkpoint(*run, tmp_path)

    assert position is not None
    assert position.step == 100


@pytest.mark.parametrize(
    ("value", "is_better"), [(0.5, True), (0.4, False), (0.3, False), (float("nan"), False)]
)
def test_only_higher_value_is_better(value, is_better):
    best = Best(step=1, value=0.4)

    assert best.update(2, "m", {"m": Interval(value, 0, 1, 9)}) == is_better

    assert best.step == (2 if is_better else 1)
    assert best.num_bad == (0 if is_better else 1)


def test_failed_save_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_save_states", raise_disk_full)

    with raises("cannot-write"):
        save(run, tmp_path, 3)

    assert checkpoints(tmp_path) == []


FILES = ("model.safetensors", "optimizer.safetensors", "random_0.safetensors", "state.json")
DAMAGE = {
    "missing": None,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
}


def replaced(old, new):
    """Return a function that replaces a part of a file's content."""

    def damage(content):
        assert old in content
        return content.replace(old, new)

    return damage


def with_double_moments(content):
    """Make each moment of the optimiser twice as long."""
    moments = tensors_in(content)
    for name, value in moments.items():
        if value.ndim:
            moments[name] = torch.cat([value, value])
    return tensors(moments)


def with_nan(content):
    """Make all numbers NaN."""
    return tensors({name: value * torch.nan for name, value in tensors_in(content).items()})


def without_first(content):
    """Remove the first tensor."""
    values = tensors_in(content)
    del values[min(values)]
    return tensors(values)


def refusal(run, folder):
    """Return the error of loading a checkpoint."""
    with pytest.raises(SkilltrainError) as error:
        load_checkpoint(*run, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *product(FILES, DAMAGE.values()),
        ("state.json", replaced(b'"step": 3', b'"step": "three"')),
        ("state.json", replaced(b'"step": 3', b'"step": -3')),
        ("state.json", replaced(b'"step": 3', b'"step": 2')),
        ("state.json", replaced(b'"position"', b'"place"')),
        ("model.safetensors", with_nan),
        ("optimizer.safetensors", with_nan),
        ("optimizer.safetensors", without_first),
        ("random_0.safetensors", replaced(b'"cpu"', b'"gpu"')),
    ],
)
def test_a_damaged_checkpoint_is_refused(run, tmp_path, file, damage):
    save(run, tmp_path, 3)
    path = tmp_path / "step-3" / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))

    message = refusal(run, tmp_path)

    assert message.startswith(f"{tmp_path}/step-3")
    assert "\n" not in message


def test_names_with_other_digits_are_no_checkpoints(tmp_path):
    (tmp_path / "step-٩").mkdir()

    assert checkpoints(tmp_path) == []


def test_another_models_optimiser_is_refused(run, tmp_path):
    save(run, tmp_path, 3)
    path = tmp_path / "step-3" / "optimizer.safetensors"
    path.write_bytes(with_double_moments(path.read_bytes()))

    message = refusal(run, tmp_path)

    assert "ValueError the optimiser holds (4, 3) for a weight of (2, 3)" in message
    assert "\n" not in message


def test_another_launch_is_refused(run, tmp_path):
    save(run, tmp_path, 3)
    path = tmp_path / "step-3" / "state.json"
    path.write_bytes(replaced(b"whole models on cpu", b"8 x FSDP on cuda")(path.read_bytes()))

    message = refusal(run, tmp_path)

    ending = "8 x FSDP on cuda, not by whole models on cpu (resume with that launcher)"

    assert message.endswith(ending)


def write_malicious_pickle(path, sign):
    """Write a pickle that creates the file `sign` when it is read, and check that it would."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(malicious_pickle(sign))
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    sign.unlink()


@pytest.mark.parametrize("file", FILES)
def test_pickle_under_our_names_is_refused(run, tmp_path, file):
    save(run, tmp_path / "run", 3)
    sign = tmp_path / "executed"

    write_malicious_pickle(tmp_path / "run" / "step-3" / file, sign)

    assert "step-3" in refusal(run, tmp_path / "run")

    assert not sign.exists()


@pytest.mark.parametrize(
    "file", ["random_states_0.pkl", "optimizer.bin", "deepspeed/mp_rank_00_model_states.pt"]
)
def test_pickle_of_other_programs_is_never_opened(run, tmp_path, file):
    save(run, tmp_path / "run", 3)
    sign = tmp_path / "executed"

    write_malicious_pickle(tmp_path / "run" / "step-3" / file, sign)

    assert load_checkpoint(*run, tmp_path / "run") is not None

    assert not sign.exists()


@pytest.fixture
def late_markers(monkeypatch):
    """Paths of the markers of `check_folder_is_shared`, which appear 0.2 seconds late."""
    paths = []

    def write_late(path, text):
        paths.append(path)
        threading.Timer(0.2, path.write_text, [text]).start()

    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(engine, "write_text", write_late)
    return paths


def test_late_file_is_waited_for(tmp_path, late_markers):
    engine.check_folder_is_shared(Accelerator(cpu=True), tmp_path)

    (marker,) = late_markers

    assert not marker.exists()


def test_each_check_has_its_own_marker(tmp_path, late_markers):
    for _ in range(2):
        engine.check_folder_is_shared(Accelerator(cpu=True), tmp_path)

    first, second = late_markers

    assert first != second


def test_folder_that_is_not_shared_is_refused(tmp_path, late_markers, monkeypatch):
    monkeypatch.setattr(engine, "_VISIBILITY_TIMEOUT", 0.0)

    with raises("folder-not-shared"):
        engine.check_folder_is_shared(Accelerator(cpu=True), tmp_path)


@pytest.mark.parametrize(
    ("model", "mismatch"),
    [
        (torch.nn.Linear(4, 2), "size mismatch"),
        (torch.nn.Linear(3, 2, bias=False), "bias"),
        (torch.nn.ModuleList([torch.nn.Linear(3, 2)]), "weight|bias"),
    ],
)
def test_weights_of_another_model_are_refused(run, tmp_path, model, mismatch):
    save(run, tmp_path, 1)
    message = f"step-1: the checkpoint does not fit the recipe's model.*({mismatch})"

    with pytest.raises(SkilltrainError, match=message):
        load_weights(model, "", tmp_path / "step-1")
