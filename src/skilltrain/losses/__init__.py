"""Losses by name. A loss sees scores, never a model.

A new loss is one file with a frozen Config (`name: Literal[...]`, its hyper-parameters, `__call__`) and its class
in the union below.
"""

from typing import Annotated

from pydantic import Field

from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.listwise_ce import ListwiseCE
from skilltrain.losses.pointwise_bce import PointwiseBCE
from skilltrain.losses.scored_batch import ScoredBatch

Loss = Annotated[InfoNCE | ListwiseCE | PointwiseBCE, Field(discriminator="name")]

__all__ = ["InfoNCE", "ListwiseCE", "Loss", "PointwiseBCE", "ScoredBatch"]
