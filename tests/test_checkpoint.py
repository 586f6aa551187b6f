import numpy as np
import pytest
import torch
from accelerate import Accelerator

from skilltrain.errors import SkilltrainError
from skilltrain.training.checkpoint import Position, checkpoints, load_checkpoint, save_checkpoint


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
    save_checkpoint(accelerator, tmp_path, 7, keep=2)
    expected = torch.rand(1), np.random.rand()
    with torch.no_grad():
        model.weight.zero_()
    position.step = 0
    assert load_checkpoint(accelerator, tmp_path)
    assert position.step == 7 and (model.weight == saved).all()
    assert (torch.rand(1), np.random.rand()) == expected


def test_only_the_newest_are_kept_in_order_of_step(run, tmp_path):
    accelerator, _, _ = run
    for step in (2, 9, 10, 100):
        save_checkpoint(accelerator, tmp_path, step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100"]


def test_nothing_to_load(run, tmp_path):
    assert not load_checkpoint(run[0], tmp_path)
    assert not load_checkpoint(run[0], tmp_path / "none")


def test_a_half_written_checkpoint_is_never_picked_up(run, tmp_path):
    accelerator, _, position = run
    position.step = 2
    save_checkpoint(accelerator, tmp_path, 2, keep=2)
    for name in ("step-9.partial", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2"]
    position.step = 0
    assert load_checkpoint(accelerator, tmp_path) and position.step == 2
    save_checkpoint(accelerator, tmp_path, 9, keep=2)  # takes the place of its own leftover
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-9"]
    assert not (tmp_path / "step-9.partial").exists()


def test_a_failed_save_leaves_no_checkpoint(run, tmp_path, monkeypatch):
    accelerator, _, _ = run

    def full_disk(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", full_disk)
    with pytest.raises(SkilltrainError, match=r"step-3\.partial: cannot save a checkpoint: No space left on device"):
        save_checkpoint(accelerator, tmp_path, 3, keep=2)
    assert checkpoints(tmp_path) == []


def test_a_missing_random_state_is_refused(run, tmp_path):
    accelerator, _, _ = run
    save_checkpoint(accelerator, tmp_path, 3, keep=2)
    (tmp_path / "step-3" / "random_states_0.pkl").unlink()
    with pytest.raises(SkilltrainError, match="the checkpoint holds no random state for this rank"):
        load_checkpoint(accelerator, tmp_path)
