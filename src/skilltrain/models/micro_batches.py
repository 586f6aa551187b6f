"""Groups texts of similar length into micro-batches, and runs a model on them.

Notes:
    - The longest texts come first, so that memory peaks at the start.
    - A text that exceeds the token budget is a micro-batch of its own.
    - Ranks that shard weights (FSDP2, ZeRO-3) must run the model equally often, forward and
      backward. So a rank with fewer micro-batches gets empty groups. For an empty group, the model
      runs on the shortest text, and its result times 0 is added to all rows.
    - Without pinned memory, the host would wait for a transfer to the GPU.
    - The gradient of a lookup of embeddings is as large as the embeddings of the whole vocabulary.
      So a training step has one lookup for all its micro-batches.
"""

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
    """Group texts of similar length into micro-batches of at most `token_budget` tokens.

    Args:
        lengths: Number of tokens of each text.
        num_shared: Length of packed texts' common beginning. None: padded texts.

    Returns:
        Positions of each group's texts.
    """
    groups: Groups = []
    group_size = 0  # tokens in last group
    padded_length = 0  # longest text in it
    longest_first = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    for position in longest_first:
        length = lengths[position]
        num_added = padded_length if num_shared is None else length - num_shared
        if groups and group_size + num_added <= token_budget:
            groups[-1].append(position)
            group_size += num_added
        else:
            groups.append([position])
            group_size = length
            padded_length = length
    return groups


def split_groups(groups: Groups, count: int) -> Groups:
    """Halve the largest groups until there are at least `count` groups.

    If no group has two texts, empty groups are added.
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
    """Apply `function` to all texts, group by group.

    Args:
        function: Returns one row per text of a group.
        groups: Positions of each group's texts. An empty group adds 0.

    Returns:
        The rows in the order of `texts`.
    """
    outputs = []
    zeros = []
    for group in groups:
        if group:
            outputs.append(function([texts[position] for position in group]))
        else:
            shortest = min(texts, key=len)
            zeros.append(function([shortest]).sum() * 0)

    positions = [*chain.from_iterable(groups)]  # a permutation
    inverse = on_device(np.argsort(positions), outputs[0].device)  # [text]
    rows = torch.cat(outputs)[inverse]  # [text, ...]
    if zeros:
        return rows + sum(zeros)
    return rows


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` if they are elsewhere."""
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

    Returns:
        The model's keyword argument, and the mask: 0 for padding.
    """
    lengths = np.array([len(text) for text in texts])  # [text]
    is_token = np.arange(lengths.max()) < lengths[:, None]  # [text, token]
    mask = on_device(is_token.astype(np.int64), device)

    embedded = [text for text in texts if isinstance(text, Tensor)]  # all or none
    if embedded:
        return {"inputs_embeds": torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)}, mask

    ids = np.full(is_token.shape, pad_id, dtype=np.int64)  # [text, token]
    ids[is_token] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return {"input_ids": on_device(ids, device)}, mask


def embed_together(network: Any, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ dim"]]:
    """Look up the embeddings of all tokens of all texts in one call, for training."""
    table = network.get_input_embeddings()
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])  # [token]
    rows = table(on_device(ids, table.weight.device))  # [token, dim]
    return [*rows.split([len(text) for text in texts])]
