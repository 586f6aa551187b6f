"""Record where a run was computed, and the sources of the plug-ins that it used.

A run with another provenance is still the same run. A run with another source of a plug-in is a
different run.
"""

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from skilltrain.files import fingerprint
from skilltrain.plugins import LOADED
from skilltrain.terminal import launched_ranks
from skilltrain.version import __version__

HUB_REVISIONS: dict[str, str] = {}
"""Commit of each model that this process has loaded from the Hub, by the model's id."""
_CHECKOUT = Path(__file__).parents[2]
# Prints the full commit and no tag. "-dirty" follows if tracked files have changed.
_DESCRIBE = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*"
_NOT_PLUGIN_PACKAGES = {"skilltrain", "pydantic", *sys.stdlib_module_names}


def provenance_of(config: BaseModel) -> dict[str, Any]:
    """Return the facts about the code and the machine that compute a run.

    The facts name no path, user or token.

    Args:
        config: Settings of the run. Models that the settings name are recorded with their Hub
            revision, if this process has loaded them from the Hub.
    """
    # The commit is a hash. `-dirty` follows it if tracked files have changed.
    commit, _, dirty = checkout_commit().partition("-")
    # Record the loaded models of the Hub whose names are in the settings.
    texts = {value for value in _values_in(config) if isinstance(value, str)}
    hub_models = sorted(name for name in HUB_REVISIONS if name in texts)
    return {
        "commit": commit or None,  # None: this package does not run from a git checkout
        "is_dirty": bool(dirty),
        "skilltrain": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": _device_name(),
        "num_processes": launched_ranks(),
        "hub_revisions": {name: HUB_REVISIONS[name] for name in hub_models},
    }


@cache
def checkout_commit() -> str:
    """Return the git commit of this package's checkout, or "" if there is no checkout or no git."""
    if not (_CHECKOUT / ".git").exists():
        return ""  # installed, maybe inside the checkout of another project
    # Without git, or if git fails, the commit is not known.
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            _DESCRIBE.split(), cwd=_CHECKOUT, text=True, stderr=subprocess.DEVNULL
        ).strip()
    return ""


def _device_name() -> str:
    """Return the product name of the GPU if this process uses one, otherwise of the CPU."""
    # Do not import torch here: a process that has not imported torch uses no GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    with suppress(OSError):  # only Linux has this file
        name = re.search(r"(?m)^model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        if name:
            return name[1]
    return platform.processor() or platform.machine()


def plugin_fingerprints(config: BaseModel) -> dict[str, str]:
    """Return a SHA-256 of the source of each plug-in that a run uses, by the plug-in's name.

    Only plug-ins of other packages are included. If their source changes, a run with the same
    settings is another run.

    Args:
        config: Settings of the run.
    """
    # The settings hold a plug-in as its name, or as an object of the plug-in's class. A measure is
    # an object in the settings. Its name, `nDCG@10`, is only in their JSON values.
    values = [*_values_in(config), *_values_in(config.model_dump(mode="json"))]

    # Find the module of each plug-in, and of the class of any other value.
    modules: dict[str, str] = {}
    for value in values:
        if isinstance(value, str):
            name, _, _ = value.partition("@")  # without the cutoff of a measure
            # LOADED holds the modules of the plug-ins that other packages have added.
            if name in LOADED:
                modules[name] = LOADED[name].module
        # The name of a plug-in's object is its class path, `module:Class`.
        value_class = type(value)
        class_path = f"{value_class.__module__}:{value_class.__qualname__}"
        modules[class_path] = value_class.__module__

    # Leave out the classes of Python, pydantic and this package.
    return {
        name: _source_fingerprint(module)
        for name, module in modules.items()
        # Compare the top-level package: `skilltrain` of `skilltrain.config`.
        if module.partition(".")[0] not in _NOT_PLUGIN_PACKAGES
    }


def _values_in(value: Any) -> Iterator[Any]:
    """Yield `value` itself, and all models, keys and values inside it, at any depth.

    Args:
        value: Settings: a pydantic model, a map, a list or a single value.
    """
    yield value
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.items()  # pairs, of which the key and the value are yielded in turn
    elif isinstance(value, BaseModel | list | tuple | set | frozenset):
        children = value  # a model yields pairs of a field's name and its value
    for child in children:
        yield from _values_in(child)


def _source_fingerprint(name: str) -> str:
    """Return a SHA-256 of a module's file, or of all Python files of the module's package.

    Args:
        name: Name of a module that is already imported.
    """
    module = sys.modules[name]
    file = Path(getattr(module, "__file__", None) or "")  # built-in modules have no file
    # A module of a package may use any other module of the package.
    files = sorted(file.parent.rglob("*.py")) if module.__package__ else [file]
    fingerprints = [fingerprint(path) for path in files if path.is_file()]
    return sha256(repr(fingerprints).encode()).hexdigest()
