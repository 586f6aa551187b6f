"""Encoder that maps each text to one unit vector."""

from collections.abc import Collection, Mapping, Sequence, Sized
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
from skilltrain.models.pooling import (
    DEFAULT_QUERY_TOKENS,
    PROJECTED,
    ForeignSettings,
    Pooling,
    at_least_float32,
    foreign_settings,
    load_projections,
    pool,
)
from skilltrain.models.tokens import TextTokenizer
from skilltrain.records import Skill
from skilltrain.templates import FIELDS_SEEN, Chunks, EncoderTemplate, with_fields

# Characters per token of long texts: 4 to 5 in English prose, fewer in Markdown and code.
_MAX_CHARS_PER_TOKEN = 5
_TYPICAL_CHARS_PER_TOKEN = 4


class EncoderSettings(Config):
    """Settings of an encoder. They are saved in its folder, beside the weights."""

    pooling: Pooling = "mean"
    max_tokens: int = Field(default=256, ge=8)
    query_max_tokens: int = Field(default=DEFAULT_QUERY_TOKENS, ge=8)
    template: EncoderTemplate = EncoderTemplate()
    chunks: Chunks = Chunks()
    bidirectional: bool = False

    def window(self, skill: Skill, number: int) -> tuple[int, int]:
        """Return the start and the end of a window in a skill's body, in characters.

        Args:
            skill: The whole skill.
            number: Number of the window, counted from 0.
        """
        start = self.template.skill.window_starts(skill, self.chunks)[number]
        return start, min(start + self.template.skill.body_chars, len(skill.body))

    def chunk_texts(self, skill: Skill) -> list[str]:
        """Return the texts of a skill that the encoder reads, one per window of its body."""
        windows = self.template.skill.windows(skill, self.chunks)
        return [self.template.render_skill(window) for window in windows]


class EncoderConfig(loading.ModelConfig):
    """Settings that select an encoder. A setting that is null comes from the model's folder."""

    pooling: Pooling | None = Field(
        default=None, description="mean, last_token or cls; null: as the folder says"
    )
    max_tokens: int | None = Field(
        default=None, ge=8, description="token limit of a skill; null: the folder's, or 256"
    )
    query_max_tokens: int | None = Field(
        default=None, ge=8, description="token limit of a query; null: the folder's, at least 512"
    )
    template: EncoderTemplate | None = Field(
        default=None, description="how it reads queries and skills, or skillrouter_released"
    )
    chunks: Chunks | None = Field(
        default=None, description="windows of a body; null: as the folder says, or one"
    )
    bidirectional: bool | None = Field(
        default=None,
        description="let each token of a causal model attend to later tokens too; null: as the "
        "folder says, or false",
    )


class Encoder(nn.Module):
    """A transformer with pooling that maps texts to unit vectors.

    Attributes:
        backbone: The transformer.
        tokenizer: The tokenizer of transformers.
        settings: Pooling, token limits, template and windows.
        text_tokenizer: Tokenizer of untrusted texts.
        is_packed: Whether the texts of a micro-batch form one row without padding.
        projection: Linear layers that vectors of texts and tokens pass through. It may be empty.
    """

    def __init__(self, backbone: Any, tokenizer: Any, settings: EncoderSettings) -> None:
        """Make an encoder, which pads texts until `enable_packing` is called."""
        super().__init__()
        self.backbone: Any = backbone
        # The empty module returns its input. `load_encoder` adds the model's linear layers, if any.
        self.projection: Any = nn.Sequential()
        self.tokenizer = tokenizer
        self.settings = settings
        self.text_tokenizer = TextTokenizer(tokenizer)
        self.is_packed = False
        # Find out whether every attention layer is causal.
        causal_flags = {getattr(module, "is_causal", None) for module in backbone.modules()}
        causal_flags.discard(None)  # modules without attention
        # For a causal model that became bidirectional, only its config says so (`load_encoder`).
        self._is_causal = causal_flags == {True} and getattr(backbone.config, "is_causal", True)

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def network(self) -> Any:
        """The backbone. A reranker's transformer has the same name."""
        return self.backbone

    @property
    def dim(self) -> int:
        if self.projection:
            return self.projection[-1].out_features
        return self.backbone.config.hidden_size

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the token ids of each text, truncated to `max_tokens` with special tokens.

        The name of a special token in a text, such as `</s>`, is tokenised like any other word.
        With last-token pooling, each text ends with a pad token. The pad token is appended here if
        the tokenizer does not do so.
        """
        all_ids = self.text_tokenizer.framed_ids(texts, max_tokens)
        if self.settings.pooling == "last_token":
            end = self.tokenizer.pad_token_id
            for ids in all_ids:
                if not ids or ids[-1] != end:
                    del ids[max_tokens - 1 :]  # room for the pad token
                    ids.append(end)
        return all_ids

    def tokenize_queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of raw queries. Template and token limit are applied here."""
        rendered = [self.settings.template.render_query(text) for text in texts]
        return self.tokenize(rendered, self.settings.query_max_tokens)

    def tokenize_skills(self, skills: Sequence[Skill]) -> list[list[int]]:
        """Return the token ids of skills. Template and token limit are applied here."""
        rendered = [self.settings.template.render_skill(skill) for skill in skills]
        return self.tokenize(rendered, self.settings.max_tokens)

    def enable_packing(self) -> None:
        """Let the encoder put the texts of a micro-batch into one row instead of padding them.

        Raises:
            SkilltrainError: Packed texts would have other vectors than padded texts.
        """
        # `last_hidden`, which reads packed texts, returns only the state of each last token.
        uses_last_token = self._is_causal and self.settings.pooling == "last_token"
        if not uses_last_token or not shared_prompt.can_pack(self.backbone):
            fault = (
                "varlen needs a causal encoder with last_token pooling whose layers all see the "
                "whole text"
            )
            raise SkilltrainError("unsupported-model", fault, where="training.varlen")
        shared_prompt.enable_packing(self.backbone)
        self.is_packed = True

    def micro_batches(self, texts: Sequence[Sized], token_budget: int) -> Groups:
        """Group texts into micro-batches. Return the positions of the texts of each micro-batch."""
        num_shared = 0 if self.is_packed else None  # packed texts have no common prompt here
        return micro_batches([*map(len, texts)], token_budget, num_shared)

    def num_slots(self, texts: Sequence[Sized]) -> int:
        """Return the number of tokens of a micro-batch, with padding."""
        if self.is_packed:
            return sum(map(len, texts))
        return max(map(len, texts)) * len(texts)

    def embed(self, texts: Sequence[TokenIds]) -> list[Float[Tensor, "_ width"]]:
        """Return the embedded tokens of each text, as input of `forward` instead of token ids.

        A training step calls this once for the texts of all its micro-batches.
        """
        return embed_together(self.backbone, texts)

    def forward(self, texts: Texts) -> Float[Tensor, "text dim"]:
        """Return the unit vectors of a micro-batch, in float32 or wider.

        Args:
            texts: Token ids or embedded tokens of each text.
        """
        if self.is_packed:
            # All texts are in one row. `enable_packing` accepts only pooling of the last token.
            # `packed` holds the place of each text in the row. `last_hidden` also needs the tokens.
            # `shared_prompt` packs texts with a common prompt, or without one, as here.
            packed = shared_prompt.VarlenTexts(texts, self.device)
            last = shared_prompt.last_hidden(self.backbone, packed, texts)  # [text, hidden]
            return self._unit_vectors(last)
        hidden, mask = self._hidden(texts)  # [text, token, hidden], [text, token]
        return self._unit_vectors(pool(hidden, mask, self.settings.pooling))

    def with_tokens(self, texts: Texts, num_tokens: int) -> Float[Tensor, "text row dim"]:
        """Return the unit vector of each text, followed by the unit vectors of its tokens.

        Args:
            texts: Token ids or embedded tokens of each text.
            num_tokens: Number of token vectors per text. A shorter text ends with zero vectors.

        Returns:
            [text, 1 + num_tokens, dim] Row 0 of a text is its own vector, before its tokens.
        """
        hidden, mask = self._hidden(texts)  # [text, token, hidden], [text, token]
        # Put the vector of each text before the vectors of its tokens. Here a row is a vector.
        text_rows = pool(hidden, mask, self.settings.pooling)[:, None]  # [text, 1, hidden]
        rows = self._unit_vectors(torch.cat([text_rows, hidden], 1))  # [text, 1 + token, dim]
        # Set the rows of padding to 0. The mask lacks the text's own vector, so put a 1 before it:
        # [text, token] becomes [text, 1 + token, 1].
        rows = rows * nn.functional.pad(mask, (1, 0), value=1)[:, :, None]
        # A micro-batch is padded to its longest text. Add zero rows up to `num_tokens`.
        num_missing_rows = 1 + num_tokens - rows.shape[1]
        return nn.functional.pad(rows, (0, 0, 0, num_missing_rows))

    def _unit_vectors(self, vectors: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Apply the projection, and return unit vectors in float32 or wider."""
        projected = self.projection({PROJECTED: at_least_float32(vectors)})[PROJECTED]
        return nn.functional.normalize(at_least_float32(projected), dim=-1)

    def _hidden(
        self, texts: Texts
    ) -> tuple[Float[Tensor, "text token dim"], Int[Tensor, "text token"]]:
        """Return the hidden states of all tokens, and a mask that is 0 for padding."""
        inputs, mask = model_inputs(texts, self.tokenizer.pad_token_id, self.device)
        # A causal network needs no mask: padding is on the right, so no token attends to it.
        has_padding = len({len(text) for text in texts}) > 1
        attention_mask = mask if has_padding and not self._is_causal else None
        output = self.backbone(**inputs, attention_mask=attention_mask)
        return at_least_float32(output.last_hidden_state), mask


def load_encoder(
    config: EncoderConfig, device: torch.device, options: Mapping[str, Any] = MappingProxyType({})
) -> Encoder:
    """Load an encoder in evaluation mode.

    Args:
        config: Settings that select the encoder.
        device: Device of the encoder. On the device `meta`, the encoder has the shapes of its
            weights but no values, which is enough to count parameters.
        options: Further arguments of `from_pretrained`. They replace those that `config` implies.

    Raises:
        SkilltrainError: There is no such model, it is a reranker, its folder is not complete, or
            the settings do not fit it.
    """
    from transformers import AutoModel

    # The source is a folder or a model of the Hub, which is downloaded.
    runs_code = config.trust_remote_code
    folder = loading.resolve_model(config.source, code=runs_code)
    model_config = loading.load_model_config(folder, runs_code)
    settings = encoder_settings(config, model_config)
    tokenizer = loading.load_tokenizer(folder, runs_code)
    # Texts of different lengths are encoded together, so they need padding.
    if tokenizer.pad_token_id is None:
        raise SkilltrainError(
            "unsupported-model", "the tokenizer has no pad token", where=config.source
        )
    all_options = {**loading.loading_options(config, model_config, device), **options}
    backbone = loading.load_network(AutoModel, folder, tokenizer, all_options)
    # The cache of keys and values is for generating text, which an encoder does not do.
    backbone.config.use_cache = False
    if settings.bidirectional:
        # transformers, sentence-transformers and vLLM read this key of config.json.
        backbone.config.is_causal = False
    encoder = Encoder(backbone.to(device).eval(), tokenizer, settings)
    encoder.projection.extend(load_projections(folder, model_config))
    # On the device meta, a projection stays on the CPU, because `export` copies its values.
    encoder.projection.to("cpu" if device.type == "meta" else device)
    return encoder


def encoder_settings(config: EncoderConfig, model_config: Any) -> EncoderSettings:
    """Return the settings of the encoder that `config` selects.

    A setting that `config` leaves out comes from the model's folder: from the settings that
    training stored, or from the files of sentence-transformers. A setting that neither `config` nor
    the folder has takes its default.

    Args:
        config: Settings that the user chose.
        model_config: The model's config.json as an object of transformers.

    Raises:
        SkilltrainError: The model is a reranker, a limit exceeds its positions, or the windows of
            bodies are impossible.
    """
    folder = loading.resolve_model(config.source)
    # `config` has other fields too, such as the source. Take only fields of EncoderSettings.
    chosen = config.model_dump(exclude_none=True, include={*EncoderSettings.model_fields})
    stored = loading.stored_settings(folder, "encoder")
    if stored:
        # The stored template has the prompts already.
        inherited = ForeignSettings(stored, query_prompt="", skill_prompt="")
    else:  # a model of another program
        inherited = foreign_settings(folder, model_config, config.pooling)
        if model_config.model_type.startswith("qwen"):
            # The vector of Qwen's embedding models is the state of the last token.
            inherited.settings.setdefault("pooling", "last_token")

    settings = validate(EncoderSettings, inherited.settings | chosen, folder)
    explicit_names = {*stored, *chosen}  # settings that must not be reduced
    settings = _reduce_limits(settings, explicit_names, model_config, config.source)
    # Show the encoder the skill fields that the user chose, and add the model's own prompts.
    template = with_fields(settings.template, config.fields)
    template = template.with_prompts(inherited.query_prompt, inherited.skill_prompt)
    settings = settings.model_copy(update={"template": template})
    _check_windows(settings, config.source)
    return settings


def _reduce_limits(
    settings: EncoderSettings, explicit: Collection[str], model_config: Any, source: str
) -> EncoderSettings:
    """Reduce the token limits to the number of positions that the model has.

    Args:
        settings: Settings of the encoder.
        explicit: Names of the settings that must not change.
        model_config: The model's config.json as an object of transformers.
        source: Source of the model, for errors.

    Raises:
        SkilltrainError: An explicit limit exceeds the positions.
    """
    max_positions = loading.num_positions(model_config)
    if not max_positions:  # the model has no limit
        return settings

    updates = {}
    for name in ("max_tokens", "query_max_tokens"):
        if getattr(settings, name) <= max_positions:
            continue
        if name in explicit:
            fault = f"{name} exceeds the model's {max_positions} positions"
            raise SkilltrainError("exceeds-model", fault, where=source)
        updates[name] = max_positions
    return settings.model_copy(update=updates)


def _check_windows(settings: EncoderSettings, source: str) -> None:
    """Check that the windows of a body overlap by less than a window, and that a window fits.

    A long body is split into windows of `body_chars` characters. Each window is read separately.

    Raises:
        SkilltrainError: The overlap is too large, or a window exceeds the token limit.
    """
    skill_template = settings.template.skill
    reads_body = "body" in FIELDS_SEEN[skill_template.fields]  # fields that the encoder reads
    if settings.chunks.windows == 1 or not reads_body:
        return

    body_chars = skill_template.body_chars
    if settings.chunks.overlap >= body_chars:
        fault = (
            f"chunks.overlap {settings.chunks.overlap} is not below the window, "
            f"template.skill.body_chars {body_chars}"
        )
        raise SkilltrainError("conflicting-settings", fault, where=source)

    max_tokens = settings.max_tokens
    description_chars = skill_template.description_chars
    # The text of a window has the description too. Refuse only what surely does not fit.
    if description_chars + body_chars > _MAX_CHARS_PER_TOKEN * max_tokens:
        fault = (
            f"chunks of {description_chars} + {body_chars} characters are longer than "
            f"{max_tokens} tokens"
        )
        fitting_chars = max(1, _TYPICAL_CHARS_PER_TOKEN * max_tokens - description_chars)
        fix = f"template.skill.body_chars: about {fitting_chars}, or a larger max_tokens"
        raise SkilltrainError("conflicting-settings", fault, where=source, fix=fix)
