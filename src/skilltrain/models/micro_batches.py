"""Groups texts of similar length into micro-batches, and runs a model on them."""

from collections.abc import Callable, Sequence, Sized
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

TokenIds = Sequence[int] | np.ndarray
Texts = Sequence[TokenIds] | Sequence[Float[Tensor, "_ width"]]
"""The texts of a micro-batch, as token ids or as embedded tokens."""
TextT = TypeVar("TextT", bound=Sized)
Groups = list[list[int]]


def micro_batches(
    lengths: Sequence[int], token_budget: int, num_shared: int | None = None
) -> Groups:
    """Group texts by length into micro-batches.

    The longest texts come first, so that memory peaks at the start.

    Args:
        lengths: Number of tokens of each text.
        token_budget: Maximum number of tokens of a group. A longer text is a group of its own.
        num_shared: None if the texts of a group are padded to the longest. Otherwise they are
            packed into one row, in which their first `num_shared` tokens are stored once.

    Returns:
        Positions of the texts of each group.
    """
    groups: Groups = []
    size = 0  # tokens of the last group
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        length = lengths[position]
        if not groups:
            new_size = token_budget + 1
        elif num_shared is None:
            longest = lengths[groups[-1][0]]
            new_size = longest * (len(groups[-1]) + 1)
        else:
            new_size = size + length - num_shared

        if new_size <= token_budget:
            groups[-1].append(position)
            size = new_size
        else:
            groups.append([position])
            size = length
    return groups


def split_groups(groups: Groups, count: int) -> Groups:
    """Return the same groups split into at least `count`.

    The group with the most texts is halved again and again. If all groups have one text, empty ones
    are added. Ranks that shard weights (FSDP2, ZeRO-3) need this: they must run the model equally
    often.
    """
    groups = [*groups]
    while len(groups) < count:
        group = max(groups, key=len, default=[])
        if len(group) < 2:
            groups.append([])
            continue
        index = groups.index(group)
        half = len(group) // 2
        groups[index : index + 1] = [group[:half], group[half:]]
    return groups


def run_micro_batches(
    function: Callable[[list[TextT]], Tensor], texts: Sequence[TextT], groups: Groups
) -> Float[Tensor, "text ..."]:
    """Apply `function` to all texts, one group at a time. The result has the order of `texts`.

    For an empty group, the function runs on the shortest text. Its result has weight 0, but is part
    of the graph, so that ranks also run backward equally often.
    """
    outputs: list[Tensor] = []
    zeros: list[Tensor] = []
    for group in groups:
        if group:
            outputs.append(function([texts[position] for position in group]))
        else:
            zeros.append(function([min(texts, key=len)]).sum() * 0)
    order = np.argsort([*chain.from_iterable(groups)])  # inverts the order of the groups
    result = torch.cat(outputs)[on_device(order, outputs[0].device)]
    return result + sum(zeros) if zeros else result


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return `values` on `device`.

    A copy to a GPU starts from pinned memory, because a copy from other memory blocks the host.
    """
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def model_inputs(
    texts: Texts, pad_id: int, device: torch.device
) -> tuple[dict[str, Tensor], Int[Tensor, "text token"]]:
    """Pad texts on the right to the longest.

    Returns:
        Token ids or embedded tokens as a keyword argument of the model, and the attention mask.
    """
    lengths = np.array([len(text) for text in texts])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    mask = on_device(is_token.astype(np.int64), device)
    embedded = [text for text in texts if isinstance(text, Tensor)]
    if embedded:  # all of them
        return {"inputs_embeds": torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)}, mask
    ids = np.full(is_token.shape, pad_id, dtype=np.int64)
    ids[is_token] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return {"input_ids": on_device(ids, device)}, mask


def embed_together(network: Any, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ dim"]]:
    """Look up the token embeddings of all texts at once.

    The gradient of a lookup is as large as the embeddings of the whole vocabulary, so a training
    step has one lookup instead of one per micro-batch. Inference passes token ids to the model.
    """
    table = network.get_input_embeddings()
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    rows = table(on_device(ids, table.weight.device))
    return [*rows.split([len(text) for text in texts])]
