"""How long a training will take, for its plan: one layer is timed on this device, and nothing is loaded."""

import copy
import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.training.steps import EncoderStep, StepModule
from skilltrain.training.training_set import TrainingList

_SAMPLED = 100  # batches whose tokens are counted with their padding
_TOKENS_ON_CPU = 1024  # of the timed micro-batch at most: a large layer takes seconds


def planned_seconds(
    step: StepModule, batches: Iterable[Sequence[TrainingList]], dtype: torch.dtype, device: torch.device
) -> float:
    """About how long all forward and backward passes take on one process: a layer's time, times layers and tokens.

    The layer has random weights and computes a micro-batch of texts of the mean length. The optimiser's step, the
    exchange between ranks and evaluations are not in it.
    """
    every = [*batches]
    sample = every[:: max(1, len(every) // _SAMPLED)]
    slots = len(every) * fmean(sum(step.slots(batch)) for batch in sample)
    most = step.model.settings.max_tokens
    length = round(fmean(min(tokens, most) for batch in sample for one in batch for tokens in step.lengths(one)))
    budget = step.settings.token_budget
    num_rows = max(1, (budget if device.type == "cuda" else min(budget, _TOKENS_ON_CPU)) // length)
    network = step.model.backbone if isinstance(step, EncoderStep) else step.model.network
    ids = torch.zeros(num_rows, length, dtype=torch.long, device=device)
    return slots / ids.numel() * network.config.num_hidden_layers * _layer_seconds(network, ids, dtype)


def _layer_seconds(network: Any, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Seconds of the network's first layer, forward and backward, on token ids [text, token]."""
    body, count = copy.deepcopy(network.base_model), network.config.num_hidden_layers
    for part in body.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            del part[1:]
    table = network.get_input_embeddings().weight
    body.set_input_embeddings(nn.Embedding(1, table.shape[1], dtype=table.dtype))
    body.to_empty(device=ids.device).train()
    for tensor in (*body.parameters(), *body.buffers()):  # what memory held before may be slow to compute with
        tensor.data.zero_() if not tensor.is_floating_point() else tensor.data.normal_(std=0.02)
    if ids.device.type == "cpu":
        train_with_onednn(body)
    taken = list[float]()
    while len(taken) < 3 or sum(taken) < 1:  # the first one warms up; what else runs here slows some of them
        started = time.monotonic()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = body(ids)[0]
        hidden.float().sum().backward()
        if ids.device.type == "cuda":
            torch.cuda.synchronize(ids.device)
        taken.append(time.monotonic() - started)
    return min(taken[1:])
