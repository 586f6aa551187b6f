"""What ranks: the protocol, the kinds that a recipe can name, and the two that are made of others.

A kind is a file of this folder with a Config (`kind`, `keep`, `check`); its `open` reads the model, whose `over` gives
what can `rank` the skills of a pool. The Config's name stands in the union `RankerConfig`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.papers.skillflow.expand import Expand, ExpandConfig
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.late import LateConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rankings import RRF_K, Keep, Method, SavedConfig, fuse
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.retrieval.select import AdmitConfig, Select, SelectConfig

OWN = "self"
"""The `source` that stands for the model in training."""
LEG_KEEP = 100
"""Skills that a leg of `fuse` finds where the recipe does not say: the same for any depth of the system."""

_Leg = LexicalConfig | DenseConfig | ApiConfig | SavedConfig | RerankConfig | LateConfig
LegConfig = Annotated[_Leg, Field(discriminator="kind")]


class FuseConfig(Config):
    """Fuse the rankings of several rankers, by normalised scores or by ranks (see `fuse`)."""

    kind: Literal["fuse"] = "fuse"
    of: tuple[LegConfig, ...] = Field(
        min_length=2, description=f"the rankers; without keep one finds {LEG_KEEP}"
    )
    method: Method = Field(
        default="z", description="z: add scores, normalised per query; rrf: add 1/(rrf_k + rank)"
    )
    rrf_k: int = Field(
        default=RRF_K, ge=0, description="the larger, the less the first ranks stand out"
    )
    weights: tuple[float, ...] | None = Field(
        default=None, description="one per ranker; null: all equal"
    )
    keep: Keep = None

    @model_validator(mode="after")
    def _one_weight_each(self) -> "FuseConfig":
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError(
                f"{len(self.of)} rankers are fused, and there are {len(self.weights)} weights"
            )
        return self

    def check(self) -> None:
        """Do nothing: the rankers of `of` are checked one by one."""

    def leg_weights(self) -> tuple[float, ...]:
        """Return one weight per ranker."""
        return self.weights or (1 / len(self.of),) * len(self.of)


AskingConfig = SelectConfig | AdmitConfig | ExpandConfig
"""Rankers that ask a chat model; at work, they hold `counts` of what came of it."""
Asking = Select | Expand
RankerConfig = Annotated[_Leg | FuseConfig | AskingConfig, Field(discriminator="kind")]


def leg_name(leg: RankerConfig) -> str:
    """What a ranker is, in a word or two: `lexical name`, `dense`."""
    return (
        f"{leg.kind} {leg.fields}"
        if isinstance(leg, LexicalConfig) and leg.fields != "full"
        else leg.kind
    )


def parts_of(rankers: Sequence[RankerConfig]) -> Iterator[RankerConfig]:
    """Yield each ranker, and what it is made of: the legs of a fused one, what is asked by one that expands."""
    for ranker in rankers:
        yield ranker
        if isinstance(ranker, FuseConfig | ExpandConfig):
            yield from ranker.of if isinstance(ranker, FuseConfig) else (ranker.of,)


def needs_candidates(ranker: RankerConfig) -> bool:
    """Whether it cannot rank a whole pool."""
    return any(
        isinstance(part, RerankConfig | LateConfig | SelectConfig | AdmitConfig)
        for part in parts_of([ranker])
    )


def num_read(ranker: RankerConfig) -> int | None:
    """How many of its candidates, from the first on, decide what it answers; None for all."""
    part = ranker.of if isinstance(ranker, ExpandConfig) else ranker
    return part.keep if isinstance(part, RerankConfig | SelectConfig | AdmitConfig) else None


def is_own(part: RankerConfig) -> bool:
    """Whether it is the model in training."""
    return isinstance(part, DenseConfig | RerankConfig) and part.source == OWN


@dataclass(frozen=True)
class Fuse:
    """Rankers whose rankings are fused."""

    config: FuseConfig
    legs: Sequence[Ranker]

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Return the `keep` best of the skills that the legs find, or of the candidates."""
        by_leg = self.find(queries, candidates)
        rankings: Rankings = {}
        for query in queries:
            legs = [leg[query.query_id] for leg in by_leg]
            rankings[query.query_id] = self.join(legs)[:keep]
        return rankings

    def join(self, legs: Sequence[Ranking]) -> Ranking:
        """Fuse the rankings of one query."""
        config = self.config
        return fuse(legs, config.leg_weights(), config.method, config.rrf_k)

    def find(self, queries: Sequence[Query], candidates: Rankings | None) -> list[Rankings]:
        """Return the rankings of each leg, of the pool or of all candidates."""
        depth = LEG_KEEP
        if candidates is not None:
            depth = max(map(len, candidates.values()), default=0)
        return [
            leg.rank(queries, candidates, config.keep or depth)
            for leg, config in zip(self.legs, self.config.of, strict=True)
        ]


def open_ranker(config: RankerConfig, skills: Sequence[Skill], opened: dict[str, Any]) -> Ranker:
    """Open a ranker over the pool.

    `opened` keeps rankers by `key_of`, for any `keep` and weight. It holds the model in training
    as `OWN`.
    """
    if isinstance(config, FuseConfig):
        return Fuse(config, [open_ranker(leg, skills, opened) for leg in config.of])
    if isinstance(config, ExpandConfig):
        return Expand(config, open_ranker(config.of, skills, opened))
    key = key_of(config)
    if key not in opened:
        opened[key] = config.open().over({skill.skill_id: skill for skill in skills})
    if isinstance(config, RerankConfig) and config.first_weight:
        return replace(opened[key], first_weight=config.first_weight)
    return opened[key]


def key_of(config: RankerConfig) -> str:
    shared = {"keep": 1, "first_weight": 0.0} if isinstance(config, RerankConfig) else {"keep": 1}
    return OWN if is_own(config) else repr(config.model_copy(update=shared))
