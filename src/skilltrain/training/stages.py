"""The stages `train_encoder` and `train_reranker`: from LISTS to a model folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from skilltrain.files import cache_folder
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import default_device
from skilltrain.terminal import is_main_process
from skilltrain.training.dev import open_dev
from skilltrain.training.engine import new_accelerator
from skilltrain.training.export_run import save_trained
from skilltrain.training.held_out import check_held_out
from skilltrain.training.loop import Run, StepModule, TrainingResult, train
from skilltrain.training.plan import counts_of, plan_of, say_cut_positives, say_plan
from skilltrain.training.scores import check_teacher_scores
from skilltrain.training.settings import TrainConfig, TrainEncoderConfig, TrainRerankerConfig, load_model
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_set import TrainingSet, load_training_set

__all__ = ["TrainEncoderConfig", "TrainRerankerConfig", "plan", "run_training"]


def plan(config: TrainConfig) -> dict[str, Any]:
    """What training would do, found by loading everything and touching nothing (`--dry-run`)."""
    data = _load_data(config)
    check_held_out(config.data, config.dev, data)
    step = _step(config, data, token_cache=None)
    found = plan_of(step, data, config.training)
    say_plan(found)
    return found


def run_training(config: TrainConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the model; the summary counts what was trained on."""
    quantized = config.adapter is not None and config.adapter.quantize != "none"
    accelerator = new_accelerator(config.training, quantized)  # first, for it refuses launches that cannot work
    data = _load_data(config)
    contaminated = check_held_out(config.data, config.dev, data)
    step = _step(config, data, cache_folder("tokens"))
    say_cut_positives(step, data)
    model = step.encoder if isinstance(step, EncoderStep) else step.reranker
    dev = open_dev(config.dev, model, config.data.pool) if config.dev else None
    run = Run(out, resume, config.model_dump(mode="json"), dev)
    counts = counts_of(step, data) | contaminated  # before the launcher shards the weights
    result = train(accelerator, step, data.lists, config.training, run)
    summary = counts | _figures(result)
    if is_main_process():
        save_trained(config, result.checkpoint, out, summary)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def _load_data(config: TrainConfig) -> TrainingSet:
    is_encoder = isinstance(config, TrainEncoderConfig)
    clusters = config.near_duplicates if is_encoder and config.in_batch_negatives else None
    data = load_training_set(config.data, clusters)
    check_teacher_scores(data, config.loss)  # before any work is done
    return data


def _step(config: TrainConfig, data: TrainingSet, token_cache: Path | None) -> StepModule:
    model, training = load_model(config, default_device()), config.training
    in_batch = isinstance(config, TrainEncoderConfig) and config.in_batch_negatives
    settings = StepSettings(training.token_budget, training.recompute, in_batch, token_cache)
    if isinstance(model, Encoder):
        assert isinstance(config, TrainEncoderConfig)
        return EncoderStep(model, config.loss, data, settings)
    assert isinstance(config, TrainRerankerConfig)
    return RerankerStep(model, config.loss, data, settings)


def _figures(result: TrainingResult) -> dict[str, Any]:
    position, best = result.position, result.position.best
    figures = {
        "num_steps": position.step,
        "num_queries": position.queries,
        "num_tokens": position.tokens,
        "last_loss": round(position.loss, 5),
        "seconds": round(position.seconds, 1),
        "checkpoint": result.checkpoint.name,
    }
    return figures | ({"dev": {name: asdict(figure) for name, figure in best.figures.items()}} if best.step else {})
