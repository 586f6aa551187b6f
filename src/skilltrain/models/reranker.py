"""The reranker: a query and a skill in, one relevance score out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import bert_options
from skilltrain.models.loading import Precision, load_pretrained, resolve_dtype, resolve_model, stored_settings
from skilltrain.models.micro_batches import pad
from skilltrain.models.pooling import at_least_float32, pool
from skilltrain.records import Skill
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate


class RerankerSettings(Config):
    """What, beside its weights, makes a reranker; saved in its folder."""

    max_tokens: int = Field(default=512, ge=32)
    query_max_tokens: int = Field(default=256, ge=8)
    template: RerankerTemplate = RerankerTemplate()


class RerankerConfig(Config):
    """Which reranker to load. What is left out comes from the model's own folder."""

    source: str = Field(description="folder, Hub id owner/name, or package:NAME (a package that ships a model)")
    max_tokens: int | None = Field(default=None, ge=32, description="token limit of a (query, skill) pair")
    query_max_tokens: int | None = Field(default=None, ge=8, description="token limit of the query inside a pair")
    template: RerankerTemplate | None = Field(default=None, description="the texts the model sees")
    precision: Precision = Field(default="float32", description="number format of the weights")


@dataclass(frozen=True, slots=True)
class PairIds:
    """Token ids of one (query, skill) pair; ids from `second_start` on belong to the second segment."""

    ids: list[int]
    second_start: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PairFrame:
    """The fixed token ids around a query and a skill, found by asking the tokenizer once."""

    before: list[int]
    between: list[int]
    after: list[int]

    def join(self, query: list[int], skill: list[int], max_tokens: int) -> PairIds:
        """The pair's ids; only the skill's text is cut to fit `max_tokens`."""
        head = [*self.before, *query, *self.between]
        room = max(0, max_tokens - len(head) - len(self.after))
        return PairIds([*head, *skill[:room], *self.after], len(head))


class Reranker(nn.Module):
    """A transformer that scores pairs: by a classification head, or by logit(yes) - logit(no)."""

    def __init__(self, network: Any, tokenizer: Any, settings: RerankerSettings) -> None:
        super().__init__()
        self.network: Any = network
        self.tokenizer, self.settings = tokenizer, settings
        self.frame = _frame(tokenizer, settings.template.form)
        self.yes_no_ids = yes_no_ids(tokenizer) if settings.template.form == "yes_no" else None

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.network.parameters()).device

    def tokenize(self, query: str, skills: Sequence[Skill]) -> list[PairIds]:
        """Token ids of one raw query paired with each skill; template and caps are applied here."""
        template, settings = self.settings.template, self.settings
        start, texts = template.render_query(query), [template.render_skill(skill) for skill in skills]
        head = self._plain_ids([start])[0]
        if template.form != "yes_no":
            head = head[: settings.query_max_tokens]
            return [self.frame.join(head, skill, settings.max_tokens) for skill in self._plain_ids(texts)]
        # One text, as the model was trained: tokens merge across the border of `<Document>: ` and the skill.
        bodies = self._plain_ids([start + text for text in texts])
        borders = [_num_shared(head, body) for body in bodies]
        return [self.frame.join(b[:at], b[at:], settings.max_tokens) for b, at in zip(bodies, borders, strict=True)]

    def _plain_ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:  # transformers' tokenizers fail on an empty batch
            return []
        return self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def forward(self, pairs: Sequence[PairIds]) -> Float[Tensor, "pair"]:
        """Scores of one micro-batch, in float32 or wider: logits, not probabilities."""
        ids, mask = pad([pair.ids for pair in pairs], self.tokenizer.pad_token_id, self.device)
        if self.yes_no_ids is not None:
            return self._yes_no_scores(ids, mask)
        starts = torch.tensor([pair.second_start for pair in pairs], device=ids.device)
        segments = (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None]).long() * mask
        if self.settings.template.form == "cosine_pair":
            return self._cosines(ids, mask, segments)
        logits = self.network(input_ids=ids, attention_mask=mask, token_type_ids=segments).logits
        return at_least_float32(logits[:, 0])

    def _cosines(self, ids: Tensor, mask: Tensor, segments: Tensor) -> Float[Tensor, "pair"]:
        """Cosine of the mean vectors of query and skill, each token having attended to both."""
        hidden = at_least_float32(self.network(input_ids=ids, attention_mask=mask).last_hidden_state)
        query, skill = pool(hidden, mask - segments, "mean"), pool(hidden, segments, "mean")
        return nn.functional.cosine_similarity(query, skill, dim=-1)

    def _yes_no_scores(self, ids: Tensor, mask: Tensor) -> Float[Tensor, "pair"]:
        """logit(yes) - logit(no) from two rows of the head at the last real position; no other logits are computed."""
        hidden = self.network.get_decoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
        rows = self.network.get_output_embeddings().weight[list(self.yes_no_ids or ())]
        with torch.autocast(last.device.type, enabled=False):  # bfloat16 would round the score itself
            return at_least_float32(last) @ at_least_float32(rows[0] - rows[1])


def _num_shared(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def yes_no_ids(tokenizer: Any) -> tuple[int, int]:
    """The ids of `yes` and `no`. Raises SkilltrainError for a tokenizer that splits either."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(word) != 1 for word in ids):
        raise SkilltrainError("the tokenizer has no single tokens 'yes' and 'no'", fix="use template.form=pair")
    return ids[0][0], ids[1][0]


def _frame(tokenizer: Any, form: str) -> PairFrame:
    if form == "yes_no":
        prefix, suffix = (
            tokenizer.encode(text, add_special_tokens=False) for text in (QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX)
        )
        return PairFrame(prefix, [], suffix)
    letter = tokenizer.encode("a", add_special_tokens=False)
    pair = tokenizer("a", "a")["input_ids"]
    first = next(i for i in range(len(pair)) if pair[i : i + len(letter)] == letter)
    second = next(i for i in range(first + len(letter), len(pair)) if pair[i : i + len(letter)] == letter)
    return PairFrame(pair[:first], pair[first + len(letter) : second], pair[second + len(letter) :])


def load_reranker(config: RerankerConfig, device: torch.device) -> Reranker:
    """The reranker that `config` names, in evaluation mode on `device`.

    Causal language models score by yes/no logits, others by a classification head with one output, which is new
    (and random) if the folder has none. With the form `cosine_pair` an encoder may be the start of a reranker.
    Raises SkilltrainError if there is no such model, or it is an encoder's folder.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = resolve_model(config.source)
    grows_from_encoder = config.template is not None and config.template.form == "cosine_pair"
    stored = {} if grows_from_encoder else stored_settings(folder, "reranker")
    model_config = load_pretrained(AutoConfig, folder, "model configuration")
    causal = any("CausalLM" in name for name in model_config.architectures or [])
    given = config.model_dump(exclude_none=True, exclude={"source", "precision"})
    if causal and "template" not in stored | given:
        stored["template"] = {"form": "yes_no"}
    settings = RerankerSettings.model_validate(stored | given)
    if settings.template.form == "yes_no" and not causal:
        raise SkilltrainError("template.form=yes_no needs a causal language model", where=config.source)
    limit = getattr(model_config, "max_position_embeddings", settings.max_tokens)
    if settings.max_tokens > limit:
        raise SkilltrainError(f"max_tokens exceeds the model's {limit} positions", where=config.source)
    if settings.template.form != "yes_no" and settings.query_max_tokens > settings.max_tokens - 8:
        room = f"query_max_tokens ({settings.query_max_tokens}) leaves no room for a skill in max_tokens"
        raise SkilltrainError(f"{room} ({settings.max_tokens})", where=config.source)
    tokenizer = load_pretrained(AutoTokenizer, folder, "tokenizer", padding_side="right")
    network = _network(folder, settings.template.form, resolve_dtype(config.precision, device))
    return Reranker(network.to(device).eval(), tokenizer, settings)


def _network(folder: str, form: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    if form == "yes_no":
        return load_pretrained(AutoModelForCausalLM, folder, "reranker", **options)
    options |= bert_options(folder)
    if form == "cosine_pair":
        return load_pretrained(AutoModel, folder, "reranker", **options)
    options.pop("add_pooling_layer", None)  # here the pooler is part of the head
    network = load_pretrained(AutoModelForSequenceClassification, folder, "reranker", num_labels=1, **options)
    heads = [child for child in network.children() if child is not network.base_model and [*child.parameters()]]
    for head in heads:
        head.float()  # logits in bfloat16 are steps of up to 1/32: close candidates would tie
        head.register_forward_pre_hook(_in_own_dtype)
    return network


def _in_own_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)
