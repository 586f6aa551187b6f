"""Training on two processes (DDP, FSDP2, DeepSpeed ZeRO) equals training on one."""

import json
import re
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import two_ranks
from processes import run_apart
from skilltrain.distributed import gather_rows, rank_and_world
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.loop import step_batches
from small_library import forget_ranks
from two_ranks import CASES, HAS_DEEPSPEED, REFUSED_KINDS, TWO_PASS_CASES, last_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerate")]


def test_one_process_gathers_nothing():
    rows = torch.zeros(3, 2)
    assert rank_and_world() == (0, 1)
    assert gather_rows(rows, 3) is rows


def weights_in(out):
    """Return the weights of the newest checkpoint."""
    return load_file(last_checkpoint(out) / "model.safetensors")


def largest_difference(first, second):
    """Return the largest difference of a weight.

    Biases of keys are left out. They shift all scores of a softmax, so their gradient is rounding
    noise, which AdamW amplifies.
    """
    assert first.keys() == second.keys()
    names = [name for name in first if not name.endswith("key.bias")]
    return max((first[name] - second[name]).abs().max().item() for name in names)


def log_rows(folder):
    """Return step, loss, learning rate and gradient norm of each row of the log."""
    rows = map(json.loads, (folder / "train_log.jsonl").read_text().splitlines())
    return [[row["step"], row["loss"], row["learning_rate"], row["grad_norm"]] for row in rows]


def check_case(kind, folder, root, single):
    """Check that two ranks equal one process, and that a resumed run equals a whole one.

    Args:
        root: Output folder of two ranks.
        single: Output folder of one process, which is trained here.
    """
    case = CASES[kind]
    step = two_ranks.step_of(kind, folder)
    initial = {name: value.float() for name, value in two_ranks.weights_of(step).items()}
    forget_ranks()
    two_ranks.run_training(step, single, precision=two_ranks.precision_of(kind))

    # Two ranks equal one process.
    weights = weights_in(root)
    rows = log_rows(root)
    single_rows = log_rows(single)
    assert len(rows) == case.num_steps
    if kind.endswith("bfloat16"):
        single_losses = [loss for _, loss, _, _ in single_rows]
        assert [loss for _, loss, _, _ in rows] == pytest.approx(single_losses, rel=case.tolerance)
    else:
        assert largest_difference(weights_in(single), weights) < case.tolerance
        # AdamW hides a wrong factor of the gradient, its norm does not.
        assert rows == [pytest.approx(row, abs=2e-4) for row in single_rows]
    assert max((initial[name] - weights[name]).abs().max() for name in weights) > 1e-3

    # The resumed run has the same bits.
    assert largest_difference(weights_in(root / "resumed"), weights) == 0
    assert log_rows(root / "resumed") == rows[2:]

    # With DDP, every rank has the weights.
    if kind.startswith("ddp"):
        for rank in (0, 1):
            rank_weights = torch.load(root / f"rank{rank}.pt", weights_only=True)
            assert largest_difference(rank_weights, two_ranks.weights_of(step)) < 1e-9


@pytest.fixture(scope="module")
def processes(model_folders, tmp_path_factory):
    """Two ranks that have ended, and the folder of their outputs. The launch is slow, so it is one.

    The ranks have different numbers of texts and of chunks. At the end, the second rank is killed.
    """
    root = tmp_path_factory.mktemp("two_ranks")
    calls = [partial(two_ranks.on_rank, rank, root, model_folders) for rank in (0, 1)]
    return run_apart(*calls, timeout=600), root


@pytest.fixture(scope="module")
def launch(processes):
    """The results of two ranks, and the folder of their outputs."""
    ranks, root = processes
    files = [root / f"rank{rank}.pt" for rank in (0, 1)]
    assert all(file.exists() for file in files), ranks
    return [torch.load(file, weights_only=True) for file in files], root


@pytest.mark.parametrize("kind", CASES)
def test_two_ranks_equal_one_process(launch, model_folders, tmp_path, kind):
    if not two_ranks.can_run(kind):
        pytest.skip("a package is not installed")
    _, root = launch

    check_case(kind, model_folders[CASES[kind].folder], root / kind, tmp_path)


@pytest.mark.parametrize("kind", TWO_PASS_CASES)
def test_two_passes_have_gradients_of_one(launch, kind):
    if not two_ranks.can_run(kind):
        pytest.skip("a package is not installed")
    results, _ = launch

    differences = [result["two_passes"][kind][0] for result in results]

    assert max(differences) < TWO_PASS_CASES[kind].tolerance


def test_two_passes_exchange_gradients_once(launch):
    results, _ = launch

    num_exchanges = [result["two_passes"]["ddp encoder"][1] for result in results]

    assert num_exchanges == [1, 1]


def test_first_rank_works_for_all(launch):
    results, _ = launch

    assert [result["first_rank_value"] for result in results] == ["by rank 0"] * 2


def test_ranks_take_memory_settings_of_first_rank(launch):
    results, _ = launch

    assert [result["memory_choice"] for result in results] == [(False, 2048)] * 2


def test_ranks_draw_different_dropout(launch):
    results, _ = launch

    numbers = [result["random_number"] for result in results]

    assert numbers[0] != numbers[1]


def test_fsdp_copies_no_evaluation_inputs(launch):
    results, _ = launch

    assert [result["copied_inputs"] for result in results] == [[], []]


@pytest.mark.parametrize("kind", REFUSED_KINDS)
@pytest.mark.parametrize("reason", ["limit", "nan"])
def test_bad_gradient_of_a_rank_stops_both(launch, model_folders, kind, reason):
    if not two_ranks.can_run(kind):
        pytest.skip("a package is not installed")
    results, _ = launch
    data = two_ranks.step_of(kind, model_folders[CASES[kind].folder]).data

    outcomes = [result[reason][kind] for result in results]

    # One process gives the same line: test_loop.py::test_bad_gradient_stops_before_update.
    first_step = next(step_batches(data.lists, two_ranks.CONFIG))
    query_ids = [training_list.query_id for batch in first_step for training_list in batch]
    ending = f" in a step with queries {', '.join(query_ids)}"
    fault = r"the gradient norm \S+ exceeds training.stop_grad_norm 0.001"
    if reason == "nan":
        fault = "the gradient is not a finite number"
    for code, problem, has_moved in outcomes:
        assert code == "diverged"
        assert re.fullmatch(fault + ending, problem)
        assert not has_moved


def test_killed_rank_ends_the_other(processes):
    ranks, root = processes

    exit_codes = [rank.code for rank in ranks]

    assert exit_codes == [2, -signal.SIGKILL]
    lines = (root / "killed" / "stderr.txt").read_text().splitlines()
    errors = [line for line in lines if not line.startswith("training ")]
    advice = "(see its error; --resume continues the run)"
    assert errors == [f"error: another process of this run has ended {advice}"]


def test_run_with_killed_rank_resumes(launch, model_folders, tmp_path):
    """A run that lost a rank goes on from the same bits as a run that lost none."""
    _, root = launch
    weights = []
    for name in ("ddp encoder", "killed"):
        out = tmp_path / name
        shutil.copytree(root / name / "checkpoints" / "step-2", out / "checkpoints" / "step-2")
        forget_ranks()
        step = two_ranks.step_of("ddp encoder", model_folders["bert"])
        two_ranks.run_training(step, out, resume=True)
        weights.append(weights_in(out))

    assert [path.name for path in checkpoints(root / "killed" / "checkpoints")] == ["step-2"]
    assert largest_difference(*weights) == 0
    assert largest_difference(weights[0], weights_in(root / "ddp encoder")) < 1e-9


def test_ranks_agree_on_dev_metric(launch):
    results, _ = launch

    assert [result["dev_metric"] for result in results] == [1.0, 1.0]


def test_signal_to_one_rank_stops_both(launch):
    results, root = launch

    message = "interrupted after step 2 of 5; a checkpoint is saved"
    assert [result["interruption"] for result in results] == [message] * 2
    (checkpoint,) = checkpoints(root / "interrupted" / "checkpoints")
    assert checkpoint.name == "step-2"
    random_states = sorted(path.name for path in checkpoint.glob("random_*"))
    assert random_states == ["random_0.safetensors", "random_1.safetensors"]


def test_unshared_folder_is_refused_on_every_rank(launch):
    results, root = launch

    problem = "process 1 does not see what process 0 writes here"
    fix = "out must be a folder that all machines share"
    for rank, result in enumerate(results):
        message = f"{root}/unshared/{rank}/checkpoints: {problem} ({fix})"
        assert result["unshared_folder"] == [message] * 2
    assert [*(root / "unshared").rglob(".*")] == [], "the probe files are deleted"


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_code_in_checkpoint_is_not_run(launch):
    results, root = launch

    message = "the checkpoint is damaged, or holds code"
    assert [result["malicious_checkpoint"] for result in results] == [message] * 2
    assert not (root / "zero2 encoder" / "resumed" / "executed").exists()
