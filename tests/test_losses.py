"""Numbers worked by hand: log 2 = 0.693147, log(1 + e) = 1.313262, log(1 + 1/e) = 0.313262."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.losses import (
    KL,
    EncoderLoss,
    InfoNCE,
    ListNet,
    ListwiseCE,
    Loss,
    MarginMSE,
    Matryoshka,
    Needs,
    PointwiseBCE,
    RankNet,
    RerankerLoss,
    ScoredBatch,
    Vectors,
)
from skilltrain.plugins import OneOf
from skilltrain.training.train import TrainReranker

PLAIN_LOSSES = OneOf("loss", tag="name", only="fits_reranker").classes()
LOSSES = [
    *(loss() for loss in PLAIN_LOSSES),
    ListNet(target_temperature=0.5),
    InfoNCE(push_share=0.5),
]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)


def batch(scores, gains, teacher=None):
    scores = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    teacher = None if teacher is None else torch.tensor(teacher, dtype=torch.float64)
    gains = torch.tensor(gains, dtype=torch.float64)
    return ScoredBatch(scores, gains, torch.ones(scores.shape, dtype=torch.bool), teacher)


def random_batch(seed, queries=5, candidates=7):
    """A required, a useful and a rejected skill a query, among irrelevant ones."""
    scores, teacher = torch.randn(
        2, queries, candidates, generator=torch.Generator().manual_seed(seed)
    ).double()
    gains = torch.tensor([1, 0.5, -1, *[0] * (candidates - 3)], dtype=torch.float64).repeat(
        queries, 1
    )
    return ScoredBatch(
        scores.clone().requires_grad_(), gains, torch.ones_like(gains, dtype=torch.bool), teacher
    )


# Each loss by hand --------------------------------------------------------------------------------


L2, L1E, LE1 = math.log(2), math.log(1 + math.e), math.log(1 + math.exp(-1))
BY_HAND = [
    (ListwiseCE(), [0, 0], [1, 0], L2),
    (ListwiseCE(), [1, 0], [1, 0], LE1),
    (ListwiseCE(), [0, 1, 1], [1, 0, 0], math.log(1 + 2 * math.e)),
    (ListwiseCE(temperature=0.5), [0.5, 0], [1, 0], LE1),
    (InfoNCE(), [0, 0.05], [1, 0], L1E),
    # Each positive, weight 1/2, against the one negative: log 2 for the score 0, log(1 + 1/e) for the score 1.
    (ListwiseCE(), [0, 1, 0], [1, 1, 0], (L2 + LE1) / 2),
    (ListwiseCE(), [0.3, 5], [1, 1], 0),  # equals are not compared
    # Gains 1, 1/2, 0 at equal scores: weights 2/3 and 1/3, the best against two (log 3), the next against one (log 2).
    (ListwiseCE(), [0, 0, 0], [1, 0.5, 0], 2 / 3 * math.log(3) + 1 / 3 * L2),
    # Scores 0 and 1 against 1 and 0: log 2 and log(1 + e), averaged over the list.
    (PointwiseBCE(), [0, 1], [1, 0], (L2 + L1E) / 2),
    (PointwiseBCE(), [1], [0.5], LE1),  # every gain above zero is a yes
    # Shares 3/4 and 1/4 of the gains against 1/2 and 1/2 of the softmax; then softmax of (1, 0).
    (ListNet(), [0, 0], [3, 1], L2),
    (ListNet(), [1, 0], [1, 0.5], 2 / 3 * LE1 + 1 / 3 * L1E),
    (ListNet(), [0] * 11, [1] + [0] * 10, math.log(11)),
    (RankNet(), [0, 1], [1, 0], L1E),
    # Pairs (1, 1/2), (1, 0), (1/2, 0) with margins 1, 0, -1.
    (RankNet(), [0, -1, 0], [1, 0.5, 0], (LE1 + L2 + L1E) / 3),
    # A rejected skill below an irrelevant one: pairs (1, 0), (1, -1), (0, -1) with margins 0, -1, -1.
    (RankNet(), [0, 0, 1], [1, 0, -1], (L2 + 2 * L1E) / 3),
    (ListNet(target_temperature=1), [1, 0], [math.log(3), 0], 3 / 4 * LE1 + 1 / 4 * L1E),
    # Half for the irrelevant skill of score 1, half for the rejected one of score 0; and all three in one softmax.
    (InfoNCE(temperature=1, push_share=0.5), [0, 1, 0], [1, 0, -1], (L1E + L2) / 2),
    (InfoNCE(temperature=1, push_share=0.25), [0, 1], [1, 0], 0.75 * L1E),  # nothing to push
    (InfoNCE(temperature=1), [0, 1, 0], [1, 0, -1], math.log(2 + math.e)),
]
TAUGHT = [  # the teacher's scores behind the gains
    (MarginMSE(), [1, 0], [1, 0], [3, 0], 4),
    # Temperature 1/2 doubles the margin 1; the second negative's is 4 against 1: (1 + 9) / 2.
    (MarginMSE(temperature=0.5), [1, 0, -1], [1, 0, 0], [3, 0, 2], 5),
    (MarginMSE(), [1, 0], [1, 0], [0, 1], 4),  # a teacher that doubts the negative: 1 against -1
    (KL(), [0, 0], [0, 0], [math.log(3), 0], 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
    (KL(teacher_temperature=2), [math.log(3), 0], [0, 0], [2 * math.log(3) + 1, 1], 0),
]
HANDS = [*((loss, scores, gains, gains, value) for loss, scores, gains, value in BY_HAND), *TAUGHT]


@pytest.mark.parametrize(("loss", "scores", "gains", "teacher", "expected"), HANDS)
def test_worked_by_hand(loss, scores, gains, teacher, expected):
    assert loss(batch([scores], [gains], [teacher])).item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("loss", PLAIN_LOSSES, ids=lambda loss: loss.__name__)
def test_every_temperature_means_the_same(loss):
    one = random_batch(3)
    cooler = ScoredBatch(one.scores / 0.1, one.gains, one.valid, one.teacher_scores)

    assert loss(temperature=0.1)(one).item() == pytest.approx(
        loss(temperature=1)(cooler).item(), rel=1e-12
    )


def test_positives_are_named_by_verdict_and_not_by_gain():
    """A rejected skill is worth more than an irrelevant one here: it stays a negative, above the irrelevant one."""
    one = replace(batch([[0, 0, 0]], [[1, 0.2, 0]]), positive=torch.tensor([[True, False, False]]))

    assert ListwiseCE()(one).item() == pytest.approx(math.log(3))
    assert InfoNCE(directions=("query_to_skill",))(one).item() == pytest.approx(math.log(3))
    assert PointwiseBCE()(replace(one, scores=one.scores + 1)).item() == pytest.approx(
        (LE1 + 2 * L1E) / 3, abs=1e-6
    )

    (slopes,) = torch.autograd.grad(RankNet()(one), one.scores)

    assert slopes.tolist() == [[pytest.approx(-1 / 3), pytest.approx(0), pytest.approx(1 / 3)]]


# What holds for every loss ------------------------------------------------------------------------


@EVERY_LOSS
@pytest.mark.parametrize("filler", [50.0, -math.inf, math.nan])
def test_masked_candidates_change_nothing_and_get_no_gradient(loss, filler):
    plain = random_batch(1)
    expected = loss(plain)
    (gradient,) = torch.autograd.grad(expected, plain.scores)
    extra = torch.full((5, 2), filler, dtype=torch.float64)
    scores = torch.cat([plain.scores.detach(), extra], 1).requires_grad_()
    gains = torch.cat([plain.gains, torch.ones(5, 2, dtype=torch.float64)], 1)
    valid = torch.cat([plain.valid, torch.zeros(5, 2, dtype=torch.bool)], 1)
    got = loss(ScoredBatch(scores, gains, valid, torch.cat([plain.teacher_scores, extra], 1)))

    got.backward()

    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (scores.grad[:, 7:] == 0).all()
    assert torch.allclose(scores.grad[:, :7], gradient, rtol=1e-12, atol=1e-15)


@EVERY_LOSS
def test_gradients_equal_finite_differences(loss):
    one = random_batch(5, queries=3, candidates=6)
    valid = one.valid & (torch.arange(6) != 4)  # one negative of each list does not count

    assert torch.autograd.gradcheck(
        lambda scores: loss(replace(one, scores=scores, valid=valid)), (one.scores,)
    )


@EVERY_LOSS
def test_no_queries_cost_nothing_but_keep_the_graph(loss):
    nothing = torch.zeros(0, 3, requires_grad=True)
    value = loss(
        ScoredBatch(
            nothing, torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, 3)
        )
    )

    assert value.item() == 0

    value.backward()


@EVERY_LOSS
def test_a_batch_is_the_sum_of_its_queries_in_any_order_of_candidates(loss):
    one = random_batch(6)
    parts = (one.scores, one.gains, one.valid, one.teacher_scores)
    alone = [loss(ScoredBatch(*(part[i : i + 1] for part in parts))).item() for i in range(5)]
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))

    turned = ScoredBatch(*(part[:, order] for part in parts))

    assert loss(one).item() == pytest.approx(sum(alone), rel=1e-12)
    assert loss(turned).item() == pytest.approx(sum(alone), rel=1e-12)


@EVERY_LOSS
def test_extreme_scores_and_float32_are_no_trouble(loss):
    extreme = batch([[1e4, -1e4, 0.0]], [[0.0, 1.0, 0.0]], teacher=[[-1e4, 1e4, 0.0]])
    loss(extreme).backward()

    assert torch.isfinite(extreme.scores.grad).all()

    one = random_batch(7)
    small = ScoredBatch(
        one.scores.detach().float(), one.gains.float(), one.valid, one.teacher_scores.float()
    )

    assert loss(small).dtype == torch.float32
    assert loss(small).item() == pytest.approx(loss(one).item(), rel=1e-5)


# Directions, widths, and names --------------------------------------------------------------------


BOTH = ("query_to_skill", "skill_to_query")


@pytest.mark.parametrize(
    ("loss", "part"),
    [
        (KL(), "teacher_scores"),
        (InfoNCE(directions=BOTH), "vectors"),
        (Matryoshka(dims=(4,)), "vectors"),
    ],
)
def test_undeclared_part_is_named(loss, part):
    bare = batch([[0.0, 0.0]], [[1.0, 0.0]])

    with pytest.raises(SkilltrainError, match=rf"this batch has no {part}.*Needs\({part}=True\)"):
        loss(bare)


def test_matryoshka_adds_the_losses_of_its_widths():
    """The first coordinate alone makes both skills equal, up to sign."""
    queries = torch.tensor([[1.0, 0.0]])
    skills = torch.tensor([[0.6, 0.8], [0.8, -0.6]])
    vectors = Vectors(queries, skills, queries[:0])
    whole = replace(batch([[0.6, 0.8]], [[1.0, 0.0]]), optional_vectors=vectors)

    value = Matryoshka(loss=ListwiseCE(temperature=0.2), dims=(1, 2))(whole)

    assert value.item() == pytest.approx(L2 + L1E, abs=1e-6)


def test_losses_declare_what_they_read():
    both = InfoNCE(directions=BOTH, temperature=0.3)

    assert InfoNCE().needs == ListwiseCE().needs == Needs()
    assert both.needs == Matryoshka(loss=both, dims=(4,)).needs
    assert both.needs == Needs(vectors=True, directions=True)
    assert Matryoshka(dims=(4,)).needs == Needs(vectors=True)
    assert Matryoshka(loss=KL(), dims=(4,)).needs == Needs(teacher_scores=True, vectors=True)
    assert {loss.name for loss in LOSSES if loss.needs.teacher_scores} == {"kl", "margin_mse"}


class Hinge(Loss):
    name: str
    margin: float = 1.0

    def __call__(self, batch):
        return (self.margin - batch.scores).clamp(min=0).sum()


HINGE = f"{__name__}:Hinge"
WIDTHS = {"name": "matryoshka", "dims": [32, 8], "loss": {"name": "listwise_ce"}}
UNIONS = [TypeAdapter(EncoderLoss), TypeAdapter(RerankerLoss)]


def test_a_loss_is_chosen_by_name_or_by_its_import():
    for adapter in UNIONS:
        for default in (loss() for loss in PLAIN_LOSSES):
            assert adapter.validate_python({"name": default.name}) == default

        own = adapter.validate_python({"name": HINGE, "margin": 2})

        assert isinstance(own, Hinge)
        assert own(batch([[0.5, 3]], [[1, 0]])).item() == 1.5
        assert adapter.dump_python(own) == {"name": HINGE, "margin": 2.0}
        assert (
            adapter.validate_python(adapter.dump_python(own)) == adapter.validate_python(own) == own
        )

    assert UNIONS[0].validate_python(WIDTHS) == Matryoshka(loss=ListwiseCE(), dims=(32, 8))
    assert UNIONS[0].validate_python({**WIDTHS, "loss": {"name": HINGE}}).loss == Hinge(name=HINGE)
    assert InfoNCE().temperature == 0.05
    assert ListwiseCE().temperature == 1


NO_TAG = "unknown 'name' matryoshka"


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("infonce", {"temperature": 0}, "greater than 0"),
        ("infonce", {"directions": ["skill_to_query"]}, "must hold query_to_skill"),
        (
            "infonce",
            {"directions": ["query_to_skill", "query_to_query"], "partition": "per_direction"},
            "query_to_query holds no positive to find, so partition must be joint",
        ),
        (
            "infonce",
            {"directions": BOTH, "push_share": 0.5},
            r"push_share is for directions: \[query_to_skill\] alone",
        ),
        ("matryoshka", {"dims": []}, "at least 1 item"),
        ("matryoshka", {"dims": [0, 4]}, "greater than 0"),
        ("matryoshka", {"dims": [4], "loss": WIDTHS}, NO_TAG),
        ("no.such:Loss", {}, "cannot import no.such:Loss: No module named 'no'"),
        (f"{__name__}:Other", {}, "has no attribute 'Other'"),
        (":Hinge", {}, "cannot import :Hinge"),
        ("skilltrain.losses:Loss", {}, "skilltrain.losses:Loss has no __call__"),
        (
            "builtins:dict",
            {},
            "builtins:dict is no subclass of skilltrain.losses.scored_batch.Loss",
        ),
        (HINGE, {"margn": 2}, "margn\n  Extra inputs are not permitted"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused(name, values, complaint):
    with pytest.raises(ValidationError, match=complaint):
        UNIONS[0].validate_python({"name": name, **values})
    if name == "matryoshka":
        with pytest.raises(ValidationError, match=NO_TAG):
            UNIONS[1].validate_python(WIDTHS)


def test_shapes_are_checked_in_tests():
    with pytest.raises(TypeError):
        ScoredBatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bool))


class Spread(Loss):
    """A loss of another package that reads vectors."""

    name: str

    @property
    def needs(self):
        return Needs(vectors=True)

    def __call__(self, batch):
        return (batch.vectors.queries @ batch.vectors.skills.T).square().sum()


def test_reranker_refuses_loss_on_vectors():
    recipe = {
        "stage": "train_reranker",
        "model": {"source": "m"},
        "data": {"pool": "p", "lists": "l"},
        "loss": {"name": f"{__name__}:Spread"},
        "out": "o",
    }

    with pytest.raises(ValidationError, match="Spread needs vectors, which only an encoder has"):
        TrainReranker.model_validate(recipe)


def test_schema_lists_losses_and_import_paths():
    schema = UNIONS[1].json_schema()
    *named, imported = schema["oneOf"]

    sections = [schema["$defs"][choice["$ref"].rpartition("/")[2]] for choice in named]

    assert {section["properties"]["name"]["const"] for section in sections} == {
        loss.name for loss in LOSSES
    }
    assert imported["properties"]["name"]["pattern"] == ":"
