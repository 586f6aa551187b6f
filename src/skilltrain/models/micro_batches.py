"""Cutting texts into micro-batches by tokens, so that short texts never pay for long ones."""

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TokenIds = Sequence[int]
TextT = TypeVar("TextT", bound=Sized)


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Positions of the texts, longest first, in groups whose padded size stays within `token_budget` tokens.

    A text longer than the budget forms a group of its own. Longest first, so that memory peaks at the start.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    groups: list[list[int]] = []
    for position in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= token_budget:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def map_micro_batches(
    function: Callable[[list[TextT]], Tensor], texts: Sequence[TextT], token_budget: int, recompute: bool
) -> Float[Tensor, "text ..."]:
    """`function` over all `texts`, one micro-batch at a time, in the order of `texts`.

    With `recompute`, activations are rebuilt in the backward pass: the gradient of the whole batch at the
    memory of one micro-batch (GradCache, without its second forward pass written by hand).
    """
    groups = micro_batches([len(text) for text in texts], token_budget)
    outputs = []
    for group in groups:
        batch = [texts[position] for position in group]
        output = checkpoint(function, batch, use_reentrant=False) if recompute else function(batch)
        assert isinstance(output, Tensor)
        outputs.append(output)
    order = torch.tensor([position for group in groups for position in group], device=outputs[0].device)
    return torch.cat(outputs)[torch.argsort(order)]


def pad(texts: Sequence[TokenIds], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask), each [text, token], padded on the right to the longest text."""
    longest = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[pad_id] * (longest - len(text))] for text in texts], device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
    return ids, mask
