"""What a training run would take: counts, memory and time, known before any weight is read."""

import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from skilltrain.models.activations import layer_bytes
from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.models.loading import default_device
from skilltrain.terminal import launched_ranks
from skilltrain.training.engine import shares_state
from skilltrain.training.loop import Batch, largest_batch, step_batches
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepModule

_ADAMW_BYTES = 8  # two float32 moments a trained parameter
_SAMPLED = 100  # batches whose tokens are counted with their padding
_TOKENS_ON_CPU = 1024  # of the timed micro-batch at most: a large layer takes seconds


def estimate_run(step: StepModule, config: TrainingConfig) -> dict[str, Any]:
    """Estimate what a training run takes, for `--dry-run`.

    `memory_mib` is that of each rank, with `activation_mib` for the largest batch. `list_tokens` counts
    the tokens of every list, also those that a step computes once for several lists. There are no
    `hours` for 4-bit weights.
    """
    lists = step.data.lists
    ranks = launched_ranks()
    device = default_device()
    dtype = config.dtype_on(device)
    steps = [*step_batches(lists, config)]
    batches = [*chain.from_iterable(steps)]
    activations = activation_bytes(step, batches, dtype) / ranks
    max_tokens = step.model.settings.max_tokens
    tokens = 0
    for row in lists:
        tokens += sum(min(length, max_tokens) for length in step.lengths(row))
        if isinstance(step, EncoderStep):
            tokens += len(step.query_ids[row.query])
    estimates = counts_of(step) | {
        "num_queries": len({row.query for row in lists}),
        "num_steps": len(steps),
        "positives_cut_share": cut_share(step),
        "list_tokens": tokens,
        "activation_mib": round(activations / 2**20, 1),
        "memory_mib": round((held_bytes(step) + activations) / 2**20, 1),
        "num_ranks": ranks,
    }
    if all(parameter.dtype != torch.uint8 for parameter in step.parameters()):
        hours = training_seconds(step, batches, dtype, device) / ranks / 3600
        estimates["hours"] = float(f"{hours:.2g}")
    return estimates


def counts_of(step: StepModule) -> dict[str, int]:
    """Count what there is to train on, and the parameters. Call it before a launcher shards them."""
    lists = step.data.lists
    sizes = {
        p: p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in step.parameters()
    }  # two 4-bit weights a byte
    return {
        "num_lists": len(lists),
        "num_skills": len({skill.skill_id for skill in step.data.skills.values()}),
        "num_pairs": sum(len(one.skill_ids) for one in lists),
        "num_positives": sum(sum(one.is_positive) for one in lists),
        "num_parameters": sum(sizes.values()),
        "num_trained_parameters": sum(
            size for parameter, size in sizes.items() if parameter.requires_grad
        ),
    }


def cut_share(step: StepModule) -> float:
    """Return the share of positives that are cut.

    An encoder's text that reaches the limit counts as cut: its rest is gone.
    """
    most = step.model.settings.max_tokens
    longest = most - 1 if isinstance(step, EncoderStep) else most
    rows = [zip(one.is_positive, step.lengths(one), strict=True) for one in step.data.lists]
    return round(
        fmean(length > longest for row in rows for is_positive, length in row if is_positive), 4
    )


def activation_bytes(step: StepModule, batches: Iterable[Batch], dtype: torch.dtype) -> int:
    """Return the bytes of activations of the batch with the most tokens, all on one process.

    With `recompute` these are the inputs of all layers, and all of one layer for the largest
    micro-batch.
    """
    network, slots = step.model.network, step.slots(largest_batch(step, batches))
    of_layer, num_layers = layer_bytes(network, dtype), network.config.num_hidden_layers
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * of_layer)
    of_input = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * of_input + max(slots) * of_layer)


def held_bytes(module: nn.Module) -> float:
    """Return the bytes on each rank of weights, gradients and AdamW's two moments."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in [*module.parameters(), *trained]
    )
    held = weights + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)
    return held / (launched_ranks() if shares_state() else 1)


def training_seconds(
    step: StepModule, batches: Sequence[Batch], dtype: torch.dtype, device: torch.device
) -> float:
    """Estimate the seconds of all forward and backward passes on one process.

    One layer is timed; the rest is in proportion to layers and tokens.
    """
    sample = batches[:: max(1, len(batches) // _SAMPLED)]
    slots = len(batches) * fmean(sum(step.slots(batch)) for batch in sample)
    most, budget = step.model.settings.max_tokens, step.settings.token_budget
    length = round(
        fmean(
            min(tokens, most) for batch in sample for one in batch for tokens in step.lengths(one)
        )
    )
    num_rows = max(1, (budget if device.type == "cuda" else min(budget, _TOKENS_ON_CPU)) // length)
    network, ids = (
        step.model.network,
        torch.zeros(num_rows, length, dtype=torch.long, device=device),
    )
    return (
        slots / ids.numel() * network.config.num_hidden_layers * _layer_seconds(network, ids, dtype)
    )


def _layer_seconds(network: Any, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Time the network's first layer with random weights, forward and backward, on token ids [text, token]."""
    body = _with_one_layer(network).to_empty(device=ids.device).train()
    for tensor in [*body.parameters(), *body.buffers()]:
        # Any other values that memory holds may be slow to compute with.
        tensor.data.normal_(std=0.02) if tensor.is_floating_point() else tensor.data.zero_()
    device = ids.device.type
    if device == "cpu":
        train_with_onednn(body)

    def run_layer() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = body(ids)[0]
        hidden.float().sum().backward()

    timer = Timer("run()", globals={"run": run_layer}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1).median


def _with_one_layer(network: Any) -> Any:
    """Copy the network without its head, with its first layer only and a vocabulary of one token."""
    body = copy.deepcopy(network.base_model)
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == network.config.num_hidden_layers:
            del module[1:]
    table = network.get_input_embeddings().weight
    body.set_input_embeddings(nn.Embedding(1, table.shape[1], dtype=table.dtype))
    return body
