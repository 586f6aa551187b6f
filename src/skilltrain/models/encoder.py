"""The encoder: one text in, one unit vector out."""

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.models import loading, shared_prompt
from skilltrain.models.micro_batches import (
    Groups,
    Texts,
    TokenIds,
    embed_together,
    micro_batches,
    model_inputs,
)
from skilltrain.models.pooling import Pooling, at_least_float32, foreign_settings, pool
from skilltrain.models.tokens import TextTokenizer
from skilltrain.records import Skill
from skilltrain.templates import FIELDS_SEEN, Chunks, EncoderTemplate, with_fields

_MOST_CHARS = (
    5  # of a token, in the long run; English prose has between 4 and 5, Markdown and code fewer
)


class EncoderSettings(Config):
    """What, beside its weights, makes an encoder; saved in its folder."""

    pooling: Pooling = "mean"
    max_tokens: int = Field(default=256, ge=8)
    query_max_tokens: int = Field(default=512, ge=8)
    template: EncoderTemplate = EncoderTemplate()
    chunks: Chunks = Chunks()

    def window(self, skill: Skill, number: int) -> tuple[int, int]:
        """Start and end of a window in a skill's body; windows count from 0."""
        start = self.template.skill.window_starts(skill, self.chunks)[number]
        return start, min(start + self.template.skill.body_chars, len(skill.body))

    def chunk_texts(self, skill: Skill) -> list[str]:
        """The texts by which the encoder knows a skill, one per window; the first is all of them by default."""
        return [
            self.template.render_skill(window)
            for window in self.template.skill.windows(skill, self.chunks)
        ]


class EncoderConfig(loading.ModelConfig):
    """Which encoder to load. What is left out comes from the model's own folder."""

    pooling: Pooling | None = Field(
        default=None, description="mean, last_token or cls; else as the folder says"
    )
    max_tokens: int | None = Field(
        default=None, ge=8, description="token limit of a skill; else the folder's, or 256"
    )
    query_max_tokens: int | None = Field(
        default=None, ge=8, description="of a query; else the folder's, at least 512"
    )
    template: EncoderTemplate | None = Field(
        default=None, description="the texts it sees, or skillrouter_released"
    )
    chunks: Chunks | None = Field(
        default=None, description="windows of a body; else as the folder says, or one"
    )


class Encoder(nn.Module):
    def __init__(self, backbone: Any, tokenizer: Any, settings: EncoderSettings) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.tokenizer, self.settings = tokenizer, settings
        self.text_tokenizer = TextTokenizer(tokenizer)
        self.is_packed = False
        self._is_causal = {getattr(module, "is_causal", None) for module in backbone.modules()} - {
            None
        } == {True}

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def network(self) -> Any:
        """The backbone, under the name that a reranker's has."""
        return self.backbone

    @property
    def dim(self) -> int:
        return self.backbone.config.hidden_size

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[TokenIds]:
        """Token ids of each text, cut to `max_tokens`, special tokens included; none of these stems from the text.

        With last-token pooling each ends with the pad token once, whether or not the tokenizer appends it.
        """
        ids: list[TokenIds] = [*self.text_tokenizer.framed_ids(texts, max_tokens)]
        if self.settings.pooling != "last_token":
            return ids
        end = self.tokenizer.pad_token_id
        return [
            text if text and text[-1] == end else [*text[: max_tokens - 1], end] for text in ids
        ]

    def tokenize_queries(self, texts: Sequence[str]) -> list[TokenIds]:
        return self.tokenize(
            [*map(self.settings.template.render_query, texts)], self.settings.query_max_tokens
        )

    def tokenize_skills(self, skills: Sequence[Skill]) -> list[TokenIds]:
        return self.tokenize(
            [*map(self.settings.template.render_skill, skills)], self.settings.max_tokens
        )

    def attend_by_length(self) -> None:
        """Let a micro-batch's texts stand in one row, not padded. Raises SkilltrainError where vectors would change."""
        last = self._is_causal and self.settings.pooling == "last_token"
        if not last or not shared_prompt.can_share(self.backbone):
            what = "varlen needs a causal encoder with last_token pooling whose layers all see the whole text"
            raise SkilltrainError(what, where="training.varlen")
        shared_prompt.enable(self.backbone)
        self.is_packed = True

    def micro_batches(self, texts: Sequence[Sized], token_budget: int) -> Groups:
        return micro_batches([*map(len, texts)], token_budget, 0 if self.is_packed else None)

    def num_slots(self, texts: Sequence[Sized]) -> int:
        return sum(map(len, texts)) if self.is_packed else max(map(len, texts)) * len(texts)

    def embed(self, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ width"]]:
        """What `forward` takes for the texts in place of their ids where it runs in several micro-batches."""
        return embed_together(self.backbone, texts)

    def forward(self, texts: Texts) -> Float[Tensor, "text dim"]:
        """Unit vectors of one micro-batch of token ids or embedded tokens, in float32 or wider."""
        if self.is_packed:
            packed = shared_prompt.VarlenTexts(texts, self.device)
            last = shared_prompt.last_hidden(self.backbone, packed, texts)
            return nn.functional.normalize(at_least_float32(last), dim=-1)
        return nn.functional.normalize(pool(*self._hidden(texts), self.settings.pooling), dim=-1)

    def with_tokens(self, texts: Texts, num_tokens: int) -> Float[Tensor, "text row dim"]:
        """What `forward` gives, behind each vector the unit vectors of its tokens, and zeros up to `num_tokens`."""
        hidden, mask = self._hidden(texts)
        rows = torch.cat(
            [pool(hidden, mask, self.settings.pooling)[:, None], hidden * mask[:, :, None]], 1
        )
        return nn.functional.pad(
            nn.functional.normalize(rows, dim=-1), (0, 0, 0, 1 + num_tokens - rows.shape[1])
        )

    def _hidden(
        self, texts: Texts
    ) -> tuple[Float[Tensor, "text token dim"], Int[Tensor, "text token"]]:
        inputs, mask = model_inputs(texts, self.tokenizer.pad_token_id, self.device)
        # Without padding, and in a causal network, whose tokens never see what follows, attention needs no mask.
        needed = None if self._is_causal or len({len(text) for text in texts}) == 1 else mask
        return at_least_float32(
            self.backbone(**inputs, attention_mask=needed).last_hidden_state
        ), mask


def load_encoder(
    config: EncoderConfig, device: torch.device, options: Mapping[str, Any] = MappingProxyType({})
) -> Encoder:
    """The encoder that `config` names, in evaluation mode (device meta: shapes); `options` go to `from_pretrained`.

    Raises SkilltrainError if there is no such model, it is a reranker, or its folder does not hold all of it.
    """
    from transformers import AutoModel

    folder = loading.resolve_model(config.source)
    model_config = loading.load_model_config(folder)
    settings = _settings(folder, config, model_config)
    tokenizer = loading.load_tokenizer(folder)
    if tokenizer.pad_token_id is None:
        raise SkilltrainError("the tokenizer has no pad token", where=config.source)
    given = {**loading.loading_options(config, model_config, device), **options}
    backbone = loading.load_network(AutoModel, folder, tokenizer, given)
    backbone.config.use_cache = False  # keys and values of texts that are never continued
    return Encoder(backbone.to(device).eval(), tokenizer, settings)


def _settings(folder: Path, config: EncoderConfig, model_config: Any) -> EncoderSettings:
    """What the recipe says, else what training saved, else what a base model's own files say, else our defaults.

    Raises SkilltrainError for a reranker, limits beyond the model's positions, and windows that do not move on or would
    be cut.
    """
    stored = loading.stored_settings(folder, "encoder")
    given = config.model_dump(exclude_none=True, include={*EncoderSettings.model_fields})
    base: dict[str, Any] = (
        {"pooling": "last_token"} if model_config.model_type.startswith("qwen") else {}
    )
    prompts = "", ""
    if not stored:
        least = EncoderSettings().query_max_tokens
        found, prompts = foreign_settings(folder, model_config, config.pooling, least)
        base |= found
    settings = validate(EncoderSettings, (stored or base) | given, folder)
    limit = loading.num_positions(model_config)
    over = {
        name: limit
        for name in ("max_tokens", "query_max_tokens")
        if limit and getattr(settings, name) > limit
    }
    if any(name in stored | given for name in over):
        raise SkilltrainError(
            f"max_tokens exceeds the model's {limit} positions", where=config.source
        )
    template = with_fields(settings.template, config.fields).with_prompts(*prompts)
    settings = settings.model_copy(
        update={**over, "template": template}
    )  # a default adapts to the model's positions
    skill, chunks, most = template.skill, settings.chunks, settings.max_tokens
    if chunks.windows == 1 or "body" not in FIELDS_SEEN[skill.fields]:
        return settings
    if chunks.overlap >= skill.body_chars:
        what = f"chunks.overlap {chunks.overlap} is not below the window, template.skill.body_chars {skill.body_chars}"
        raise SkilltrainError(what, where=config.source)
    if skill.description_chars + skill.body_chars > _MOST_CHARS * most:
        what = f"chunks of {skill.description_chars} + {skill.body_chars} characters are longer than {most} tokens"
        fix = f"template.skill.body_chars: about {max(1, 4 * most - skill.description_chars)}, or a larger max_tokens"
        raise SkilltrainError(what, where=config.source, fix=fix)
    return settings
