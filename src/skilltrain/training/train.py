"""The stages `train_encoder` and `train_reranker`: from LISTS to a model folder; and what they would do."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from skilltrain.data.contamination import (
    GROUNDS,
    BenchmarkIndex,
    ContaminationLimits,
    HeldOut,
    open_benchmarks,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import cache_folder
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.models.activations import layer_bytes
from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import Reranker
from skilltrain.records import Dropped
from skilltrain.terminal import is_main_process, launched_ranks, say
from skilltrain.training.dev import open_dev
from skilltrain.training.engine import new_accelerator, shards_weights, shares_state
from skilltrain.training.export_run import save_trained
from skilltrain.training.loop import GIB, Batch, Run, largest_batch, step_batches, train
from skilltrain.training.scores import check_teacher_scores
from skilltrain.training.settings import (
    TrainConfig,
    TrainEncoderConfig,
    TrainingConfig,
    TrainRerankerConfig,
    is_quantized,
    load_model,
)
from skilltrain.training.steps import EncoderStep, RerankerStep, StepModule, StepSettings
from skilltrain.training.training_set import (
    ListsSource,
    TrainingSet,
    load_training_set,
    on_best_windows,
)

_ADAMW_BYTES = 8  # two float32 moments a trained parameter
_SAMPLED = 100  # batches whose tokens are counted with their padding
_TOKENS_ON_CPU = 1024  # of the timed micro-batch at most: a large layer takes seconds


def run_training(config: TrainConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the model; the summary counts what was trained on."""
    accelerator = new_accelerator(
        config.training, is_quantized(config)
    )  # first: it refuses what cannot work
    check_fits(config)
    data = load_data(config)
    contaminated = check_held_out(config, data)
    step = open_step(
        config, data, default_device(), cache_folder("tokens"), shards_weights(accelerator)
    )
    if share := cut_share(step):
        limit = step.model.settings.max_tokens
        say(
            f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there"
        )
    dev = open_dev(config.dev, step.model, config.data.pool) if config.dev else None
    summary: dict[str, Any] = (
        counts_of(step) | contaminated
    )  # before the launcher shards the weights
    run = Run(out, resume, config.model_dump(mode="json"), dev)
    position, checkpoint = train(accelerator, step, config.training, run)
    summary |= {
        "num_steps": position.step,
        "num_queries": position.queries,
        "num_tokens": position.tokens,
        "last_loss": round(position.loss, 5),
        "seconds": round(position.seconds, 1),
        "checkpoint": checkpoint.name,
    }
    if position.best.step:
        summary["dev"] = {name: asdict(figure) for name, figure in position.best.figures.items()}
    if is_main_process():
        save_trained(config, checkpoint, out, summary)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return summary


def plan_training(config: TrainConfig) -> dict[str, Any]:
    """What training would do, found without the model's weights and touching nothing (`--dry-run`)."""
    data = load_data(config)
    check_held_out(config, data)
    # 4-bit layers are made as they load
    step = open_step(
        config, data, default_device() if is_quantized(config) else torch.device("meta")
    )
    return plan_of(step, config.training)


def load_data(config: TrainConfig) -> TrainingSet:
    """Read and check the lists; for an encoder with in-batch negatives, cluster near-duplicate skills."""
    is_encoder = isinstance(config, TrainEncoderConfig)
    near_duplicates = config.near_duplicates if is_encoder and config.in_batch_negatives else None
    data = load_training_set(config.data, near_duplicates)
    check_teacher_scores(data, config.loss)
    return data


def open_step(
    config: TrainConfig,
    data: TrainingSet,
    device: torch.device,
    token_cache: Path | None = None,
    sharded: bool = False,
) -> StepModule:
    """The model that training starts from, in the module that computes its loss on the lists of `data`."""
    model, training = load_model(config, device), config.training
    budget = training.token_budget_on(default_device())
    settings = StepSettings(
        budget,
        training.recompute,
        token_cache=token_cache,
        varlen=training.varlen,
        is_sharded=sharded,
    )
    if isinstance(config, TrainEncoderConfig) and isinstance(model, Encoder):
        own = {"in_batch": config.in_batch_negatives, "late_interaction": config.late_interaction}
        return EncoderStep(
            model, config.loss, on_best_windows(data, model.settings), replace(settings, **own)
        )
    assert isinstance(config, TrainRerankerConfig) and isinstance(model, Reranker)
    return RerankerStep(model, config.loss, data, settings)


def check_held_out(config: TrainConfig, data: TrainingSet) -> dict[str, int]:
    """How many lists are contaminated, by summary key; a key is there where its benchmark was compared.

    With the benchmarks of `held_out` queries and positives are compared, with the dev benchmark queries alone: a dev
    set measures the skills that are trained on, by other queries. Raises SkilltrainError where a list is contaminated,
    unless the recipe allows it.
    """
    source, dev, counts = config.data, config.dev, dict[str, int]()
    if source.held_out:
        benchmarks = open_benchmarks(source.held_out, source.pool, need_golds=True)
        fix = _decontaminate(source, source.held_out)
        counts["num_contaminated_lists"] = _num_contaminated(benchmarks, data, source, fix)
    if dev is not None:
        benchmark = load_benchmark(dev.benchmark, dev.split)
        fix = _decontaminate(source, [dev.benchmark], "limits.name=false limits.jaccard=null ")
        asked, fix = (
            HeldOut(benchmark.name, benchmark.tasks, ()),
            f"choose another dev.split, or {fix}",
        )
        counts["num_lists_of_dev_queries"] = _num_contaminated([asked], data, source, fix)
    return counts


def _decontaminate(source: ListsSource, benchmarks: Sequence[Path], limits: str = "") -> str:
    """What to run for lists that training accepts."""
    queries = source.lists if isinstance(source.lists, Path) else "FOLDER"  # of each in turn
    command = f"skilltrain decontaminate pool={source.pool} queries={queries}"
    return f"run `{command} 'benchmarks=[{', '.join(map(str, benchmarks))}]' {limits}out=…` and train on what it writes"


def _num_contaminated(
    benchmarks: Sequence[HeldOut], data: TrainingSet, source: ListsSource, fix: str
) -> int:
    """The number of contaminated lists. Raises SkilltrainError if there is one, unless the recipe allows it."""
    index = BenchmarkIndex(benchmarks, ContaminationLimits())
    matches = cache(lambda skill_id: index.skill_matches(data.skills[skill_id]))
    found = list[Dropped]()
    for one in data.lists:
        positives = [
            skill_id
            for skill_id, counts in zip(one.skill_ids, one.is_positive, strict=True)
            if counts
        ]
        found += index.contaminations(
            one.query_id, one.query, chain.from_iterable(map(matches, positives))
        )
    if not found:
        return 0
    num_lists, first = len({one.query_id for one in found}), found[0]
    grounds = Counter(ground for _, ground in {(one.query_id, one.filter) for one in found})
    by_ground = ", ".join(f"{ground} {grounds[ground]:,}" for ground in GROUNDS if grounds[ground])
    who = f"query {first.query_id}" + (f", positive {first.skill_id}" if first.skill_id else "")
    what = f"{num_lists:,} list(s) are contaminated ({by_ground}); the first, {who}: {first.reason}"
    if source.contamination == "refuse":
        where = ", ".join(map(str, source.folders))
        raise SkilltrainError(what, where=where, fix=f"{fix}, or set data.contamination=allow")
    say(f"warning: {what}; figures on that benchmark will be too high (data.contamination: allow)")
    return num_lists


def plan_of(step: StepModule, config: TrainingConfig) -> dict[str, Any]:
    """All figures of the plan; `memory_mib` of each rank, with `activation_mib` for the largest batch.

    `list_tokens` are those of all lists one by one, of which a step computes what is shared once. 4-bit weights have no
    `hours`.
    """
    lists, ranks, device = step.data.lists, launched_ranks(), default_device()
    steps, dtype = [*step_batches(lists, config)], config.dtype_on(device)
    batches = [*chain.from_iterable(steps)]
    activations = planned_activations(step, batches, dtype) / ranks
    most = step.model.settings.max_tokens
    tokens = sum(min(length, most) for one in lists for length in step.lengths(one))
    if isinstance(step, EncoderStep):
        tokens += sum(len(step.query_ids[one.query]) for one in lists)
    plan = counts_of(step) | {
        "num_queries": len({one.query for one in lists}),
        "num_steps": len(steps),
        "positives_cut_share": cut_share(step),
        "list_tokens": tokens,
        "activation_mib": round(activations / 2**20, 1),
        "memory_mib": round((held_bytes(step) + activations) / 2**20, 1),
        "num_ranks": ranks,
    }
    if all(parameter.dtype != torch.uint8 for parameter in step.parameters()):
        plan["hours"] = float(f"{planned_seconds(step, batches, dtype, device) / ranks / 3600:.2g}")
    return plan


def counts_of(step: StepModule) -> dict[str, int]:
    """How much there is to train on, and how many parameters train; before a launcher shards them."""
    lists = step.data.lists
    sizes = {
        p: p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in step.parameters()
    }  # two 4-bit weights a byte
    return {
        "num_lists": len(lists),
        "num_skills": len({skill.skill_id for skill in step.data.skills.values()}),
        "num_pairs": sum(len(one.skill_ids) for one in lists),
        "num_positives": sum(sum(one.is_positive) for one in lists),
        "num_parameters": sum(sizes.values()),
        "num_trained_parameters": sum(
            size for parameter, size in sizes.items() if parameter.requires_grad
        ),
    }


def cut_share(step: StepModule) -> float:
    """The share of positives that are cut. An encoder's text that reaches its limit counts: the rest is gone."""
    most = step.model.settings.max_tokens
    longest = most - 1 if isinstance(step, EncoderStep) else most
    rows = [zip(one.is_positive, step.lengths(one), strict=True) for one in step.data.lists]
    return round(
        fmean(length > longest for row in rows for is_positive, length in row if is_positive), 4
    )


def planned_activations(step: StepModule, batches: Iterable[Batch], dtype: torch.dtype) -> int:
    """Bytes that the batch with the most tokens needs beside weights and optimiser, all of it on one process.

    With `recompute` these are the inputs of all layers, and all of one layer for the largest micro-batch.
    """
    network, slots = step.model.network, step.slots(largest_batch(step, batches))
    of_layer, num_layers = layer_bytes(network, dtype), network.config.num_hidden_layers
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * of_layer)
    of_input = network.config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * of_input + max(slots) * of_layer)


def held_bytes(module: nn.Module) -> float:
    """Bytes on each rank of all weights, and of the gradients and AdamW's two moments of those that train."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in [*module.parameters(), *trained]
    )
    held = weights + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)
    return held / (launched_ranks() if shares_state() else 1)


def check_fits(config: TrainConfig) -> None:
    """Raise SkilltrainError, before any weight is read, where what training holds of each exceeds the GPU.

    Activations come on top; of 4-bit weights, which are made as they load, nothing is known yet.
    """
    device = default_device()
    if device.type != "cuda" or is_quantized(config):
        return
    held = held_bytes(load_model(config, torch.device("meta")))
    total = torch.cuda.get_device_properties(device).total_memory
    if held > total:
        what = f"its weights, gradients and AdamW's moments take {held / GIB:.1f} GiB on each GPU"
        lighter = (
            "train an adapter (LoRA)" if config.adapter is None else "set adapter.quantize=nf4"
        )
        fix = f"{lighter}, or share it by launch/fsdp2.yaml"
        raise SkilltrainError(
            f"{what}, which has {total / GIB:.1f}", where=config.model.source, fix=fix
        )


def planned_seconds(
    step: StepModule, batches: Sequence[Batch], dtype: torch.dtype, device: torch.device
) -> float:
    """About how long all forward and backward passes take on one process: a layer's time, times layers and tokens."""
    sample = batches[:: max(1, len(batches) // _SAMPLED)]
    slots = len(batches) * fmean(sum(step.slots(batch)) for batch in sample)
    most, budget = step.model.settings.max_tokens, step.settings.token_budget
    length = round(
        fmean(
            min(tokens, most) for batch in sample for one in batch for tokens in step.lengths(one)
        )
    )
    num_rows = max(1, (budget if device.type == "cuda" else min(budget, _TOKENS_ON_CPU)) // length)
    network, ids = (
        step.model.network,
        torch.zeros(num_rows, length, dtype=torch.long, device=device),
    )
    return (
        slots / ids.numel() * network.config.num_hidden_layers * _layer_seconds(network, ids, dtype)
    )


def _layer_seconds(network: Any, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Time the network's first layer with random weights, forward and backward, on token ids [text, token]."""
    body = _with_one_layer(network).to_empty(device=ids.device).train()
    for tensor in [*body.parameters(), *body.buffers()]:
        # Any other values that memory holds may be slow to compute with.
        tensor.data.normal_(std=0.02) if tensor.is_floating_point() else tensor.data.zero_()
    device = ids.device.type
    if device == "cpu":
        train_with_onednn(body)

    def run_layer() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = body(ids)[0]
        hidden.float().sum().backward()

    timer = Timer("run()", globals={"run": run_layer}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1).median


def _with_one_layer(network: Any) -> Any:
    """Copy the network without its head, with its first layer only and a vocabulary of one token."""
    body = copy.deepcopy(network.base_model)
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == network.config.num_hidden_layers:
            del module[1:]
    table = network.get_input_embeddings().weight
    body.set_input_embeddings(nn.Embedding(1, table.shape[1], dtype=table.dtype))
    return body
