"""InfoNCE with optional symmetric and same-side terms, and a loss on MaxSim scores."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from skilltrain.config import Config
from skilltrain.losses.list_losses import contrast, weighted_cross_entropy
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

    Use: the encoder's default. The skills of other queries are further negatives. For
        symmetric InfoNCE (Jina): directions: [query_to_skill, skill_to_query], partition:
        per_direction. For GTE's improved contrast: all four directions, partition: joint.
    Formula: see `contrast`; scores are cosines. For a positive p of a query q:
        joint: p's denominator also has a term e^{cosine/t} for
            skill_to_query: (p, each query that p does not answer), and (p, q) a second time,
            query_to_query: (q, each query that shares no answer with q),
            skill_to_skill: (p, each skill of another list that is a negative of q).
        per_direction: the mean of the cross-entropy of q over skills and that of p over queries.
        negatives: own or in_batch leave the other negatives of q out of the sum over skills.
        push_share a: (1 - a) contrast(without rejected skills) + a contrast(only positives and
            rejected skills). Rejected skills have a gain below 0.
    Inputs: cosines in [-1, 1]; any gains, positives above 0; false negatives in the batch are
        marked invalid; vectors for directions beyond the first.
    Returns: the sum over queries. sentence-transformers' MultipleNegativesRankingLoss equals this
        divided by the number of queries, if each list has one positive and no query has false
        negatives in the batch.
    Example: cosines (1, 0), gains (1, 0), temperature 1: log(1 + 1/e).
    Source: SkillRouter, section 4.2, equation 1 (temperature 0.05); van den Oord et al. 2018;
        joint: Li et al. 2023 (GTE), whose sums have the positive pair twice; per_direction:
        Günther et al. 2023 (Jina Embeddings 2). push_share 0.5 and per_direction are our two
        readings of R3's "bilateral balancing", which its public texts do not define.
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
    negatives: Literal["all", "own", "in_batch"] = Field(
        default="all",
        description="negatives of a query: all, those of its own list, or those of other lists",
    )
    push_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the loss that pushes rejected skills away"
    )

    @property
    def needs(self) -> Needs:
        has_more_directions = len(self.directions) > 1
        return Needs(vectors=has_more_directions, directions=has_more_directions)

    @model_validator(mode="after")
    def _check_directions(self) -> "InfoNCE":
        """Check that `directions`, `partition`, `negatives` and `push_share` can be combined.

        A direction says what is compared with what: `query_to_skill` compares each query with all
        skills. pydantic turns the ValueError into an error of the setting.
        """
        if "query_to_skill" not in self.directions:
            raise ValueError(
                "directions must hold query_to_skill: it compares a query with its positive"
            )

        # query_to_query and skill_to_skill have no positives, so they have no loss of their own.
        # They only add negatives to the common denominator of `partition: joint`.
        same_side = sorted({"query_to_query", "skill_to_skill"}.intersection(self.directions))
        if self.partition == "per_direction" and same_side:
            raise ValueError(
                f"{same_side[0]} has only negatives and no positives, so partition must be joint"
            )

        # push_share weights two losses of queries against skills, and knows no other direction.
        if self.push_share and len(self.directions) > 1:
            raise ValueError("push_share is for directions: [query_to_skill] alone")
        # Rejected skills are in a query's own list, which `in_batch` leaves out.
        if self.push_share and self.negatives == "in_batch":
            raise ValueError("push_share needs the negatives of a query's list: all or own")
        return self

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the loss, summed over queries.

        A positive is a pair of a query and a relevant skill. A rejected skill is one that a judge
        refused for the query. The settings choose one of four variants:
            push_share: a contrastive loss that leaves out rejected skills, plus a loss that pushes
                them away from the query.
            One direction: queries are contrasted with skills.
            More directions, partition joint: all directions have one common denominator.
            More directions, partition per_direction: the mean of one loss per direction.

        Args:
            batch: Scores of queries and candidates. `valid` marks the candidates that take part.
        """
        # For each value of the setting `negatives`, the mask of the candidates that it keeps. A
        # query's own candidates are those of its training list.
        is_chosen = {"all": batch.valid, "own": batch.is_own, "in_batch": ~batch.is_own}
        # Positives are always kept.
        is_kept = batch.is_positive | is_chosen[self.negatives]  # [query, candidate]
        batch = replace(batch, valid=batch.valid & is_kept)

        if self.push_share:
            return self._pull_and_push(batch)
        if len(self.directions) == 1:  # query_to_skill
            return contrast(batch, self.temperature)
        if self.partition == "joint":
            return contrast(batch, self.temperature, self._log_extra_terms(batch))

        # per_direction: compute a loss of skills against queries, and a loss of queries against
        # skills. The negatives of a skill are other queries. `log_negatives` holds the logsumexp of
        # their scores, divided by the temperature.
        log_negatives = self._log_negatives(batch)["skill_to_query"]  # [positive]
        # `batch.scores` gives the score of the positive pair itself, which both directions share.
        skill_to_query_loss = weighted_cross_entropy(
            log_negatives, batch, scores=batch.scores, temperature=self.temperature
        )
        query_to_skill_loss = contrast(batch, self.temperature)
        return (query_to_skill_loss + skill_to_query_loss) / 2

    def _pull_and_push(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the weighted sum of a loss without rejected skills and a loss against them.

        Rejected skills are those that a judge refused for the query. Their gain is below 0, and
        other irrelevant skills have the gain 0.
        """
        # Candidates that are not valid take no part in a loss.
        is_rejected = batch.gains < 0  # [query, candidate]
        without_rejected = replace(batch, valid=batch.valid & ~is_rejected)
        only_rejected = replace(batch, valid=batch.valid & (is_rejected | batch.is_positive))
        pull_loss = contrast(without_rejected, self.temperature)
        push_loss = contrast(only_rejected, self.temperature)
        return (1 - self.push_share) * pull_loss + self.push_share * push_loss

    def _log_extra_terms(self, batch: ScoredBatch) -> Float[Tensor, "positive"]:
        """Return the logsumexp of the terms that further directions add to the denominator.

        These are all directions but query_to_skill, whose terms `contrast` adds itself. Each
        positive pair has its own denominator.

        Args:
            batch: Scores and vectors of queries and skills, and the mask of the positive pairs.
        """
        # Query (row) and skill (column) of each positive pair.
        row, column = batch.is_positive.nonzero(as_tuple=True)  # each [positive]
        # logsumexp of the negatives, by direction. Only the chosen directions are present.
        log_negatives = self._log_negatives(batch)
        log_terms: list[Tensor] = []  # each [positive]
        if "skill_to_query" in log_negatives:
            log_terms.append(log_negatives["skill_to_query"])
            # As in the paper of GTE, this direction adds the positive pair once more.
            positive_logits = batch.scores[row, column] / self.temperature  # [positive]
            log_terms.append(positive_logits)
        if "query_to_query" in log_negatives:
            # The positives of a query share the query's negatives.
            log_by_query = log_negatives["query_to_query"]  # [query]
            log_terms.append(log_by_query[row])
        if "skill_to_skill" in log_negatives:
            log_terms.append(log_negatives["skill_to_skill"])
        # The logarithm of the sum of all terms.
        return torch.stack(log_terms).logsumexp(0)

    def _log_negatives(self, batch: ScoredBatch) -> dict[Direction, Float[Tensor, "row"]]:
        """Return the logsumexp of the negatives of each row, by direction.

        The direction query_to_query has a row for each query, the others one for each positive. A
        row without negatives has -inf.

        Args:
            batch: Vectors of queries and skills. `batch.negatives` says for each direction which
                columns are negatives of each row.
        """
        vectors = batch.vectors
        _, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
        positives = vectors.skills[column]  # [positive, dim]
        # For each direction, the vectors of the rows and of the columns. `all_queries` holds the
        # queries of all ranks.
        sides: dict[Direction, tuple[Tensor, Tensor]] = {
            "query_to_query": (vectors.queries, vectors.all_queries),
            "skill_to_query": (positives, vectors.all_queries),
            "skill_to_skill": (positives, vectors.skills),
        }
        log_negatives: dict[Direction, Tensor] = {}
        for direction, (rows, columns) in sides.items():
            if direction in self.directions:
                logits = cosines(rows, columns) / self.temperature  # [row, column]
                # -inf adds nothing to a logsumexp.
                logits = logits.masked_fill(~batch.negatives[direction], -torch.inf)
                log_negatives[direction] = logits.logsumexp(1)
        return log_negatives


class LateInteraction(Config):
    """A second loss of an encoder, which trains its token vectors for MaxSim (`kind: late`).

    Use: an encoder that finds candidates by its vectors and orders them by MaxSim, from the same
        weights.
    Formula: weight times infonce from queries to skills, with a separate temperature.
    Inputs: the batch with MaxSim as scores (`max_sim`, in [-1, 1]).
    Returns: the sum over queries.
    Example: MaxSim (1, 0), gains (1, 0), temperature 1, weight 0.5: log(1 + 1/e) / 2.
    Source: Khattab and Zaharia 2020 (ColBERT), with InfoNCE's in-batch negatives and no projection.
    """

    weight: float = Field(
        default=1.0, gt=0, description="weight relative to the encoder's main loss"
    )
    temperature: float = Field(
        default=0.02, gt=0, description="the MaxSim scores are divided by it"
    )

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return the loss, summed over queries."""
        return self.weight * contrast(batch, self.temperature)
