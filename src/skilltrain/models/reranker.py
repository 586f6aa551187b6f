"""Reranker that scores how relevant a skill is to a query.

A causal language model scores by the logits of yes and no, any other model by a classification head
with one output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
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
from skilltrain.models.pairs import (
    MIN_QUERY_TOKENS,
    PairIds,
    PairTokenizer,
    RerankerSettings,
)
from skilltrain.models.pooling import at_least_float32, pool
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate, with_fields


class RerankerConfig(loading.ModelConfig):
    """Settings that select a reranker. A setting that is null comes from the model's folder."""

    max_tokens: int | None = Field(
        default=None, ge=32, description="token limit of a (query, skill) pair"
    )
    query_max_tokens: int | None = Field(
        default=None,
        ge=MIN_QUERY_TOKENS,
        description="token limit of the query inside a pair",
    )
    template: RerankerTemplate | None = Field(
        default=None, description="how it reads pairs, or skillrouter_released"
    )


class Reranker(nn.Module):
    """A transformer that scores (query, skill) pairs.

    The score is the output of a classification head, or logit(yes) - logit(no).

    Attributes:
        network: The transformer with its head.
        tokenizer: The tokenizer of transformers.
        settings: Template and token limits.
        pair_tokenizer: Tokenizer of untrusted queries and skills.
        yes_no_ids: Token ids of `yes` and `no` for the form yes_no, else None.
        is_packed: Whether the pairs of a query form one row, in which their common beginning, the
            prompt with the query, occurs once.
    """

    def __init__(self, network: Any, tokenizer: Any, settings: RerankerSettings) -> None:
        """Make a reranker, which packs the pairs of a query if its network supports packing."""
        super().__init__()
        self.network: Any = network
        self.tokenizer = tokenizer
        self.settings = settings
        self.pair_tokenizer = PairTokenizer(tokenizer, settings)
        self.yes_no_ids = yes_no_ids(tokenizer) if settings.template.form == "yes_no" else None
        # In the form yes_no, a pair is one text of a causal model, so pairs can share their prompt.
        self.is_packed = self.yes_no_ids is not None and shared_prompt.can_pack(network)
        if self.is_packed:
            shared_prompt.enable_packing(network)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def tokenize(self, query: str, skills: Sequence[Skill]) -> list[PairIds]:
        """Return the token ids of a raw query paired with each skill.

        Template and token limits are applied here. The end of a skill that does not fit is cut.
        """
        tokenizer = self.pair_tokenizer
        query_ids = tokenizer.query_ids(query)
        return [tokenizer.join(query_ids, ids) for ids in tokenizer.skill_ids(skills)]

    def tokenize_queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of the query's part of a pair, for each raw query."""
        return [self.pair_tokenizer.query_ids(text) for text in texts]

    def tokenize_skills(self, skills: Sequence[Skill]) -> list[list[int]]:
        """Return the token ids of the skill's part of a pair, for each skill."""
        return self.pair_tokenizer.skill_ids(skills)

    def micro_batches(self, lists: Sequence[Sequence[PairIds]], token_budget: int) -> Groups:
        """Group the pairs of all lists into micro-batches.

        A micro-batch is a group of pairs that the model reads at once. If the model packs, the
        pairs of a query form one row of tokens, and their common prompt (the template's words and
        the query) is in the row once. So a packed micro-batch has pairs of one list only.

        Args:
            lists: For each query, a pair of the query with each of its skills.
            token_budget: Maximum number of tokens of a micro-batch.

        Returns:
            For each micro-batch, the positions of its pairs in the concatenation of all lists.
        """
        if not self.is_packed:
            lengths = [len(pair) for pair in chain.from_iterable(lists)]
            return micro_batches(lengths, token_budget)

        groups: Groups = []
        list_start = 0  # position of the first pair of a list
        for pairs in lists:
            if not pairs:
                continue
            # Number of tokens of the common prompt, which counts once for the budget.
            num_shared = shared_prompt.num_shared([pair.ids for pair in pairs])
            for group in micro_batches([*map(len, pairs)], token_budget, num_shared):
                # `group` has positions within this list. Count from the first list instead.
                groups.append([list_start + position for position in group])
            list_start += len(pairs)
        return groups

    def num_slots(self, pairs: Sequence[PairIds]) -> int:
        """Return the number of tokens of a micro-batch, with padding."""
        if self.is_packed:
            # The common prompt of the pairs occurs once in their row.
            num_shared = shared_prompt.num_shared([pair.ids for pair in pairs])
            return sum(map(len, pairs)) - num_shared * (len(pairs) - 1)
        return max(map(len, pairs)) * len(pairs)

    def embed(self, pairs: Sequence[PairIds]) -> list[PairIds]:
        """Return the pairs with the embeddings of their tokens, from a single lookup."""
        embedded = embed_together(self.network, [pair.ids for pair in pairs])
        return [replace(pair, embedded=rows) for pair, rows in zip(pairs, embedded, strict=True)]

    def score_vector(self) -> Float[Tensor, "dim"] | None:
        """Return the vector whose product with the last hidden state is the score.

        The vector is the head's row of `yes` minus its row of `no`, in float32 or wider. It is None
        if `template.form` is `pair`. Call this only once in a training step: for each call, the
        backward pass makes a gradient as large as the embeddings of the whole vocabulary.
        """
        if self.yes_no_ids is None:
            return None

        # If the model was exported with a classification head, its only row is the difference.
        head_layers = loading.heads(self.network)
        if head_layers:
            weight = next(head_layers[0].parameters())  # [1, dim]
            return at_least_float32(weight[0])

        weight = self.network.get_output_embeddings().weight  # [vocabulary, dim]
        ids = on_device(torch.tensor(self.yes_no_ids), weight.device)  # [2]
        rows = at_least_float32(weight[ids])  # [yes or no, dim]
        return rows[0] - rows[1]

    def forward(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair"]:
        """Return the scores of a micro-batch as logits, in float32 or wider."""
        return self.score(pairs, self.score_vector())

    def score(
        self, pairs: Sequence[PairIds], score_vector: Float[Tensor, "dim"] | None
    ) -> Float[Tensor, "pair"]:
        """Return the scores of a micro-batch as logits, in float32 or wider.

        Args:
            pairs: Pairs with or without embeddings.
            score_vector: Result of `score_vector()`. None if `template.form` is `pair`.
        """
        if score_vector is None:  # the form pair
            return self._classification_scores(pairs)
        # A pair in the form yes_no is one text. Its score comes from the last hidden state.
        last = self._last_hidden(pairs)  # [pair, dim]
        with torch.autocast(last.device.type, enabled=False):  # bfloat16 would round the score
            return at_least_float32(last) @ score_vector

    def _classification_scores(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair"]:
        """Return the outputs of the classification head, in float32 or wider."""
        # The head scores two segments. BERT marks the second segment by token type 1, XLM-R has no
        # marks.
        inputs, mask = model_inputs(_texts(pairs), self.tokenizer.pad_token_id, self.device)
        num_segments = getattr(self.network.config, "type_vocab_size", None) or 0
        if num_segments > 1:
            starts = on_device(torch.tensor([pair.second_start for pair in pairs]), mask.device)
            positions = torch.arange(mask.shape[1], device=mask.device)  # [token]
            is_second = positions >= starts[:, None]  # [pair, token], True for padding too
            inputs["token_type_ids"] = is_second.long() * mask
        logits = self.network(**inputs, attention_mask=mask).logits  # [pair, 1]
        return at_least_float32(logits[:, 0])

    def _last_hidden(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair dim"]:
        """Return the hidden state of each pair's last token."""
        decoder = self.network.get_decoder()
        if self.is_packed:
            # All pairs have the same query, so they begin with the same tokens.
            num_prompt = shared_prompt.num_shared([pair.ids for pair in pairs])
            packed = shared_prompt.PackedTexts(pairs, num_prompt, self.device)
            return shared_prompt.last_hidden(decoder, packed, _texts(pairs))
        inputs, mask = model_inputs(_texts(pairs), self.tokenizer.pad_token_id, self.device)
        output = decoder(**inputs, attention_mask=mask, use_cache=False)
        return pool(output.last_hidden_state, mask, "last_token")


def _texts(pairs: Sequence[PairIds]) -> Texts:
    """Return the pairs' embedded tokens. If no pair has them, return the token ids."""
    embedded = [pair.embedded for pair in pairs if pair.embedded is not None]
    return embedded or [pair.ids for pair in pairs]


def yes_no_ids(tokenizer: Any) -> tuple[int, int]:
    """Return the token ids of `yes` and `no`, whose logits give the score.

    Raises:
        SkilltrainError: The tokenizer splits one of these words.
    """
    yes_ids = tokenizer.encode("yes", add_special_tokens=False)
    no_ids = tokenizer.encode("no", add_special_tokens=False)
    if len(yes_ids) != 1 or len(no_ids) != 1:
        fault = "the tokenizer has no single tokens 'yes' and 'no'"
        raise SkilltrainError("unsupported-model", fault, fix="use template.form=pair")
    return yes_ids[0], no_ids[0]


def load_reranker(
    config: RerankerConfig,
    device: torch.device,
    options: Mapping[str, Any] = MappingProxyType({}),
    new_head: bool = False,
) -> Reranker:
    """Load a reranker in evaluation mode.

    Args:
        config: Settings that select the reranker.
        device: Device of the reranker. On the device meta, it has shapes but no weights.
        options: Further arguments of `from_pretrained`. They replace those that `config` implies.
        new_head: Whether a missing head is initialised at random, for training. Then an encoder may
            become a reranker too, if `config` has a template.

    Raises:
        SkilltrainError: There is no such model, it is an encoder that must not become a reranker,
            its folder is not complete, or the settings do not fit it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    runs_code = config.trust_remote_code
    folder = loading.resolve_model(config.source, code=runs_code)
    may_convert_encoder = new_head and config.template is not None
    if may_convert_encoder and loading.is_encoder(folder):
        stored = {}  # ignore its settings, which are those of an encoder
    else:
        stored = loading.stored_settings(folder, "reranker")

    model_config = loading.load_model_config(folder, runs_code)
    is_causal = loading.has_architecture(model_config, "CausalLM")
    settings = _settings(config, stored, is_causal, folder)  # checks the template's form
    tokenizer = loading.load_tokenizer(folder, runs_code)
    settings = _reduce_limits(settings, tokenizer, model_config, config.source)
    template = with_fields(settings.template, config.fields)
    settings = settings.model_copy(update={"template": template})

    all_options = {**loading.loading_options(config, model_config, device), **options}
    all_options.pop("add_pooling_layer", None)  # it switches off the pooler, which the head needs
    if is_causal and template.form == "yes_no":
        network = loading.load_network(AutoModelForCausalLM, folder, tokenizer, all_options)
    else:
        all_options["num_labels"] = 1  # the head has one output, the score
        auto_class = AutoModelForSequenceClassification
        network = loading.load_network(auto_class, folder, tokenizer, all_options, new_head)
    for layer in loading.heads(network):
        layer.float()  # bfloat16 rounds logits to steps of up to 1/32: close candidates would tie
        layer.register_forward_pre_hook(loading.cast_to_weight_dtype)
    return Reranker(network.to(device).eval(), tokenizer, settings)


def _settings(
    config: RerankerConfig, stored: dict[str, Any], is_causal: bool, folder: Path
) -> RerankerSettings:
    """Collect the settings of a reranker from the user, the model's folder and the defaults.

    A setting of the user replaces a stored setting, which replaces a default.

    Args:
        config: Settings that the user chose; None for a setting that the user did not choose.
        stored: Settings that training has stored; empty for other models.
        is_causal: Whether the model is a causal language model.
        folder: Folder of the model, for errors.

    Raises:
        SkilltrainError: The form yes_no does not fit the model.
    """
    # `config` has other fields too, such as the source. Take only fields of RerankerSettings.
    chosen = config.model_dump(exclude_none=True, include={*RerankerSettings.model_fields})
    values = stored | chosen
    # A causal language model answers yes or no, and the two logits give the score.
    if is_causal:
        values.setdefault("template", {"form": "yes_no"})
    settings = validate(RerankerSettings, values, folder)

    # An export may have replaced the language model head by a classification head that gives the
    # same scores. Such a model is not causal any more, but its stored form is still yes_no.
    was_causal = stored.get("template", {}).get("form") == "yes_no"
    can_answer_yes_no = is_causal or was_causal
    if settings.template.form == "yes_no" and not can_answer_yes_no:
        fault = "template.form=yes_no needs a causal language model"
        raise SkilltrainError("unsupported-model", fault, where=config.source)
    return settings


def _reduce_limits(
    settings: RerankerSettings, tokenizer: Any, model_config: Any, where: str
) -> RerankerSettings:
    """Reduce default token limits so that a pair fits in the model, and a skill in the pair.

    Args:
        settings: Settings of the reranker.
        tokenizer: The tokenizer of transformers.
        model_config: The model's config.json as an object of transformers.
        where: What the user named, for errors.

    Raises:
        SkilltrainError: An explicit limit is too large.
    """
    # A pair must fit in the model's positions. A setting that the user or training chose is
    # explicit, and is never reduced.
    explicit = {name: getattr(settings, name) for name in settings.model_fields_set}
    limit = loading.num_positions(model_config)
    if limit is not None and settings.max_tokens > limit:
        if "max_tokens" in explicit:
            raise SkilltrainError(
                "exceeds-model", f"max_tokens exceeds the model's {limit} positions", where=where
            )
        # Validate again: the default of query_max_tokens depends on max_tokens.
        settings = RerankerSettings.model_validate({**explicit, "max_tokens": limit})

    # The query must leave room for a skill.
    room = PairTokenizer(tokenizer, settings).room_for_query()
    if settings.query_max_tokens <= room:
        return settings
    if "query_max_tokens" in explicit or room < MIN_QUERY_TOKENS:
        fault = (
            f"query_max_tokens ({settings.query_max_tokens}) leaves no room for a skill in "
            f"max_tokens ({settings.max_tokens})"
        )
        raise SkilltrainError("conflicting-settings", fault, where=where)
    return settings.model_copy(update={"query_max_tokens": room})
