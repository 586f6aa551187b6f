"""The settings of the two training stages, and the model that they name."""

from pathlib import Path
from typing import Annotated, Literal

import torch
from accelerate.utils import set_seed
from pydantic import AfterValidator, Field, model_validator

from skilltrain.config import Config, InputPath, Seed
from skilltrain.errors import SkilltrainError
from skilltrain.losses import (
    EncoderLoss,
    InfoNCE,
    LateInteraction,
    ListwiseCE,
    Matryoshka,
    RerankerLoss,
)
from skilltrain.metrics.measures import Measure, parse_measure, parse_measures
from skilltrain.models.adapters import AdapterConfig, add_adapter, quantizing_options
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import Precision, resolve_dtype
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Verdict
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.rankers import OWN, RankerConfig, needs_candidates, parts_of
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.training.log import TrackerName
from skilltrain.training.training_set import ListsSource

DEV_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20")
# These measures ask only which skills stand in the top k, in whatever order.
_WITHOUT_ORDER = ("Hit", "Recall", "Precision", "FC", "COMP")


def _known_measure(text: str) -> str:
    try:
        measure = parse_measure(text)
    except SkilltrainError as error:
        raise ValueError(str(error)) from error
    if not measure.cutoff:  # such a measure may be undefined for a query
        raise ValueError(f"no step can be chosen by {text}, which is not defined for every query")
    return str(measure)


_MeasureName = Annotated[str, AfterValidator(_known_measure)]


class DevConfig(Config):
    """Rank a pool for the queries of a benchmark while the model trains."""

    benchmark: InputPath = Field(
        description="folder of a benchmark, in a published format or in our tables"
    )
    split: str | None = Field(
        default=None, description="use the queries of this split only; null for all"
    )
    pool: InputPath | None = Field(
        default=None, description="skills to rank; null for the pool of the training data"
    )
    rankers: tuple[RankerConfig, ...] = Field(
        default=(DenseConfig(source=OWN),),
        min_length=1,
        description="as in `evaluate`; source: self is this model",
    )
    max_skills: int | None = Field(
        default=None, ge=1, description="rank so many: the judged and a sample; null: all"
    )
    every: int = Field(default=50, ge=1, description="optimiser steps between evaluations")
    metric: _MeasureName = Field(
        default="MRR@10", description="what decides which step is best, e.g. nDCG@10"
    )
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without a new best until it stops"
    )

    @property
    def system(self) -> SystemConfig:
        return SystemConfig(name="dev", rankers=self.rankers)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is measured, the metric that decides among it."""
        return parse_measures([*DEV_MEASURES, self.metric])

    def check(self, kind: type[DenseConfig] | type[RerankConfig], example: str) -> None:
        """Raises ValueError for rankers that cannot rank, or in which the model in training is not one of `kind`."""
        measure, last = parse_measure(self.metric), self.rankers[-1]
        own = [part for part in parts_of(self.rankers) if getattr(part, "source", None) == OWN]
        if needs_candidates(self.rankers[0]):
            raise ValueError(
                "dev.rankers: the first one finds skills, for instance {kind: saved, rankings: FOLDER}"
            )
        if not own:
            raise ValueError("dev.rankers: none of them is the model in training (source: self)")
        if not all(isinstance(part, kind) for part in own):
            raise ValueError(f"dev.rankers: {example}")
        if (
            isinstance(last, RerankConfig)
            and measure.name in _WITHOUT_ORDER
            and measure.cutoff >= last.keep
        ):
            raise ValueError(
                f"dev.metric: {self.metric} is the same for every order of {last.keep} candidates"
            )


class TrainingConfig(Config):
    """How to train; the defaults are SkillRouter's where the paper gives a value."""

    epochs: int = Field(default=1, ge=1, description="passes over the lists")
    batch_size: int = Field(
        default=8, ge=1, description="queries per forward pass, over all ranks together"
    )
    accumulation: int = Field(default=4, ge=1, description="forward passes per optimiser step")
    learning_rate: float = Field(default=2e-5, gt=0, description="peak of the cosine schedule")
    warmup_share: float = Field(
        default=0.05, ge=0, lt=1, description="share of the steps that warm up"
    )
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's decay of matrices")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradients are clipped to this norm"
    )
    stop_grad_norm: float = Field(
        default=1e4, gt=0, description="a larger norm, before clipping, stops the run"
    )
    token_budget: int | None = Field(
        default=None, ge=64, description="per micro-batch; null: 16,384 (CPU: 4,096)"
    )
    recompute: bool = Field(
        default=False, description="compute layers twice: less memory, more time"
    )
    varlen: bool = Field(
        default=False, description="flash attention without padding: a causal encoder on a GPU"
    )
    precision: Precision | None = Field(
        default=None, description="null: auto on a GPU, float32 on a CPU"
    )
    seed: Seed = Field(default=42, description="order of the lists, dropout, new layers")
    save_every: int = Field(default=50, ge=1, description="optimiser steps between checkpoints")
    keep_checkpoints: int = Field(
        default=2, ge=1, description="newest checkpoints kept, in addition to the best"
    )
    trackers: tuple[TrackerName, ...] = Field(default=(), description="beside train_log.jsonl")

    def token_budget_on(self, device: torch.device) -> int:
        """The `token_budget`; without one, what keeps `device` busy: a GPU waits for its host below 16,384."""
        return self.token_budget or (16384 if device.type == "cuda" else 4096)

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The number format to compute in on `device`."""
        return resolve_dtype(
            self.precision or ("auto" if device.type == "cuda" else "float32"), device
        )


class TrainEncoderConfig(Config):
    """Train an encoder on lists of one or more positives and hard negatives."""

    stage: Literal["train_encoder"]
    model: EncoderConfig = Field(description="the encoder to start from")
    adapter: AdapterConfig | None = Field(
        default=None, description="train low-rank adapters (LoRA) instead of all"
    )
    data: ListsSource = Field(description="what to train on")
    loss: EncoderLoss = Field(default=InfoNCE(), description="what to minimise")
    late_interaction: LateInteraction | None = Field(
        default=None, description="train tokens' vectors too (kind late)"
    )
    in_batch_negatives: bool = Field(
        default=True, description="the other queries' skills are negatives too"
    )
    near_duplicates: float | None = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard of bodies from which skills are no in-batch negatives",
    )
    training: TrainingConfig = Field(default=TrainingConfig(), description="how to train")
    dev: DevConfig | None = Field(default=None, description="what to evaluate on while training")
    out: Path = Field(description="folder to write the model to")

    @model_validator(mode="after")
    def _can_be_trained(self) -> "TrainEncoderConfig":
        if self.dev is not None:
            self.dev.check(DenseConfig, "an encoder in training is {kind: dense, source: self}")
        gains = self.data.gains
        loss = self.loss.loss if isinstance(self.loss, Matryoshka) else self.loss
        pushes = isinstance(loss, InfoNCE) and loss.push_share > 0
        if pushes and gains[Verdict.REJECTED] >= gains[Verdict.IRRELEVANT]:
            raise ValueError("loss.push_share needs data.gains that put rejected below irrelevant")
        if self.late_interaction is not None and self.training.varlen:
            raise ValueError(
                "late_interaction needs all tokens' vectors, and training.varlen computes the last alone"
            )
        return self


class TrainRerankerConfig(Config):
    """Train a reranker on lists of a trained encoder's candidates."""

    stage: Literal["train_reranker"]
    model: RerankerConfig = Field(description="the reranker, or the plain model, to start from")
    adapter: AdapterConfig | None = Field(
        default=None, description="train low-rank adapters (LoRA) instead of all"
    )
    data: ListsSource = Field(description="what to train on")
    loss: RerankerLoss = Field(default=ListwiseCE(), description="what to minimise")
    training: TrainingConfig = Field(
        default=TrainingConfig(batch_size=1, accumulation=16, learning_rate=1e-5),
        description="how to train",
    )
    dev: DevConfig | None = Field(default=None, description="what to evaluate on while training")
    out: Path = Field(description="folder to write the model to")

    @model_validator(mode="after")
    def _can_be_trained(self) -> "TrainRerankerConfig":
        if self.loss.needs_sides:
            raise ValueError(
                "loss: a reranker compares skills with its own query only: directions: [query_to_skill]"
            )
        if self.training.varlen:
            raise ValueError("training: varlen is for encoders; a causal reranker never pads")
        if self.dev is not None:
            example = "[{kind: saved, rankings: FOLDER}, {kind: rerank, source: self, keep: 20}]"
            self.dev.check(
                RerankConfig, f"a reranker in training orders the candidates of others: {example}"
            )
        return self


TrainConfig = TrainEncoderConfig | TrainRerankerConfig


def is_quantized(config: TrainConfig) -> bool:
    """Whether the frozen weights are in 4 bits."""
    return config.adapter is not None and config.adapter.quantize != "none"


def load_model(config: TrainConfig, device: torch.device) -> Encoder | Reranker:
    """Load the model that training starts from, with its adapter. New layers depend on the seed alone."""
    set_seed(config.training.seed)
    source = config.model
    if config.adapter is None:
        # Most of AdamW's steps are too small to change a number in bfloat16.
        source = source.model_copy(update={"precision": "float32"})
    options = quantizing_options(config.adapter)
    if isinstance(source, EncoderConfig):
        model = load_encoder(source, device, options)
        if isinstance(config.loss, Matryoshka) and max(config.loss.dims) > model.dim:
            what = f"{max(config.loss.dims)} is more than the encoder's {model.dim}"
            raise SkilltrainError(what, where="loss.dims")
    else:
        model = load_reranker(source, device, options, new_head=True)
    if config.adapter is not None:
        add_adapter(model.network, config.adapter)
    return model
