"""skilltrain fine-tunes the encoder and the reranker that route an agent's task to the right skill.

The names below are the Python API. docs/guides/python.md has examples. A name is imported when it
is first used, because the import of torch takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from skilltrain.version import __version__

if TYPE_CHECKING:
    from skilltrain.api import build_lists, evaluate, export_model, fit, route, run, train
    from skilltrain.data.export_data import export_data
    from skilltrain.data.pool.read import read_pool
    from skilltrain.errors import SkilltrainError
    from skilltrain.records import Query, Skill
    from skilltrain.serving.router import Router
    from skilltrain.tables import read_table, write_table

__all__ = [
    "Query",
    "Router",
    "Skill",
    "SkilltrainError",
    "__version__",
    "build_lists",
    "evaluate",
    "export_data",
    "export_model",
    "fit",
    "read_pool",
    "read_table",
    "route",
    "run",
    "train",
    "write_table",
]
# Modules of the names that are not in `skilltrain.api`.
_MODULES = {
    "Query": "records",
    "Router": "serving.router",
    "Skill": "records",
    "SkilltrainError": "errors",
    "export_data": "data.export_data",
    "read_pool": "data.pool.read",
    "read_table": "tables",
    "write_table": "tables",
}


def __dir__() -> list[str]:
    """Return the names of the API, for tab completion."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'skilltrain' has no attribute {name!r}")
    module = _MODULES.get(name, "api")
    return getattr(importlib.import_module(f"skilltrain.{module}"), name)
