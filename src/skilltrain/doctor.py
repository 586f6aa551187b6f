"""Says what is installed, what the machine has, and which recipes it has the memory for."""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError, install_command, requirements_of
from skilltrain.files import cache_folder
from skilltrain.models.adapters import is_quantized
from skilltrain.models.loading import default_device, resolve_dtype, resolve_model
from skilltrain.stage import SHIPPED_RECIPES, command_of, parse_recipe
from skilltrain.training.loop import GIB
from skilltrain.training.memory import available_bytes, held_bytes
from skilltrain.version import __version__

_LIBRARIES = ("torch", "transformers", "sentence-transformers", "accelerate", "peft", "datasets")
_SMALL_RECIPE = "tiny/sr_emb_minilm.yaml"  # for machines that all other recipes are too large for
# Instructions by their names in `torch.cpu.get_capabilities`.
_CPU_FEATURES = {"AVX-512": "avx512_f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
# Activations take about as much as the state. On an H100, sr_emb_0.6b took 18.4 GiB, its state 8.9.
_MAX_STATE_SHARE = 0.5


def examine_machine() -> dict[str, Any]:
    """Return facts about the installation and the machine, without any secret of the environment.

    Returns:
        Facts by their names. `recipes` has a verdict about each recipe.
    """
    device = default_device()
    available = available_bytes(device)
    return {
        "skilltrain": __version__,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "missing_extras": missing_extras(),
        "device": describe_device(device),
        "free_memory_gib": round(available / GIB, 1),
        "free_disk_gib": free_disk_by_cache(),
        "recipes": examine_recipes(device, available),
    }


def missing_extras() -> dict[str, str]:
    """Return the install command of each extra that lacks a package, by the name of the extra."""
    commands: dict[str, str] = {}
    for extra in metadata("skilltrain").get_all("Provides-Extra") or []:
        for requirement in requirements_of(extra):
            # For example, `onnx` of `onnx>=1.19`.
            name = re.split(r"[^\w.-]", requirement)[0]
            try:
                version(name)
            except PackageNotFoundError:
                commands[extra] = install_command(extra)
    commands.pop("dev", None)  # only for work on skilltrain itself
    return commands


def describe_device(device: torch.device) -> str:
    """Return the device as a person reads it, such as "CPU, 2 cores, AVX-512, no AMX"."""
    if device.type == "cuda":
        import faiss

        # faiss-cpu always reports 0 GPUs.
        library = "faiss-gpu" if faiss.get_num_gpus() else "faiss-cpu"
        name = torch.cuda.get_device_name()
        return f"CUDA, {torch.cuda.device_count()} x {name}, search with {library}"
    if device.type == "mps":
        return "MPS, Apple's GPU"
    capabilities = torch.cpu.get_capabilities()
    features = [
        name if capabilities.get(key) else f"no {name}" for name, key in _CPU_FEATURES.items()
    ]
    return f"CPU, {os.cpu_count()} cores, {', '.join(features)}"


def free_disk_by_cache() -> dict[str, float]:
    """Return the free disk space in GiB by the folder of a cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    free_by_cache: dict[str, float] = {}
    for cache in (cache_folder("").resolve(), Path(HF_HUB_CACHE).resolve()):
        # A cache that was never used does not exist yet.
        existing_folder = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free_by_cache[str(cache)] = round(shutil.disk_usage(existing_folder).free / GIB, 1)
    return free_by_cache


def examine_recipes(device: torch.device, available: float) -> dict[str, str]:
    """Compare the memory that training recipes need with the memory of a device.

    The top folder of recipes is read, and one small recipe of the folder `tiny`. The recipes in the
    folder `paper` are left out: they need as much memory as the top recipes of the same name.

    Args:
        device: The one device to train on, without others.
        available: Free bytes of the device.

    Returns:
        Verdicts by recipe, such as "fits (8.9 GiB and activations)".
    """
    verdicts: dict[str, str] = {}
    for file in [*sorted(SHIPPED_RECIPES.glob("*.yaml")), SHIPPED_RECIPES / _SMALL_RECIPE]:
        values = load_recipe(file)
        # Parse only training recipes. Parsing imports the class of the stage, and the classes of
        # other stages take a second to import.
        if command_of(values["stage"]) == "train":
            num_bytes = state_bytes(parse_recipe(values, file), device)
            name = file.relative_to(SHIPPED_RECIPES).with_suffix("").as_posix()
            verdicts[name] = memory_verdict(num_bytes, available)
    return verdicts


def memory_verdict(num_bytes: float | None, available: float) -> str:
    """Return whether a training run fits.

    Args:
        num_bytes: Bytes of weights, gradients and optimiser state. None: unknown.
        available: Free bytes of the device.
    """
    if num_bytes is None:
        return "unknown: the model is not on this machine"
    size = f"({num_bytes / GIB:.1f} GiB and activations)"
    if num_bytes > available:
        return f"too large {size}"
    if num_bytes > _MAX_STATE_SHARE * available:
        return f"tight {size}: lower training.batch_size or model.max_tokens"
    return f"fits {size}"


def state_bytes(recipe: Any, device: torch.device) -> float | None:
    """Return the bytes of weights, gradients and optimiser state, without activations.

    Args:
        recipe: A training recipe. The weights of its adapter are not counted: they are few.
        device: Device on which the weights would be.

    Returns:
        The bytes, or None if the size of the model is not known.
    """
    num_parameters = count_parameters(recipe.model.source)
    if num_parameters is None:
        return None
    dtype = resolve_dtype(recipe.model.precision, device)
    if is_quantized(recipe.adapter):
        dtype = torch.uint8  # a byte holds two weights
        num_parameters //= 2
    # On the device `meta`, a tensor has a size and takes no memory.
    weights = torch.empty(num_parameters, dtype=dtype, device="meta")
    module = nn.Module()
    module.weights = nn.Parameter(weights, requires_grad=recipe.adapter is None)
    return held_bytes(module, recipe.training.optimizer)


def count_parameters(source: str) -> int | None:
    """Return the number of a model's parameters, or None if it is not known. Downloads nothing.

    The name of a model on the Hub may contain the number: "Qwen/Qwen3-Embedding-0.6B" has about
    600 million parameters.

    Args:
        source: Model of a recipe: a package or a Hub id.
    """
    billions = re.search(r"(\d+(?:\.\d+)?)B\b", source)
    if billions:
        return round(float(billions[1]) * 1e9)
    # Only the files of a package are on this machine. A recipe may also name a Hub model, which is
    # not downloaded here, or a folder that a training run has yet to write.
    if not source.startswith("package:"):
        return None
    try:
        files = resolve_model(source).glob("*.safetensors")
    except SkilltrainError:  # the package is not installed
        return None
    num_bytes = sum(file.stat().st_size for file in files)
    return num_bytes // torch.float32.itemsize  # packages hold float32 weights
