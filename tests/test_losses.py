"""Numbers worked by hand: log 2 = 0.693147, log(1 + e) = 1.313262, log(1 + 1/e) = 0.313262."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from skilltrain.losses import InfoNCE, ListwiseCE, Loss, PointwiseBCE, ScoredBatch

LOSSES = [InfoNCE(), ListwiseCE(), PointwiseBCE()]


def batch(scores, gains, valid=None):
    scores = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    gains = torch.tensor(gains, dtype=torch.float64)
    valid = torch.ones(scores.shape, dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
    return ScoredBatch(scores, gains, valid)


def random_batch(seed, queries=5, candidates=7):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, candidates, generator=generator, dtype=torch.float64, requires_grad=True)
    gains = torch.zeros(queries, candidates, dtype=torch.float64)
    gains[torch.arange(queries), torch.randint(candidates, (queries,), generator=generator)] = 1
    return ScoredBatch(scores, gains, torch.ones(queries, candidates, dtype=torch.bool))


def test_one_positive_by_hand():
    assert ListwiseCE()(batch([[0.0, 0.0]], [[1.0, 0.0]])).item() == pytest.approx(math.log(2))
    assert ListwiseCE()(batch([[1.0, 0.0]], [[1.0, 0.0]])).item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert ListwiseCE()(batch([[0.0, 1.0, 1.0]], [[1.0, 0.0, 0.0]])).item() == pytest.approx(math.log(1 + 2 * math.e))


def test_the_temperature_divides_the_scores():
    assert ListwiseCE(temperature=0.5)(batch([[0.5, 0.0]], [[1.0, 0.0]])).item() == pytest.approx(0.313262, abs=1e-6)
    assert InfoNCE()(batch([[0.0, 0.05]], [[1.0, 0.0]])).item() == pytest.approx(1.313262, abs=1e-6)


def test_queries_are_summed():
    two = ListwiseCE()(batch([[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]))
    assert two.item() == pytest.approx(0.693147 + 0.313262, abs=1e-6)


def test_several_positives_stand_alone_against_the_negatives():
    # Each positive, weight 1/2, against the one negative: log 2 for the score 0, log(1 + 1/e) for the score 1.
    loss = ListwiseCE()(batch([[0.0, 1.0, 0.0]], [[1.0, 1.0, 0.0]]))
    assert loss.item() == pytest.approx((0.693147 + 0.313262) / 2, abs=1e-6)


def test_a_positive_is_not_pushed_down_by_its_equals():
    one = batch([[2.0, -3.0, 0.0]], [[1.0, 1.0, 0.0]])
    ListwiseCE()(one).backward()
    assert one.scores.grad is not None
    assert one.scores.grad[0, 0] < 0 and one.scores.grad[0, 1] < 0 and one.scores.grad[0, 2] > 0


def test_graded_gains():
    # Gains 1, 1/2, 0 at equal scores: weights 2/3 and 1/3, the best against two (log 3), the next against one (log 2).
    loss = ListwiseCE()(batch([[0.0, 0.0, 0.0]], [[1.0, 0.5, 0.0]]))
    assert loss.item() == pytest.approx(2 / 3 * math.log(3) + 1 / 3 * math.log(2))


def test_a_list_of_equal_positives_alone_costs_nothing():
    assert ListwiseCE()(batch([[0.3, 5.0]], [[1.0, 1.0]])).item() == 0


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


def test_pointwise_by_hand():
    # Scores 0 and 1 against 1 and 0: log 2 and log(1 + e), averaged over the list.
    expected = pytest.approx((0.693147 + 1.313262) / 2, abs=1e-6)
    assert PointwiseBCE()(batch([[0.0, 1.0]], [[1.0, 0.0]])).item() == expected
    # An invalid third candidate changes neither the sum nor the average.
    masked = batch([[0.0, 1.0, 9.0]], [[1.0, 0.0, 1.0]], [[True, True, False]])
    assert PointwiseBCE()(masked).item() == expected


def test_pointwise_takes_every_gain_above_zero_as_a_yes():
    assert PointwiseBCE()(batch([[0.0]], [[0.5]])).item() == PointwiseBCE()(batch([[0.0]], [[1.0]])).item()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("filler", [0.0, 50.0, -1e4, 1e30])
def test_masked_candidates_change_nothing_and_get_no_gradient(loss, filler):
    plain = random_batch(1)
    expected = loss(plain)
    (gradient,) = torch.autograd.grad(expected, plain.scores)
    extra = torch.full((5, 2), filler, dtype=torch.float64)
    scores = torch.cat([plain.scores.detach(), extra], 1).requires_grad_()
    gains = torch.cat([plain.gains, torch.ones(5, 2, dtype=torch.float64)], 1)
    valid = torch.cat([plain.valid, torch.zeros(5, 2, dtype=torch.bool)], 1)
    got = loss(ScoredBatch(scores, gains, valid))
    got.backward()
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (scores.grad[:, 7:] == 0).all()
    assert torch.allclose(scores.grad[:, :7], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_no_queries_cost_nothing(loss):
    assert loss(ScoredBatch(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))).item() == 0


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_order_of_candidates_does_not_matter(loss):
    one = random_batch(2)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    turned = ScoredBatch(one.scores[:, order], one.gains[:, order], one.valid[:, order])
    assert loss(turned).item() == pytest.approx(loss(one).item(), rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_gradients_are_finite_at_extreme_scores(loss):
    one = batch([[1e4, -1e4, 0.0]], [[0.0, 1.0, 0.0]])
    loss(one).backward()
    assert torch.isfinite(one.scores.grad).all()


def test_a_loss_is_chosen_by_name():
    adapter = TypeAdapter(Loss)
    assert adapter.validate_python({"name": "infonce"}) == InfoNCE(temperature=0.05)
    assert adapter.validate_python({"name": "listwise_ce"}) == ListwiseCE(temperature=1.0)
    assert adapter.validate_python({"name": "pointwise_bce"}) == PointwiseBCE()
    with pytest.raises(ValidationError):
        adapter.validate_python({"name": "infonce", "temperature": 0})


def test_shapes_are_checked_in_tests():
    with pytest.raises(TypeError):
        ScoredBatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bool))
