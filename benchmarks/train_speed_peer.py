"""sentence-transformers' trainers on the same lists, as their documentation has them used."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.cross_encoder.losses import ListNetLoss
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from torch.utils.data import SequentialSampler
from train_speed_cases import LEARNING_RATE, MAX_GRAD_NORM, TEMPERATURE, WEIGHT_DECAY, Case, PeerMode
from train_speed_data import Material
from transformers import TrainerCallback

from skilltrain.templates import SkillTemplate

GOLD_LABEL = 200.0  # ListNetLoss takes the softmax of the labels as its target: only so one gold skill gets all of it


def train_peer(case: Case, mode: PeerMode, folder: Path, what: Material, training: Any) -> None:
    """Train through the library's trainer, reporting each step; tokenising a batch is part of its step."""
    folder = folder.with_name(folder.name + "-shipped") if mode.as_shipped else folder
    make = _encoder_trainer if case.kind == "encoder" else _reranker_trainer
    trainer: Any = make(case, mode, folder, what)
    losses: list[float] = []
    trainer.loss.register_forward_hook(lambda _module, _inputs, loss: losses.append(float(loss.detach())))
    trainer.model[0].register_forward_pre_hook(lambda _module, inputs: _count(training.tokens, inputs[0]))
    with nullcontext() if mode.merged else column_merging_disabled():
        if mode.bare:
            _bare_loop(trainer, training, losses)
        else:
            trainer.add_callback(_Reporting(training, losses))
            training.ready()
            trainer.train()


class _Reporting(TrainerCallback):
    """Tells of each step that ends; the next begins when it is asked for."""

    def __init__(self, training: Any, losses: list[float]) -> None:
        self.training, self.losses = training, losses

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.report(self.losses[-1])


def _count(tokens: Any, features: dict[str, Any]) -> None:
    tokens.real += int(features["attention_mask"].sum())
    tokens.slots += features["attention_mask"].numel()


def _arguments(case: Case, mode: PeerMode) -> dict[str, Any]:
    """Its defaults but for the learning rate, and without what is no training: logging, saving, the progress bar."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="train-speed-"),
        "per_device_train_batch_size": case.batch,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "torch_compile": mode.compiled,
        "batch_sampler": _in_order,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _in_order(
    dataset: Any,
    batch_size: int,
    drop_last: bool,
    valid_label_columns: Any = None,
    generator: Any = None,
    seed: int = 0,
) -> DefaultBatchSampler:
    """Batches in the order of the data set, so that both trainers see the same."""
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last, valid_label_columns, generator, seed)  # type: ignore[arg-type]


def _texts(case: Case, what: Material) -> dict[str, str]:
    template = SkillTemplate(description_chars=case.description_chars, body_chars=case.body_chars)
    return {skill_id: template.render(skill) for skill_id, skill in what.skills.items()}


def _encoder_trainer(case: Case, mode: PeerMode, folder: Path, what: Material) -> SentenceTransformerTrainer:
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = case.max_tokens
    if mode.padding_side:
        model.tokenizer.padding_side = mode.padding_side
    texts, rows = _texts(case, what), []
    for one in what.lists:
        negatives = [texts[skill_id] for skill_id in one.skill_ids[1:]]
        negatives = sorted(negatives, key=len) if mode.sorted_negatives else negatives
        columns = {f"negative_{number}": text for number, text in enumerate(negatives, 1)}
        rows.append({"query": one.query, "positive": texts[one.skill_ids[0]], **columns})
    scale = 1 / TEMPERATURE
    loss: nn.Module = MultipleNegativesRankingLoss(model, scale=scale)
    if mode.cached:
        loss = CachedMultipleNegativesRankingLoss(
            model, scale=scale, mini_batch_size=mode.mini_batch or 32, mini_batch_num_tokens=mode.mini_batch_tokens
        )
    arguments = SentenceTransformerTrainingArguments(**_arguments(case, mode))
    return SentenceTransformerTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss)


def _reranker_trainer(case: Case, mode: PeerMode, folder: Path, what: Material) -> CrossEncoderTrainer:
    model = CrossEncoder(str(folder), device="cpu", max_length=case.max_tokens)
    texts, rows = _texts(case, what), []
    for one in what.lists:
        labels = {skill_id: GOLD_LABEL if place == 0 else 0.0 for place, skill_id in enumerate(one.skill_ids)}
        order = list(labels)
        if mode.sorted_negatives:
            order.sort(key=lambda skill_id: len(texts[skill_id]))
        skills = [texts[skill_id] for skill_id in order]
        rows.append({"query": one.query, "skills": skills, "labels": [labels[skill_id] for skill_id in order]})
    loss = ListNetLoss(model, mini_batch_size=mode.mini_batch)
    arguments = CrossEncoderTrainingArguments(**_arguments(case, mode))
    return CrossEncoderTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss)


def _bare_loop(trainer: Any, training: Any, losses: list[float]) -> None:
    """The library's collator and loss without its trainer."""
    optimizer = trainer.create_optimizer()
    batches = list(trainer.get_train_dataloader().batch_sampler)
    trainer.model.train()
    training.ready()
    for batch in batches:
        inputs = trainer.data_collator([trainer.train_dataset[place] for place in batch])
        trainer.compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        training.report(losses[-1])
