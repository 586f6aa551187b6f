"""Linear layers in float32 on a CPU, computed by oneDNN: for inference and for training.

PyTorch gives float32 products to MKL, which on AMD's processors does not use AVX-512: on an EPYC 9005 oneDNN is 2.2
times as fast. Results differ by rounding alone (2e-7).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PackedLinear(nn.Module):
    """A frozen linear layer with weights laid out for oneDNN once, as torch.compile does: MiniLM 1.9 times as fast."""

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, values: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        return torch.ops.mkldnn._linear_pointwise(values, self.packed, self.bias, "none", [], "")


def pack_linear_layers(network: nn.Module, num_rows: int) -> None:
    """Replace the float32 linear layers of a network on a CPU, for inference alone, on some `num_rows` tokens."""
    if not torch.backends.mkldnn.is_available():
        return
    for name in [
        name for name, _ in network.named_modules()
    ]:  # no list of layers: it would keep their weights too
        layer = network.get_submodule(name)
        if (
            not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear
        ):  # a subclass computes something else
            continue
        if layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu":
            network.set_submodule(name, PackedLinear(layer, num_rows))


class OneDnnLinear(nn.Linear):
    """A linear layer to train, whose three float32 products on a CPU oneDNN computes; in all else it is nn.Linear."""

    def forward(self, input: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        weight = self.weight
        plain = (
            input.dtype == weight.dtype == torch.float32
            and input.device.type == weight.device.type == "cpu"
        )
        if not plain or input.numel() == 0 or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        rows: Any = _OneDnnProduct.apply(input.reshape(-1, input.shape[-1]), weight, self.bias)
        return rows.view(*input.shape[:-1], weight.shape[0])


def train_with_onednn(network: nn.Module) -> None:
    """Let oneDNN compute the linear layers of a network in training, in place, where it is faster than MKL.

    The processor decides, not a measurement, so that a run gives the same bits again. Weights must lie whole here.
    """
    if not onednn_is_faster():
        return
    for layer in network.modules():
        if type(layer) is nn.Linear:  # a subclass computes something else
            layer.__class__ = OneDnnLinear  # in place: a new module would lose hooks and ties


def onednn_is_faster() -> bool:
    """Whether MKL computes float32 products here and leaves AVX-512 unused, which it does on all but Intel's CPUs."""
    processor = torch.cpu.get_capabilities()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return bool(
        has_both and processor.get("avx512_f") and "Intel" not in str(processor.get("cpu_name", ""))
    )


class _OneDnnProduct(torch.autograd.Function):
    """y = x W^T + b, its gradients dx = dy W, dW = dy^T x, db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(
            rows if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
        )
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        of_rows = None if weight is None else _product(gradient, weight.t())
        of_weight = None if rows is None else _product(gradient.t(), rows.t())
        return of_rows, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left right^T + bias; `right` may be a transposed view, which oneDNN reads without copying it first."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
