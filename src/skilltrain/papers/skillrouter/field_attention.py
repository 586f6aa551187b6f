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


def field_attention(reranker: Reranker, pairs: Sequence[tuple[Query, Skill]], model: str) -> Row:
    """Measure how the attention to a skill is distributed over its fields, averaged over pairs.

    The attention of the scoring position (see `attention_rows`) is averaged over heads and
    normalised over the fields of a pair. A field that is empty, not in the template, or cut away
    has the share 0.

    Args:
        reranker: The model.
        pairs: Queries and skills.
        model: Name of the reranker in a report.

    Returns:
        `layers`: share by field, for each layer. `groups`: means of the first quarter of layers,
        the middle half and the last quarter (layers 0-6, 7-20 and 21-27 of 28, as in the paper).
        `overall`: mean of all layers. `tokens`: share of the tokens by field, which uniform
        attention would give. `pairs`: `overall`, `tokens` and the number of tokens cut away, for
        each pair.

    Raises:
        SkilltrainError: There is no pair, the reranker sees no token of a skill, or it has no
            single scoring position.
    """
    pooling = getattr(reranker.network.config, "classifier_pooling", "cls")
    if pooling != "cls":
        raise SkilltrainError(
            "unsupported-model", f"a classifier with {pooling} pooling has no scoring position"
        )
    if not pairs:
        raise SkilltrainError(
            "nothing-to-analyse", "no (query, skill) pairs to read the attention of", where=model
        )
    shares: list[Float[np.ndarray, "layer field"]] = []
    tokens: list[Float[np.ndarray, " field"]] = []
    rows: list[Row] = []
    with _eager(reranker.network):
        for query, skill in track(pairs, "attention by field", len(pairs)):
            (pair,) = reranker.tokenize(query.text, [skill])
            fields = token_fields(reranker, skill)
            fields = fields[: len(fields) - pair.num_cut]
            if not fields.any():
                fault = "the reranker sees no token of this skill's name, description or body"
                raise SkilltrainError("nothing-to-analyse", fault, where=f"skill {skill.skill_id}")
            attention = attention_rows(reranker, pair)[:, pair.second_start :]  # [layer, token]
            weights = attention[:, : len(fields)] @ fields  # [layer, field]
            bad_layers = np.flatnonzero(~(weights.sum(1) > 0))  # 0 or NaN
            if bad_layers.size:
                fault = (
                    f"layer {bad_layers[0]} gives the skill's fields no attention that could be "
                    "compared"
                )
                raise SkilltrainError(
                    "nothing-to-analyse", fault, where=f"{model}, skill {skill.skill_id}"
                )
            shares.append(weights / weights.sum(1, keepdims=True))
            tokens.append(fields.sum(0) / fields.sum())
            rows.append(
                {
                    "query_id": query.query_id,
                    "skill_id": skill.skill_id,
                    "overall": _by_field(shares[-1].mean(0)),
                    "tokens": _by_field(tokens[-1]),
                    "num_cut": pair.num_cut,
                }
            )

    means = _layer_means(np.mean(shares, axis=0))
    return {"model": model, **means, "tokens": _by_field(np.mean(tokens, axis=0)), "pairs": rows}


def _layer_means(layers: Float[np.ndarray, "layer field"]) -> Row:
    """Return the shares of each layer, of groups of layers, and of all layers."""
    quarter = len(layers) // 4
    groups = {
        "early": layers[:quarter],
        "middle": layers[quarter : len(layers) - quarter],
        "late": layers[len(layers) - quarter :],
    }
    return {
        "layers": [_by_field(layer) for layer in layers],
        "groups": {name: _by_field(part.mean(0)) for name, part in groups.items() if len(part)},
        "overall": _by_field(layers.mean(0)),
    }


def _by_field(row: Float[np.ndarray, " field"]) -> dict[str, float]:
    return dict(zip(FIELDS, row.tolist(), strict=True))


@contextmanager
def _eager(network: Any) -> Iterator[None]:
    """Use transformers' plain attention, which computes whole matrices, inside the block."""
    implementation = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(implementation)


@torch.inference_mode()
def attention_rows(reranker: Reranker, pair: PairIds) -> Float[np.ndarray, "layer token"]:
    """Return the attention of the scoring position in each layer, averaged over heads.

    The scoring position is the last token in a causal model, and else the first.

    Raises:
        SkilltrainError: The attention of a layer cannot be read.
    """
    network = reranker.network
    position = 0 if reranker.yes_no_ids is None else -1
    rows: list[np.ndarray] = []

    def keep_row(_: Any, inputs: Any, outputs: Any) -> Any:
        """Store one row of attention weights [1, head, token, token], and remove the weights."""
        values = [*outputs] if isinstance(outputs, tuple) else []
        weights = values[1] if len(values) > 1 else None
        if not isinstance(weights, Tensor) or weights.shape[-2:] != (len(pair), len(pair)):
            return None
        # Only this row is kept, because all matrices together would take too much memory.
        rows.append(weights[0, :, position].double().mean(0).cpu().numpy())
        return (values[0], None, *values[2:])

    hooks = [module.register_forward_hook(keep_row) for module in network.modules()]
    try:
        if reranker.yes_no_ids is None:
            reranker([pair])
        else:  # not `reranker.forward`, which changes the attention to score several pairs at once
            network.get_decoder()(torch.tensor([pair.ids], device=reranker.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    num_layers = network.config.num_hidden_layers
    if len(rows) != num_layers:
        name = type(network).__name__
        raise SkilltrainError(
            "unsupported-model",
            f"the attention of {name} can be read in {len(rows)} of its {num_layers} layers only",
        )
    return np.stack(rows)


def token_fields(reranker: Reranker, skill: Skill) -> Bool[np.ndarray, "token field"]:
    """Return which field each token of `reranker.pair_tokenizer.skill_ids([skill])` belongs to, at most one.

    A token belongs to the field that most of its characters come from: ` pods` belongs to the name,
    although its space does not. Tokens of separators and of the template's own words belong to no
    field. If a character takes several tokens, each of them counts.
    """
    template = reranker.settings.template
    prompt = template.skill_prompt()
    lead = f"\n{prompt}" if prompt else ""  # PairTokenizer puts it before the skill
    text = lead + template.render_skill(skill)
    ids, spans = reranker.pair_tokenizer.text.ids_and_spans(text)
    (skill_ids,) = reranker.pair_tokenizer.skill_ids([skill])
    num_before = len(ids) - len(skill_ids)
    if ids[num_before:] != skill_ids:
        raise RuntimeError("a skill's tokens and its characters do not match")

    owners = np.zeros((len(text), len(FIELDS)), dtype=bool)  # [character, field]
    start = len(lead)
    for field, part in template.skill.field_texts(skill).items():
        end = start + len(part)
        owners[start:end, FIELDS.index(field)] = True
        start = end + len(template.skill.separator)

    fields = np.zeros((len(skill_ids), len(FIELDS)), dtype=bool)
    for token, (start, end) in zip(fields, spans[num_before:], strict=True):
        # Some tokenizers give a run of spaces the empty span at its end.
        counts = owners[min(start, end - 1) : end].sum(0)
        token[counts.argmax()] = counts.any()
    return fields
