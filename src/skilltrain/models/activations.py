"""What a forward pass keeps for the backward pass: how to keep less, and how much it is."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from skilltrain.errors import SkilltrainError

_TOKENS = 64


def checkpoint_layers(network: Any) -> None:
    """Recompute layers in the backward pass (Chen et al. 2016, arXiv 1604.06174). SkilltrainError: it cannot do so."""
    try:
        network.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        what = f"transformers' {type(network).__name__} cannot recompute its layers"
        raise SkilltrainError(
            what, where="training.recompute", fix="set it to false, and lower batch_size"
        ) from error


def layer_bytes(network: Any, dtype: torch.dtype) -> float:
    """Bytes that a layer keeps of a token when it computes in `dtype`, besides its weights; switches recomputation off.

    Nothing is computed: the network runs on tensors without data, of three lengths, which tell tokens from the rest.
    """
    body, was_training = network.base_model, network.training
    device = next(body.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device
    network.train().activation_checkpointing_disable()

    def kept(num_tokens: int) -> int:
        storages: dict[Any, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        is_mixed = dtype == torch.bfloat16
        with hooks, torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
            functional_call(
                body, weights, (torch.zeros(1, num_tokens, dtype=torch.long, device=device),)
            )
        return sum(storages.values())

    with FakeTensorMode(allow_non_fake_inputs=True):
        own = [*body.named_parameters(), *body.named_buffers()]
        meta = {
            name: value for name, value in own if value.is_meta
        }  # autocast knows no device meta
        weights = {
            name: torch.empty_like(v, device=device).requires_grad_(v.requires_grad)
            for name, v in meta.items()
        }
        one, two, three = (kept(number * _TOKENS) for number in (1, 2, 3))
    square = (
        three - 2 * two + one
    ) / 2  # of masks, which transformers builds only where it cannot look at values
    network.train(was_training)
    return (two - one - 3 * square) / _TOKENS / network.config.num_hidden_layers
