"""Two processes equal one: with the whole model on each (DDP), and with shards of it (FSDP2, DeepSpeed ZeRO)."""

import json
import shutil

import pytest
import torch
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file

import two_ranks
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.ranks import gather_rows, rank_and_world
from two_ranks import SHARDED, last_checkpoint

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

NEEDS_DEEPSPEED = pytest.mark.skipif(not two_ranks.HAS_DEEPSPEED, reason="deepspeed is not installed")


def test_one_process_gathers_nothing():
    rows = torch.zeros(3, 2)
    assert rank_and_world() == (0, 1)
    assert gather_rows(rows, 3) is rows


@pytest.fixture(scope="module")
def both_ranks(model_folders, tmp_path_factory):
    """(the folder, what rank 0 and rank 1 came to)."""
    root = tmp_path_factory.mktemp("two_ranks")
    folders = {name: model_folders[name] for name in ("bert", "bert_reranker", "qwen3", "qwen3_reranker")}
    multiprocessing.spawn(two_ranks.on_rank, args=(root, folders), nprocs=2)
    return root, [torch.load(root / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def furthest(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def figures(folder):
    rows = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [[row["step"], row["loss"], row["learning_rate"], row["grad_norm"]] for row in rows]


@pytest.mark.parametrize("kind", ["encoder", "reranker"])
def test_two_ranks_equal_one_process_after_five_steps(both_ranks, model_folders, kind):
    step = (
        two_ranks.encoder_step(model_folders["bert"])
        if kind == "encoder"
        else two_ranks.reranker_step(model_folders["bert_reranker"])
    )
    before = two_ranks.weights_of(step)
    losses, parameters = two_ranks.five_steps(step, world=1)
    for rank_losses, rank_parameters in (results[kind] for results in both_ranks[1]):
        assert rank_losses == pytest.approx(losses, abs=1e-9)
        assert furthest(rank_parameters, parameters) < 1e-9
    assert furthest(parameters, before) > 1e-3


def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(both_ranks, model_folders, tmp_path):
    shutil.copytree(both_ranks[0] / "loop" / "checkpoints" / "step-2", tmp_path / "checkpoints" / "step-2")
    resumed = two_ranks.encoder_step(model_folders["bert"])
    two_ranks.training(resumed, tmp_path, resume=True)
    assert furthest(two_ranks.weights_of(resumed), both_ranks[1][0]["loop"]) < 1e-9


def test_the_loop_on_two_ranks_equals_the_loop_on_one(both_ranks, model_folders, tmp_path):
    step = two_ranks.encoder_step(model_folders["bert"])
    two_ranks.training(step, tmp_path)
    alone = two_ranks.weights_of(step)
    assert furthest(both_ranks[1][0]["loop"], alone) < 1e-9
    assert furthest(both_ranks[1][1]["loop"], alone) < 1e-9
    # AdamW hides a wrong factor on the gradient; its norm does not.
    assert figures(both_ranks[0] / "loop") == [pytest.approx(row, abs=2e-4) for row in figures(tmp_path)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS_DEEPSPEED if kind.startswith("zero") else ()) for kind in SHARDED]
)
def test_two_ranks_with_shards_equal_one_process_and_resume(both_ranks, model_folders, tmp_path, kind):
    """The ranks have unequal texts and chunk counts, two batches a step, and a last step with fewer queries."""
    folder, tolerance = SHARDED[kind]
    step = two_ranks.sharded_step(kind, model_folders[folder])
    two_ranks.training(step, tmp_path, precision=two_ranks.precision_of(kind))
    alone, together, resumed = (
        load_file(last_checkpoint(out) / "model.safetensors")
        for out in (tmp_path, both_ranks[0] / kind, both_ranks[0] / kind / "resumed")
    )
    assert alone.keys() == together.keys() == resumed.keys()
    # A key's bias shifts all scores of a softmax alike: its gradient is rounding noise, which AdamW blows up.
    names = [name for name in alone if not name.endswith("key.bias")]
    if kind.endswith("bfloat16"):
        losses = [[row[1] for row in figures(out)] for out in (tmp_path, both_ranks[0] / kind)]
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    else:
        assert max((alone[name] - together[name]).abs().max().item() for name in names) < tolerance
    assert all(torch.equal(resumed[name], together[name]) for name in together)
    assert figures(both_ranks[0] / kind)[2:] == figures(both_ranks[0] / kind / "resumed")


@NEEDS_DEEPSPEED
def test_deepspeeds_files_execute_no_code(both_ranks):
    root, results = both_ranks
    assert [result["malicious"] for result in results] == ["the checkpoint is damaged, or holds code"] * 2
    assert not (root / "zero2 encoder" / "resumed" / "executed").exists()


def test_the_first_rank_works_for_all_and_before_all(both_ranks):
    assert [result["made"] for result in both_ranks[1]] == ["by rank 0"] * 2
    assert [result["order"] for result in both_ranks[1]] == ["0", "01"]


def test_all_ranks_agree_on_the_figures(both_ranks):
    assert [result["figure"] for result in both_ranks[1]] == [1.0, 1.0]


def test_a_signal_to_one_rank_stops_both_with_one_checkpoint(both_ranks):
    root, results = both_ranks
    said = [result["interrupted"] for result in results]
    assert said == ["interrupted after step 2 of 4; a checkpoint is saved"] * 2
    (checkpoint,) = checkpoints(root / "interrupted" / "checkpoints")
    assert checkpoint.name == "step-2"
    assert {path.name for path in checkpoint.glob("random_*")} == {"random_0.safetensors", "random_1.safetensors"}


def test_an_out_that_the_machines_do_not_share_is_refused_on_every_rank(both_ranks):
    root, results = both_ranks
    fix = "(out must be a folder that all machines share)"
    for rank, result in enumerate(results):
        out = root / "unshared" / str(rank)
        assert result["unshared"] == [f"{out}/checkpoints: process 1 does not see what process 0 writes here {fix}"] * 2
    assert [*(root / "unshared").rglob(".*")] == []  # what they look for is taken away again
