"""Communication between the processes of a run (ranks)."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

ValueT = TypeVar("ValueT")


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process, and the number of processes (the world).

    Outside a distributed run they are 0 and 1.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def highest_on_any_rank(number: int, device: torch.device) -> int:
    """Return the largest of the values of `number` on all ranks. All ranks must call this."""
    _, world = rank_and_world()
    if world == 1:
        return number
    highest = torch.tensor(number, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


def of_first_rank(value: ValueT) -> ValueT:
    """Send the `value` of the first rank to all ranks, and return it on every rank."""
    _, world = rank_and_world()
    values = [value]
    if world > 1:
        dist.broadcast_object_list(values, 0)
    return values[0]


def made_by_first_rank(make: Callable[[], ValueT]) -> ValueT:
    """Call `make` only on the first rank, and return its result on every rank."""
    rank, _ = rank_and_world()
    value: Any = make() if rank == 0 else None
    return of_first_rank(value)


def gather_rows(rows: Float[Tensor, "local ..."], total: int) -> Float[Tensor, "total ..."]:
    """Gather the rows of all ranks, in their order, on every rank.

    In the backward pass, the gradient of a row goes to the rank that sent the row.

    Args:
        rows: Rows of this rank. On rank r of n ranks, these are the rows r, r + n, r + 2n, … of the
            result.
        total: Number of rows of all ranks together.
    """
    _, world = rank_and_world()
    if world == 1:
        return rows

    # All ranks must send equally many rows, so the last row may be padding.
    max_rows = math.ceil(total / world)
    row_shape = rows.shape[1:]
    padding = rows.new_zeros(max_rows - len(rows), *row_shape)
    # `_Gather` stacks the tensors of all ranks, and also passes gradients back.
    gathered: Tensor = _Gather.apply(torch.cat([rows, padding]))  # [rank, row, ...]

    # Rows of the result alternate between the ranks.
    alternating = gathered.transpose(0, 1)  # [row, rank, ...]
    # Cut off the padding, which is now at the end.
    return alternating.reshape(world * max_rows, *row_shape)[:total]


class _Gather(torch.autograd.Function):
    """Stack the tensors of all ranks. The gradient of a tensor is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]
