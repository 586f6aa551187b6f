"""The losses that score a batch as it is: a new loss is one file and one name here."""

from typing import Annotated

from pydantic import Field, Tag

from skilltrain.losses.infonce import InfoNCE
from skilltrain.losses.kl import KL
from skilltrain.losses.lambda_rank import LambdaRank
from skilltrain.losses.list_net import ListNet
from skilltrain.losses.listwise_ce import ListwiseCE
from skilltrain.losses.margin_mse import MarginMSE
from skilltrain.losses.own import BY_NAME, Imported
from skilltrain.losses.pointwise_bce import PointwiseBCE
from skilltrain.losses.ranknet import RankNet

PlainLoss = InfoNCE | KL | LambdaRank | ListNet | ListwiseCE | MarginMSE | PointwiseBCE | RankNet
AnyPlainLoss = Annotated[Annotated[PlainLoss, Field(discriminator="name"), Tag("named")] | Imported, BY_NAME]
"""The same, and those of other packages."""
