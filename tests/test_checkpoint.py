import threading

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from skilltrain.errors import SkilltrainError
from skilltrain.training import checkpoint
from skilltrain.training.checkpoint import (
    Position,
    best_checkpoint,
    check_shared,
    checkpoints,
    load_checkpoint,
    load_weights,
    mark_best,
    rotate,
    save_checkpoint,
)


@pytest.fixture
def run():
    """(accelerator, model, position) ready to be saved."""
    accelerator, position = Accelerator(cpu=True), Position()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(position)
    return accelerator, model, position


def test_weights_position_and_random_states_come_back(run, tmp_path):
    accelerator, model, position = run
    position.step = 7
    saved = model.weight.detach().clone()
    save_checkpoint(accelerator, model, tmp_path, 7)
    expected = torch.rand(1), np.random.rand()
    with torch.no_grad():
        model.weight.zero_()
    position.step = 0
    assert load_checkpoint(accelerator, tmp_path)
    assert position.step == 7 and (model.weight == saved).all()
    assert (torch.rand(1), np.random.rand()) == expected


def test_only_the_newest_are_kept_in_order_of_step(run, tmp_path):
    accelerator, model, _ = run
    for step in (2, 9, 10, 100):
        save_checkpoint(accelerator, model, tmp_path, step)
        rotate(accelerator, tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100"]


def test_the_best_is_kept_whatever_its_age(run, tmp_path):
    accelerator, model, _ = run
    assert best_checkpoint(tmp_path) is None
    for step in (2, 4, 6, 8):
        save_checkpoint(accelerator, model, tmp_path, step)
        if step == 4:
            mark_best(tmp_path, 4, "MRR@10", 0.5)
        rotate(accelerator, tmp_path, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-4", "step-8"]
    assert best_checkpoint(tmp_path) == tmp_path / "step-4"


def test_nothing_to_load(run, tmp_path):
    assert not load_checkpoint(run[0], tmp_path)
    assert not load_checkpoint(run[0], tmp_path / "none")


def test_a_half_written_checkpoint_is_never_picked_up(run, tmp_path):
    accelerator, model, position = run
    position.step = 2
    save_checkpoint(accelerator, model, tmp_path, 2)
    for name in ("step-9.partial", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2"]
    position.step = 0
    assert load_checkpoint(accelerator, tmp_path) and position.step == 2
    save_checkpoint(accelerator, model, tmp_path, 9)  # takes the place of its own leftover
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-9"]
    assert not (tmp_path / "step-9.partial").exists()


def test_a_failed_save_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    accelerator, model, _ = run

    def full_disk(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", full_disk)
    with pytest.raises(SkilltrainError, match=r"step-3\.partial: cannot save a checkpoint: No space left on device"):
        save_checkpoint(accelerator, model, tmp_path, 3)
    assert checkpoints(tmp_path) == []


def test_a_missing_random_state_is_refused(run, tmp_path):
    accelerator, model, _ = run
    save_checkpoint(accelerator, model, tmp_path, 3)
    (tmp_path / "step-3" / "random_states_0.pkl").unlink()
    with pytest.raises(SkilltrainError, match="the checkpoint holds no random state for this rank"):
        load_checkpoint(accelerator, tmp_path)


def test_another_number_of_processes_is_refused(run, tmp_path):
    accelerator, model, _ = run
    save_checkpoint(accelerator, model, tmp_path, 3)
    (tmp_path / "step-3" / "world.json").write_text('{"num_processes": 8, "kind": "MULTI_GPU"}')
    with pytest.raises(SkilltrainError) as error:
        load_checkpoint(accelerator, tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/step-3: was written by 8 x MULTI_GPU, not by 1 x NO (resume with that launcher)"
    )


def test_a_file_that_another_machine_sees_late_is_waited_for(run, tmp_path, monkeypatch):
    accelerator, _, _ = run
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    written = []

    def late(path, text):
        written.append(path)
        threading.Timer(0.2, path.write_text, [text]).start()

    monkeypatch.setattr(checkpoint, "write_text", late)
    check_shared(accelerator, tmp_path, tmp_path / "checkpoints")
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.0)
    with pytest.raises(SkilltrainError, match="process 0 does not see what process 0 writes here"):
        check_shared(accelerator, tmp_path, tmp_path / "checkpoints")
    assert len(set(written)) == 2 and not written[0].exists()


class Holder(torch.nn.Module):
    """A step module: the model is one part of it."""

    def __init__(self, width=3, tied=False):
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"a": torch.nn.Linear(width, width), "b": torch.nn.Linear(width, width)})
        if tied:
            self.encoder["b"].weight = self.encoder["a"].weight


@pytest.mark.parametrize("tied", [False, True])
def test_weights_alone_can_be_loaded_into_the_model(tmp_path, tied):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Holder(tied=tied))
    save_checkpoint(accelerator, model, tmp_path, 1)
    other = Holder(tied=tied)
    load_weights(other.encoder, "encoder", tmp_path / "step-1")
    assert all((one == two).all() for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_another_model_are_refused(run, tmp_path):
    accelerator = Accelerator(cpu=True)
    save_checkpoint(accelerator, accelerator.prepare(Holder()), tmp_path, 1)
    with pytest.raises(SkilltrainError, match=r"step-1: the checkpoint does not fit the recipe's model"):
        load_weights(torch.nn.Linear(3, 3), "encoder", tmp_path / "step-1")
    with pytest.raises(SkilltrainError, match=r"step-1: the checkpoint does not fit the recipe's model"):
        load_weights(Holder(width=4).encoder, "encoder", tmp_path / "step-1")
