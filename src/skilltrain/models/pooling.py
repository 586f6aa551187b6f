"""From a text's token vectors to its one vector."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Pooling = Literal["mean", "last_token", "cls"]


def pool(
    hidden: Float[Tensor, "text token dim"], mask: Int[Tensor, "text token"], how: Pooling
) -> Float[Tensor, "text dim"]:
    """One vector a text; `mask` is 1 on real tokens, which stand on the left.

    `last_token` takes the last real position (Qwen3-Embedding), found by length and never by pad id.
    """
    if how == "cls":
        return hidden[:, 0]
    if how == "last_token":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    weights = mask[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Half-precision values widened to float32, for what is summed or compared afterwards; others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
