"""The training loop, which encoders and rerankers share."""

import math
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from skilltrain.errors import SkilltrainError, StoppedError
from skilltrain.models.cpu_linear import train_with_onednn
from skilltrain.models.micro_batches import BATCHES_PER_TRIM, return_free_memory
from skilltrain.plugins import load_plugin
from skilltrain.runs import CHECKPOINTS
from skilltrain.terminal import progress, say
from skilltrain.training.checkpoint import (
    Position,
    best_checkpoint,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from skilltrain.training.dev import Dev
from skilltrain.training.engine import check_folder_is_shared, shards_state, shards_weights
from skilltrain.training.hooks import Hook
from skilltrain.training.log import TrainingLog, note_of, open_trackers
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import StepModule
from skilltrain.training.training_set import TrainingList

GIB = 2**30
Batch = Sequence[TrainingList]
_MAX_QUERIES_IN_ERROR = 8
_STEPS_PER_CHECKPOINT = 50
_SECONDS_PER_CHECKPOINT = 60  # on a CPU, where a step takes seconds
_MAX_SECONDS_EARLIER = 10  # for the batches before the largest, in a probe


@dataclass(frozen=True)
class Run:
    """The folder of a training run, and its dev benchmark.

    Attributes:
        folder: Folder of the log and the checkpoints.
        resume: Whether to continue from the newest checkpoint.
        recipe: Settings of the stage, for the trackers.
        dev: Benchmark for evaluations during training. None: no evaluations.
    """

    folder: Path
    resume: bool
    recipe: Mapping[str, Any]
    dev: Dev | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


def sample_epoch(lists: Sequence[TrainingList], rng: np.random.Generator) -> list[TrainingList]:
    """Return the lists of one epoch, each as often as its weight says.

    Of all lists with weight 2.3, for example, a random 30% occur three times and the others twice.
    """
    lists_by_weight = {}
    for training_list in lists:
        lists_by_weight.setdefault(training_list.weight, []).append(training_list)

    # Repeat each list by the whole part of its weight. The fraction decides how many random lists
    # occur once more.
    sample = []
    for weight, group in lists_by_weight.items():
        sample += group * int(weight)
        fraction = weight % 1
        if fraction:
            num_extra = max(1, round(fraction * len(group)))
            positions = rng.choice(len(group), num_extra, replace=False)
            sample += [group[position] for position in positions]
    return sample


def step_batches(
    lists: Sequence[TrainingList], config: TrainingConfig
) -> Iterator[Sequence[Batch]]:
    """Yield the batches of each optimiser step, for all epochs.

    With batch_size 8 and accumulation 4, for example, a step has 4 batches of 8 lists.
    The order of the lists, and the sample of their negatives, depend only on the seed and the
    epoch.

    Args:
        lists: Training lists, each a query with its candidates.
        config: Settings of the training run.
    """
    for epoch in range(config.epochs):
        rng = np.random.default_rng([config.seed, epoch])
        sample = sample_epoch(lists, rng)
        shuffled = [sample[position] for position in rng.permutation(len(sample))]
        if config.num_negatives is not None:
            shuffled = [each.with_negatives(config.num_negatives, rng) for each in shuffled]

        batches = _split(shuffled, config.batch_size)
        # If the recipe wants batches of one origin (who wrote the query), make the batches anew:
        # split the lists of each origin separately, and shuffle the batches.
        if config.one_origin_batches:
            batches = []
            get_origin = attrgetter("origin")
            for _, group in groupby(sorted(shuffled, key=get_origin), key=get_origin):
                batches += _split([*group], config.batch_size)
            batches = [batches[position] for position in rng.permutation(len(batches))]
        yield from _split(batches, config.accumulation)


def _split(items: Sequence[Any], size: int) -> list[Any]:
    """Split items into parts of `size`. The last part may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def new_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """Return the optimiser of the parameters that train, with weight decay for matrices only.

    Each group of parameters also has `rate_scale`, the factor of its learning rate.

    Args:
        model: The model. Parameters without `requires_grad` are left out.
        config: Settings of the training run.
    """
    scales = rate_scales(model, config.layer_decay)
    groups: dict[tuple[float, float], dict[str, Any]] = {}  # by weight decay and factor
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Biases and norms have one dimension, and no weight decay.
            decay = config.weight_decay if parameter.ndim > 1 else 0.0
            scale = scales[name]
            group = {"params": [], "weight_decay": decay, "rate_scale": scale}
            # Add the parameter to the group with its decay and scale. The new group is used only
            # if there is no such group yet.
            groups.setdefault((decay, scale), group)["params"].append((name, parameter))
    return config.optimizer.create([*groups.values()], config.learning_rate)


def rate_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by its name.

    The factor is 1 at the top of the network, and is multiplied by `layer_decay` at each layer
    below. Heads, projections and final norms are above the layers, and token embeddings below.

    For a network of 2 layers without a head and `layer_decay` 0.9:
        encoder.layer.1.output.dense.bias → 1
        encoder.layer.0.output.dense.bias → 0.9
        embeddings.word_embeddings.weight → 0.81
    """
    heights: dict[str, float] = {}
    for name, _ in model.named_parameters():
        # The first number in a name is that of the layer. Modules of an encoder's projection have
        # numbers too, but are above all layers.
        is_projection = name.removeprefix("model.").startswith("projection.")
        layer = re.search(r"\.(\d+)\.", name)
        if layer and not is_projection:
            heights[name] = int(layer[1])
        else:
            heights[name] = -1 if "embed" in name else math.inf
    levels = sorted({*heights.values()}, reverse=True)  # the top first
    return {name: layer_decay ** levels.index(height) for name, height in heights.items()}


def learning_rate_factor(step: int, num_steps: int, config: TrainingConfig) -> float:
    """Return the share of the peak learning rate at `step`, counted from 0.

    The rate rises linearly during the warm-up, and then follows the scheduler.

    Args:
        step: Number of the step.
        num_steps: Number of steps of the run.
        config: Settings of the training run.
    """
    num_warmup = math.ceil(config.warmup_share * num_steps)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    num_decay = max(1, num_steps - num_warmup)
    # The scheduler gets the share of the steps after the warm-up that are done.
    return config.scheduler.factor((step - num_warmup) / num_decay)


def train(
    accelerator: Accelerator, step_module: StepModule, config: TrainingConfig, run: Run
) -> tuple[Position, Path]:
    """Train the model in `step_module` on its lists.

    Returns:
        The position at the end, and the checkpoint to use: the best on the dev benchmark, or the
        last one without a benchmark.

    Raises:
        SkilltrainError: The loss or the gradient is not finite, or the gradient is too large. The
            error names the step's queries.
        StoppedError: Ctrl-C or SIGTERM arrived. A checkpoint has been saved.
    """
    # Refuse to mix the checkpoints of an earlier run with new ones.
    check_folder_is_shared(accelerator, run.checkpoints)
    old_checkpoints = checkpoints(run.checkpoints)
    if old_checkpoints and not run.resume:
        raise SkilltrainError(
            "unfinished-run",
            "checkpoints of an earlier run lie here",
            where=old_checkpoints[-1],
            fix="--resume, or another out",
        )

    training = Training(accelerator, step_module, config, run)
    training.run_remaining_steps()
    checkpoint = best_checkpoint(run.checkpoints) or checkpoints(run.checkpoints)[-1]
    return training.position, checkpoint


class Training:
    """A training run in progress.

    Attributes:
        step_module: The model with its loss. Its data and token counts are read here.
        model: The step module wrapped by the launcher (DDP, FSDP2, DeepSpeed). It computes losses.
        optimizer: The optimiser, wrapped by the launcher.
        hooks: Code of the user that runs after steps and evaluations.
        position: Progress of the run.
        batches: Batches of the current step, with the lists of all ranks.
        seconds_at_checkpoint: Seconds of the run until its last checkpoint.
    """

    def __init__(
        self, accelerator: Accelerator, step: StepModule, config: TrainingConfig, run: Run
    ) -> None:
        """Prepare the model and the optimiser. To resume, restore the newest checkpoint.

        Raises:
            SkilltrainError: The newest checkpoint cannot be read, or does not fit the model.
        """
        set_seed(config.seed, device_specific=True)  # another dropout mask on each rank
        if accelerator.device.type == "cpu" and not shards_weights(accelerator):
            train_with_onednn(step)  # faster linear layers

        self.accelerator = accelerator
        self.step_module = step
        self.config = config
        self.run = run
        optimizer = new_optimizer(step, config)
        self.model, self.optimizer = accelerator.prepare(step.train(), optimizer)
        self.batches: Sequence[Batch] = ()
        self.hooks: list[Hook] = [load_plugin("hook", name)() for name in config.hooks]
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            # DeepSpeed updates the weights within `backward`, and the norm of the gradient is not
            # known earlier. So a hook checks the step just before the optimiser's update. The hook
            # belongs to the inner optimiser, whose `step` is called by DeepSpeed's wrapper.
            optimizer.register_step_pre_hook(self._check_deepspeed_step)

        position = None
        if run.resume:
            position = load_checkpoint(accelerator, self.model, self.optimizer, run.checkpoints)
        # Without a checkpoint, the run starts at step 0.
        self.position = position or Position()
        self.seconds_at_checkpoint = self.position.seconds
        # A new run has no states of hooks yet, so the lists may differ in length. A resumed run has
        # the same hooks, because `--resume` refuses another recipe.
        for hook, state in zip(self.hooks, self.position.hook_states, strict=False):
            hook.load_state_dict(state)

        # A resumed run keeps the token budget of its first start. A different budget would change
        # the rounding of sums. The budget is 0 in a new run.
        token_budget = self.position.token_budget or step.settings.token_budget
        self.position.token_budget = token_budget
        step.settings = replace(step.settings, token_budget=token_budget)

    def run_remaining_steps(self) -> None:
        """Run the steps after `position`. Log each step, and evaluate and save when it is time.

        Raises:
            StoppedError: Ctrl-C or SIGTERM arrived. A checkpoint has been saved.
        """
        config = self.config
        run = self.run
        position = self.position
        steps = [*step_batches(self.step_module.data.lists, config)]
        num_steps = len(steps)
        if position.step > num_steps:
            fault = f"a checkpoint is of step {position.step}, but the run has {num_steps} steps"
            raise SkilltrainError("damaged-checkpoint", fault, where=run.checkpoints)
        steps_per_epoch = math.ceil(num_steps / config.epochs)
        start_time = time.monotonic() - position.seconds  # as if it had never stopped
        trackers = open_trackers(config.trackers, run.folder, run.recipe)
        with (
            out_of_memory_in_one_line(config, self.step_module),
            TrainingLog(run.folder / "train_log.jsonl", position.step, trackers) as log,
            StopRequest() as stop,
            progress("training", num_steps, position.step) as show,
        ):
            if can_probe(self.accelerator):  # a lack of memory shows at once
                self.probe_memory(largest_batch(self.step_module, chain.from_iterable(steps)))

            remaining_steps = steps[position.step :]
            for batches in remaining_steps:
                if self._is_patience_exhausted():
                    break

                # Run and log one step.
                self._set_learning_rate(num_steps)
                metrics = self._update(batches)  # also adds 1 to `position.step`
                position.seconds = time.monotonic() - start_time
                metrics = {"epoch": position.step / steps_per_epoch, **metrics}
                log.write(position.step, metrics)
                show(position.step, note_of(metrics))

                # Evaluate and save.
                is_last = position.step == num_steps
                is_best = self._evaluate_if_due(is_last, log)
                is_finished = is_last or self._is_patience_exhausted()
                # A signal may reach ranks in different steps, but all ranks must save together.
                flags = [float(stop.signal_number), float(self._is_checkpoint_due())]
                is_stopped, is_due = (self._sum_over_ranks(flags) > 0).tolist()
                if is_stopped or is_finished or is_best or is_due:
                    self._save()

                if is_stopped and not is_finished:
                    raise StoppedError(
                        "interrupted",
                        f"interrupted after step {position.step} of {num_steps}; "
                        "a checkpoint is saved",
                        where=run.folder,
                        fix="run the same command with --resume to go on",
                        # The signal may have reached only another rank.
                        number=stop.signal_number or signal.SIGTERM,
                    )

    def _is_checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due: after so many steps, or on a CPU after a minute."""
        save_every = self.config.save_every
        if save_every is None and self.accelerator.device.type == "cpu":
            return self.position.seconds - self.seconds_at_checkpoint >= _SECONDS_PER_CHECKPOINT
        return self.position.step % (save_every or _STEPS_PER_CHECKPOINT) == 0

    def _is_patience_exhausted(self) -> bool:
        """Return whether the last `patience` evaluations were no better than the best one."""
        dev = self.run.dev
        if dev is None or dev.config.patience is None:
            return False
        return self.position.best.num_bad >= dev.config.patience

    def _set_learning_rate(self, num_steps: int) -> None:
        """Set the learning rate of the next step.

        It depends only on the number of the step, so checkpoints need not save it.
        """
        factor = learning_rate_factor(self.position.step, num_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor * group["rate_scale"]

    def _update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Run one optimiser step, and return its metrics by name.

        Args:
            batches: Batches of the step. Each one holds the lists of all ranks.
        """
        # Compute the gradients, check them, and change the weights.
        start_time = time.monotonic()
        self.batches = batches  # for the hook `_check_deepspeed_step`
        num_queries = sum(len(batch) for batch in batches)
        mean_loss = self._backward(batches, num_queries)
        grad_norm = self._clip_gradients()
        _check_step(mean_loss, grad_norm, batches, self.config.stop_grad_norm)
        if grad_norm == 0 and self.position.step == 0:
            say("warning: the gradient of the first step is 0: the model learns nothing from it")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        # Add the tokens of all ranks, without and with padding.
        count = self.step_module.count
        counts = self._sum_over_ranks([count["tokens"], count["padded_tokens"]])
        num_tokens, num_padded_tokens = counts.tolist()
        count.clear()

        # Update the position.
        self.position.step += 1
        self.position.loss = mean_loss
        self.position.queries += num_queries
        self.position.tokens += num_tokens

        seconds = time.monotonic() - start_time
        metrics = {
            "loss": mean_loss,
            **self._mean_scalars(num_queries),
            "learning_rate": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": grad_norm,  # before clipping
            "queries_per_second": num_queries / seconds,
            "tokens_per_second": num_tokens / seconds,
            "padding_share": 1 - num_tokens / num_padded_tokens,
        }
        device = self.accelerator.device
        if device.type == "cuda":
            metrics["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        for hook in self.hooks:
            hook.on_step(self.position.step, metrics, self.step_module.model)
        return metrics

    def _backward(self, batches: Sequence[Batch], num_queries: int) -> float:
        """Accumulate the gradients of a step, and return its loss, the mean over all queries.

        Args:
            batches: Batches of the step. Each one holds the lists of all ranks.
            num_queries: Number of queries in all batches.
        """
        accelerator = self.accelerator
        # The model returns the sum over this rank's queries, and the mean is over `num_queries`.
        # The launcher divides the gradients by num_processes, so they are multiplied by it first.
        loss_scale = accelerator.num_processes / num_queries

        # Ranks that hold shards (FSDP2, ZeRO) exchange gradients after every batch. Without
        # this exchange, each rank would hold the whole gradient until the last batch.
        exchanges_every_batch = shards_state()

        scaled_sum = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(batches):
            is_last = batch is batches[-1]
            # DeepSpeed updates the weights within `backward` if `sync_gradients` is true.
            accelerator.sync_gradients = is_last
            exchanges_gradients = is_last or exchanges_every_batch
            context = nullcontext() if exchanges_gradients else accelerator.no_sync(self.model)
            with context:
                loss = self.model(batch) * loss_scale
                accelerator.backward(loss)
            scaled_sum += loss.detach().float()
            # Count batches, not steps: one step of a reranker can have many batches.
            num_earlier_batches = self.position.step * len(batches) + number
            if num_earlier_batches % BATCHES_PER_TRIM == 0:
                return_free_memory(accelerator.device)

        # The launcher divides gradients only. The loss must be divided here.
        return float(self._sum_over_ranks(scaled_sum)) / accelerator.num_processes

    def _mean_scalars(self, num_queries: int) -> dict[str, float]:
        """Return the means over queries of the numbers that the loss recorded in this step."""
        scalars = self.step_module.scalars
        if not scalars:
            return {}
        names = sorted(scalars)  # all ranks record the same names, and add them in this order
        sums = self._sum_over_ranks([float(scalars[name]) for name in names])
        means = (sums / num_queries).tolist()
        scalars.clear()
        return {f"loss/{name}": mean for name, mean in zip(names, means, strict=True)}

    def _check_deepspeed_step(self, *_: Any) -> None:
        """Check the norm of the gradient before DeepSpeed changes the weights.

        It changes them within `backward`. If the loss is not finite, neither is the norm, so only
        the norm is checked here.
        """
        zero_optimizer: Any = self.model.optimizer
        grad_norm = float(zero_optimizer._global_grad_norm)
        _check_step(0.0, grad_norm, self.batches, self.config.stop_grad_norm)

    def _clip_gradients(self) -> float:
        """Clip the gradients, and return their norm before clipping.

        Under FSDP2 the norm is a DTensor, of which each rank has a part.
        """
        norm: Any = self.accelerator.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _evaluate_if_due(self, is_last: bool, log: TrainingLog) -> bool:
        """Evaluate the model on the dev benchmark every few steps, and after the last step.

        All ranks must call this.

        Args:
            is_last: Whether the last step has been done.
            log: Log for the metrics.

        Returns:
            Whether the model was evaluated, and is better than in all evaluations before.
        """
        dev = self.run.dev
        if dev is None:
            return False
        num_steps_done = self.position.step
        is_due = is_last or num_steps_done % dev.config.every == 0
        if not is_due:
            return False

        self.model.eval()
        with torch.no_grad():
            metrics = dev.evaluate(self.model)
        self.model.train()
        # `count` counts the tokens of training for the log. Drop the tokens of the evaluation.
        self.step_module.count.clear()

        # `self.model` is the step module in the launcher's wrapper, and includes the loss. Hooks
        # get the encoder or reranker itself.
        for hook in self.hooks:
            hook.on_eval(num_steps_done, metrics, self.step_module.model)
        log.write_dev(num_steps_done, metrics)
        say(f"step {num_steps_done}: {dev.line(metrics)}")
        return self.position.best.update(num_steps_done, dev.config.metric, metrics)

    def _save(self) -> None:
        self.seconds_at_checkpoint = self.position.seconds
        self.position.hook_states = [hook.state_dict() for hook in self.hooks]
        folder = self.run.checkpoints
        keep = self.config.keep_checkpoints
        save_checkpoint(self.accelerator, self.model, self.optimizer, folder, self.position, keep)

    def _sum_over_ranks(self, values: Any) -> Tensor:
        values = torch.as_tensor(values, device=self.accelerator.device)
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    def probe_memory(self, batch: Batch, earlier_batches: Sequence[Batch] = ()) -> float:
        """Run the largest batch forward and backward, so that a lack of memory shows at once.

        Weights and random states do not change, and the gradients are dropped. All ranks must call
        this.

        Args:
            batch: The largest batch.
            earlier_batches: Batches to run first, for up to ten seconds. On a CPU each new length
                of the texts takes more memory.

        Returns:
            Seconds of one forward and backward pass.
        """
        device = self.accelerator.device
        # The tensors in `moments` occupy the memory that the optimiser will need.
        moments = self._placeholder_moments()

        rng_devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=rng_devices):
            deadline = time.monotonic() + _MAX_SECONDS_EARLIER
            for number, earlier_batch in enumerate(earlier_batches):
                # All ranks stop at the same batch, because the backward pass waits for every rank.
                if self._sum_over_ranks([float(time.monotonic() > deadline)]).any():
                    break
                self.accelerator.backward(self.model(earlier_batch))
                self.optimizer.zero_grad(set_to_none=True)
                if number % BATCHES_PER_TRIM == 0:
                    return_free_memory(device)
            # If a step has several batches, the later ones run while the gradients of the first are
            # held. So the largest batch runs twice, and its second run is timed.
            if self.config.accumulation > 1:
                self.accelerator.backward(self.model(batch))
            _wait_for(device)
            start_time = time.monotonic()
            self.accelerator.backward(self.model(batch))
        _wait_for(device)
        seconds = time.monotonic() - start_time
        self.optimizer.zero_grad(set_to_none=True)
        self.step_module.count.clear()  # drop the tokens of this batch
        self.step_module.scalars.clear()
        del moments

        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) / GIB
            total = torch.cuda.get_device_properties(device).total_memory / GIB
            say(f"the largest batch takes {peak:.1f} of the GPU's {total:.1f} GiB")
        return seconds

    def _placeholder_moments(self) -> list[Tensor]:
        """Return tensors as large as the optimiser's state, which the first step creates.

        A resumed run has the state already, and needs no tensors.
        """
        moments = []
        if not self.optimizer.state:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    num_bytes = local.numel() * self.config.optimizer.bytes_per_weight
                    # Empty tensors would not do: a CPU only reserves their memory.
                    moments.append(local.new_ones(num_bytes, dtype=torch.uint8))
        return moments


def _wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work. GPU calls return earlier."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check_step(
    loss: float, grad_norm: float, batches: Sequence[Batch], max_grad_norm: float
) -> None:
    """Check the loss and the gradient of a step before the gradient changes the weights.

    Args:
        loss: Mean loss of the step.
        grad_norm: Norm of the gradient, before clipping.
        batches: Batches of the step: several, if gradients accumulate. The error names their
            queries.
        max_grad_norm: Largest norm that is allowed (`training.stop_grad_norm`).

    Raises:
        SkilltrainError: The loss or the gradient is not finite, or the gradient is too large.
    """
    if not math.isfinite(loss):
        fault = "the loss is not a finite number"
    elif not math.isfinite(grad_norm):
        fault = "the gradient is not a finite number"
    elif grad_norm > max_grad_norm:
        limit = f"training.stop_grad_norm {max_grad_norm:.3g}"
        fault = f"the gradient norm {grad_norm:.3g} exceeds {limit}"
    else:
        return  # the step is sound

    # A step may have hundreds of queries, so name only the first.
    query_ids = [training_list.query_id for training_list in chain.from_iterable(batches)]
    names = ", ".join(query_ids[:_MAX_QUERIES_IN_ERROR])
    if len(query_ids) > _MAX_QUERIES_IN_ERROR:
        names += f", … ({len(query_ids)} in all)"
    raise SkilltrainError(
        "diverged",
        f"{fault} in a step with queries {names}",
        fix="look at these lists; a lower learning_rate or precision=float32 may help",
    )


def largest_batch(step: StepModule, batches: Iterable[Batch]) -> Batch:
    """Return the batch with the most tokens."""

    def num_tokens(batch: Batch) -> int:
        return sum(sum(step.lengths(training_list)) for training_list in batch)

    return max(batches, key=num_tokens)


def can_probe(accelerator: Accelerator) -> bool:
    """Return whether `Training` can run a batch only to measure its memory.

    On a CPU it would take too long, and DeepSpeed would update the weights in the backward pass.
    """
    uses_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return accelerator.device.type == "cuda" and not uses_deepspeed


@contextmanager
def out_of_memory_in_one_line(config: TrainingConfig, step: StepModule) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a SkilltrainError that suggests other settings.

    Args:
        config: Settings of the training run.
        step: The step module.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        fixes = [] if step.settings.recompute else ["training.recompute=true"]
        fixes.append(f"a training.token_budget below {step.settings.token_budget}")
        fixes.append(f"a model.max_tokens below {step.model.settings.max_tokens}")
        # A batch of one query cannot become smaller.
        if config.batch_size > 1:
            fixes.append(
                f"a training.batch_size below {config.batch_size} (with more accumulation)"
            )
        # With an adapter, only some parameters train.
        if all(parameter.requires_grad for parameter in step.parameters()):
            fixes.append("an adapter (LoRA)")
        raise SkilltrainError(
            "out-of-memory", "the GPU's memory has run out", fix=" or ".join(fixes)
        ) from error


class StopRequest:
    """Signal handlers that let the loop stop after the current step, on Ctrl-C or SIGTERM.

    A second Ctrl-C stops at once. A second SIGTERM does not: some batch systems send it to the
    launcher and to its workers, and the checkpoint must still be completed.

    Attributes:
        signal_number: Number of the signal that arrived; 0 if none did.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        # A second Ctrl-C meets the former handler, which stops at once.
        if number == signal.SIGINT:
            signal.signal(number, self._previous_handlers[number])
