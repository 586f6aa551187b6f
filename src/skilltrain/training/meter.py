"""What a step of training costs and gives, as figures for the log and a line for the terminal."""

from collections import deque
from dataclasses import dataclass

_WINDOW = 20  # steps that a rate looks back on: long enough to be steady, short enough to show a change


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step: its loss and gradient norm before clipping, and the work of all ranks in `seconds`.

    `num_tokens` are the texts' own tokens, `num_slots` those that the model computed, padding included.
    """

    loss: float
    learning_rate: float
    grad_norm: float
    num_queries: int
    num_tokens: int
    num_slots: int
    seconds: float


class Meter:
    """Figures of the newest step, with rates over the last 20 steps.

    The first step after a start or a resume warms up (memory, kernels, caches): it counts only until there is a
    second one. Time between steps, for a checkpoint or an evaluation, does not count.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._recent: deque[StepResult] = deque(maxlen=_WINDOW)
        self._is_warm = False

    def update(self, step: int, result: StepResult) -> dict[str, float]:
        """Take in step number `step` (counted from 1) and give its figures."""
        if self._recent and not self._is_warm:
            self._recent.clear()
            self._is_warm = True
        self._recent.append(result)
        return {
            "epoch": step / self._steps_per_epoch,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "queries_per_second": self._rate(sum(one.num_queries for one in self._recent)),
            "tokens_per_second": self._rate(sum(one.num_tokens for one in self._recent)),
            "padding_share": _padding_share(result.num_tokens, result.num_slots),
        }

    def note(self) -> str:
        """The newest step in one line, padding and rates over the window; empty before the first step."""
        if not self._recent:
            return ""
        newest, recent = self._recent[-1], self._recent
        tokens, slots = sum(one.num_tokens for one in recent), sum(one.num_slots for one in recent)
        parts = (
            f"loss {newest.loss:.4f}",
            f"lr {newest.learning_rate:.1e}",
            f"|g| {newest.grad_norm:.2f}",
            f"{self._rate(sum(one.num_queries for one in recent)):,.1f} queries/s",
            f"{self._rate(tokens):,.0f} tokens/s",
            f"padding {_padding_share(tokens, slots):.0%}",
        )
        return "  ".join(parts)

    def _rate(self, count: int) -> float:
        seconds = sum(one.seconds for one in self._recent)
        return count / seconds if seconds > 0 else 0.0


def _padding_share(num_tokens: int, num_slots: int) -> float:
    return 1 - num_tokens / num_slots if num_slots else 0.0
