import json
import math
import signal
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as multiprocessing

import training_runs
from skilltrain import runs
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked
from skilltrain.losses import InfoNCE
from skilltrain.models.encoder import EncoderConfig
from skilltrain.stages import STAGES
from skilltrain.training.engine import new_accelerator
from skilltrain.training.loop import Run, Stop, new_optimizer, num_steps, schedule, step_batches, train
from skilltrain.training.settings import TrainEncoderConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, StepSettings
from skilltrain.training.training_set import ListsSource
from training_data import training_set
from training_runs import CONFIG, NUM_LISTS, new_step, run, signal_in

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def uninterrupted(model_folders, tmp_path_factory):
    """(the folder, the parameters) of a training that nothing disturbed."""
    out = tmp_path_factory.mktemp("uninterrupted")
    return out, run(new_step(model_folders["bert_dropout"]), out, resume=False)


def log_of(out):
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith("per_second")} for row in rows]


def identical(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_list_once_an_epoch_in_an_order_of_seed_and_epoch():
    lists = training_set(NUM_LISTS).lists
    steps = list(step_batches(lists, CONFIG))
    assert len(steps) == num_steps(lists, CONFIG) == 6
    assert [[len(batch) for batch in batches] for batches in steps] == [[4, 4], [4, 4], [4]] * 2
    order = [one.query_id for batches in steps for batch in batches for one in batch]
    assert sorted(order[:20]) == sorted(order[20:]) == sorted(one.query_id for one in lists)
    assert order[:20] != order[20:]
    again = [one.query_id for batches in step_batches(lists, CONFIG) for batch in batches for one in batch]
    other = step_batches(lists, CONFIG.model_copy(update={"seed": 1}))
    assert order == again != [one.query_id for batches in other for batch in batches for one in batch]


def test_an_epoch_sees_a_list_as_often_as_its_weight_says():
    weights = [1.0] * 4 + [0.5] * 4 + [2.25] * 4
    lists = [replace(one, weight=weight) for one, weight in zip(training_set(12).lists, weights, strict=True)]
    assert num_steps(lists, CONFIG) == 4  # 2 x (4 + 2 + 9) queries, 8 a step
    steps = list(step_batches(lists, CONFIG))
    epochs = [[one for batches in part for batch in batches for one in batch] for part in (steps[:2], steps[2:])]
    for seen in epochs:
        counts = [seen.count(one) for one in lists]
        assert counts[:4] == [1] * 4 and sorted(counts[4:8]) == [0, 0, 1, 1] and sorted(counts[8:]) == [2, 2, 2, 3]
    halves = [{one.query_id for one in seen if one.weight == 0.5} for seen in epochs]
    assert halves[0] != halves[1]


def test_the_schedule_by_hand():
    # Ten steps, a fifth of them warming up: 1/3 and 2/3 of the peak, then half a cosine over eight steps.
    values = [schedule(step, 10, 0.2) for step in range(10)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert values[6] == pytest.approx(0.5) and values[9] == pytest.approx(0.5 * (1 + math.cos(7 * math.pi / 8)))
    assert schedule(0, 10, 0.0) == 1 and schedule(10, 10, 0.2) == 0


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    decayed, kept = new_optimizer(model, 1e-3, 0.01).param_groups
    assert [p.shape for p in decayed["params"]] == [(3, 2)] and decayed["weight_decay"] == 0.01
    assert [p.shape for p in kept["params"]] == [(3,), (3,), (3,)] and kept["weight_decay"] == 0


def test_the_log_holds_each_steps_figures(uninterrupted):
    rows = log_of(uninterrupted[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # One of six steps warms up, at half the peak; then half a cosine over five.
    shares = [0.5, *(0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5))]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * share for share in shares])
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("number", [1, 4])
def test_ctrl_c_saves_a_checkpoint_and_the_resumed_run_is_bit_identical(uninterrupted, model_folders, tmp_path, number):
    step = signal_in(new_step(model_folders["bert_dropout"]), number, signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SkilltrainError) as error:
        run(step, tmp_path, resume=False)
    assert str(error.value) == (
        f"{tmp_path}: interrupted after step {number} of 6; a checkpoint is saved "
        "(run the same command with --resume to go on)"
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "checkpoints" / f"step-{number}").is_dir()
    torch.manual_seed(99)  # whatever the random state of the new process
    assert identical(run(new_step(model_folders["bert_dropout"]), tmp_path, resume=True), uninterrupted[1])
    assert log_of(tmp_path) == log_of(uninterrupted[0])


def test_a_run_killed_with_9_resumes_bit_identically(uninterrupted, model_folders, tmp_path):
    arguments = (6, model_folders["bert_dropout"], tmp_path)
    with pytest.raises(multiprocessing.ProcessExitedException, match="SIGKILL"):
        multiprocessing.spawn(training_runs.killed_in_step, args=arguments, nprocs=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert len(log_of(tmp_path)) == 5
    with (tmp_path / "train_log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')  # torn by the kill
    half = tmp_path / "checkpoints" / "step-6.partial"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    assert identical(run(new_step(model_folders["bert_dropout"]), tmp_path, resume=True), uninterrupted[1])
    assert log_of(tmp_path) == log_of(uninterrupted[0])


def test_dropout_is_on_while_training(model_folders, tmp_path):
    step, losses = new_step(model_folders["bert_dropout"]), []
    forward = step.forward

    def twice(batch):
        losses.extend(forward(batch).item() for _ in range(2))
        return forward(batch)

    step.forward = twice
    result = train(training_runs.accelerator(), step, step.data.lists[:4], CONFIG, Run(tmp_path, False, {}))
    assert losses[0] != losses[1]
    assert (result.position.step, result.position.queries) == (2, 8)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-2"


def test_an_earlier_runs_checkpoints_are_not_overwritten(model_folders, tmp_path):
    with pytest.raises(SkilltrainError, match="interrupted"):
        run(signal_in(new_step(model_folders["bert"]), 1, signal.SIGINT), tmp_path, resume=False)
    with pytest.raises(SkilltrainError, match="checkpoints of an earlier run lie here"):
        run(new_step(model_folders["bert"]), tmp_path, resume=False)


SPOILED = {  # what is done to a step, and what is said of it
    "the loss is not a finite number": lambda norm: norm.data.fill_(math.nan),
    "the gradient is not a finite number": lambda norm: norm.register_hook(lambda gradient: gradient * math.nan),
    r"the gradient norm \S+ exceeds training.stop_grad_norm 0.001": lambda norm: None,
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_bad_gradient_stops_before_the_step_and_names_its_queries(model_folders, tmp_path, message):
    step = new_step(model_folders["bert"])
    SPOILED[message](step.model.backbone.embeddings.LayerNorm.weight)
    before = [parameter.detach().clone() for parameter in step.parameters()]
    config = CONFIG.model_copy(update={"stop_grad_norm": 1e-3 if "exceeds" in message else 1e4})
    first = [one.query_id for batch in next(iter(step_batches(step.data.lists, CONFIG))) for one in batch]
    with pytest.raises(SkilltrainError, match=f"^{message} in a step with queries {', '.join(first)} .look at these"):
        train(training_runs.accelerator(), step, step.data.lists, config, Run(tmp_path, False, {}))
    assert all(one.equal(other) or one.isnan().all() for one, other in zip(step.parameters(), before, strict=True))
    assert not (tmp_path / "checkpoints").exists()


def test_accumulation_does_not_change_what_a_query_weighs(open_encoder_of, tmp_path):
    """Twenty lists as 6 + 6 + 6 + 2 queries a step, in one batch or in pieces of 3, 2 or 1."""
    results = []
    for batch_size, accumulation in ((6, 1), (3, 2), (2, 3), (1, 6)):
        encoder, data = open_encoder_of("bert").double(), training_set(NUM_LISTS)
        step = EncoderStep(encoder, InfoNCE(), data, StepSettings(200, in_batch=False))
        config = TrainingConfig(
            batch_size=batch_size, accumulation=accumulation, learning_rate=1e-3, precision="float32"
        )
        out = Run(tmp_path / str(batch_size), False, {})
        train(new_accelerator(config, quantized=False), step, data.lists, config, out)
        results.append(torch.cat([parameter.detach().flatten() for parameter in step.parameters()]))
    for other in results[1:]:
        assert (other - results[0]).abs().max() < 1e-9


def test_only_a_second_ctrl_c_stops_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a batch system that signals launcher and worker both
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_two_trainings_on_one_out_are_kept_apart(tmp_path):
    data = ListsSource(pool=tmp_path / "pool", lists=tmp_path / "lists")
    config = TrainEncoderConfig(stage="train_encoder", model=EncoderConfig(source="m"), data=data, out=tmp_path / "out")
    with (
        locked(tmp_path / "out"),
        pytest.raises(SkilltrainError, match=r"another process is writing"),
    ):
        runs._train(STAGES["train_encoder"], config, {}, True)
    assert not (tmp_path / "out").exists()
