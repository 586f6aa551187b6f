"""Against sentence-transformers on the same scores and vectors, wherever the definition is the same."""

import math

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
THEIRS = {
    "query_to_skill": "query_to_doc",
    "skill_to_query": "doc_to_query",
    "query_to_query": "query_to_query",
    "skill_to_skill": "doc_to_doc",
}


class Scores:
    """Stands where sentence-transformers has its model: gives back the scores it was made with."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self, scores):
        self.scores, self.training = scores, True

    def preprocess(self, pairs, prompt=None, task=None):
        return {}

    def __call__(self, tokens):
        return {"scores": self.scores}


def lists(sizes, seed=0, grades=(1.0,)):
    """Lists of unequal length as one padded batch; their first candidates have the grades."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(sizes), max(sizes), generator=generator)
    valid = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    gains = torch.zeros(len(sizes), max(sizes))
    gains[:, : len(grades)] = torch.tensor(grades)
    teacher = torch.randn(len(sizes), max(sizes), generator=generator)
    return ScoredBatch(scores.requires_grad_(), gains, valid, teacher)


def theirs(loss_class, batch, labels, **settings):
    """Their loss and its gradient on the scores."""
    sizes = batch.valid.sum(1).tolist()
    columns = [[f"{i}" for i in range(size)] for size in sizes]
    targets = [row[:size] for row, size in zip(labels, sizes, strict=True)]
    loss = loss_class(Scores(batch.scores[batch.valid]), mini_batch_size=-1, **settings)
    return with_gradient(loss([["q"] * len(sizes), columns], targets), batch)


def with_gradient(value, batch):
    return value, torch.autograd.grad(value, batch.scores)[0]


def assert_same(loss, batch, expected, factor):
    """Our loss and gradient are `factor` times theirs."""
    value, gradient = expected
    ours = loss(batch)
    assert ours.item() == pytest.approx(factor * value.item(), rel=1e-5)
    assert torch.allclose(
        torch.autograd.grad(ours, batch.scores)[0], factor * gradient, rtol=1e-4, atol=1e-6
    )


# Rerankers ----------------------------------------------------------------------------------------


GRADES = (1.0, 0.5, 0.5)
CASES = [  # ours, the lists, their loss with its settings, its labels, and what theirs is to be multiplied by
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
def test_a_reranker_s_loss(ours, batch, name, settings, labels, factor):
    expected = theirs(getattr(reranker_losses, name), batch, labels(batch.gains), **settings)
    assert_same(ours, batch, expected, factor)


def test_pointwise_on_one_list():
    batch = lists((9,), grades=(1.0, 1.0))
    loss = reranker_losses.BinaryCrossEntropyLoss.__new__(reranker_losses.BinaryCrossEntropyLoss)
    torch.nn.Module.__init__(loss)  # its own constructor asks for a whole model
    loss.model, loss.activation_fn = Scores(batch.scores[0]), torch.nn.Identity()

    loss.bce_with_logits_loss = torch.nn.BCEWithLogitsLoss()

    assert_same(
        PointwiseBCE(), batch, with_gradient(loss([["q"] * 9, ["s"] * 9], batch.gains[0]), batch), 1
    )


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
def test_distillation(ours, reference, factor):
    """A query vector (1) and skill vectors (score) have the score as their dot product."""
    batch = lists((6, 6))
    columns = [
        torch.ones(len(batch.scores), 1),
        *(column.unsqueeze(1) for column in batch.scores.T),
    ]

    value = reference.compute_loss_from_embeddings(columns, batch.teacher_scores)

    assert_same(ours, batch, with_gradient(value, batch), factor)


# Encoders: the same vectors through our scores and labels -----------------------------------------


def vectors(count, seed, dim=12):
    values = torch.randn(
        count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.nn.functional.normalize(values, dim=1).requires_grad_()


def one_positive_each(num_queries=4, num_negatives=2):
    """Lists of distinct skills: p0, n0-0, n0-1, …"""
    made = []
    for q in range(num_queries):
        skill_ids = (f"p{q}", *(f"n{i}-{q}" for i in range(num_negatives)))
        made.append(
            TrainingList(
                f"q{q}",
                f"query {q}",
                skill_ids,
                (1.0, *[0.0] * num_negatives),
                frozenset({f"p{q}"}),
            )
        )
    ids = [f"p{q}" for q in range(num_queries)] + [
        f"n{i}-{q}" for i in range(num_negatives) for q in range(num_queries)
    ]
    return tuple(made), ids


def ours_on(loss, queries, skills):
    made, ids = one_positive_each()
    data = TrainingSet(made, {skill_id: Skill(skill_id, skill_id, "", "") for skill_id in ids})
    context = ScoreContext.of(data, loss, in_batch=True)
    return loss(encoder_scores(made, made, queries, queries, ids, skills, context))


SYMMETRIC = ("query_to_skill", "skill_to_query")


@pytest.mark.parametrize(
    ("directions", "partition"),
    [
        *((directions, "joint") for directions in (SYMMETRIC, GTE[:2], GTE[::3], GTE)),
        (SYMMETRIC, "per_direction"),
    ],
)
def test_infonce_in_every_direction(directions, partition):
    queries, skills = vectors(4, 1), vectors(12, 2)
    names = tuple(THEIRS[direction] for direction in directions)
    settings = {"directions": names, "partition_mode": partition}
    reference = encoder_losses.MultipleNegativesRankingLoss(None, scale=10.0, **settings)
    expected = 4 * reference.compute_loss_from_embeddings(
        [queries, *skills.split(4)], torch.zeros(4)
    )

    ours = ours_on(
        InfoNCE(temperature=0.1, directions=directions, partition=partition), queries, skills
    )

    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)

    got, wanted = (
        torch.autograd.grad(loss, (queries, skills), retain_graph=True) for loss in (ours, expected)
    )

    for one, other, of in zip(got, wanted, (queries, skills), strict=True):
        # Theirs goes through a normalisation: only the part of ours across the vector is comparable.
        assert torch.allclose(
            one - (one * of).sum(1, keepdim=True) * of, other, rtol=1e-9, atol=1e-12
        )


class Vectors(torch.nn.Module):
    """Stands where sentence-transformers has its encoder: column i of a batch has the i-th vectors."""

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
    queries, skills = vectors(4, 3), vectors(12, 4)
    model = Vectors([queries, *skills.split(4)])
    names = tuple(THEIRS[direction] for direction in inner.directions)
    inner_loss = encoder_losses.MultipleNegativesRankingLoss(model, directions=names)
    reference = encoder_losses.MatryoshkaLoss(model, inner_loss, [12, 6, 3])
    expected = 4 * reference([{"column": torch.tensor(i)} for i in range(4)], torch.zeros(4))

    ours = ours_on(Matryoshka(loss=inner, dims=(3, 6, 12)), queries, skills)

    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)
