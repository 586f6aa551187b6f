"""The reranker: a query and a skill in, one relevance score out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.models import loading, shared_prompt
from skilltrain.models.micro_batches import (
    Groups,
    Texts,
    embed_together,
    micro_batches,
    model_inputs,
    on_device,
)
from skilltrain.models.pairs import PairIds, PairTokenizer, RerankerSettings
from skilltrain.models.pooling import at_least_float32, pool
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate, with_fields


class RerankerConfig(loading.ModelConfig):
    """Which reranker to load. What is left out comes from the model's own folder."""

    max_tokens: int | None = Field(
        default=None, ge=32, description="token limit of a (query, skill) pair"
    )
    query_max_tokens: int | None = Field(
        default=None, ge=8, description="token limit of the query inside a pair"
    )
    template: RerankerTemplate | None = Field(
        default=None, description="the texts it sees, or skillrouter_released"
    )


class Reranker(nn.Module):
    """A transformer that scores pairs: by a classification head, or by logit(yes) - logit(no)."""

    def __init__(self, network: Any, tokenizer: Any, settings: RerankerSettings) -> None:
        super().__init__()
        self.network: Any = network
        self.tokenizer, self.settings = tokenizer, settings
        self.pairs = PairTokenizer(tokenizer, settings)
        self.yes_no_ids = yes_no_ids(tokenizer) if settings.template.form == "yes_no" else None
        self.is_packed = self.yes_no_ids is not None and shared_prompt.can_share(network)
        if self.is_packed:
            shared_prompt.enable(network)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def tokenize(self, query: str, skills: Sequence[Skill]) -> list[PairIds]:
        """Token ids of one raw query paired with each skill; template and caps are applied here."""
        query_ids = self.pairs.query(query)
        return [self.pairs.join(query_ids, skill_ids) for skill_ids in self.pairs.skills(skills)]

    def micro_batches(self, lists: Sequence[Sequence[PairIds]], token_budget: int) -> Groups:
        """Positions of all lists' pairs in groups; a packed one is of one list, and its prompt counts once."""
        if not self.is_packed:
            return micro_batches([len(pair) for pairs in lists for pair in pairs], token_budget)
        groups, first = [], 0
        for pairs in filter(None, lists):
            shared = shared_prompt.num_shared([pair.ids for pair in pairs])
            found = micro_batches([len(pair) for pair in pairs], token_budget, shared)
            groups += [[first + place for place in group] for group in found]
            first += len(pairs)
        return groups

    def num_slots(self, pairs: Sequence[PairIds]) -> int:
        if self.is_packed:
            shared = shared_prompt.num_shared([pair.ids for pair in pairs])
            return sum(map(len, pairs)) - shared * (len(pairs) - 1)
        return max(map(len, pairs)) * len(pairs)

    def embed(self, pairs: Sequence[PairIds]) -> list[PairIds]:
        """The same pairs with their tokens' embeddings, for scoring them in several micro-batches."""
        rows = embed_together(self.network, [pair.ids for pair in pairs])
        return [replace(pair, rows=row) for pair, row in zip(pairs, rows, strict=True)]

    def direction(self) -> Float[Tensor, "dim"] | None:
        """The head's row of `yes` less its row of `no`, or its only row, in float32 or wider; None for the form pair.

        Read once per step: its gradient is as large as the vocabulary's whole table.
        """
        if self.yes_no_ids is None:
            return None
        if classifiers := loading.heads(self.network):
            return at_least_float32(next(classifiers[0].parameters())[0])
        head = self.network.get_output_embeddings().weight
        rows = at_least_float32(head[on_device(torch.tensor(self.yes_no_ids), head.device)])
        return rows[0] - rows[1]

    def forward(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair"]:
        """Scores of one micro-batch, in float32 or wider: logits, not probabilities."""
        return self.score(pairs, self.direction())

    def score(
        self, pairs: Sequence[PairIds], direction: Float[Tensor, "dim"] | None
    ) -> Float[Tensor, "pair"]:
        if direction is not None:
            last = self._last_hidden(pairs)
            with torch.autocast(
                last.device.type, enabled=False
            ):  # bfloat16 would round the score itself
                return at_least_float32(last) @ direction
        inputs, mask = self._inputs(pairs)
        starts = on_device(torch.tensor([pair.second_start for pair in pairs]), mask.device)
        segments = (
            torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]
        ).long() * mask
        if (
            getattr(self.network.config, "type_vocab_size", None) or 0
        ) > 1:  # XLM-R's table of segments has one row
            inputs["token_type_ids"] = segments
        return at_least_float32(self.network(**inputs, attention_mask=mask).logits[:, 0])

    def _inputs(
        self, pairs: Sequence[PairIds]
    ) -> tuple[dict[str, Tensor], Int[Tensor, "pair token"]]:
        return model_inputs(_texts(pairs), self.tokenizer.pad_token_id, self.device)

    def _last_hidden(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair dim"]:
        decoder = self.network.get_decoder()
        if self.is_packed:
            num_prompt = shared_prompt.num_shared([pair.ids for pair in pairs])
            packed = shared_prompt.PackedTexts(pairs, num_prompt, self.device)
            return shared_prompt.last_hidden(decoder, packed, _texts(pairs))
        inputs, mask = self._inputs(pairs)
        return pool(
            decoder(**inputs, attention_mask=mask, use_cache=False).last_hidden_state,
            mask,
            "last_token",
        )


def _texts(pairs: Sequence[PairIds]) -> Texts:
    """Return the pairs' embedded tokens, or their ids if these have not been looked up."""
    embedded = [pair.rows for pair in pairs if pair.rows is not None]
    return embedded or [pair.ids for pair in pairs]


def yes_no_ids(tokenizer: Any) -> tuple[int, int]:
    """The ids of `yes` and `no`. Raises SkilltrainError for a tokenizer that splits either."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(word) != 1 for word in ids):
        raise SkilltrainError(
            "the tokenizer has no single tokens 'yes' and 'no'", fix="use template.form=pair"
        )
    return ids[0][0], ids[1][0]


def load_reranker(
    config: RerankerConfig,
    device: torch.device,
    options: Mapping[str, Any] = MappingProxyType({}),
    new_head: bool = False,
) -> Reranker:
    """The reranker that `config` names, in evaluation mode (on the device meta: shapes); `options` as `load_encoder`.

    Causal language models score by yes/no logits, others by a classification head with one output. With `new_head`, as
    training says, a template of the form pair makes a reranker of an encoder. Raises SkilltrainError if there is no
    such model, it is an encoder, or its folder does not hold all of it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = loading.resolve_model(config.source)
    may_be_encoder = new_head and config.template is not None
    if may_be_encoder and loading.is_encoder(folder):
        stored = {}
    else:
        stored = loading.stored_settings(folder, "reranker")
    model_config = loading.load_model_config(folder)
    causal = any("CausalLM" in name for name in model_config.architectures or [])
    given = config.model_dump(exclude_none=True, include={*RerankerSettings.model_fields})
    if causal and "template" not in stored | given:
        stored["template"] = {"form": "yes_no"}
    settings = validate(RerankerSettings, stored | given, folder)
    was_causal = stored.get("template", {}).get("form") == "yes_no"
    if settings.template.form == "yes_no" and not (causal or was_causal):
        raise SkilltrainError(
            "template.form=yes_no needs a causal language model", where=config.source
        )
    tokenizer = loading.load_tokenizer(folder)
    settings = _fitting(settings, tokenizer, model_config, config.source)
    settings = settings.model_copy(
        update={"template": with_fields(settings.template, config.fields)}
    )
    given = {**loading.loading_options(config, model_config, device), **options}
    given.pop("add_pooling_layer", None)  # where there is a head, the pooler is part of it
    if causal and settings.template.form == "yes_no":
        network = loading.load_network(AutoModelForCausalLM, folder, tokenizer, given)
    else:
        given["num_labels"] = 1
        auto_class = AutoModelForSequenceClassification
        network = loading.load_network(auto_class, folder, tokenizer, given, new_head)
    for head in loading.heads(network):
        head.float()  # logits in bfloat16 are steps of up to 1/32: close candidates would tie
        head.register_forward_pre_hook(loading.in_own_dtype)
    return Reranker(network.to(device).eval(), tokenizer, settings)


def _fitting(
    settings: RerankerSettings, tokenizer: Any, model_config: Any, where: str
) -> RerankerSettings:
    """`settings` within the model's positions and with room for a skill: a default adapts, a chosen limit must fit."""
    chosen = {name: getattr(settings, name) for name in settings.model_fields_set}
    limit = loading.num_positions(model_config)
    if limit is not None and settings.max_tokens > limit:
        if "max_tokens" in chosen:
            raise SkilltrainError(f"max_tokens exceeds the model's {limit} positions", where=where)
        settings = RerankerSettings.model_validate(chosen | {"max_tokens": limit})
    room = PairTokenizer(tokenizer, settings).query_room()
    if settings.query_max_tokens <= room:
        return settings
    if "query_max_tokens" in chosen or room < 8:
        what = f"query_max_tokens ({settings.query_max_tokens}) leaves no room for a skill in max_tokens"
        raise SkilltrainError(f"{what} ({settings.max_tokens})", where=where)
    return settings.model_copy(update={"query_max_tokens": room})
