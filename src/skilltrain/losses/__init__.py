"""Losses by name. A loss sees scores, never a model.

A new loss is a class beside those of list_losses.py or pair_losses.py and its name in `PlainLoss` below; the settings
of both stages, and `matryoshka`, then know it. One of another package is an OwnLoss.
"""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxtyping import Float
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    SerializeAsAny,
    Tag,
)
from torch import Tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.losses.infonce import InfoNCE, LateInteraction
from skilltrain.losses.list_losses import KL, ListNet, ListwiseCE, PointwiseBCE
from skilltrain.losses.pair_losses import MarginMSE, RankNet
from skilltrain.losses.scored_batch import Loss, ScoredBatch

__all__ = [
    "KL",
    "EncoderLoss",
    "InfoNCE",
    "LateInteraction",
    "ListNet",
    "ListwiseCE",
    "MarginMSE",
    "Matryoshka",
    "OwnLoss",
    "PlainLoss",
    "PointwiseBCE",
    "RankNet",
    "RerankerLoss",
    "ScoredBatch",
]

PlainLoss = InfoNCE | KL | ListNet | ListwiseCE | MarginMSE | PointwiseBCE | RankNet


class OwnLoss(Loss):
    """Base of a loss outside this package: add hyper-parameters as fields, and `__call__`.

    `loss: {name: my_package.my_module:MyLoss}` chooses it. One that calls `batch.teacher()` sets its flag.
    """

    model_config = ConfigDict(
        json_schema_extra={"additionalProperties": True}
    )  # a subclass has more keys
    name: str = Field(pattern=":", description="where it is imported from: package.module:Class")


def _imported(value: Any) -> OwnLoss:
    if isinstance(value, OwnLoss):
        return value
    module, _, name = value["name"].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {value['name']}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, OwnLoss)):
        raise ValueError(f"{value['name']} is no subclass of skilltrain.losses.OwnLoss")
    if found.__abstractmethods__:
        raise ValueError(f"{value['name']} has no __call__")
    try:
        return validate(found, value, "loss")
    except SkilltrainError as error:
        raise ValueError(error.what) from error


def _tag(value: Any) -> str:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "own" if isinstance(name, str) and ":" in name else "named"


_Imported = Annotated[SerializeAsAny[OwnLoss], BeforeValidator(_imported), Tag("own")]
_BY_NAME = Discriminator(_tag)
RerankerLoss = Annotated[
    Annotated[PlainLoss, Field(discriminator="name"), Tag("named")] | _Imported, _BY_NAME
]


class Matryoshka(Config):
    """A loss on cosines of the vectors' first coordinates, summed over several widths.

    Use: an encoder whose vectors may be cut short when they are stored. Name the full width too, or it goes
        untrained.
    Formula: sum_d loss(cosines of the first d coordinates, made unit vectors again).
    Inputs: what the inner loss asks for, and vectors at least as wide as the widest of `dims`.
    Returns: the sum over queries. As sentence-transformers' MatryoshkaLoss, of a loss that is a sum.
    Example: query (0.8, 0.6), skills (1, 0) and (0, 1), gains (1, 0), infonce at temperature 1, dims (1,): the first
        skill's cosine becomes 1, the second's 0: log(1 + 1/e).
    Source: Kusupati et al. 2022, equation 1, with normalised representations and weights of 1.
    """

    name: Literal["matryoshka"] = "matryoshka"
    loss: RerankerLoss = Field(default=InfoNCE(), description="what is learnt at every width")
    dims: tuple[PositiveInt, ...] = Field(
        min_length=1, description="widths, the full one among them"
    )

    @property
    def needs_teacher_scores(self) -> bool:
        return self.loss.needs_teacher_scores

    @property
    def needs_sides(self) -> bool:
        return self.loss.needs_sides

    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries. Raises SkilltrainError for scores that come from no vectors."""
        if batch.truncated is None:
            raise SkilltrainError(
                "only an encoder has vectors to cut short", where="loss.matryoshka"
            )
        parts = [self.loss(batch.truncated(dim)) for dim in self.dims]
        return sum(parts[1:], parts[0])


EncoderLoss = Annotated[
    Annotated[PlainLoss | Matryoshka, Field(discriminator="name"), Tag("named")] | _Imported,
    _BY_NAME,
]
