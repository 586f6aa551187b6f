"""Attention of a reranker to name, description and body (SkillRouter, 3.2 and appendix F)."""

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
_BODY = FIELDS.index("body")
LayerShares = Float[np.ndarray, "layer field"]


def field_attention(
    reranker: Reranker, pairs: Sequence[tuple[Query, Skill]], model_name: str
) -> Row:
    """Measure how the attention to a skill is distributed over its fields, averaged over pairs.

    A field that is empty, not in the template, or cut away has the share 0.

    Args:
        reranker: The model.
        pairs: Queries and skills.
        model_name: Name of the reranker in a report.

    Returns:
        Averages over all pairs. A share is a dict such as `{"name": 0.3, "body": 0.7}`.

        - `model`: name of the reranker.
        - `layers`: share of attention in each layer.
        - `groups`: share in the first quarter of the layers, the middle half and the last quarter.
        - `overall`, `tokens`: shares of attention over all layers, and of the skill's tokens.
        - `over_pairs`: how the shares differ between pairs (see `pair_statistics`).
        - `pairs`: a dict for each pair, with its shares over all layers (`overall`) and in the
          last layer (`last_layer`), its shares of tokens, and the number of tokens cut away.

    Raises:
        SkilltrainError: There is no pair, the reranker sees no token of a skill, or it has no
            single scoring position.
    """
    _check_scoring_position(reranker)
    if not pairs:
        problem = "no (query, skill) pairs to read the attention of"
        raise SkilltrainError("nothing-to-analyse", problem, where=model_name)

    # Each list below has one item for each pair.
    shares: list[LayerShares] = []  # share of attention: [layer, field]
    token_shares: list[Float[np.ndarray, " field"]] = []  # share of the skill's tokens: [field]
    body_lengths = []  # tokens of the body that the model sees
    rows = []
    # Only the plain ("eager") implementation of attention returns the weights.
    with _eager_attention(reranker.network):
        for query, skill in track(pairs, "attention by field", len(pairs)):
            [pair] = reranker.tokenize(query.text, [skill])
            in_field = token_fields(reranker, skill)  # [token, field], True in the token's field
            num_tokens = len(in_field) - pair.num_cut  # tokens of the skill that the model sees
            in_field = in_field[:num_tokens]
            pair_shares = _pair_shares(reranker, pair, in_field, model_name, skill.skill_id)
            shares.append(pair_shares)
            token_shares.append(in_field.sum(0) / in_field.sum())
            body_lengths.append(int(in_field[:, _BODY].sum()))
            row = {"query_id": query.query_id, "skill_id": skill.skill_id, "num_cut": pair.num_cut}
            row["overall"] = _by_field(pair_shares.mean(0))
            row["last_layer"] = _by_field(pair_shares[-1])
            row["tokens"] = _by_field(token_shares[-1])
            rows.append(row)

    # `shares` is [pair, layer, field]: axis 0 averages over pairs, and axis 1 over layers.
    # `means` has the keys `layers`, `groups` and `overall`.
    means = _layer_means(np.mean(shares, axis=0))
    tokens = _by_field(np.mean(token_shares, axis=0))
    over_pairs = pair_statistics(np.stack(shares), np.stack(token_shares), body_lengths)
    return {"model": model_name, **means, "tokens": tokens, "over_pairs": over_pairs, "pairs": rows}


def _check_scoring_position(reranker: Reranker) -> None:
    """Raise SkilltrainError if a classifier pools all tokens.

    The attention is read at the position from which the score is computed. A classifier that pools
    all tokens has no such position.
    """
    pooling = getattr(reranker.network.config, "classifier_pooling", "cls")
    if pooling != "cls":
        problem = f"a classifier with {pooling} pooling has no scoring position"
        raise SkilltrainError("unsupported-model", problem)


def pair_statistics(
    shares: Float[np.ndarray, "pair layer field"],
    token_shares: Float[np.ndarray, "pair field"],
    body_lengths: Sequence[int],
) -> dict[str, Any]:
    """Return how the shares of attention differ between pairs (fourth version, appendix C).

    If attention followed length alone, each field would get its share of the tokens.

    Args:
        shares: Share of the attention to each field, in each pair and layer.
        token_shares: Share of the skill's tokens in each field, in each pair.
        body_lengths: Length of the body in each pair, in tokens.

    Returns:
        - `sd`: standard deviation by field of the shares over all layers.
        - `num_body_above_tokens`: number of pairs in which the last layer gives the body more than
          the body's share of tokens. The paper reports 69 of 75.
        - `body_length_r`: Pearson's correlation of the body's share in the last layer with the
          body's length. None if the share or the length is the same in all pairs.
    """
    last_body_shares = shares[:, -1, _BODY]  # [pair]
    # The correlation is only defined if both values vary. `ptp` is the maximum minus the minimum.
    varies = np.ptp(last_body_shares) > 0 and np.ptp(body_lengths) > 0
    correlation = float(np.corrcoef(last_body_shares, body_lengths)[0, 1]) if varies else None
    return {
        "sd": _by_field(shares.mean(1).std(0)),
        "num_body_above_tokens": int((last_body_shares > token_shares[:, _BODY]).sum()),
        "body_length_r": correlation,
    }


def _pair_shares(
    reranker: Reranker,
    pair: PairIds,
    in_field: Bool[np.ndarray, "token field"],
    model_name: str,
    skill_id: str,
) -> LayerShares:
    """Return the share of attention to each field of a skill, for each layer.

    Fields are name, description and body. The scoring position is the token from which the score is
    computed (see `attention_rows`). Its attention is normalised, so that the shares of a layer sum
    to 1.

    Args:
        reranker: The model.
        pair: Tokens of the query and the skill.
        in_field: Whether a token of the skill belongs to a field. Tokens of the template's words
            between the fields belong to none.
        model_name: Name of the reranker, for errors.
        skill_id: Id of the skill, for errors.

    Raises:
        SkilltrainError: The reranker sees no token of any field, or a layer gives no attention to
            the fields.
    """
    # The query may be so long that the skill was cut off.
    if not in_field.any():
        problem = "the reranker sees no token of this skill's name, description or body"
        raise SkilltrainError("nothing-to-analyse", problem, where=f"skill {skill_id}")
    # The tokens of a pair: query, skill, and the template's words after the skill.
    skill_start = pair.second_start
    skill_end = skill_start + len(in_field)
    attention = attention_rows(reranker, pair)[:, skill_start:skill_end]  # [layer, token]
    # Add up the attention of each field's tokens: the product with a mask is a sum.
    weights = attention @ in_field  # [layer, field]
    sums = weights.sum(1, keepdims=True)  # [layer, 1]
    bad_layers = np.flatnonzero(~(sums > 0))  # the sum is 0 or NaN
    if bad_layers.size:
        problem = f"layer {bad_layers[0]} gives the fields no attention that could be compared"
        raise SkilltrainError(
            "nothing-to-analyse", problem, where=f"{model_name}, skill {skill_id}"
        )
    return weights / sums


def _layer_means(layers: LayerShares) -> Row:
    """Return the shares of each layer, and their means over groups of layers and all layers.

    The groups are the first quarter of the layers, the middle half, and the last quarter.

    Args:
        layers: Share of the attention to each field: [layer, field].
    """
    quarter = len(layers) // 4
    late_start = len(layers) - quarter
    groups = {
        "early": layers[:quarter],
        "middle": layers[quarter:late_start],
        "late": layers[late_start:],
    }
    return {
        "layers": [_by_field(layer) for layer in layers],
        # A model with fewer than four layers has empty groups, which are left out.
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

    The scoring position is the token whose output gives the score: the last token in a causal
    model, which answers yes or no, and else the first token.

    Raises:
        SkilltrainError: The attention of a layer cannot be read.
    """
    network = reranker.network
    is_causal = reranker.yes_no_ids is not None
    position = -1 if is_causal else 0
    rows = []  # one for each layer

    def keep_row(_: Any, inputs: Any, outputs: Any) -> Any:
        """Store the row of the scoring position, and remove the weights from a module's outputs.

        All matrices together would take too much memory. A module without weights is ignored.
        """
        if not isinstance(outputs, tuple) or len(outputs) < 2:
            return None
        hidden, weights, *further_outputs = outputs
        # Attention weights have the shape [pair, head, token, token]. Ignore other tensors.
        if not isinstance(weights, Tensor) or weights.shape[-2:] != (len(pair), len(pair)):
            return None
        row = weights[0, :, position]  # [head, token]
        rows.append(row.double().mean(0).cpu().numpy())
        return (hidden, None, *further_outputs)

    hooks = [module.register_forward_hook(keep_row) for module in network.modules()]
    try:
        if is_causal:
            # `reranker.forward` would change the attention, to score several pairs at once.
            token_ids = torch.tensor([pair.ids], device=reranker.device)  # [1, token]
            network.get_decoder()(token_ids, use_cache=False)
        else:
            reranker([pair])
    finally:
        for hook in hooks:
            hook.remove()
    # Some models return their weights in another form, which `keep_row` ignores.
    num_layers = network.config.num_hidden_layers
    if len(rows) != num_layers:
        problem = (
            f"the attention of {type(network).__name__} can be read in {len(rows)} of its "
            f"{num_layers} layers only"
        )
        raise SkilltrainError("unsupported-model", problem)
    return np.stack(rows)


def token_fields(reranker: Reranker, skill: Skill) -> Bool[np.ndarray, "token field"]:
    """Return which field each token of a skill belongs to, as the reranker tokenises it.

    - A token belongs to the field that most of its characters come from: ` pods` belongs to the
      name, although its space does not.
    - Tokens of separators and of the template's words belong to no field.
    - If a character is split into several tokens, each of these tokens belongs to its field.

    Returns:
        A row for each token, with True in the column of the token's field. Tokens of no field have
        no True.
    """
    template = reranker.settings.template
    prompt = template.skill_prompt()
    # PairTokenizer puts this text before the skill, and it can change the skill's first tokens.
    lead = f"\n{prompt}" if prompt else ""
    text = lead + template.render_skill(skill)
    ids, spans = reranker.pair_tokenizer.text.ids_and_spans(text)
    [skill_ids] = reranker.pair_tokenizer.skill_ids([skill])
    # `skill_ids` lacks the tokens of the line break, which come first in `ids`.
    num_lead = len(ids) - len(skill_ids)
    if ids[num_lead:] != skill_ids:
        raise RuntimeError("a skill's tokens and its characters do not match")

    # Find the field of each character.
    char_in_field = np.zeros((len(text), len(FIELDS)), dtype=bool)  # [character, field]
    field_start = len(lead)
    for field, field_text in template.skill.field_texts(skill).items():
        field_start += len(template.skill.label(field))
        field_end = field_start + len(field_text)
        char_in_field[field_start:field_end, FIELDS.index(field)] = True
        field_start = field_end + len(template.skill.separator)

    # Find the field of each token.
    in_field = np.zeros((len(skill_ids), len(FIELDS)), dtype=bool)  # [token, field]
    for token, (start, end) in enumerate(spans[num_lead:]):
        # For a run of spaces, some tokenizers return an empty span (start = end) after the last
        # space. Start an empty span one character earlier. Other spans stay as they are.
        start = min(start, end - 1)
        num_chars = char_in_field[start:end].sum(0)  # [field]
        if num_chars.any():
            # The field with the most characters of the token gets the token.
            in_field[token, num_chars.argmax()] = True
    return in_field
