"""What a training would do, for `--dry-run`: counts, token lengths, tokens an epoch, and the memory that is certain."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from skilltrain.terminal import say
from skilltrain.training.loop import num_steps, step_batches
from skilltrain.training.settings import TrainConfig
from skilltrain.training.steps import EncoderStep, RerankerStep
from skilltrain.training.training_set import TrainingList, TrainingSet

_MIB = 2**20
_ADAMW_BYTES = 8  # two float32 moments a trained parameter
_PERCENTILES = {"p5": 5, "p50": 50, "p95": 95, "p99": 99, "max": 100}

Step = EncoderStep | RerankerStep


def counts_of(step: Step, data: TrainingSet) -> dict[str, int]:
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


def plan_of(step: Step, data: TrainingSet, config: TrainConfig) -> dict[str, Any]:
    """All figures of the plan, fit for JSON: shares are fractions, memory is in MiB."""
    return counts_of(step, data) | {
        "num_queries": len({one.query for one in data.lists}),
        "num_steps": num_steps(len(data.lists), config.training),
        "text_tokens": _text_tokens(step, data),
        "epoch_tokens": _epoch_tokens(step, data, config),
        "memory_mib": _certain_memory(step),
    }


def say_cut_positives(step: Step, data: TrainingSet) -> None:
    """Warn of positives whose text is longer than the limit: training never sees their ends."""
    if share := _text_tokens(step, data)["positives_cut_share"]:
        limit = (step.encoder if isinstance(step, EncoderStep) else step.reranker).settings.max_tokens
        say(f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there")


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan for people."""
    share = f"{plan['num_trained_parameters'] / max(1, plan['num_parameters']):.1%}"
    tokens, memory = plan["text_tokens"], plan["memory_mib"]
    return [
        f"data: {plan['num_lists']:,} lists of {plan['num_queries']:,} distinct queries and {plan['num_skills']:,} "
        f"skills; {plan['num_pairs']:,} pairs, {plan['num_positives']:,} of them positives",
        f"training: {plan['num_steps']:,} optimiser steps; {plan['num_trained_parameters']:,} of "
        f"{plan['num_parameters']:,} parameters train ({share})",
        *(_length_line(name, of) for name, of in tokens.items() if isinstance(of, Mapping)),
        f"positives whose text is cut: {tokens['positives_cut_share']:.1%}",
        f"tokens an epoch: {plan['epoch_tokens']:,}",
        f"memory of weights, gradients and optimiser: {memory:,.0f} MiB, shared by the ranks under ZeRO-3 and FSDP2; "
        "activations come on top: a lower training.token_budget and recompute: true make them fewer",
    ]


def _length_line(name: str, of: Mapping[str, Any]) -> str:
    values = ", ".join(f"{key} {of[key]:,}" for key in _PERCENTILES)
    return f"tokens of a {name}: {values}; {of['cut_share']:.1%} are cut at the limit"


def _text_tokens(step: Step, data: TrainingSet) -> dict[str, Any]:
    """Token lengths of the texts that the model reads, and the share of positives that are cut.

    An encoder's text that reaches its limit counts as cut: the rest is gone. A pair is cut where it would be longer.
    """
    gains = np.array([gain for one in data.lists for gain in one.gains])
    if isinstance(step, EncoderStep):
        settings = step.encoder.settings
        skills = np.array([len(step.skill_ids[skill_id]) for one in data.lists for skill_id in one.skill_ids])
        return {
            "query": _percentiles(step.query_ids.lengths, settings.query_max_tokens, settings.query_max_tokens - 1),
            "skill": _percentiles(step.skill_ids.lengths, settings.max_tokens, settings.max_tokens - 1),
            "positives_cut_share": _share(skills[gains > 0] >= settings.max_tokens),
        }
    limit = step.reranker.settings.max_tokens
    pairs = np.array([length for one in data.lists for length in _pair_lengths(step, one)])
    return {"pair": _percentiles(pairs, limit, limit), "positives_cut_share": _share(pairs[gains > 0] > limit)}


def _pair_lengths(step: RerankerStep, one: TrainingList) -> list[int]:
    """Tokens of a list's pairs before they are cut."""
    fixed = step.reranker.pairs.num_fixed + len(step.query_ids[one.query])
    return [fixed + len(step.skill_ids[skill_id]) for skill_id in one.skill_ids]


def _percentiles(lengths: np.ndarray, limit: int, longest: int) -> dict[str, int | float]:
    """Percentiles of the lengths as cut at `limit`, and the share that is longer than `longest`, so cut."""
    values = np.percentile(np.minimum(lengths, limit), [*_PERCENTILES.values()])
    named = {name: round(float(value)) for name, value in zip(_PERCENTILES, values, strict=True)}
    return named | {"cut_share": _share(lengths > longest)}


def _share(facts: np.ndarray) -> float:
    return round(float(facts.mean()), 4)


def _epoch_tokens(step: Step, data: TrainingSet, config: TrainConfig) -> int:
    """Tokens, without padding, that the model computes in an epoch: an encoder each distinct skill of a batch once,
    a packed reranker the prompt of a list once."""
    if isinstance(step, EncoderStep):
        return sum(_encoder_tokens(step, batch) for batch in _first_epoch(data, config))
    return sum(_reranker_tokens(step, one) for one in data.lists)


def _first_epoch(data: TrainingSet, config: TrainConfig) -> Iterator[Sequence[TrainingList]]:
    training = config.training
    steps = islice(step_batches(data.lists, training), num_steps(len(data.lists), training) // training.epochs)
    return (batch for batches in steps for batch in batches)


def _encoder_tokens(step: EncoderStep, batch: Sequence[TrainingList]) -> int:
    skills = {skill_id for one in batch for skill_id in one.skill_ids}
    queries = sum(len(step.query_ids[one.query]) for one in batch)
    return queries + sum(len(step.skill_ids[skill_id]) for skill_id in skills)


def _reranker_tokens(step: RerankerStep, one: TrainingList) -> int:
    lengths = [min(length, step.reranker.settings.max_tokens) for length in _pair_lengths(step, one)]
    prompt = len(step.reranker.pairs.before) + len(step.query_ids[one.query])
    return sum(lengths) - (prompt * (len(lengths) - 1) if step.reranker.is_packed else 0)


def _certain_memory(step: Step) -> float:
    """MiB of one process that holds everything itself, but for the activations."""
    trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in [*step.parameters(), *trained])
    return round((num_bytes + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)) / _MIB, 1)
