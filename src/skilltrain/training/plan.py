"""What a training would do, for `--dry-run`: counts, steps, tokens an epoch, and the memory that is certain."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from skilltrain.terminal import say
from skilltrain.training.loop import StepModule, num_steps, step_batches
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep
from skilltrain.training.training_set import TrainingList, TrainingSet

_ADAMW_BYTES = 8  # two float32 moments a trained parameter


def counts_of(step: StepModule, data: TrainingSet) -> dict[str, int]:
    """How much there is to train on, and how many parameters train; before a launcher shards them."""
    parameters = [*step.parameters()]
    return {
        "num_lists": len(data.lists),
        "num_skills": len(data.skills),
        "num_pairs": sum(len(one.skill_ids) for one in data.lists),
        "num_positives": sum(gain > 0 for one in data.lists for gain in one.gains),
        "num_parameters": sum(map(_num_numbers, parameters)),
        "num_trained_parameters": sum(_num_numbers(parameter) for parameter in parameters if parameter.requires_grad),
    }


def _num_numbers(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)  # a byte holds two 4-bit weights


def plan_of(step: StepModule, data: TrainingSet, config: TrainingConfig) -> dict[str, Any]:
    """All figures of the plan, fit for JSON: shares are fractions, memory is in MiB."""
    return counts_of(step, data) | {
        "num_queries": len({one.query for one in data.lists}),
        "num_steps": num_steps(len(data.lists), config),
        "positives_cut_share": _cut_share(step, data),
        "epoch_tokens": _epoch_tokens(step, data, config),
        "memory_mib": _certain_memory(step),
    }


def say_cut_positives(step: StepModule, data: TrainingSet) -> None:
    """Warn of positives whose text is longer than the limit: training never sees their ends."""
    if share := _cut_share(step, data):
        limit = (step.encoder if isinstance(step, EncoderStep) else step.reranker).settings.max_tokens
        say(f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there")


def say_plan(plan: Mapping[str, Any]) -> None:
    """The plan for people."""
    say(f"data: {plan['num_lists']:,} lists of {plan['num_queries']:,} distinct queries and {plan['num_skills']:,} "
        f"skills; {plan['num_pairs']:,} pairs, {plan['num_positives']:,} of them positives, of which "
        f"{plan['positives_cut_share']:.1%} are cut at model.max_tokens")  # fmt: skip
    say(f"training: {plan['num_steps']:,} optimiser steps; {plan['num_trained_parameters']:,} of "
        f"{plan['num_parameters']:,} parameters train; {plan['epoch_tokens']:,} tokens an epoch")  # fmt: skip
    say(f"memory of weights, gradients and optimiser: {plan['memory_mib']:,.0f} MiB, shared by the ranks under ZeRO-3 "
        "and FSDP2; activations come on top (fewer with a lower training.token_budget, or recompute)")  # fmt: skip


def _cut_share(step: StepModule, data: TrainingSet) -> float:
    """The share of positives that are cut. An encoder's text that reaches its limit counts: the rest is gone."""
    if isinstance(step, EncoderStep):
        longest = step.encoder.settings.max_tokens - 1
        lengths = [[len(step.skill_ids[skill_id]) for skill_id in one.skill_ids] for one in data.lists]
    else:
        longest = step.reranker.settings.max_tokens
        lengths = [_pair_lengths(step, one) for one in data.lists]
    rows = zip(data.lists, lengths, strict=True)
    cut = [length > longest for one, row in rows for gain, length in zip(one.gains, row, strict=True) if gain > 0]
    return round(sum(cut) / len(cut), 4)


def _pair_lengths(step: RerankerStep, one: TrainingList) -> list[int]:
    """Tokens of a list's pairs before they are cut."""
    fixed = step.reranker.pairs.num_fixed + len(step.query_ids[one.query])
    return [fixed + len(step.skill_ids[skill_id]) for skill_id in one.skill_ids]


def _epoch_tokens(step: StepModule, data: TrainingSet, config: TrainingConfig) -> int:
    """Tokens, without padding, that the model computes in an epoch: an encoder each distinct skill of a batch once,
    a packed reranker the prompt of a list once."""
    if isinstance(step, RerankerStep):
        return sum(_reranker_tokens(step, one) for one in data.lists)
    tokens = sum(len(step.query_ids[one.query]) for one in data.lists)
    for batches in islice(step_batches(data.lists, config), num_steps(len(data.lists), config) // config.epochs):
        for batch in batches:
            tokens += sum(len(step.skill_ids[skill_id]) for skill_id in {s for one in batch for s in one.skill_ids})
    return tokens


def _reranker_tokens(step: RerankerStep, one: TrainingList) -> int:
    lengths = [min(length, step.reranker.settings.max_tokens) for length in _pair_lengths(step, one)]
    prompt = len(step.reranker.pairs.before) + len(step.query_ids[one.query])
    return sum(lengths) - (prompt * (len(lengths) - 1) if step.reranker.is_packed else 0)


def _certain_memory(step: StepModule) -> float:
    """MiB of one process that holds everything itself, but for the activations."""
    trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in [*step.parameters(), *trained])
    return round((num_bytes + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)) / 2**20, 1)
