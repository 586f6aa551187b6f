"""Losses by name. A loss sees a batch of scores, never a model.

Those of this package are listed in `skilltrain.plugins.BUILT_IN`. A loss of another package is a
subclass of `Loss`, found by its entry point or by an import path:
`loss: {name: my_package.my_module:MyLoss}`.
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
)

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
    "Vectors",
]
