"""Cutting texts into micro-batches by tokens, so that short texts never pay for long ones."""

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


def micro_batches(lengths: Sequence[int], token_budget: int, shared: int | None = None) -> Groups:
    """Positions of the texts, longest first, in groups within `token_budget` tokens; a longer text stands alone.

    A group's texts are padded to the longest; with `shared`, they stand in one row, and so many first tokens, which are
    the same in all, once. Longest first, so that memory peaks at the start.
    """
    groups: Groups = []
    size = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        length = lengths[position]
        if groups:
            group = groups[-1]
            longest = lengths[group[0]]
            size = longest * (len(group) + 1) if shared is None else size + length - shared
        if groups and size <= token_budget:
            groups[-1].append(position)
        else:
            groups.append([position])
            size = length
    return groups


def split_to(groups: Groups, count: int) -> Groups:
    """The same texts in `count` groups or more: the fullest are halved, in place; empty groups fill up.

    Ranks that shard weights (FSDP2, ZeRO-3) must run the model equally often: for an empty group it runs on some text,
    of which `run_micro_batches` uses nothing.
    """
    groups = [*groups]
    while len(groups) < count:
        group = max(groups, key=len, default=[])
        if len(group) < 2:
            groups.append([])
            continue
        fullest = groups.index(group)
        half = len(group) // 2
        groups[fullest : fullest + 1] = [group[:half], group[half:]]
    return groups


def run_micro_batches(
    function: Callable[[list[TextT]], Tensor], texts: Sequence[TextT], groups: Groups
) -> Float[Tensor, "text ..."]:
    """Apply `function` to all `texts`, one group at a time; the result is in the order of `texts`.

    For an empty group it runs on the shortest text, and the result is used with weight 0.
    """
    outputs: list[Tensor] = []
    unused: list[Tensor] = []
    for group in groups:
        if group:
            outputs.append(function([texts[position] for position in group]))
        else:
            unused.append(function([min(texts, key=len)]).sum() * 0)
    order = np.argsort([*chain.from_iterable(groups)])
    result = torch.cat(outputs)[on_device(order, outputs[0].device)]
    return result + sum(unused) if unused else result


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; a copy to a GPU starts from pinned memory, for the host waits for any other."""
    tensor = torch.as_tensor(values)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def model_inputs(
    texts: Texts, pad_id: int, device: torch.device
) -> tuple[dict[str, Tensor], Int[Tensor, "text token"]]:
    """(token ids or embedded tokens under transformers' name, attention mask), padded on the right to the longest."""
    lengths = np.array([len(text) for text in texts])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    mask = on_device(is_token.astype(np.int64), device)
    if rows := [text for text in texts if isinstance(text, Tensor)]:
        return {"inputs_embeds": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}, mask
    ids = np.full(is_token.shape, pad_id, dtype=np.int64)
    ids[is_token] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    return {"input_ids": on_device(ids, device)}, mask


def embed_together(network: Any, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ dim"]]:
    """Each text's token embeddings, all looked up at once; without gradients nothing is won, and models take token ids.

    The gradient of a lookup is as large as the vocabulary's whole table: one for all texts, not one per micro-batch.
    """
    table = network.get_input_embeddings()
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    rows = table(on_device(ids, table.weight.device))
    return [*rows.split([len(text) for text in texts])]
