"""Losses worked by hand: log 2 = 0.693147, log(1 + e) = 1.313262, log(1 + 1/e) = 0.313262."""

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
    WeightedSum,
)
from skilltrain.plugins import OneOf
from skilltrain.training.train import TrainReranker

RERANKER_LOSSES = OneOf("loss", tag="name", only="fits_reranker").classes()
PLAIN_LOSSES = [loss for loss in RERANKER_LOSSES if loss is not WeightedSum]
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
    """Return random scores; each query has a required, a useful and a rejected skill."""
    generator = torch.Generator().manual_seed(seed)
    scores, teacher = torch.randn(2, queries, candidates, generator=generator).double()
    gains = torch.zeros_like(scores)
    gains[:, :3] = torch.tensor([1, 0.5, -1])
    valid = torch.ones_like(scores, dtype=torch.bool)
    return ScoredBatch(scores.clone().requires_grad_(), gains, valid, teacher)


# Each loss by hand --------------------------------------------------------------------------------


L2 = math.log(2)
L1E = math.log(1 + math.e)
LE1 = math.log(1 + math.exp(-1))
BY_HAND = [
    (ListwiseCE(), [0, 0], [1, 0], L2),
    (ListwiseCE(), [1, 0], [1, 0], LE1),
    (ListwiseCE(), [0, 1, 1], [1, 0, 0], math.log(1 + 2 * math.e)),
    (ListwiseCE(temperature=0.5), [0.5, 0], [1, 0], LE1),
    (InfoNCE(), [0, 0.05], [1, 0], L1E),
    # Each positive, weight 1/2, against the one negative: log 2 for the score 0, log(1 + 1/e) for
    # the score 1.
    (ListwiseCE(), [0, 1, 0], [1, 1, 0], (L2 + LE1) / 2),
    (ListwiseCE(), [0.3, 5], [1, 1], 0),  # equals are not compared
    # Gains 1, 1/2, 0 at equal scores: weights 2/3 and 1/3, the best against two (log 3), the next
    # against one (log 2).
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
    # A rejected skill ranks below an irrelevant one: pairs (1, 0), (1, -1), (0, -1) with margins 0,
    # -1, -1.
    (RankNet(), [0, 0, 1], [1, 0, -1], (L2 + 2 * L1E) / 3),
    (ListNet(target_temperature=1), [1, 0], [math.log(3), 0], 3 / 4 * LE1 + 1 / 4 * L1E),
    # Half for the irrelevant skill of score 1, half for the rejected one of score 0. Without
    # push_share all three are in one softmax.
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
def test_temperature_divides_scores(loss):
    scored = random_batch(3)
    divided = replace(scored, scores=scored.scores / 0.1)

    value = loss(temperature=0.1)(scored).item()

    assert value == pytest.approx(loss(temperature=1)(divided).item(), rel=1e-12)


@pytest.fixture
def gained_negative():
    """A positive, a negative with a gain and one without, all of score 0."""
    positive = torch.tensor([[True, False, False]])
    return replace(batch([[0, 0, 0]], [[1, 0.2, 0]]), positive=positive)


def test_gain_does_not_make_positive(gained_negative):
    infonce = InfoNCE(directions=("query_to_skill",))
    higher = replace(gained_negative, scores=gained_negative.scores + 1)

    assert ListwiseCE()(gained_negative).item() == pytest.approx(math.log(3))
    assert infonce(gained_negative).item() == pytest.approx(math.log(3))
    assert PointwiseBCE()(higher).item() == pytest.approx((LE1 + 2 * L1E) / 3, abs=1e-6)


def test_ranknet_orders_negatives_by_gain(gained_negative):
    (slopes,) = torch.autograd.grad(RankNet()(gained_negative), gained_negative.scores)

    assert slopes[0].tolist() == pytest.approx([-1 / 3, 0, 1 / 3])


# What holds for every loss ------------------------------------------------------------------------


@EVERY_LOSS
@pytest.mark.parametrize("filler", [50.0, -math.inf, math.nan])
def test_masked_candidates_change_nothing(loss, filler):
    plain = random_batch(1)
    expected = loss(plain)
    (expected_gradient,) = torch.autograd.grad(expected, plain.scores)
    extra = torch.full((5, 2), filler, dtype=torch.float64)
    padded = ScoredBatch(
        torch.cat([plain.scores.detach(), extra], 1).requires_grad_(),
        torch.cat([plain.gains, torch.ones_like(extra)], 1),
        torch.cat([plain.valid, torch.zeros_like(extra, dtype=torch.bool)], 1),
        torch.cat([plain.teacher_scores, extra], 1),
    )

    value = loss(padded)
    value.backward()

    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    gradient = padded.scores.grad
    assert (gradient[:, 7:] == 0).all()
    assert torch.allclose(gradient[:, :7], expected_gradient, rtol=1e-12, atol=1e-15)


@EVERY_LOSS
def test_query_without_valid_candidates_adds_nothing(loss):
    batch = random_batch(1)
    expected = loss(replace(batch, valid=batch.valid & (torch.arange(5) > 0)[:, None]))
    others = [tensor[1:] for tensor in (batch.scores, batch.gains, batch.valid)]

    value = loss(ScoredBatch(*others, batch.teacher_scores[1:]))

    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


@EVERY_LOSS
def test_gradients_equal_finite_differences(loss):
    scored = random_batch(5, queries=3, candidates=6)
    valid = scored.valid & (torch.arange(6) != 4)  # one negative of each list does not count

    assert torch.autograd.gradcheck(
        lambda scores: loss(replace(scored, scores=scores, valid=valid)), (scored.scores,)
    )


@EVERY_LOSS
def test_empty_batch_has_loss_of_zero(loss):
    empty = torch.zeros(0, 3)
    scores = empty.clone().requires_grad_()

    value = loss(ScoredBatch(scores, empty, empty.bool(), empty))

    assert value.item() == 0
    value.backward()  # the graph is there


def select(scored, index):
    """Return the part of a batch that `index` selects, of scores [query, candidate]."""
    columns = (scored.scores, scored.gains, scored.valid, scored.teacher_scores)
    return ScoredBatch(*(column[index] for column in columns))


@EVERY_LOSS
def test_batch_is_sum_of_its_queries(loss):
    scored = random_batch(6)

    values = [loss(select(scored, slice(row, row + 1))).item() for row in range(5)]

    assert loss(scored).item() == pytest.approx(sum(values), rel=1e-12)


@EVERY_LOSS
def test_order_of_candidates_does_not_matter(loss):
    scored = random_batch(6)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))

    value = loss(select(scored, (slice(None), order)))

    assert value.item() == pytest.approx(loss(scored).item(), rel=1e-12)


@EVERY_LOSS
def test_extreme_scores_have_finite_gradients(loss):
    extreme = batch([[1e4, -1e4, 0.0]], [[0.0, 1.0, 0.0]], teacher=[[-1e4, 1e4, 0.0]])

    loss(extreme).backward()

    assert torch.isfinite(extreme.scores.grad).all()


@EVERY_LOSS
def test_loss_in_float32(loss):
    scored = random_batch(7)
    single = ScoredBatch(
        scored.scores.detach().float(),
        scored.gains.float(),
        scored.valid,
        scored.teacher_scores.float(),
    )

    value = loss(single)

    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(scored).item(), rel=1e-5)


# Directions, widths, and names --------------------------------------------------------------------


BOTH = ("query_to_skill", "skill_to_query")


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (KL(), "teacher_scores"),
        (InfoNCE(directions=BOTH), "vectors"),
        (Matryoshka(dims=(4,)), "vectors"),
    ],
)
def test_undeclared_input_is_named(loss, name):
    bare = batch([[0.0, 0.0]], [[1.0, 0.0]])

    with pytest.raises(SkilltrainError, match=rf"this batch has no {name}.*Needs\({name}=True\)"):
        loss(bare)


def test_matryoshka_adds_losses_of_its_widths():
    # The first coordinate makes both skills equal, up to sign.
    queries = torch.tensor([[1.0, 0.0]])
    skills = torch.tensor([[0.6, 0.8], [0.8, -0.6]])
    vectors = Vectors(queries, skills, queries[:0])
    whole = replace(batch([[0.6, 0.8]], [[1.0, 0.0]]), optional_vectors=vectors)

    value = Matryoshka(loss=ListwiseCE(temperature=0.2), dims=(1, 2))(whole)

    assert value.item() == pytest.approx(L2 + L1E, abs=1e-6)


def test_losses_declare_their_inputs():
    both = InfoNCE(directions=BOTH, temperature=0.3)

    assert InfoNCE().needs == ListwiseCE().needs == Needs()
    assert both.needs == Needs(vectors=True, directions=True)
    assert {loss.name for loss in LOSSES if loss.needs.teacher_scores} == {"kl", "margin_mse"}


def test_matryoshka_declares_inputs_of_its_loss():
    both = InfoNCE(directions=BOTH, temperature=0.3)

    assert Matryoshka(dims=(4,)).needs == Needs(vectors=True)
    assert Matryoshka(loss=both, dims=(4,)).needs == both.needs
    assert Matryoshka(loss=KL(), dims=(4,)).needs == Needs(teacher_scores=True, vectors=True)


class Hinge(Loss):
    name: str
    margin: float = 1.0

    def __call__(self, batch):
        return (self.margin - batch.scores).clamp(min=0).sum()


HINGE = f"{__name__}:Hinge"
WIDTHS = {"name": "matryoshka", "dims": [32, 8], "loss": {"name": "listwise_ce"}}
UNIONS = [TypeAdapter(EncoderLoss), TypeAdapter(RerankerLoss)]


EVERY_UNION = pytest.mark.parametrize("adapter", UNIONS, ids=["encoder", "reranker"])


@EVERY_UNION
def test_loss_is_selected_by_name(adapter):
    for loss_class in PLAIN_LOSSES:
        loss = loss_class()
        assert adapter.validate_python({"name": loss.name}) == loss


@EVERY_UNION
def test_loss_is_selected_by_import_path(adapter):
    values = {"name": HINGE, "margin": 2}

    loss = adapter.validate_python(values)

    assert isinstance(loss, Hinge)
    assert loss(batch([[0.5, 3]], [[1, 0]])).item() == 1.5
    assert adapter.dump_python(loss) == values
    assert adapter.validate_python(values) == adapter.validate_python(loss) == loss


def test_matryoshka_takes_loss_by_name_or_path():
    imported = {**WIDTHS, "loss": {"name": HINGE}}

    assert UNIONS[0].validate_python(WIDTHS) == Matryoshka(loss=ListwiseCE(), dims=(32, 8))
    assert UNIONS[0].validate_python(imported).loss == Hinge(name=HINGE)


def test_default_temperatures():
    assert InfoNCE().temperature == 0.05
    assert ListwiseCE().temperature == 1


NO_TAG = "unknown 'name' matryoshka"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("infonce", {"temperature": 0}, "greater than 0"),
        ("infonce", {"directions": ["skill_to_query"]}, "must hold query_to_skill"),
        (
            "infonce",
            {"directions": ["query_to_skill", "query_to_query"], "partition": "per_direction"},
            "query_to_query has only negatives and no positives, so partition must be joint",
        ),
        (
            "infonce",
            {"directions": BOTH, "push_share": 0.5},
            r"push_share is for directions: \[query_to_skill\] alone",
        ),
        (
            "infonce",
            {"negatives": "in_batch", "push_share": 0.5},
            "push_share needs the negatives of a query's list",
        ),
        ("matryoshka", {"dims": []}, "at least 1 item"),
        ("matryoshka", {"dims": [0, 4]}, "greater than 0"),
        ("matryoshka", {"dims": [4], "loss": WIDTHS}, NO_TAG),
        ("no.such:Loss", {}, "cannot import no.such:Loss: ModuleNotFoundError: No module named"),
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
def test_invalid_loss_is_refused(name, values, message):
    with pytest.raises(ValidationError, match=message):
        UNIONS[0].validate_python({"name": name, **values})


def test_reranker_has_no_matryoshka():
    with pytest.raises(ValidationError, match=NO_TAG):
        UNIONS[1].validate_python(WIDTHS)


def test_wrong_shapes_raise():
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


def test_schema_lists_losses():
    schema = UNIONS[1].json_schema()
    *named, imported = schema["oneOf"]

    sections = [schema["$defs"][choice["$ref"].rpartition("/")[2]] for choice in named]

    assert {section["properties"]["name"]["const"] for section in sections} == {
        *(loss.name for loss in LOSSES),
        "sum",
    }
    assert imported["properties"]["name"]["pattern"] == ":"
