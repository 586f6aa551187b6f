"""Which tokens a reranker's scoring position attends to, without ever holding a whole attention matrix.

A score is read at one position: the last of a causal model, the first (`[CLS]`) of a BERT-like one. Only that row of
each layer's attention is computed beside the forward pass, which itself runs by SDPA: memory grows with
heads x tokens, where transformers' `output_attentions` needs layers x heads x tokens x tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.models.pairs import PairIds
from skilltrain.models.pooling import at_least_float32
from skilltrain.models.reranker import Reranker, segment_ids

_NAME = "skilltrain_attention_row"
_UNREADABLE = ("softcap", "position_bias", "s_aux")  # what some models add to q k^T; the row would be another one


@contextmanager
def attention_rows(reranker: Reranker) -> Iterator[Callable[[PairIds], Float[Tensor, "layer token"]]]:
    """A function from a pair to the attention of its scoring position, the mean over heads; each row sums to 1.

    Inside the block the reranker (in evaluation mode) attends by another function and cannot score; after it, by its
    own again.
    Raises SkilltrainError for a reranker without one scoring position, and for one whose attention cannot be replaced.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    _check(reranker)
    network = reranker.network
    own = network.config._attn_implementation
    AttentionInterface.register(_NAME, row_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    network.set_attn_implementation(_NAME)
    try:
        yield partial(_rows, reranker)
    finally:
        network.set_attn_implementation(own)


def _check(reranker: Reranker) -> None:
    config = reranker.network.config
    if reranker.settings.template.form == "cosine_pair":
        what = "a cosine_pair reranker has no scoring position: it compares the mean vectors of query and skill"
        raise SkilltrainError(what, fix="analyse a reranker of the form pair or yes_no")
    if (pooling := getattr(config, "classifier_pooling", "cls")) != "cls":
        raise SkilltrainError(f"a classifier with {pooling} pooling has no scoring position")
    if not reranker.network._supports_attention_backend:
        raise SkilltrainError(f"the attention of {type(reranker.network).__name__} cannot be read")


@torch.inference_mode()
def _rows(reranker: Reranker, pair: PairIds) -> Float[Tensor, "layer token"]:
    network, ids = reranker.network, torch.tensor([pair.ids], device=reranker.device)
    rows: list[Tensor] = []
    if reranker.yes_no_ids is not None:
        network.get_decoder()(ids, use_cache=False, scoring_rows=rows)
    else:
        segments = (torch.arange(len(pair), device=ids.device) >= pair.second_start).long()[None]
        network.base_model(ids, **segment_ids(network, segments), scoring_rows=rows)
    if len(rows) != network.config.num_hidden_layers:
        name, num_layers = type(network).__name__, network.config.num_hidden_layers
        raise SkilltrainError(f"the attention of {name} can be read in {len(rows)} of its {num_layers} layers only")
    return torch.stack(rows)


def row_attention(
    module: Any,
    query: Float[Tensor, "1 head token dim"],
    key: Float[Tensor, "1 key_head token dim"],
    value: Float[Tensor, "1 key_head token dim"],
    attention_mask: Tensor | None,
    scoring_rows: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "1 token head dim"], None]:
    """What SDPA gives for one text; the scoring position's weights are appended to `scoring_rows`.

    An attention function in the sense of transformers' AttentionInterface, which sets the arguments.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if scoring_rows is None:
        raise RuntimeError("nobody reads this row: the model does not hand its arguments on to attention")
    if terms := [name for name in _UNREADABLE if options.get(name) is not None]:
        raise SkilltrainError(f"the attention of {type(module).__name__} cannot be read: it has a {terms[0]}")
    causal = options["is_causal"] if options.get("is_causal") is not None else module.is_causal
    place = -1 if causal else 0
    seen = None if attention_mask is None else attention_mask[0, :, place]
    scoring_rows.append(_mean_weights(query[0, :, place], key[0], seen, options["scaling"]))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _mean_weights(
    query: Float[Tensor, "head dim"], key: Float[Tensor, "key_head token dim"], seen: Tensor | None, scaling: float
) -> Float[Tensor, "token"]:
    """softmax(scaling q k^T), the mean over heads. Query heads share key heads in consecutive groups.

    In float64: where a model parks nearly all attention on its first token, the rest underflows float32.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = at_least_float32(query), at_least_float32(key)
        grouped = query.reshape(len(key), -1, query.shape[-1])
        scores = (grouped @ key.transpose(1, 2)).flatten(0, 1) * scaling
        if seen is not None:  # [1 or head, token]: true, or 0, where attention may go
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        return scores.softmax(-1, dtype=torch.float64).mean(0)
