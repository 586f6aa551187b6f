"""The losses that score a batch as it is: a new loss is one file and one name here; others' packages have their own."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from jaxtyping import Float
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, SerializeAsAny, Tag
from torch import Tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.kl import KL
from skilltrain.losses.lambda_rank import LambdaRank
from skilltrain.losses.list_net import ListNet
from skilltrain.losses.listwise_ce import ListwiseCE
from skilltrain.losses.margin import Margin
from skilltrain.losses.margin_mse import MarginMSE
from skilltrain.losses.pointwise_bce import PointwiseBCE
from skilltrain.losses.ranknet import RankNet
from skilltrain.losses.scored_batch import ScoredBatch

PlainLoss = InfoNCE | KL | LambdaRank | ListNet | ListwiseCE | Margin | MarginMSE | PointwiseBCE | RankNet


class OwnLoss(Config):
    """Base of a loss outside this package: add hyper-parameters as fields, and `__call__`.

    `loss: {name: my_package.my_module:MyLoss}` chooses it. One that calls `batch.teacher()` sets its flag.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})  # a subclass has more keys
    needs_teacher_scores: ClassVar[bool] = False
    name: str = Field(pattern=":", description="where it is imported from: package.module:Class")

    @abstractmethod
    def __call__(self, batch: ScoredBatch) -> Float[Tensor, ""]:
        """The loss, summed over queries."""


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


Imported = Annotated[SerializeAsAny[OwnLoss], BeforeValidator(_imported), Tag("own")]
BY_NAME = Discriminator(_tag)
"""Tells `Imported` from the losses of this package, whose tag is "named"."""
AnyPlainLoss = Annotated[Annotated[PlainLoss, Field(discriminator="name"), Tag("named")] | Imported, BY_NAME]
"""The same, and those of other packages."""
