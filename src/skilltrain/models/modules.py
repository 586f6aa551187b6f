"""The files that make a model's folder one of sentence-transformers, with the keys that TEI and vLLM read.

They are written here rather than by sentence-transformers' `save_pretrained`: that would load the model from disk a
second time (16 GB for 8B weights) only to write five small files, without those keys.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from skilltrain.files import write_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import backbone_options, heads
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker, yes_no_ids

_ST_VERSION = (
    "6.2.0"  # the release of sentence-transformers whose folders these are; older ones warn
)
_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
_MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
_LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
_MODES: dict[Pooling, tuple[str, str]] = {  # by its name, and by the flag that TEI reads
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last_token": ("lasttoken", "pooling_mode_lasttoken"),
}
_FLAGS = (
    *(flag for _, flag in _MODES.values()),
    "pooling_mode_max_tokens",  # early TEI refuses a folder without these two
    "pooling_mode_mean_sqrt_len_tokens",
)
IDENTITY = "torch.nn.modules.linear.Identity"


class Module(NamedTuple):
    """One module of a sentence-transformers model: its class, its folder ("" for the first), and its settings."""

    class_path: str
    folder: str
    settings: dict[str, Any]


def write_modules(model: Encoder | Reranker, folder: Path, per_token: bool = False) -> None:
    """Write modules.json, config_sentence_transformers.json and the settings of each module.

    They are for `CrossEncoder`, `SentenceTransformer` or, if `per_token`, `MultiVectorEncoder`.
    """
    if isinstance(model, Reranker):
        template = model.settings.template
        modules = _reranker_modules(model)
        prompts = {"instruction": template.instruction} if template.form == "yes_no" else {}
        settings = {"model_type": "CrossEncoder", "default_prompt_name": next(iter(prompts), None)}
        settings |= {"activation_fn": IDENTITY} | _half_precision_head(model)
    else:
        template = model.settings.template
        modules = _encoder_modules(model, per_token)
        prompts = {"query": template.query_prefix(), "document": template.skill_prompt or ""}
        settings = {
            "model_type": "MultiVectorEncoder" if per_token else "SentenceTransformer",
            "similarity_fn_name": "meanmaxsim" if per_token else "cosine",
            "default_prompt_name": None,
        }
    settings |= {"__version__": {"sentence_transformers": _ST_VERSION}, "prompts": prompts}
    write_json(folder / "config_sentence_transformers.json", settings)

    # TEI and vLLM read the token limit here; sentence-transformers also has it from the tokenizer.
    limit = {"max_seq_length": model.settings.max_tokens, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", modules[0].settings | limit)
    listing = [
        {"idx": number, "name": str(number), "path": module.folder, "type": module.class_path}
        for number, module in enumerate(modules)
    ]
    write_json(folder / "modules.json", listing)
    for module in modules[1:]:
        (folder / module.folder).mkdir(exist_ok=True)
        if module.settings:
            write_json(folder / module.folder / "config.json", module.settings)


def _encoder_modules(encoder: Encoder, per_token: bool) -> list[Module]:
    transformer: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        # Without this entry, a tokenizer that has a chat template would wrap every text in it.
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
        "query_length": encoder.settings.query_max_tokens,
    }
    if "add_pooling_layer" in backbone_options(encoder.network.config):
        # Else every opening would report a pooler that is missing and that nothing uses.
        transformer["model_kwargs"] = {"add_pooling_layer": False}
    modules = [Module(_TRANSFORMER, "", transformer)]
    if per_token:
        modules.append(Module(_MASK, "1_MultiVectorMask", {"skiplist_words": []}))
        normalize = {"module_input_name": "token_embeddings"}
    else:
        mode, flag = _MODES[encoder.settings.pooling]
        pooling = {"embedding_dimension": encoder.dim, "pooling_mode": mode, "include_prompt": True}
        pooling |= {name: name == flag for name in _FLAGS}
        modules.append(Module(_POOLING, "1_Pooling", pooling))
        normalize = {}
    return [*modules, Module(_NORMALIZE, "2_Normalize", normalize)]


def _reranker_modules(reranker: Reranker) -> list[Module]:
    """One module for a classification head; for the chat form also one that reads yes and no."""
    logits = {"method": "forward", "method_output_name": "logits"}
    network: dict[str, Any] = {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": {"text": logits},
    }
    modules = [Module(_TRANSFORMER, "", network)]
    if reranker.settings.template.form == "pair":
        # longest_first cuts the skill alone while the query takes at most half of the tokens.
        # only_second always does, but fails for a query that fills the whole pair.
        num_special = reranker.tokenizer.num_special_tokens_to_add(pair=True)
        half = (reranker.settings.max_tokens - num_special) // 2
        is_short = reranker.settings.query_max_tokens <= half
        truncation = "longest_first" if is_short else "only_second"
        network["processing_kwargs"] = {"text": {"truncation": truncation}}
        return modules
    network["modality_config"]["message"] = logits | {"format": "flat"}
    if not heads(reranker.network):
        output = "causal_logits"
        network |= {"transformer_task": "text-generation", "module_output_name": output}
        yes, no = yes_no_ids(reranker.tokenizer)
        score = {"true_token_id": yes, "false_token_id": no, "module_input_name": output}
        modules.append(Module(_LOGIT_SCORE, "1_LogitScore", score))
    return modules


def _half_precision_head(reranker: Reranker) -> dict[str, list[str]]:
    """Keep the scoring layer of 16-bit weights in float32, so that close candidates differ."""
    network = reranker.network
    if network.dtype.itemsize > 2:
        return {}
    layers = heads(network) or [network.get_output_embeddings()]
    names = [
        name
        for name, module in network.named_modules()
        if module in layers and type(module) is torch.nn.Linear
    ]
    return {"keep_in_fp32_modules": [f"0.model.{names[-1]}"]} if names else {}
