"""Settings that all rankers share. A kind of ranker is a plug-in: a subclass of `RankerConfig`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, SerializeAsAny

from skilltrain.config import Config
from skilltrain.plugins import OneOf
from skilltrain.records import Query, Ranker, Ranking, Rankings, Skill

OWN = "self"
"""Value of `source` for the model in training."""
Keep = Annotated[
    int | None, Field(ge=1, description="skills kept per query; null: as many as needed")
]


class RankerConfig(Config):
    """Settings of a ranker.

    A kind of ranker is a subclass. It declares `kind` and `keep: Keep = None`, and has a method
    `open`.

    Attributes:
        only_orders: The ranker cannot search the pool. It orders the candidates of another ranker.
        is_remote: The ranker calls a server or reads a file, so its latency is not measured.
        can_be_in_router: A router can contain the ranker. Others are only for experiments.
        asks_chat_model: The ranker asks a chat model, again for each system that contains it. When
            opened, it has `counts` of the last call of `rank`.
        gives_scores: The scores say how well a skill fits, so a student can learn from them.
        can_be_leg: `fuse` can join the ranker with others.
        can_be_expanded: `expand` can send its written queries to the ranker.
        can_be_interleaved: `interleave` can send its searches to the ranker.
        stored_part: Class of the data about a pool that an index stores for the ranker; None for
            no data. The class has a method `load(folder)`, and the result of `open` has a method
            `save_part`.
        key_settings: Settings that do not distinguish rankers, with their values in `key`.
    """

    only_orders: ClassVar[bool] = False
    is_remote: ClassVar[bool] = False
    can_be_in_router: ClassVar[bool] = True
    asks_chat_model: ClassVar[bool] = False
    gives_scores: ClassVar[bool] = True
    can_be_leg: ClassVar[bool] = True
    can_be_expanded: ClassVar[bool] = True
    can_be_interleaved: ClassVar[bool] = True
    stored_part: ClassVar[Any] = None
    key_settings: ClassVar[Mapping[str, Any]] = {"keep": 1}
    if TYPE_CHECKING:  # as fields of this class, they would come first in every written recipe
        kind: Any
        keep: Any

    def check(self) -> None:
        """Raise SkilltrainError for faults that can be known before work."""

    def open(self, opened: dict[str, Any]) -> Any:
        """Load what the ranker needs for any pool, such as its model.

        Args:
            opened: Models that are already loaded, by their settings. New ones are added.

        Returns:
            A value with a method `over(skills by id)`, which returns the `Ranker` of a pool.
        """
        raise NotImplementedError

    def ranker(self, skills: Sequence[Skill], opened: dict[str, Any]) -> Ranker:
        """Return the ranker of a pool.

        The ranker is opened at the first call with its settings, and used again in later calls.

        Args:
            skills: The pool.
            opened: Rankers by `key`, which are used again. The model in training is there as `OWN`.
                A new ranker is added.
        """
        if self.key not in opened:
            skills_by_id = {skill.skill_id: skill for skill in skills}
            opened[self.key] = self.open(opened).over(skills_by_id)
        return opened[self.key]

    def with_default_values(self) -> "RankerConfig":
        """Return the settings with a value for each null that stands for one."""
        return self

    def in_router(self, folder: Path | None) -> Self:
        """Return the settings with which the router in `folder` opens the ranker."""
        return self

    @property
    def components(self) -> "Sequence[RankerConfig]":
        """The rankers that this one is made of. A ranker with components has no `open`."""
        return ()

    @property
    def legs(self) -> "Sequence[RankerConfig]":
        """The rankers to run: this one, or those that it fuses."""
        return (self,)

    def leg_top_ks(self, candidates: Rankings | None) -> list[int]:
        """Return the number of skills to keep of each leg."""
        return [self.keep]

    def combine(self, rankings: Sequence[Ranking]) -> Ranking:
        """Combine the rankings of the legs for one query."""
        return rankings[0]

    def matches(self, ranking: Ranking) -> Ranking:
        """Return the skills of a ranking that match the query at all."""
        return ranking

    def with_keep(self, keep: int) -> "RankerConfig":
        """Return the settings with another `keep` for the ranker and its legs."""
        return self.model_copy(update={"keep": keep})

    @property
    def key(self) -> str:
        """Text that is equal for rankers with the same model and settings."""
        return OWN if self.is_in_training else repr(self.model_copy(update=self.key_settings))

    @property
    def label(self) -> str:
        """Name of the ranker in one or two words, such as `lexical name` or `dense`."""
        return self.kind

    @property
    def model_source(self) -> str | None:
        """Folder, Hub id or package of the model; None without one."""
        return getattr(self, "source", None)

    @property
    def is_in_training(self) -> bool:
        """True if the ranker is the model in training."""
        return self.model_source == OWN

    @property
    def server(self) -> Any:
        """Settings of the server that reads the texts; None without a server."""
        return None

    @property
    def num_read(self) -> int | None:
        """Number of first candidates that the ranker looks at; None for all."""
        return None

    def dry_run(self, queries: Sequence[Query], skills: Sequence[Skill]) -> dict[str, Any] | None:
        """Estimate the cost of the server without sending anything; None without a server."""
        return None


AnyRanker = Annotated[SerializeAsAny[RankerConfig], OneOf("ranker")]
"""The settings of any kind of ranker."""


def flatten_rankers(rankers: Iterable[RankerConfig]) -> Iterator[RankerConfig]:
    """Yield each ranker, followed by the rankers that it is made of (for example, fuses)."""
    for ranker in rankers:
        yield ranker
        yield from ranker.components


def name_rankers(rankers: Iterable[RankerConfig]) -> dict[str, str]:
    """Name each ranker by its label and a number, such as `dense` and `dense 2`.

    Rankers that another ranker is made of get names as well.

    Returns:
        Name by `key` of the ranker. Rankers with the same key (the same model and settings) have
        one name.
    """
    names = {}
    num_by_label = Counter[str]()
    for config in flatten_rankers(rankers):
        if config.key in names:
            continue
        # The first ranker with a label has the label as its name, and later ones a number.
        num_by_label[config.label] += 1
        number = num_by_label[config.label]
        names[config.key] = config.label if number == 1 else f"{config.label} {number}"
    return names
