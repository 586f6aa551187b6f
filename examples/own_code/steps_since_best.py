"""A hook, which steps_since_best.yaml uses. It runs after each step and each evaluation."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from skilltrain.metrics.bootstrap import Interval
from skilltrain.training.hooks import Hook


class StepsSinceBest(Hook):
    """Logs the number of steps since the best evaluation on the dev benchmark."""

    def __init__(self) -> None:
        self.best = 0.0
        self.best_step = 0

    def on_step(self, step: int, metrics: dict[str, float], model: nn.Module) -> None:
        metrics["steps_since_best"] = step - self.best_step

    def on_eval(self, step: int, metrics: Mapping[str, Interval], model: nn.Module) -> None:
        mrr = metrics["MRR@10"].mean
        if mrr > self.best:
            self.best = mrr
            self.best_step = step

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.best_step = state["best_step"]
