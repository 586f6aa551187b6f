"""Model folders that skilltrain reads back, and that plain sentence-transformers opens and scores alike."""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from skilltrain.export.chat_template import yes_no_chat_template
from skilltrain.export.folder import (
    TRANSFORMER,
    Module,
    Record,
    write_modules,
    write_record,
    write_weights,
    written_aside,
)
from skilltrain.export.tokenizer import append_token, control_tokens, reading_names_as_text, write_tokenizer
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import backbone_options, load_pretrained
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker, RerankerSettings, yes_no_ids
from skilltrain.terminal import say

_POOLING: dict[Pooling, Literal["mean", "lasttoken", "cls"]] = {"mean": "mean", "last_token": "lasttoken", "cls": "cls"}
_PROBES = ("a", "a " * 5, "a " * 30)
_PROBE_TOKENS = 12


def save_encoder(encoder: Encoder, folder: Path, base: str, card: str | None = None) -> None:
    """Write what `SentenceTransformer(folder)` needs to give our vectors, skilltrain.json and the model card.

    Raises SkilltrainError for weights that must not be saved, and where the folder cannot be written.
    """
    settings = encoder.settings
    with written_aside(folder) as aside:
        write_weights(encoder.backbone, aside, folder)
        write_tokenizer(_tokenizer_of(encoder), settings.max_tokens, aside)
        _tell_of_other_ids(encoder, aside)
        without_pooler = "add_pooling_layer" in backbone_options(encoder.backbone.config)
        transformer = {
            "transformer_task": "feature-extraction",
            # Without this entry, a tokenizer that has a chat template would wrap every text in it.
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "query_length": settings.query_max_tokens,
        }
        if without_pooler:  # else a report about a pooler that we never use appears at every opening
            transformer["model_kwargs"] = {"add_pooling_layer": False}
        package = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        pooling = {"embedding_dimension": encoder.dim, "pooling_mode": _POOLING[settings.pooling]}
        modules = [
            Module(TRANSFORMER, "", transformer),
            Module(package, "1_Pooling", pooling | {"include_prompt": True}),
            Module("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize", {}),
        ]
        model = {
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.template.query_prompt(), "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        }
        write_modules(aside, modules, model)
        write_record(aside, Record("encoder", settings.model_dump(mode="json"), base), card)


def save_reranker(reranker: Reranker, folder: Path, base: str, card: str | None = None) -> None:
    """Write what `CrossEncoder(folder)` needs to give our scores, skilltrain.json and the model card.

    No module of sentence-transformers computes the form `cosine_pair`: its folder names our loader, and CrossEncoder
    refuses it. For errors see `save_encoder`.
    """
    settings = reranker.settings
    with written_aside(folder) as aside:
        write_weights(reranker.network, aside, folder)
        modules, prompts = _cross_encoder_modules(reranker)
        if settings.template.form == "yes_no":
            tokenizer = copy.copy(reranker.tokenizer)
            tokenizer.chat_template = yes_no_chat_template(settings.template, control_tokens(tokenizer))
        else:
            tokenizer = reading_names_as_text(reranker.tokenizer)
        write_tokenizer(tokenizer, settings.max_tokens, aside)
        model = {
            "model_type": "CrossEncoder",
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts), None),
            "activation_fn": "torch.nn.modules.linear.Identity",
        }
        if float32_layer := _half_precision_head(reranker):
            model["keep_in_fp32_modules"] = [float32_layer]
        write_modules(aside, modules, model)
        write_record(aside, Record("reranker", settings.model_dump(mode="json"), base), card)


def _cross_encoder_modules(reranker: Reranker) -> tuple[list[Module], dict[str, str]]:
    """(modules, prompts) that compute a reranker's score."""
    form, settings = reranker.settings.template.form, reranker.settings
    if form == "cosine_pair":
        return [Module("skilltrain.models.reranker.load_reranker", "", {})], {}
    if form == "pair":
        return [Module(TRANSFORMER, "", _pair_settings(settings, reranker.tokenizer))], {}
    logits = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
        "module_output_name": "causal_logits",
    }
    yes, no = yes_no_ids(reranker.tokenizer)
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    package = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    prompts = {"instruction": settings.template.instruction}
    return [Module(TRANSFORMER, "", transformer), Module(package, "1_LogitScore", score)], prompts


def _pair_settings(settings: RerankerSettings, tokenizer: Any) -> dict[str, Any]:
    """A classification head on the two segments, of which, as in our reranker, the skill alone is cut.

    `longest_first` does so as long as the query takes no more than half of the tokens, and it can cut a longer query;
    `only_second` always does so, but fails for a query that fills the whole pair.
    """
    half = (settings.max_tokens - tokenizer.num_special_tokens_to_add(pair=True)) // 2
    truncation = "longest_first" if settings.query_max_tokens <= half else "only_second"
    return {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
        "processing_kwargs": {"text": {"truncation": truncation}},
    }


def _half_precision_head(reranker: Reranker) -> str | None:
    """Where the layer lies that gives the score, if weights are of 16 bits: like ours it then computes in float32.

    Logits in bfloat16 are steps of up to 1/8, in which close candidates tie.
    """
    network = reranker.network
    if network.dtype.itemsize > 2 or reranker.settings.template.form == "cosine_pair":
        return None
    is_causal = reranker.settings.template.form == "yes_no"
    layers = [network.get_output_embeddings()] if is_causal else [*network.children()]
    names = (name for name, module in network.named_modules() if any(module is layer for layer in layers))
    found = [name for name in names if type(network.get_submodule(name)) is torch.nn.Linear]
    return f"0.model.{found[-1]}" if found else None


def _tokenizer_of(encoder: Encoder) -> Any:
    """A copy of the encoder's tokenizer that makes of a text what `Encoder.tokenize` does.

    With last-token pooling it appends the end token itself, as Qwen3-Embedding's does and base Qwen3's does not.
    """
    tokenizer = reading_names_as_text(encoder.tokenizer)
    if encoder.settings.pooling == "last_token" and tokenizer("a")["input_ids"][-1] != tokenizer.pad_token_id:
        append_token(tokenizer, tokenizer.pad_token)
    return tokenizer


def _tell_of_other_ids(encoder: Encoder, aside: Path) -> None:
    """Say so if the saved tokenizer cuts or ends texts otherwise than `Encoder.tokenize`: some classes of tokenizers
    cannot be told to append a token. Then the folder is for skilltrain's reader only.
    """

    saved = load_pretrained(AutoTokenizer, aside, "tokenizer")
    cut = saved([*_PROBES], truncation=True, max_length=_PROBE_TOKENS)["input_ids"]
    ours = encoder.tokenize(_PROBES, _PROBE_TOKENS)
    if any([*one] != [*other] for one, other in zip(cut, ours, strict=True)):
        say(f"plain sentence-transformers will not end all texts with {saved.pad_token!r} as skilltrain does")
