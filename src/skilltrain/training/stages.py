"""The stages `train_encoder` and `train_reranker`: from LISTS to a model folder."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import nn

from skilltrain.config import Config
from skilltrain.export.sentence_transformers import save_encoder, save_reranker
from skilltrain.losses import InfoNCE, ListwiseCE, Loss
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.terminal import is_main_process
from skilltrain.training.loop import TrainingConfig, TrainingResult, num_steps, train
from skilltrain.training.steps import EncoderStep, RerankerStep
from skilltrain.training.training_set import ListsSource, TrainingSet, load_training_set


class TrainEncoderConfig(Config):
    """Train an encoder on lists of one or more positives and hard negatives."""

    stage: Literal["train_encoder"]
    model: EncoderConfig = Field(description="the encoder to start from")
    data: ListsSource = Field(description="what to train on")
    loss: Loss = Field(default=InfoNCE(), description="infonce, listwise_ce or pointwise_bce")
    in_batch_negatives: bool = Field(default=True, description="the other queries' skills are negatives too")
    training: TrainingConfig = Field(default=TrainingConfig(), description="how to train")
    out: Path = Field(description="folder to write the model to")


class TrainRerankerConfig(Config):
    """Train a reranker on lists of a trained encoder's candidates."""

    stage: Literal["train_reranker"]
    model: RerankerConfig = Field(description="the reranker, or the plain model, to start from")
    data: ListsSource = Field(description="what to train on")
    loss: Loss = Field(default=ListwiseCE(), description="listwise_ce, pointwise_bce or infonce")
    training: TrainingConfig = Field(
        default=TrainingConfig(batch_size=1, accumulation=16, learning_rate=1e-5), description="how to train"
    )
    out: Path = Field(description="folder to write the model to")


TrainConfig = TrainEncoderConfig | TrainRerankerConfig


def run_train_encoder(config: TrainEncoderConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the encoder; the summary counts what was trained on."""
    step, data = _encoder_step(config)
    result = train(step, data.lists, config.training, out, resume)
    if is_main_process():
        save_encoder(step.encoder, out, config.model.source)
    return _summary(result, data, step)


def run_train_reranker(config: TrainRerankerConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the reranker; the summary counts what was trained on."""
    step, data = _reranker_step(config)
    result = train(step, data.lists, config.training, out, resume)
    if is_main_process():
        save_reranker(step.reranker, out, config.model.source)
    return _summary(result, data, step)


def plan(config: TrainConfig) -> dict[str, Any]:
    """What training would do, found by loading everything and touching nothing (`--dry-run`)."""
    step, data = _encoder_step(config) if isinstance(config, TrainEncoderConfig) else _reranker_step(config)
    steps = num_steps(len(data.lists), config.training)
    return {"num_steps": steps, **_counts(data, step)}


def _encoder_step(config: TrainEncoderConfig) -> tuple[EncoderStep, TrainingSet]:
    data, training = load_training_set(config.data), config.training
    encoder = load_encoder(config.model, default_device())
    step = EncoderStep(encoder, config.loss, data, training.token_budget, training.recompute, config.in_batch_negatives)
    return step, data


def _reranker_step(config: TrainRerankerConfig) -> tuple[RerankerStep, TrainingSet]:
    data, training = load_training_set(config.data), config.training
    reranker = load_reranker(config.model, default_device())
    return RerankerStep(reranker, config.loss, data, training.token_budget, training.recompute), data


def _counts(data: TrainingSet, step: nn.Module) -> dict[str, Any]:
    return {
        "num_lists": len(data.lists),
        "num_skills": len(data.skills),
        "num_pairs": sum(len(one.skill_ids) for one in data.lists),
        "num_parameters": sum(parameter.numel() for parameter in step.parameters() if parameter.requires_grad),
    }


def _summary(result: TrainingResult, data: TrainingSet, step: EncoderStep | RerankerStep) -> dict[str, Any]:
    return {
        **_counts(data, step),
        "num_steps": result.num_steps,
        "num_tokens": step.num_tokens,
        "last_loss": round(result.last_loss, 5),
        "seconds": round(result.seconds, 1),
    }
