"""Trains one case in one mode: by skilltrain's step, or by the trainer of sentence-transformers."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import GemmPeak, Meter, Usage, forward_flops, is_causal, num_attended_pairs
from train_speed_cases import Case, Mode, OurMode, PeerMode, TrainingData

LEARNING_RATE = 2e-5
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
TEMPERATURE = 0.05
GOLD_LABEL = 200.0  # the targets are a softmax of the labels: with 200, gold gets all of it


@dataclass(frozen=True)
class StepReport(Usage):
    """Measurements of one training step.

    Attributes:
        loss: Mean loss of the batch.
        padding: Share of padding among the tokens of all steps so far.
        gemm_flops: Rate of matrix products just before the step, in FLOP/s.
        useful_flops: FLOP that the step needs at least; 0 if it is not known.
    """

    loss: float
    padding: float
    gemm_flops: float
    useful_flops: float


class StepReporter:
    """Measures training steps.

    Attributes:
        reports: Report of each finished step.
        num_tokens: Tokens of all steps so far, without padding. The training code counts them.
        num_slots: The same, with padding.
    """

    def __init__(self, threads: int) -> None:
        """Set the number of threads of torch, and warm up."""
        import torch

        torch.set_num_threads(threads)
        self.reports: list[StepReport] = []
        self.num_tokens = 0
        self.num_slots = 0
        self._gemm = GemmPeak()
        self._gemm_flops = 0.0
        self._meter = Meter()

    def begin(self) -> None:
        """Start to measure a step. Call it once, when the model and the data are loaded."""
        self._gemm_flops = max(self._gemm.measure())
        self._meter.start()

    def end(self, loss: float, useful_flops: float = 0.0) -> None:
        """Report the current step, and begin the next one."""
        usage = self._meter.read()
        padding = 1 - self.num_tokens / self.num_slots
        report = StepReport(
            **asdict(usage),
            loss=loss,
            padding=padding,
            gemm_flops=self._gemm_flops,
            useful_flops=useful_flops,
        )
        self.reports.append(report)
        self.begin()


def train(
    case: Case, mode: Mode, model_folder: Path, data: TrainingData, threads: int
) -> list[StepReport]:
    """Train the model in `model_folder` on all batches, and return a report of each step."""
    reporter = StepReporter(threads)
    if isinstance(mode, OurMode):
        _train_ours(case, mode, model_folder, data, reporter)
    else:
        _train_peer(case, mode, model_folder, data, reporter)
    return reporter.reports


# skilltrain ---------------------------------------------------------------------------------------


def _train_ours(
    case: Case, mode: OurMode, model_folder: Path, data: TrainingData, reporter: StepReporter
) -> None:
    """Run training steps as skilltrain's loop does. Texts are tokenized before the first step."""
    import torch

    from skilltrain.models.cpu_linear import train_with_onednn
    from skilltrain.training.loop import new_optimizer

    step = _new_step(case, mode, model_folder, data)
    lists = step.data.lists
    batches = [lists[start : start + case.batch] for start in range(0, len(lists), case.batch)]
    train_with_onednn(step)
    flops_by_batch = [useful_flops(step, batch) for batch in batches]
    optimizer = new_optimizer(step.train(), LEARNING_RATE, WEIGHT_DECAY)
    reporter.begin()
    for batch, flops in zip(batches, flops_by_batch, strict=True):
        loss = step(batch) / len(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        reporter.num_tokens = step.count["tokens"]
        reporter.num_slots = step.count["padded_tokens"]
        reporter.end(float(loss.detach()), flops)


def _new_step(case: Case, mode: OurMode, model_folder: Path, data: TrainingData) -> Any:
    """Create skilltrain's training step (EncoderStep or RerankerStep) for a model and its lists."""
    import torch

    from skilltrain.losses import InfoNCE, ListwiseCE
    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
    from skilltrain.training.training_set import TrainingList, TrainingSet

    gains = (1.0,) + (0.0,) * case.negatives
    lists = []
    for mined_list in data.lists:
        positives = frozenset(mined_list.skill_ids[:1])
        lists.append(
            TrainingList(
                mined_list.query_id, mined_list.query, mined_list.skill_ids, gains, positives
            )
        )
    training_set = TrainingSet(tuple(lists), data.skills)
    settings = StepSettings(token_budget=mode.token_budget, recompute=mode.recompute)

    source = str(model_folder)
    device = torch.device("cpu")
    if case.kind == "encoder":
        encoder = load_encoder(EncoderConfig(source=source), device)
        return EncoderStep(encoder, InfoNCE(temperature=TEMPERATURE), training_set, settings)
    reranker = load_reranker(RerankerConfig(source=source), device)
    return RerankerStep(reranker, ListwiseCE(), training_set, settings)


def useful_flops(step: Any, batch: Sequence[Any]) -> float:
    """Return the FLOP that a training step on a batch needs at least, forward and backward.

    Padding and recomputation do not count. The encoder encodes each distinct skill once. A causal
    reranker computes the common prompt of a list once.

    Args:
        step: EncoderStep or RerankerStep.
        batch: Training lists.
    """
    from skilltrain.training.steps import EncoderStep

    network = step.model.network
    shares_prompt = is_causal(network)
    groups: list[list[Any]] = []  # token ids of texts; the texts of a group share their prompt
    if isinstance(step, EncoderStep):
        shares_prompt = False
        skill_ids: set[str] = set()
        for training_list in batch:
            skill_ids.update(training_list.skill_ids)
        queries = [step.query_token_ids[training_list.query] for training_list in batch]
        groups = [queries + [step.skill_token_ids[skill_id] for skill_id in skill_ids]]
    else:
        for training_list in batch:
            groups.append([pair.ids for pair in step.make_pairs(training_list)])

    num_tokens = num_pairs = 0.0
    for texts in groups:
        num_shared = _num_common_tokens(texts) if shares_prompt else 0
        num_shared_pairs = num_attended_pairs(network, num_shared)
        num_tokens += num_shared
        num_pairs += num_shared_pairs
        for text in texts:
            num_tokens += len(text) - num_shared
            num_pairs += num_attended_pairs(network, len(text)) - num_shared_pairs
    return 3 * forward_flops(network, num_tokens, num_pairs)


def _num_common_tokens(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of first tokens that all texts have in common."""
    num_common = 0
    for tokens in zip(*texts, strict=False):  # the tokens of all texts at one position
        if len(set(tokens)) > 1:
            break
        num_common += 1
    return num_common


# sentence-transformers ----------------------------------------------------------------------------


def _train_peer(
    case: Case, mode: PeerMode, model_folder: Path, data: TrainingData, reporter: StepReporter
) -> None:
    """Run the trainer of sentence-transformers. It tokenizes each batch as a part of its step."""
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    from transformers import PrinterCallback, TrainerCallback

    losses: list[float] = []

    class ReportStep(TrainerCallback):
        """Reports each step at its end."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reporter.end(losses[-1])

    def record_loss(_module: Any, _inputs: Any, loss: Any) -> None:
        losses.append(float(loss.detach()))

    def count_tokens(_module: Any, inputs: Any) -> None:
        mask = inputs[0]["attention_mask"]  # [text, token]
        reporter.num_tokens += int(mask.sum())
        reporter.num_slots += mask.numel()

    if mode.as_shipped:
        model_folder = model_folder.with_name(model_folder.name + "-shipped")
    new_trainer = _encoder_trainer if case.kind == "encoder" else _reranker_trainer
    trainer = new_trainer(case, mode, model_folder, data)
    trainer.loss.register_forward_hook(record_loss)
    trainer.model[0].register_forward_pre_hook(count_tokens)
    trainer.add_callback(ReportStep())
    trainer.remove_callback(PrinterCallback)  # it would print between the tables
    with nullcontext() if mode.merged else column_merging_disabled():
        reporter.begin()
        trainer.train()


def _trainer_arguments(case: Case) -> dict[str, Any]:
    """Return the arguments of a trainer: defaults, a constant learning rate, no logs, no saving."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="train-speed-"),
        "per_device_train_batch_size": case.batch,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "batch_sampler": _sequential_batches,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _sequential_batches(
    dataset: Any, batch_size: int, drop_last: bool, *arguments: Any, **settings: Any
) -> Any:
    """Create a sampler of batches in the order of the data set, which skilltrain uses too."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler

    sampler: Any = SequentialSampler(dataset)
    return DefaultBatchSampler(sampler, batch_size, drop_last, *arguments, **settings)


def _skill_texts(case: Case, data: TrainingData) -> dict[str, str]:
    """Render the text of each skill, by skill id, as skilltrain's model sees it."""
    from skilltrain.templates import SkillTemplate

    template = SkillTemplate(description_chars=case.description_chars, body_chars=case.body_chars)
    return {skill_id: template.render(skill) for skill_id, skill in data.skills.items()}


def _encoder_trainer(case: Case, mode: PeerMode, model_folder: Path, data: TrainingData) -> Any:
    """Create a SentenceTransformerTrainer with one column per negative."""
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

    texts = _skill_texts(case, data)
    rows = []
    for mined_list in data.lists:
        gold_id, *negative_ids = mined_list.skill_ids
        row = {"query": mined_list.query, "positive": texts[gold_id]}
        for number, skill_id in enumerate(negative_ids, 1):
            row[f"negative_{number}"] = texts[skill_id]
        rows.append(row)

    model = SentenceTransformer(str(model_folder), device="cpu")
    model.max_seq_length = case.max_tokens
    scale = 1 / TEMPERATURE
    loss: Any = MultipleNegativesRankingLoss(model, scale=scale)
    if mode.cached:
        mini_batch = mode.mini_batch or 32
        loss = CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=mini_batch)
    arguments = SentenceTransformerTrainingArguments(**_trainer_arguments(case))
    return SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss
    )


def _reranker_trainer(case: Case, mode: PeerMode, model_folder: Path, data: TrainingData) -> Any:
    """Create a CrossEncoderTrainer with one row per list."""
    from datasets import Dataset
    from sentence_transformers import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    texts = _skill_texts(case, data)
    labels = [GOLD_LABEL] + [0.0] * case.negatives
    rows = []
    for mined_list in data.lists:
        skills = [texts[skill_id] for skill_id in mined_list.skill_ids]
        rows.append({"query": mined_list.query, "skills": skills, "labels": labels})

    model = CrossEncoder(str(model_folder), device="cpu", max_length=case.max_tokens)
    loss = ListNetLoss(model, mini_batch_size=mode.mini_batch)
    arguments = CrossEncoderTrainingArguments(**_trainer_arguments(case))
    return CrossEncoderTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss
    )
