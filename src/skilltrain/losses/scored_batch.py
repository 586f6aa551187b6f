"""The base class of losses, and the batch of scores and gains that a loss gets."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, SerializeAsAny
from torch import Tensor

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import OneOf

Temperature = Annotated[float, Field(gt=0, description="the scores are divided by it")]
Direction = Literal["query_to_skill", "skill_to_query", "query_to_query", "skill_to_skill"]


@dataclass(frozen=True)
class Needs:
    """Parts of a batch that a loss reads besides scores, gains and valid candidates.

    Attributes:
        teacher_scores: `ScoredBatch.teacher_scores`.
        vectors: `ScoredBatch.vectors`, which only an encoder has.
        directions: `ScoredBatch.negatives` and `Vectors.all_queries`, for directions other than
            from query to skill. Only an encoder has them. They need `vectors`.
    """

    teacher_scores: bool = False
    vectors: bool = False
    directions: bool = False


@dataclass(frozen=True)
class Vectors:
    """Unit vectors of a step, whose cosines are the scores.

    Attributes:
        queries: Queries of this rank.
        skills: Skills of all ranks.
        all_queries: Queries of all ranks. It has 0 rows unless the loss needs other directions.
        query_ids: Ids of `queries`, to look up stored vectors.
        skill_ids: Ids of `skills`. The windows of a long skill share its id.
    """

    queries: Float[Tensor, "query dim"]
    skills: Float[Tensor, "candidate dim"]
    all_queries: Float[Tensor, "other dim"]
    query_ids: tuple[str, ...] = ()
    skill_ids: tuple[str, ...] = ()

    @property
    def scores(self) -> Float[Tensor, "query candidate"]:
        return cosines(self.queries, self.skills)

    def truncated(self, dim: int) -> "Vectors":
        """Return the first `dim` coordinates of all vectors, normalised to unit length again."""
        matrices = (self.queries, self.skills, self.all_queries)
        with torch.autocast(self.skills.device.type, enabled=False):
            truncated = [torch.nn.functional.normalize(each[:, :dim], dim=1) for each in matrices]
        return Vectors(*truncated, query_ids=self.query_ids, skill_ids=self.skill_ids)


def cosines(
    rows: Float[Tensor, "row dim"], columns: Float[Tensor, "column dim"]
) -> Float[Tensor, "row column"]:
    """Return the cosines of unit vectors, in the dtype of the vectors even under autocast."""
    with torch.autocast(rows.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        return rows @ columns.T


@dataclass(frozen=True)
class ScoredBatch:
    """Scores and gains of the candidates of this rank's queries.

    A loss returns the sum over queries. The trainer divides it by the number of queries in the
    step, so that a query has the same weight for any number of ranks and any accumulation.

    In the training of an encoder, the candidates are the skills of the step, of all ranks. Their
    order depends on the number of ranks, so a loss must not depend on it. Of equal scores or gains,
    for example, none may count as the first. A reranker has only the candidates of each list.

    Attributes:
        scores: Scores of the model. No gradient goes through those of invalid candidates.
        gains: Relevance of each candidate, from its label. The trainer subtracts the gain of an
            irrelevant skill, so unjudged in-batch negatives have 0, and rejected skills less.
        valid: Whether the candidate takes part in the loss.
        optional_teacher_scores: For a loss that needs `teacher_scores`. Every valid candidate then
            has one.
        positive: Whether the candidate is relevant; None if those with a gain above 0 are.
        optional_vectors: For a loss that needs `vectors`.
        negatives: For a loss that needs `directions`, which columns are negatives of each row:

            - query_to_query: rows are this rank's queries, columns the queries of all ranks.
            - skill_to_query: rows are positives, columns the queries of all ranks.
            - skill_to_skill: rows are positives, columns all skills.

            Positives are the (query, skill) pairs of `is_positive`, in its order. Rows do not
            depend on each other, so the losses of ranks can be added.
        own: Whether the candidate is in the list of the query itself. The others are in-batch
            negatives. None: all candidates are in the list.
        untaught: Candidates that are not valid only because they have no teacher score, for a loss
            that needs `teacher_scores`.
        scalars: Numbers that the loss has recorded for the log, by name.
    """

    scores: Float[Tensor, "query candidate"]
    gains: Float[Tensor, "query candidate"]
    valid: Bool[Tensor, "query candidate"]
    optional_teacher_scores: Float[Tensor, "query candidate"] | None = None
    positive: Bool[Tensor, "query candidate"] | None = None
    optional_vectors: Vectors | None = None
    negatives: Mapping[Direction, Bool[Tensor, "_ _"]] = field(default_factory=dict)
    own: Bool[Tensor, "query candidate"] | None = None
    untaught: Bool[Tensor, "query candidate"] | None = None
    scalars: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_own(self) -> Bool[Tensor, "query candidate"]:
        """Which candidates are in the query's own list. The others are in-batch negatives."""
        return torch.ones_like(self.valid) if self.own is None else self.own

    @property
    def is_positive(self) -> Bool[Tensor, "query candidate"]:
        """Which valid candidates are relevant."""
        positive = self.gains > 0 if self.positive is None else self.positive
        return positive & self.valid

    @property
    def teacher_scores(self) -> Float[Tensor, "query candidate"]:
        """The teacher's scores, 0 for invalid candidates."""
        if self.optional_teacher_scores is None:
            raise _undeclared("teacher_scores")
        return self.optional_teacher_scores.to(self.scores).masked_fill(~self.valid, 0.0)

    @property
    def vectors(self) -> Vectors:
        """The vectors of queries and skills that the scores are cosines of."""
        if self.optional_vectors is None:
            raise _undeclared("vectors")
        return self.optional_vectors

    def filled(self, filler: float) -> Float[Tensor, "query candidate"]:
        """Return the scores with `filler` at invalid candidates, so that these get no gradient."""
        return self.scores.masked_fill(~self.valid, filler)

    def for_needs(self, needs: Needs) -> "ScoredBatch":
        """Return the batch as a part of the loss needs it.

        A part without `teacher_scores` also gets the candidates that have no teacher score.
        """
        if self.untaught is None or needs.teacher_scores:
            return self
        return replace(self, valid=self.valid | self.untaught, untaught=None)

    def record(self, name: str, value: Float[Tensor, ""]) -> None:
        """Show a number in the log and the trackers, as `loss/NAME`.

        Args:
            name: Name of the number. Every call of the loss must record the same names, because
                the ranks add their numbers.
            value: Sum over the queries of the batch. The log shows the mean over all queries of a
                step.
        """
        self.scalars[name] = self.scalars.get(name, 0.0) + value.detach()

    def truncated(self, dim: int) -> "ScoredBatch":
        """Return the same batch scored by the first `dim` coordinates of its vectors."""
        vectors = self.vectors.truncated(dim)
        return replace(self, scores=vectors.scores, optional_vectors=vectors)


def _undeclared(part: str) -> SkilltrainError:
    """Return the error for a loss that reads a part of the batch without declaring it."""
    fix = f"return Needs({part}=True) from the loss's property `needs`"
    return SkilltrainError(
        "undeclared-need", f"this batch has no {part}: its loss does not declare them", fix=fix
    )


class Loss(Config):
    """A loss by name: its hyper-parameters are fields, and calling it gives the loss of a batch.

    Example:
        class Hinge(Loss):
            name: str
            margin: float = 1.0

            def __call__(self, batch):
                margins = self.margin - batch.scores
                return margins.clamp(min=0).masked_fill(~batch.valid, 0).sum()
    """

    fits_reranker: ClassVar[bool] = True
    """False for a loss that always needs vectors."""
    can_be_part: ClassVar[bool] = True
    """False for a loss that contains other losses, which cannot be a part of `sum`."""
    # Of type Any, so that a subclass can have a Literal or a str.
    name: Any = Field(description="name of the loss, or its import path")

    @property
    def needs(self) -> Needs:
        """What the loss reads besides scores, gains and valid candidates."""
        return Needs()

    @abstractmethod
    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the loss, summed over queries."""


def call_loss(loss: Loss, batch: ScoredBatch) -> Float[Tensor, ""]:
    """Compute the loss of a batch, and check that a model can learn from the value.

    Args:
        loss: The loss, which may be a plug-in of another package.
        batch: Scores, with everything else that the loss reads.

    Raises:
        SkilltrainError: The value is no tensor of one number, or has no gradient.
    """
    value: Any = loss(batch)
    # For example, Python's `sum` of no pairs is the number 0.
    if isinstance(value, int | float):
        value = torch.tensor(value)
    if not isinstance(value, Tensor):
        problem = f"returns {value!r:.50}, not a tensor"
    elif value.ndim > 0:
        problem = f"returns a tensor of shape {tuple(value.shape)}, not a number"
    # Accept a value with a gradient, and any value in an evaluation, where the scores have no
    # gradient. Accept the constant 0 too: a loss may return it if it has no pairs to compare.
    elif value.requires_grad or not batch.scores.requires_grad or value == 0:
        # Add 0, computed from the model's output, so that the constant 0 can run backward too.
        return value + batch.scores[:0].sum()
    else:
        problem = "returns a value without a gradient, so that the model cannot learn"
    raise SkilltrainError(
        "unusable-plugin",
        problem,
        where=f"loss {type(loss).__module__}:{type(loss).__qualname__}",
        fix="return the sum over queries, as a tensor computed from batch.scores",
    )


# Losses in recipes are found by name; `only` is the class attribute that must be true.
EncoderLoss = Annotated[SerializeAsAny[Loss], OneOf("loss", tag="name")]
PartLoss = Annotated[SerializeAsAny[Loss], OneOf("loss", tag="name", only="can_be_part")]
RerankerLoss = Annotated[SerializeAsAny[Loss], OneOf("loss", tag="name", only="fits_reranker")]


def gain_shares(
    batch: ScoredBatch, counted: Bool[Tensor, "query candidate"]
) -> Float[Tensor, "query candidate"]:
    """Return the share of each candidate in the gains of its query.

    The shares of one query sum to 1, or to 0 if no candidate counts.

    Args:
        batch: Gains, and which candidates are valid.
        counted: Which candidates count. They must not have negative gains. The others get 0.
    """
    gains = torch.where(batch.valid & counted, batch.gains, 0.0).to(batch.scores)
    return gains / gains.sum(1, keepdim=True).clamp(min=torch.finfo(gains.dtype).tiny)
