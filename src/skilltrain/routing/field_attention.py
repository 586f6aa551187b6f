"""Where a reranker looks in a skill: name, description or body (SkillRouter, section 3.2 and appendix F)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.slices import Row
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.records import Query, Skill
from skilltrain.templates import FIELDS_SEEN
from skilltrain.terminal import track

FIELDS = FIELDS_SEEN["full"]


def field_attention(reranker: Reranker, pairs: Sequence[tuple[Query, Skill]], model: str) -> Row:
    """How attention to each pair's skill is shared by its fields: that of the last position (of the first for models
    with a classification token), averaged over heads, normalised over the pair's fields, averaged over pairs.

    `layers` has field → share for each layer, `groups` the means of the first quarter, the half after it and the last
    quarter (of 28 layers 0–6, 7–20 and 21–27, the paper's), `overall` that of all; `tokens` is what attention without a
    preference would give: the fields' share of tokens. `pairs` has both of each pair, and the tokens cut away. A field
    that is empty, not in the template, or cut away whole, has the share 0. `model` is the reranker's name in a report.
    Raises SkilltrainError for no pairs, a skill of which the reranker sees no token, and a reranker without one scoring
    position.
    """
    if (pooling := getattr(reranker.network.config, "classifier_pooling", "cls")) != "cls":
        raise SkilltrainError(f"a classifier with {pooling} pooling has no scoring position")
    if not pairs:
        raise SkilltrainError("no (query, skill) pairs to read the attention of", where=model)
    shares, tokens, rows = [], [], list[Row]()
    with _eager(reranker.network):
        for query, skill in track(pairs, "attention by field", len(pairs)):
            (pair,) = reranker.tokenize(query.text, [skill])
            fields = token_fields(reranker, skill)
            fields = fields[: len(fields) - pair.num_cut]
            if not fields.any():
                what = "the reranker sees no token of this skill's name, description or body"
                raise SkilltrainError(what, where=f"skill {skill.skill_id}")
            weights = (
                attention_rows(reranker, pair)[
                    :, pair.second_start : pair.second_start + len(fields)
                ]
                @ fields
            )
            if (silent := np.flatnonzero(~(weights.sum(1) > 0))).size:  # nothing, or no number
                what = f"layer {silent[0]} gives the skill's fields no attention that could be compared"
                raise SkilltrainError(what, where=f"{model}, skill {skill.skill_id}")
            tokens.append(fields.sum(0) / fields.sum())
            shares.append(weights / weights.sum(1, keepdims=True))
            ids = {"query_id": query.query_id, "skill_id": skill.skill_id}
            found = {
                "overall": _named(shares[-1].mean(0)),
                "tokens": _named(tokens[-1]),
                "num_cut": pair.num_cut,
            }
            rows.append(ids | found)
    layers, quarter = np.mean(shares, axis=0), reranker.network.config.num_hidden_layers // 4
    parts = dict(
        zip(
            ("early", "middle", "late"),
            np.split(layers, [quarter, len(layers) - quarter]),
            strict=True,
        )
    )
    return {
        "model": model,
        "layers": [_named(layer) for layer in layers],
        "groups": {name: _named(part.mean(0)) for name, part in parts.items() if len(part)},
        "overall": _named(layers.mean(0)),
        "tokens": _named(np.mean(tokens, axis=0)),
        "pairs": rows,
    }


def _named(row: Float[np.ndarray, " field"]) -> dict[str, float]:
    return dict(zip(FIELDS, row.tolist(), strict=True))


@contextmanager
def _eager(network: Any) -> Iterator[None]:
    """Let `network` attend by transformers' plain code, which computes whole matrices, inside the block."""
    own = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(own)


@torch.inference_mode()
def attention_rows(reranker: Reranker, pair: PairIds) -> Float[np.ndarray, "layer token"]:
    """The attention of the scoring position, the mean over heads: of the last token in a causal model, else the first.

    Of one layer's matrices at a time only that row is kept. Raises SkilltrainError where not every layer shows them.
    """
    network, rows = reranker.network, list[np.ndarray]()
    place = 0 if reranker.yes_no_ids is None else -1

    def keep_row(_: Any, inputs: Any, outputs: Any) -> Any:
        """A module's outputs without its matrices [1, head, token, token], if it has any: no outer one sees them."""
        values: list[Any] = [*outputs] if isinstance(outputs, tuple) else []
        weights = values[1] if len(values) > 1 else None
        if not isinstance(weights, Tensor) or weights.shape[-2:] != (len(pair), len(pair)):
            return None
        rows.append(weights[0, :, place].double().mean(0).cpu().numpy())
        return (values[0], None, *values[2:])

    hooks = [module.register_forward_hook(keep_row) for module in network.modules()]
    try:
        if place == 0:
            reranker([pair])
        else:  # without what `forward` does to score several pairs at once
            network.get_decoder()(torch.tensor([pair.ids], device=reranker.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(rows) != network.config.num_hidden_layers:
        name, num_layers = type(network).__name__, network.config.num_hidden_layers
        raise SkilltrainError(
            f"the attention of {name} can be read in {len(rows)} of its {num_layers} layers only"
        )
    return np.stack(rows)


def token_fields(reranker: Reranker, skill: Skill) -> Bool[np.ndarray, "token field"]:
    """Which field each token of `reranker.pairs.skills([skill])` belongs to, at most one.

    It is the one that most of the token's characters come from: ` pods` is of the name, though its space is not.
    Tokens of separators and of the template's own words belong to none. The pieces of a character that takes several
    tokens each count.
    """
    template = reranker.settings.template
    prompt = template.skill_prompt()
    lead = (
        f"\n{prompt}" if prompt else ""
    )  # what PairTokenizer gives the tokenizer to read before the skill
    (own,) = reranker.pairs.skills([skill])
    ids, spans = reranker.pairs.text.ids_and_spans(lead + template.render_skill(skill))
    num_before = len(ids) - len(own)
    if ids[num_before:] != own:
        raise RuntimeError("a skill's tokens and its characters do not match")
    starts, ends = (np.array(spans[num_before:], dtype=np.int64).reshape(-1, 2) - len(lead)).T
    starts = np.minimum(
        starts, ends - 1
    )  # a run of spaces may be told as the empty span at its end
    shared, first = np.zeros((len(own), len(FIELDS)), dtype=np.int64), 0
    for field, text in template.skill.parts(skill).items():
        last = first + len(text)
        shared[:, FIELDS.index(field)] = np.minimum(ends, last) - np.maximum(starts, first)
        first = last + len(template.skill.separator)
    best = np.arange(len(FIELDS)) == shared.argmax(1)[:, None]
    return best & (shared > 0)
