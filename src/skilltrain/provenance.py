"""Record where a run was computed, and the sources of the plug-ins that it used.

A run with another provenance is still the same run. A run with another source of a plug-in is a
different run.

Notes:
    - The facts about a run name no path, user or token.
    - The settings hold a plug-in as its name, or as an object of the plug-in's class. A measure is
      an object in the settings. Its name, `nDCG@10`, is only in their JSON values.
    - The package may be installed inside the checkout of another project.
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

    Args:
        config: Settings of the run, which name the models whose Hub revision is recorded.
    """
    commit, _, dirty = checkout_commit().partition("-")
    texts = {value for value in _values_in(config) if isinstance(value, str)}
    hub_models = sorted(name for name in HUB_REVISIONS if name in texts)
    return {
        "commit": commit or None,
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
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            _DESCRIBE.split(), cwd=_CHECKOUT, text=True, stderr=subprocess.DEVNULL
        ).strip()
    return ""


def _device_name() -> str:
    """Return the product name of the GPU if this process uses one, otherwise of the CPU."""
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

    Only plug-ins of other packages are included.
    """
    modules: dict[str, str] = {}
    for value in [*_values_in(config), *_values_in(config.model_dump(mode="json"))]:
        modules.update(_modules_of(value))
    return {
        name: _source_fingerprint(module)
        for name, module in modules.items()
        if module.partition(".")[0] not in _NOT_PLUGIN_PACKAGES
    }


def _modules_of(value: Any) -> Iterator[tuple[str, str]]:
    """Yield name and module of the plug-in that a value names, and of the value's class."""
    if isinstance(value, str):
        name, _, _ = value.partition("@")  # a measure's cutoff follows
        if name in LOADED:
            yield name, LOADED[name]
    value_class = type(value)
    module = value_class.__module__
    yield f"{module}:{value_class.__qualname__}", module


def _values_in(value: Any) -> Iterator[Any]:
    """Yield `value` itself, and all models, keys and values inside it."""
    yield value
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, BaseModel | list | tuple | set | frozenset):
        children = value  # a model yields pairs of a field's name and its value
    for child in children:
        yield from _values_in(child)


def _source_fingerprint(name: str) -> str:
    """Return a SHA-256 of a module's file, or of all Python files of the module's package."""
    module = sys.modules[name]
    file = Path(getattr(module, "__file__", None) or "")  # built-in modules have no file
    files = sorted(file.parent.rglob("*.py")) if module.__package__ else [file]
    fingerprints = [fingerprint(path) for path in files if path.is_file()]
    return sha256(repr(fingerprints).encode()).hexdigest()
