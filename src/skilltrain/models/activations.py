"""Memory of the activations that a forward pass keeps for the backward pass."""

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

    The forward pass then keeps only the inputs of each layer, which saves memory and costs time.

    Args:
        network: A network of transformers.

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

    The network runs on tensors without data, so nothing is computed. Afterwards, the recomputation
    of layers (activation checkpointing) is off.

    Args:
        network: Network of an encoder or a reranker.
        dtype: Number format of the computation.
    """
    body = network.base_model  # the transformer without its head
    device = next(body.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")  # autocast does not support the device meta
    was_training = network.training
    network.train().activation_checkpointing_disable()

    # Measure the bytes that are kept for texts of N, 2 N and 3 N tokens, N = _NUM_TOKENS.
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Replace weights on the device meta by fake tensors on `device`, where the token ids are.
        # Replace all other float tensors too: bitsandbytes' 4-bit layers overwrite their bias in
        # the forward pass, and the real network would keep that fake bias.
        weights = {}
        for name, value in [*body.named_parameters(), *body.named_buffers()]:
            # 4-bit weights may be stored as floats (FSDP2). They have a `quant_state`, and stay.
            is_float = value.is_floating_point() and not hasattr(value, "quant_state")
            if value.is_meta or is_float:
                empty = torch.empty_like(value, device=device)
                weights[name] = empty.requires_grad_(value.requires_grad)

        measurements = []
        for factor in (1, 2, 3):
            ids = torch.zeros(1, factor * _NUM_TOKENS, dtype=torch.long, device=device)
            measurements.append(_saved_bytes(body, weights, ids, dtype))
    network.train(was_training)

    # The bytes for n tokens are a + b n + c n^2: a for saved weights, b n for activations, and
    # c n^2 for attention masks. Only b counts. Weights (a) are no activations, and real runs have
    # no masks (c). Here transformers builds masks, because fake tensors have no values that show
    # that no token is padding.
    #   single = a +   b N +   c N^2
    #   double = a + 2 b N + 4 c N^2
    #   triple = a + 3 b N + 9 c N^2
    single, double, triple = measurements
    mask_bytes = (triple - 2 * double + single) / 2  # c N^2: the other terms cancel
    activation_bytes = double - single - 3 * mask_bytes  # b N
    token_bytes = activation_bytes / _NUM_TOKENS  # b
    return token_bytes / network.config.num_hidden_layers


def _saved_bytes(
    body: Any, weights: dict[str, Tensor], ids: Int[Tensor, "1 token"], dtype: torch.dtype
) -> int:
    """Return the bytes of the tensors that a forward pass saves for the backward pass.

    Saved weights count too.

    Args:
        body: A transformer without its head.
        weights: Weights by name, used instead of those of `body`.
        ids: Token ids of one text.
        dtype: Number format of the computation.
    """
    # Several saved tensors may be views of one storage, which counts only once. torch returns the
    # same storage object for all of them.
    bytes_by_storage: dict[Any, int] = {}

    def record(tensor: Tensor) -> Tensor:
        """Count the bytes of a saved tensor. torch calls this for each tensor that it saves."""
        storage = tensor.untyped_storage()
        bytes_by_storage[storage] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    # In bfloat16, a training step runs under autocast.
    is_mixed = dtype == torch.bfloat16
    with hooks, torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=is_mixed):
        functional_call(body, weights, (ids,))  # runs `body` with the given weights
    return sum(bytes_by_storage.values())
