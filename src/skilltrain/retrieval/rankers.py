"""What ranks: the protocol, the kinds that a recipe can name, and the two that are made of others.

A kind is a file of this folder with a Config (`kind`, `keep`, `check`); its `open` reads the model, whose `over` gives
what can `rank` the skills of a pool. The Config's name stands in the union `RankerConfig`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill
from skilltrain.retrieval.api import ApiConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.expand import Expand, ExpandConfig
from skilltrain.retrieval.late import LateConfig
from skilltrain.retrieval.lexical import LexicalConfig
from skilltrain.retrieval.rankings import RRF_K, Method, SavedConfig, fuse
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.retrieval.select import AdmitConfig, Select, SelectConfig

OWN = "self"
"""The `source` that stands for the model in training."""
LEG_KEEP = 100
"""Skills that a leg of `fuse` finds where the recipe does not say: the same for any depth of the system."""
WEIGHTS_FILE = "weights.json"


_Leg = LexicalConfig | DenseConfig | ApiConfig | SavedConfig | RerankConfig | LateConfig
LegConfig = Annotated[_Leg, Field(discriminator="kind")]


class FittedWeights(Config):
    """What the stage fusion writes; `figures` has system → measure → mean, low, high and n, by cross-validation."""

    weights: tuple[Annotated[float, Field(ge=0)], ...]
    legs: tuple[LegConfig, ...]
    num_queries: int
    num_without_gold: int
    folds: int
    seed: int
    figures: dict[str, dict[str, dict[str, float]]]
    skilltrain: str
    fingerprints: dict[str, str]


class FuseConfig(Config):
    """Rankings of several rankers as one: by their scores, made comparable, or by their ranks alone (see `fuse`)."""

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
    weights: tuple[float, ...] | InputPath | None = Field(
        default=None, description="one each, or a fusion's folder"
    )
    keep: int | None = Field(
        default=None, ge=1, description="skills kept per query; null: as many as needed"
    )

    @model_validator(mode="after")
    def _one_weight_each(self) -> "FuseConfig":
        if isinstance(self.weights, tuple) and len(self.weights) != len(self.of):
            raise ValueError(
                f"{len(self.of)} rankers are fused, and there are {len(self.weights)} weights"
            )
        if isinstance(self.weights, Path) and self.method != "z":
            raise ValueError(f"fitted weights are for the method z, not {self.method}")
        return self

    def check(self) -> None:
        self.leg_weights()

    def leg_weights(self) -> tuple[float, ...]:
        """One weight a ranker. Raises SkilltrainError as `check` does."""
        if self.weights is None:
            return (1 / len(self.of),) * len(self.of)
        return (
            read_weights(self.weights, self.of) if isinstance(self.weights, Path) else self.weights
        )


AskingConfig = SelectConfig | AdmitConfig | ExpandConfig
"""Rankers that ask a chat model; at work, they hold `counts` of what came of it."""
Asking = Select | Expand
RankerConfig = Annotated[_Leg | FuseConfig | AskingConfig, Field(discriminator="kind")]


def read_weights(path: Path, legs: Sequence[LegConfig]) -> tuple[float, ...]:
    """The weights in a folder of the stage fusion, or in its file. SkilltrainError: they are not for `legs`.

    Weights that were fitted on saved rankings are for any.
    """
    file = path / WEIGHTS_FILE if path.is_dir() else path
    fitted = validate(FittedWeights, read_json(file), file)
    if not len(fitted.weights) == len(fitted.legs) == len(legs):
        what = f"{len(legs)} rankers are fused, and it holds {len(fitted.weights)} weights of {len(fitted.legs)}"
        raise SkilltrainError(what, where=file)
    for number, (ours, theirs) in enumerate(zip(legs, fitted.legs, strict=True), 1):
        if "saved" not in (ours.kind, theirs.kind) and leg_name(ours) != leg_name(theirs):
            what = f"weight {number} was fitted for {leg_name(theirs)}, and ranker {number} is {leg_name(ours)}"
            raise SkilltrainError(what, where=file)
    return fitted.weights


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
    """Rankers whose rankings are fused, and the weight of each."""

    config: FuseConfig
    legs: Sequence[Ranker]
    weights: Sequence[float]

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best of all skills that the legs find (or of the candidates, in their order)."""
        found = self.find(queries, candidates)
        return {
            query.query_id: self.join([leg[query.query_id] for leg in found])[:keep]
            for query in queries
        }

    def join(self, legs: Sequence[Ranking]) -> Ranking:
        return fuse(legs, self.weights, self.config.method, self.config.rrf_k)

    def find(self, queries: Sequence[Query], candidates: Rankings | None) -> list[Rankings]:
        """What each leg finds, or makes of the candidates."""
        most = LEG_KEEP if candidates is None else max(map(len, candidates.values()), default=0)
        keeps = [leg.keep or most for leg in self.config.of]
        return [
            leg.rank(queries, candidates, count)
            for leg, count in zip(self.legs, keeps, strict=True)
        ]


def open_ranker(config: RankerConfig, skills: Sequence[Skill], opened: dict[str, Any]) -> Ranker:
    """The ranker over the pool; `opened` keeps it for any `keep` and weight, the model in training as `OWN`."""
    if isinstance(config, FuseConfig):
        return Fuse(
            config, [open_ranker(leg, skills, opened) for leg in config.of], config.leg_weights()
        )
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
