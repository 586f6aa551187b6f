"""Faster float32 linear layers on a CPU, computed by oneDNN, for inference and for training.

PyTorch computes float32 products with MKL, which does not use AVX-512 on AMD's processors. oneDNN
does, and is 2.2 times as fast on an EPYC 9005. Results differ only by rounding (2e-7).
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PackedLinear(nn.Module):
    """Frozen linear layer whose weights are in the memory layout of oneDNN.

    torch.compile converts weights in the same way. MiniLM becomes 1.9 times as fast. The layer has
    no parameters, so a packed network cannot be saved.

    Args:
        linear: Layer whose weights are copied.
        num_rows: About how many tokens a micro-batch has. oneDNN chooses the layout by it.
    """

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, values: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        return _product(values, self.packed, self.bias)


class OneDnnLinear(nn.Linear):
    """Linear layer for training whose three float32 products on a CPU are computed by oneDNN.

    It has the same parameters as the layer that it replaces, so tied weights stay tied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Take over the parameters and the pre-hooks of `linear`."""
        nn.Module.__init__(self)  # nn.Linear would allocate and initialise new weights
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        for hook in linear._forward_pre_hooks.values():
            self.register_forward_pre_hook(hook)

    def forward(self, input: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        """Apply the layer with oneDNN, or with PyTorch's own product if oneDNN does not fit."""
        # Under autocast, PyTorch's own product chooses the number format.
        is_float32 = input.dtype == self.weight.dtype == torch.float32
        on_cpu = input.device.type == self.weight.device.type == "cpu"
        is_autocast = torch.is_autocast_enabled("cpu")
        can_use_onednn = is_float32 and on_cpu and not is_autocast and input.numel() > 0
        if not can_use_onednn:
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])  # [row, inner]
        outputs: Any = _OneDnnProduct.apply(rows, self.weight, self.bias)  # [row, outer]
        return outputs.view(*input.shape[:-1], self.out_features)


def pack_linear_layers(network: nn.Module, num_rows: int) -> None:
    """Pack the linear layers of a network for inference, in place.

    Args:
        network: Only its plain float32 layers on a CPU are replaced.
        num_rows: About how many tokens a micro-batch has. oneDNN chooses the layout by it.
    """
    if torch.backends.mkldnn.is_available():
        _replace_linear_layers(network, lambda layer: PackedLinear(layer, num_rows))


def train_with_onednn(network: nn.Module) -> None:
    """Let oneDNN compute the linear layers of a network in training, in place, if it is faster.

    The choice depends on the type of processor, not on a measurement, so that a repeated run gives
    the same bits. The network's weights must not be sharded.
    """
    if onednn_is_faster():
        # oneDNN makes kernels for each number of rows (tokens of a micro-batch). By default it
        # keeps the last 1,024 kernels, which takes hundreds of MB. 64 are enough for one
        # micro-batch. oneDNN reads this variable at its first product in the process. If oneDNN
        # has computed a product before, its default stays.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        _replace_linear_layers(network, OneDnnLinear)


def onednn_is_faster() -> bool:
    """Return whether oneDNN is faster here. MKL uses AVX-512 only on Intel's processors."""
    processor = torch.cpu.get_capabilities()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    is_intel = "Intel" in str(processor.get("cpu_name", ""))
    return has_both and bool(processor.get("avx512_f")) and not is_intel


def _replace_linear_layers(
    network: nn.Module, replacement_of: Callable[[nn.Linear], nn.Module]
) -> None:
    """Replace the linear layers of `network` that have float32 weights on a CPU, in place.

    Args:
        network: Network whose layers are replaced. Layers on a GPU or of other number formats stay.
        replacement_of: Returns the new layer for a given layer.
    """
    # List only the names. A list of layers would keep the weights of replaced layers in memory
    # until the end.
    names = [name for name, _ in network.named_modules()]
    for name in names:
        layer = network.get_submodule(name)
        # Skip subclasses as well, because a subclass may compute something else.
        if type(layer) is not nn.Linear:
            continue
        if layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu":
            network.set_submodule(name, replacement_of(layer))


class _OneDnnProduct(torch.autograd.Function):
    """y = x W^T + b, with the gradients dx = dy W, dW = dy^T x and db = sum of dy over rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The gradient of the weight needs the rows, and the gradient of the rows needs the weight.
        saved_rows = rows if ctx.needs_input_grad[1] else None
        saved_weight = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(saved_rows, saved_weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        """Return the gradients of rows, weight and bias. A gradient that is not needed is None."""
        (gradient,) = gradients  # [row, outer]
        rows, weight = ctx.saved_tensors  # [row, inner], [outer, inner], or None
        rows_gradient = None if weight is None else _product(gradient, weight.t())
        weight_gradient = None if rows is None else _product(gradient.t(), rows.t())
        bias_gradient = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return rows_gradient, weight_gradient, bias_gradient


def _product(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return values weight^T + bias, computed by oneDNN.

    `weight` may be packed, or a transposed view, which oneDNN does not copy.
    """
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
