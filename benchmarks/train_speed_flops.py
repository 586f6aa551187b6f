"""Floating-point operations that a training step cannot do without."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def useful_flops(step: Any, batch: Sequence[Any]) -> float:
    """FLOP of forward and backward on the batch's real tokens, each distinct skill once, no recomputation.

    6 a weight of the linear layers and token (embeddings and heads, used once a text, are left out), and in attention
    12 a layer, width and pair of tokens that see each other (Kaplan et al. 2020, section 2.1; the query-key and the
    attention-value product, 2 FLOP each, three times). In a causal reranker a list's common prompt counts once.
    """
    if hasattr(step, "encoder"):
        network = step.model.backbone
        skill_ids = {skill_id for one in batch for skill_id in one.skill_ids}
        lengths = [len(step.query_ids[one.query]) for one in batch] + [len(step.skill_ids[s]) for s in skill_ids]
        tokens, seen = sum(lengths), sum(map(_seen(network), lengths))
    else:
        network = step.model.network
        lists = [[pair.ids for pair in step.pairs(one)] for one in batch]
        shared = [_num_shared(texts) if _is_causal(network) else 0 for texts in lists]
        tokens = sum(s + sum(len(t) - s for t in texts) for s, texts in zip(shared, lists, strict=True))
        seen = sum(
            _seen(network)(s) + sum(_seen(network)(len(t)) - _seen(network)(s) for t in texts)
            for s, texts in zip(shared, lists, strict=True)
        )
    config = network.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6.0 * _num_weights(network) * tokens + 12.0 * config.num_hidden_layers * width * seen


def _is_causal(network: nn.Module) -> bool:
    return "bert" not in type(network).__name__.lower()


def _seen(network: nn.Module) -> Any:
    """Pairs of tokens that see each other in a text of so many tokens."""
    return (lambda length: length * (length + 1) / 2) if _is_causal(network) else (lambda length: length**2)


def _num_shared(texts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of all texts."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if any(text[i] != texts[0][i] for text in texts)), shortest)


def _num_weights(network: nn.Module) -> int:
    """Weights of the linear layers inside the transformer's layers."""
    names = ("pooler", "classifier", "lm_head", "score")
    return sum(
        module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(names) and ".pooler" not in name
    )
