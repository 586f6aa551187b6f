"""What every loss is, and what it sees: scores, gains and which candidates count."""

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
        directions: `ScoredBatch.negatives` and the queries of all ranks, which only an encoder
            has. They come with `vectors`.
    """

    teacher_scores: bool = False
    vectors: bool = False
    directions: bool = False


@dataclass(frozen=True)
class Vectors:
    """Unit vectors of a step, whose cosines are the scores.

    `all_queries` are those of all ranks, for a loss that needs other directions; else there are none.
    """

    queries: Float[Tensor, "query dim"]
    skills: Float[Tensor, "candidate dim"]
    all_queries: Float[Tensor, "other dim"]

    @property
    def scores(self) -> Float[Tensor, "query candidate"]:
        return cosines(self.queries, self.skills)

    def truncated(self, dim: int) -> "Vectors":
        """Return the first `dim` coordinates, made unit vectors again."""
        whole = (self.queries, self.skills, self.all_queries)
        with torch.autocast(self.skills.device.type, enabled=False):
            parts = [torch.nn.functional.normalize(part[:, :dim], dim=1) for part in whole]
        return Vectors(*parts)


def cosines(
    left: Float[Tensor, "left dim"], right: Float[Tensor, "right dim"]
) -> Float[Tensor, "left right"]:
    """Return the cosines of unit vectors in their own number format, also under autocast."""
    with torch.autocast(left.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        return left @ right.T


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of candidates, the gains that a recipe gives to their verdicts, and which of them count.

    Losses return the sum over queries: the trainer divides by the number of queries in the global step, so that
    neither ranks nor accumulation change what a query weighs. Gradients through invalid candidates are exactly zero.

    Gains are any finite numbers; a trainer counts them from that of an irrelevant skill, so that in-batch negatives,
    which nobody judged, have 0. `positive` names the skills to find, by their verdicts; None: those of gain > 0.

    The other parts are there for a loss that declares them in `Loss.needs`. Where a loss learns from
    teacher scores, every valid candidate has one. `negatives` says for each direction but the first
    which others are negatives of a row. The rows are this rank's queries or, in the directions from
    skills, its positives in the order of `is_positive`: one row for each query that a positive
    answers. The others are all queries, or all skills, of the step. A row's negatives depend on no
    other row, so that ranks add up.
    """

    scores: Float[Tensor, "query candidate"]
    gains: Float[Tensor, "query candidate"]
    valid: Bool[Tensor, "query candidate"]
    optional_teacher_scores: Float[Tensor, "query candidate"] | None = None
    positive: Bool[Tensor, "query candidate"] | None = None
    optional_vectors: Vectors | None = None
    negatives: Mapping[Direction, Bool[Tensor, "_ _"]] = field(default_factory=dict)

    @property
    def is_positive(self) -> Bool[Tensor, "query candidate"]:
        """Which valid candidates are to be found."""
        return (self.gains > 0 if self.positive is None else self.positive) & self.valid

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
        """Scores with `filler` for invalid candidates, whatever theirs are: no gradient reaches them."""
        return self.scores.masked_fill(~self.valid, filler)

    def truncated(self, dim: int) -> "ScoredBatch":
        """Return the same batch scored by the first `dim` coordinates of its vectors."""
        vectors = self.vectors.truncated(dim)
        return replace(self, scores=vectors.scores, optional_vectors=vectors)


def _undeclared(part: str) -> SkilltrainError:
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
    name: Any = Field(description="name of the loss, or its import path")

    @property
    def needs(self) -> Needs:
        """What the loss reads besides scores, gains and valid candidates."""
        return Needs()

    @abstractmethod
    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the loss, summed over queries."""


EncoderLoss = Annotated[SerializeAsAny[Loss], OneOf("loss", tag="name")]
RerankerLoss = Annotated[SerializeAsAny[Loss], OneOf("loss", tag="name", only="fits_reranker")]


def gain_shares(
    batch: ScoredBatch, counted: Bool[Tensor, "query candidate"]
) -> Float[Tensor, "query candidate"]:
    """Each counted candidate's share in their gains: a query's sum to 1, or to 0 where it has none."""
    gains = torch.where(batch.valid & counted, batch.gains, 0.0).to(batch.scores)
    return gains / gains.sum(1, keepdim=True).clamp(min=torch.finfo(gains.dtype).tiny)
