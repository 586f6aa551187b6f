"""MaxSim, the score of late interaction: how well each token of a query is matched by some token of a skill."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def max_sim(
    queries: Sequence[Float[Tensor, "_ dim"]], skills: Sequence[Float[Tensor, "_ dim"]]
) -> Float[Tensor, "query skill"]:
    """The mean over a query's tokens of the largest cosine with one of the skill's tokens.

    Takes the unit vectors of each text's tokens, in float32 or wider; there is a skill, and every text has a token.
    One skill at a time, for `max` keeps for its gradient only where the largest cosines were, not all of them.
    Source: Khattab and Zaharia 2020 (ColBERT), equation 3, which sums where this takes the mean.
    """
    tokens = torch.cat([skills[0][:0], *queries])  # a rank may have no query
    with torch.autocast(tokens.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        best = torch.stack([(tokens @ skill.T).max(1).values for skill in skills], 1)
    return torch.stack([part.mean(0) for part in best.split([*map(len, queries)])]) if queries else best
