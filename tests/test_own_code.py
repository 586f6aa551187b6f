"""The examples in examples/own_code: a loss on vectors, hooks, and an optimiser."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from skilltrain.models.activations import checkpoint_layers
from skilltrain.training.loop import new_optimizer
from skilltrain.training.settings import TrainingConfig
from small_library import succeeds
from test_optimizers import assert_resumes
from test_shared_prompt import pairs_of

FOLDER = Path(__file__).parents[1] / "examples" / "own_code"


@pytest.fixture
def example_modules(monkeypatch):
    """Make the modules of the examples importable."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in ("align", "compiled_layers", "muon", "steps_since_best"):
        sys.modules.pop(name, None)


def train(name, runs, model, out, *settings):
    """Train with a recipe of the examples on a small library. Return the rows of the log."""
    data = f"data={{pool: {runs}/pool, lists: {runs}/encoder_lists}}"
    succeeds("train", FOLDER / name, f"model.source={model}", data, f"out={out}", *settings)
    return [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]


def test_distilled_vectors_move_to_teacher(example_modules, runs, model_folders, tmp_path):
    import align

    file = tmp_path / "teacher.npz"
    align.write_vectors(str(runs / "encoder"), runs / "pool", runs / "queries", file)

    rows = train(
        "align.yaml",
        runs,
        model_folders["bert"],
        tmp_path / "out",
        f"loss.parts.teacher.loss.teacher={file}",
        "loss.parts.teacher.weight=5",
        "training={epochs: 4, batch_size: 12, accumulation: 1, learning_rate: 1.0e-3}",
    )

    # An epoch is one step with all queries, so that the values of steps can be compared.
    distances = [row["loss/teacher"] for row in rows]
    assert len(distances) == 4
    assert 0 < distances[-1] < 0.8 * distances[0]


def test_hook_logs_steps_since_best_evaluation(example_modules, runs, model_folders, tmp_path):
    rows = train(
        "steps_since_best.yaml",
        runs,
        model_folders["bert"],
        tmp_path / "out",
        f"dev={{benchmark: {runs}/queries, split: test, every: 2}}",
        "training.batch_size=4",
        "training.epochs=2",
    )

    steps = [row["steps_since_best"] for row in rows if "loss" in row]
    assert steps[:3] == [1, 2, 1]  # the first evaluation follows step 2


def test_muon_trains_matrices_of_layers(example_modules):
    torch.manual_seed(0)
    parts = {"embeddings": torch.nn.Embedding(6, 4), "dense": torch.nn.Linear(4, 3)}
    model = torch.nn.ModuleDict(parts)
    config = TrainingConfig.model_validate({"optimizer": {"name": "muon:Muon"}})
    before = model["dense"].weight.detach().clone()

    optimizer = new_optimizer(model, config)
    model["dense"](model["embeddings"](torch.arange(6))).square().sum().backward()
    optimizer.step()

    states = {name: {*optimizer.state[value]} for name, value in model.named_parameters()}
    assert states.pop("dense.weight") == {"momentum_buffer"}
    assert all(state == {"step", "exp_avg", "exp_avg_sq"} for state in states.values())
    # A step of Muon has singular values near 0.2 times the root of the longer side.
    decayed = before * (1 - config.learning_rate * config.weight_decay)
    step = (decayed - model["dense"].weight.detach()) / config.learning_rate
    assert torch.linalg.svdvals(step).tolist() == pytest.approx([0.4] * 3, rel=0.5)


def test_run_with_muon_resumes_bit_identically(
    example_modules, fresh_accelerate, model_folders, tmp_path
):
    optimizer = TrainingConfig.model_validate({"optimizer": {"name": "muon:Muon"}}).optimizer

    assert_resumes(optimizer, model_folders["bert_dropout"], tmp_path)


def test_recipe_with_muon_lowers_loss(example_modules, runs, model_folders, tmp_path):
    settings = "training={optimizer: {name: 'muon:Muon'}, epochs: 4, batch_size: 12,"
    settings += " accumulation: 1, learning_rate: 1.0e-3}"

    rows = train("muon.yaml", runs, model_folders["bert"], tmp_path / "out", settings)

    assert rows[-1]["loss"] < rows[0]["loss"]


def test_compiled_parts_share_few_graphs(example_modules, open_reranker_of):
    import compiled_layers

    reranker = open_reranker_of("qwen3_reranker").train()
    checkpoint_layers(reranker.network)
    # The continuations of these texts form one to four buckets. See `_MIN_RELATIVE_LENGTH`.
    groups = [pairs_of(lengths) for lengths in ([9, 8], [40, 9, 9], [90, 40, 9], [90, 40, 9, 3])]
    vector = reranker.score_vector().detach()
    expected = [reranker.score(pairs, vector) for pairs in groups]
    counter = CompileCounter()
    compiled_layers.compile_parts(reranker.network, backend=counter, fullgraph=True)

    scores = [reranker.score(pairs, vector) for pairs in groups]

    for compiled, plain in zip(scores, expected, strict=True):
        assert torch.allclose(compiled, plain, atol=1e-6)
    torch.cat(scores).sum().backward()
    # One graph is that of the feed-forward network. The norms have three: for tokens, for the heads
    # of queries, and for the only key head of this model.
    assert counter.frame_count == 4


def test_hook_compiles_after_first_step(example_modules, open_reranker_of, monkeypatch):
    import compiled_layers

    compiled = []
    monkeypatch.setattr(compiled_layers, "compile_parts", compiled.append)
    reranker = open_reranker_of("qwen3_reranker")
    hook = compiled_layers.CompiledLayers()

    for step in (1, 2):
        hook.on_step(step, {}, reranker)

    assert compiled == [reranker.network]
