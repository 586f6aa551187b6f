"""Counts what a training run reads, and measures its memory and time for `--dry-run`."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import nn

from skilltrain.terminal import launched_ranks
from skilltrain.training.loop import Batch, Training, largest_batch, step_batches
from skilltrain.training.memory import peak_bytes
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepModule

_NUM_SAMPLED_BATCHES = 100  # their padding is computed, and taken for that of all batches


def count_work(step: StepModule, config: TrainingConfig) -> dict[str, Any]:
    """Count what a training run computes, for `--dry-run`.

    `list_tokens` counts a skill once for each of its lists, although a step encodes it once.
    """
    lists = step.data.lists
    max_tokens = step.model.settings.max_tokens
    tokens = 0
    for training_list in lists:
        tokens += sum(min(length, max_tokens) for length in step.lengths(training_list))
        if isinstance(step, EncoderStep):
            tokens += len(step.query_ids[training_list.query])
    return counts_of(step) | {
        "num_queries": len({training_list.query for training_list in lists}),
        "num_steps": sum(1 for _ in step_batches(lists, config)),
        "positives_cut_share": truncated_share(step),
        "list_tokens": tokens,
        "num_ranks": launched_ranks(),
    }


def measure_run(training: Training) -> dict[str, float]:
    """Run the largest batch. Return the peak memory of this rank, and the hours of all batches.

    The hours are in proportion to tokens. Evaluations and checkpoints are not included.
    """
    step = training.step
    steps = step_batches(step.data.lists, training.config)
    batches: Sequence[Batch] = [*chain.from_iterable(steps)]
    largest = largest_batch(step, batches)
    seconds = training.probe_memory(largest)

    sample = batches[:: max(1, len(batches) // _NUM_SAMPLED_BATCHES)]
    mean_slots = fmean(sum(step.slots(batch)) for batch in sample)
    hours = seconds / 3600 * len(batches) * mean_slots / sum(step.slots(largest))
    peak = peak_bytes(training.accelerator.device)
    return {"memory_mib": round(peak / 2**20, 1), "hours": float(f"{hours:.2g}")}


def counts_of(step: StepModule) -> dict[str, int]:
    """Count lists, skills, pairs and parameters. Call it before a launcher shards the model."""
    lists = step.data.lists
    # A byte holds two 4-bit weights.
    sizes = {p: p.numel() * (2 if _is_four_bit(p) else 1) for p in step.parameters()}
    return {
        "num_lists": len(lists),
        "num_skills": len({skill.skill_id for skill in step.data.skills.values()}),
        "num_pairs": sum(len(training_list.skill_ids) for training_list in lists),
        "num_positives": sum(sum(training_list.is_positive) for training_list in lists),
        "num_parameters": sum(sizes.values()),
        "num_trained_parameters": sum(size for p, size in sizes.items() if p.requires_grad),
    }


def _is_four_bit(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.uint8


def truncated_share(step: StepModule) -> float:
    """Return the share of positives whose text is truncated.

    An encoder's token ids are already truncated, so a text of exactly `max_tokens` tokens counts.
    """
    limit = step.model.settings.max_tokens
    if isinstance(step, EncoderStep):
        limit -= 1
    is_truncated: list[bool] = []  # of each positive
    for training_list in step.data.lists:
        lengths = step.lengths(training_list)
        for length, is_positive in zip(lengths, training_list.is_positive, strict=True):
            if is_positive:
                is_truncated.append(length > limit)
    return round(fmean(is_truncated), 4)
