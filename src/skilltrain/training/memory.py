"""Memory in a training: the plan, a probe before the first step, the peak, and one line where it runs out."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from skilltrain.errors import SkilltrainError
from skilltrain.models.activations import layer_bytes
from skilltrain.terminal import say
from skilltrain.training.settings import TrainConfig, TrainingConfig, load_model
from skilltrain.training.steps import EncoderStep, StepModule, TokenCount
from skilltrain.training.training_set import TrainingList

_GIB = 2**30
_ADAMW_BYTES = 8  # two float32 moments a trained parameter


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


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights, and of the gradients and AdamW's two moments of those that train."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in [*module.parameters(), *trained])
    return weights + _ADAMW_BYTES * sum(parameter.numel() for parameter in trained)


def check_fits(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise SkilltrainError, before any weight is read, where what training holds of each exceeds the GPU.

    A rank holds its part under FSDP2 and DeepSpeed. Activations come on top, so a training that passes may still not
    fit; of 4-bit weights, which are made as they load, nothing is known yet.
    """
    if accelerator.device.type != "cuda" or (config.adapter is not None and config.adapter.quantize != "none"):
        return
    is_shared = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    held = held_bytes(load_model(config, torch.device("meta"))) / (accelerator.num_processes if is_shared else 1)
    total = torch.cuda.get_device_properties(accelerator.device).total_memory
    if held > total:
        what = f"its weights, gradients and AdamW's moments take {held / _GIB:.1f} GiB on each GPU"
        lighter = "train an adapter (LoRA)" if config.adapter is None else "set adapter.quantize=nf4"
        fix = f"{lighter}, or share it by launch/fsdp2.yaml"
        raise SkilltrainError(f"{what}, which has {total / _GIB:.1f}", where=config.model.source, fix=fix)


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
