"""What every loss is, and what it sees: scores, gains and which candidates count."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config

Temperature = Annotated[float, Field(gt=0, description="the scores are divided by it")]


@dataclass(frozen=True)
class SideTerm:
    """Scores between one thing a row and all others of the step, and which of those are its negatives."""

    scores: Float[Tensor, "row other"]
    is_negative: Bool[Tensor, "row other"]

    def strength(self, temperature: float) -> Float[Tensor, "row"]:
        """Log of the sum of e^(score / temperature) over each row's negatives; -inf where it has none."""
        return (self.scores / temperature).masked_fill(~self.is_negative, -torch.inf).logsumexp(1)


@dataclass(frozen=True)
class SideScores:
    """What a symmetric or same-side contrast adds to a batch, for the rows that this rank has.

    A positive is a row of `skill_to_*` for each query that it answers, in the order of `positive_cells`. The others
    are all queries, or all skills, of the step. A row's negatives depend on no other row, so that ranks add up.
    """

    query_to_query: SideTerm
    skill_to_query: SideTerm
    skill_to_skill: SideTerm


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of candidates, the gains that a recipe gives to their verdicts, and which of them count.

    Losses return the sum over queries: the trainer divides by the number of queries in the global step, so that
    neither ranks nor accumulation change what a query weighs. Gradients through invalid candidates are exactly zero.
    Where a loss learns from teacher scores, every valid candidate has one. `truncated(dim)` is the same batch scored by
    the first `dim` coordinates of an encoder's vectors, made unit vectors again.

    Gains are any finite numbers; a trainer counts them from that of an irrelevant skill, so that in-batch negatives,
    which nobody judged, have 0. `positive` names the skills to find, by their verdicts; None: those of gain > 0.
    """

    scores: Float[Tensor, "query candidate"]
    gains: Float[Tensor, "query candidate"]
    valid: Bool[Tensor, "query candidate"]
    teacher_scores: Float[Tensor, "query candidate"] | None = None
    sides: SideScores | None = None
    truncated: "Callable[[int], ScoredBatch] | None" = None
    positive: Bool[Tensor, "query candidate"] | None = None

    @property
    def is_positive(self) -> Bool[Tensor, "query candidate"]:
        """Which valid candidates are to be found."""
        return (self.gains > 0 if self.positive is None else self.positive) & self.valid

    def filled(self, filler: float) -> Float[Tensor, "query candidate"]:
        """Scores with `filler` for invalid candidates, whatever theirs are: no gradient reaches them."""
        return self.scores.masked_fill(~self.valid, filler)

    def teacher(self) -> Float[Tensor, "query candidate"]:
        """The teacher's scores, 0 for invalid candidates. A loss that calls this declares `needs_teacher_scores`."""
        assert self.teacher_scores is not None, (
            "the step gives teacher scores to a loss that needs them"
        )
        return self.teacher_scores.to(self.scores).masked_fill(~self.valid, 0.0)


class Loss(Config):
    """A loss by name: its hyper-parameters are fields, and calling it gives the loss of a batch."""

    needs_teacher_scores: ClassVar[bool] = False

    @property
    def needs_sides(self) -> bool:
        """Whether the loss reads `ScoredBatch.sides`, which only an encoder's batch has."""
        return False

    @abstractmethod
    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries. Raises SkilltrainError for scores that the batch does not have."""


def gain_shares(
    batch: ScoredBatch, counted: Bool[Tensor, "query candidate"]
) -> Float[Tensor, "query candidate"]:
    """Each counted candidate's share in their gains: a query's sum to 1, or to 0 where it has none."""
    gains = torch.where(batch.valid & counted, batch.gains, 0.0).to(batch.scores)
    return gains / gains.sum(1, keepdim=True).clamp(min=torch.finfo(gains.dtype).tiny)
