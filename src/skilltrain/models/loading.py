"""Where a model comes from, and what kind of model a folder holds."""

import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.models.model_files import model_file

CHECKPOINT_FILE = "skilltrain.json"
Precision = Literal["auto", "float32", "bfloat16"]
_UNFINISHED = "training that has not finished leaves only checkpoints; continue it with --resume"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ROBERTA_LIKE = (  # their positions are counted from the padding's id + 1
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def resolve_model(source: str) -> str:
    """A folder or Hub id that transformers can load.

    `package:NAME` is the folder `model` of an installed package (found without importing it).
    Raises SkilltrainError for a folder that does not exist.
    """
    if source.startswith("package:"):
        name = source.removeprefix("package:")
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        folders = [Path(place) / "model" for place in (spec.submodule_search_locations or [])] if spec else []
        found = [folder for folder in folders if folder.is_dir()]
        if not found:
            fix = f"pip install {name.replace('_', '-')}"
            raise SkilltrainError("no installed package holds this model", where=source, fix=fix)
        return str(found[0])
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SkilltrainError("is no model folder: it has no config.json", where=source, fix=_UNFINISHED)
        return str(folder)
    if folder.exists() or not _HUB_ID.fullmatch(source) or source.startswith((".", "runs/")):
        raise SkilltrainError("no such model", where=source, fix="give a folder, a Hub id owner/name, or package:NAME")
    return source


def stored_settings(folder: str, kind: Literal["encoder", "reranker"]) -> dict[str, Any]:
    """The settings that training saved in a model folder, or that a Hub model has; empty for a base model.

    Raises SkilltrainError if the folder holds the other kind of model.
    """
    file = model_file(folder, CHECKPOINT_FILE)
    if file is not None:
        stored = read_json(file)
        if not isinstance(stored, dict) or not isinstance(stored.get("settings"), dict) or "kind" not in stored:
            raise SkilltrainError("is no record of a skilltrain model", where=file, fix="export the model again")
        if stored["kind"] != kind:
            raise SkilltrainError(f"its model is of kind {stored['kind']}, but {kind} is needed here", where=folder)
        return stored["settings"]
    config_file = model_file(folder, "config.json")
    architectures = read_json(config_file).get("architectures") or [] if config_file is not None else []
    if kind == "encoder" and any("SequenceClassification" in name for name in architectures):
        raise SkilltrainError(
            f"its model is of kind reranker ({architectures[0]}), but encoder is needed here", where=folder
        )
    return {}


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The number format to compute in; `auto` is bfloat16 where the hardware multiplies it natively."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if native else torch.float32


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU; also the CPU where accelerate's launcher was told so (cpu.yaml)."""
    if "ACCELERATE_USE_CPU" in os.environ:
        from accelerate.utils import parse_flag_from_env

        if parse_flag_from_env("ACCELERATE_USE_CPU"):
            return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_positions(model_config: Any) -> int | None:
    """How many tokens a model's positions reach for; None where nothing says so."""
    limit = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    return limit - (model_config.pad_token_id + 1 if model_config.model_type in _ROBERTA_LIKE else 0)


def has_optional_pooler(model_config: Any) -> bool:
    """Whether the backbone's class can be built without its pooler, a layer that vectors of ours do not use."""
    from transformers import MODEL_MAPPING

    found: Any = MODEL_MAPPING.get(type(model_config), ())
    classes = found if isinstance(found, tuple | list) else (found,)
    return bool(classes) and all("add_pooling_layer" in inspect.signature(one).parameters for one in classes)


def quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`function(…)` without transformers' progress bars and its report on heads that are absent by design."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        return function(*arguments, **options)
    finally:
        logging.set_verbosity(verbosity)


def load_pretrained(auto_class: Any, folder: str, what: str, **options: Any) -> Any:
    """`auto_class.from_pretrained`, remote code refused; a failure is one clear line."""
    from safetensors import SafetensorError

    try:
        return quietly(auto_class.from_pretrained, folder, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        message = str(error).strip().split("\n")[0]
        raise SkilltrainError(f"cannot load the {what}: {message}", where=folder) from error


def in_own_dtype(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A layer's inputs in the number format of its weights: a forward pre-hook for float32 heads of bfloat16 models."""
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in inputs)
