"""Groups texts of similar length into micro-batches, and runs a model on them."""

import ctypes
import platform
from collections.abc import Callable, Sequence, Sized
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TokenIds = Sequence[int] | np.ndarray
Texts = Sequence[TokenIds] | Sequence[Float[Tensor, "_ width"]]
"""The texts of a micro-batch, as token ids or as embedded tokens."""
TextT = TypeVar("TextT", bound=Sized)
Groups = list[list[int]]
# A trim returns free memory to the system (`return_free_memory`). It takes time, so a run trims
# only after every third batch.
BATCHES_PER_TRIM = 3


def micro_batches(
    lengths: Sequence[int], token_budget: int, num_shared: int | None = None
) -> Groups:
    """Group texts of similar length into micro-batches.

    The longest texts come first, so that memory peaks at the start.

    Args:
        lengths: Number of tokens of each text.
        token_budget: Maximum number of tokens of a group. A longer text is a group of its own.
        num_shared: None if the texts of a group are padded to the longest of them. A number if they
            are packed into one row: the length of their common beginning, which the row has once.

    Returns:
        Positions of the texts of each group.
    """
    groups: Groups = []
    size = 0  # number of tokens of the last group
    longest = 0  # length of its first text
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        # How many tokens the text would add to the last group.
        length = lengths[position]
        if num_shared is None:
            num_added = longest  # it would be padded to the length of the group's first text
        else:
            num_added = length - num_shared

        if groups and size + num_added <= token_budget:
            groups[-1].append(position)
            size += num_added
        else:
            groups.append([position])
            size = length
            longest = length
    return groups


def split_groups(groups: Groups, count: int) -> Groups:
    """Split groups until there are at least `count`, and return all of them.

    The group with the most texts is halved again and again. Once no group has two texts, empty
    groups are added. Ranks that shard weights (FSDP2, ZeRO-3) need this, because they must run the
    model equally often.
    """
    groups = [*groups]
    while len(groups) < count:
        group = max(groups, key=len, default=[])
        if len(group) < 2:
            groups.append([])
            continue
        # Replace the group by its halves.
        index = groups.index(group)
        half = len(group) // 2
        groups[index : index + 1] = [group[:half], group[half:]]
    return groups


def run_micro_batches(
    function: Callable[[list[TextT]], Tensor], texts: Sequence[TextT], groups: Groups
) -> Float[Tensor, "text ..."]:
    """Apply `function` to all texts, one group at a time.

    Groups may be empty, so that all processes of a distributed run have equally many groups. For an
    empty group, the function runs on the shortest text. This result times 0 is added to all rows,
    so that all processes also run backward equally often.

    Args:
        function: Returns one row per text of a group.
        texts: All texts.
        groups: Positions of the texts of each group.

    Returns:
        The rows of all texts, in the order of `texts`.
    """
    outputs: list[Tensor] = []
    zeros: list[Tensor] = []
    for group in groups:
        if group:
            outputs.append(function([texts[position] for position in group]))
        else:
            zeros.append(function([min(texts, key=len)]).sum() * 0)

    # The outputs are in the order of the groups. Put them back in the order of the texts.
    positions = [*chain.from_iterable(groups)]  # a permutation, which argsort inverts
    order = on_device(np.argsort(positions), outputs[0].device)  # [text]
    rows = torch.cat(outputs)[order]  # [text, ...]
    if zeros:
        return rows + sum(zeros)
    return rows


def run_twice(
    function: Callable[[list[TextT]], Tensor], texts: list[TextT], device: torch.device
) -> Float[Tensor, "text ..."]:
    """Run a micro-batch and keep only its output. The backward pass runs the micro-batch again.

    Only one micro-batch at a time has activations in memory, so a batch may have any number of
    texts. The second run has the dropout masks of the first (GradCache; Gao et al. 2021, section
    3.2).

    Args:
        function: Returns one row per text.
        texts: Texts of one micro-batch.
        device: Device on which the function draws random numbers.
    """

    def run_function(_: Tensor) -> Tensor:
        # Earlier micro-batches had other lengths, so malloc rarely reuses the blocks they freed.
        return_free_memory(device)
        return function(texts)

    # The second run needs the same random numbers. `checkpoint` restores the random state of a GPU
    # only if it gets a tensor on this GPU. So it gets an empty tensor that `run_function` ignores.
    marker = torch.empty(0, device=device)
    return checkpoint(run_function, marker, use_reentrant=False)


def return_free_memory(device: torch.device) -> None:
    """Return the free memory of glibc's heap to the system, in a run on a CPU.

    Tensors of different lengths fragment the heap. Without this function, a run used 2.1 GB after
    35 steps, only 0.6 GB of it for tensors, and its memory grew further.

    Args:
        device: Device of the run. On a GPU, nothing is done.
    """
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` if they are elsewhere.

    Values for a GPU are first copied to pinned memory, because otherwise the host would wait for
    the transfer.
    """
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def model_inputs(
    texts: Texts, pad_id: int, device: torch.device
) -> tuple[dict[str, Tensor], Int[Tensor, "text token"]]:
    """Pad texts on the right to the length of the longest one.

    Args:
        texts: Token ids or embedded tokens of each text.
        pad_id: Token id for padding.
        device: Device of the results.

    Returns:
        The padded texts as a keyword argument of the model, and the mask: 1 for tokens, 0 for
        padding.
    """
    lengths = np.array([len(text) for text in texts])
    is_token = np.arange(lengths.max()) < lengths[:, None]  # [text, token]
    mask = on_device(is_token.astype(np.int64), device)

    embedded = [text for text in texts if isinstance(text, Tensor)]
    if embedded:  # all texts, or none of them
        return {"inputs_embeds": torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)}, mask

    # Fill the array with padding, then put the token ids of all texts in their places.
    ids = np.full(is_token.shape, pad_id, dtype=np.int64)  # [text, token]
    ids[is_token] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return {"input_ids": on_device(ids, device)}, mask


def embed_together(network: Any, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ dim"]]:
    """Look up the embeddings of all tokens of all texts in one call, for training.

    The gradient of a lookup is as large as the embeddings of the whole vocabulary. So a training
    step has one lookup for all its micro-batches.
    """
    table = network.get_input_embeddings()
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])  # [token]
    rows = table(on_device(ids, table.weight.device))  # [token, dim]
    return [*rows.split([len(text) for text in texts])]
