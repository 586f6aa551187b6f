"""Settings that both training stages share."""

from typing import Annotated

import torch
from pydantic import AfterValidator, Field

from skilltrain.config import Config, InputPath, Seed
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.measures import Measure, parse_measure, parse_measures
from skilltrain.models.loading import Precision, resolve_dtype
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.rankers import OWN, AnyRanker, flatten_rankers
from skilltrain.training.hooks import HookName
from skilltrain.training.log import TrackerName
from skilltrain.training.optimizers import AdamW, AnyOptimizer, AnyScheduler, Cosine

DEV_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20")
# These measures do not depend on the order of the top k skills.
_UNORDERED_MEASURES = ("Hit", "Recall", "Precision", "FC", "COMP")


def _check_metric(text: str) -> str:
    """Check the name of a measure, and return it in its standard form."""
    try:
        measure = parse_measure(text)
    except SkilltrainError as error:
        raise ValueError(str(error)) from error
    if not measure.cutoff:  # a measure without cutoff may be undefined for a query
        raise ValueError(f"no step can be chosen by {text}, which is not defined for every query")
    return str(measure)


_MeasureName = Annotated[str, AfterValidator(_check_metric)]


class DevConfig(Config):
    """Rank a pool for the queries of a benchmark, between the steps of training."""

    benchmark: InputPath = Field(
        description="folder of a benchmark, in a published format or in our tables"
    )
    split: str | None = Field(
        default=None, description="use the queries of this split only; null for all"
    )
    pool: InputPath | None = Field(
        default=None, description="skills to rank; null for the pool of the training data"
    )
    rankers: tuple[AnyRanker, ...] = Field(
        default=(DenseConfig(source=OWN),),
        min_length=1,
        description="as in `evaluate`; source: self is this model",
    )
    max_skills: int | None = Field(
        default=None,
        ge=1,
        description="rank the judged skills and a sample, so many in all; null: all",
    )
    every: int = Field(default=50, ge=1, description="optimiser steps between evaluations")
    metric: _MeasureName = Field(
        default="MRR@10", description="the metric that decides which step is best, e.g. nDCG@10"
    )
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without a new best until it stops"
    )

    @property
    def system(self) -> SystemConfig:
        return SystemConfig(name="dev", rankers=self.rankers)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """All measures, including the one that decides."""
        return parse_measures([*DEV_MEASURES, self.metric])

    def check(self, kind: str, requirement: str) -> None:
        """Check the rankers and the metric.

        Args:
            kind: Kind of ranker that the model in training must be: `dense` or `rerank`.
            requirement: Text of the error if the model in training is of another kind.

        Raises:
            ValueError: The rankers or the metric cannot measure the model in training.
        """
        # The first ranker must find skills, not only order them.
        first_members = flatten_rankers(self.rankers[:1])
        if any(member.only_orders for member in first_members):
            raise ValueError(
                "dev.rankers: the first one must find skills, "
                "for instance {kind: saved, rankings: FOLDER}"
            )

        # One ranker must be the model in training.
        members = flatten_rankers(self.rankers)
        kinds = [member.kind for member in members if member.is_in_training]
        if not kinds:
            raise ValueError("dev.rankers: none of them is the model in training (source: self)")
        if set(kinds) != {kind}:
            raise ValueError(f"dev.rankers: {requirement}")
        self._check_metric()

    def _check_metric(self) -> None:
        """Check that the last ranker can change the metric.

        A reranker that orders 20 candidates cannot change Recall@20, for example.

        Raises:
            ValueError: The metric is the same for every order of the candidates.
        """
        measure = parse_measure(self.metric)
        # Number of candidates that the last ranker reads. None: all of them
        num_candidates = self.rankers[-1].num_read
        ignores_order = measure.name in _UNORDERED_MEASURES
        if ignores_order and num_candidates is not None and measure.cutoff >= num_candidates:
            raise ValueError(
                f"dev.metric: {self.metric} is the same for every order of {num_candidates} "
                "candidates"
            )


class TrainingConfig(Config):
    """How to train. The defaults are SkillRouter's, if the paper gives a value."""

    epochs: int = Field(default=1, ge=1, description="passes over the lists")
    batch_size: int = Field(
        default=8, ge=1, description="queries per forward pass, over all ranks together"
    )
    accumulation: int = Field(default=4, ge=1, description="forward passes per optimiser step")
    num_negatives: int | None = Field(
        default=None,
        ge=1,
        description="negatives of each list, sampled anew in every epoch; null: all of the list",
    )
    one_origin_batches: bool = Field(
        default=False, description="each batch has queries of one origin (column of QUERIES)"
    )
    learning_rate: float = Field(default=2e-5, gt=0, description="peak of the schedule")
    warmup_share: float = Field(
        default=0.05, ge=0, lt=1, description="share of the steps that warm up"
    )
    scheduler: AnyScheduler = Field(
        default=Cosine(), description="the learning rate after the warm-up"
    )
    optimizer: AnyOptimizer = Field(default=AdamW(), description="what updates the weights")
    weight_decay: float = Field(default=0.01, ge=0, description="decay of matrices")
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor of the learning rate from each layer to the layer below; 1: none",
    )
    freeze_embeddings: bool = Field(default=False, description="do not train the token embeddings")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradients are clipped to this norm"
    )
    stop_grad_norm: float = Field(
        default=1e4, gt=0, description="a larger norm, before clipping, stops the run"
    )
    token_budget: int | None = Field(
        default=None, ge=64, description="per micro-batch; null: at most 16,384 (CPU: 4,096)"
    )
    recompute: bool | None = Field(
        default=None,
        description="compute layers twice: less memory, more time; null: if memory needs it",
    )
    varlen: bool = Field(
        default=False, description="flash attention without padding: a causal encoder on a GPU"
    )
    two_pass: bool = Field(
        default=False,
        description="GradCache: a batch of any size in the memory of a micro-batch, for an encoder",
    )
    precision: Precision | None = Field(
        default=None, description="null: auto on a GPU, float32 on a CPU"
    )
    seed: Seed = Field(default=42, description="order of the lists, dropout, new layers")
    save_every: int | None = Field(
        default=None,
        ge=1,
        description="optimiser steps between checkpoints; null: 50 (CPU: one a minute)",
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="newest checkpoints kept, in addition to the best"
    )
    trackers: tuple[TrackerName, ...] = Field(default=(), description="beside train_log.jsonl")
    hooks: tuple[HookName, ...] = Field(
        default=(), description="code to run after steps and evaluations: names or import paths"
    )

    def token_budget_on(self, device: torch.device) -> int:
        """Return `token_budget`, or the default for a device.

        With fewer tokens than 16,384, a GPU waits for its host.
        """
        if self.token_budget is not None:
            return self.token_budget
        return 16384 if device.type == "cuda" else 4096

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the dtype to compute in on a device."""
        default: Precision = "auto" if device.type == "cuda" else "float32"
        return resolve_dtype(self.precision or default, device)
