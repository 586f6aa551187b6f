"""A regulariser that spreads the vectors of queries and skills over the sphere."""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from skilltrain.losses.scored_batch import Direction, Loss, Needs, ScoredBatch, cosines


class SpreadOut(Loss):
    """Mean squared cosine between different queries, and between different skills.

    Use: beside another loss, as a part of `sum`. It keeps the vectors of unrelated texts apart.
    Formula: for a query q: mean over other queries r of cos(q, r)^2, plus for each positive p of q
        the mean over other skills s of cos(p, s)^2.
    Inputs: vectors of a batch of several queries. Queries with a common answer are not compared,
        nor are skills of the query's own list.
    Returns: the sum over queries; 0 for a batch of one query.
    Example: two queries at a cosine of 0.5, with positives at a cosine of 0: 0.25 + 0.25.
    Source: Zhang et al. 2017, the second moment of their regulariser; EmbeddingGemma (Google
        DeepMind 2025, arXiv 2509.20354) adds it to a contrastive loss.
    """

    fits_reranker: ClassVar[bool] = False
    name: Literal["spread_out"] = "spread_out"

    @property
    def needs(self) -> Needs:
        return Needs(vectors=True, directions=True)

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """Return a penalty on large cosines between different queries, and different skills.

        Returns:
            A sum of mean squared cosines: for each query the mean over other queries, and for each
            of its positives the mean over other skills.
        """
        vectors = batch.vectors
        # `is_positive` is [query, skill]. `column` is the skill of each positive pair.
        _, column = batch.is_positive.nonzero(as_tuple=True)  # [positive]
        # Vectors to compare, by direction: rows [row, dim] with columns [column, dim]. The rows of
        # skill_to_skill are the positive skills, like the rows of its `batch.negatives`.
        sides: dict[Direction, tuple[Tensor, Tensor]] = {
            "query_to_query": (vectors.queries, vectors.all_queries),
            "skill_to_skill": (vectors.skills[column], vectors.skills),
        }
        total = batch.scores.new_zeros(())
        for direction, (rows, columns) in sides.items():
            # True if the two are compared. Queries with a common answer are not, nor skills of
            # the query's own list.
            is_other = batch.negatives[direction]  # [row, column]
            squares = cosines(rows, columns).square() * is_other  # [row, column]
            # A row that is compared with nothing has the mean 0.
            means = squares.sum(1) / is_other.sum(1).clamp(min=1)  # [row]
            total = total + means.sum()
        return total
