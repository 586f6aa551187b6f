"""The loop: order, resuming, signals, bad gradients; with a dev benchmark the best step is kept."""

import json
import math
import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

import training_runs
from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked
from skilltrain.losses import InfoNCE
from skilltrain.metrics.measures import Relevance
from skilltrain.models import cpu_linear
from skilltrain.records import Query
from skilltrain.retrieval.cascade import Cascade
from skilltrain.training import loop
from skilltrain.training.checkpoint import checkpoints
from skilltrain.training.dev import Dev
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, StopRequest, new_optimizer, step_batches, train
from skilltrain.training.settings import DevConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings, TextsToEncode
from small_library import skilltrain
from training_data import training_set
from training_runs import CONFIG, NUM_LISTS, new_step, run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def uninterrupted(model_folders, tmp_path_factory):
    """(the folder, the parameters) of a training that nothing disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted")
    return out, run(new_step(model_folders["bert_dropout"]), out, resume=False)


def log_of(out):
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.endswith("per_second")} for row in rows
    ]


def identical(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_list_once_an_epoch_in_an_order_of_seed_and_epoch():
    lists = training_set(NUM_LISTS).lists
    steps = list(step_batches(lists, CONFIG))

    assert len(steps) == 6
    assert [[len(batch) for batch in batches] for batches in steps] == [[4, 4], [4, 4], [4]] * 2

    order = [one.query_id for batches in steps for batch in batches for one in batch]

    assert sorted(order[:20]) == sorted(order[20:]) == sorted(one.query_id for one in lists)
    assert order[:20] != order[20:]

    again = [
        one.query_id
        for batches in step_batches(lists, CONFIG)
        for batch in batches
        for one in batch
    ]
    other = step_batches(lists, CONFIG.model_copy(update={"seed": 1}))

    assert (
        order == again != [one.query_id for batches in other for batch in batches for one in batch]
    )


def test_an_epoch_sees_a_list_as_often_as_its_weight_says():
    weights = [1.0] * 4 + [0.5] * 4 + [2.25] * 4
    lists = [
        replace(one, weight=weight)
        for one, weight in zip(training_set(12).lists, weights, strict=True)
    ]

    steps = list(step_batches(lists, CONFIG))

    assert len(steps) == 4  # 2 x (4 + 2 + 9) queries, 8 a step

    epochs = [
        [one for batches in part for batch in batches for one in batch]
        for part in (steps[:2], steps[2:])
    ]
    for seen in epochs:
        counts = [seen.count(one) for one in lists]
        assert counts[:4] == [1] * 4
        assert sorted(counts[4:8]) == [0, 0, 1, 1]
        assert sorted(counts[8:]) == [2, 2, 2, 3]
    halves = [{one.query_id for one in seen if one.weight == 0.5} for seen in epochs]

    assert halves[0] != halves[1]


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = new_optimizer(model, 1e-3, 0.01).param_groups

    assert [(group["weight_decay"], [p.shape for p in group["params"]]) for group in groups] == [
        (0.01, [(3, 2)]),
        (0, [(3,)] * 3),
    ]


def test_the_log_holds_each_steps_figures(uninterrupted):
    rows = log_of(uninterrupted[0])

    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]

    # Two of six steps warm up, at 1/3 and 2/3 of the peak; then half a cosine over four.
    shares = [1 / 3, 2 / 3, *(0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4))]

    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [1e-3 * share for share in shares]
    )
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_killed_with_9_resumes_bit_identically(uninterrupted, model_folders, tmp_path):
    arguments = (6, model_folders["bert_dropout"], tmp_path)

    with pytest.raises(multiprocessing.ProcessExitedException, match="SIGKILL"):
        multiprocessing.spawn(training_runs.killed_in_step, args=arguments, nprocs=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-2",
        "step-4",
    ]
    assert len(log_of(tmp_path)) == 5

    with (tmp_path / "train_log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')  # torn by the kill
    half = tmp_path / "checkpoints" / "step-6.partial"
    half.mkdir()
    (half / "model.safetensors").write_text("half")

    with raises("unfinished-run"):
        run(new_step(model_folders["bert_dropout"]), tmp_path, resume=False)

    torch.manual_seed(99)  # whatever the random state of the new process

    assert identical(
        run(new_step(model_folders["bert_dropout"]), tmp_path, resume=True), uninterrupted[1]
    )
    assert log_of(tmp_path) == log_of(uninterrupted[0])


def test_the_probe_runs_the_largest_batch_and_changes_nothing(
    uninterrupted, model_folders, tmp_path, monkeypatch
):
    step, seen, losses = new_step(model_folders["bert_dropout"]), [], []
    batches = [batch for of_step in step_batches(step.data.lists, CONFIG) for batch in of_step]
    sizes = [
        sum(len(step.skill_ids[skill]) for one in batch for skill in one.skill_ids)
        for batch in batches
    ]
    forward = step.forward

    def seeing(batch):
        seen.append(batch)
        if len(seen) == 1:  # within the probe, which puts random states back
            losses.extend(forward(batch).item() for _ in range(2))
        return forward(batch)

    step.forward = seeing
    monkeypatch.setattr(loop, "can_probe", lambda _: True)
    found = run(step, tmp_path, resume=False)

    assert identical(found, uninterrupted[1])
    assert log_of(tmp_path) == log_of(uninterrupted[0])
    assert seen[0] == batches[sizes.index(max(sizes))]
    assert len(seen) == len(batches) + 1
    assert losses[0] != losses[1], "dropout is on"


@pytest.mark.parametrize("sharded", [False, True])
def test_onednn_computes_unless_weights_are_sharded(model_folders, monkeypatch, tmp_path, sharded):
    monkeypatch.setattr(cpu_linear, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(loop, "shards_weights", lambda _: sharded)
    step = new_step(model_folders["bert"])
    loop.Training(training_runs.accelerator(), step, CONFIG, Run(tmp_path, False, {}))

    linear = {type(module) for module in step.modules() if isinstance(module, torch.nn.Linear)}

    assert linear == {torch.nn.Linear if sharded else cpu_linear.OneDnnLinear}


SPOILED = {  # what is done to a step, and what is said of it
    "the loss is not a finite number": lambda norm: norm.data.fill_(math.nan),
    "the gradient is not a finite number": lambda norm: norm.register_hook(
        lambda gradient: gradient * math.nan
    ),
    r"the gradient norm \S+ exceeds training.stop_grad_norm 0.001": lambda norm: None,
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_bad_gradient_stops_before_the_step_and_names_its_queries(
    model_folders, tmp_path, message
):
    step = new_step(model_folders["bert"])
    SPOILED[message](step.model.backbone.embeddings.LayerNorm.weight)
    before = [parameter.detach().clone() for parameter in step.parameters()]
    config = CONFIG.model_copy(update={"stop_grad_norm": 1e-3 if "exceeds" in message else 1e4})
    first = [
        one.query_id for batch in next(iter(step_batches(step.data.lists, CONFIG))) for one in batch
    ]

    with pytest.raises(
        SkilltrainError,
        match=f"^{message} in a step with queries {', '.join(first)} .look at these",
    ):
        train(training_runs.accelerator(), step, config, Run(tmp_path, False, {}))
    assert all(
        one.equal(other) or one.isnan().all()
        for one, other in zip(step.parameters(), before, strict=True)
    )
    assert not (tmp_path / "checkpoints").exists()


def test_accumulation_does_not_change_what_a_query_weighs(open_encoder_of, tmp_path):
    """Eight lists as 6 + 2 queries a step, in one batch or in pieces of 3, 2 or 1."""
    results = []
    for batch_size in (6, 3, 2, 1):
        encoder, data = open_encoder_of("bert").double(), training_set(8)
        step = EncoderStep(encoder, InfoNCE(), data, StepSettings(200, in_batch=False))
        settings = {
            "batch_size": batch_size,
            "accumulation": 6 // batch_size,
            "learning_rate": 1e-3,
        }
        config = TrainingConfig.model_validate(settings)
        out = Run(tmp_path / str(batch_size), False, {})
        train(new_accelerator(config, quantized=False), step, config, out)
        results.append(torch.cat([parameter.detach().flatten() for parameter in step.parameters()]))

    for other in results[1:]:
        assert (other - results[0]).abs().max() < 1e-9


def test_only_a_second_ctrl_c_stops_at_once():
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a test run in the background ignores it
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a batch system that signals launcher and worker both
        signal.raise_signal(signal.SIGINT)

        assert stop.signal_number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_two_trainings_on_one_out_are_kept_apart(runs, tmp_path):
    with locked(tmp_path / "out"):
        line = skilltrain(
            "train", runs / "recipes" / "encoder.yaml", f"out={tmp_path}/out"
        ).error_line
    assert "another process is writing" in line


# With a dev benchmark -----------------------------------------------------------------------------


@dataclass
class ScriptedRanker:
    """Ranks the gold skill at a place written down beforehand for each evaluation, whatever the model says."""

    places: list[int]
    signal_in: int = 0
    seen: int = 0
    model: Any = None

    def over_model(self, model):
        self.model = model
        return self

    def rank(self, queries, candidates, keep):
        vectors = self.model(TextsToEncode([[2, 9, 3], [2, 8, 3], [2, 7, 7, 3]]))
        assert vectors.shape == (3, 32)
        assert vectors.norm(dim=1).allclose(torch.ones(3))
        place = self.places[self.seen]
        self.seen += 1
        if self.seen == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return {
            "q": [
                (name, -float(rank))
                for rank, name in enumerate([*(f"s{i}" for i in range(place - 1)), "gold"])
            ]
        }


def scripted_dev(places, tmp_path, signal_in=0, **settings):
    config = DevConfig(benchmark=tmp_path, **{"every": 1} | settings)
    relevance = {"q": Relevance(gold=frozenset({"gold"}), gains={"gold": 1.0})}
    own = ScriptedRanker(places, signal_in)
    queries = [Query("q", "find", "single", "test", "dev")]
    return Dev(config, relevance, Cascade(queries, [], 20), own.over_model)


def run_with(dev, step, out, resume=False, **changes):
    config = CONFIG.model_copy(update=changes)
    return train(training_runs.accelerator(), step, config, Run(out, resume, {}, dev))


def dev_rows(out):
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    return [(row["step"], row["dev"]["MRR@10"]["mean"]) for row in rows if "dev" in row]


def test_the_best_step_is_kept_and_is_what_the_run_gives(model_folders, tmp_path):
    dev = scripted_dev(
        [5, 2, 4, 4, 3, 2], tmp_path
    )  # the second is best; the last is equal, not better
    result = run_with(
        dev, new_step(model_folders["bert"]), tmp_path / "out", keep_checkpoints=1, save_every=100
    )

    assert dev_rows(tmp_path / "out") == [
        (1, 0.2),
        (2, 0.5),
        (3, 0.25),
        (4, 0.25),
        (5, pytest.approx(1 / 3)),
        (6, 0.5),
    ]

    best = result[0].best

    assert (result[1].name, best.figures["MRR@10"].mean, result[0].step) == ("step-2", 0.5, 6)
    assert [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")] == [
        "step-2",
        "step-6",
    ]


def test_patience_ends_a_run_also_one_that_is_resumed_and_a_finished_one_is_not_taken_up_again(
    model_folders, tmp_path
):
    places = [3, 2, 4, 5, 6, 7]

    def run_on(name, places, signal_in=0, resume=False):
        dev = scripted_dev(places, tmp_path, signal_in, patience=3)
        return run_with(dev, new_step(model_folders["bert"]), tmp_path / name, resume)

    whole = run_on("whole", places)

    with raises("interrupted"):
        run_on("out", places, signal_in=3)

    resumed, again = run_on("out", places[3:], resume=True), run_on("out", [], resume=True)

    for position, checkpoint in (whole, resumed, again):
        assert (position.step, position.best, checkpoint.name) == (5, whole[0].best, "step-2")
    assert dev_rows(tmp_path / "out") == dev_rows(tmp_path / "whole")


def test_evaluating_changes_nothing_of_the_training(uninterrupted, model_folders, tmp_path):
    step = new_step(model_folders["bert_dropout"])
    run_with(scripted_dev([1] * 6, tmp_path, every=4), step, tmp_path)

    assert [number for number, _ in dev_rows(tmp_path)] == [4, 6]  # the last step is evaluated too
    assert [row for row in log_of(tmp_path) if "dev" not in row] == log_of(uninterrupted[0])
    assert identical(dict(step.named_parameters()), uninterrupted[1])
