"""Muon for the matrices of the layers, and AdamW for all other weights. muon.yaml uses it.

Muon: https://kellerjordan.github.io/posts/muon/. Step sizes: Liu et al. 2025, arXiv 2502.16982.
"""

from collections.abc import Callable
from itertools import chain

import torch
from pydantic import Field

from skilltrain.training.optimizers import OptimizerConfig, ParameterGroups


class Muon(OptimizerConfig):
    """Settings of the optimiser in a recipe."""

    bytes_per_weight = 8  # an upper bound: AdamW holds 8, Muon 4
    name: str
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of Muon's momentum")

    def create(self, groups: ParameterGroups, learning_rate: float) -> torch.optim.Optimizer:
        return MuonAndAdamW(groups, learning_rate, self.momentum)


class MuonAndAdamW(torch.optim.Optimizer):
    """Runs torch's Muon and AdamW as one optimiser.

    Both share its groups and its state, so that schedules and checkpoints see all of them.
    """

    def __init__(self, groups: ParameterGroups, learning_rate: float, momentum: float) -> None:
        """Divide the parameters of each group between the two optimisers.

        Args:
            groups: Groups of parameters with their names.
            learning_rate: Learning rate of both optimisers.
            momentum: Decay of Muon's momentum.
        """
        matrix_groups = []
        other_groups = []
        for group in groups:
            matrices = [pair for pair in group["params"] if is_layer_matrix(*pair)]
            remainder = [pair for pair in group["params"] if not is_layer_matrix(*pair)]
            if matrices:
                matrix_groups.append({**group, "params": matrices})
            if remainder:
                other_groups.append({**group, "params": remainder})

        self.parts: list[torch.optim.Optimizer] = []
        if matrix_groups:
            # "match_rms_adamw" makes the steps of Muon as large as those of AdamW, so that both can
            # have the same learning rate.
            muon = torch.optim.Muon(
                matrix_groups, lr=learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append(muon)
        if other_groups:  # an adapter has matrices only
            self.parts.append(torch.optim.AdamW(other_groups, lr=learning_rate))
        # Each group already has the settings of its optimiser, so there are no defaults.
        all_groups = chain.from_iterable(part.param_groups for part in self.parts)
        super().__init__([*all_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all weights. `closure` is not supported."""
        for part in self.parts:
            # `load_state_dict` gives this optimiser new groups and a new state. Pass them to its
            # parts. Only groups of Muon have the setting `momentum`.
            is_muon = isinstance(part, torch.optim.Muon)
            groups = self.param_groups
            part.param_groups = [group for group in groups if ("momentum" in group) == is_muon]
            part.state = self.state
            part.step()


def is_layer_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return whether Muon trains a parameter: a matrix that is no table of embeddings.

    Muon also trains the matrix of an output layer, such as `lm_head` or a classifier. If the layer
    shares the table of embeddings, AdamW trains the table.
    """
    return parameter.ndim == 2 and "embed" not in name
