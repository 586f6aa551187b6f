"""The loop with a dev benchmark: the best step is kept, patience ends a run, and a resumed run takes the same turns."""

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import training_runs
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.records import Query
from skilltrain.retrieval.cascade import Cascade
from skilltrain.training.checkpoint import best_checkpoint, checkpoints
from skilltrain.training.dev import Dev
from skilltrain.training.loop import Run, train
from skilltrain.training.settings import DevConfig
from skilltrain.training.steps import EncoderStep, Pairs, RerankerStep, StepSettings, Texts
from training_data import training_set
from training_runs import CONFIG, new_step

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@dataclass
class ScriptedRanker:
    """Ranks the gold skill at a place written down beforehand for each evaluation, whatever the model says."""

    places: list[int]
    signal_in: int = 0
    seen: int = 0
    model: Any = None

    def rank(self, queries, candidates, keep):
        vectors = self.model(Texts([[2, 9, 3], [2, 8, 3], [2, 7, 7, 3]]))
        assert vectors.shape == (3, 32) and vectors.norm(dim=1).allclose(torch.ones(3))
        place = self.places[self.seen]
        self.seen += 1
        if self.seen == self.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"q": [(name, -float(rank)) for rank, name in enumerate([*(f"s{i}" for i in range(place - 1)), "gold"])]}


def scripted_dev(places, tmp_path, signal_in=0, **settings):
    config = DevConfig(benchmark=tmp_path, **{"every": 1} | settings)
    relevance = {"q": Relevance(gold=frozenset({"gold"}), gains={"gold": 1.0})}
    own = ScriptedRanker(places, signal_in)
    queries = [Query("q", "find", "single", "test", "dev")]
    return Dev(config, relevance, Cascade(queries, [], 20, own), own)


def run(step, out, dev, resume=False, **changes):
    config = CONFIG.model_copy(update=changes)
    return train(training_runs.accelerator(), step, step.data.lists, config, Run(out, resume, {}, dev))


def dev_rows(out):
    rows = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    return [(row["step"], row["dev"]["MRR@10"]["mean"]) for row in rows if "dev" in row]


def test_the_best_step_is_kept_and_is_what_the_run_gives(model_folders, tmp_path):
    dev = scripted_dev([5, 2, 4, 4, 3, 2], tmp_path)  # the second is best; the last is equal, not better
    result = run(new_step(model_folders["bert"]), tmp_path / "out", dev, keep_checkpoints=1, save_every=100)
    assert dev_rows(tmp_path / "out") == [(1, 0.2), (2, 0.5), (3, 0.25), (4, 0.25), (5, pytest.approx(1 / 3)), (6, 0.5)]
    assert (
        result.checkpoint.name == "step-2"
        and result.position.best.figures["MRR@10"].mean == 0.5
        and result.position.step == 6
    )
    assert [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")] == ["step-2", "step-6"]


def test_patience_ends_the_run_and_a_finished_run_is_not_taken_up_again(model_folders, tmp_path):
    dev = scripted_dev([2, 3, 4, 1, 1, 1], tmp_path, patience=2)
    result = run(new_step(model_folders["bert"]), tmp_path / "out", dev)
    assert result.position.step == 3 and result.checkpoint.name == "step-1"
    again = run(new_step(model_folders["bert"]), tmp_path / "out", scripted_dev([], tmp_path, patience=2), resume=True)
    assert again.position.step == 3 and again.checkpoint.name == "step-1"
    assert again.position.best == result.position.best


@pytest.mark.parametrize("stopped_in", [2, 4])
def test_a_resumed_run_knows_what_was_best(model_folders, tmp_path, stopped_in):
    places = [3, 2, 4, 5, 6, 7]
    whole = run(new_step(model_folders["bert"]), tmp_path / "whole", scripted_dev(places, tmp_path, patience=3))
    broken_off = scripted_dev(places, tmp_path, signal_in=stopped_in, patience=3)
    with pytest.raises(SkilltrainError, match=f"interrupted after step {stopped_in} of 6; a checkpoint is saved"):
        run(new_step(model_folders["bert"]), tmp_path / "out", broken_off)
    rest = scripted_dev(places[stopped_in:], tmp_path, patience=3)
    resumed = run(new_step(model_folders["bert"]), tmp_path / "out", rest, resume=True)
    assert whole.position.step == resumed.position.step == 5
    assert resumed.checkpoint.name == whole.checkpoint.name == best_checkpoint(tmp_path / "out" / "checkpoints").name
    assert dev_rows(tmp_path / "out") == dev_rows(tmp_path / "whole")


def test_evaluating_changes_nothing_of_the_training(model_folders, tmp_path):
    with_dev, without = new_step(model_folders["bert_dropout"]), new_step(model_folders["bert_dropout"])
    run(with_dev, tmp_path / "with", scripted_dev([1] * 6, tmp_path, every=4))
    assert [step for step, _ in dev_rows(tmp_path / "with")] == [4, 6]  # the last step is evaluated too
    AcceleratorState._reset_state(reset_partial_state=True)
    run(without, tmp_path / "without", None)
    assert all(torch.equal(*both) for both in zip(with_dev.parameters(), without.parameters(), strict=True))


def test_a_step_module_gives_vectors_and_scores_for_evaluation(open_encoder_of, open_reranker_of):
    encoder, reranker, data = open_encoder_of("bert"), open_reranker_of("qwen3_reranker"), training_set(4)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(60)).eval()
    texts = encoder.tokenize_queries([one.query for one in data.lists])
    assert torch.allclose(step(Texts(texts)), torch.cat([encoder([text]) for text in texts]), atol=1e-6)
    ranker = RerankerStep(reranker, ListwiseCE(), data, StepSettings(400)).eval()
    pairs = [ranker.pairs(one) for one in data.lists]
    one_by_one = torch.cat([reranker([pair]) for row in pairs for pair in row])
    assert torch.allclose(ranker(Pairs(pairs)), one_by_one, atol=1e-5)
