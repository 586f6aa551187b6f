"""The stages `train_encoder` and `train_reranker`: from LISTS to a model folder; and what they would do."""

from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from skilltrain.files import cache_folder
from skilltrain.losses import infonce_in
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import default_device
from skilltrain.terminal import is_main_process, say
from skilltrain.training.dev import open_dev
from skilltrain.training.engine import launched_ranks, new_accelerator, shards_weights, shares_state
from skilltrain.training.held_out import check_held_out
from skilltrain.training.loop import Run, num_steps, step_batches, train
from skilltrain.training.memory import check_fits, held_bytes, planned_activations
from skilltrain.training.planned_time import planned_seconds
from skilltrain.training.publish import save_trained
from skilltrain.training.scores import check_teacher_scores
from skilltrain.training.settings import (
    TrainConfig,
    TrainEncoderConfig,
    TrainingConfig,
    TrainRerankerConfig,
    load_model,
)
from skilltrain.training.steps import EncoderStep, RerankerStep, StepModule, StepSettings
from skilltrain.training.training_set import TrainingSet, load_training_set, on_best_windows

__all__ = ["TrainEncoderConfig", "TrainRerankerConfig", "plan_training", "run_training"]


def run_training(config: TrainConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the model; the summary counts what was trained on."""
    quantized = config.adapter is not None and config.adapter.quantize != "none"
    accelerator = new_accelerator(config.training, quantized)  # first, for it refuses launches that cannot work
    check_fits(config, accelerator)
    data = load_data(config)
    contaminated = check_held_out(config.data, config.dev, data)
    step = open_step(config, data, default_device(), cache_folder("tokens"), shards_weights(accelerator))
    data = step.data
    if share := _cut_share(step, data):
        limit = step.model.settings.max_tokens
        say(f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there")
    dev = open_dev(config.dev, step.model, config.data.pool) if config.dev else None
    summary: dict[str, Any] = counts_of(step, data) | contaminated  # before the launcher shards the weights
    result = train(
        accelerator, step, data.lists, config.training, Run(out, resume, config.model_dump(mode="json"), dev)
    )
    position, best = result.position, result.position.best
    summary |= {
        "num_steps": position.step,
        "num_queries": position.queries,
        "num_tokens": position.tokens,
        "last_loss": round(position.loss, 5),
        "seconds": round(position.seconds, 1),
        "checkpoint": result.checkpoint.name,
    }
    if best.step:
        summary["dev"] = {name: asdict(figure) for name, figure in best.figures.items()}
    if is_main_process():
        save_trained(config, result.checkpoint, out, summary)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def plan_training(config: TrainConfig) -> dict[str, Any]:
    """What training would do, found without the model's weights and touching nothing (`--dry-run`)."""
    data = load_data(config)
    check_held_out(config.data, config.dev, data)
    quantized = config.adapter is not None and config.adapter.quantize != "none"  # 4-bit layers are made as they load
    step = open_step(config, data, default_device() if quantized else torch.device("meta"))
    return plan_of(step, step.data, config.training)


def load_data(config: TrainConfig) -> TrainingSet:
    is_encoder = isinstance(config, TrainEncoderConfig)
    clusters = config.near_duplicates if is_encoder and config.in_batch_negatives else None
    data = load_training_set(config.data, clusters, infonce_in(config.loss).lexical_weight > 0)
    check_teacher_scores(data, config.loss)  # before any work is done
    return data


def open_step(
    config: TrainConfig,
    data: TrainingSet,
    device: torch.device,
    token_cache: Path | None = None,
    is_sharded: bool = False,
) -> StepModule:
    model, training = load_model(config, device), config.training
    in_batch = isinstance(config, TrainEncoderConfig) and config.in_batch_negatives
    budget = training.token_budget_on(default_device())
    settings = StepSettings(budget, training.recompute, in_batch, token_cache, training.varlen, is_sharded)
    if isinstance(model, Encoder):
        assert isinstance(config, TrainEncoderConfig)
        settings = replace(settings, late_interaction=config.late_interaction)
        return EncoderStep(model, config.loss, on_best_windows(data, model.settings), settings)
    assert isinstance(config, TrainRerankerConfig)
    return RerankerStep(model, config.loss, data, settings)


def counts_of(step: StepModule, data: TrainingSet) -> dict[str, int]:
    """How much there is to train on, and how many parameters train; before a launcher shards them."""
    # A byte holds two 4-bit weights.
    sizes = [(p.numel() * (2 if p.dtype == torch.uint8 else 1), p.requires_grad) for p in step.parameters()]
    return {
        "num_lists": len(data.lists),
        "num_skills": len({skill.skill_id for skill in data.skills.values()}),
        "num_pairs": sum(len(one.skill_ids) for one in data.lists),
        "num_positives": sum(sum(one.is_positive) for one in data.lists),
        "num_parameters": sum(size for size, _ in sizes),
        "num_trained_parameters": sum(size for size, is_trained in sizes if is_trained),
    }


def plan_of(step: StepModule, data: TrainingSet, config: TrainingConfig) -> dict[str, Any]:
    """All figures of the plan: `list_tokens` of all lists one by one, of which a step computes what is shared once;
    `memory_mib` of each rank, with `activation_mib` for the largest batch (`planned_activations`); and `hours`, about,
    but for 4-bit weights (`planned_seconds`)."""
    batches, ranks = [*chain.from_iterable(step_batches(data.lists, config))], launched_ranks()
    device, time = default_device(), {}
    if all(parameter.dtype != torch.uint8 for parameter in step.parameters()):
        seconds = planned_seconds(step, batches, config.dtype_on(device), device) / ranks
        words = f"one layer timed on this {device.type}, times layers and tokens; AdamW, exchange and dev come on top"
        time = {"hours": float(f"{seconds / 3600:.2g}"), "hours_from": words}
    activations = planned_activations(step, batches, config.dtype_on(device)) / ranks
    held = held_bytes(step) / (ranks if shares_state() else 1)
    most = step.model.settings.max_tokens
    tokens = sum(min(length, most) for one in data.lists for length in step.lengths(one))
    if isinstance(step, EncoderStep):
        tokens += sum(len(step.query_ids[one.query]) for one in data.lists)
    return counts_of(step, data) | {
        "num_queries": len({one.query for one in data.lists}),
        "num_steps": num_steps(data.lists, config),
        "positives_cut_share": _cut_share(step, data),
        "list_tokens": tokens,
        "activation_mib": round(activations / 2**20, 1),
        "memory_mib": round((held + activations) / 2**20, 1),
        "num_ranks": ranks,
        **time,
    }


def _cut_share(step: StepModule, data: TrainingSet) -> float:
    """The share of positives that are cut. An encoder's text that reaches its limit counts: the rest is gone."""
    longest = step.model.settings.max_tokens - isinstance(step, EncoderStep)
    rows = [zip(one.is_positive, step.lengths(one), strict=True) for one in data.lists]
    cut = [length > longest for row in rows for is_positive, length in row if is_positive]
    return round(sum(cut) / len(cut), 4)
