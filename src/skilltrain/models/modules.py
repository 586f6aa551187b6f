"""Writes the files that make a model folder one of sentence-transformers, readable by TEI and vLLM.

sentence-transformers' own `save_pretrained` would load the model from disk again (16 GB for 8B
weights) to write five small files, and without the keys that TEI and vLLM read.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from skilltrain.files import write_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import backbone_options, heads
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker, yes_no_ids

# The release of sentence-transformers that has this format. Older releases warn.
_VERSION = {"sentence_transformers": "6.2.0"}
# These three are the names of release 5. Later releases still accept them. Older releases of vLLM
# know no others: for an unknown name they ignore the pooling without a warning.
_TRANSFORMER = "sentence_transformers.models.Transformer"
_NORMALIZE = "sentence_transformers.models.Normalize"
_POOLING = "sentence_transformers.models.Pooling"
_DENSE = "sentence_transformers.models.Dense"
_MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
_LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
IDENTITY = "torch.nn.modules.linear.Identity"

_POOLING_MODES: dict[Pooling, str] = {"mean": "mean", "cls": "cls", "last_token": "lasttoken"}
# TEI reads one flag per mode instead. Early releases refuse a folder without the last two.
_POOLING_FLAGS: dict[str, Pooling | None] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last_token",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
}


class Module(NamedTuple):
    """One module of a sentence-transformers model.

    Attributes:
        class_path: Full name of its class.
        folder: Its folder, relative to the model's folder; empty for the first module.
        settings: The settings that its class reads.
    """

    class_path: str
    folder: str
    settings: dict[str, Any]


def write_modules(model: Encoder | Reranker, folder: Path, per_token: bool = False) -> None:
    """Write the files from which sentence-transformers, TEI and vLLM assemble a model.

    These are modules.json, config_sentence_transformers.json, sentence_bert_config.json and the
    settings of each module.

    Args:
        model: An encoder, which `SentenceTransformer` will open, or a reranker, for `CrossEncoder`.
        folder: Folder of the model. It exists, and the weights and the tokenizer are written to it
            separately.
        per_token: Whether an encoder returns one vector per token. `MultiVectorEncoder` opens it.
    """
    if isinstance(model, Reranker):
        modules = _reranker_modules(model)
        settings = _reranker_settings(model)
    else:
        modules = _encoder_modules(model, per_token)
        settings = _encoder_settings(model, per_token)
    write_json(folder / "config_sentence_transformers.json", settings)

    # TEI and vLLM read the token limit in this file. sentence-transformers also finds the limit in
    # the tokenizer. Module 0 is the transformer, whose settings are in the model's folder itself.
    limit = {"max_seq_length": model.settings.max_tokens, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", modules[0].settings | limit)

    # modules.json lists the modules in the order in which a text passes through them.
    listing = [
        {"idx": number, "name": str(number), "path": module.folder, "type": module.class_path}
        for number, module in enumerate(modules)
    ]
    write_json(folder / "modules.json", listing)

    # Each further module has a folder, which is empty if the module has no settings.
    for module in modules[1:]:
        (folder / module.folder).mkdir(exist_ok=True)
        if module.settings:
            write_json(folder / module.folder / "config.json", module.settings)
    if isinstance(model, Encoder):
        # Modules 0 and 1 are the transformer and the pooling or mask, so projections start at 2.
        for number, projection in enumerate(model.projection, start=2):
            save_file(projection.state_dict(), folder / f"{number}_Dense/model.safetensors")


def _reranker_settings(reranker: Reranker) -> dict[str, Any]:
    """Return the content of config_sentence_transformers.json for a reranker.

    sentence-transformers then returns the same scores as skilltrain. The activation function is the
    identity, because a score is a logit, without a sigmoid.
    """
    template = reranker.settings.template
    # In the form yes_no, the prompt of every pair has an instruction for the model.
    is_yes_no = template.form == "yes_no"
    return {
        "model_type": "CrossEncoder",
        "default_prompt_name": "instruction" if is_yes_no else None,
        "activation_fn": IDENTITY,
        **_float32_head(reranker),
        "__version__": _VERSION,
        "prompts": {"instruction": template.instruction} if is_yes_no else {},
    }


def _encoder_settings(encoder: Encoder, per_token: bool) -> dict[str, Any]:
    """Return the content of config_sentence_transformers.json for an encoder.

    Args:
        encoder: The encoder.
        per_token: Whether it returns one vector per token.
    """
    template = encoder.settings.template
    # meanmaxsim: for each token of the query, the best cosine with a token of the skill, averaged.
    return {
        "model_type": "MultiVectorEncoder" if per_token else "SentenceTransformer",
        "similarity_fn_name": "meanmaxsim" if per_token else "cosine",
        "default_prompt_name": None,
        "__version__": _VERSION,
        "prompts": {"query": template.query_prefix(), "document": template.skill_prompt or ""},
    }


def _encoder_modules(encoder: Encoder, per_token: bool) -> list[Module]:
    """Return the modules of an encoder: transformer, pooling or mask, projection, normalisation.

    Args:
        encoder: The encoder.
        per_token: Whether it returns one vector per token, and so does not pool.
    """
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
        # Without this entry, loading reports an unused pooler as missing.
        transformer["model_kwargs"] = {"add_pooling_layer": False}

    modules = [Module(_TRANSFORMER, "", transformer)]
    if per_token:
        # The mask says which token vectors count for a score. No words are left out.
        modules.append(Module(_MASK, "1_MultiVectorMask", {"skiplist_words": []}))
        # Settings of the last module, which normalises the vectors of tokens.
        normalize = {"module_input_name": "token_embeddings"}
    else:
        pooling = encoder.settings.pooling
        pooling_settings = {
            "embedding_dimension": encoder.dim,
            "pooling_mode": _POOLING_MODES[pooling],
            "include_prompt": True,  # the tokens of the prompt are pooled too
        }
        # TEI reads no mode, but one flag per mode. Only the flag of this pooling is true.
        pooling_settings |= {flag: mode == pooling for flag, mode in _POOLING_FLAGS.items()}
        modules.append(Module(_POOLING, "1_Pooling", pooling_settings))
        normalize = {}  # by default, the last module normalises the vector of the text

    # A projection reads these vectors and writes its result under the same name.
    vectors = "token_embeddings" if per_token else "sentence_embedding"
    names = dict.fromkeys(("module_input_name", "module_output_name"), vectors)
    for projection in encoder.projection:
        folder = f"{len(modules)}_Dense"
        modules.append(Module(_DENSE, folder, projection.get_config_dict() | names))
    return [*modules, Module(_NORMALIZE, f"{len(modules)}_Normalize", normalize)]


def _reranker_modules(reranker: Reranker) -> list[Module]:
    """Return the modules of a reranker.

    The first is the transformer. If the score comes from the logits of yes and no, a second module
    reads these logits.
    """
    reads_logits = {"method": "forward", "method_output_name": "logits"}
    transformer: dict[str, Any] = {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": {"text": reads_logits},
    }
    if reranker.settings.template.form == "pair":
        # Let the tokenizer cut the skill, not the query.
        transformer["processing_kwargs"] = {"text": {"truncation": _truncation(reranker)}}
        return [Module(_TRANSFORMER, "", transformer)]

    # The form yes_no is a chat, whose messages may be query, document and system.
    transformer["modality_config"]["message"] = reads_logits | {"format": "flat"}
    # A model that was exported as a classifier has a head, whose output is the score.
    if heads(reranker.network):
        return [Module(_TRANSFORMER, "", transformer)]

    # Any other model gives logits of all tokens. A second module reads those of yes and no.
    transformer["transformer_task"] = "text-generation"
    transformer["module_output_name"] = "causal_logits"
    yes, no = yes_no_ids(reranker.tokenizer)
    score_settings = {
        "true_token_id": yes,
        "false_token_id": no,
        "module_input_name": "causal_logits",
    }
    return [
        Module(_TRANSFORMER, "", transformer),
        Module(_LOGIT_SCORE, "1_LogitScore", score_settings),
    ]


def _truncation(reranker: Reranker) -> str:
    """Return the truncation strategy of the tokenizer that cuts only the skill of a pair.

    If the query takes at most half of the tokens, longest_first cuts only the skill. Otherwise
    only_second is needed, although it fails for a query that fills the whole pair.
    """
    num_special = reranker.tokenizer.num_special_tokens_to_add(pair=True)
    half = (reranker.settings.max_tokens - num_special) // 2
    is_short = reranker.settings.query_max_tokens <= half
    return "longest_first" if is_short else "only_second"


def _float32_head(reranker: Reranker) -> dict[str, list[str]]:
    """Return the setting that keeps the head of a 16-bit model in float32.

    The head gives the score. With a head in 16 bits, candidates with close scores would tie.

    Returns:
        A setting for sentence-transformers; an empty dict if the model has more than 16 bits, or
        its head has no linear layer.
    """
    network = reranker.network
    if network.dtype.itemsize > 2:  # bytes per weight
        return {}

    # Find the linear layers of the head. The last of them gives the score. A causal language model
    # has no classification head, and its score comes from its output embeddings.
    head_layers = heads(network) or [network.get_output_embeddings()]
    names = []
    for name, module in network.named_modules():
        if module in head_layers and type(module) is torch.nn.Linear:
            names.append(name)
    if not names:
        return {}
    # In sentence-transformers, module 0 holds the network as its attribute `model`, so names of
    # weights begin with `0.model.`.
    return {"keep_in_fp32_modules": [f"0.model.{names[-1]}"]}
