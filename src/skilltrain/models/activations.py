"""Memory of the activations that a forward pass keeps for the backward pass.

Notes:
    - The network runs on tensors without data, so nothing is computed.
    - autocast does not support the device meta. So weights on it become fake tensors on the CPU.
    - For n tokens, a forward pass keeps a + b n + c n^2 bytes: a for saved weights, b n for
      activations, c n^2 for attention masks. Real runs have no masks. Here transformers builds
      them, because fake tensors have no values that show that no token is padding.
    - Saved tensors may be views of one storage, for which torch returns one storage object.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from skilltrain.errors import SkilltrainError

_NUM_TOKENS = 64  # length of the shortest text of a measurement


def checkpoint_layers(network: Any) -> None:
    """Recompute the layers in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    Raises:
        SkilltrainError: The network does not support it.
    """
    try:
        network.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        fault = f"transformers' {type(network).__name__} cannot recompute its layers"
        fix = "set it to false, and lower batch_size"
        raise SkilltrainError(
            "unsupported-model", fault, where="training.recompute", fix=fix
        ) from error


def layer_bytes(network: Any, dtype: torch.dtype) -> float:
    """Return how many bytes a layer keeps per token for the backward pass, without its weights.

    Afterwards, activation checkpointing is off.

    Args:
        network: Network of an encoder or a reranker.
        dtype: Number format of the computation.
    """
    body = network.base_model
    device = next(body.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")
    was_training = network.training
    network.train().activation_checkpointing_disable()

    saved_bytes = []  # for N, 2 N, 3 N tokens
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = _fake_weights(body, device)
        for factor in (1, 2, 3):
            ids = torch.zeros(1, factor * _NUM_TOKENS, dtype=torch.long, device=device)
            saved_bytes.append(_saved_bytes(body, weights, ids, dtype))
    network.train(was_training)

    token_bytes = _linear_term(*saved_bytes) / _NUM_TOKENS
    return token_bytes / network.config.num_hidden_layers


def _fake_weights(body: Any, device: torch.device) -> dict[str, Tensor]:
    """Return an empty tensor on `device` for each weight on the device meta, by name."""
    weights = {}
    for name, value in [*body.named_parameters(), *body.named_buffers()]:
        if value.is_meta:
            empty = torch.empty_like(value, device=device)
            weights[name] = empty.requires_grad_(value.requires_grad)
    return weights


def _linear_term(single: int, double: int, triple: int) -> float:
    """Return b N of a polynomial a + b n + c n^2, given its values for N, 2 N and 3 N."""
    quadratic_term = (triple - 2 * double + single) / 2  # c N^2
    return double - single - 3 * quadratic_term


def _saved_bytes(
    body: Any, weights: dict[str, Tensor], ids: Int[Tensor, "1 token"], dtype: torch.dtype
) -> int:
    """Return the bytes of all tensors that a forward pass saves for the backward pass.

    Args:
        body: A transformer without its head.
        weights: Weights by name, instead of the body's.
        ids: Token ids of one text.
    """
    bytes_by_storage = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    is_mixed = dtype == torch.bfloat16
    with hooks, torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=is_mixed):
        functional_call(body, weights, (ids,))
    return sum(bytes_by_storage.values())
