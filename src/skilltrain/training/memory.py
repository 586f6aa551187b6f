"""Memory in a training: the plan, a probe before the first step, the peak, and one line where it runs out."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError, safe_open
from torch import nn

from skilltrain.errors import SkilltrainError
from skilltrain.models.activations import layer_bytes
from skilltrain.models.loading import resolve_dtype, resolve_model
from skilltrain.terminal import say
from skilltrain.training.settings import TrainConfig, TrainingConfig
from skilltrain.training.steps import EncoderStep, StepModule, TokenCount
from skilltrain.training.training_set import TrainingList

_GIB = 2**30


def planned_activations(step: StepModule, batches: Iterable[Sequence[TrainingList]], dtype: torch.dtype) -> int:
    """Bytes that the batch with the most tokens needs beside weights and optimiser, all of it on one process.

    With `recompute` these are the inputs of all layers, and all of one layer for the largest micro-batch.
    """
    largest = _largest(step, batches)
    network = step.model.backbone if isinstance(step, EncoderStep) else step.model.network
    slots, config = step.slots(largest), network.config
    of_layer, num_layers = layer_bytes(network, dtype), config.num_hidden_layers
    if not step.settings.recompute:
        return round(sum(slots) * num_layers * of_layer)
    of_input = config.hidden_size * network.get_input_embeddings().weight.element_size()
    return round(sum(slots) * num_layers * of_input + max(slots) * of_layer)


def check_fits(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise SkilltrainError, before anything is loaded, where the weights and what belongs to each exceed the GPU.

    Each weight that trains takes 16 bytes: itself, its gradient and AdamW's two moments, in float32. A rank holds its
    part of them under FSDP2 and DeepSpeed. Activations come on top, so a training that passes may still not fit.
    """
    device, launch, adapter = accelerator.device, accelerator.distributed_type, config.adapter
    if device.type != "cuda":
        return
    if adapter is None:
        size, what, fix = 16.0, "its weights with their gradients and AdamW's moments", "train an adapter (LoRA)"
    else:
        size = 0.5 if adapter.quantize == "nf4" else resolve_dtype(config.model.precision, device).itemsize
        what, fix = "its frozen weights", "a smaller model, model.precision=bfloat16 or adapter.quantize=nf4"
    is_shared = launch in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    held = num_weights(resolve_model(config.model.source)) * size / (accelerator.num_processes if is_shared else 1)
    total = torch.cuda.get_device_properties(device).total_memory
    if held > total:
        what = f"{what} take {held / _GIB:.1f} GiB on each GPU, which has {total / _GIB:.1f}"
        raise SkilltrainError(what, where=config.model.source, fix=f"{fix}, or share it by launch/fsdp2.yaml")


def num_weights(folder: Path) -> int:
    """How many numbers the weight files of a model folder hold, by their headers; 0 where they cannot be read."""
    count = 0
    with suppress(SafetensorError, OSError):
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def _largest(step: StepModule, batches: Iterable[Sequence[TrainingList]]) -> Sequence[TrainingList]:
    """The batch with the most tokens."""
    return max(batches, key=lambda batch: sum(sum(step.lengths(one)) for one in batch))


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most GiB that tensors have taken on this process's GPU; nothing on a CPU."""
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / _GIB} if device.type == "cuda" else {}


def probe_memory(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step_module: StepModule,
    batches: Iterable[Sequence[TrainingList]],
) -> None:
    """Run the batch with the most tokens forward and backward once: what does not fit fails now, not after hours.

    It changes nothing: no weight moves, gradients are dropped and random states put back. AdamW's two moments, which
    come with the first step, have their room taken meanwhile. All ranks must call it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [] if optimizer.state else [torch.empty_like(parameter) for parameter in trained for _ in range(2)]
    largest, device = _largest(step_module, batches), accelerator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        accelerator.backward(model(largest))
    optimizer.zero_grad(set_to_none=True)
    step_module.count = TokenCount()
    del moments
    if device.type == "cuda":
        peak, total = peak_memory(device)["peak_gib"], torch.cuda.get_device_properties(device).total_memory / _GIB
        say(f"the largest batch takes {peak:.1f} of the GPU's {total:.1f} GiB")


def can_probe(accelerator: Accelerator) -> bool:
    """Whether memory can be probed, and run out: not on a CPU; DeepSpeed would step in the backward pass."""
    return accelerator.device.type == "cuda" and accelerator.distributed_type != DistributedType.DEEPSPEED


@contextmanager
def out_of_memory_in_one_line(config: TrainingConfig, step_module: StepModule) -> Iterator[None]:
    """Within, a GPU whose memory runs out raises SkilltrainError, which says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        settings = step_module.settings
        first = [] if settings.recompute else ["training.recompute=true"]
        fix = [
            *first,
            f"a training.token_budget below {settings.token_budget}",
            f"a model.max_tokens below {step_module.model.settings.max_tokens}",
        ]
        if config.batch_size > 1:
            fix.append(f"a training.batch_size below {config.batch_size} (with more accumulation)")
        if all(parameter.requires_grad for parameter in step_module.parameters()):
            fix.append("an adapter (LoRA)")
        raise SkilltrainError("the GPU's memory has run out", fix=" or ".join(fix)) from error
