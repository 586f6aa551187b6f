"""What a training would do, for `--dry-run`: counts, token lengths, work and padding, and the memory to expect."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from skilltrain.models.loading import resolve_dtype
from skilltrain.models.micro_batches import micro_batches
from skilltrain.terminal import say
from skilltrain.training.gather import rank_and_world
from skilltrain.training.loop import num_steps, step_batches
from skilltrain.training.memory import Load, by_way, in_mib, memory_of, weights_of
from skilltrain.training.settings import TrainConfig
from skilltrain.training.steps import EncoderStep, RerankerStep
from skilltrain.training.training_set import TrainingList, TrainingSet

_NUM_SAMPLED = 200  # batches whose micro-batches are made and looked at
_EXAMPLE_RANKS = 8  # shown where the run itself is one process

Batch = Sequence[TrainingList]
Step = EncoderStep | RerankerStep
Groups = list[tuple[int, int]]  # (tokens with padding, longest text) of every micro-batch


@dataclass(frozen=True)
class Work:
    """One batch: our micro-batches, and the same texts padded to their longest as others do it."""

    tokens: int
    groups: Groups
    plain_tokens: int
    plain_slots: int


def plan_of(step: Step, data: TrainingSet, config: TrainConfig) -> dict[str, Any]:
    """All figures of the plan, fit for JSON: shares are fractions, memory is in MiB a process."""
    training = config.training
    batches = [*_first_epoch(data, config)]
    parameters = [(_numel(parameter), parameter.requires_grad) for parameter in step.parameters()]
    works = [_work(step, batch) for batch in batches[:_NUM_SAMPLED]]
    return {
        "num_lists": len(data.lists),
        "num_queries": len({one.query for one in data.lists}),
        "num_skills": len(data.skills),
        "num_pairs": sum(len(one.skill_ids) for one in data.lists),
        "num_positives": sum(gain > 0 for one in data.lists for gain in one.gains),
        "num_steps": num_steps(len(data.lists), training),
        "num_parameters": sum(count for count, _ in parameters),
        "num_trained_parameters": sum(count for count, trains in parameters if trains),
        "text_tokens": _encoder_tokens(step, data) if isinstance(step, EncoderStep) else _reranker_tokens(step, data),
        "epoch_tokens": _epoch_tokens(step, batches),
        "padding": _padding(works),
        "memory_mib": _memory(step, works, config),
    }


def say_cut_positives(step: Step, data: TrainingSet) -> None:
    """Warn of positives whose text is longer than the limit: training never sees their ends."""
    lengths = _encoder_tokens(step, data) if isinstance(step, EncoderStep) else _reranker_tokens(step, data)
    if share := lengths["positives_cut_share"]:
        limit = (step.encoder if isinstance(step, EncoderStep) else step.reranker).settings.max_tokens
        say(f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there")


def _first_epoch(data: TrainingSet, config: TrainConfig) -> Iterator[Batch]:
    training = config.training
    steps = islice(step_batches(data.lists, training), num_steps(len(data.lists), training) // training.epochs)
    return (batch for batches in steps for batch in batches)


def _numel(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)  # a byte holds two 4-bit weights


def _encoder_tokens(step: EncoderStep, data: TrainingSet) -> dict[str, Any]:
    """Token lengths of the distinct queries and skills. A text at its limit counts as cut: the rest is gone."""
    settings = step.encoder.settings
    positives = [len(step.skill_ids[skill_id]) for skill_id, gain in _candidates(data) if gain > 0]
    return {
        "query": _percentiles(step.query_ids.lengths, settings.query_max_tokens - 1),
        "skill": _percentiles(step.skill_ids.lengths, settings.max_tokens - 1),
        "positives_cut_share": _share(length >= settings.max_tokens for length in positives),
    }


def _reranker_tokens(step: RerankerStep, data: TrainingSet) -> dict[str, Any]:
    """Token lengths of all pairs."""
    limit = step.reranker.settings.max_tokens
    lengths = np.array([length for one in data.lists for length in _whole_pairs(step, one)])
    gains = np.array([gain for _, gain in _candidates(data)])
    return {
        "pair": _percentiles(np.minimum(lengths, limit), limit, whole=lengths),
        "positives_cut_share": _share(lengths[gains > 0] > limit),
    }


def _candidates(data: TrainingSet) -> Iterator[tuple[str, float]]:
    return (candidate for one in data.lists for candidate in zip(one.skill_ids, one.gains, strict=True))


def _whole_pairs(step: RerankerStep, one: TrainingList) -> list[int]:
    """Tokens of a list's pairs before they are cut."""
    fixed = len(step.reranker.pair_tokenizer.frame) + len(step.query_ids[one.query])
    return [fixed + len(step.skill_ids[skill_id]) for skill_id in one.skill_ids]


def _percentiles(lengths: np.ndarray, most_uncut: int, whole: np.ndarray | None = None) -> dict[str, int | float]:
    names = ("p5", "p50", "p95", "p99", "max")
    values = np.percentile(lengths, [5, 50, 95, 99, 100]) if len(lengths) else np.zeros(5)
    figures: dict[str, int | float] = {name: round(float(v)) for name, v in zip(names, values, strict=True)}
    return figures | {"cut_share": _share((lengths if whole is None else whole) > most_uncut)}


def _share(facts: Iterable[Any]) -> float:
    found = [bool(fact) for fact in facts]
    return round(sum(found) / max(1, len(found)), 4)


def _epoch_tokens(step: Step, batches: Sequence[Batch]) -> dict[str, int | float]:
    """Tokens without padding of an epoch, as we compute them and with every text of every list anew.

    The encoder computes each distinct skill of a batch once, a packed reranker the common prompt of a list.
    """
    once = plain = 0
    for batch in batches:
        if isinstance(step, EncoderStep):
            own = sum(len(step.query_ids[one.query]) for one in batch)
            once += own + sum(len(step.skill_ids[skill_id]) for skill_id in _distinct(batch))
            plain += own + sum(len(step.skill_ids[skill_id]) for one in batch for skill_id in one.skill_ids)
        else:
            for one in batch:
                lengths = [min(length, step.reranker.settings.max_tokens) for length in _whole_pairs(step, one)]
                prompt = len(step.reranker.pair_tokenizer.frame.before) + len(step.query_ids[one.query])
                plain += sum(lengths)
                once += sum(lengths) - (prompt * (len(lengths) - 1) if step.reranker.is_packed else 0)
    return {"num_tokens": once, "num_plain_tokens": plain, "saved_share": _fraction(plain - once, plain)}


def _distinct(batch: Batch) -> list[str]:
    return sorted({skill_id for one in batch for skill_id in one.skill_ids})


def _fraction(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _work(step: Step, batch: Batch) -> Work:
    """The batch on one process, as the step runs it."""
    return _encoder_work(step, batch) if isinstance(step, EncoderStep) else _reranker_work(step, batch)


def _encoder_work(step: EncoderStep, batch: Batch) -> Work:
    queries = [len(step.query_ids[one.query]) for one in batch]
    skills = {skill_id: len(step.skill_ids[skill_id]) for skill_id in _distinct(batch)}
    lengths = [*queries, *skills.values()]
    own = [[lengths[at] for at in group] for group in micro_batches(lengths, step.settings.token_budget)]
    columns = [skills[skill_id] for one in batch for skill_id in one.skill_ids]  # repeated skills again
    return Work(
        sum(lengths),
        [(max(group) * len(group), max(group)) for group in own],
        sum(queries) + sum(columns),
        max(queries) * len(queries) + max(columns) * len(columns),
    )


def _reranker_work(step: RerankerStep, batch: Batch) -> Work:
    lists = [step.pairs(one) for one in batch]
    pairs = [pair for pairs in lists for pair in pairs]
    lengths = [len(pair) for pair in pairs]
    positions = step.reranker.micro_batches(lists, step.settings.token_budget)
    members = [[pairs[at] for at in group] for group in positions]
    groups = [(step.reranker.num_slots(group), max(map(len, group))) for group in members]
    tokens = sum(slots for slots, _ in groups) if step.reranker.is_packed else sum(lengths)
    return Work(tokens, groups, sum(lengths), max(lengths) * len(lengths))


def _padding(works: Sequence[Work]) -> dict[str, int | float]:
    """Padding of our micro-batches, and of batches padded to their longest text, as sentence-transformers' are."""
    tokens, slots = sum(work.tokens for work in works), sum(slots for work in works for slots, _ in work.groups)
    plain_tokens, plain_slots = sum(work.plain_tokens for work in works), sum(work.plain_slots for work in works)
    return {
        "num_batches": len(works),
        "num_slots": slots,
        "share": _fraction(slots - tokens, slots),
        "num_plain_slots": plain_slots,
        "plain_share": _fraction(plain_slots - plain_tokens, plain_slots),
    }


def _memory(step: Step, works: Sequence[Work], config: TrainConfig) -> dict[str, Any]:
    """MiB a process: alone, and in each way of running on several. `memory` says what is counted."""
    network = step.encoder.backbone if isinstance(step, EncoderStep) else step.reranker.network
    device = next(network.parameters()).device
    mixed = resolve_dtype(config.training.precision, device) == torch.bfloat16
    half = mixed or network.dtype == torch.bfloat16
    weights, model = weights_of(network, mixed), network.config.get_text_config()
    fullest = max((work.groups for work in works), key=lambda groups: sum(slots for slots, _ in groups))
    largest = max(group for work in works for group in work.groups)
    world = rank_and_world()[1]
    num_ranks = world if world > 1 else _EXAMPLE_RANKS
    sizes: Mapping[int, dict[str, int]] = {
        count: memory_of(weights, model, _share_of(fullest, count), Load(*largest, 1), half)
        for count in (1, min(num_ranks, config.training.batch_size))
    }
    alone, shared = sizes[1], sizes[min(num_ranks, config.training.batch_size)]
    return {"one_process": in_mib(alone), "num_ranks": num_ranks} | by_way(shared, weights, num_ranks)


def _share_of(groups: Groups, num_shares: int) -> Load:
    """A rank's load where the batch is shared equally."""
    slots = sum(slots for slots, _ in groups)
    return Load(-(-slots // num_shares), max(longest for _, longest in groups), -(-len(groups) // num_shares))


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan for people."""
    share = f"{plan['num_trained_parameters'] / max(1, plan['num_parameters']):.1%}"
    epoch, padding, memory = plan["epoch_tokens"], plan["padding"], plan["memory_mib"]
    return [
        f"data: {plan['num_lists']:,} lists of {plan['num_queries']:,} distinct queries and {plan['num_skills']:,} "
        f"skills; {plan['num_pairs']:,} pairs, {plan['num_positives']:,} of them positives",
        f"training: {plan['num_steps']:,} optimiser steps; {plan['num_trained_parameters']:,} of "
        f"{plan['num_parameters']:,} parameters train ({share})",
        *(_length_line(name, of) for name, of in plan["text_tokens"].items() if isinstance(of, Mapping)),
        f"positives whose text is cut: {plan['text_tokens']['positives_cut_share']:.1%}",
        f"tokens an epoch: {epoch['num_tokens']:,}, {epoch['saved_share']:.1%} fewer than the "
        f"{epoch['num_plain_tokens']:,} of all lists' texts one by one",
        f"padding: {padding['share']:.1%} of {padding['num_slots']:,} tokens in the first {padding['num_batches']:,} "
        f"batches; padded to the longest text it would be {padding['plain_share']:.1%} of "
        f"{padding['num_plain_slots']:,}",
        f"memory, MiB a process (estimate, ±40%): {_memory_text(memory['one_process'])} in one process",
        *(f"  on {memory['num_ranks']} ranks with {name}: {_memory_text(memory[key])}" for key, name in _WAYS),
    ]


_WAYS = (("ddp", "DDP"), ("zero2", "ZeRO-2"), ("zero3_fsdp2", "ZeRO-3 or FSDP2"))


def _length_line(name: str, of: Mapping[str, Any]) -> str:
    values = ", ".join(f"{key} {of[key]:,}" for key in ("p5", "p50", "p95", "p99", "max"))
    return f"tokens of a {name}: {values}; {of['cut_share']:.1%} are cut at the limit"


def _memory_text(of: Mapping[str, int | float]) -> str:
    fixed = of["weights"] + of["gradients"] + of["optimizer"]
    return (
        f"{of['total']:,.0f}, with recompute {of['total_recompute']:,.0f} "
        f"(weights, gradients and optimiser {fixed:,.0f})"
    )
