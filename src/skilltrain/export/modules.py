"""The files that make a model's folder one of sentence-transformers, with the keys that TEI and vLLM read.

They are written here rather than by sentence-transformers' `save_pretrained`: that would load the model from disk a
second time (16 GB for 8B weights) only to write five small files, without those keys.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skilltrain.files import write_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import backbone_options, heads
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker, RerankerSettings, yes_no_ids

_ST_VERSION = "6.2.0"  # the release of sentence-transformers whose folders these are; older ones warn
_BASE = "sentence_transformers.base.modules"
_TRANSFORMER = f"{_BASE}.transformer.Transformer"
_NORMALIZE = f"{_BASE}.normalize.Normalize"
_POOLING: dict[Pooling, tuple[str, str]] = {  # by its name, and by the flag that TEI reads
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last_token": ("lasttoken", "pooling_mode_lasttoken"),
}
_OLD_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
)  # TEI's early releases refuse a folder without them
IDENTITY = "torch.nn.modules.linear.Identity"


class Module(NamedTuple):
    """One module of a sentence-transformers model: its class, its folder ("" for the first), and its settings."""

    class_path: str
    folder: str
    settings: Mapping[str, Any]


class Layout(NamedTuple):
    """A model in sentence-transformers' words: its modules, and its prompts and the like."""

    modules: Sequence[Module]
    model: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write modules.json, config_sentence_transformers.json and each module's settings."""
        listing = [
            {"idx": number, "name": str(number), "path": module.folder, "type": module.class_path}
            for number, module in enumerate(self.modules)
        ]
        write_json(folder / "modules.json", listing)
        versioned = {"__version__": {"sentence_transformers": _ST_VERSION}, **self.model}
        write_json(folder / "config_sentence_transformers.json", versioned)
        for module in self.modules:
            (folder / module.folder).mkdir(exist_ok=True)
            file = "sentence_bert_config.json" if module.class_path == _TRANSFORMER else "config.json"
            if module.settings:
                write_json(folder / module.folder / file, module.settings)


def encoder_layout(encoder: Encoder) -> Layout:
    """For `SentenceTransformer`: one vector a text."""
    mode, own_flag = _POOLING[encoder.settings.pooling]
    pooling = {"embedding_dimension": encoder.dim, "pooling_mode": mode, "include_prompt": True}
    pooling |= {flag: flag == own_flag for flag in (*(flag for _, flag in _POOLING.values()), *_OLD_FLAGS)}
    package = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    modules = [_token_vectors(encoder), Module(package, "1_Pooling", pooling), Module(_NORMALIZE, "2_Normalize", {})]
    return Layout(modules, {"model_type": "SentenceTransformer", **_asks(encoder), "similarity_fn_name": "cosine"})


def multi_vector_layout(encoder: Encoder) -> Layout:
    """For `MultiVectorEncoder`: a vector a token, compared as `skilltrain.models.max_sim` does."""
    mask = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
    modules = [
        _token_vectors(encoder),
        Module(mask, "1_MultiVectorMask", {"skiplist_words": []}),
        Module(_NORMALIZE, "2_Normalize", {"module_input_name": "token_embeddings"}),
    ]
    return Layout(modules, {"model_type": "MultiVectorEncoder", **_asks(encoder), "similarity_fn_name": "meanmaxsim"})


def _asks(encoder: Encoder) -> dict[str, Any]:
    template = encoder.settings.template
    prompts = {"query": template.before_query(), "document": template.skill_prompt or ""}
    return {"prompts": prompts, "default_prompt_name": None}


def _token_vectors(encoder: Encoder) -> Module:
    transformer: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        # Without this entry, a tokenizer that has a chat template would wrap every text in it.
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "query_length": encoder.settings.query_max_tokens,
        **_limit(encoder.settings.max_tokens),
    }
    if "add_pooling_layer" in backbone_options(encoder.backbone.config):
        # Else every opening would report a pooler that is missing and that nothing uses.
        transformer["model_kwargs"] = {"add_pooling_layer": False}
    return Module(_TRANSFORMER, "", transformer)


def _limit(max_tokens: int) -> dict[str, Any]:
    """The keys by which TEI and vLLM know the token limit; sentence-transformers has it from the tokenizer too."""
    return {"max_seq_length": max_tokens, "do_lower_case": False}


def reranker_layout(reranker: Reranker) -> Layout:
    """For `CrossEncoder`, which refuses the form cosine_pair: none of its modules computes it, and this names ours."""
    form, settings = reranker.settings.template.form, reranker.settings
    prompts = {"instruction": settings.template.instruction} if form == "yes_no" else {}
    if form == "cosine_pair":
        modules = [Module("skilltrain.models.reranker.load_reranker", "", {})]
    elif form == "pair":
        pair = _pair_settings(settings, reranker.tokenizer) | _limit(settings.max_tokens)
        modules = [Module(_TRANSFORMER, "", pair)]
    else:
        modules = _yes_no_modules(reranker)
    model: dict[str, Any] = {
        "model_type": "CrossEncoder",
        "prompts": prompts,
        "default_prompt_name": next(iter(prompts), None),
        "activation_fn": IDENTITY,
    }
    if float32_layer := _half_precision_head(reranker):
        model["keep_in_fp32_modules"] = [float32_layer]
    return Layout(modules, model)


def _yes_no_modules(reranker: Reranker) -> list[Module]:
    """The chat form, scored by two rows of the vocabulary or, for sequence classification, by their difference."""
    logits = {"method": "forward", "method_output_name": "logits"}
    is_classifier = bool(heads(reranker.network))
    output = "scores" if is_classifier else "causal_logits"
    transformer = {
        "transformer_task": "sequence-classification" if is_classifier else "text-generation",
        "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
        "module_output_name": output,
        **_limit(reranker.settings.max_tokens),
    }
    modules = [Module(_TRANSFORMER, "", transformer)]
    if not is_classifier:
        yes, no = yes_no_ids(reranker.tokenizer)
        score = {"true_token_id": yes, "false_token_id": no, "module_input_name": output}
        modules.append(
            Module("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "1_LogitScore", score)
        )
    return modules


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
    layers = [*network.children()] if heads(network) else [network.get_output_embeddings()]
    names = (name for name, module in network.named_modules() if any(module is layer for layer in layers))
    found = [name for name in names if type(network.get_submodule(name)) is torch.nn.Linear]
    return f"0.model.{found[-1]}" if found else None
