"""Model folders, written whole or not at all: skilltrain reads them back, and plain sentence-transformers scores alike.

The JSON files of sentence-transformers are written here rather than by its `save_pretrained`: that would load the
model from disk a second time (16 GB for 8B weights) only to write five small files, without the keys that TEI and
vLLM read.
"""

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.export.card import shareable
from skilltrain.export.tokenizer import (
    append_token,
    control_tokens,
    reading_names_as_text,
    write_tokenizer,
    yes_no_chat_template,
)
from skilltrain.files import inside, read_json, write_json, write_text
from skilltrain.models.adapters import adapter_files
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE, backbone_options, load_pretrained
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker, RerankerSettings, yes_no_ids
from skilltrain.terminal import say
from skilltrain.version import __version__

_ST_VERSION = "6.2.0"  # the release of sentence-transformers whose folders these are; older ones warn
_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
_POOLING: dict[Pooling, tuple[str, str]] = {  # by its name, and by the flag that TEI reads
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last_token": ("lasttoken", "pooling_mode_lasttoken"),
}
_PROBES = ("a", "a " * 5, "a " * 30)
_PROBE_TOKENS = 12


class _Module(NamedTuple):
    """One module of a sentence-transformers model: its class, its folder ("" for the first), and its settings."""

    class_path: str
    folder: str
    settings: Mapping[str, Any]


def save_encoder(
    encoder: Encoder, folder: Path, base: str, card: str | None = None, interpolate: float | None = None
) -> None:
    """Write what `SentenceTransformer(folder)` needs to give our vectors, skilltrain.json and the model card.

    `interpolate` is the share of trained weights in a mean with those of the base, if it is one.

    Raises SkilltrainError for weights that must not be saved, and where the folder cannot be written.
    """
    settings = encoder.settings
    with _written_aside(folder) as aside:
        _write_weights(encoder.backbone, aside, folder)
        write_tokenizer(_tokenizer_of(encoder), settings.max_tokens, aside)
        _warn_of_other_ids(encoder, aside)
        transformer = {
            "transformer_task": "feature-extraction",
            # Without this entry, a tokenizer that has a chat template would wrap every text in it.
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "query_length": settings.query_max_tokens,
        }
        if "add_pooling_layer" in backbone_options(encoder.backbone.config):
            # Else every opening would report a pooler that is missing and that nothing uses.
            transformer["model_kwargs"] = {"add_pooling_layer": False}
        mode, own_flag = _POOLING[settings.pooling]
        pooling = {"embedding_dimension": encoder.dim, "pooling_mode": mode, "include_prompt": True}
        pooling |= {flag: flag == own_flag for _, flag in _POOLING.values()}
        package = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        modules = [
            _Module(_TRANSFORMER, "", transformer | _limit(settings.max_tokens)),
            _Module(package, "1_Pooling", pooling),
            _Module("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize", {}),
        ]
        model = {
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.template.query_prompt(), "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        }
        _write_modules(aside, modules, model)
        _write_record(aside, encoder, base, card, interpolate)


def save_reranker(
    reranker: Reranker, folder: Path, base: str, card: str | None = None, interpolate: float | None = None
) -> None:
    """Write what `CrossEncoder(folder)` needs to give our scores, skilltrain.json and the model card.

    No module of sentence-transformers computes the form `cosine_pair`: its folder names our loader, and CrossEncoder
    refuses it. For the rest see `save_encoder`.
    """
    settings = reranker.settings
    with _written_aside(folder) as aside:
        _write_weights(reranker.network, aside, folder)
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
        _write_modules(aside, modules, model)
        _write_record(aside, reranker, base, card, interpolate)


def save_adapter(model: Encoder | Reranker, folder: Path, base: str) -> None:
    """Write a model's adapter alone: `PeftModel.from_pretrained(network, folder)` adds it to the network of `base`.

    skilltrain.json beside it says what that network is fed with.
    """
    network = model.backbone if isinstance(model, Encoder) else model.network
    config, weights = adapter_files(network, shareable(base))
    with _written_aside(folder) as aside:
        config.save_pretrained(aside)
        save_file(weights, aside / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_record(aside, model, base, None, None)


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model, and no others that lie beside them. Raises SkilltrainError where one is missing."""
    record = source / CHECKPOINT_FILE
    files = [inside(source, str(name), record) for name in read_json(record)["files"]]
    for file in files:
        if not file.is_file():
            raise SkilltrainError("a file of the model is missing", where=file)
        copied = target / file.relative_to(source)
        try:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
        except OSError as error:
            raise SkilltrainError(f"cannot save the model: {reason_of(error)}", where=target) from error


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder inside `folder`, which may hold a run's checkpoints; its files move out when the block succeeds.

    config.json goes last: without it no reader takes `folder` for a model, so that none reads half of one.
    """
    aside = folder / ".model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        (folder / "config.json").unlink(missing_ok=True)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            else:
                path.chmod(0o644)  # safetensors writes its file for its owner alone
            path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise SkilltrainError(f"cannot save the model: {reason_of(error)}", where=folder) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_weights(network: Any, aside: Path, folder: Path) -> None:
    """Write config.json and the safetensors. Raises SkilltrainError for an adapter that is not merged, and for a
    weight that is no number.
    """
    weights = network.state_dict()
    if adapted := [name for name in weights if "lora_" in name or "base_layer" in name]:
        raise SkilltrainError(f"the adapter is not merged: {adapted[0]}", where=folder)
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise SkilltrainError(f"the weight {bad[0]} holds values that are no numbers", where=folder)
    network.save_pretrained(str(aside), safe_serialization=True)


def _write_modules(aside: Path, modules: Sequence[_Module], model: Mapping[str, Any]) -> None:
    """Write what makes the folder a sentence-transformers model: its modules, and `model`'s prompts and the like."""
    listing = [
        {"idx": number, "name": str(number), "path": module.folder, "type": module.class_path}
        for number, module in enumerate(modules)
    ]
    write_json(aside / "modules.json", listing)
    versioned = {"__version__": {"sentence_transformers": _ST_VERSION}, **model}
    write_json(aside / "config_sentence_transformers.json", versioned)
    for module in modules:
        (aside / module.folder).mkdir(exist_ok=True)
        file = "sentence_bert_config.json" if module.class_path == _TRANSFORMER else "config.json"
        if module.settings:
            write_json(aside / module.folder / file, module.settings)


def _write_record(
    aside: Path, model: Encoder | Reranker, base: str, card: str | None, interpolate: float | None
) -> None:
    """Write the model card where there is one, and skilltrain.json, which also lists the model's files."""
    if card is not None:
        write_text(aside / "README.md", card)
    files = [path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file()]
    record = {
        "kind": "encoder" if isinstance(model, Encoder) else "reranker",
        "settings": model.settings.model_dump(mode="json"),
        "base": shareable(base),
        **({} if interpolate is None else {"interpolate": interpolate}),
        "skilltrain": __version__,
        "files": sorted([*files, CHECKPOINT_FILE]),
    }
    write_json(aside / CHECKPOINT_FILE, record)


def _limit(max_tokens: int) -> dict[str, Any]:
    """The keys by which TEI and vLLM know the token limit; sentence-transformers has it from the tokenizer too."""
    return {"max_seq_length": max_tokens, "do_lower_case": False}


def _cross_encoder_modules(reranker: Reranker) -> tuple[list[_Module], dict[str, str]]:
    """(modules, prompts) that compute a reranker's score."""
    form, settings = reranker.settings.template.form, reranker.settings
    if form == "cosine_pair":
        return [_Module("skilltrain.models.reranker.load_reranker", "", {})], {}
    if form == "pair":
        pair = _pair_settings(settings, reranker.tokenizer) | _limit(settings.max_tokens)
        return [_Module(_TRANSFORMER, "", pair)], {}
    logits = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
        "module_output_name": "causal_logits",
        **_limit(settings.max_tokens),
    }
    yes, no = yes_no_ids(reranker.tokenizer)
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    package = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    prompts = {"instruction": settings.template.instruction}
    return [_Module(_TRANSFORMER, "", transformer), _Module(package, "1_LogitScore", score)], prompts


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


def _warn_of_other_ids(encoder: Encoder, aside: Path) -> None:
    """Say so if the saved tokenizer cuts or ends texts otherwise than `Encoder.tokenize`: some classes of tokenizers
    cannot be told to append a token. Then the folder is for skilltrain's reader only.
    """
    from transformers import AutoTokenizer

    saved = load_pretrained(AutoTokenizer, aside, "tokenizer")
    cut = saved([*_PROBES], truncation=True, max_length=_PROBE_TOKENS)["input_ids"]
    ours = encoder.tokenize(_PROBES, _PROBE_TOKENS)
    if any([*one] != [*other] for one, other in zip(cut, ours, strict=True)):
        say(f"plain sentence-transformers will not end all texts with {saved.pad_token!r} as skilltrain does")
