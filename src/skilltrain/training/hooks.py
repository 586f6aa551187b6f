"""Code of your own that runs after each step and each evaluation of training."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import AfterValidator
from torch import nn

from skilltrain.metrics.bootstrap import Interval
from skilltrain.plugins import chosen_plugin


@runtime_checkable
class Hook(Protocol):
    """Code that runs during training. A subclass overrides what it needs.

    All ranks run a hook, in the same steps. A resumed run restores its state, so a step before the
    checkpoint is not seen twice.
    """

    def on_step(self, step: int, metrics: dict[str, float], model: nn.Module) -> None:
        """Run after an optimiser step, before its line of the log is written.

        Args:
            step: Number of steps done.
            metrics: Metrics of the step. The log and the trackers also show numbers that the hook
                adds.
            model: The `Encoder` or `Reranker` in training. Under FSDP2 and ZeRO, each rank has a
                part of its weights.
        """

    def on_eval(self, step: int, metrics: Mapping[str, Interval], model: nn.Module) -> None:
        """Run after an evaluation on the dev benchmark. See `on_step` for the arguments."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, as values of JSON.

        Only the main process saves its state, and a resumed run restores it on all ranks. So the
        state must not differ between ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""


def _check_hook(name: str) -> str:
    """Check that a name or an import path is that of a hook, and return it."""
    # The methods of `Hook` are looked up at the class.
    if not isinstance(chosen_plugin("hook", name), Hook):
        raise ValueError(f"{name} is no subclass of {Hook.__module__}.Hook")
    return name


HookName = Annotated[str, AfterValidator(_check_hook)]
