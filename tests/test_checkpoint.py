import io
import threading

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load as tensors_in
from safetensors.torch import save as tensors

from skilltrain.errors import SkilltrainError
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


def test_the_newest_and_the_best_are_kept_and_a_half_written_one_is_never_picked_up(run, tmp_path):
    assert load_checkpoint(*run, tmp_path) is best_checkpoint(tmp_path) is None
    for name in ("step-100.partial", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    save(run, tmp_path, 2, 9, 10, keep=2)
    assert names(tmp_path) == ["step-9", "step-10"] and best_checkpoint(tmp_path) is None
    save(run, tmp_path, 100, best=9, keep=1)  # takes the place of its own leftover
    assert (
        names(tmp_path) == ["step-9", "step-100"] and not (tmp_path / "step-100.partial").exists()
    )
    position = load_checkpoint(*run, tmp_path)
    assert (
        position is not None
        and position.step == 100
        and best_checkpoint(tmp_path) == tmp_path / "step-9"
    )


def test_a_failed_save_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_save_states", full_disk)
    with pytest.raises(
        SkilltrainError, match=r"step-3\.partial: cannot save a checkpoint: No space left on device"
    ):
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
    return lambda content: (
        content.replace(old, new) if old in content else pytest.fail("nothing to change")
    )


def of_another_model(content):
    """Each moment twice as long."""
    return tensors(
        {name: torch.cat([x, x]) if x.ndim else x for name, x in tensors_in(content).items()}
    )


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES for damage in DAMAGE.values()),
        ("optimizer.safetensors", of_another_model),
        ("state.json", changed(b'"step": 3', b'"step": "three"')),
        ("state.json", changed(b'"position"', b'"place"')),
        ("random_0.safetensors", changed(b'"cpu"', b'"gpu"')),
        ("state.json", changed(b"whole models on cpu", b"8 x FSDP on cuda")),
    ],
)
def test_a_damaged_checkpoint_and_another_launch_are_refused_in_one_line(
    run, tmp_path, file, damage
):
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
    if damage is of_another_model:
        assert "ValueError the optimiser holds (4, 3) for a weight of (2, 3)" in str(error.value)
    if b"FSDP" in (path.read_bytes() if path.is_file() else b""):
        assert str(error.value).endswith(
            "8 x FSDP on cuda, not by whole models on cpu (resume with that launcher)"
        )


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
    monkeypatch.setattr(engine, "_VISIBILITY_TIMEOUT", 0.0)
    with pytest.raises(SkilltrainError, match="process 0 does not see what process 0 writes here"):
        engine.check_shared(accelerator, tmp_path)
    assert len(set(written)) == 2 and not written[0].exists()


def test_weights_of_another_model_are_refused(run, tmp_path):
    save(run, tmp_path, 1)
    for other, unfit in (
        (torch.nn.Linear(4, 2), "size mismatch"),
        (torch.nn.Linear(3, 2, bias=False), "bias"),
        (torch.nn.ModuleList([torch.nn.Linear(3, 2)]), "weight|bias"),
    ):
        with pytest.raises(
            SkilltrainError,
            match=f"step-1: the checkpoint does not fit the recipe's model.*({unfit})",
        ):
            load_weights(other, "", tmp_path / "step-1")
