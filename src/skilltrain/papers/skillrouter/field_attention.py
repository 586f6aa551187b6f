"""Attention of a reranker to name, description and body (SkillRouter, 3.2 and appendix F).

The row of `field_attention` holds averages over all pairs. Each share is a dict of a number by name
of the field:

- `model`: name of the reranker.
- `layers`: share of attention in each layer.
- `groups`: share in the first quarter of the layers, the middle half and the last quarter.
- `overall`: share averaged over all layers.
- `tokens`: share of the skill's tokens. Uniform attention would give the same share.
- `pairs`: a dict for each pair, with `overall`, `tokens` and the number of tokens cut away.

Notes:
    - A field that is empty, not in the template, or cut away has the share 0.
    - The scoring position is the token whose output gives the score: the last token in a causal
      model, which answers yes or no, and else the first token.
    - The matrices of all layers together would take too much memory, so one row of each is kept.
    - `attention_rows` does not call the `forward` of a causal reranker, which changes the attention
      to score several pairs at once.
    - Where a token belongs to several fields, most of its characters decide: ` pods` belongs to the
      name, although its space does not. If a character takes several tokens, each of them counts.
    - For a run of spaces, some tokenizers return an empty span after the last space. An empty span
      is widened by the character before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.slices import Row
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.records import Query, Skill
from skilltrain.templates import FIELDS_SEEN
from skilltrain.terminal import track

FIELDS = FIELDS_SEEN["full"]
LayerShares = Float[np.ndarray, "layer field"]
FieldMask = Bool[np.ndarray, "token field"]
"""Whether a token belongs to a field."""


def field_attention(
    reranker: Reranker, pairs: Sequence[tuple[Query, Skill]], model_name: str
) -> Row:
    """Measure how the attention to a skill is distributed over its fields, averaged over pairs.

    Args:
        reranker: The model.
        pairs: Queries and skills.
        model_name: Name of the reranker in a report.

    Raises:
        SkilltrainError: There is no pair, or the model is not supported.
    """
    pooling = getattr(reranker.network.config, "classifier_pooling", "cls")
    if pooling != "cls":
        problem = f"a classifier with {pooling} pooling has no scoring position"
        raise SkilltrainError("unsupported-model", problem)
    if not pairs:
        problem = "no (query, skill) pairs to read the attention of"
        raise SkilltrainError("nothing-to-analyse", problem, where=model_name)

    shares = []  # [layer, field] each
    token_shares = []  # [field] each
    rows = []
    with _eager_attention(reranker.network):
        for query, skill in track(pairs, "attention by field", len(pairs)):
            [pair] = reranker.tokenize(query.text, [skill])
            in_field = token_fields(reranker, skill)  # [token, field]
            num_tokens = len(in_field) - pair.num_cut
            in_field = in_field[:num_tokens]
            pair_shares = _pair_shares(reranker, pair, in_field, model_name, skill.skill_id)
            shares.append(pair_shares)
            pair_tokens = in_field.sum(0) / in_field.sum()  # [field]
            token_shares.append(pair_tokens)
            rows.append(
                {
                    "query_id": query.query_id,
                    "skill_id": skill.skill_id,
                    "overall": _by_field(pair_shares.mean(0)),
                    "tokens": _by_field(pair_tokens),
                    "num_cut": pair.num_cut,
                }
            )

    means = _layer_means(np.mean(shares, axis=0))
    tokens = _by_field(np.mean(token_shares, axis=0))
    return {"model": model_name, **means, "tokens": tokens, "pairs": rows}


def _pair_shares(
    reranker: Reranker,
    pair: PairIds,
    in_field: FieldMask,
    model_name: str,
    skill_id: str,
) -> LayerShares:
    """Return the share of attention to each field of a skill, for each layer.

    Args:
        reranker: The model.
        pair: Tokens of the query and the skill.
        in_field: Whether a token of the skill belongs to a field.
        model_name: Name of the reranker, for errors.
        skill_id: Id of the skill, for errors.
    """
    if not in_field.any():
        problem = "the reranker sees no token of this skill's name, description or body"
        raise SkilltrainError("nothing-to-analyse", problem, where=f"skill {skill_id}")
    skill_end = pair.second_start + len(in_field)
    attention = attention_rows(reranker, pair)[:, pair.second_start : skill_end]  # [layer, token]
    weights = attention @ in_field  # [layer, field]
    sums = weights.sum(1, keepdims=True)  # [layer, 1]
    has_sum = sums > 0  # [layer, 1]; False for NaN
    bad_layers = np.flatnonzero(~has_sum)
    if bad_layers.size:
        problem = f"layer {bad_layers[0]} gives the fields no attention that could be compared"
        raise SkilltrainError(
            "nothing-to-analyse", problem, where=f"{model_name}, skill {skill_id}"
        )
    return weights / sums


def _layer_means(layers: LayerShares) -> Row:
    """Return the shares of each layer, and their means over groups of layers and all layers."""
    quarter = len(layers) // 4
    late_start = len(layers) - quarter
    groups = {
        "early": layers[:quarter],
        "middle": layers[quarter:late_start],
        "late": layers[late_start:],
    }
    return {
        "layers": [_by_field(layer) for layer in layers],
        "groups": {name: _by_field(group.mean(0)) for name, group in groups.items() if len(group)},
        "overall": _by_field(layers.mean(0)),
    }


def _by_field(row: Float[np.ndarray, " field"]) -> dict[str, float]:
    """Return the values of a row by the name of their field."""
    return dict(zip(FIELDS, row.tolist(), strict=True))


@contextmanager
def _eager_attention(network: Any) -> Iterator[None]:
    """Inside a `with` block, use transformers' plain attention, which computes whole matrices."""
    implementation = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(implementation)


@torch.inference_mode()
def attention_rows(reranker: Reranker, pair: PairIds) -> Float[np.ndarray, "layer token"]:
    """Return the attention of the scoring position in each layer, averaged over heads.

    Raises:
        SkilltrainError: The attention of a layer cannot be read.
    """
    network = reranker.network
    is_causal = reranker.yes_no_ids is not None
    position = -1 if is_causal else 0
    with _recorded_attention(network, position, len(pair)) as rows:
        if is_causal:
            token_ids = torch.tensor([pair.ids], device=reranker.device)  # [1, token]
            network.get_decoder()(token_ids, use_cache=False)
        else:
            reranker([pair])
    num_layers = network.config.num_hidden_layers
    if len(rows) != num_layers:
        problem = (
            f"the attention of {type(network).__name__} can be read in {len(rows)} of its "
            f"{num_layers} layers only"
        )
        raise SkilltrainError("unsupported-model", problem)
    return np.stack(rows)


@contextmanager
def _recorded_attention(network: Any, position: int, num_tokens: int) -> Iterator[list[np.ndarray]]:
    """Record one row of each layer's attention while the network runs in the `with` block.

    Args:
        network: The network.
        position: Token whose row is recorded.
        num_tokens: Number of tokens of the input.
    """
    rows = []  # [token] each

    def keep_row(_: Any, inputs: Any, outputs: Any) -> Any:
        """Store one row of attention weights, and remove the weights from a module's outputs."""
        if not isinstance(outputs, tuple) or len(outputs) < 2:
            return None
        hidden, weights, *further_outputs = outputs
        if not isinstance(weights, Tensor) or weights.shape[-2:] != (num_tokens, num_tokens):
            return None
        row = weights[0, :, position]  # [head, token]
        rows.append(row.double().mean(0).cpu().numpy())
        return (hidden, None, *further_outputs)

    hooks = [module.register_forward_hook(keep_row) for module in network.modules()]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def token_fields(reranker: Reranker, skill: Skill) -> FieldMask:
    """Return which field each token of a skill belongs to, as the reranker tokenises it.

    Returns:
        A row for each token, with at most one True. A separator or a word of the template has none.
    """
    template = reranker.settings.template
    prompt = template.skill_prompt()
    lead = f"\n{prompt}" if prompt else ""  # PairTokenizer puts it before the skill
    text = lead + template.render_skill(skill)
    ids, spans = reranker.pair_tokenizer.text.ids_and_spans(text)
    [skill_ids] = reranker.pair_tokenizer.skill_ids([skill])
    num_lead_tokens = len(ids) - len(skill_ids)
    if ids[num_lead_tokens:] != skill_ids:
        raise RuntimeError("a skill's tokens and its characters do not match")

    char_in_field = np.zeros((len(text), len(FIELDS)), dtype=bool)  # [character, field]
    field_start = len(lead)
    for field, field_text in template.skill.field_texts(skill).items():
        field_end = field_start + len(field_text)
        char_in_field[field_start:field_end, FIELDS.index(field)] = True
        field_start = field_end + len(template.skill.separator)
    return _token_in_field(char_in_field, spans[num_lead_tokens:])


def _token_in_field(
    char_in_field: Bool[np.ndarray, "character field"], spans: Sequence[tuple[int, int]]
) -> FieldMask:
    """Return the field that most characters of each token belong to.

    Args:
        char_in_field: Whether a character belongs to a field.
        spans: Start and end of each token's characters.
    """
    in_field = np.zeros((len(spans), len(FIELDS)), dtype=bool)  # [token, field]
    for token, (start, end) in enumerate(spans):
        start = min(start, end - 1)
        num_chars = char_in_field[start:end].sum(0)  # [field]
        if num_chars.any():
            in_field[token, num_chars.argmax()] = True
    return in_field
