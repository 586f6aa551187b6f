"""Memory in a training: a probe before the first step, the peak, what a heap gives back, one line where it runs out."""

import ctypes
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from skilltrain.errors import SkilltrainError
from skilltrain.terminal import say
from skilltrain.training.settings import TrainingConfig
from skilltrain.training.steps import StepModule
from skilltrain.training.training_set import TrainingList

GIB = 2**30
_STEPS_KEPT = 3


def largest_batch(step: StepModule, batches: Iterable[Sequence[TrainingList]]) -> Sequence[TrainingList]:
    """The batch with the most tokens."""
    return max(batches, key=lambda batch: sum(sum(step.lengths(one)) for one in batch))


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most GiB that tensors have taken on this process's GPU; nothing on a CPU."""
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / GIB} if device.type == "cuda" else {}


def can_probe(accelerator: Accelerator) -> bool:
    """Whether memory can be probed, and run out: not on a CPU; DeepSpeed would step in the backward pass."""
    return accelerator.device.type == "cuda" and accelerator.distributed_type != DistributedType.DEEPSPEED


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
    device = accelerator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        accelerator.backward(model(largest_batch(step_module, batches)))
    optimizer.zero_grad(set_to_none=True)
    step_module.count.clear()
    del moments
    if device.type == "cuda":
        peak, total = peak_memory(device)["peak_gib"], torch.cuda.get_device_properties(device).total_memory / GIB
        say(f"the largest batch takes {peak:.1f} of the GPU's {total:.1f} GiB")


def return_free_memory(step: int, device: torch.device) -> None:
    """On a CPU, every few steps, give back what glibc's heap holds free.

    Tensors of ever other lengths fragment it: a training of whole batches held 2.1 GB after 35 steps where 0.6 were in
    use, and went on growing.
    """
    if device.type == "cpu" and step % _STEPS_KEPT == 0 and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def out_of_memory_in_one_line(config: TrainingConfig, step: StepModule) -> Iterator[None]:
    """Within, a GPU whose memory runs out raises SkilltrainError, which says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = [] if step.settings.recompute else ["training.recompute=true"]
        fix.append(f"a training.token_budget below {step.settings.token_budget}")
        fix.append(f"a model.max_tokens below {step.model.settings.max_tokens}")
        if config.batch_size > 1:
            fix.append(f"a training.batch_size below {config.batch_size} (with more accumulation)")
        if all(parameter.requires_grad for parameter in step.parameters()):
            fix.append("an adapter (LoRA)")
        raise SkilltrainError("the GPU's memory has run out", fix=" or ".join(fix)) from error
