"""InfoNCE over the step's skills, with symmetric and same-side terms where asked for; late interaction, on MaxSim."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.losses.list_losses import contrast
from skilltrain.losses.scored_batch import Loss, ScoredBatch, SideScores, Temperature, gain_shares

Direction = Literal["query_to_skill", "skill_to_query", "query_to_query", "skill_to_skill"]


class InfoNCE(Loss):
    """InfoNCE over hard and in-batch negatives, in one direction or more.

    Use: the encoder's default; the other queries' skills serve as further negatives. For symmetric InfoNCE (Jina)
        add skill_to_query, per_direction; for GTE's improved contrast take all four directions, joint.
    Formula: `contrast`, the one formula that listwise cross-entropy has too; scores are cosines. joint adds to a
        positive's denominator the queries it does not answer and itself once more (skill_to_query), the queries that
        share no skill with its own (query_to_query), and the skills of other lists (skill_to_skill). per_direction is
        the mean of the query's cross-entropy over skills and the positive's over queries. push_share a takes what is
        worth less than an irrelevant skill out of the denominator: (1 - a) contrast without it + a contrast with it
        alone.
    Inputs: cosines in [-1, 1]; any gains, positives above 0; false negatives in the batch are marked invalid;
        `sides` for directions beyond the first.
    Returns: the sum over queries. sentence-transformers' MultipleNegativesRankingLoss is the mean, and the same for
        lists with one positive each that share no skill and hold no false negative for one another: it knows neither.
    Example: cosines (1, 0), gains (1, 0), temperature 1: log(1 + 1/e).
    Source: SkillRouter, section 4.2, equation 1 (temperature 0.05); van den Oord et al. 2018; joint: Li et al. 2023
        (GTE), whose sums hold the positive pair twice; per_direction: Günther et al. 2023 (Jina Embeddings 2);
        push_share 0.5 and per_direction are our two readings of R3's "bilateral balancing", which its public texts do
        not define.
    """

    name: Literal["infonce"] = "infonce"
    temperature: Temperature = 0.05
    directions: tuple[Direction, ...] = Field(
        default=("query_to_skill",), description="what is contrasted with what"
    )
    partition: Literal["joint", "per_direction"] = Field(
        default="joint",
        description="one denominator for all directions, or the mean of one loss for each",
    )
    push_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the loss that pushes rejected skills away"
    )

    @property
    def needs_sides(self) -> bool:
        return len(self.directions) > 1

    @model_validator(mode="after")
    def _check_directions(self) -> "InfoNCE":
        if "query_to_skill" not in self.directions:
            raise ValueError(
                "directions must hold query_to_skill: it compares a query with its positive"
            )
        same_side = sorted({"query_to_query", "skill_to_skill"}.intersection(self.directions))
        if self.partition == "per_direction" and same_side:
            raise ValueError(
                f"{same_side[0]} holds no positive to find, so partition must be joint"
            )
        if self.push_share and self.needs_sides:
            raise ValueError("push_share is for directions: [query_to_skill] alone")
        return self

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        if self.push_share:
            below = batch.gains < 0
            pulled = contrast(replace(batch, valid=batch.valid & ~below), self.temperature)
            pushed = contrast(
                replace(batch, valid=batch.valid & (below | batch.is_positive)), self.temperature
            )
            return (1 - self.push_share) * pulled + self.push_share * pushed
        if not self.needs_sides:
            return contrast(batch, self.temperature)
        if batch.sides is None:
            raise SkilltrainError(
                "only an encoder has directions beyond query_to_skill", where="loss.directions"
            )
        if self.partition == "joint":
            return contrast(batch, self.temperature, self._joint(batch, batch.sides))
        return (contrast(batch, self.temperature) + self._symmetric(batch, batch.sides)) / 2

    def _joint(self, batch: ScoredBatch, sides: SideScores) -> Float[Tensor, "positive"]:
        """What else stands in each positive's denominator, as a log."""
        row, column = batch.is_positive.nonzero(as_tuple=True)
        terms = []
        if "skill_to_query" in self.directions:
            terms += [
                sides.skill_to_query.strength(self.temperature),
                batch.scores[row, column] / self.temperature,
            ]
        if "query_to_query" in self.directions:
            terms.append(sides.query_to_query.strength(self.temperature)[row])
        if "skill_to_skill" in self.directions:
            terms.append(sides.skill_to_skill.strength(self.temperature))
        return torch.stack(terms).logsumexp(0)

    def _symmetric(self, batch: ScoredBatch, sides: SideScores) -> Float[Tensor, ""]:
        """Each positive against the queries that it does not answer, weighted as in `contrast`."""
        cells = batch.is_positive.nonzero(as_tuple=True)
        others = sides.skill_to_query.strength(self.temperature)
        each = torch.nn.functional.softplus(others - batch.scores[cells] / self.temperature)
        return (gain_shares(batch, batch.is_positive)[cells] * each).sum()


class LateInteraction(Config):
    """A second loss of an encoder, which makes its tokens' vectors a ranker too (`kind: late`).

    Use: an encoder that finds candidates by its vectors and orders them by MaxSim, from the same weights.
    Formula: weight x infonce at a temperature of its own, from queries to skills.
    Inputs: the batch with MaxSim for scores (`max_sim`, in [-1, 1]).
    Returns: the sum over queries.
    Example: MaxSim (1, 0), gains (1, 0), temperature 1, weight 0.5: log(1 + 1/e) / 2.
    Source: Khattab and Zaharia 2020 (ColBERT), with InfoNCE's in-batch negatives and no projection.
    """

    weight: float = Field(
        default=1.0, gt=0, description="what this loss counts for beside the encoder's own"
    )
    temperature: float = Field(
        default=0.02, gt=0, description="the mean largest cosines are divided by it"
    )

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the loss, summed over queries."""
        return self.weight * contrast(batch, self.temperature)
