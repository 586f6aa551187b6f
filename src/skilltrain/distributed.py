"""What the processes of a run tell each other."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

ValueT = TypeVar("ValueT")


def rank_and_world() -> tuple[int, int]:
    """(this process's rank, number of processes); (0, 1) outside a distributed run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def highest_on_any_rank(number: int, device: torch.device) -> int:
    """The largest `number` that any rank gives."""
    if rank_and_world()[1] == 1:
        return number
    highest = torch.tensor(number, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


def of_first_rank(value: ValueT) -> ValueT:
    """What the first rank gives, on every rank."""
    box = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]


def made_by_first_rank(make: Callable[[], ValueT]) -> ValueT:
    """What `make` gives on the first rank, on every rank; the others make nothing."""
    value: Any = None if rank_and_world()[0] else make()
    return of_first_rank(value)


def gather_rows(rows: Float[Tensor, "own ..."], total: int) -> Float[Tensor, "total ..."]:
    """The `total` rows of which rank r holds rows r, r + world, r + 2 world, …, in order, on every rank.

    The gradient reaches the rank that made a row. Ranks may hold unequal counts: short ones are padded on the wire.
    """
    _, world = rank_and_world()
    if world == 1:
        return rows
    longest = -(-total // world)
    shape = rows.shape[1:]
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *shape)])
    gathered: Tensor = _Gather.apply(padded)  # [rank, row, ...]
    return gathered.transpose(0, 1).reshape(world * longest, *shape)[:total]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]
