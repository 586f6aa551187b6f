"""The optimiser and its schedule: AdamW, linear warm-up, half a cosine."""

import math

import torch
from torch import nn


def new_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW over the parameters that train; biases and norms do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, fused=True)


def schedule(step: int, total: int, warmup_share: float) -> float:
    """Share of the peak learning rate at `step` (from 0) of `total`: linear warm-up, then half a cosine down to 0."""
    warmup = math.ceil(warmup_share * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set every group's rate; a rate that follows from the step alone needs no scheduler state to resume."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
