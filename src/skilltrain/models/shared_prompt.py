"""Texts in one row of a causal model, without padding.

`PackedTexts` begin alike, as the candidates of a query share the reranker's instructions and the
query. Their common beginning (the prompt) is computed once. The positions of each continuation go
on from the prompt, and each attends to the prompt and to itself only. `VarlenTexts` share nothing:
each attends to itself, on a GPU by flash attention. Scores and gradients are those of the texts one
by one.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.models.micro_batches import Texts, TokenIds, on_device

_NAME = "skilltrain_shared_prompt"
# Continuations at least this long, relative to the longest, share one attention call.
_LEAST_FILL = 0.8


Heads = Float[Tensor, "1 head token dim"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Continuations of similar length that share one attention call; only there are they padded.

    Attributes:
        tokens: Positions in the row. A short continuation repeats its last token.
        not_repeated: Which of the flattened `tokens` are not repeats.
        mask: What a token attends to. Keys are the prompt, then the continuation.
    """

    tokens: Int[Tensor, "text token"]
    not_repeated: Int[Tensor, " position"]
    mask: Bool[Tensor, "token key"]

    @classmethod
    def of(
        cls, lengths: Sequence[int], start: int, num_prompt: int, device: torch.device
    ) -> "Bucket":
        """Make the bucket of continuations, longest first, that begin at `start` in the row."""
        longest = lengths[0]
        steps = torch.arange(longest)
        sizes = torch.tensor(lengths)
        firsts = start + sizes.cumsum(0) - sizes
        tokens = firsts[:, None] + torch.minimum(steps, sizes[:, None] - 1)
        not_repeated = (steps < sizes[:, None]).flatten().nonzero()[:, 0]
        mask = torch.ones(longest, num_prompt + longest, dtype=torch.bool).tril(num_prompt)
        return cls(*(on_device(part, device) for part in (tokens, not_repeated, mask)))


class PackedTexts:
    """Texts (none empty) as one row: the prompt, then every continuation, longest first.

    Not a dataclass: FSDP2 with mixed precision would copy it.

    Attributes:
        order: The texts' numbers in the order of continuations.
        lengths: Lengths of the continuations, in that order.
        positions: Position of each token in its text.
        ends: Where in the row each text's last token is.
        was_used: Whether attention has been computed, which proves that the model asked for it.
    """

    def __init__(self, texts: Sequence[Sized], num_prompt: int, device: torch.device) -> None:
        self.num_prompt = num_prompt
        self.order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        self.lengths = [len(texts[number]) - num_prompt for number in self.order]
        self.was_used = False
        positions = [*range(num_prompt)]
        ends = [0] * len(texts)
        for number, length in zip(self.order, self.lengths, strict=True):
            positions += range(num_prompt, num_prompt + length)
            ends[number] = len(positions) - 1
        self.positions: Int[Tensor, "1 token"] = on_device(torch.tensor([positions]), device)
        self.ends: Int[Tensor, " text"] = on_device(torch.tensor(ends), device)
        self.buckets = self._make_buckets(device)

    def _make_buckets(self, device: torch.device) -> list[Bucket]:
        buckets: list[Bucket] = []
        start = self.num_prompt
        remaining = self.lengths
        while remaining:
            lengths = [length for length in remaining if length >= _LEAST_FILL * remaining[0]]
            buckets.append(Bucket.of(lengths, start, self.num_prompt, device))
            start += sum(lengths)
            remaining = remaining[len(lengths) :]
        return buckets

    def join(self, texts: Texts) -> dict[str, Tensor]:
        """Return the texts' ids [1, token] or embedded tokens [1, token, width], under transformers' name."""
        start = self.num_prompt
        parts: list[Any] = [texts[0][:start], *(texts[number][start:] for number in self.order)]
        if isinstance(parts[0], Tensor):
            return {"inputs_embeds": torch.cat(parts)[None]}
        ids = np.concatenate(parts).astype(np.int64)[None]
        return {"input_ids": on_device(ids, self.positions.device)}

    def attend(
        self, query: Heads, key: Heads, value: Heads, **settings: Any
    ) -> Float[Tensor, "1 token head dim"]:
        """Attend from the prompt causally to itself, and from a continuation to both."""
        attend = torch.nn.functional.scaled_dot_product_attention
        prompt = [heads[:, :, : self.num_prompt] for heads in (query, key, value)]
        attended: list[Tensor] = []  # each [head, token, dim]
        if self.num_prompt:
            attended.append(attend(prompt[0], prompt[1], prompt[2], is_causal=True, **settings)[0])
        for bucket in self.buckets:
            shape = (len(bucket.tokens), -1, -1, -1)
            # Each [text, head, token, dim].
            texts = [heads[0][:, bucket.tokens].transpose(0, 1) for heads in (query, key, value)]
            keys = torch.cat([prompt[1].expand(shape), texts[1]], 2)
            values = torch.cat([prompt[2].expand(shape), texts[2]], 2)
            rows = attend(texts[0], keys, values, attn_mask=bucket.mask, **settings)
            attended.append(rows.transpose(0, 1).flatten(1, 2)[:, bucket.not_repeated])
        return torch.cat(attended, 1).transpose(0, 1)[None]


class VarlenTexts(PackedTexts):
    """Texts (none empty) as one row that share nothing, for flash attention by their lengths.

    `starts` are where each text begins in the row, and where the last one ends.
    """

    def __init__(self, texts: Sequence[Sized], device: torch.device) -> None:
        super().__init__(texts, 0, device)
        starts = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.starts: Int[Tensor, " start"] = on_device(starts, device)

    def attend(
        self, query: Heads, key: Heads, value: Heads, **settings: Any
    ) -> Float[Tensor, "1 token head dim"]:
        """Attend from each text to itself: by buckets where torch's flash attention cannot."""
        if not query.is_cuda or value.dtype != torch.bfloat16 or settings["dropout_p"]:
            return super().attend(query, key, value, **settings)
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
        starts = self.starts
        longest = self.lengths[0]
        attended: Any = varlen_attn(
            query,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            scale=settings["scale"],
            window_size=(-1, 0),
        )
        return attended[None]


def num_shared(texts: Sequence[TokenIds]) -> int:
    """Return how many first tokens all texts have in common, leaving at least one token of each."""
    lists = [text if isinstance(text, list) else [*text] for text in texts]
    low, high = min(lists), max(lists)  # what the lexicographically first and last share, all share
    limit = min(len(text) for text in lists) - 1
    for position in range(limit):
        if low[position] != high[position]:
            return position
    return limit


def last_hidden(decoder: Any, packed: PackedTexts, texts: Texts) -> Float[Tensor, "text dim"]:
    """Return the hidden state of each text's last token. Call `enable` on the network before."""
    inputs = packed.join(texts)
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
    """Compute attention for packed texts; plain SDPA if there are none. For AttentionInterface."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    packed.was_used = True
    # As autocast would, once instead of once a bucket.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    settings = {"dropout_p": options["dropout"], "scale": options["scaling"]}
    return packed.attend(query, key, value, **settings), None
