"""The training loop: order, resuming, signals, bad gradients, the best step of a dev benchmark."""

import functools
import json
import math
import os
import signal
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training_runs
from faults import raises
from processes import run_apart
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked
from skilltrain.losses import InfoNCE
from skilltrain.metrics.measures import Relevance
from skilltrain.models import cpu_linear
from skilltrain.records import Query, Verdict
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


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a training run and the parameters after its last step."""

    out: Path
    parameters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def uninterrupted(model_folders, tmp_path_factory):
    """A training run that nothing disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted")
    return FinishedRun(out, run(new_step(model_folders["bert_dropout"]), out, resume=False))


def read_log(out):
    return [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]


def log_of(out):
    """Read the log without the speeds, which differ from run to run."""
    rows = read_log(out)
    for row in rows:
        for key in [key for key in row if key.endswith("per_second")]:
            del row[key]
    return rows


def identical(parameters, expected):
    if parameters.keys() != expected.keys():
        return False
    return all(torch.equal(parameters[name], expected[name]) for name in parameters)


def query_ids(batches):
    """Return the query ids of all lists in these batches, in order."""
    return [training_list.query_id for training_list in chain.from_iterable(batches)]


def epoch_order(lists, config):
    """Return the query ids of all epochs, in the order of training."""
    return query_ids(chain.from_iterable(step_batches(lists, config)))


def test_epoch_has_every_list_once():
    lists = training_set(NUM_LISTS).lists

    steps = list(step_batches(lists, CONFIG))

    batch_sizes = [list(map(len, batches)) for batches in steps]
    assert batch_sizes == [[4, 4], [4, 4], [4]] * 2
    order = epoch_order(lists, CONFIG)
    assert sorted(order[:20]) == sorted(order[20:]) == sorted(query_ids([lists]))


def test_each_epoch_has_its_order():
    lists = training_set(NUM_LISTS).lists

    order = epoch_order(lists, CONFIG)

    assert order[:20] != order[20:]
    assert epoch_order(lists, CONFIG) == order
    assert epoch_order(lists, CONFIG.model_copy(update={"seed": 1})) != order


def test_weight_repeats_list_in_epoch():
    lists = [
        replace(training_list, weight=weight)
        for training_list, weight in zip(
            training_set(12).lists, [1.0] * 4 + [0.5] * 4 + [2.25] * 4, strict=True
        )
    ]

    steps = list(step_batches(lists, CONFIG))

    assert len(steps) == 4  # 2 x (4 + 2 + 9) queries, 8 a step
    halves = []
    for batches in (chain(*steps[:2]), chain(*steps[2:])):
        epoch = query_ids(batches)
        counts = [epoch.count(training_list.query_id) for training_list in lists]
        assert counts[:4] == [1] * 4
        assert sorted(counts[4:8]) == [0, 0, 1, 1]
        assert sorted(counts[8:]) == [2, 2, 2, 3]
        halves.append(counts[4:8])
    assert halves[0] != halves[1], "each epoch samples anew"


def test_each_epoch_samples_negatives():
    lists = training_set(NUM_LISTS, most_candidates=6).lists
    config = CONFIG.model_copy(update={"num_negatives": 2})

    epochs = [*chain.from_iterable(chain.from_iterable(step_batches(lists, config)))]

    whole = {training_list.query_id: training_list for training_list in lists}
    is_other = []  # whether the second epoch has other negatives than the first
    for first in epochs[:NUM_LISTS]:
        training_list = whole[first.query_id]
        (second,) = [each for each in epochs[NUM_LISTS:] if each.query_id == first.query_id]
        num_negatives = training_list.is_positive.count(False)
        assert first.is_positive.count(False) == min(2, num_negatives)
        assert first.is_positive.count(True) == training_list.is_positive.count(True)
        pairs = zip(training_list.skill_ids, training_list.gains, strict=True)
        assert dict(zip(first.skill_ids, first.gains, strict=True)).items() <= dict(pairs).items()
        is_other.append(first.skill_ids != second.skill_ids)
    assert any(is_other)
    assert [*chain.from_iterable(chain.from_iterable(step_batches(lists, config)))] == epochs


def test_sampled_negatives_keep_their_columns():
    verdicts = (Verdict.REQUIRED, Verdict.IRRELEVANT, Verdict.REJECTED)
    training_list = replace(
        training_set(1).lists[0],
        skill_ids=("a", "b", "c"),
        gains=(1.0, 0.0, -1.0),
        positives=frozenset("a"),
        teacher_scores=(3.0, 2.0, 1.0),
        verdicts=verdicts,
    )

    sample = training_list.with_negatives(1, np.random.default_rng(0))

    position = {"b": 1, "c": 2}[sample.skill_ids[1]]
    assert sample.gains == (1.0, training_list.gains[position])
    assert sample.teacher_scores == (3.0, (3.0, 2.0, 1.0)[position])
    assert sample.verdicts == (Verdict.REQUIRED, verdicts[position])


def test_batches_can_have_one_origin():
    lists = [
        replace(training_list, origin="people" if number % 3 else "model")
        for number, training_list in enumerate(training_set(NUM_LISTS).lists)
    ]
    config = CONFIG.model_copy(update={"one_origin_batches": True, "epochs": 1})

    batches = [*chain.from_iterable(step_batches(lists, config))]

    assert sorted(map(len, batches)) == [1, 3, 4, 4, 4, 4]  # 7 of the model, 13 of people
    origins = [{training_list.origin for training_list in batch} for batch in batches]
    assert all(len(each) == 1 for each in origins)
    assert origins != sorted(origins, key=str), "the batches are shuffled"
    assert sorted(query_ids(batches)) == sorted(query_ids([lists]))


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))

    matrices, vectors = new_optimizer(model, CONFIG).param_groups

    assert matrices["weight_decay"] == 0.01
    assert [parameter.shape for parameter in matrices["params"]] == [(3, 2)]
    assert vectors["weight_decay"] == 0
    assert [parameter.shape for parameter in vectors["params"]] == [(3,)] * 3
    assert vectors["param_names"] == ["0.bias", "1.weight", "1.bias"]


def test_log_has_metrics_of_every_step(uninterrupted):
    rows = log_of(uninterrupted.out)

    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_learning_rate_warms_up_then_decays(uninterrupted):
    # Two of six steps warm up, at 1/3 and 2/3 of the peak; then half a cosine over four.
    cosine = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    expected = [1e-3 * share for share in (1 / 3, 2 / 3, *cosine)]

    learning_rates = [row["learning_rate"] for row in log_of(uninterrupted.out)]

    assert learning_rates == pytest.approx(expected)


def test_killed_run_resumes_bit_identically(uninterrupted, model_folders, tmp_path):
    checkpoint_folder = tmp_path / "checkpoints"
    call = functools.partial(
        training_runs.killed_in_step, 6, model_folders["bert_dropout"], tmp_path
    )
    (killed,) = run_apart(call)
    assert killed.code == -signal.SIGKILL, killed
    assert sorted(path.name for path in checkpoint_folder.iterdir()) == ["step-2", "step-4"]
    assert len(log_of(tmp_path)) == 5

    # What a kill can tear: a line of the log and a checkpoint.
    with (tmp_path / "train_log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')
    partial = checkpoint_folder / "step-6.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")
    with raises("unfinished-run"):
        run(new_step(model_folders["bert_dropout"]), tmp_path, resume=False)

    torch.manual_seed(99)  # the random state of the new process does not matter
    parameters = run(new_step(model_folders["bert_dropout"]), tmp_path, resume=True)

    assert identical(parameters, uninterrupted.parameters)
    assert log_of(tmp_path) == log_of(uninterrupted.out)


@dataclass(frozen=True)
class ProbedRun:
    """A training run that begins with a probe.

    `forwarded` are the batches that the step was called with, the probe's first. `probe_losses` are
    two losses of the probe's batch: dropout makes them differ.
    """

    out: Path
    parameters: dict[str, torch.Tensor]
    forwarded: list[Any]
    probe_losses: list[float]


@pytest.fixture(scope="module")
def probed(model_folders, tmp_path_factory):
    step = new_step(model_folders["bert_dropout"])
    forward = step.forward
    out = tmp_path_factory.mktemp("probed")
    forwarded = []
    probe_losses = []

    def recording(batch):
        forwarded.append(batch)
        if len(forwarded) == 1:  # within the probe, which restores the random states
            probe_losses.extend(forward(batch).item() for _ in range(2))
        return forward(batch)

    step.forward = recording
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "can_probe", lambda _: True)
        parameters = run(step, out, resume=False)
    return ProbedRun(out, parameters, forwarded, probe_losses)


def test_probe_runs_largest_batch(probed, model_folders):
    step = new_step(model_folders["bert_dropout"])
    batches = list(chain.from_iterable(step_batches(step.data.lists, CONFIG)))

    def num_tokens(batch):
        skill_ids = chain.from_iterable(training_list.skill_ids for training_list in batch)
        return sum(len(step.skill_token_ids[skill_id]) for skill_id in skill_ids)

    assert probed.forwarded[0] == max(batches, key=num_tokens)
    assert len(probed.forwarded) == len(batches) + 2


def test_probe_changes_nothing(uninterrupted, probed):
    assert probed.probe_losses[0] != probed.probe_losses[1], "dropout is on"
    assert identical(probed.parameters, uninterrupted.parameters)
    assert log_of(probed.out) == log_of(uninterrupted.out)


@pytest.mark.parametrize("sharded", [False, True])
def test_onednn_needs_unsharded_weights(model_folders, monkeypatch, tmp_path, sharded):
    monkeypatch.setattr(cpu_linear, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(loop, "shards_weights", lambda _: sharded)
    step = new_step(model_folders["bert"])

    loop.Training(training_runs.accelerator(), step, CONFIG, Run(tmp_path, False, {}))

    linear = {type(module) for module in step.modules() if isinstance(module, torch.nn.Linear)}
    assert linear == {torch.nn.Linear if sharded else cpu_linear.OneDnnLinear}


SPOILED = {  # pattern of the error → what spoils the step, given a weight of the model
    "the loss is not a finite number": lambda norm: norm.data.fill_(math.nan),
    "the gradient is not a finite number": lambda norm: norm.register_hook(
        lambda gradient: gradient * math.nan
    ),
    r"the gradient norm \S+ exceeds training.stop_grad_norm 0.001": lambda norm: None,
}


@pytest.mark.parametrize("message", SPOILED)
def test_bad_gradient_stops_before_update(model_folders, tmp_path, message):
    step = new_step(model_folders["bert"])
    SPOILED[message](step.model.backbone.embeddings.LayerNorm.weight)
    parameters = [parameter.detach().clone() for parameter in step.parameters()]
    config = CONFIG.model_copy(update={"stop_grad_norm": 1e-3 if "exceeds" in message else 1e4})
    names = ", ".join(query_ids(next(step_batches(step.data.lists, config))))

    with pytest.raises(
        SkilltrainError, match=f"^{message} in a step with queries {names} .look at these"
    ):
        train(training_runs.accelerator(), step, config, Run(tmp_path, False, {}))

    for parameter, expected in zip(step.parameters(), parameters, strict=True):
        assert parameter.equal(expected) or parameter.isnan().all()
    assert not (tmp_path / "checkpoints").exists()


def test_accumulation_keeps_weight_of_queries(open_encoder_of, tmp_path):
    """Eight lists as 6 + 2 queries a step, in one batch or in batches of 3, 2 or 1."""
    results = []
    for batch_size in (6, 3, 2, 1):
        encoder = open_encoder_of("bert").double()
        step = EncoderStep(encoder, InfoNCE(), training_set(8), StepSettings(200, in_batch=False))
        config = TrainingConfig(
            batch_size=batch_size, accumulation=6 // batch_size, learning_rate=1e-3
        )
        out = Run(tmp_path / str(batch_size), False, {})
        train(new_accelerator(config, quantized=False), step, config, out)
        results.append(torch.cat([parameter.detach().flatten() for parameter in step.parameters()]))

    for parameters in results[1:]:
        assert (parameters - results[0]).abs().max() < 1e-9


def test_only_second_ctrl_c_stops_at_once():
    # A test that runs in the background ignores Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    with StopRequest() as stop:
        # A batch system signals both launcher and worker.
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_second_training_on_folder_is_refused(runs, tmp_path):
    with locked(tmp_path / "out"):
        outcome = skilltrain("train", runs / "recipes" / "encoder.yaml", f"out={tmp_path}/out")

    assert "another process is writing" in outcome.error_line


# With a dev benchmark -----------------------------------------------------------------------------


@dataclass
class ScriptedRanker:
    """Ranks the gold skill at a scripted rank in each evaluation, whatever the model says."""

    ranks: list[int]
    signal_in: int = 0
    num_evaluations: int = 0
    model: Any = None

    def over_model(self, model):
        self.model = model
        return self

    def rank(self, queries, candidates, keep):
        vectors = self.model(TextsToEncode([[2, 9, 3], [2, 8, 3], [2, 7, 7, 3]]))
        assert vectors.shape == (3, 32)
        assert vectors.norm(dim=1).allclose(torch.ones(3))

        rank = self.ranks[self.num_evaluations]
        self.num_evaluations += 1
        if self.num_evaluations == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        ranking = [(f"s{i}", -float(i)) for i in range(rank - 1)]
        return {"q": [*ranking, ("gold", -float(rank))]}


def scripted_dev(ranks, tmp_path, signal_in=0, **settings):
    """Return a dev benchmark of one query that ranks as `ScriptedRanker` does."""
    config = DevConfig(benchmark=tmp_path, **{"every": 1} | settings)
    relevance = {"q": Relevance(gold=frozenset({"gold"}), gains={"gold": 1.0})}
    ranker = ScriptedRanker(ranks, signal_in)
    queries = [Query("q", "find", "single", "test", "dev")]
    return Dev(config, relevance, Cascade(queries, [], 20), ranker.over_model)


def run_with(dev, step, out, resume=False, **changes):
    config = CONFIG.model_copy(update=changes)
    return train(training_runs.accelerator(), step, config, Run(out, resume, {}, dev))


def dev_rows(out):
    """Return the step and the MRR of each evaluation."""
    return [(row["step"], row["dev"]["MRR@10"]["mean"]) for row in read_log(out) if "dev" in row]


def test_run_returns_best_step(model_folders, tmp_path):
    # The second step is the best; the last is equal, not better.
    dev = scripted_dev([5, 2, 4, 4, 3, 2], tmp_path)
    step = new_step(model_folders["bert"])

    position, checkpoint = run_with(dev, step, tmp_path / "out", keep_checkpoints=1, save_every=100)

    rates = [0.2, 0.5, 0.25, 0.25, pytest.approx(1 / 3), 0.5]
    assert dev_rows(tmp_path / "out") == list(enumerate(rates, 1))
    assert checkpoint.name == "step-2"
    assert position.best.figures["MRR@10"].mean == 0.5
    assert position.step == 6
    saved = [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")]
    assert saved == ["step-2", "step-6"]


RANKS = [3, 2, 4, 5, 6, 7]  # of the gold skill: the second step is the best


def train_with_patience(model_folders, out, ranks, signal_in=0, resume=False):
    """Train with a patience of three evaluations; return the position and the best checkpoint."""
    dev = scripted_dev(ranks, out, signal_in, patience=3)
    return run_with(dev, new_step(model_folders["bert"]), out, resume)


@dataclass(frozen=True)
class DevRun:
    """A finished training run with a dev benchmark."""

    out: Path
    position: Any
    checkpoint: Path


@pytest.fixture(scope="module")
def patient_run(model_folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("patient")
    return DevRun(out, *train_with_patience(model_folders, out, RANKS))


def test_patience_ends_run(patient_run):
    assert patient_run.position.step == 5
    assert patient_run.checkpoint.name == "step-2"


def test_patience_ends_resumed_run(patient_run, model_folders, tmp_path):
    with raises("interrupted"):
        train_with_patience(model_folders, tmp_path, RANKS, signal_in=3)

    position, checkpoint = train_with_patience(model_folders, tmp_path, RANKS[3:], resume=True)

    assert position.step == 5
    assert position.best == patient_run.position.best
    assert checkpoint.name == "step-2"
    assert dev_rows(tmp_path) == dev_rows(patient_run.out)


def test_finished_run_is_not_continued(patient_run, model_folders):
    rows = dev_rows(patient_run.out)

    position, checkpoint = train_with_patience(model_folders, patient_run.out, [], resume=True)

    assert position.step == 5
    assert position.best == patient_run.position.best
    assert checkpoint.name == "step-2"
    assert dev_rows(patient_run.out) == rows


def test_evaluation_leaves_training_unchanged(uninterrupted, model_folders, tmp_path):
    step = new_step(model_folders["bert_dropout"])

    run_with(scripted_dev([1] * 6, tmp_path, every=4), step, tmp_path)

    assert [number for number, _ in dev_rows(tmp_path)] == [4, 6]  # the last step is evaluated too
    assert [row for row in log_of(tmp_path) if "dev" not in row] == log_of(uninterrupted.out)
    assert identical(dict(step.named_parameters()), uninterrupted.parameters)
