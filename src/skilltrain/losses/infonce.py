"""InfoNCE over the step's skills, with symmetric and same-side terms where asked for; late interaction, on MaxSim."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.list_losses import contrast, weighted_loss
from skilltrain.losses.scored_batch import (
    Direction,
    Loss,
    Needs,
    ScoredBatch,
    Temperature,
    cosines,
)


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
        vectors for directions beyond the first.
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
    def needs(self) -> Needs:
        has_others = len(self.directions) > 1
        return Needs(vectors=has_others, directions=has_others)

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
        if self.push_share and self.needs.directions:
            raise ValueError("push_share is for directions: [query_to_skill] alone")
        return self

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        if self.push_share:
            return self._pull_and_push(batch)
        if not self.needs.directions:
            return contrast(batch, self.temperature)
        if self.partition == "per_direction":
            queries = self._strengths(batch)["skill_to_query"]
            to_queries = weighted_loss(batch, batch.scores, queries, self.temperature)
            return (contrast(batch, self.temperature) + to_queries) / 2
        return contrast(batch, self.temperature, self._others(batch))

    def _pull_and_push(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        is_rejected = batch.gains < 0
        without_rejected = replace(batch, valid=batch.valid & ~is_rejected)
        rejected_alone = replace(batch, valid=batch.valid & (is_rejected | batch.is_positive))
        pulled = contrast(without_rejected, self.temperature)
        pushed = contrast(rejected_alone, self.temperature)
        return (1 - self.push_share) * pulled + self.push_share * pushed

    def _others(self, batch: ScoredBatch) -> Float[Tensor, "positive"]:
        """Return what else stands in each positive's denominator, as a log."""
        row, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
        strengths = self._strengths(batch)
        terms: list[Tensor] = []  # each [positive]
        if "skill_to_query" in strengths:
            terms += [strengths["skill_to_query"], batch.scores[row, column] / self.temperature]
        if "query_to_query" in strengths:
            terms.append(strengths["query_to_query"][row])
        if "skill_to_skill" in strengths:
            terms.append(strengths["skill_to_skill"])
        return torch.stack(terms).logsumexp(0)

    def _strengths(self, batch: ScoredBatch) -> dict[Direction, Float[Tensor, "row"]]:
        """Return log(sum of e^(cosine / temperature)) over each row's negatives, by direction.

        The log is -inf for a row without negatives.
        """
        vectors = batch.vectors
        positives = vectors.skills[batch.is_positive.nonzero(as_tuple=True)[1]]  # [positive, dim]
        pairs: dict[Direction, tuple[Tensor, Tensor]] = {
            "query_to_query": (vectors.queries, vectors.all_queries),
            "skill_to_query": (positives, vectors.all_queries),
            "skill_to_skill": (positives, vectors.skills),
        }
        strengths: dict[Direction, Tensor] = {}
        for direction, (rows, others) in pairs.items():
            if direction in self.directions:
                scores = cosines(rows, others) / self.temperature  # [row, other]
                is_negative = batch.negatives[direction]
                strengths[direction] = scores.masked_fill(~is_negative, -torch.inf).logsumexp(1)
        return strengths


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
