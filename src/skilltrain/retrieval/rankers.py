"""The settings that all kinds of rankers share. A kind is a plug-in: a subclass of `RankerConfig`, found by its name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, SerializeAsAny

from skilltrain.config import Config
from skilltrain.plugins import OneOf
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill

OWN = "self"
"""The `source` that stands for the model in training."""
Keep = Annotated[
    int | None, Field(ge=1, description="skills kept per query; null: as many as needed")
]


class RankerConfig(Config):
    """Settings of a ranker. A kind declares `kind` and `keep: Keep = None`, and has a method `open`.

    Attributes:
        only_orders: It cannot search the pool, and orders the candidates of another ranker.
        is_remote: It asks a server or reads a file, so its latency is not measured.
        answers_new_queries: It can answer queries that a router has never seen.
        asks_chat_model: It asks a chat model anew in every system. At work, it has `counts` of the
            last `rank`.
        gives_scores: Its scores say how well a skill fits, so that a student can learn from them.
        can_be_leg: It can be one of the rankers that `fuse` joins.
        can_be_expanded: It can be asked with the queries that `expand` writes.
        is_composed: It is made of other rankers and has no method `open`.
        stored_part: Class of what an index stores of the pool: it has a method `load(folder)`, and
            what `open` returns has `save_part`.
        key_settings: Settings that do not distinguish rankers, with the values they have in `key`.
    """

    only_orders: ClassVar[bool] = False
    is_remote: ClassVar[bool] = False
    answers_new_queries: ClassVar[bool] = True
    asks_chat_model: ClassVar[bool] = False
    gives_scores: ClassVar[bool] = True
    can_be_leg: ClassVar[bool] = True
    can_be_expanded: ClassVar[bool] = True
    is_composed: ClassVar[bool] = False
    stored_part: ClassVar[Any] = None
    key_settings: ClassVar[Mapping[str, Any]] = {"keep": 1}
    if TYPE_CHECKING:  # fields here would come first in every recipe that is written
        kind: Any
        keep: Any

    def check(self) -> None:
        """Raise SkilltrainError for faults that can be known before work."""

    def open(self, opened: dict[str, Any]) -> Any:
        """Open what it needs for any pool: a value whose `over(skills by id)` returns a `Ranker`.

        Args:
            opened: Models that are open, by their settings, to be shared.
        """
        raise NotImplementedError

    def ranker(self, skills: Sequence[Skill], opened: dict[str, Any]) -> Ranker:
        """Return the ranker over a pool. `opened` keeps rankers by `key`, and the model in training as `OWN`."""
        if self.key not in opened:
            by_id = {skill.skill_id: skill for skill in skills}
            opened[self.key] = self.open(opened).over(by_id)
        return opened[self.key]

    def written_out(self) -> "RankerConfig":
        """Return the settings with the values that defaults stand for."""
        return self

    def in_router(self, folder: Path | None) -> Self:
        """Return the settings with which the ranker is opened for the router in `folder`."""
        return self

    @property
    def legs(self) -> "tuple[RankerConfig, ...]":
        """The rankers that are asked: itself, or those that it fuses."""
        return (self,)

    def leg_top_ks(self, candidates: Rankings | None) -> list[int]:
        """Return how many skills each leg keeps."""
        return [self.keep]

    def combine(self, rankings: Sequence[Ranking]) -> Ranking:
        """Return the ranker's answer to one query by those of its legs."""
        return rankings[0]

    def keeping(self, count: int) -> "RankerConfig":
        """Return the settings with which the ranker and its legs keep `count` skills."""
        return self.model_copy(update={"keep": count})

    def parts(self) -> "Iterator[RankerConfig]":
        """Yield the ranker, then those that it is made of."""
        yield self

    @property
    def key(self) -> str:
        """What distinguishes the ranker from those that need other models."""
        return OWN if self.is_own else repr(self.model_copy(update=self.key_settings))

    @property
    def label(self) -> str:
        """The ranker in a word or two: `lexical name`, `dense`."""
        return self.kind

    @property
    def model_source(self) -> str | None:
        """Folder, Hub id or package of its model, if it has one."""
        return getattr(self, "source", None)

    @property
    def is_own(self) -> bool:
        """Whether it is the model in training."""
        return self.model_source == OWN

    @property
    def server(self) -> Any:
        """The server that it sends texts to."""
        return None

    @property
    def num_read(self) -> int | None:
        """Number of candidates, from the first on, that decide what it answers; None for all."""
        return None

    def dry_run(self, queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any] | None:
        """Estimate what its server would cost; None without a server. Sends nothing."""
        return None


AnyRanker = Annotated[SerializeAsAny[RankerConfig], OneOf("ranker")]
"""The settings of any kind of ranker."""


def parts_of(rankers: Iterable[RankerConfig]) -> Iterator[RankerConfig]:
    """Yield each ranker, then those that it is made of."""
    return chain.from_iterable(ranker.parts() for ranker in rankers)
