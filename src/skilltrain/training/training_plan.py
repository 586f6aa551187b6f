"""What a training would take, before anything is loaded: what there is to train on, memory, and time."""

import copy
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from skilltrain.errors import SkilltrainError
from skilltrain.models.activations import layer_bytes
from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.models.loading import default_device
from skilltrain.training.engine import launched_ranks, shares_state
from skilltrain.training.loop import num_steps, step_batches
from skilltrain.training.memory import GIB, largest_batch
from skilltrain.training.settings import TrainConfig, TrainingConfig, is_quantized, load_model
from skilltrain.training.steps import EncoderStep, StepModule
from skilltrain.training.training_set import TrainingList, TrainingSet

_ADAMW_BYTES = 8  # two float32 moments a trained parameter
_SAMPLED = 100  # batches whose tokens are counted with their padding
_TOKENS_ON_CPU = 1024  # of the timed micro-batch at most: a large layer takes seconds


def plan_of(step: StepModule, data: TrainingSet, config: TrainingConfig) -> dict[str, Any]:
    """All figures of the plan: `list_tokens` of all lists one by one, of which a step computes what is shared once;
    `memory_mib` of each rank, with `activation_mib` for the largest batch (`planned_activations`); and `hours`, about,
    but for 4-bit weights (`planned_seconds`)."""
    batches, ranks = [*chain.from_iterable(step_batches(data.lists, config))], launched_ranks()
    device, hours = default_device(), dict[str, Any]()
    if all(parameter.dtype != torch.uint8 for parameter in step.parameters()):
        seconds = planned_seconds(step, batches, config.dtype_on(device), device) / ranks
        words = f"one layer timed on this {device.type}, times layers and tokens; AdamW, exchange and dev come on top"
        hours = {"hours": float(f"{seconds / 3600:.2g}"), "hours_from": words}
    activations = planned_activations(step, batches, config.dtype_on(device)) / ranks
    held = held_bytes(step) / (ranks if shares_state() else 1)
    most = step.model.settings.max_tokens
    tokens = sum(min(length, most) for one in data.lists for length in step.lengths(one))
    if isinstance(step, EncoderStep):
        tokens += sum(len(step.query_ids[one.query]) for one in data.lists)
    return counts_of(step, data) | {
        "num_queries": len({one.query for one in data.lists}),
        "num_steps": num_steps(data.lists, config),
        "positives_cut_share": cut_share(step, data),
        "list_tokens": tokens,
        "activation_mib": round(activations / 2**20, 1),
        "memory_mib": round((held + activations) / 2**20, 1),
        "num_ranks": ranks,
        **hours,
    }


def counts_of(step: StepModule, data: TrainingSet) -> dict[str, int]:
    """How much there is to train on, and how many parameters train; before a launcher shards them."""
    # A byte holds two 4-bit weights.
    sizes = [(p.numel() * (2 if p.dtype == torch.uint8 else 1), p.requires_grad) for p in step.parameters()]
    return {
        "num_lists": len(data.lists),
        "num_skills": len({skill.skill_id for skill in data.skills.values()}),
        "num_pairs": sum(len(one.skill_ids) for one in data.lists),
        "num_positives": sum(sum(one.is_positive) for one in data.lists),
        "num_parameters": sum(size for size, _ in sizes),
        "num_trained_parameters": sum(size for size, is_trained in sizes if is_trained),
    }


def cut_share(step: StepModule, data: TrainingSet) -> float:
    """The share of positives that are cut. An encoder's text that reaches its limit counts: the rest is gone."""
    longest = step.model.settings.max_tokens - isinstance(step, EncoderStep)
    rows = [zip(one.is_positive, step.lengths(one), strict=True) for one in data.lists]
    cut = [length > longest for row in rows for is_positive, length in row if is_positive]
    return round(fmean(cut), 4)


def planned_activations(step: StepModule, batches: Iterable[Sequence[TrainingList]], dtype: torch.dtype) -> int:
    """Bytes that the batch with the most tokens needs beside weights and optimiser, all of it on one process.

    With `recompute` these are the inputs of all layers, and all of one layer for the largest micro-batch.
    """
    network, slots = step.model.network, step.slots(largest_batch(step, batches))
    of_layer, num_layers = layer_bytes(network, dtype), network.config.num_hidden_layers
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * of_layer)
    of_input = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * of_input + max(slots) * of_layer)


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights, and of the gradients and AdamW's two moments of those that train."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in [*module.parameters(), *trained])
    return weights + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)


def check_fits(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise SkilltrainError, before any weight is read, where what training holds of each exceeds the GPU.

    A rank holds its part under FSDP2 and DeepSpeed. Activations come on top, so a training that passes may still not
    fit; of 4-bit weights, which are made as they load, nothing is known yet.
    """
    if accelerator.device.type != "cuda" or is_quantized(config):
        return
    is_shared = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    held = held_bytes(load_model(config, torch.device("meta"))) / (accelerator.num_processes if is_shared else 1)
    total = torch.cuda.get_device_properties(accelerator.device).total_memory
    if held > total:
        what = f"its weights, gradients and AdamW's moments take {held / GIB:.1f} GiB on each GPU"
        lighter = "train an adapter (LoRA)" if config.adapter is None else "set adapter.quantize=nf4"
        fix = f"{lighter}, or share it by launch/fsdp2.yaml"
        raise SkilltrainError(f"{what}, which has {total / GIB:.1f}", where=config.model.source, fix=fix)


def planned_seconds(
    step: StepModule, batches: Sequence[Sequence[TrainingList]], dtype: torch.dtype, device: torch.device
) -> float:
    """About how long all forward and backward passes take on one process: a layer's time, times layers and tokens.

    The layer has random weights and computes a micro-batch of texts of the mean length. The optimiser's step, the
    exchange between ranks and evaluations are not in it.
    """
    sample = batches[:: max(1, len(batches) // _SAMPLED)]
    slots = len(batches) * fmean(sum(step.slots(batch)) for batch in sample)
    most, budget = step.model.settings.max_tokens, step.settings.token_budget
    length = round(fmean(min(tokens, most) for batch in sample for one in batch for tokens in step.lengths(one)))
    num_rows = max(1, (budget if device.type == "cuda" else min(budget, _TOKENS_ON_CPU)) // length)
    network, ids = step.model.network, torch.zeros(num_rows, length, dtype=torch.long, device=device)
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
