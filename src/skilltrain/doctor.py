"""Says what is installed, what the machine has, and which recipes it has the memory for."""

import math
import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import psutil
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
# Instructions by their names in `torch.cpu.get_capabilities`.
_CPU_FEATURES = {"AVX-512": "avx512_f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
# Activations take about as much as the state. On an H100, sr_emb_0.6b took 18.4 GiB, its state 8.9.
_MAX_STATE_SHARE = 0.5


def examine_machine() -> dict[str, Any]:
    """Return facts about the installation and the machine. Environment variables are not read."""
    device = default_device()
    available = available_bytes(device)
    return {
        "skilltrain": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "missing_extras": missing_extras(),
        "device": describe_device(device),
        "free_memory_gib": _in_gib(psutil.virtual_memory().available),
        "free_device_memory_gib": _in_gib(available),
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
        return f"CUDA, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
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
        free_by_cache[str(cache)] = _in_gib(shutil.disk_usage(existing_folder).free)
    return free_by_cache


def examine_recipes(device: torch.device, available: float) -> list[dict[str, Any]]:
    """Compare the memory that training recipes need with the memory of a device.

    The recipes in `paper` and `tiny` are left out. The former need as much as those of the same
    name, and the latter need little.

    Args:
        device: Device to train on, alone.
        available: Free bytes of the device.

    Returns:
        One row for each recipe: its name, its model, `state_gib` and `verdict`. `state_gib` is the
        memory of weights, gradients and optimiser, or None if the model's size is not known.
    """
    rows: list[dict[str, Any]] = []
    files = [*sorted(SHIPPED_RECIPES.glob("*.yaml")), SHIPPED_RECIPES / "tiny/sr_emb_minilm.yaml"]
    for file in files:
        values = load_recipe(file)
        # The classes of other stages take a second to import.
        if command_of(values["stage"]) != "train":
            continue
        recipe: Any = parse_recipe(values, file)
        num_bytes = state_bytes(recipe, device)
        verdict = "unknown: the model is not on this machine"
        if num_bytes is not None:
            verdict = "fits"
            if num_bytes > _MAX_STATE_SHARE * available:
                verdict = "tight: lower training.batch_size or model.max_tokens"
            if num_bytes > available:
                verdict = "too large for one device of this machine"
        row = {"recipe": file.relative_to(SHIPPED_RECIPES).with_suffix("").as_posix()}
        row |= {"model": recipe.model.source, "verdict": verdict}
        rows.append({**row, "state_gib": None if num_bytes is None else _in_gib(num_bytes)})
    return rows


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

    The name of a model on the Hub may tell it: "Qwen/Qwen3-Embedding-0.6B" has about 600 million.

    Args:
        source: Model of a recipe: a folder, a package or a Hub id.
    """
    billions = re.search(r"(\d+(?:\.\d+)?)B\b", source)
    if billions:
        return round(float(billions[1]) * 1e9)
    if not source.startswith("package:") and not Path(source).is_dir():
        return None
    from safetensors import safe_open

    try:
        files = [*resolve_model(source).glob("*.safetensors")]
    except SkilltrainError:  # the package is not installed
        return None
    num_parameters = 0
    for file in files:
        # The header of the file has the shapes, so no weights are read.
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118, it is no dict
                num_parameters += math.prod(weights.get_slice(name).get_shape())
    return num_parameters


def _in_gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 1)
