"""FSDP2 and DeepSpeed on two CPU ranks against one process."""

import importlib.util

import pytest
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file

import sharded_ranks

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
CASES = [
    pytest.param("fsdp2", "encoder", "bert", 1e-9),
    pytest.param("fsdp2", "reranker", "qwen3_reranker", 1e-7),  # Qwen3's norms compute in float32
    pytest.param("zero2", "encoder", "qwen3", 1e-5, marks=NEEDS_DEEPSPEED),
    pytest.param("zero3", "reranker", "qwen3_reranker", 1e-4, marks=NEEDS_DEEPSPEED),
]


@pytest.mark.parametrize(("kind", "model", "folder", "tolerance"), CASES)
def test_two_ranks_with_shards_equal_one_process(model_folders, tmp_path, kind, model, folder, tolerance):
    """The ranks have unequal texts and chunk counts, two batches a step, and a last step with fewer queries."""
    arguments = (kind, model, model_folders[folder], tmp_path)
    multiprocessing.spawn(sharded_ranks.on_rank, args=arguments, nprocs=2)
    alone = load_file(sharded_ranks.alone(kind, model, model_folders[folder], tmp_path / "alone") / "model.safetensors")
    together = load_file(sharded_ranks.last_checkpoint(tmp_path / "out") / "model.safetensors")
    assert alone.keys() == together.keys()
    # A key's bias shifts all scores of a softmax alike: its gradient is rounding noise, which AdamW blows up.
    names = [name for name in alone if not name.endswith("key.bias")]
    assert max((alone[name] - together[name]).abs().max().item() for name in names) < tolerance
