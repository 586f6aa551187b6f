"""Numbers worked by hand: log 2 = 0.693147, log(1 + e) = 1.313262, log(1 + 1/e) = 0.313262."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from skilltrain.errors import SkilltrainError
from skilltrain.losses import (
    KL,
    EncoderLoss,
    InfoNCE,
    LambdaRank,
    ListNet,
    ListwiseCE,
    Margin,
    MarginMSE,
    Matryoshka,
    OwnLoss,
    PlainLoss,
    PointwiseBCE,
    RankNet,
    RerankerLoss,
    ScoredBatch,
    infonce_in,
)

LOSSES = [*(loss() for loss in get_args(PlainLoss)), LambdaRank(mu=10), ListNet(target_temperature=0.5)]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)


def batch(scores, gains, teacher=None):
    scores = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    teacher = None if teacher is None else torch.tensor(teacher, dtype=torch.float64)
    gains = torch.tensor(gains, dtype=torch.float64)
    return ScoredBatch(scores, gains, torch.ones(scores.shape, dtype=torch.bool), teacher)


def random_batch(seed, queries=5, candidates=7, graded=False):
    """One positive a query, or a required and a useful skill."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, candidates, generator=generator, dtype=torch.float64, requires_grad=True)
    places = torch.stack([torch.randperm(candidates, generator=generator)[:3] for _ in range(queries)])
    gains = torch.zeros(queries, candidates, dtype=torch.float64)
    gains[torch.arange(queries), places[:, 0]] = 1
    if graded:
        gains[torch.arange(queries), places[:, 1]] = 0.5
        gains[torch.arange(queries), places[:, 2]] = 1
    teacher = torch.randn(queries, candidates, generator=generator, dtype=torch.float64)
    return ScoredBatch(scores, gains, torch.ones(queries, candidates, dtype=torch.bool), teacher)


# Each loss by hand ---------------------------------------------------------------------------------------------------


L2, L1E, LE1 = math.log(2), math.log(1 + math.e), math.log(1 + math.exp(-1))
BY_HAND = [
    (ListwiseCE(), [0, 0], [1, 0], L2),
    (ListwiseCE(), [1, 0], [1, 0], LE1),
    (ListwiseCE(), [0, 1, 1], [1, 0, 0], math.log(1 + 2 * math.e)),
    (ListwiseCE(temperature=0.5), [0.5, 0], [1, 0], LE1),
    (InfoNCE(), [0, 0.05], [1, 0], L1E),
    # Each positive, weight 1/2, against the one negative: log 2 for the score 0, log(1 + 1/e) for the score 1.
    (ListwiseCE(), [0, 1, 0], [1, 1, 0], (L2 + LE1) / 2),
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
    (Margin(), [0, 0], [1, -0.5], 1.5),
    # Wanted and found: 1 and 2 / (1/2), far enough; 2 and 1 / (1/2), just enough; 1 and -1 / (1/2).
    (Margin(temperature=0.5), [2, 0, 1], [1, 0, -1], (0 + 0 + 3) / 3),
    (ListNet(target_temperature=1), [1, 0], [math.log(3), 0], 3 / 4 * LE1 + 1 / 4 * L1E),
    # Half for the irrelevant skill of score 1, half for the rejected one of score 0; and all three in one softmax.
    (InfoNCE(temperature=1, push_share=0.5), [0, 1, 0], [1, 0, -1], (L1E + L2) / 2),
    (InfoNCE(temperature=1), [0, 1, 0], [1, 0, -1], math.log(2 + math.e)),
    # Places 1 and 2: discounts 1 and 1/log2(3) = 0.630930; maxDCG 1; margin 1. NDCG-Loss2++ weighs one place 11 times.
    (LambdaRank(), [1, 0], [1, 0], (1 - 0.630930) * LE1 / L2),
    (LambdaRank(mu=10), [1, 0], [1, 0], 11 * 0.166798),
    # Best order 1, 1/2: maxDCG 1 + 0.5 * 0.63093 = 1.315465. The useful skill stands above the required one.
    (LambdaRank(), [1, 0], [0, -1], 0.166798),  # counted from the lowest gain: as (1, 0)
    (LambdaRank(), [0, 1], [1, 0.5], 0.5 / 1.315465 * (1 - 0.630930) * L1E / L2),
    # Scores 3, 2, 1: the positive stands last. At k = 1 only its pair with the first place counts.
    (LambdaRank(), [3, 2, 1], [0, 0, 1], (0.5 * math.log(1 + math.e**2) + (0.630930 - 0.5) * L1E) / L2),
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


@pytest.mark.parametrize("loss", get_args(PlainLoss), ids=lambda loss: loss.__name__)
def test_every_temperature_means_the_same(loss):
    one = random_batch(3)
    cooler = ScoredBatch(one.scores / 0.1, one.gains, one.valid, one.teacher_scores)
    assert loss(temperature=0.1)(one).item() == pytest.approx(loss(temperature=1)(cooler).item(), rel=1e-12)


def test_a_positive_is_not_pushed_down_by_its_equals():
    one = batch([[2.0, -3.0, 0.0]], [[1.0, 1.0, 0.0]])
    ListwiseCE()(one).backward()
    assert (one.scores.grad.sign() == torch.tensor([[-1, -1, 1]])).all()
    alone = batch([[0.3, 5.0]], [[1.0, 1.0]])
    loss = ListwiseCE()(alone)
    loss.backward()
    assert loss.item() == 0 and alone.scores.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_one_positive_equals_torch_cross_entropy(temperature):
    one = random_batch(0)
    labels = one.gains.argmax(1)
    expected = torch.nn.functional.cross_entropy(one.scores / temperature, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, one.scores)
    loss = ListwiseCE(temperature=temperature)(one)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(one.scores.grad, gradient, rtol=1e-12, atol=1e-12)
    assert InfoNCE(temperature=temperature)(one).item() == loss.item()


def graded(seed):
    """Gains -1, 0, 0.5 and 1 among eight candidates of four queries, two of them invalid."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    gains = torch.tensor([-1.0, 0, 0.5, 1], dtype=torch.float64)[torch.randint(4, (4, 8), generator=generator)]
    return ScoredBatch(scores, gains, torch.arange(8).expand(4, 8) < 6)


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_two_grades_counts_once(seed):
    one = graded(seed)
    wanted = 0.0
    for scores, gains in zip(one.scores[:, :6].tolist(), one.gains[:, :6].tolist(), strict=True):
        pairs = [(i, j) for i in range(6) for j in range(6) if gains[i] > gains[j]]
        each = [math.log1p(math.exp(scores[j] - scores[i])) for i, j in pairs]
        wanted += sum(each) / max(1, len(each))
    assert RankNet()(one).item() == pytest.approx(wanted, rel=1e-12)


def test_positives_are_named_by_verdict_and_not_by_gain():
    """A rejected skill is worth more than an irrelevant one here: it stays a negative, above the irrelevant one."""
    one = replace(batch([[0, 0, 0]], [[1, 0.2, 0]]), positive=torch.tensor([[True, False, False]]))
    assert ListwiseCE()(one).item() == pytest.approx(math.log(3))
    assert InfoNCE(directions=("query_to_skill",))(one).item() == pytest.approx(math.log(3))
    assert PointwiseBCE()(replace(one, scores=one.scores + 1)).item() == pytest.approx((LE1 + 2 * L1E) / 3, abs=1e-6)
    (slopes,) = torch.autograd.grad(RankNet()(one), one.scores)
    assert slopes.tolist() == [[pytest.approx(-1 / 3), pytest.approx(0), pytest.approx(1 / 3)]]


def test_a_push_needs_rejections_and_one_direction():
    one = batch([[0, 1]], [[1, 0]])
    assert InfoNCE(temperature=1, push_share=0.25)(one).item() == pytest.approx(0.75 * L1E, abs=1e-6)
    with pytest.raises(ValidationError, match=r"push_share is for directions: \[query_to_skill\] alone"):
        InfoNCE(push_share=0.5, directions=("query_to_skill", "skill_to_query"), partition="per_direction")
    assert infonce_in(Matryoshka(loss=InfoNCE(push_share=0.5), dims=(4,))).push_share == 0.5


# What holds for every loss -------------------------------------------------------------------------------------------


@EVERY_LOSS
@pytest.mark.parametrize("filler", [0.0, 50.0, -1e4, 1e30, math.inf, -math.inf, math.nan])
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
@pytest.mark.parametrize("graded", [False, True])
def test_gradients_equal_finite_differences(loss, graded):
    one = random_batch(5, queries=3, candidates=5, graded=graded)
    valid = one.valid & (torch.arange(5) != one.gains.argmin(1)[:, None])  # one negative of each list does not count

    def of(scores):
        return loss(ScoredBatch(scores, one.gains, valid, one.teacher_scores))

    assert torch.autograd.gradcheck(of, (one.scores,))


@EVERY_LOSS
def test_no_queries_cost_nothing_but_keep_the_graph(loss):
    nothing = torch.zeros(0, 3, requires_grad=True)
    value = loss(ScoredBatch(nothing, torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, 3)))
    assert value.item() == 0
    value.backward()


@EVERY_LOSS
def test_a_batch_is_the_sum_of_its_queries_in_any_order_of_candidates(loss):
    one = random_batch(6, graded=True)
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
    small = ScoredBatch(one.scores.detach().float(), one.gains.float(), one.valid, one.teacher_scores.float())
    assert loss(small).dtype == torch.float32 and loss(small).item() == pytest.approx(loss(one).item(), rel=1e-5)


# Directions, widths, and names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directions", "partition", "complaint"),
    [
        (("skill_to_query",), "joint", "must hold query_to_skill"),
        ((), "joint", "must hold query_to_skill"),
        (("query_to_skill", "query_to_query"), "per_direction", "query_to_query holds no positive"),
        (("query_to_skill", "skill_to_skill"), "per_direction", "partition must be joint"),
        (("query_to_skill", "sideways"), "joint", "skill_to_query"),
    ],
)
def test_directions_that_make_no_sense_are_refused(directions, partition, complaint):
    with pytest.raises(ValidationError, match=complaint):
        InfoNCE(directions=directions, partition=partition)


def test_lexical_scores_are_added_to_the_logits():
    one = replace(batch([[1, 0]], [[1, 0]]), lexical_scores=torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    # Logits 1 / .5 = 2 and 0 / .5 + 1/3 x 3 = 1: log(1 + e^(1 - 2)).
    assert InfoNCE(temperature=0.5, lexical_weight=1 / 3)(one).item() == pytest.approx(LE1, abs=1e-9)
    assert InfoNCE(temperature=1)(one).item() == pytest.approx(LE1, abs=1e-9)  # not asked for, not added
    with pytest.raises(SkilltrainError, match=r"loss\.lexical_weight: the batch holds no BM25 scores"):
        InfoNCE(lexical_weight=1)(batch([[1, 0]], [[1, 0]]))
    with pytest.raises(ValidationError, match=r"lexical_weight is for directions: \[query_to_skill\] alone"):
        InfoNCE(lexical_weight=1, directions=("query_to_skill", "skill_to_query"))


@pytest.mark.parametrize(("dims", "complaint"), [((), "at least 1 item"), ((0, 4), "greater than 0")])
def test_widths_that_make_no_sense_are_refused(dims, complaint):
    with pytest.raises(ValidationError, match=complaint):
        Matryoshka(dims=dims)


def test_what_only_an_encoder_has_is_refused_by_name():
    with pytest.raises(SkilltrainError, match=r"loss\.directions: only an encoder"):
        InfoNCE(directions=("query_to_skill", "skill_to_query"))(random_batch(0))
    with pytest.raises(SkilltrainError, match="only an encoder has vectors"):
        Matryoshka(dims=(4,))(random_batch(0))


def test_matryoshka_adds_the_losses_of_its_widths():
    at = {2: batch([[0.0, 0.0]], [[1.0, 0.0]]), 4: batch([[1.0, 0.0]], [[1.0, 0.0]])}
    whole = ScoredBatch(at[4].scores, at[4].gains, at[4].valid, truncated=at.__getitem__)
    assert Matryoshka(loss=ListwiseCE(), dims=(2, 4))(whole).item() == pytest.approx(0.693147 + 0.313262, abs=1e-6)


def test_what_a_loss_needs():
    both = InfoNCE(directions=("query_to_skill", "skill_to_query"))
    needs = [infonce_in(one).needs_sides for one in (InfoNCE(), KL(), both, Matryoshka(loss=both, dims=(4,)))]
    assert needs == [False, False, True, True]
    assert Matryoshka(loss=KL(), dims=(4,)).needs_teacher_scores and not Matryoshka(dims=(4,)).needs_teacher_scores
    assert {loss.name for loss in LOSSES if loss.needs_teacher_scores} == {"kl", "margin_mse"}


@pytest.mark.parametrize("union", [EncoderLoss, RerankerLoss])
def test_a_loss_is_chosen_by_name(union):
    adapter = TypeAdapter(union)
    for default in (loss() for loss in get_args(PlainLoss)):
        assert adapter.validate_python({"name": default.name}) == default
    assert InfoNCE().temperature == 0.05 and ListwiseCE().temperature == 1
    with pytest.raises(ValidationError):
        adapter.validate_python({"name": "infonce", "temperature": 0})


class Hinge(OwnLoss):
    margin: float = 1.0

    def __call__(self, batch):
        return (self.margin - batch.scores).clamp(min=0).sum()


HINGE = f"{__name__}:Hinge"


@pytest.mark.parametrize("union", [EncoderLoss, RerankerLoss])
def test_a_loss_of_another_package_is_named_by_its_import(union):
    adapter = TypeAdapter(union)
    loss = adapter.validate_python({"name": HINGE, "margin": 2})
    assert isinstance(loss, Hinge) and loss(batch([[0.5, 3]], [[1, 0]])).item() == 1.5
    assert adapter.dump_python(loss) == {"name": HINGE, "margin": 2.0}
    assert adapter.validate_python(adapter.dump_python(loss)) == adapter.validate_python(loss) == loss
    for values, complaint in [
        ({"name": "no.such:Loss"}, "cannot import no.such:Loss: No module named 'no'"),
        ({"name": f"{__name__}:Other"}, "has no attribute 'Other'"),
        ({"name": ":Hinge"}, "cannot import :Hinge"),
        ({"name": "skilltrain.losses:OwnLoss"}, "skilltrain.losses:OwnLoss has no __call__"),
        ({"name": "builtins:dict"}, "builtins:dict is no subclass of skilltrain.losses.OwnLoss"),
        ({"name": HINGE, "margn": 2}, "unknown key 'margn', did you mean 'margin'"),
    ]:
        with pytest.raises(ValidationError, match=complaint):
            adapter.validate_python(values)


def test_matryoshka_is_the_encoders_alone():
    values = {"name": "matryoshka", "dims": [32, 8], "loss": {"name": "listwise_ce"}}
    adapter = TypeAdapter(EncoderLoss)
    assert adapter.validate_python(values) == Matryoshka(loss=ListwiseCE(), dims=(32, 8))
    assert adapter.validate_python({**values, "loss": {"name": HINGE}}).loss == Hinge(name=HINGE)
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        TypeAdapter(RerankerLoss).validate_python(values)
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        TypeAdapter(EncoderLoss).validate_python({**values, "loss": values})


def test_shapes_are_checked_in_tests():
    with pytest.raises(TypeError):
        ScoredBatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bool))
