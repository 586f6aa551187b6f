"""Optimisers and schedules of the learning rate, which a recipe chooses by name or import path.

Notes:
    - Vectors, such as biases and the weights of norms, do not decay.
    - A checkpoint stores the values that an optimiser holds for each parameter. They must be
      tensors or whole numbers.
    - Only AdamW is tested with weights that ranks share (FSDP2, ZeRO).
    - bitsandbytes keeps the moments of tensors with fewer than 4,096 values in 32 bits.
"""

import importlib.util
import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError, install_command
from skilltrain.plugins import OneOf

Beta = Annotated[float, Field(ge=0, lt=1)]
ParameterGroups = list[dict[str, Any]]
"""Groups of parameters with the keys `params`, `weight_decay` and `rate_scale`.

`params` has pairs of a name and a parameter, as torch's optimisers accept them. torch splits the
pairs: in `optimizer.param_groups`, `params` holds the parameters and `param_names` their names.
Other keys stay.

The trainer multiplies the learning rate of a group by its `rate_scale`.
"""


class OptimizerConfig(Config):
    """An optimiser by name. Its hyper-parameters are fields, and `create` makes it."""

    bytes_per_weight: ClassVar[int]
    """Bytes that it holds for each trained weight, to plan the memory."""
    is_shardable: ClassVar[bool] = False
    """Whether it is tested under FSDP2 and ZeRO, where each rank has a part of the weights."""
    # Of type Any, so that a subclass can have a Literal or a str.
    name: Any = Field(description="name of the optimiser, or its import path")

    @abstractmethod
    def create(self, groups: ParameterGroups, learning_rate: float) -> torch.optim.Optimizer:
        """Return the optimiser of the parameters in `groups`."""


class _AdamConfig(OptimizerConfig):
    """Settings that all forms of AdamW have."""

    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="decay of both moments")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")


class AdamW(_AdamConfig):
    """AdamW with moments in float32 (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    bytes_per_weight = 8
    is_shardable = True
    name: Literal["adamw"] = "adamw"

    def create(self, groups: ParameterGroups, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups, lr=learning_rate, betas=self.betas, eps=self.eps, fused=True
        )


class AdamW8bit(_AdamConfig):
    """AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861), by bitsandbytes."""

    bytes_per_weight = 2
    name: Literal["adamw_8bit"] = "adamw_8bit"

    def create(self, groups: ParameterGroups, learning_rate: float) -> torch.optim.Optimizer:
        if importlib.util.find_spec("bitsandbytes") is None:
            fault = "optimizer adamw_8bit needs bitsandbytes, which is not installed"
            raise SkilltrainError("missing-package", fault, fix=install_command("qlora"))
        from bitsandbytes.optim.adamw import AdamW8bit as Optimizer

        return Optimizer(groups, lr=learning_rate, betas=self.betas, eps=self.eps)


class Adafactor(OptimizerConfig):
    """Adafactor, which stores a row and a column per matrix (Shazeer and Stern, arXiv 1804.04235).

    Learning rates for AdamW are too low for it.
    """

    bytes_per_weight = 0
    name: Literal["adafactor"] = "adafactor"
    max_update: float = Field(default=1.0, ge=1, description="updates are clipped to this RMS")

    def create(self, groups: ParameterGroups, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups, lr=learning_rate, d=self.max_update)


class SchedulerConfig(Config):
    """A schedule by name: the share of the peak learning rate after the warm-up."""

    name: Any = Field(description="name of the schedule, or its import path")

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Return the share of the peak rate.

        Args:
            progress: Share of the steps after the warm-up that are done, from 0 to below 1.
        """


class Cosine(SchedulerConfig):
    """Half a cosine down to 0."""

    name: Literal["cosine"] = "cosine"

    def factor(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class Linear(SchedulerConfig):
    """A straight line down to 0."""

    name: Literal["linear"] = "linear"

    def factor(self, progress: float) -> float:
        return 1 - progress


class Constant(SchedulerConfig):
    """The peak rate until the end."""

    name: Literal["constant"] = "constant"

    def factor(self, progress: float) -> float:
        return 1.0


class WarmupStableDecay(SchedulerConfig):
    """The peak rate, then a straight line down to 0 (Hu et al. 2024, arXiv 2404.06395)."""

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_share: float = Field(
        default=0.1, gt=0, le=1, description="share of the steps after the warm-up that decay"
    )

    def factor(self, progress: float) -> float:
        return min(1.0, (1 - progress) / self.decay_share)


AnyOptimizer = Annotated[SerializeAsAny[OptimizerConfig], OneOf("optimizer", tag="name")]
AnyScheduler = Annotated[SerializeAsAny[SchedulerConfig], OneOf("scheduler", tag="name")]
