"""The stages `train_encoder` and `train_reranker`: from LISTS to a model folder; and what they would do."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from skilltrain.data.contamination import GROUNDS, BenchmarkIndex, ContaminationLimits, HeldOut, open_benchmarks
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.files import cache_folder
from skilltrain.losses import infonce_in
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import Reranker
from skilltrain.records import Dropped
from skilltrain.terminal import is_main_process, say
from skilltrain.training.dev import open_dev
from skilltrain.training.engine import new_accelerator, shards_weights
from skilltrain.training.loop import Run, train
from skilltrain.training.publish import save_trained
from skilltrain.training.scores import check_teacher_scores
from skilltrain.training.settings import (
    DevConfig,
    TrainConfig,
    TrainEncoderConfig,
    TrainRerankerConfig,
    is_quantized,
    load_model,
)
from skilltrain.training.steps import EncoderStep, RerankerStep, StepModule, StepSettings
from skilltrain.training.training_plan import check_fits, counts_of, cut_share, plan_of
from skilltrain.training.training_set import ListsSource, TrainingSet, load_training_set, on_best_windows

__all__ = ["TrainEncoderConfig", "TrainRerankerConfig", "plan_training", "run_training"]


def run_training(config: TrainConfig, out: Path, resume: bool) -> dict[str, Any]:
    """Train and save the model; the summary counts what was trained on."""
    accelerator = new_accelerator(config.training, is_quantized(config))  # first: it refuses what cannot work
    check_fits(config)
    data = load_data(config)
    contaminated = check_held_out(config.data, config.dev, data)
    step = open_step(config, data, default_device(), cache_folder("tokens"), shards_weights(accelerator))
    if share := cut_share(step):
        limit = step.model.settings.max_tokens
        say(f"warning: {share:.1%} of the positives are longer than model.max_tokens={limit}, and cut there")
    dev = open_dev(config.dev, step.model, config.data.pool) if config.dev else None
    summary: dict[str, Any] = counts_of(step) | contaminated  # before the launcher shards the weights
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
    check_held_out(config.data, config.dev, data)
    # 4-bit layers are made as they load
    step = open_step(config, data, default_device() if is_quantized(config) else torch.device("meta"))
    return plan_of(step, config.training)


def load_data(config: TrainConfig) -> TrainingSet:
    """The lists, checked; what their loss needs beside them is found now."""
    is_encoder = isinstance(config, TrainEncoderConfig)
    clusters = config.near_duplicates if is_encoder and config.in_batch_negatives else None
    data = load_training_set(config.data, clusters, infonce_in(config.loss).lexical_weight > 0)
    check_teacher_scores(data, config.loss)
    return data


def open_step(
    config: TrainConfig, data: TrainingSet, device: torch.device, token_cache: Path | None = None, sharded: bool = False
) -> StepModule:
    """The model that training starts from, in the module that computes its loss on the lists of `data`."""
    model, training = load_model(config, device), config.training
    budget = training.token_budget_on(default_device())
    settings = StepSettings(
        budget, training.recompute, token_cache=token_cache, varlen=training.varlen, is_sharded=sharded
    )
    if isinstance(config, TrainEncoderConfig) and isinstance(model, Encoder):
        own = {"in_batch": config.in_batch_negatives, "late_interaction": config.late_interaction}
        return EncoderStep(model, config.loss, on_best_windows(data, model.settings), replace(settings, **own))
    assert isinstance(config, TrainRerankerConfig) and isinstance(model, Reranker)
    return RerankerStep(model, config.loss, data, settings)


def check_held_out(source: ListsSource, dev: DevConfig | None, data: TrainingSet) -> dict[str, int]:
    """How many lists are contaminated, by summary key; a key is there where its benchmark was compared.

    With the benchmarks of `held_out` queries and positives are compared, with the dev benchmark queries alone: a dev
    set measures the skills that are trained on, by other queries. Raises SkilltrainError where a list is contaminated,
    unless the recipe allows it; then it is said.
    """
    counts = dict[str, int]()
    if source.held_out:
        benchmarks = open_benchmarks(source.held_out, source.pool, need_golds=True)
        fix = _decontaminate(source, source.held_out)
        counts["num_contaminated_lists"] = _num_contaminated(benchmarks, data, source, fix)
    if dev is not None:
        benchmark = load_benchmark(dev.benchmark, dev.split)
        asked = [HeldOut(benchmark.name, benchmark.tasks, ())]
        clean = _decontaminate(source, [dev.benchmark], "limits.name=false limits.jaccard=null ")
        fix = f"choose another dev.split, or {clean}"
        counts["num_lists_of_dev_queries"] = _num_contaminated(asked, data, source, fix)
    return counts


def _decontaminate(source: ListsSource, benchmarks: Sequence[Path], limits: str = "") -> str:
    """What to run for lists that training accepts."""
    folders = ", ".join(map(str, benchmarks))
    queries = source.lists if isinstance(source.lists, Path) else "FOLDER"  # of each in turn
    command = f"skilltrain decontaminate pool={source.pool} queries={queries} 'benchmarks=[{folders}]'"
    return f"run `{command} {limits}out=…` and train on what it writes"


def _num_contaminated(benchmarks: Sequence[HeldOut], data: TrainingSet, source: ListsSource, fix: str) -> int:
    """The number of contaminated lists. Raises SkilltrainError if there is one, unless the recipe allows it."""
    index = BenchmarkIndex(benchmarks, ContaminationLimits())
    matches = cache(lambda skill_id: index.skill_matches(data.skills[skill_id]))
    found: list[Dropped] = []
    for one in data.lists:
        positives = [skill_id for skill_id, counts in zip(one.skill_ids, one.is_positive, strict=True) if counts]
        of_skills = [match for skill_id in positives for match in matches(skill_id)]
        found += index.contaminations(one.query_id, one.query, of_skills)
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
