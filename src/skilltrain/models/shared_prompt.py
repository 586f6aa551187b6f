"""Packs texts into one row of a causal model, without padding.

`PackedTexts` have a common beginning, the prompt, which is computed once: the candidates of a query
share the reranker's instructions and the query. The rest of each text is its continuation. Its
position ids start at the prompt's length, and it attends to the prompt and to itself only.
`VarlenTexts` have no prompt, and use flash attention on a GPU. Scores and gradients are the same as
for each text alone.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.models.micro_batches import Texts, on_device

_NAME = "skilltrain_shared_prompt"
# Continuations whose length is at least this share of the longest one are in one bucket.
_MIN_RELATIVE_LENGTH = 0.8

_CAUSAL_WINDOW = (-1, 0)  # all tokens before a token, none after it

PerHead = Float[Tensor, "1 head token dim"]
PerKeyHead = Float[Tensor, "1 key_head token dim"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Continuations of similar length. They are padded, and share one attention call.

    Attributes:
        tokens: Position in the row of each token. Padding repeats a continuation's last token.
        real_tokens: Indices of the flattened `tokens` that are not padding.
        mask: Whether a token attends to a key. Keys are the prompt, then the continuation.
    """

    tokens: Int[Tensor, "text token"]
    real_tokens: Int[Tensor, " index"]
    mask: Bool[Tensor, "token key"]

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], start: int, num_prompt: int, device: torch.device
    ) -> "Bucket":
        """Make a bucket of continuations that follow each other in the row.

        The row is one sequence of tokens: the common prompt, then the continuations of all texts.

        Args:
            lengths: Number of tokens of each continuation, longest first.
            start: Position of the first continuation in the row.
            num_prompt: Number of tokens of the prompt.
            device: Device of the bucket.
        """
        longest = lengths[0]
        sizes = torch.tensor(lengths)[:, None]  # [text, 1]
        first_tokens = start + sizes.cumsum(0) - sizes  # [text, 1], position of the first token

        # Find the row's token for each place in the bucket. Shorter continuations are padded with
        # their last token.
        offsets = torch.arange(longest)  # [token]
        padded_offsets = torch.minimum(offsets, sizes - 1)  # [text, token]
        tokens = first_tokens + padded_offsets  # [text, token]
        is_real = offsets < sizes  # [text, token]
        real_tokens = is_real.flatten().nonzero()[:, 0]  # indices into text * token

        # Every token attends to the whole prompt, and causally to its continuation. All
        # continuations use this mask [token, num_prompt + token], whose diagonal starts after the
        # prompt.
        mask = torch.ones(longest, num_prompt + longest, dtype=torch.bool).tril(num_prompt)
        return cls(
            on_device(tokens, device), on_device(real_tokens, device), on_device(mask, device)
        )

    def split_row(
        self, row: Float[Tensor, "1 head row_token dim"]
    ) -> Float[Tensor, "text head token dim"]:
        """Return the vectors of each continuation, padded."""
        # `row[0][:, self.tokens]` is the same, but its backward pass sorts the positions first.
        # Sorting is slow on a GPU.
        padded_row = row[0].index_select(1, self.tokens.flatten())  # [head, text * token, dim]
        return padded_row.unflatten(1, self.tokens.shape).transpose(0, 1)

    def join_row(
        self, continuations: Float[Tensor, "text head token dim"]
    ) -> Float[Tensor, "head index dim"]:
        """Join the vectors of all continuations to a row, without padding."""
        padded_row = continuations.transpose(0, 1).flatten(1, 2)  # [head, text * token, dim]
        return padded_row.index_select(1, self.real_tokens)


class PackedTexts:
    """Texts (none empty) as one row: the prompt, then every continuation, longest first.

    It is not a dataclass, because FSDP2 with mixed precision would copy it.

    Attributes:
        num_prompt: Number of tokens of the prompt.
        order: Indices of the texts in the order of their continuations in the row.
        lengths: Lengths of the continuations, in the order of the row.
        position_ids: Position of each token in its text.
        ends: Position in the row of each text's last token, in the order of the texts.
        buckets: All continuations, in the order of the row.
    """

    def __init__(self, texts: Sequence[Sized], num_prompt: int, device: torch.device) -> None:
        """Arrange texts that begin with the same prompt in one row of tokens.

        The row has the prompt once, then the rest of each text (its continuation), longest first.
        For example, with the prompt `p q`, the texts `p q a` and `p q b c` form the row
        `p q b c a`. The positions of its tokens are 0, 1, 2, 3 and 2.

        Args:
            texts: Token ids of the texts. Only their lengths are used.
            num_prompt: Number of tokens of the common prompt.
            device: Device of all tensors.
        """
        self.num_prompt = num_prompt
        # Indices of the texts, the longest text first. The minus reverses the order.
        self.order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        # Length of each continuation, in this order.
        self.lengths = [len(texts[index]) - num_prompt for index in self.order]

        # Give each token of the row its position in its own text. A continuation follows the
        # prompt, so its first token has the position `num_prompt`.
        position_ids = [*range(num_prompt)]
        ends = [0] * len(texts)  # position in the row of each text's last token
        for index, length in zip(self.order, self.lengths, strict=True):
            position_ids += range(num_prompt, num_prompt + length)
            ends[index] = len(position_ids) - 1
        self.position_ids: Int[Tensor, "1 token"] = on_device(torch.tensor([position_ids]), device)
        self.ends: Int[Tensor, " text"] = on_device(torch.tensor(ends), device)
        # A bucket is a group of continuations of similar length that share one attention call. The
        # buckets are made here, because a compiled layer that is recomputed must not change them.
        self.buckets = self._make_buckets(device)

    def _make_buckets(self, device: torch.device) -> list[Bucket]:
        """Divide the continuations into buckets of similar length, longest first."""
        buckets = []
        start = self.num_prompt  # position in the row of the first token after the prompt
        remaining = self.lengths  # longest first
        while remaining:
            min_length = _MIN_RELATIVE_LENGTH * remaining[0]
            lengths = [length for length in remaining if length >= min_length]  # the first ones
            buckets.append(Bucket.from_lengths(lengths, start, self.num_prompt, device))
            start += sum(lengths)
            remaining = remaining[len(lengths) :]
        return buckets

    def join(self, texts: Texts) -> dict[str, Tensor]:
        """Return the row as a keyword argument of the model.

        Args:
            texts: Token ids or embedded tokens of each text.

        Returns:
            `input_ids` [1, token] or `inputs_embeds` [1, token, width].
        """
        start = self.num_prompt
        segments: list[Any] = [texts[0][:start]]  # the prompt, which all texts have in common
        segments += [texts[index][start:] for index in self.order]
        if isinstance(segments[0], Tensor):
            return {"inputs_embeds": torch.cat(segments)[None]}
        ids = np.concatenate(segments).astype(np.int64)[None]
        return {"input_ids": on_device(ids, self.position_ids.device)}

    def attend(
        self, query: PerHead, key: PerKeyHead, value: PerKeyHead, **settings: Any
    ) -> Float[Tensor, "1 token head dim"]:
        """Compute attention of all texts, which form one row.

        The row has the common prompt of the texts, then the continuation of each text. The prompt
        attends causally to itself. A continuation attends to the whole prompt, and causally to
        itself.

        Args:
            query: Queries of all tokens of the row.
            key: Keys. Several query heads may share a key head.
            value: Values, with as many heads as the keys.
            **settings: Scale and dropout of SDPA.
        """
        sdpa = torch.nn.functional.scaled_dot_product_attention
        # Repeat the key heads, so that every query head has its own. SDPA with a mask and fewer key
        # heads would be slow on a GPU.
        heads_per_key_head = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(heads_per_key_head, 1)
        value = value.repeat_interleave(heads_per_key_head, 1)

        # Compute the prompt.
        length = self.num_prompt
        prompt_query = query[:, :, :length]  # [1, head, prompt token, dim]
        prompt_key = key[:, :, :length]
        prompt_value = value[:, :, :length]
        outputs = []  # each [head, token, dim]
        if length:
            output = sdpa(prompt_query, prompt_key, prompt_value, is_causal=True, **settings)
            outputs.append(output[0])

        # Compute the continuations. A bucket has those of similar length, which share one call.
        for bucket in self.buckets:
            queries = bucket.split_row(query)  # [text, head, token, dim]
            keys = _prepend(prompt_key, bucket.split_row(key))  # [text, head, key, dim]
            values = _prepend(prompt_value, bucket.split_row(value))  # [text, head, key, dim]
            output = sdpa(queries, keys, values, attn_mask=bucket.mask, **settings)
            outputs.append(bucket.join_row(output))
        return torch.cat(outputs, 1).transpose(0, 1)[None]  # [1, token, head, dim]


def _prepend(
    prompt: Float[Tensor, "1 head prompt dim"], continuations: Float[Tensor, "text head token dim"]
) -> Float[Tensor, "text head key dim"]:
    """Put the keys or values of the prompt before those of each continuation."""
    prompts = prompt.expand(len(continuations), -1, -1, -1)  # [text, head, prompt, dim]
    return torch.cat([prompts, continuations], 2)


class VarlenTexts(PackedTexts):
    """Texts (none empty) as one row without a common prompt, for flash attention.

    Attributes:
        starts: Start of each text in the row, and the end of the last one.
        is_on_gpu: Whether flash attention may compute the attention.
    """

    def __init__(self, texts: Sequence[Sized], device: torch.device) -> None:
        super().__init__(texts, 0, device)
        self.is_on_gpu = device.type == "cuda"
        starts = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.starts: Int[Tensor, " start"] = on_device(starts, device)

    def _make_buckets(self, device: torch.device) -> list[Bucket]:
        """Make no buckets for a GPU, where flash attention does not need them."""
        return [] if device.type == "cuda" else super()._make_buckets(device)

    def attend(
        self, query: PerHead, key: PerKeyHead, value: PerKeyHead, **settings: Any
    ) -> Float[Tensor, "1 token head dim"]:
        """Compute attention of all texts. Each text attends causally to itself.

        torch's flash attention needs a GPU and bfloat16, and has no dropout. In all other cases,
        this method calls the slower `PackedTexts.attend`.

        Args:
            query: Queries of all tokens of the row.
            key: Keys. Several query heads may share a key head.
            value: Values, with as many heads as the keys.
            **settings: Scale and dropout of SDPA.
        """
        if not self.is_on_gpu or value.dtype != torch.bfloat16 or settings["dropout_p"]:
            if not self.buckets:  # none were made for a GPU
                self.buckets = super()._make_buckets(query.device)
            return super().attend(query, key, value, **settings)
        from torch.nn.attention.varlen import varlen_attn

        # Give the texts twice: as the texts of the queries, and as those of the keys.
        longest = self.lengths[0]  # lengths are in descending order
        output: Any = varlen_attn(
            query[0].transpose(0, 1),  # [token, head, dim]
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.starts,
            self.starts,
            longest,
            longest,
            scale=settings["scale"],
            window_size=_CAUSAL_WINDOW,
            enable_gqa=True,  # several query heads may share a key head
        )
        return output[None]


def num_shared(texts: Sequence[list[int]]) -> int:
    """Return the length of the common beginning of all texts.

    It leaves at least one token of each text, so that every text has a continuation.
    """
    # In lexicographic order, the first and the last text have the shortest beginning in common.
    first = min(texts)
    last = max(texts)
    limit = min(map(len, texts)) - 1
    for position in range(limit):
        if first[position] != last[position]:
            return position
    return limit


def last_hidden(decoder: Any, packed: PackedTexts, texts: Texts) -> Float[Tensor, "text dim"]:
    """Run a decoder on packed texts, and return the hidden state of each text's last token.

    Args:
        decoder: The decoder of a network for which `enable_packing` was called.
        packed: The texts' places in the row.
        texts: Token ids or embedded tokens of each text.
    """
    # Without a mask, transformers looks for the texts in the position ids, and the host waits for
    # the GPU. An empty mask of four dimensions prevents this. If the decoder does not hand `packed`
    # on to attention, `_check_mask` notices the empty mask.
    output = decoder(
        **packed.join(texts),
        attention_mask=torch.empty(1, 1, 0, 0, device=packed.ends.device, dtype=torch.bool),
        position_ids=packed.position_ids,
        use_cache=False,
        packed=packed,
    )
    return output.last_hidden_state[0, packed.ends]


def can_pack(network: Any) -> bool:
    """Return whether the texts of a causal language model can be packed.

    Its attention must be replaceable, include all previous tokens, and not cap its logits.
    """
    config = network.config
    if getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None):
        return False
    # Some models have layers that see only a window of the text. Others do not list their layers.
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return network._supports_attention_backend and {*layer_types} == {"full_attention"}


def enable_packing(network: Any) -> None:
    """Let `network` use `shared_prompt_attention`, which is plain SDPA for padded texts.

    transformers finds an attention function and its function for masks by their common name.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, shared_prompt_attention)
    AttentionMaskInterface.register(_NAME, _mask)
    network.set_attn_implementation(_NAME)


def _mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return SDPA's mask of a padded batch, or None if nothing is padded."""
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
    """Compute attention of packed or padded texts, as transformers' AttentionInterface requires.

    Args:
        module: The attention layer.
        query: Queries.
        key: Keys. Several query heads may share a key head.
        value: Values, with as many heads as the keys.
        attention_mask: Mask of padded texts; empty for packed texts.
        packed: The packed texts, which are one row. None: the texts are padded, one row each.
        **options: Scale and dropout, by the names of transformers.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed is None:
        _check_mask(attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    # `packed.attend` calls SDPA several times. Cast once, as autocast would do in each call.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    settings = {"dropout_p": options["dropout"], "scale": options["scaling"]}
    return packed.attend(query, key, value, **settings), None


def _check_mask(attention_mask: Tensor | None) -> None:
    """Check that a decoder has not dropped packed texts, which have an empty mask."""
    if attention_mask is not None and attention_mask.numel() == 0:
        raise RuntimeError("the decoder does not hand its arguments on to attention")
