"""The grounds on which a candidate is taken for a false negative: one small class a layer.

To add one:
1. write a Config with `name: Literal["yours"]`, its settings, and `check` and `explain`, as below;
2. add the class to the union `Layer`.
A recipe then lists it under `layers:`; counts, DROPPED rows and the order of layers need no further line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import Field, field_validator, model_validator

from skilltrain.config import Config
from skilltrain.data.filter.facts import Candidates, FilterPool
from skilltrain.data.trigrams import jaccard
from skilltrain.errors import SkilltrainError

Values = Float64[np.ndarray, " candidate"]
"""NaN to keep a candidate, else the value that speaks against it."""


@dataclass(frozen=True)
class Against:
    """What a layer holds against candidates, and which gold skill it held each against (-1: none in particular)."""

    values: Values
    golds: Int64[np.ndarray, " candidate"]


class FilterLayer(Protocol):
    """One ground on which a candidate is dropped."""

    @property
    def name(self) -> str: ...

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """What speaks against each candidate of one query; the same wherever it runs and whatever ran before."""
        ...

    def explain(self, value: float) -> str:
        """What `value` means, as the reason in a DROPPED row."""
        ...


def against_each_gold(candidates: Candidates, compare: Callable[[int], Values]) -> Against:
    """What `compare` holds against the candidates beside each gold skill; the first gold in order of id counts."""
    against = nothing_against(candidates)
    for gold in candidates.golds.tolist():
        found = compare(gold)
        new = np.isnan(against.values) & ~np.isnan(found)
        against.values[new], against.golds[new] = found[new], gold
    return against


def nothing_against(candidates: Candidates) -> Against:
    """All candidates kept."""
    num = len(candidates.skills)
    return Against(np.full(num, np.nan), np.full(num, -1, dtype=np.int64))


class NameLayer(Config):
    """Drops a candidate that bears a gold skill's name (SkillRouter, section 4.2, layer 1); the value is 1."""

    name: Literal["name"] = "name"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Names are compared by `name_key`; a name of separators only equals nothing."""
        names = pool.names[candidates.skills]

        def compare(gold: int) -> Values:
            return np.where((names == pool.names[gold]) & (names >= 0), 1.0, np.nan)

        return against_each_gold(candidates, compare)

    def explain(self, value: float) -> str:
        """A name is the same or it is not: the value adds nothing."""
        return "same name as a gold skill"


class JaccardLayer(Config):
    """Drops a candidate whose body shares most word trigrams with a gold skill's (layer 2).

    On 26,377 real skills and 1,146 queries plain trigrams (the paper's) dropped 1,020 pairs, most of them siblings of
    a template with another function: of 50 read by eye, 2 had the gold skill's function. Without templates 31 pairs
    are dropped (those of a trained encoder's candidates included), and 23 of them had it.
    """

    name: Literal["jaccard"] = "jaccard"
    above: float = Field(default=0.6, ge=0, le=1, description="drop above this Jaccard index of body trigrams")
    max_names: int | None = Field(
        default=5,
        ge=1,
        description="leave out trigrams that stand under more than so many different skill names: what a template "
        "gives to a hundred skills of different function makes no two of them copies; null: plain trigrams, as "
        "SkillRouter",
    )

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Exact; sets whose sizes alone keep them below the threshold are not intersected."""
        trigrams = pool.trigrams(self.max_names)
        sizes = trigrams.starts[candidates.skills + 1] - trigrams.starts[candidates.skills]

        def compare(gold: int) -> Values:
            own, values = trigrams[gold], np.full(len(sizes), np.nan)
            close = np.minimum(sizes, len(own)) > self.above * np.maximum(sizes, len(own))
            for place in np.flatnonzero(close):
                value = jaccard(own, trigrams[candidates.skills[place]])
                if value > self.above:
                    values[place] = value
            return values

        return against_each_gold(candidates, compare)

    def explain(self, value: float) -> str:
        """The Jaccard index and its limit."""
        return f"body overlap {value:.3f} > {self.above:g} with a gold skill"


class CosineLayer(Config):
    """Drops a candidate whose vector is all but a gold skill's (layer 3); the encoder is the stage's `encoder`."""

    name: Literal["cosine"] = "cosine"
    above: float = Field(default=0.92, ge=-1, le=1, description="drop above this cosine to a gold skill")

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Cosines of unit vectors."""

        def compare(gold: int) -> Values:
            values = pool.cosines(candidates.skills, pool.vectors[gold])
            return np.where(values > self.above, values, np.nan)

        return against_each_gold(candidates, compare)

    def explain(self, value: float) -> str:
        """The cosine and its limit."""
        return f"cosine {value:.3f} > {self.above:g} to a gold skill"


class ClusterLayer(Config):
    """Drops a candidate of a gold skill's near-duplicate cluster, a copy of a copy too; the value is 1.

    The clusters are the stage's `clusters`.
    """

    name: Literal["cluster"] = "cluster"

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """A skill without copies is a cluster of its own."""
        clusters = pool.clusters[candidates.skills]
        return against_each_gold(candidates, lambda gold: np.where(clusters == pool.clusters[gold], 1.0, np.nan))

    def explain(self, value: float) -> str:
        """A cluster is the same or it is not: the value adds nothing."""
        return "in one near-duplicate cluster with a gold skill"


class CeilingLayer(Config):
    """Drops a candidate that answers the query about as well as a gold skill, or better; the value is its score.

    NV-Retriever (Moreira et al. 2024) calls the relative margin TopK-PercPos (its 95% is a `relative_margin` of .05)
    and the absolute one TopK-MarginPos. Both margins mean what they do in sentence-transformers' mine_hard_negatives:
    of several golds the one with the lowest score counts, for a list takes every gold for a positive. It is as good as
    its scores: read by eye, 1 of 50 pairs dropped by an untrained MiniLM would have answered the query, and 7 of 50
    dropped by the same model after training; the others were hard negatives.
    """

    name: Literal["ceiling"] = "ceiling"
    scores: Literal["encoder", "ranking"] = Field(
        default="encoder",
        description="encoder: cosines of the stage's `encoder` to the query, for candidates of all sources; ranking: "
        "the source's own scores (a teacher's, a reranker's), where it has ranked a gold skill too",
    )
    relative_margin: float | None = Field(
        default=0.05, ge=0, description="drop above the gold skill's score less this share of it; null: no such limit"
    )
    absolute_margin: float | None = Field(
        default=None, ge=0, description="drop above the gold skill's score less this much; null: no such limit"
    )

    @model_validator(mode="after")
    def _limits_something(self) -> "CeilingLayer":
        if self.relative_margin is None and self.absolute_margin is None:
            raise ValueError("the layer 'ceiling' needs relative_margin or absolute_margin")
        return self

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """A candidate stays where no gold skill has a score."""
        if self.scores == "ranking":
            weakest = [candidates.weakest_golds.get(source, (-1, np.nan)) for source in candidates.sources]
            scores, limits = candidates.scores, np.array([score for _, score in weakest], dtype=np.float64)
            golds = np.array([gold for gold, _ in weakest], dtype=np.int64)
        elif len(candidates.golds):
            query = pool.query_vectors[candidates.query]
            scores, of_golds = pool.cosines(candidates.skills, query), pool.cosines(candidates.golds, query)
            limits = np.full(len(scores), of_golds.min())
            golds = np.full(len(scores), candidates.golds[of_golds.argmin()])
        else:
            return nothing_against(candidates)
        too_close = np.zeros(len(scores), dtype=bool)
        if self.relative_margin is not None:
            too_close |= scores > limits - self.relative_margin * np.abs(limits)
        if self.absolute_margin is not None:
            too_close |= scores > limits - self.absolute_margin
        return Against(np.where(too_close, scores, np.nan), golds)

    def explain(self, value: float) -> str:
        """The score."""
        return f"score {value:.3f} for the query too close to that of a gold skill"


class RankWindowLayer(Config):
    """Keeps, of each source named, only the candidates of a window of ranks; the value is the rank."""

    name: Literal["rank_window"] = "rank_window"
    ranks: dict[str, tuple[int, int | None]] = Field(
        description="source: [first, last] rank to keep, counted from 1; last null: to the end"
    )

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: dict[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
        for source, (first, last) in ranks.items():
            if first < 1 or (last is not None and last < first):
                raise ValueError(f"the ranks of '{source}' must be [first, last] with 1 <= first <= last")
        return ranks

    def check(self, pool: FilterPool, candidates: Candidates) -> Against:
        """Ranks are the source's own, before any layer. Raises SkilltrainError for a source that ranks nothing here."""
        if unknown := sorted(self.ranks.keys() - pool.sources):
            fix = f"sources: {', '.join(sorted(pool.sources))}"
            raise SkilltrainError(
                f"no candidate is of source '{unknown[0]}'", where="layers.rank_window.ranks", fix=fix
            )
        against = nothing_against(candidates)
        for place, (source, rank) in enumerate(zip(candidates.sources, candidates.ranks.tolist(), strict=True)):
            first, last = self.ranks.get(source, (1, None))
            if rank < first or (last is not None and rank > last):
                against.values[place] = rank
        return against

    def explain(self, value: float) -> str:
        """The rank."""
        return f"rank {value:.0f} outside the window of its source"


Layer = Annotated[
    NameLayer | JaccardLayer | CosineLayer | ClusterLayer | CeilingLayer | RankWindowLayer, Field(discriminator="name")
]
