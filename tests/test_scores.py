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
ONE = TrainingList("q1", "pods", ("a", "b"), (1.0, 0.0), frozenset("a"))
TWO = TrainingList("q2", "clips", ("c", "e"), (0.5, 0.0), frozenset("cb"))
AGAIN = TrainingList("q3", "pods", ("e", "b"), (1.0, 0.0), frozenset("e"))
TWIN = TrainingList("q", "pods", ("a", "d"), (1.0, 0.0), frozenset("a"))
FAR = TrainingList("q", "pods", ("a", "b"), (1.0, 0.0), frozenset({"a", "never seen"}))
THREE = TrainingList("q3", "tables", ("e", "d"), (1.0, 0.5), frozenset("ed"))
ALL_SIDES = InfoNCE(
    directions=("query_to_skill", "skill_to_query", "query_to_query", "skill_to_skill")
)
ONE_WAY = InfoNCE()
SYMMETRIC = InfoNCE(directions=("query_to_skill", "skill_to_query"), partition="per_direction")


def context(*lists, clusters=None, loss=ONE_WAY, in_batch=True):
    return ScoreContext.of(TrainingSet(lists, SKILLS, clusters or {}), loss, in_batch)


def unit(rows, seed, dim=8):
    values = torch.randn(
        rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.nn.functional.normalize(values, dim=1).requires_grad_()


# Who may be a negative --------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "skill_ids", "of", "expected"),
    [
        # q1: d bears a's name. q2: b is known to answer it, though it is no candidate of its list.
        ([ONE, TWO], "abcde", context(ONE, TWO), ["YYY.Y", "Y.YYY"]),
        # q1 loses e, its positive's duplicate. q2 keeps a: its own negative e is a's duplicate, no positive.
        (
            [ONE, TWO],
            "abcde",
            context(ONE, TWO, clusters={"a": 7, "e": 7, "d": 3, "x": 3}),
            ["YYY..", "Y.YYY"],
        ),
        # d bears a's name and is a duplicate of e; that does not make e a positive of q1.
        ([ONE], "abcde", context(ONE, clusters={"d": 1, "e": 1}), ["YYY.Y"]),
        # Queries of the same text share their positives, whether or not the other list is in the batch.
        ([ONE, TWO], "abcde", context(ONE, TWO, AGAIN), ["YYY..", "Y.YYY"]),
        ([ONE], "abcde", context(ONE, TWO, AGAIN), ["YYY.."]),
        ([ONE, TWO], "abcde", context(ONE, TWO, in_batch=False), ["YY...", "..Y.Y"]),
        # A list's own candidate counts even with a positive's name, and in its cluster.
        ([TWIN], "abd", context(TWIN, clusters={"a": 1, "d": 1}), ["YYY"]),
        # Positives outside the training set count by their cluster alone.
        ([FAR], "abc", context(FAR), ["YYY"]),
        ([FAR], "abc", context(FAR, clusters={"never seen": 4, "c": 4}), ["YY."]),
    ],
)
def test_who_counts_for_a_query(lists, skill_ids, of, expected):
    found = encoder_scores(
        lists, lists, unit(len(lists), 0), None, skill_ids, unit(len(skill_ids), 1), of
    )
    assert ["".join(".Y"[counts] for counts in row) for row in found.valid.tolist()] == expected


def test_gains_and_positives_stand_at_their_skills_and_the_own_list_is_no_in_batch_negative():
    """b gains more than nothing for q1, and is none of its answers; a is q1's alone."""
    near = replace(ONE, gains=(1.0, 0.5), skill_ids=("a", "b"))
    of, lists = context(near, TWO), [near, TWO]
    found = encoder_scores(lists, lists, unit(2, 0), None, "abcde", unit(5, 1), of)
    assert found.gains.tolist() == [[1, 0.5, 0, 0, 0], [0, 0, 0.5, 0, 0]]
    assert found.is_positive.tolist() == [
        [True, False, False, False, False],
        [False, False, True, False, False],
    ]
    negatives = in_batch_negatives(lists, "abcde", of)
    assert negatives.tolist() == [
        [False, False, True, False, True],
        [True, False, False, True, False],
    ]
    assert list_scores(lists, torch.zeros(4), False).is_positive.tolist() == [
        [True, False],
        [True, False],
    ]
    assert replace(ONE, skill_ids=("a\0" + "2", "b")).is_positive == (True, False)
    nameless = TrainingSet((ONE,), {skill_id: Skill(skill_id, "--", "", "") for skill_id in "abc"})
    assert in_batch_negatives([ONE], "abc", ScoreContext.of(nameless, ONE_WAY, True)).tolist() == [
        [False, False, True]
    ]


# Scores -----------------------------------------------------------------------


def test_sides_by_hand():
    of = context(ONE, TWO, THREE, loss=ALL_SIDES)
    lists = [ONE, TWO, THREE]
    negatives = encoder_scores(
        lists, lists, unit(3, 0), unit(3, 0), "abcde", unit(5, 1), of
    ).negatives
    # q1's a and q3's d are twins by name, so the two queries are no negatives of each other.
    assert negatives["query_to_query"].tolist() == [
        [False, True, False],
        [True, False, True],
        [False, True, False],
    ]
    # Positives by row: q1 a; q2 c; q3 d (1/2), e (1).
    assert negatives["skill_to_query"].tolist() == [
        [False, True, False],  # a: q3 has its twin d among its answers
        [True, False, True],  # c
        [False, True, False],  # d: q1 has its twin a
        [True, True, False],  # e: q2 has judged it, with gain 0
    ]
    assert negatives["skill_to_skill"].tolist() == [
        [False, False, True, False, True],  # a: not its own list (a, b) nor its twin d
        [True, False, False, True, False],  # c: not its own list (c, e) nor the known positive b
        [False, True, True, False, False],  # d and e: not their own list nor a
        [False, True, True, False, False],
    ]
    # a is worth 1 to q1 and 1/2 to q2: q2 comes after q1 for a, as among a query's skills, and not the other way.
    lists = [ONE, TrainingList("q2", "clips", ("a", "e"), (0.5, 0.0), frozenset("a"))]
    of = context(*lists, loss=SYMMETRIC)
    negatives = encoder_scores(
        lists, lists, unit(2, 0), unit(2, 0), "abe", unit(3, 1), of
    ).negatives
    assert negatives["skill_to_query"].tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    "loss",
    [SYMMETRIC, InfoNCE(), Matryoshka(loss=ALL_SIDES, dims=(3, 8))],
)
def test_ranks_add_up_to_one_process(loss):
    lists, queries, skills = [ONE, TWO, THREE], unit(3, 0), unit(5, 1)
    of = context(*lists, loss=loss)
    whole = loss(encoder_scores(lists, lists, queries, queries, "abcde", skills, of))
    parts = [
        loss(encoder_scores(lists[rank::4], lists, queries[rank::4], queries, "abcde", skills, of))
        for rank in range(4)
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)
    wanted = torch.autograd.grad(whole, (queries, skills))
    for got, expected in zip(
        torch.autograd.grad(sum(parts), (queries, skills)), wanted, strict=True
    ):
        assert torch.allclose(got, expected, atol=1e-12)


def test_queries_without_any_negative_keep_their_gradients_finite():
    loss, queries, skills = ALL_SIDES, unit(1, 0), unit(1, 1)
    alone = TrainingList("q", "x", ("a",), (1.0,), frozenset("a"))
    value = loss(
        encoder_scores([alone], [alone], queries, queries, "a", skills, context(alone, loss=loss))
    )
    assert value.item() == pytest.approx(
        0.693147, abs=1e-6
    )  # the positive against itself, as GTE has it
    assert all(
        gradient.isfinite().all() for gradient in torch.autograd.grad(value, (queries, skills))
    )
    half = SYMMETRIC(
        encoder_scores([alone], [alone], queries, queries, "a", skills, context(alone, loss=loss))
    )
    assert half.item() == 0
    assert torch.isfinite(torch.autograd.grad(half, queries)[0]).all()


def test_autocast_does_not_round_the_cosines():
    queries, skills = unit(2, 0).detach().float(), unit(5, 1).detach().float()
    lists, of = [ONE, TWO], context(ONE, TWO, loss=Matryoshka(dims=(4,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = encoder_scores(lists, lists, queries, queries, "abcde", skills, of)
        cut = batch.truncated(4)
    assert torch.equal(batch.scores, queries @ skills.T)
    first = (torch.nn.functional.normalize(vectors[:, :4], dim=1) for vectors in (queries, skills))
    assert torch.equal(cut.scores, next(first) @ next(first).T) and torch.equal(
        cut.gains, batch.gains
    )
    half = encoder_scores(lists, lists, queries.bfloat16(), None, "abcde", skills.bfloat16(), of)
    assert half.scores.dtype == half.gains.dtype == torch.float32


# Teachers ---------------------------------------------------------------------

TAUGHT = TrainingList(
    "q1", "pods", ("a", "b", "e"), (1.0, 0.0, 0.0), frozenset("a"), (3.0, 1.0, float("nan"))
)
TAUGHT_TOO = TrainingList("q2", "clips", ("c", "e"), (1.0, 0.0), frozenset("c"), (2.0, -2.0))


@pytest.mark.parametrize("loss", [KL(), MarginMSE()])
def test_only_candidates_that_the_teacher_scored_count(loss):
    of = context(TAUGHT, TAUGHT_TOO, loss=loss)
    lists, queries, skills = [TAUGHT, TAUGHT_TOO], unit(2, 0), unit(5, 1)
    batch = encoder_scores(lists, lists, queries, None, "abcde", skills, of)
    assert batch.valid.tolist() == [
        [True, True, False, False, False],
        [False, False, True, False, True],
    ]
    assert batch.teacher_scores.tolist() == [[3, 1, 0, 0, 0], [0, 0, 2, 0, -2]]
    loss(batch).backward()
    assert torch.isfinite(skills.grad).all() and (skills.grad[3] == 0).all()


@pytest.mark.parametrize("scores", [None, (float("nan"), float("nan"))])
def test_a_list_without_teacher_scores_is_named(scores):
    lists = (TAUGHT, TrainingList("q9", "clips", ("c", "e"), (1.0, 0.0), frozenset("c"), scores))
    with raises("no-teacher-scores"):
        check_teacher_scores(TrainingSet(lists, SKILLS), KL())
    check_teacher_scores(TrainingSet(lists, SKILLS), ListwiseCE())


def test_lists_of_unequal_length_become_one_table():
    flat = torch.tensor([1.0, 2, 3, 4, 5], requires_grad=True)
    batch = list_scores([TAUGHT, TAUGHT_TOO], flat, needs_teacher_scores=False)
    assert batch.scores.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.gains.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert batch.valid.tolist() == [[True, True, True], [True, True, False]]
    assert batch.optional_teacher_scores is None
    (gradient,) = torch.autograd.grad(RankNet()(batch), flat)
    assert (gradient != 0).all()
    taught = list_scores([TAUGHT, TAUGHT_TOO], torch.zeros(5), needs_teacher_scores=True)
    assert taught.valid.tolist() == [[True, True, False], [True, True, False]]
    assert taught.teacher_scores.tolist() == [[3, 1, 0], [2, -2, 0]]
