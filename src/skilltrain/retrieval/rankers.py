"""What ranks: the protocol, the kinds that a recipe can name, and the two that are made of others.

A kind is a file of this folder with a Config (`kind`, `keep`, `check`, `open`) and a class with `rank`; its Config's
name stands in the union `RankerConfig`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np
from jaxtyping import Float64
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.records import Query, Ranking, Rankings, Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rerank import RerankConfig, with_rest
from skilltrain.retrieval.saved import SavedConfig
from skilltrain.retrieval.select import SelectConfig

OWN = "self"
"""The `source` that stands for the model in training."""
LEG_KEEP = 100
"""Skills that a leg of `fuse` finds where the recipe does not say: the same for any depth of the system."""


Method = Literal["z", "max", "minmax", "rrf"]


class Ranker(Protocol):
    """Whatever puts skills in an order for a query."""

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """query_id → the skills that it ranks, best first.

        Without `candidates` these are the `keep` best of the whole pool; with them, the candidates in a new order.
        `rerank` and `select` order the first `keep` candidates and leave the others behind them, all other kinds
        return the `keep` best. Equal scores keep the order of the candidates, or of the pool.
        """
        ...


LegConfig = Annotated[LexicalConfig | DenseConfig | ApiConfig | SavedConfig | RerankConfig, Field(discriminator="kind")]


class FuseConfig(Config):
    """Rankings of several rankers as one: by their scores, made comparable, or by their ranks alone (see `fuse`)."""

    kind: Literal["fuse"] = "fuse"
    of: tuple[LegConfig, ...] = Field(
        min_length=2, description=f"the rankers; each finds {LEG_KEEP} skills where it has no keep"
    )
    method: Method = Field(
        default="z", description="z, max or minmax: add scores, normalised so for each query; rrf: add 1/(rrf_k + rank)"
    )
    weights: tuple[float, ...] | None = Field(default=None, description="one a ranker; null: equal shares of 1")
    rrf_k: int = Field(default=60, ge=0, description="the larger, the less the first ranks stand out")
    keep: int | None = Field(default=None, ge=1, description="skills a query that are kept; null: as many as needed")

    @model_validator(mode="after")
    def _one_weight_each(self) -> "FuseConfig":
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError(f"{len(self.of)} rankers are fused, and there are {len(self.weights)} weights")
        return self

    def check(self) -> None:
        """Nothing to check beside its parts."""


RankerConfig = Annotated[
    LexicalConfig | DenseConfig | ApiConfig | SavedConfig | RerankConfig | SelectConfig | FuseConfig,
    Field(discriminator="kind"),
]


def parts_of(rankers: Sequence[RankerConfig]) -> Iterator[RankerConfig]:
    """Yield each ranker, and what a fused one is made of."""
    for ranker in rankers:
        yield ranker
        if isinstance(ranker, FuseConfig):
            yield from ranker.of


def needs_candidates(ranker: RankerConfig) -> bool:
    """Whether it cannot rank a whole pool."""
    return any(isinstance(part, RerankConfig | SelectConfig) for part in parts_of([ranker]))


def is_own(ranker: RankerConfig) -> bool:
    """Whether it is, or holds, the model in training."""
    return any(isinstance(part, DenseConfig | RerankConfig) and part.source == OWN for part in parts_of([ranker]))


@dataclass(frozen=True)
class Fuse:
    """Rankers whose rankings are fused."""

    config: FuseConfig
    legs: Sequence[Ranker]

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best of all skills that the legs find (or of the candidates, in their order)."""
        most = LEG_KEEP if candidates is None else max(map(len, candidates.values()), default=0)
        keeps = [leg.keep or most for leg in self.config.of]
        found = [leg.rank(queries, candidates, count) for leg, count in zip(self.legs, keeps, strict=True)]
        weights = self.config.weights or [1 / len(self.legs)] * len(self.legs)
        rankings: Rankings = {}
        for query_id in (query.query_id for query in queries):
            legs = [leg[query_id] for leg in found]
            rankings[query_id] = fuse(legs, weights, self.config.method, self.config.rrf_k)[:keep]
        return rankings


def fuse(legs: Sequence[Ranking], weights: Sequence[float], method: Method, rrf_k: int) -> Ranking:
    """All skills that the `legs` found, best first; equal scores stand in the order in which they were found.

    `z`, `max` and `minmax` add each leg's scores, made comparable over the skills that any leg found, times the leg's
    weight. A skill that a leg did not find gets the lowest score that this leg gave.

    `rrf` adds weight / (rrf_k + rank); a leg adds nothing to a skill that it did not find (Cormack et al., 2009).
    """
    skill_ids = list(dict.fromkeys(skill_id for leg in legs for skill_id, _ in leg))
    if not skill_ids:
        return []
    total = np.zeros(len(skill_ids))
    for leg, weight in zip(legs, weights, strict=True):
        if method == "rrf":
            scores, lowest = {skill_id: 1 / (rrf_k + rank) for rank, (skill_id, _) in enumerate(leg, 1)}, 0.0
        else:
            scores = dict(leg)
            lowest = min(scores.values(), default=0.0)
        total += weight * _comparable(np.array([scores.get(skill_id, lowest) for skill_id in skill_ids]), method)
    order = np.argsort(-total, kind="stable")
    return [(skill_ids[place], float(total[place])) for place in order]


def _comparable(scores: Float64[np.ndarray, " skill"], method: Method) -> Float64[np.ndarray, " skill"]:
    """`scores` without their unit; zeros where all are alike, for then they tell nothing apart."""
    if method == "rrf":
        return scores
    largest, width = np.abs(scores).max(), scores.max() - scores.min()
    if width <= 1e-12 * largest:
        return np.zeros_like(scores)
    if method == "max":
        return scores / largest
    return (scores - scores.mean()) / scores.std() if method == "z" else (scores - scores.min()) / width


@dataclass(frozen=True)
class Weighted:
    """A reranker to whose scores those of the ranker before are added, times `weight`.

    With few lists to learn from, the two models err on different queries.
    """

    ranker: Ranker
    weight: float

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The first `keep` candidates by the sum, the others behind them in their order."""
        assert candidates is not None, "a reranker needs candidates"
        reranked = self.ranker.rank(queries, candidates, keep)
        rankings: Rankings = {}
        for query_id, before in candidates.items():
            scores = dict(reranked[query_id])
            mixed = [(skill_id, scores[skill_id] + self.weight * score) for skill_id, score in before[:keep]]
            rankings[query_id] = with_rest(mixed, before[keep:])
        return rankings


def open_ranker(config: RankerConfig, skills: Sequence[Skill], opened: dict[str, Ranker]) -> Ranker:
    """The ranker over the pool `skills`; `opened` keeps it for all that differ from it by `keep` and weight alone.

    The model in training is found in `opened` under the name `OWN`.
    """
    if isinstance(config, FuseConfig):
        return Fuse(config, [open_ranker(leg, skills, opened) for leg in config.of])
    key = key_of(config)
    if key not in opened:
        opened[key] = config.open(skills)
    if isinstance(config, RerankConfig) and config.first_weight:
        return Weighted(opened[key], config.first_weight)
    return opened[key]


def key_of(config: RankerConfig) -> str:
    """What tells an opened ranker from others."""
    shared = {"keep": 1, "first_weight": 0.0} if isinstance(config, RerankConfig) else {"keep": 1}
    return OWN if is_own(config) else repr(config.model_copy(update=shared))
