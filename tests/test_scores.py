"""Scores of a batch: valid negatives, gains, teacher scores, several ranks."""

from dataclasses import replace

import pytest
import torch

from faults import raises
from skilltrain.losses import KL, InfoNCE, ListwiseCE, MarginMSE, Matryoshka, RankNet
from skilltrain.records import Skill
from skilltrain.training.scores import (
    ScoreContext,
    check_teacher_scores,
    encoder_scores,
    in_batch_negatives,
    list_scores,
)
from skilltrain.training.training_set import TrainingList, TrainingSet

SKILLS = {
    skill_id: Skill(skill_id, name, "", "")
    for skill_id, name in [
        ("a", "Pod Debug"),
        ("b", "Chart"),
        ("c", "Clip"),
        ("d", "POD debug"),
        ("e", "Table"),
    ]
}
PODS = TrainingList("q1", "pods", ("a", "b"), (1.0, 0.0), frozenset("a"))
CLIPS = TrainingList("q2", "clips", ("c", "e"), (0.5, 0.0), frozenset("cb"))
AGAIN = TrainingList("q3", "pods", ("e", "b"), (1.0, 0.0), frozenset("e"))
TWIN = TrainingList("q", "pods", ("a", "d"), (1.0, 0.0), frozenset("a"))
FAR = TrainingList("q", "pods", ("a", "b"), (1.0, 0.0), frozenset({"a", "never seen"}))
TABLES = TrainingList("q3", "tables", ("e", "d"), (1.0, 0.5), frozenset("ed"))
ALL_SIDES = InfoNCE(
    directions=("query_to_skill", "skill_to_query", "query_to_query", "skill_to_skill")
)
ONE_WAY = InfoNCE()
SYMMETRIC = InfoNCE(directions=("query_to_skill", "skill_to_query"), partition="per_direction")


IDS = "abcde"


def context(*lists, clusters=None, loss=ONE_WAY, in_batch=True):
    """Return the context of a training set with these lists."""
    return ScoreContext.of(TrainingSet(lists, SKILLS, clusters or {}), loss, in_batch)


def unit(rows, seed, dim=8):
    """Return random unit vectors, shape (rows, dim)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(values, dim=1).requires_grad_()


# Who may be a negative --------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "skill_ids", "score_context", "expected"),
    [
        # Y is a valid skill. q1: d has the name of a. q2: b is a known positive.
        ([PODS, CLIPS], IDS, context(PODS, CLIPS), ["YYY.Y", "Y.YYY"]),
        # q1 loses e, a duplicate of its positive. q2 keeps a, a duplicate of its negative e.
        (
            [PODS, CLIPS],
            IDS,
            context(PODS, CLIPS, clusters={"a": 7, "e": 7, "d": 3, "x": 3}),
            ["YYY..", "Y.YYY"],
        ),
        # d has the name of a and is a duplicate of e. This makes e no positive of q1.
        ([PODS], IDS, context(PODS, clusters={"d": 1, "e": 1}), ["YYY.Y"]),
        # Queries of one text share their positives, even if the other list is not in the batch.
        ([PODS, CLIPS], IDS, context(PODS, CLIPS, AGAIN), ["YYY..", "Y.YYY"]),
        ([PODS], IDS, context(PODS, CLIPS, AGAIN), ["YYY.."]),
        ([PODS, CLIPS], IDS, context(PODS, CLIPS, in_batch=False), ["YY...", "..Y.Y"]),
        # A candidate of the list is valid, even with the name and the cluster of a positive.
        ([TWIN], "abd", context(TWIN, clusters={"a": 1, "d": 1}), ["YYY"]),
        # A positive outside the training set excludes only its cluster.
        ([FAR], "abc", context(FAR), ["YYY"]),
        ([FAR], "abc", context(FAR, clusters={"never seen": 4, "c": 4}), ["YY."]),
    ],
)
def test_valid_skills_of_query(lists, skill_ids, score_context, expected):
    queries = unit(len(lists), 0)
    skills = unit(len(skill_ids), 1)

    batch = encoder_scores(lists, lists, queries, None, skill_ids, skills, score_context)

    for row, marks in zip(batch.valid.tolist(), expected, strict=True):
        assert row == [mark == "Y" for mark in marks]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("none", "YYYYY"), ("positives", "YY.YY"), ("names", "YY..Y"), ("clusters", "YY...")],
)
def test_each_mask_includes_weaker_ones(mask, expected):
    # c is a positive outside the list, d has the name of a, and e is a near-duplicate of a.
    judged = replace(PODS, positives=frozenset("ac"))
    data = TrainingSet((judged,), SKILLS, {"a": 7, "e": 7})

    score_context = ScoreContext.of(data, ONE_WAY, True, mask)
    batch = encoder_scores([judged], [judged], unit(1, 0), None, IDS, unit(5, 1), score_context)

    assert batch.valid.tolist() == [[mark == "Y" for mark in expected]]


def test_unmasked_query_is_not_its_own_negative():
    lists = [PODS, CLIPS]
    score_context = ScoreContext.of(TrainingSet((PODS, CLIPS), SKILLS), ALL_SIDES, True, "none")
    queries = unit(2, 0)

    batch = encoder_scores(lists, lists, queries, queries, IDS, unit(5, 1), score_context)

    assert batch.negatives["query_to_query"].tolist() == [[False, True], [True, False]]


NEAR = replace(PODS, gains=(1.0, 0.5))  # b has a gain but is no positive


def test_gains_belong_to_skills_of_list():
    lists = [NEAR, CLIPS]

    batch = encoder_scores(lists, lists, unit(2, 0), None, IDS, unit(5, 1), context(*lists))

    assert batch.gains.tolist() == [[1, 0.5, 0, 0, 0], [0, 0, 0.5, 0, 0]]
    assert batch.is_positive.tolist() == [
        [True, False, False, False, False],
        [False, False, True, False, False],
    ]
    positives = list_scores(lists, torch.zeros(4), False).is_positive
    assert positives.tolist() == [[True, False], [True, False]]


def test_skills_of_list_are_no_in_batch_negatives():
    lists = [NEAR, CLIPS]

    negatives = in_batch_negatives(lists, IDS, context(*lists))

    assert negatives.tolist() == [
        [False, False, True, False, True],
        [True, False, False, True, False],
    ]


def test_copy_of_positive_is_positive():
    assert replace(PODS, skill_ids=("a\0" + "2", "b")).is_positive == (True, False)


def test_names_without_letters_are_not_equal():
    nameless = {skill_id: Skill(skill_id, "--", "", "") for skill_id in "abc"}
    score_context = ScoreContext.of(TrainingSet((PODS,), nameless), ONE_WAY, True)

    assert in_batch_negatives([PODS], "abc", score_context).tolist() == [[False, False, True]]


# Scores -----------------------------------------------------------------------


def test_negatives_of_every_direction():
    lists = [PODS, CLIPS, TABLES]
    score_context = context(*lists, loss=ALL_SIDES)
    queries = unit(3, 0)

    batch = encoder_scores(lists, lists, queries, queries, IDS, unit(5, 1), score_context)

    # The positives a of q1 and d of q3 have one name, so q1 and q3 are no negatives of each other.
    assert batch.negatives["query_to_query"].tolist() == [
        [False, True, False],
        [True, False, True],
        [False, True, False],
    ]
    # Rows are positives: a of q1, c of q2, d (gain 1/2) and e (gain 1) of q3.
    assert batch.negatives["skill_to_query"].tolist() == [
        [False, True, False],  # a: d, a positive of q3, has its name
        [True, False, True],  # c
        [False, True, False],  # d: a, the positive of q1, has its name
        [True, True, False],  # e: q2 judges it with gain 0
    ]
    assert batch.negatives["skill_to_skill"].tolist() == [
        [False, False, True, False, True],  # a: neither its list (a, b) nor d of the same name
        [True, False, False, True, False],  # c: neither its list (c, e) nor the known positive b
        [False, True, True, False, False],  # d and e: neither their list nor a
        [False, True, True, False, False],
    ]


def test_query_of_lower_gain_is_negative():
    """a has gain 1 for q1 and 1/2 for q2, so q2 is a negative of (a, q1)."""
    lists = [PODS, TrainingList("q2", "clips", ("a", "e"), (0.5, 0.0), frozenset("a"))]
    queries = unit(2, 0)
    score_context = context(*lists, loss=SYMMETRIC)

    batch = encoder_scores(lists, lists, queries, queries, "abe", unit(3, 1), score_context)

    assert batch.negatives["skill_to_query"].tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    "loss",
    [SYMMETRIC, InfoNCE(), Matryoshka(loss=ALL_SIDES, dims=(3, 8))],
)
def test_losses_of_ranks_sum_to_total(loss):
    lists = [PODS, CLIPS, TABLES]
    queries = unit(3, 0)
    skills = unit(5, 1)
    score_context = context(*lists, loss=loss)

    batch = encoder_scores(lists, lists, queries, queries, IDS, skills, score_context)
    expected = loss(batch)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(4):
        rank_lists = lists[rank::4]
        rank_queries = queries[rank::4]
        total = total + loss(
            encoder_scores(rank_lists, lists, rank_queries, queries, IDS, skills, score_context)
        )

    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = torch.autograd.grad(total, (queries, skills))
    expected_gradients = torch.autograd.grad(expected, (queries, skills))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, atol=1e-12)


SINGLE = TrainingList("q", "x", ("a",), (1.0,), frozenset("a"))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (ALL_SIDES, 0.693147),  # as in GTE, the positive counts twice: log 2
        (SYMMETRIC, 0),
    ],
)
def test_gradient_without_negatives_is_finite(loss, expected):
    query = unit(1, 0)
    skill = unit(1, 1)
    score_context = context(SINGLE, loss=loss)

    value = loss(encoder_scores([SINGLE], [SINGLE], query, query, "a", skill, score_context))

    assert value.item() == pytest.approx(expected, abs=1e-6)
    for gradient in torch.autograd.grad(value, (query, skill)):
        assert gradient.isfinite().all()


def test_autocast_does_not_round_cosines():
    queries = unit(2, 0).detach().float()
    skills = unit(5, 1).detach().float()
    lists = [PODS, CLIPS]
    score_context = context(*lists, loss=Matryoshka(dims=(4,)))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = encoder_scores(lists, lists, queries, queries, IDS, skills, score_context)
        truncated = batch.truncated(4)

    assert torch.equal(batch.scores, queries @ skills.T)
    short_queries = torch.nn.functional.normalize(queries[:, :4], dim=1)
    short_skills = torch.nn.functional.normalize(skills[:, :4], dim=1)
    assert torch.equal(truncated.scores, short_queries @ short_skills.T)
    assert torch.equal(truncated.gains, batch.gains)


def test_bfloat16_vectors_give_float32_scores():
    lists = [PODS, CLIPS]
    queries = unit(2, 0).bfloat16()

    batch = encoder_scores(lists, lists, queries, None, IDS, unit(5, 1).bfloat16(), context(*lists))

    assert batch.scores.dtype == batch.gains.dtype == torch.float32


# Teachers ---------------------------------------------------------------------

TAUGHT = TrainingList(
    "q1", "pods", ("a", "b", "e"), (1.0, 0.0, 0.0), frozenset("a"), (3.0, 1.0, float("nan"))
)
TAUGHT_TOO = TrainingList("q2", "clips", ("c", "e"), (1.0, 0.0), frozenset("c"), (2.0, -2.0))


@pytest.mark.parametrize("loss", [KL(), MarginMSE()])
def test_skills_without_teacher_score_are_not_valid(loss):
    lists = [TAUGHT, TAUGHT_TOO]
    skills = unit(5, 1)

    batch = encoder_scores(lists, lists, unit(2, 0), None, IDS, skills, context(*lists, loss=loss))

    assert batch.valid.tolist() == [
        [True, True, False, False, False],
        [False, False, True, False, True],
    ]
    assert batch.teacher_scores.tolist() == [[3, 1, 0, 0, 0], [0, 0, 2, 0, -2]]
    loss(batch).backward()
    assert torch.isfinite(skills.grad).all()
    assert (skills.grad[3] == 0).all()


@pytest.mark.parametrize("scores", [None, (float("nan"), float("nan"))])
def test_list_without_teacher_scores_is_refused(scores):
    untaught = TrainingList("q9", "clips", ("c", "e"), (1.0, 0.0), frozenset("c"), scores)
    data = TrainingSet((TAUGHT, untaught), SKILLS)

    check_teacher_scores(data, ListwiseCE())
    with raises("no-teacher-scores"):
        check_teacher_scores(data, KL())


def test_lists_of_unequal_length_are_padded():
    scores = torch.tensor([1.0, 2, 3, 4, 5], requires_grad=True)

    batch = list_scores([TAUGHT, TAUGHT_TOO], scores, needs_teacher_scores=False)

    assert batch.scores.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.gains.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert batch.valid.tolist() == [[True, True, True], [True, True, False]]
    assert batch.optional_teacher_scores is None
    (gradient,) = torch.autograd.grad(RankNet()(batch), scores)
    assert (gradient != 0).all()


def test_padded_lists_hold_teacher_scores():
    batch = list_scores([TAUGHT, TAUGHT_TOO], torch.zeros(5), needs_teacher_scores=True)

    assert batch.valid.tolist() == [[True, True, False], [True, True, False]]
    assert batch.teacher_scores.tolist() == [[3, 1, 0], [2, -2, 0]]
