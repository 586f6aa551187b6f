"""The stages `train_encoder` and `train_reranker`, which make a model folder from LISTS."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import Field, model_validator

from skilltrain.data.contamination import (
    GROUNDS,
    BenchmarkIndex,
    ContaminationLimits,
    HeldOutBenchmark,
    open_benchmarks,
)
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import RunRecord, model_card
from skilltrain.files import cache_folder
from skilltrain.losses import (
    EncoderLoss,
    InfoNCE,
    LateInteraction,
    ListwiseCE,
    Loss,
    Matryoshka,
    RerankerLoss,
    flatten_loss,
)
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.models.adapters import (
    AdapterConfig,
    add_adapter,
    is_quantized,
    keep_input_dtype,
    merge_adapter,
    quantizing_options,
)
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.models.saving import save_adapter, save_model
from skilltrain.records import Dropped, Verdict
from skilltrain.stage import Summary, TrainingStage
from skilltrain.terminal import is_main_process, say
from skilltrain.training.checkpoint import load_weights
from skilltrain.training.dev import open_dev
from skilltrain.training.engine import new_accelerator, shards_state, shards_weights
from skilltrain.training.estimates import count_work, counts_of, measure_run, truncated_share
from skilltrain.training.loop import GIB, Run, Training, can_probe, train
from skilltrain.training.memory import fit_into_memory, held_bytes
from skilltrain.training.scores import InBatchMask, check_teacher_scores
from skilltrain.training.settings import DevConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepModule, StepSettings
from skilltrain.training.training_set import (
    ListsSource,
    TrainingSet,
    load_training_set,
    on_best_windows,
)

_MAX_PARAMETERS_ON_CPU = 150_000_000  # a batch of a larger model takes minutes


class Train(TrainingStage):
    """Base of the stages that train an encoder or a reranker on lists."""

    result = "{num_steps} steps on {num_lists} lists, last loss {last_loss}"

    # The first settings of both stages, in the order of recipe.yaml.
    stage: Any
    model: Any
    adapter: AdapterConfig | None = Field(
        default=None, description="train low-rank adapters (LoRA) instead of all"
    )
    data: ListsSource = Field(description="what to train on")
    loss: Any

    # Each stage defines the other settings, because they come after its own.
    if TYPE_CHECKING:
        training: TrainingConfig
        dev: DevConfig | None

    def run(self, out: Path, resume: bool = False) -> Summary:
        """Train and save the model. The summary counts the data and the work.

        Args:
            out: Folder for the model, the log and the checkpoints.
            resume: Whether to continue from the newest checkpoint.

        Returns:
            Counts, losses and times by summary key, such as `num_steps`.
        """
        # Check the settings before anything is loaded.
        accelerator = new_accelerator(self.training, is_quantized(self.adapter))
        check_fits(self)

        # Load the data and the model.
        data = load_data(self)
        contamination_counts = check_held_out(self, data)
        step_module = open_step(
            self,
            data,
            default_device(),
            token_cache=cache_folder("tokens"),
            sharded=shards_weights(accelerator),
        )
        fit_into_memory(step_module, self.training, accelerator.device)
        share = truncated_share(step_module)
        if share:
            max_tokens = step_module.model.settings.max_tokens
            say(
                f"the first {max_tokens} tokens of a skill are read: name, description and the "
                f"start of the body. {share:.1%} of the positives are longer, which is usual. A "
                "higher model.max_tokens reads more and takes longer"
            )
        dev = open_dev(self.dev, step_module.model, self.data.pool) if self.dev else None

        # Train. Parameters are counted before the launcher shards them.
        summary: Summary = {**counts_of(step_module), **contamination_counts}
        run = Run(out, resume, self.model_dump(mode="json"), dev)
        position, checkpoint = train(accelerator, step_module, self.training, run)
        summary |= {
            "num_steps": position.step,
            "num_queries": position.queries,
            "num_tokens": position.tokens,
            "last_loss": round(position.loss, 5),
            "seconds": round(position.seconds, 1),
            "checkpoint": checkpoint.name,
        }
        was_evaluated = position.best.step > 0
        if was_evaluated:
            best_metrics = position.best.figures
            summary["dev"] = {name: asdict(metric) for name, metric in best_metrics.items()}

        # Save the model.
        if is_main_process():
            save_trained(self, checkpoint, out, summary)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return summary

    def dry_run(self) -> Summary:
        """Count what training would read, and measure memory and time on the largest batch.

        Under DeepSpeed, and for a large model on a CPU, nothing is measured.
        """
        # Check the settings, and load the data.
        accelerator = new_accelerator(self.training, is_quantized(self.adapter))
        check_fits(self)
        data = load_data(self)
        check_held_out(self, data)

        # Open the model. Counting needs only shapes, so the model can be on the device meta, where
        # it has no weights. But 4-bit weights have their shapes only once they are loaded.
        is_measured = can_probe(accelerator) or _is_small_on_cpu(self, accelerator)
        needs_weights = is_measured or is_quantized(self.adapter)
        device = default_device() if needs_weights else torch.device("meta")
        step = open_step(self, data, device, sharded=shards_weights(accelerator))

        # Count, and measure if possible.
        counts = count_work(step, self.training)
        if not is_measured:
            return counts
        fit_into_memory(step, self.training, accelerator.device)
        run = Run(self.out, resume=False, recipe={})
        training = Training(accelerator, step, self.training, run)
        return {**counts, **measure_run(training)}


class TrainEncoder(Train):
    """Train an encoder on lists of positives and hard negatives."""

    example = "recipes/tiny/sr_emb_minilm.yaml training.seed=7 out=runs/emb7"
    next_command = "evaluate --benchmark QUERIES --pool {pool} --encoder {out} out={near}/report"

    stage: Literal["train_encoder"]
    model: EncoderConfig = Field(description="the encoder to start from")
    loss: EncoderLoss = Field(default=InfoNCE(), description="what to minimise")
    late_interaction: LateInteraction | None = Field(
        default=None, description="train tokens' vectors too (kind late)"
    )
    in_batch_negatives: bool = Field(
        default=True, description="the other queries' skills are negatives too"
    )
    in_batch_mask: InBatchMask = Field(
        default="clusters",
        description="skills that are no in-batch negatives: none; positives (judged for the "
        "query); names: also skills of their names; clusters: also near-duplicates",
    )
    near_duplicates: float | None = Field(
        default=0.6,
        gt=0,
        le=1,
        description="skills whose bodies are this similar (Jaccard) share a cluster; null: none do",
    )
    training: TrainingConfig = Field(default=TrainingConfig(), description="how to train")
    dev: DevConfig | None = Field(default=None, description="what to evaluate on while training")
    out: Path = Field(description="folder to write the model to")

    @model_validator(mode="after")
    def _check(self) -> "TrainEncoder":
        """Check that settings of different sections fit together."""
        # `dev` ranks a pool during training. The entry with `source: self` in its list of rankers
        # stands for the encoder in training, and must be of the kind dense.
        if self.dev is not None:
            requirement = "an encoder in training must be {kind: dense, source: self}"
            self.dev.check(kind="dense", requirement=requirement)

        gains = self.data.gains
        for loss in flatten_loss(self.loss):
            # `push_share` pushes rejected skills away from the query. Only a lower gain tells the
            # loss which skills are rejected and which are merely irrelevant.
            pushes_rejected = isinstance(loss, InfoNCE) and loss.push_share > 0
            if pushes_rejected and gains[Verdict.REJECTED] >= gains[Verdict.IRRELEVANT]:
                fault = "loss.push_share needs data.gains that put rejected below irrelevant"
                raise ValueError(fault)
        if not self.in_batch_negatives:
            _refuse_in_batch(self.loss, "in_batch_negatives is false")

        # Late interaction compares token by token. `varlen` computes only the vector of the
        # last token.
        if self.late_interaction is not None and self.training.varlen:
            raise ValueError(
                "late_interaction needs all tokens' vectors, "
                "and training.varlen computes only the last one"
            )
        return self


class TrainReranker(Train):
    """Train a reranker on lists of an encoder's candidates."""

    example = "recipes/tiny/sr_rank_minilm.yaml training.seed=7 out=runs/rank7"
    next_command = "evaluate --benchmark QUERIES --pool {pool} --reranker {out} out={near}/report"

    stage: Literal["train_reranker"]
    model: RerankerConfig = Field(description="the reranker, or the plain model, to start from")
    loss: RerankerLoss = Field(default=ListwiseCE(), description="what to minimise")
    training: TrainingConfig = Field(
        default=TrainingConfig(batch_size=1, accumulation=16, learning_rate=1e-5),
        description="how to train",
    )
    dev: DevConfig | None = Field(default=None, description="what to evaluate on while training")
    out: Path = Field(description="folder to write the model to")

    @model_validator(mode="after")
    def _check(self) -> "TrainReranker":
        """Check that settings of different sections fit together."""
        _refuse_in_batch(self.loss, "a reranker scores the candidates of each list alone")
        # `needs.directions` is true if the loss also compares, for example, skills with skills.
        if self.loss.needs.directions:
            raise ValueError(
                "loss: a reranker compares skills only with their query; "
                "set directions: [query_to_skill]"
            )
        if self.loss.needs.vectors:
            raise ValueError(f"loss: {self.loss.name} needs vectors, which only an encoder has")
        if self.training.varlen:
            raise ValueError("training: varlen is for encoders; a causal reranker never pads")
        if self.training.two_pass:
            raise ValueError(
                "training: two_pass is for encoders; the lists of a reranker do not share a loss, "
                "so a larger accumulation does the same"
            )
        # `dev` ranks a pool during training. A reranker only orders the candidates that another
        # ranker found. The entry with `source: self` stands for the reranker in training.
        if self.dev is not None:
            self.dev.check(
                kind="rerank",
                requirement="a reranker in training orders the candidates of others: "
                "[{kind: saved, rankings: FOLDER}, {kind: rerank, source: self, keep: 20}]",
            )
        return self


def _refuse_in_batch(loss: Loss, reason: str) -> None:
    """Refuse an InfoNCE with in-batch negatives alone, where a batch has none.

    Such a loss is always 0, so the model would learn nothing from it.

    Args:
        loss: The loss of the stage. It may contain other losses.
        reason: Why there are no in-batch negatives.
    """
    for part in flatten_loss(loss):
        if isinstance(part, InfoNCE) and part.negatives == "in_batch":
            raise ValueError(f"loss: negatives: in_batch leaves no negatives, because {reason}")


def _is_small_on_cpu(config: Train, accelerator: Accelerator) -> bool:
    """Return whether the model trains on a CPU, and is so small that a batch takes no minutes."""
    if accelerator.device.type != "cpu" or is_quantized(config.adapter) or shards_state():
        return False
    model = load_model(config, torch.device("meta"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return num_parameters <= _MAX_PARAMETERS_ON_CPU


def load_model(config: Train, device: torch.device) -> Encoder | Reranker:
    """Load the model that training starts from, and add the adapter if there is one.

    Args:
        config: Settings of the training stage.
        device: Device of the model. On the device meta, the model has shapes but no weights.

    Returns:
        The model to train. Its frozen weights have `requires_grad` set to false.

    Raises:
        SkilltrainError: The model cannot be loaded, or does not fit the settings.
    """
    # The weights in training may need another number format than the settings of the model say.
    source = config.model.model_copy(update={"precision": _weight_precision(config)})
    set_seed(config.training.seed)  # for new layers
    # An adapter may need the frozen base model in 4 bits (QLoRA). `shards_state` says whether FSDP2
    # or DeepSpeed splits the training state over the ranks.
    options = quantizing_options(config.adapter, sharded=shards_state())
    if isinstance(source, EncoderConfig):
        model = load_encoder(source, device, options)
        # The loss Matryoshka trains the first d coordinates of the vectors, for each d in `dims`.
        for loss in flatten_loss(config.loss):
            if isinstance(loss, Matryoshka) and max(loss.dims) > model.dim:
                fault = f"{max(loss.dims)} is more than the encoder's {model.dim}"
                raise SkilltrainError("exceeds-model", fault, where="loss.dims")
    else:
        model = load_reranker(source, device, options, new_head=True)
    if config.training.freeze_embeddings:
        model.network.get_input_embeddings().requires_grad_(False)
    if config.adapter is not None:
        add_adapter(model.network, config.adapter)
        if isinstance(model, Encoder):
            # Only the adapter trains, because a saved adapter does not hold the projection.
            model.projection.requires_grad_(False)
        # By default, peft casts the inputs of an adapter to float32. Training in bfloat16 runs
        # under autocast, which would cast the inputs back, so leave out peft's cast.
        if config.training.dtype_on(default_device()) == torch.bfloat16:
            keep_input_dtype(model.network)
    return model


def _weight_precision(config: Train) -> str:
    """Return the number format of the weights in training."""
    if config.adapter is None:
        # All weights train. In bfloat16, most of AdamW's updates are too small to change a weight.
        return "float32"
    if "precision" in config.model.model_fields_set:
        return config.model.precision  # the user has chosen

    # The weights are frozen. Load them in the dtype of the computation, because autocast would
    # convert them in every micro-batch. Ask the default device, because the model may be on the
    # device meta, where nothing is computed.
    dtype = config.training.dtype_on(default_device())
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def save_trained(
    config: Train,
    checkpoint: Path,
    out: Path,
    summary: Mapping[str, Any],
    adapter_only: bool = False,
) -> None:
    """Save the model of a checkpoint, with its model card.

    Args:
        config: Settings of the training stage.
        checkpoint: Folder of the checkpoint.
        out: Folder for the model.
        summary: Summary of the training run, for the card.
        adapter_only: Whether to save the adapter (LoRA) alone, without a card. Otherwise the
            adapter is merged into the weights.
    """
    # Use the CPU, because the GPU may still hold the model.
    model = load_model(config, torch.device("cpu"))
    # The checkpoint is of the step module, so the names of its weights start with `model.`.
    load_weights(model, prefix="model.", checkpoint=checkpoint)
    if adapter_only:
        save_adapter(model, out, config.model.source)
        return
    if config.adapter is not None:
        merge_adapter(model.network)
    recipe = config.model_dump(mode="json")
    record = RunRecord(model.settings, recipe, summary, run=config.out, model=model)
    save_model(model.eval(), out, config.model.source, model_card(record))


def load_data(config: Train) -> TrainingSet:
    """Read and check the lists, and cluster near-duplicate skills if in-batch negatives need it.

    Prints how many lists have fewer negatives than the settings ask for.
    """
    min_similarity = None  # no clusters
    is_encoder = isinstance(config, TrainEncoder)
    if is_encoder and config.in_batch_negatives and config.in_batch_mask == "clusters":
        min_similarity = config.near_duplicates
    data = load_training_set(config.data, min_similarity)
    check_teacher_scores(data, config.loss)

    num_negatives = config.training.num_negatives or 0
    num_short = sum(each.is_positive.count(False) < num_negatives for each in data.lists)
    if num_short:
        say(
            f"{num_short:,} of {len(data.lists):,} lists have fewer negatives than "
            f"training.num_negatives={num_negatives}; all negatives of these lists are used"
        )
    return data


def open_step(
    config: Train,
    data: TrainingSet,
    device: torch.device,
    token_cache: Path | None = None,
    sharded: bool = False,
) -> StepModule:
    """Load the model, and return the module that computes its loss.

    Args:
        config: Settings of the training stage.
        data: The training set.
        device: Device of the model. It may be meta.
        token_cache: Folder that keeps token ids between runs. None: they are not kept.
        sharded: Whether ranks will hold shards of the model (FSDP2, ZeRO-3).
    """
    model = load_model(config, device)
    training = config.training
    settings = StepSettings(
        token_budget=training.token_budget_on(default_device()),  # `device` may be meta
        recompute=bool(training.recompute),
        token_cache=token_cache,
        varlen=training.varlen,
        two_pass=training.two_pass,
        is_sharded=sharded,
    )
    if isinstance(config, TrainEncoder) and isinstance(model, Encoder):
        settings = replace(
            settings,
            in_batch=config.in_batch_negatives,
            in_batch_mask=config.in_batch_mask,
            late_interaction=config.late_interaction,
        )
        # An encoder may read a window of each skill's body, not the whole body.
        return EncoderStep(model, config.loss, on_best_windows(data, model.settings), settings)
    assert isinstance(config, TrainReranker) and isinstance(model, Reranker)
    return RerankerStep(model, config.loss, data, settings)


def check_held_out(config: Train, data: TrainingSet) -> dict[str, int]:
    """Check that the lists contain no queries or answers of the benchmarks of the recipe.

    The queries and the positives of the lists are compared with the benchmarks of `held_out`. Only
    the queries are compared with the dev benchmark, because dev queries may share gold skills with
    training queries.

    Returns:
        Number of contaminated lists by summary key. There is no key for a benchmark that the recipe
        lacks.

    Raises:
        SkilltrainError: A list is contaminated, and the recipe does not allow it.
    """
    source = config.data
    dev = config.dev
    counts = {}
    if source.held_out:
        benchmarks = open_benchmarks(source.held_out, source.pool, need_golds=True)
        fix = _removal_advice(source, source.held_out)
        counts["num_contaminated_lists"] = _check_contamination(benchmarks, data, source, fix)
    if dev is not None:
        benchmark = load_benchmark(dev.benchmark, dev.split)
        queries_only = HeldOutBenchmark(benchmark.name, benchmark.tasks, golds=())
        limits = "limits.name=false limits.jaccard=null "  # switch off the comparison of skills
        advice = _removal_advice(source, [dev.benchmark], limits)
        fix = f"choose another dev.split, or {advice}"
        counts["num_lists_of_dev_queries"] = _check_contamination([queries_only], data, source, fix)
    return counts


def _removal_advice(source: ListsSource, benchmarks: Sequence[Path], limits: str = "") -> str:
    """Return advice for the user: run a command that removes contaminated lists.

    Args:
        source: The lists.
        benchmarks: Folders of the benchmarks.
        limits: Further arguments of the command.
    """
    queries = source.lists if isinstance(source.lists, Path) else "FOLDER"  # one run per folder
    names = ", ".join(map(str, benchmarks))
    command = f"skilltrain decontaminate pool={source.pool} queries={queries}"
    return f"run `{command} 'benchmarks=[{names}]' {limits}out=…` and train on what it writes"


def _check_contamination(
    benchmarks: Sequence[HeldOutBenchmark], data: TrainingSet, source: ListsSource, fix: str
) -> int:
    """Refuse or only count lists that contain a query or a gold skill of a benchmark.

    Args:
        benchmarks: The benchmarks.
        data: The lists.
        source: Settings of the lists, which choose between the error and a warning.
        fix: What the user can do, for the error.

    Returns:
        Number of contaminated lists, if the settings allow them.

    Raises:
        SkilltrainError: A list is contaminated, and the settings do not allow it.
    """
    contaminations = _find_contaminations(benchmarks, data)
    if not contaminations:
        return 0
    # A list may be contaminated in several ways, but counts once.
    num_lists = len({contamination.query_id for contamination in contaminations})
    fault = f"{num_lists:,} list(s) are contaminated {_describe_contaminations(contaminations)}"
    if source.contamination == "refuse":
        folders = ", ".join(map(str, source.folders))
        fix += ", or set data.contamination=allow"
        raise SkilltrainError("contaminated", fault, where=folders, fix=fix)
    say(f"warning: {fault}; figures on that benchmark will be too high (data.contamination: allow)")
    return num_lists


def _describe_contaminations(contaminations: Sequence[Dropped]) -> str:
    """Count the contaminated lists by filter, and name the first one as an example.

    A filter is the way in which a list resembles a benchmark, such as an equal name of a skill.

    Args:
        contaminations: Rows of DROPPED, one for each resemblance. At least one.
    """
    # A list counts once for each filter that finds it. GROUNDS lists the filters in order.
    lists_and_filters = {(each.query_id, each.filter) for each in contaminations}
    num_by_filter = Counter(filter_name for _, filter_name in lists_and_filters)
    counts = []
    for filter_name in GROUNDS:
        if num_by_filter[filter_name]:
            counts.append(f"{filter_name} {num_by_filter[filter_name]:,}")

    first = contaminations[0]
    example = f"query {first.query_id}"
    if first.skill_id:  # a positive resembles a gold skill, or else the query resembles a query
        example += f", positive {first.skill_id}"
    return f"({', '.join(counts)}); the first, {example}: {first.reason}"


def _find_contaminations(
    benchmarks: Sequence[HeldOutBenchmark], data: TrainingSet
) -> list[Dropped]:
    """Find training queries and positives that resemble a query or gold skill of a benchmark.

    Returns:
        A row of DROPPED for each resemblance, in the order of the training lists.
    """
    index = BenchmarkIndex(benchmarks, ContaminationLimits())
    # A skill may be in many lists, so its matches are kept.
    find_matches = cache(lambda skill_id: index.skill_matches(data.skills[skill_id]))
    contaminations = []
    for training_list in data.lists:
        skill_matches = []
        candidates = zip(training_list.skill_ids, training_list.is_positive, strict=True)
        for skill_id, is_positive in candidates:
            if is_positive:
                skill_matches += find_matches(skill_id)
        contaminations += index.contaminations(
            training_list.query_id, training_list.query, skill_matches
        )
    return contaminations


def check_fits(config: Train) -> None:
    """Check that weights, gradients and the optimiser fit on the GPU, before a weight is read.

    Activations need more memory, which is not counted. 4-bit weights are not checked, because
    weights are quantised only while they are loaded.

    Raises:
        SkilltrainError: They do not fit.
    """
    device = default_device()
    if device.type != "cuda" or is_quantized(config.adapter):
        return
    model = load_model(config, torch.device("meta"))
    needed_bytes = held_bytes(model, config.training.optimizer)
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    if needed_bytes > gpu_bytes:
        fault = (
            f"its weights, gradients and optimiser take {needed_bytes / GIB:.1f} GiB on each "
            f"GPU, which has {gpu_bytes / GIB:.1f}"
        )
        fix = "train an adapter (LoRA)" if config.adapter is None else "set adapter.quantize=nf4"
        fix += ", or shard the model over GPUs by launch/fsdp2.yaml"
        raise SkilltrainError("out-of-memory", fault, where=config.model.source, fix=fix)
