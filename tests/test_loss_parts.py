"""Sums of losses, losses on vectors, and the choice of negatives."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import training_runs
from skilltrain.losses import KL, EncoderLoss, InfoNCE, ListwiseCE, SpreadOut, Vectors
from skilltrain.losses.weighted_sum import WeightedSum, flatten_loss
from skilltrain.training.loop import Run, train
from skilltrain.training.scores import encoder_scores
from skilltrain.training.steps import RerankerStep, StepSettings
from skilltrain.training.train import TrainEncoder, TrainReranker
from test_losses import L1E, L2, LE1, batch
from test_scores import IDS, TAUGHT, TAUGHT_TOO, context, unit
from training_data import training_set
from training_runs import CONFIG, new_step

OWN_CODE = Path(__file__).parents[1] / "examples" / "own_code"


def sum_of(**parts):
    """Return a sum of losses, given as (weight, loss) by name."""
    values = {
        name: {"weight": weight, "loss": loss.model_dump()}
        for name, (weight, loss) in parts.items()
    }
    loss = TypeAdapter(EncoderLoss).validate_python({"name": "sum", "parts": values})
    assert isinstance(loss, WeightedSum)
    return loss


def scored_by(loss):
    """Return a batch of two lists with teacher scores, as `loss` needs them."""
    lists = [TAUGHT, TAUGHT_TOO]
    score_context = context(*lists, loss=loss)
    return encoder_scores(lists, lists, unit(2, 0), unit(2, 0), IDS, unit(5, 1), score_context)


def test_sum_weights_its_parts():
    loss = sum_of(first=(1, ListwiseCE()), second=(0.5, ListwiseCE(temperature=0.5)))

    # The margin is 1, or 2 at the temperature 0.5.
    value = loss(batch([[1, 0]], [[1, 0]]))

    assert value.item() == pytest.approx(LE1 + 0.5 * math.log(1 + math.exp(-2)))


def test_part_without_teacher_keeps_its_candidates():
    loss = sum_of(labels=(1, InfoNCE()), teacher=(1, KL(temperature=0.05)))

    value = loss(scored_by(loss))

    alone = [part.loss(scored_by(part.loss)).item() for part in loss.parts.values()]
    assert value.item() == pytest.approx(sum(alone), rel=1e-12)


def test_sum_in_recipe_needs_what_its_parts_need():
    loss = sum_of(teacher=(1, KL()), spread=(1, SpreadOut()))

    assert loss.needs == replace(SpreadOut().needs, teacher_scores=True)
    assert [each.name for each in flatten_loss(loss)] == ["sum", "kl", "spread_out"]


@pytest.mark.usefixtures("fresh_accelerate")
def test_log_shows_parts_of_sum(model_folders, tmp_path):
    step = new_step(model_folders["bert"])
    step.loss = sum_of(labels=(1, InfoNCE()), spread=(0.5, SpreadOut()))
    step.context = replace(step.context, needs=step.loss.needs)

    train(training_runs.accelerator(), step, CONFIG, Run(tmp_path, False, {}))

    rows = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    totals = [row["loss/labels"] + 0.5 * row["loss/spread"] for row in rows]
    assert totals == pytest.approx([row["loss"] for row in rows], rel=1e-5)


def test_rank_without_list_records_zero(open_reranker_of, monkeypatch):
    data = training_set(1)
    loss = sum_of(labels=(1, ListwiseCE()))
    step = RerankerStep(open_reranker_of("bert_reranker"), loss, data, StepSettings(150))
    monkeypatch.setattr("skilltrain.training.steps.rank_and_world", lambda: (1, 2))

    step(data.lists).backward()

    assert step.scalars["labels"].item() == 0


def test_spread_out_by_hand():
    # The queries have a cosine of 0.5. Their positives are orthogonal.
    queries = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]])
    vectors = Vectors(queries, torch.eye(2), queries)
    others = ~torch.eye(2, dtype=torch.bool)
    negatives = {"query_to_query": others, "skill_to_skill": others}
    scored = batch(vectors.scores.tolist(), [[1, 0], [0, 1]])

    value = SpreadOut()(replace(scored, optional_vectors=vectors, negatives=negatives))

    assert value.item() == pytest.approx(0.25 + 0.25)


@pytest.mark.parametrize(
    ("negatives", "expected"),
    # All scores are equal. The second negative is another list's.
    [("all", math.log(3)), ("own", L2), ("in_batch", L2)],
)
def test_infonce_chooses_negatives(negatives, expected):
    own = torch.tensor([[True, True, False]])
    scored = replace(batch([[0, 0, 0]], [[1, 0, 0]]), own=own)

    value = InfoNCE(negatives=negatives)(scored)

    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_chosen_negatives_differ_by_score():
    own = torch.tensor([[True, True, False]])
    scored = replace(batch([[0, 1, -1]], [[1, 0, 0]]), own=own)

    values = [
        InfoNCE(temperature=1, negatives=negatives)(scored).item()
        for negatives in ("own", "in_batch")
    ]

    assert values == pytest.approx([L1E, LE1], abs=1e-6)


def test_candidates_of_list_are_own():
    scored = scored_by(InfoNCE())

    assert scored.is_own.tolist() == [
        [True, True, False, False, True],
        [False, False, True, False, True],
    ]


def test_aligned_loss_reads_stored_vectors(tmp_path, monkeypatch):
    """The example compares vectors with those of a teacher, by id."""
    monkeypatch.syspath_prepend(OWN_CODE)
    stored = {f"query {id}": np.eye(8)[0] for id in ("q1", "q2")}
    stored |= {f"skill {id}": np.eye(8)[0] for id in IDS}
    np.savez(tmp_path / "teacher.npz", **stored)
    values = {"name": "align:Align", "teacher": str(tmp_path / "teacher.npz")}
    loss = TypeAdapter(EncoderLoss).validate_python(values)
    scored = scored_by(loss)

    value = loss(scored)

    queries = scored.vectors.queries[:, 0]
    positives = scored.vectors.skills[[0, 2], 0]  # a and c
    assert value.item() == pytest.approx((4 - queries.sum() - positives.sum()).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (TrainEncoder, {"stage": "train_encoder", "in_batch_negatives": False}),
        (TrainReranker, {"stage": "train_reranker"}),
    ],
)
def test_loss_without_negatives_is_refused(stage, settings):
    infonce = {"name": "infonce", "negatives": "in_batch"}
    loss = {"name": "sum", "parts": {"labels": {"loss": infonce}}}
    data = {"pool": "p", "lists": "l"}
    recipe = {"model": {"source": "m"}, "data": data, "loss": loss, "out": "o"}

    with pytest.raises(ValidationError, match="in_batch leaves no negatives"):
        stage.model_validate(recipe | settings)
