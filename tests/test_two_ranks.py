"""Two processes equal one: with the whole model on each (DDP), and with shards of it (FSDP2, DeepSpeed ZeRO)."""

import json
import shutil

import pytest
import torch
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file

import two_ranks
from skilltrain.distributed import gather_rows, rank_and_world
from skilltrain.training.checkpoint import checkpoints
from small_library import forget_ranks
from two_ranks import CASES, HAS_DEEPSPEED, last_checkpoint

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_one_process_gathers_nothing():
    rows = torch.zeros(3, 2)
    assert rank_and_world() == (0, 1)
    assert gather_rows(rows, 3) is rows


def weights_in(out):
    return load_file(last_checkpoint(out) / "model.safetensors")


def furthest(one, other):
    assert one.keys() == other.keys()
    # A key's bias shifts all scores of a softmax alike: its gradient is rounding noise, which AdamW blows up.
    names = [name for name in one if not name.endswith("key.bias")]
    return max((one[name] - other[name]).abs().max().item() for name in names)


def figures(folder):
    rows = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [[row["step"], row["loss"], row["learning_rate"], row["grad_norm"]] for row in rows]


def check_case(kind, folder, root, alone):
    """Two ranks come to what one comes to, and a resumed training to the same bits."""
    case, resumed = CASES[kind], root / "resumed"
    step = two_ranks.step_of(kind, folder)
    before = {name: value.to(torch.float32) for name, value in two_ranks.weights_of(step).items()}
    forget_ranks()
    two_ranks.training(step, alone, precision=two_ranks.precision_of(kind))
    together, found, expected = weights_in(root), figures(root), figures(alone)
    if kind.endswith("bfloat16"):
        assert [row[1] for row in found] == pytest.approx(
            [row[1] for row in expected], rel=case.tolerance
        )
    else:
        assert furthest(weights_in(alone), together) < case.tolerance
        # AdamW hides a wrong factor on the gradient; its norm does not.
        assert found == [pytest.approx(row, abs=2e-4) for row in expected]
    assert (
        len(found) == case.num_steps
        and max((before[n] - together[n]).abs().max() for n in together) > 1e-3
    )
    assert furthest(weights_in(resumed), together) == 0 and figures(resumed) == found[2:]
    if kind.startswith("ddp"):
        for rank in (0, 1):
            assert (
                furthest(
                    torch.load(root / f"rank{rank}.pt", weights_only=True),
                    two_ranks.weights_of(step),
                )
                < 1e-9
            )


def test_two_ranks_equal_one_process_and_resume(model_folders, tmp_path, subtests):
    """One launch, for it takes long; the ranks have unequal texts and chunk counts."""
    folders = {
        name: model_folders[name] for name in ("bert", "bert_reranker", "qwen3", "qwen3_reranker")
    }
    multiprocessing.spawn(two_ranks.on_rank, args=(tmp_path, folders), nprocs=2)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    for kind in filter(two_ranks.can_run, CASES):
        with subtests.test(kind):
            check_case(
                kind, folders[CASES[kind].folder], tmp_path / kind, tmp_path / "alone" / kind
            )
    with subtests.test("one process goes on from a checkpoint of two ranks"):
        resumed = tmp_path / "alone" / "resumed"
        shutil.copytree(
            tmp_path / "ddp encoder" / "checkpoints" / "step-2", resumed / "checkpoints" / "step-2"
        )
        forget_ranks()
        two_ranks.training(two_ranks.step_of("ddp encoder", folders["bert"]), resumed, resume=True)
        assert furthest(weights_in(resumed), weights_in(tmp_path / "ddp encoder")) < 1e-9
    with subtests.test("the first rank works for all, and all agree on the figures"):
        assert [result["made"] for result in results] == ["by rank 0"] * 2
        assert [result["figure"] for result in results] == [1.0, 1.0]
    with subtests.test("a signal to one rank stops both with one checkpoint"):
        said = ["interrupted after step 2 of 5; a checkpoint is saved"] * 2
        assert [result["interrupted"] for result in results] == said
        (checkpoint,) = checkpoints(tmp_path / "interrupted" / "checkpoints")
        assert checkpoint.name == "step-2"
        assert {path.name for path in checkpoint.glob("random_*")} == {
            f"random_{rank}.safetensors" for rank in (0, 1)
        }
    with subtests.test("an out that the machines do not share is refused on every rank"):
        problem = "process 1 does not see what process 0 writes here (out must be a folder that all machines share)"
        for rank, result in enumerate(results):
            assert result["unshared"] == [f"{tmp_path}/unshared/{rank}/checkpoints: {problem}"] * 2
        assert [
            *(tmp_path / "unshared").rglob(".*")
        ] == []  # what they look for is taken away again
    if not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    assert [result["malicious"] for result in results] == [
        "the checkpoint is damaged, or holds code"
    ] * 2
    assert not (tmp_path / "zero2 encoder" / "resumed" / "executed").exists()
