"""The process that trains one case in one mode: skilltrain's step, or sentence-transformers' trainer."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Gemm, Meter, forward_flops, is_causal, pairs_seen
from train_speed_cases import Case, Material, OurMode, PeerMode

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, TEMPERATURE = 2e-5, 0.01, 1.0, 0.05
GOLD_LABEL = 200.0  # ListNetLoss takes the softmax of the labels as its target: only so one gold skill gets all of it


@dataclass(frozen=True)
class StepReport:
    """One step: its share of padding is that of all steps so far, its peak memory too; GEMM rates just before it."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    loss: float
    padding: float
    gemm_flops: float
    useful_flops: float


class Reporter:
    """Times steps, and counts their tokens with and without padding."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.reports: list[StepReport] = []
        self.gemm, self.meter = Gemm(), Meter()
        self.rate, self.real, self.slots = 0.0, 0, 0

    def begin(self) -> None:
        """The next step begins, the first when model and data are loaded."""
        self.rate = max(self.gemm.rates())
        self.meter.start()

    def end(self, loss: float, useful_flops: float = 0.0) -> None:
        """A step is done, and the next one begins."""
        padding = 1 - self.real / self.slots
        self.reports.append(StepReport(*self.meter.read(), loss, padding, self.rate, useful_flops))
        self.begin()


def train(
    case: Case, mode: OurMode | PeerMode, folder: Path, what: Material, threads: int
) -> list[StepReport]:
    """Every step's report; `folder` is the model's."""
    reporter = Reporter(threads)
    if isinstance(mode, OurMode):
        _train_ours(case, mode, folder, what, reporter)
    else:
        _train_peer(case, mode, folder, what, reporter)
    return reporter.reports


# skilltrain -----------------------------------------------------------------------------------------------------------


def _train_ours(
    case: Case, mode: OurMode, folder: Path, what: Material, reporter: Reporter
) -> None:
    """skilltrain's step as its loop runs it: loss over queries, backward, clip, AdamW. Texts are tokenised before."""
    import torch

    from skilltrain.models.cpu_linear import train_with_onednn
    from skilltrain.training.loop import new_optimizer

    step, data = _our_step(case, mode, folder, what)
    batches = [data.lists[i : i + case.batch] for i in range(0, len(data.lists), case.batch)]
    train_with_onednn(step)
    flops = [useful_flops(step, batch) for batch in batches]
    optimizer = new_optimizer(step.train(), LEARNING_RATE, WEIGHT_DECAY)
    reporter.begin()
    for number, batch in enumerate(batches):
        loss = step(batch) / len(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reporter.real, reporter.slots = step.count["tokens"], step.count["slots"]
        reporter.end(float(loss.detach()), flops[number])


def _our_step(case: Case, mode: OurMode, folder: Path, what: Material) -> Any:
    """(the step module over the model in `folder`, the training set): the one place that knows their constructors."""
    import torch

    from skilltrain.losses import InfoNCE, ListwiseCE
    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
    from skilltrain.training.training_set import TrainingList, TrainingSet

    gains = (1.0, *(0.0 for _ in range(case.negatives)))
    lists = tuple(
        TrainingList(one.query_id, one.query, one.skill_ids, gains, frozenset(one.skill_ids[:1]))
        for one in what.lists
    )
    data, device = TrainingSet(lists, what.skills), torch.device("cpu")
    settings = StepSettings(token_budget=mode.token_budget, recompute=mode.recompute)
    if case.kind == "encoder":
        encoder = load_encoder(EncoderConfig(source=str(folder)), device)
        return EncoderStep(encoder, InfoNCE(temperature=TEMPERATURE), data, settings), data
    reranker = load_reranker(RerankerConfig(source=str(folder)), device)
    return RerankerStep(reranker, ListwiseCE(), data, settings), data


def useful_flops(step: Any, batch: Sequence[Any]) -> float:
    """FLOP of forward and backward on the batch's real tokens, each distinct skill once, no recomputation.

    In a causal reranker a list's common prompt counts once.
    """
    from skilltrain.training.steps import EncoderStep

    network, shared = step.model.network, [0]
    if isinstance(step, EncoderStep):
        skill_ids = {skill_id for one in batch for skill_id in one.skill_ids}
        lists = [
            [step.query_ids[one.query] for one in batch] + [step.skill_ids[s] for s in skill_ids]
        ]
    else:
        lists = [[pair.ids for pair in step.make_pairs(one)] for one in batch]
        shared = [_num_shared(texts) if is_causal(network) else 0 for texts in lists]
    tokens = seen = 0.0
    for prompt, texts in zip(shared, lists, strict=True):
        tokens += prompt + sum(len(text) - prompt for text in texts)
        own = pairs_seen(network, prompt)
        seen += own + sum(pairs_seen(network, len(text)) - own for text in texts)
    return 3 * forward_flops(network, tokens, seen)


def _num_shared(texts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of all texts."""
    shortest = min(map(len, texts))
    return next(
        (i for i in range(shortest) if any(text[i] != texts[0][i] for text in texts)), shortest
    )


# sentence-transformers ------------------------------------------------------------------------------------------------


def _train_peer(
    case: Case, mode: PeerMode, folder: Path, what: Material, reporter: Reporter
) -> None:
    """Train through the library's trainer, reporting each step; tokenising a batch is part of its step."""
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    from transformers import PrinterCallback, TrainerCallback

    losses: list[float] = []

    class Reporting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reporter.end(losses[-1])

    def count(_module: Any, inputs: Any) -> None:
        reporter.real += int(inputs[0]["attention_mask"].sum())
        reporter.slots += inputs[0]["attention_mask"].numel()

    folder = folder.with_name(folder.name + "-shipped") if mode.as_shipped else folder
    trainer: Any = (_encoder_trainer if case.kind == "encoder" else _reranker_trainer)(
        case, mode, folder, what
    )
    trainer.loss.register_forward_hook(
        lambda _module, _inputs, loss: losses.append(float(loss.detach()))
    )
    trainer.model[0].register_forward_pre_hook(count)
    trainer.add_callback(Reporting())
    trainer.remove_callback(PrinterCallback)  # it would print into the tables
    with nullcontext() if mode.merged else column_merging_disabled():
        reporter.begin()
        trainer.train()


def _arguments(case: Case) -> dict[str, Any]:
    """Its defaults but for the learning rate, and without what is no training: logging, saving, the progress bar."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="train-speed-"),
        "per_device_train_batch_size": case.batch,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "batch_sampler": _in_order,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _in_order(dataset: Any, batch_size: int, drop_last: bool, *rest: Any, **more: Any) -> Any:
    """Batches in the order of the data set, so that both trainers see the same."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler

    return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last, *rest, **more)  # type: ignore[arg-type]


def _texts(case: Case, what: Material) -> dict[str, str]:
    from skilltrain.templates import SkillTemplate

    template = SkillTemplate(description_chars=case.description_chars, body_chars=case.body_chars)
    return {skill_id: template.render(skill) for skill_id, skill in what.skills.items()}


def _encoder_trainer(case: Case, mode: PeerMode, folder: Path, what: Material) -> Any:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = case.max_tokens
    texts, rows = _texts(case, what), []
    for one in what.lists:
        columns = {
            f"negative_{number}": texts[skill_id]
            for number, skill_id in enumerate(one.skill_ids[1:], 1)
        }
        rows.append({"query": one.query, "positive": texts[one.skill_ids[0]], **columns})
    loss: Any = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    if mode.cached:
        loss = CachedMultipleNegativesRankingLoss(
            model, scale=1 / TEMPERATURE, mini_batch_size=mode.mini_batch or 32
        )
    arguments = SentenceTransformerTrainingArguments(**_arguments(case))
    return SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss
    )


def _reranker_trainer(case: Case, mode: PeerMode, folder: Path, what: Material) -> Any:
    from datasets import Dataset
    from sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    model, texts = (
        CrossEncoder(str(folder), device="cpu", max_length=case.max_tokens),
        _texts(case, what),
    )
    rows = [
        {
            "query": one.query,
            "skills": [texts[skill_id] for skill_id in one.skill_ids],
            "labels": [GOLD_LABEL, *(0.0 for _ in one.skill_ids[1:])],
        }
        for one in what.lists
    ]
    loss = ListNetLoss(model, mini_batch_size=mode.mini_batch)
    arguments = CrossEncoderTrainingArguments(**_arguments(case))
    return CrossEncoderTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss
    )
