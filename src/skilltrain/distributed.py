"""Communication between the processes of a run (ranks)."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

ValueT = TypeVar("ValueT")


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes.

    Outside a distributed run they are 0 and 1.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def highest_on_any_rank(number: int, device: torch.device) -> int:
    """Return the largest `number` that a rank calls this function with."""
    _, world = rank_and_world()
    if world == 1:
        return number
    highest = torch.tensor(number, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


def of_first_rank(value: ValueT) -> ValueT:
    """Return the first rank's `value` on every rank."""
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
    """Gather the rows of all ranks, in order, on every rank.

    Each gradient reaches the rank that computed the row.

    Args:
        rows: Rows r, r + world, r + 2 world, … of the result, on rank r.
        total: Number of rows of all ranks.
    """
    _, world = rank_and_world()
    if world == 1:
        return rows
    max_rows = -(-total // world)  # rounded up
    shape = rows.shape[1:]
    # All ranks must send equally many rows.
    padded = torch.cat([rows, rows.new_zeros(max_rows - len(rows), *shape)])
    gathered: Tensor = _Gather.apply(padded)  # [rank, row, ...]
    return gathered.transpose(0, 1).reshape(world * max_rows, *shape)[:total]


class _Gather(torch.autograd.Function):
    """Stack a tensor of every rank. The gradient of a rank's tensor is the sum over all ranks."""

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
