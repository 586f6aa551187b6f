"""Estimates the size, memory and time of a training run, before any weight is read."""

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

_ADAMW_BYTES = 8  # two float32 moments per trained parameter
_NUM_SAMPLED_BATCHES = 100  # their padding is computed, and taken for that of all batches
_MAX_TIMED_TOKENS_ON_CPU = 1024  # a large layer takes seconds for more


def estimate_run(step: StepModule, config: TrainingConfig) -> dict[str, Any]:
    """Estimate what a training run takes, for `--dry-run`.

    Returns:
        Estimates by name. `memory_mib` is that of each rank, and contains `activation_mib`, that of
        the largest batch. `list_tokens` counts a skill once for each of its lists, although a step
        encodes it once. `hours` are missing for 4-bit weights.
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
    for training_list in lists:
        tokens += sum(min(length, max_tokens) for length in step.lengths(training_list))
        if isinstance(step, EncoderStep):
            tokens += len(step.query_ids[training_list.query])
    estimates = counts_of(step) | {
        "num_queries": len({training_list.query for training_list in lists}),
        "num_steps": len(steps),
        "positives_cut_share": truncated_share(step),
        "list_tokens": tokens,
        "activation_mib": round(activations / 2**20, 1),
        "memory_mib": round((held_bytes(step) + activations) / 2**20, 1),
        "num_ranks": ranks,
    }
    if not any(_is_four_bit(parameter) for parameter in step.parameters()):
        hours = training_seconds(step, batches, dtype, device) / ranks / 3600
        estimates["hours"] = float(f"{hours:.2g}")
    return estimates


def counts_of(step: StepModule) -> dict[str, int]:
    """Count lists, skills, pairs and parameters. Call it before a launcher shards the model."""
    lists = step.data.lists
    # A byte holds two 4-bit weights.
    sizes = {p: p.numel() * (2 if _is_four_bit(p) else 1) for p in step.parameters()}
    return {
        "num_lists": len(lists),
        "num_skills": len({skill.skill_id for skill in step.data.skills.values()}),
        "num_pairs": sum(len(training_list.skill_ids) for training_list in lists),
        "num_positives": sum(sum(training_list.is_positive) for training_list in lists),
        "num_parameters": sum(sizes.values()),
        "num_trained_parameters": sum(size for p, size in sizes.items() if p.requires_grad),
    }


def _is_four_bit(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.uint8


def truncated_share(step: StepModule) -> float:
    """Return the share of positives whose text is truncated.

    An encoder's token ids are already truncated, so a text of exactly `max_tokens` tokens counts.
    """
    limit = step.model.settings.max_tokens
    if isinstance(step, EncoderStep):
        limit -= 1
    is_truncated: list[bool] = []  # of each positive
    for training_list in step.data.lists:
        lengths = step.lengths(training_list)
        for length, is_positive in zip(lengths, training_list.is_positive, strict=True):
            if is_positive:
                is_truncated.append(length > limit)
    return round(fmean(is_truncated), 4)


def activation_bytes(step: StepModule, batches: Iterable[Batch], dtype: torch.dtype) -> int:
    """Return the bytes of activations of the batch with the most tokens, all on one process.

    With `recompute`, only the inputs of layers are stored for the whole batch. In addition, one
    layer at a time has all its activations, for one micro-batch.
    """
    network = step.model.network
    slots = step.slots(largest_batch(step, batches))
    num_layers = network.config.num_hidden_layers
    bytes_per_slot = layer_bytes(network, dtype)
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * bytes_per_slot)
    input_bytes = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * input_bytes + max(slots) * bytes_per_slot)


def held_bytes(module: nn.Module) -> float:
    """Return the bytes on each rank of weights, gradients and AdamW's two moments."""
    total = 0
    for parameter in module.parameters():
        weight_bytes = parameter.numel() * parameter.element_size()
        total += weight_bytes
        if parameter.requires_grad:
            total += weight_bytes  # of the gradient
            total += _ADAMW_BYTES * parameter.numel()
    return total / (launched_ranks() if shares_state() else 1)


def training_seconds(
    step: StepModule, batches: Sequence[Batch], dtype: torch.dtype, device: torch.device
) -> float:
    """Estimate the seconds of all forward and backward passes on one process.

    One layer is timed; the rest is in proportion to layers and tokens.
    """
    sample = batches[:: max(1, len(batches) // _NUM_SAMPLED_BATCHES)]
    num_slots = len(batches) * fmean(sum(step.slots(batch)) for batch in sample)

    # Time a micro-batch of texts of the mean length.
    lengths: list[int] = []
    for training_list in chain.from_iterable(sample):
        lengths += step.lengths(training_list)
    max_tokens = step.model.settings.max_tokens
    length = round(fmean(min(tokens, max_tokens) for tokens in lengths))
    token_budget = step.settings.token_budget
    if device.type != "cuda":
        token_budget = min(token_budget, _MAX_TIMED_TOKENS_ON_CPU)
    num_texts = max(1, token_budget // length)
    ids = torch.zeros(num_texts, length, dtype=torch.long, device=device)
    network = step.model.network
    num_layers = network.config.num_hidden_layers
    return num_slots / ids.numel() * num_layers * _layer_seconds(network, ids, dtype)


def _layer_seconds(network: Any, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Time forward and backward of the first layer on token ids [text, token].

    Its weights are random.
    """
    body = _with_one_layer(network).to_empty(device=ids.device).train()
    for tensor in [*body.parameters(), *body.buffers()]:
        # The values that happen to be in memory may be slow to compute with.
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.02)
        else:
            tensor.data.zero_()
    device = ids.device.type
    if device == "cpu":
        train_with_onednn(body)

    def run_layer() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = body(ids)[0]  # the last hidden state
        hidden.float().sum().backward()

    timer = Timer("run()", globals={"run": run_layer}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1).median


def _with_one_layer(network: Any) -> Any:
    """Copy the network without its head, with only its first layer and one token to embed."""
    body = copy.deepcopy(network.base_model)
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == network.config.num_hidden_layers:
            del module[1:]
    table = network.get_input_embeddings().weight
    body.set_input_embeddings(nn.Embedding(1, table.shape[1], dtype=table.dtype))
    return body
