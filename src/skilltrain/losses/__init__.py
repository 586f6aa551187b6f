"""Losses by name. A loss sees scores, never a model.

A new loss is one file with a frozen Config (`name: Literal[...]`, what it needs, its hyper-parameters, `__call__`)
and its class in the union in plain.py; the settings of both stages then know it. One of another package is an OwnLoss.
"""

from typing import Annotated

from pydantic import Field, Tag

from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.kl import KL
from skilltrain.losses.lambda_rank import LambdaRank
from skilltrain.losses.late_interaction import LateInteraction
from skilltrain.losses.list_net import ListNet
from skilltrain.losses.listwise_ce import ListwiseCE
from skilltrain.losses.margin_mse import MarginMSE
from skilltrain.losses.matryoshka import Matryoshka
from skilltrain.losses.own import BY_NAME, Imported, OwnLoss
from skilltrain.losses.plain import AnyPlainLoss, PlainLoss
from skilltrain.losses.pointwise_bce import PointwiseBCE
from skilltrain.losses.positives import positive_cells
from skilltrain.losses.ranknet import RankNet
from skilltrain.losses.scored_batch import ScoredBatch, SideScores, SideTerm

EncoderLoss = Annotated[
    Annotated[PlainLoss | Matryoshka, Field(discriminator="name"), Tag("named")] | Imported, BY_NAME
]
RerankerLoss = AnyPlainLoss


def lexical_weight(loss: EncoderLoss) -> float:
    """What BM25 counts for in the loss; the batch must bring `lexical_scores` where it is not 0."""
    inner = loss.loss if isinstance(loss, Matryoshka) else loss
    return inner.lexical_weight if isinstance(inner, InfoNCE) else 0.0


__all__ = [
    "KL",
    "EncoderLoss",
    "InfoNCE",
    "LambdaRank",
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
    "SideScores",
    "SideTerm",
    "lexical_weight",
    "positive_cells",
]
