"""Losses by name. A loss sees scores, never a model.

A new loss is one file with a frozen Config (`name: Literal[...]`, its hyper-parameters, `__call__`)
and its class in the union in plain.py; the settings of both stages then know it. One of another package is an OwnLoss.
"""

from typing import Annotated

from pydantic import Field, Tag

from skilltrain.losses.infonce import InfoNCE, LateInteraction
from skilltrain.losses.kl import KL
from skilltrain.losses.lambda_rank import LambdaRank
from skilltrain.losses.list_net import ListNet
from skilltrain.losses.listwise_ce import ListwiseCE
from skilltrain.losses.margin import Margin
from skilltrain.losses.margin_mse import MarginMSE
from skilltrain.losses.matryoshka import Matryoshka
from skilltrain.losses.plain import BY_NAME, AnyPlainLoss, Imported, OwnLoss, PlainLoss
from skilltrain.losses.pointwise_bce import PointwiseBCE
from skilltrain.losses.ranknet import RankNet
from skilltrain.losses.scored_batch import ScoredBatch

EncoderLoss = Annotated[
    Annotated[PlainLoss | Matryoshka, Field(discriminator="name"), Tag("named")] | Imported, BY_NAME
]
RerankerLoss = AnyPlainLoss


def lexical_weight(loss: EncoderLoss) -> float:
    """What BM25 counts for in the loss; the batch must bring `lexical_scores` where it is not 0."""
    inner = _inner(loss)
    return inner.lexical_weight if isinstance(inner, InfoNCE) else 0.0


def needs_sides(loss: EncoderLoss) -> bool:
    """Whether the batch must bring `sides`."""
    inner = _inner(loss)
    return isinstance(inner, InfoNCE) and len(inner.directions) > 1


def pushes(loss: EncoderLoss) -> bool:
    """Whether a term of the loss is for skills worth less than an irrelevant one alone."""
    inner = _inner(loss)
    return isinstance(inner, InfoNCE) and inner.push_share > 0


def _inner(loss: EncoderLoss) -> RerankerLoss:
    return loss.loss if isinstance(loss, Matryoshka) else loss


__all__ = [
    "KL",
    "EncoderLoss",
    "InfoNCE",
    "LambdaRank",
    "LateInteraction",
    "ListNet",
    "ListwiseCE",
    "Margin",
    "MarginMSE",
    "Matryoshka",
    "OwnLoss",
    "PlainLoss",
    "PointwiseBCE",
    "RankNet",
    "RerankerLoss",
    "ScoredBatch",
    "lexical_weight",
    "needs_sides",
    "pushes",
]
