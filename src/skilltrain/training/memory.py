"""How much memory a training will take, estimated from shapes alone: a plan, not a measurement.

Activations are what autograd keeps of a layer (counted in transformers' BERT and Qwen3 and checked against it within
40%). Neither the working memory of single operations nor that of the libraries is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_MIB = 2**20
_ADAMW_BYTES = 8  # two float32 moments a trained parameter


@dataclass(frozen=True)
class Load:
    """The tokens that one process has in work: padded tokens and their longest text, in `num_groups` micro-batches."""

    slots: int
    longest: int
    num_groups: int


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's parts."""

    weights: int
    trained: int  # of the weights that train: so many bytes are their gradients
    num_trained: int
    layer: int  # of the largest layer, which sharding gathers whole when it is used
    outside: int  # of all but the layers (embeddings), gathered whole for all of the step
    trained_casts: int  # of bfloat16 copies of float32 layers that train, made once
    frozen_casts: int  # of those that do not, made anew in every micro-batch


def weights_of(model: nn.Module, mixed: bool) -> Weights:
    """Bytes of the model's parts; with `mixed`, float32 linear layers are copied to bfloat16 while they compute."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [_size(layer) for layer in max(stacks, key=_size, default=nn.ModuleList())]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    cast = {id(weight): weight for weight in linear if mixed and weight.dtype == torch.float32}.values()
    return Weights(
        _size(model),
        sum(map(_num_bytes, trained)),
        sum(parameter.numel() for parameter in trained),
        max(layers, default=0),
        _size(model) - sum(layers),
        sum(2 * weight.numel() for weight in cast if weight.requires_grad),
        sum(2 * weight.numel() for weight in cast if not weight.requires_grad),
    )


def _size(module: nn.Module) -> int:
    return sum(map(_num_bytes, module.parameters()))


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def activation_bytes(config: Any, load: Load, half: bool) -> int:
    """Bytes that autograd keeps for `load`, of a model with this transformers configuration.

    A token and layer keep, with h hidden, i intermediate, q query and k key width:
    a BERT layer 8 h + 2 i numbers (2 h of them the layer norms'), a Qwen3 layer 6 h + 6 q + 2 k + 4 i (4 h + q + k of
    them the RMS norms'). Norms keep float32, the others 2 bytes a number where the model computes in bfloat16 (`half`).
    Beside the layers: the embeddings' and the last norm's 2 h, and the attention mask of a padded batch.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, key_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if key_heads is None:
        norms, others = 2 * hidden, 6 * hidden + 2 * inner
    else:
        head = getattr(config, "head_dim", None) or hidden // heads
        query, key = heads * head, key_heads * head
        norms, others = 4 * hidden + query + key, 2 * hidden + 5 * query + key + 4 * inner
    width = 2 if half else 4
    layers = config.num_hidden_layers * (4 * norms + width * others)
    return load.slots * (layers + 4 * 2 * hidden + width * load.longest)


def memory_of(weights: Weights, config: Any, kept: Load, largest: Load, half: bool) -> dict[str, int]:
    """Bytes of a process that holds everything itself, by part.

    `kept` is one process's share of the largest batch, whose activations are all kept until the loss is known;
    with `recompute` only those of one micro-batch, `largest`, exist at a time.
    """
    return {
        "weights": weights.weights,
        "gradients": weights.trained,
        "optimizer": _ADAMW_BYTES * weights.num_trained,
        "activations": activation_bytes(config, kept, half)
        + weights.trained_casts
        + weights.frozen_casts * kept.num_groups,
        "activations_recompute": activation_bytes(config, largest, half) + weights.trained_casts + weights.frozen_casts,
    }


def by_way(whole: dict[str, int], weights: Weights, num_ranks: int) -> dict[str, dict[str, float]]:
    """MiB a process by part and in total, for each way of running on `num_ranks` of them.

    DDP holds gradients twice (its exchange buckets). ZeRO-2 shards gradients and optimiser with a float32 copy of what
    trains. ZeRO-3 and FSDP2 shard weights, gradients and optimiser, and gather the embeddings and two layers at a time.
    """
    sharded = {name: whole[name] / num_ranks for name in ("weights", "gradients", "optimizer")}
    copy = 4 * weights.num_trained / num_ranks
    ways: dict[str, dict[str, int | float]] = {
        "ddp": {**whole, "gradients": 2 * whole["gradients"]},
        "zero2": {**whole, "gradients": sharded["gradients"], "optimizer": sharded["optimizer"] + copy},
        "zero3_fsdp2": {**whole, **sharded, "weights": sharded["weights"] + 2 * weights.layer + weights.outside},
    }
    return {way: in_mib(parts) for way, parts in ways.items()}


def in_mib(parts: Mapping[str, int | float]) -> dict[str, float]:
    """The parts in MiB, with their totals without and with recompute."""
    fixed = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    totals = {"total": fixed + parts["activations"], "total_recompute": fixed + parts["activations_recompute"]}
    return {name: round(value / _MIB, 1) for name, value in {**parts, **totals}.items()}
