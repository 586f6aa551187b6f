"""Losses. A loss gets a batch of scores, and knows nothing about the model.

A recipe chooses a loss by its name. `skilltrain.plugins.BUILT_IN` lists those of this package. A
loss of another package is a subclass of `Loss`, and has an entry point or is chosen by its import
path: `loss: {name: my_package.my_module:MyLoss}`.
"""

from skilltrain.losses.infonce import InfoNCE, LateInteraction
from skilltrain.losses.list_losses import KL, ListNet, ListwiseCE, PointwiseBCE
from skilltrain.losses.matryoshka import Matryoshka
from skilltrain.losses.pair_losses import MarginMSE, RankNet
from skilltrain.losses.scored_batch import (
    EncoderLoss,
    Loss,
    Needs,
    RerankerLoss,
    ScoredBatch,
    Vectors,
    call_loss,
)
from skilltrain.losses.spread_out import SpreadOut
from skilltrain.losses.weighted_sum import WeightedSum, flatten_loss

__all__ = [
    "KL",
    "EncoderLoss",
    "InfoNCE",
    "LateInteraction",
    "ListNet",
    "ListwiseCE",
    "Loss",
    "MarginMSE",
    "Matryoshka",
    "Needs",
    "PointwiseBCE",
    "RankNet",
    "RerankerLoss",
    "ScoredBatch",
    "SpreadOut",
    "Vectors",
    "WeightedSum",
    "call_loss",
    "flatten_loss",
]
