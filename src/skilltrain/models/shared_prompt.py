"""Texts that begin alike, run through a causal model as one sequence: their common beginning is computed once.

The candidates of a query share the reranker's instructions and the query. Their common beginning (the prompt) and all
continuations stand in one row without padding; the positions of each continuation go on from the prompt, and each
attends to the prompt and to itself only. Scores and gradients are those of the texts one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.models.micro_batches import Texts, TokenIds, on_device

_NAME = "skilltrain_shared_prompt"
_LEAST_FILL = (
    0.8  # continuations at least this long, relative to the longest, share one attention call
)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Continuations of similar length that share one attention call; only there are they padded."""

    tokens: Int[
        Tensor, "text token"
    ]  # places in the packed row; a short continuation repeats its last
    kept: Int[Tensor, " place"]  # which of the flattened `tokens` are not repeats
    mask: Bool[Tensor, "token key"]  # keys are the prompt, then the continuation


class PackedTexts:
    """Texts (none empty) as one row: the prompt, then every continuation, longest first.

    Embedded texts share nothing, nor do any with `varlen`. `ends` is the place of each text's last token, `order` the
    texts' numbers in the order of continuations; `starts` where each begins, and the longest length, if attention goes
    by them; `was_used` proves that attention was asked. No dataclass: FSDP2 with mixed precision would copy it.
    """

    def __init__(self, texts: Texts, device: torch.device, varlen: bool = False) -> None:
        tokens = [text for text in texts if not isinstance(text, Tensor)]
        self.num_shared = shared = num_shared(tokens) if tokens and not varlen else 0
        self.order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        lengths = [len(texts[number]) - shared for number in self.order]
        positions, ends = [*range(shared)], [0] * len(texts)
        for number, length in zip(self.order, lengths, strict=True):
            positions += range(shared, shared + length)
            ends[number] = len(positions) - 1
        self.positions: Int[Tensor, "1 token"] = on_device(torch.tensor([positions]), device)
        self.ends: Int[Tensor, " text"] = on_device(torch.tensor(ends), device)
        self.ids: Int[Tensor, "1 token"] | None = None
        if tokens:
            row = np.concatenate(
                [tokens[0][:shared], *(tokens[number][shared:] for number in self.order)]
            )
            self.ids = on_device(row.astype(np.int64)[None], device)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.starts = (on_device(starts, device), lengths[0]) if varlen else None
        self.buckets, self.was_used = [*_buckets(lengths, shared, device)], False


def num_shared(texts: Sequence[TokenIds]) -> int:
    """Length of the longest beginning that all texts have in common, short of leaving one of them nothing."""
    lists = [text if isinstance(text, list) else [*text] for text in texts]
    low, high = min(lists), max(lists)  # what the lexicographically first and last share, all share
    same = next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )
    return min(same, min(map(len, lists)) - 1)


def _buckets(lengths: Sequence[int], shared: int, device: torch.device) -> Iterator[Bucket]:
    start, number = shared, 0
    while number < len(lengths):
        longest = lengths[number]
        bucket = [length for length in lengths[number:] if length >= _LEAST_FILL * longest]
        steps = torch.arange(longest)
        sizes = torch.tensor(bucket)
        firsts = start + sizes.cumsum(0) - sizes
        tokens = firsts[:, None] + torch.minimum(steps, sizes[:, None] - 1)
        kept = (steps < sizes[:, None]).flatten().nonzero()[:, 0]
        mask = torch.ones(longest, shared + longest, dtype=torch.bool).tril(shared)
        yield Bucket(on_device(tokens, device), on_device(kept, device), on_device(mask, device))
        start, number = start + sum(bucket), number + len(bucket)


def last_hidden(
    decoder: Any, packed: PackedTexts, rows: Sequence[Float[Tensor, "_ width"]] | None = None
) -> Float[Tensor, "text dim"]:
    """The hidden state of each text's last token, from ids or embedded tokens `rows`; `enable` comes before."""
    if rows is None:
        inputs = {"input_ids": packed.ids}
    else:
        shared = packed.num_shared
        inputs = {
            "inputs_embeds": torch.cat(
                [rows[0][:shared], *(rows[i][shared:] for i in packed.order)]
            )[None]
        }
    output = decoder(**inputs, position_ids=packed.positions, use_cache=False, packed=packed)
    if not packed.was_used:
        raise RuntimeError(f"{type(decoder).__name__} does not hand its arguments on to attention")
    return output.last_hidden_state[0, packed.ends]


def can_share(network: Any) -> bool:
    """Whether a causal language model's attention can be replaced, and sees all tokens before a token, unweighted."""
    config = network.config
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windows = (getattr(config, name, None) for name in ("sliding_window", "attn_logit_softcapping"))
    return (
        network._supports_attention_backend and {*layers} == {"full_attention"} and not any(windows)
    )


def enable(network: Any) -> None:
    """Let `network` attend by `shared_prompt_attention`, which is plain SDPA wherever nothing is packed."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, shared_prompt_attention)
    AttentionMaskInterface.register(_NAME, _mask)
    network.set_attn_implementation(_NAME)


def _mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """The mask of a padded batch; none where there is no padding: packed or alone, attention needs no help."""
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


def shared_prompt_attention(
    module: Any,
    query: Float[Tensor, "row head token dim"],
    key: Float[Tensor, "row key_head token dim"],
    value: Float[Tensor, "row key_head token dim"],
    attention_mask: Tensor | None,
    packed: PackedTexts | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "row token head dim"], None]:
    """What every token attended to: the prompt causally to itself, a continuation to both. For AttentionInterface."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    packed.was_used = True
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # as autocast would, once instead of once a bucket
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if (
        packed.starts is not None
        and query.is_cuda
        and value.dtype == torch.bfloat16
        and not options["dropout"]
    ):
        return _attend_by_length(query, key, value, packed, options["scaling"]), None
    settings = {"dropout_p": options["dropout"], "scale": options["scaling"]}
    attend, shared = torch.nn.functional.scaled_dot_product_attention, packed.num_shared
    prompt_key, prompt_value = key[:, :, :shared], value[:, :, :shared]
    parts = []
    if shared:
        parts.append(
            attend(query[:, :, :shared], prompt_key, prompt_value, is_causal=True, **settings)[0]
        )
    for bucket in packed.buckets:
        own = (part[0][:, bucket.tokens].transpose(0, 1) for part in (query, key, value))
        own_query, own_key, own_value = own  # each [text, head, token, dim]
        before = (len(bucket.tokens), -1, -1, -1)
        keys = torch.cat([prompt_key.expand(before), own_key], 2)
        values = torch.cat([prompt_value.expand(before), own_value], 2)
        seen = attend(own_query, keys, values, attn_mask=bucket.mask, **settings)
        parts.append(seen.transpose(0, 1).flatten(1, 2)[:, bucket.kept])
    return torch.cat(parts, 1).transpose(0, 1)[None], None


def _attend_by_length(
    query: Float[Tensor, "1 head token dim"],
    key: Float[Tensor, "1 head token dim"],
    value: Float[Tensor, "1 head token dim"],
    packed: PackedTexts,
    scale: float,
) -> Float[Tensor, "1 token head dim"]:
    """The same by torch's flash attention over texts of unequal lengths, which share nothing; only in bfloat16."""
    from torch.nn.attention.varlen import varlen_attn

    assert packed.starts is not None
    starts, longest = packed.starts
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    attended: Any = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=(-1, 0)
    )
    return attended[None]
