"""MaxSim, the score of late interaction: how well each token of a query is matched by some token of a skill."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.models.micro_batches import on_device


def max_sim(
    queries: Sequence[Float[Tensor, "_ dim"]], skills: Sequence[Float[Tensor, "_ dim"]]
) -> Float[Tensor, "query skill"]:
    """The mean over a query's tokens of the largest cosine with one of the skill's tokens.

    Takes the unit vectors of each text's tokens, in float32 or wider; there is a skill, and every text has a token.
    Source: Khattab and Zaharia 2020 (ColBERT), equation 3, which sums where this takes the mean.
    """
    tokens = torch.cat([skills[0][:0], *queries])  # a rank may have no query
    with torch.autocast(tokens.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        best: Tensor = _LargestCosines.apply(tokens, torch.cat([*skills]), [len(skill) for skill in skills])
    return torch.stack([part.mean(0) for part in best.split([*map(len, queries)])]) if queries else best


class _LargestCosines(torch.autograd.Function):
    """The largest cosine [token, skill] of each token of the queries with the tokens of each skill.

    The gradient is that of `amax`. Kept for it is where the largest were: it is the product with a sparse matrix that
    has one cell for a token and a skill, so neither all cosines nor a vector for each pair is ever in memory.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, skills: Tensor, lengths: list[int]) -> Tensor:
        best, places = zip(*((queries @ skill.T).max(1) for skill in skills.split(lengths)), strict=True)
        starts = torch.tensor([0, *accumulate(lengths[:-1])])
        ctx.save_for_backward(queries, skills, torch.stack(places, 1) + on_device(starts, skills.device))
        return torch.stack(best, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, skills, places = ctx.saved_tensors
        rows = torch.arange(len(queries), device=places.device)[:, None].expand_as(places)
        cells = torch.stack([rows.flatten(), places.flatten()])
        size = len(queries), len(skills)
        weights = torch.sparse_coo_tensor(cells, gradients[0].flatten(), size, check_invariants=False)
        return weights @ skills, weights.T @ queries, None
