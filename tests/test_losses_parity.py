"""Losses equal those of sentence-transformers on the same scores and vectors."""

import math
from itertools import product

import pytest
import torch
from sentence_transformers.cross_encoder import losses as reranker_losses
from sentence_transformers.sentence_transformer import losses as encoder_losses

from skilltrain.losses import (
    KL,
    InfoNCE,
    ListNet,
    ListwiseCE,
    MarginMSE,
    Matryoshka,
    PointwiseBCE,
    RankNet,
    ScoredBatch,
)
from skilltrain.records import Skill
from skilltrain.training.scores import ScoreContext, encoder_scores
from skilltrain.training.training_set import TrainingList, TrainingSet

GTE = ("query_to_skill", "query_to_query", "skill_to_query", "skill_to_skill")
REFERENCE_DIRECTIONS = {
    "query_to_skill": "query_to_doc",
    "skill_to_query": "doc_to_query",
    "query_to_query": "query_to_query",
    "skill_to_skill": "doc_to_doc",
}


class Scores:
    """A stand-in for a model of sentence-transformers that returns these scores."""

    num_labels = 1
    device = torch.device("cpu")
    training = True

    def __init__(self, scores):
        self.scores = scores

    def preprocess(self, pairs, prompt=None, task=None):
        return {}

    def __call__(self, tokens):
        return {"scores": self.scores}


def lists(sizes, seed=0, grades=(1.0,)):
    """Return random lists of these lengths as one padded batch.

    The first candidates of each list have the gains `grades`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(sizes), max(sizes))
    scores = torch.randn(shape, generator=generator)
    valid = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    gains = torch.zeros(shape)
    gains[:, : len(grades)] = torch.tensor(grades)
    teacher = torch.randn(shape, generator=generator)
    return ScoredBatch(scores.requires_grad_(), gains, valid, teacher)


def reference_loss(loss_class, batch, labels, **settings):
    """Compute a listwise loss of sentence-transformers and its gradient on the scores."""
    sizes = batch.valid.sum(1).tolist()
    columns = [[*map(str, range(size))] for size in sizes]
    targets = [row[:size] for row, size in zip(labels, sizes, strict=True)]
    loss = loss_class(Scores(batch.scores[batch.valid]), mini_batch_size=-1, **settings)
    return with_gradient(loss([["q"] * len(sizes), columns], targets), batch)


def with_gradient(value, batch):
    """Return a loss and its gradient on the scores."""
    return value, torch.autograd.grad(value, batch.scores)[0]


def assert_same(loss, batch, expected, factor):
    """Check that our loss and gradient are `factor` times the expected ones."""
    expected_value, expected_gradient = expected
    value, gradient = with_gradient(loss(batch), batch)
    assert value.item() == pytest.approx(factor * expected_value.item(), rel=1e-5)
    assert torch.allclose(gradient, factor * expected_gradient, rtol=1e-4, atol=1e-6)


# Rerankers ----------------------------------------------------------------------------------------


GRADES = (1.0, 0.5, 0.5)
# Our loss, the batch, the name and settings of their loss, how its labels follow from the gains,
# and the factor between the two losses.
CASES = [
    (ListNet(), lists((6, 4, 5), grades=GRADES), "ListNetLoss", {}, torch.log, 3),
    (ListwiseCE(), lists((6, 4)), "ListNetLoss", {}, torch.log, 2),
    (
        RankNet(temperature=0.25),
        lists((7,), grades=GRADES),
        "RankNetLoss",
        {"reduction_log": "natural", "sigma": 4},
        torch.clone,
        1,
    ),
    (RankNet(), lists((5, 5, 5)), "RankNetLoss", {}, torch.clone, 3 * math.log(2)),
]


@pytest.mark.parametrize(("ours", "batch", "name", "settings", "labels", "factor"), CASES)
def test_listwise_losses(ours, batch, name, settings, labels, factor):
    reference = getattr(reranker_losses, name)

    expected = reference_loss(reference, batch, labels(batch.gains), **settings)

    assert_same(ours, batch, expected, factor)


def test_pointwise_loss_of_one_list():
    batch = lists((9,), grades=(1.0, 1.0))
    loss = reranker_losses.BinaryCrossEntropyLoss.__new__(reranker_losses.BinaryCrossEntropyLoss)
    torch.nn.Module.__init__(loss)  # its own constructor needs a whole model
    loss.model = Scores(batch.scores[0])
    loss.activation_fn = torch.nn.Identity()
    loss.bce_with_logits_loss = torch.nn.BCEWithLogitsLoss()

    expected = with_gradient(loss([["q"] * 9, ["s"] * 9], batch.gains[0]), batch)

    assert_same(PointwiseBCE(), batch, expected, 1)


TAUGHT = [
    (
        KL(teacher_temperature=2.0),
        encoder_losses.DistillKLDivLoss(None, teacher_temperature=2.0),
        2,
    ),
    (KL(temperature=0.5), encoder_losses.DistillKLDivLoss(None, student_temperature=0.5), 8),
    (MarginMSE(), encoder_losses.MarginMSELoss(None), 2),
]


@pytest.mark.parametrize(("ours", "reference", "factor"), TAUGHT)
def test_distillation_losses(ours, reference, factor):
    batch = lists((6, 6))
    # One dimension: the query vector is 1, so a skill vector is its score.
    query = torch.ones(len(batch.scores), 1)
    skills = [column.unsqueeze(1) for column in batch.scores.T]

    value = reference.compute_loss_from_embeddings([query, *skills], batch.teacher_scores)

    assert_same(ours, batch, with_gradient(value, batch), factor)


# Encoders: the same vectors through our scores and labels -----------------------------------------


def vectors(count, seed, dim=12):
    """Return random unit vectors: [count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(values, dim=1).requires_grad_()


NUM_QUERIES = 4
SKILL_IDS = [f"{kind}{number}" for kind, number in product(("p", "n0-", "n1-"), range(NUM_QUERIES))]
# Each query has a positive and two negatives of its own.
LISTS = tuple(
    TrainingList(
        f"q{number}",
        f"query {number}",
        (f"p{number}", f"n0-{number}", f"n1-{number}"),
        (1.0, 0.0, 0.0),
        frozenset({f"p{number}"}),
    )
    for number in range(NUM_QUERIES)
)


def our_loss(loss, queries, skills):
    """Compute our loss on vectors of the queries and of the skills, in the order of SKILL_IDS."""
    pool = {skill_id: Skill(skill_id, skill_id, "", "") for skill_id in SKILL_IDS}
    context = ScoreContext.of(TrainingSet(LISTS, pool), loss, in_batch=True)
    scored = encoder_scores(LISTS, LISTS, queries, queries, SKILL_IDS, skills, context)
    return loss(scored)


SYMMETRIC = ("query_to_skill", "skill_to_query")


@pytest.mark.parametrize(
    ("directions", "partition"),
    [
        (SYMMETRIC, "joint"),
        (GTE[:2], "joint"),
        (GTE[::3], "joint"),
        (GTE, "joint"),
        (SYMMETRIC, "per_direction"),
    ],
)
def test_infonce_in_every_direction(directions, partition):
    queries = vectors(4, 1)
    skills = vectors(12, 2)
    names = tuple(map(REFERENCE_DIRECTIONS.get, directions))
    reference = encoder_losses.MultipleNegativesRankingLoss(
        None, scale=10.0, directions=names, partition_mode=partition
    )
    columns = [queries, *skills.split(4)]
    expected = 4 * reference.compute_loss_from_embeddings(columns, torch.zeros(4))
    expected_gradients = torch.autograd.grad(expected, (queries, skills), retain_graph=True)

    infonce = InfoNCE(temperature=0.1, directions=directions, partition=partition)
    value = our_loss(infonce, queries, skills)

    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = torch.autograd.grad(value, (queries, skills))
    for gradient, expected_gradient, inputs in zip(
        gradients, expected_gradients, (queries, skills), strict=True
    ):
        # Theirs goes through a normalisation, so it has no part along the vector.
        across = gradient - (gradient * inputs).sum(1, keepdim=True) * inputs
        assert torch.allclose(across, expected_gradient, rtol=1e-9, atol=1e-12)


class Vectors(torch.nn.Module):
    """A stand-in for an encoder of sentence-transformers.

    Column 0 of a batch has the vectors of the queries, column i those of the i-th skills.
    """

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def get_embedding_dimension(self):
        return self.columns[0].shape[1]

    def forward(self, features):
        return {"sentence_embedding": self.columns[int(features["column"])]}


@pytest.mark.parametrize(
    "inner", [InfoNCE(temperature=0.05), InfoNCE(directions=GTE)], ids=["one", "gte"]
)
def test_matryoshka(inner):
    queries = vectors(4, 3)
    skills = vectors(12, 4)
    model = Vectors([queries, *skills.split(4)])
    names = tuple(map(REFERENCE_DIRECTIONS.get, inner.directions))
    inner_loss = encoder_losses.MultipleNegativesRankingLoss(model, directions=names)
    reference = encoder_losses.MatryoshkaLoss(model, inner_loss, [12, 6, 3])
    expected = 4 * reference([{"column": torch.tensor(i)} for i in range(4)], torch.zeros(4))

    value = our_loss(Matryoshka(loss=inner, dims=(3, 6, 12)), queries, skills)

    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
