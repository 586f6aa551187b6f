import io
import threading

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import Interval
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
    """(accelerator, model, optimizer) after one step, ready to be saved."""
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


def test_everything_comes_back(run, tmp_path):
    _, model, optimizer = run
    figures = {"MRR@10": Interval(0.1, 0.05, 1 / 3, 7)}
    position = Position(7, 0.1, 56, 1234, 5.5, Best(4, 1 / 3, 2, figures))
    save_checkpoint(*run, tmp_path, position, keep=2)
    weight, moments = model.weight.detach().clone(), [dict(state) for state in optimizer.state_dict()["state"].values()]
    expected = torch.rand(1)
    with torch.no_grad():
        model.weight.zero_()
    optimizer.state.clear()
    assert load_checkpoint(*run, tmp_path) == position
    assert (model.weight == weight).all()
    restored = [*optimizer.state_dict()["state"].values()]
    assert len(restored) == 2 and all(
        one.keys() == {"step", "exp_avg", "exp_avg_sq"} and all(torch.equal(one[name], was[name]) for name in one)
        for one, was in zip(restored, moments, strict=True)
    )
    assert torch.rand(1) == expected


def test_the_newest_and_the_best_are_kept(run, tmp_path):
    save(run, tmp_path / "plain", 2, 9, 10, 100, keep=2)
    assert names(tmp_path / "plain") == ["step-10", "step-100"]
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["step-10", "step-100"]
    assert best_checkpoint(tmp_path / "plain") is best_checkpoint(tmp_path) is None
    save(run, tmp_path, 4, 6, 8, best=4, keep=1)
    assert names(tmp_path) == ["step-4", "step-8"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-4"


def test_a_half_written_checkpoint_is_never_picked_up(run, tmp_path):
    assert load_checkpoint(*run, tmp_path / "none") is None
    save(run, tmp_path, 2)
    for name in ("step-9.partial", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert names(tmp_path) == ["step-2"]
    position = load_checkpoint(*run, tmp_path)
    assert position is not None and position.step == 2
    save(run, tmp_path, 9)  # takes the place of its own leftover
    assert names(tmp_path) == ["step-2", "step-9"]
    assert not (tmp_path / "step-9.partial").exists()


def test_a_failed_save_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_save_states", full_disk)
    with pytest.raises(SkilltrainError, match=r"step-3\.partial: cannot save a checkpoint: No space left on device"):
        save(run, tmp_path, 3)
    assert checkpoints(tmp_path) == []


FILES = ("model.safetensors", "optimizer.safetensors", "random_0.safetensors", "state.json")
DAMAGE = {
    "missing": None,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
}


def changed(old, new):
    return lambda content: content.replace(old, new) if old in content else pytest.fail("nothing to change")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES for damage in DAMAGE.values()),
        ("state.json", changed(b'"step": 3', b'"step": "three"')),
        ("state.json", changed(b'"position"', b'"place"')),
        ("random_0.safetensors", changed(b'"cpu"', b'"gpu"')),
        ("state.json", changed(b"whole models on cpu", b"8 x FSDP on cuda")),
    ],
)
def test_a_damaged_checkpoint_and_another_launch_are_refused_in_one_line(run, tmp_path, file, damage):
    save(run, tmp_path, 3)
    path = tmp_path / "step-3" / file
    content = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(content))
    with pytest.raises(SkilltrainError) as error:
        load_checkpoint(*run, tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/step-3") and "\n" not in str(error.value)
    if b"FSDP" in (path.read_bytes() if path.is_file() else b""):
        assert str(error.value).endswith("8 x FSDP on cuda, not by whole models on cpu (resume with that launcher)")


def test_the_optimiser_of_another_model_is_refused(run, tmp_path):
    save(run, tmp_path, 3)
    file = tmp_path / "step-3" / "optimizer.safetensors"
    save_file({key: torch.cat([value, value]) if value.ndim else value for key, value in load_file(file).items()}, file)
    with pytest.raises(SkilltrainError, match=r"ValueError the optimiser holds \(4, 3\) for a weight of \(2, 3\)"):
        load_checkpoint(*run, tmp_path)


PICKLED_BY_OTHERS = ("random_states_0.pkl", "optimizer.bin", "deepspeed/mp_rank_00_model_states.pt")


@pytest.mark.parametrize("file", [*FILES, *PICKLED_BY_OTHERS])
def test_a_checkpoint_from_elsewhere_executes_no_code(run, tmp_path, file):
    """A pickle under our own names is refused; under the names that accelerate and others use it is never opened."""
    save(run, tmp_path / "run", 3)
    path, sign = tmp_path / "run" / "step-3" / file, tmp_path / "executed"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(malicious_pickle(sign))
    if file in FILES:
        with pytest.raises(SkilltrainError, match="step-3"):
            load_checkpoint(*run, tmp_path / "run")
    else:
        assert load_checkpoint(*run, tmp_path / "run") is not None
    assert not sign.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert sign.exists()  # it would have


def test_a_file_that_another_machine_sees_late_is_waited_for(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    written = []

    def late(path, text):
        written.append(path)
        threading.Timer(0.2, path.write_text, [text]).start()

    monkeypatch.setattr(engine, "write_text", late)
    engine.check_shared(accelerator, tmp_path)
    monkeypatch.setattr(engine, "_PATIENCE", 0.0)
    with pytest.raises(SkilltrainError, match="process 0 does not see what process 0 writes here"):
        engine.check_shared(accelerator, tmp_path)
    assert len(set(written)) == 2 and not written[0].exists()


class Holder(torch.nn.Module):
    """A step module: the model is one part of it."""

    def __init__(self, width=3, tied=False):
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"a": torch.nn.Linear(width, width), "b": torch.nn.Linear(width, width)})
        if tied:
            self.encoder["b"].weight = self.encoder["a"].weight


def save_holder(folder, tied=False):
    accelerator, model = Accelerator(cpu=True), Holder(tied=tied)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(accelerator, model, optimizer, folder, Position(1, loss=0.1), keep=2)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_weights_alone_can_be_loaded_into_the_model(tmp_path, tied):
    model = save_holder(tmp_path, tied)
    other = Holder(tied=tied)
    load_weights(other.encoder, "encoder", tmp_path / "step-1")
    assert all((one == two).all() for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_another_model_are_refused(tmp_path):
    save_holder(tmp_path)
    with pytest.raises(SkilltrainError, match=r"step-1: the checkpoint does not fit the recipe's model"):
        load_weights(torch.nn.Linear(3, 3), "encoder", tmp_path / "step-1")
    with pytest.raises(SkilltrainError, match=r"step-1: the checkpoint does not fit the recipe's model"):
        load_weights(Holder(width=4).encoder, "encoder", tmp_path / "step-1")


def test_only_what_trains_is_saved_and_read(tmp_path):
    accelerator, model = Accelerator(cpu=True), Holder()
    model.encoder["a"].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.encoder["b"].parameters()))
    save_checkpoint(accelerator, model, optimizer, tmp_path, Position(1, loss=0.1), keep=2)
    assert {*load_file(tmp_path / "step-1" / "model.safetensors")} == {"encoder.b.weight", "encoder.b.bias"}
    other = Holder()
    with pytest.raises(SkilltrainError, match=r"does not fit the recipe's model: a\.weight"):
        load_weights(other.encoder, "encoder", tmp_path / "step-1")
    base = other.encoder["a"].requires_grad_(False).weight.clone()
    load_weights(other.encoder, "encoder", tmp_path / "step-1")
    assert torch.equal(other.encoder["a"].weight, base)
    assert torch.equal(other.encoder["b"].weight, model.encoder["b"].weight)
