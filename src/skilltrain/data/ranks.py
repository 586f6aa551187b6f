"""The processes that one stage is spread over by `accelerate launch`, on one machine or several."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
from jaxtyping import UInt8

from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import default_device

# Ranks wait for the slowest. One that has ended breaks the connection, and is noticed at once.
_PATIENCE = timedelta(hours=24)


class Ranks:
    """This process among its like; what they tell each other goes over gloo, on GPUs too: it is little."""

    def __init__(self) -> None:
        self.number, self.total = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            is_cpu = default_device().type == "cpu"
            if is_cpu:
                os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would say on stdout that it had to look
            from accelerate import PartialState

            with _connected():
                self._state = PartialState(cpu=is_cpu, backend="gloo", timeout=_PATIENCE)
            self.number, self.total = self._state.process_index, self._state.num_processes

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks and writes for all."""
        return self.number == 0

    def same(self, what: bytes) -> bool:
        """Whether the first rank has the same `what`, of a length that all know."""
        return self.from_first(np.frombuffer(what, np.uint8)).tobytes() == what

    def from_first(self, values: UInt8[np.ndarray, " value"]) -> UInt8[np.ndarray, " value"]:
        """The first rank's `values`, which are as many on all."""
        if self.total == 1:
            return values
        tensor = torch.from_numpy(values.copy())
        with _connected():
            torch.distributed.broadcast(tensor, 0)
        return tensor.numpy()

    def sums(self, *numbers: int) -> list[int]:
        """Each number summed over the ranks; all have come here when this returns."""
        if self.total == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        with _connected():
            torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    def leave(self) -> None:
        """Part from the others, when nothing more is to be said: a process that just ends may abort while it does."""
        if self.total > 1:
            self._state.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        what = "another rank ended before all were done"
        raise SkilltrainError(what, fix="see its own message; then run it again: what is done is kept") from error
