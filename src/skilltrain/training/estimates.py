"""Counts what a training run reads, and measures its memory and time for `--dry-run`."""

from itertools import chain
from statistics import fmean
from typing import Any

from skilltrain.terminal import launched_ranks
from skilltrain.training.loop import Training, largest_batch, step_batches
from skilltrain.training.memory import peak_bytes
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import EncoderStep, StepModule

_HEAP_GROWTH = 1.1  # on a CPU the heap fragments during a run: 8 to 20% with MiniLM
_NUM_EARLIER_BATCHES = 48  # run on a CPU before the largest batch
_NUM_SAMPLED_BATCHES = 100  # their padding is computed, and taken for that of all batches


def count_work(step: StepModule, config: TrainingConfig) -> dict[str, Any]:
    """Count what a training run reads and computes, for `--dry-run`.

    `list_tokens` counts a skill once for each of its lists. In training, an encoder encodes each
    skill only once per batch. `positives_cut_share` is the share of positives whose text is cut.

    Args:
        step: Module that holds the model, its loss and the training set.
        config: Settings of the training run, such as the batch size.

    Returns:
        Counts and shares by their names in the summary, such as `num_steps`.
    """
    lists = step.data.lists
    max_tokens = step.model.settings.max_tokens
    tokens = 0
    for training_list in lists:
        # Add the lengths of the list's texts, each cut to `max_tokens`. An encoder reads each skill
        # alone, and a reranker reads each skill together with the query.
        tokens += sum(min(length, max_tokens) for length in step.lengths(training_list))
        if isinstance(step, EncoderStep):
            # An encoder also reads the query, once for each list.
            tokens += len(step.query_token_ids[training_list.query])
    return {
        **counts_of(step),
        "num_queries": len({training_list.query for training_list in lists}),
        "num_steps": sum(1 for _ in step_batches(lists, config)),
        "positives_cut_share": truncated_share(step),
        "list_tokens": tokens,
        "num_ranks": launched_ranks(),
    }


def measure_run(training: Training) -> dict[str, float]:
    """Run the largest batch, to estimate the memory and the time of the training run.

    Evaluations and checkpoints are not included in the time.

    Returns:
        `memory_mib`, the peak memory of this rank, and `hours`, the time of all batches. On a CPU
        the memory includes an allowance for the growth of the heap.
    """
    step = training.step_module
    steps = step_batches(step.data.lists, training.config)
    batches = [*chain.from_iterable(steps)]
    largest = largest_batch(step, batches)
    device = training.accelerator.device
    # On a CPU, oneDNN keeps a kernel for each length of its inputs, and the heap fragments. Both
    # need several batches to show, above all for rerankers: their inputs are not padded, so they
    # have many lengths.
    earlier_batches = batches[:_NUM_EARLIER_BATCHES] if device.type == "cpu" else []
    # The probe also sets the peak memory that is read below.
    seconds = training.probe_memory(largest, earlier_batches)

    # Compute the padding of every n-th batch only, because it takes time.
    interval = max(1, len(batches) // _NUM_SAMPLED_BATCHES)
    sample = batches[::interval]
    # `padded_tokens` returns a number for each micro-batch of a batch.
    mean_tokens = fmean(sum(step.padded_tokens(batch)) for batch in sample)
    largest_tokens = sum(step.padded_tokens(largest))

    # The time of a batch is proportional to its tokens, including padding.
    hours_if_all_largest = seconds / 3600 * len(batches)
    hours = hours_if_all_largest * mean_tokens / largest_tokens
    heap_growth = _HEAP_GROWTH if device.type == "cpu" else 1
    memory_mib = peak_bytes(device) * heap_growth / 2**20
    return {"memory_mib": round(memory_mib, 1), "hours": float(f"{hours:.2g}")}


def counts_of(step: StepModule) -> dict[str, int]:
    """Count lists, skills, pairs and parameters, by summary key.

    Call this before a launcher shards the parameters, because it counts those of this process.
    """
    num_parameters = 0
    num_trained = 0
    for parameter in step.parameters():
        size = parameter.numel()
        if type(parameter).__name__ == "Params4bit":
            size = 2 * parameter.nbytes  # a byte holds two 4-bit weights
        num_parameters += size
        if parameter.requires_grad:
            num_trained += size

    lists = step.data.lists
    return {
        "num_lists": len(lists),
        "num_skills": len({skill.skill_id for skill in step.data.skills.values()}),
        "num_pairs": sum(len(training_list.skill_ids) for training_list in lists),
        "num_positives": sum(sum(training_list.is_positive) for training_list in lists),
        "num_parameters": num_parameters,
        "num_trained_parameters": num_trained,
    }


def truncated_share(step: StepModule) -> float:
    """Return the share of positives that are longer than `max_tokens`, and so truncated.

    An encoder's texts are already truncated, so none is longer than `max_tokens`. A text of exactly
    `max_tokens` tokens is assumed to be a truncated one. A reranker's texts are whole.
    """
    max_tokens = step.model.settings.max_tokens
    texts_are_truncated = isinstance(step, EncoderStep)
    min_length = max_tokens if texts_are_truncated else max_tokens + 1
    is_longer = []  # whether each positive is longer than `max_tokens`
    for training_list in step.data.lists:
        lengths = step.lengths(training_list)
        for length, is_positive in zip(lengths, training_list.is_positive, strict=True):
            if is_positive:
                is_longer.append(length >= min_length)
    return round(fmean(is_longer), 4)
