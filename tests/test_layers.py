"""Imports point down only: the layers of CONTRIBUTING.md, checked over every module of src/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from skilltrain.runs import Stage
from skilltrain.stages import STAGES

PACKAGE = "skilltrain"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Top to bottom. A part is a package or a module directly below skilltrain; parts on one level do not import each other.
LAYERS = (
    ("__init__", "__main__", "recipe"),
    ("cli",),
    ("api", "ablation"),
    ("fitting",),
    ("stages",),
    ("training", "routing"),
    ("report",),
    ("data", "export"),
    ("retrieval",),
    ("models", "losses", "evaluation"),
    ("templates", "llm"),
    ("tables",),
    ("records",),
    ("runs", "workers"),
    ("terminal",),
    ("config",),
    ("files",),
    ("errors", "texts", "version"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str:
    """`skilltrain.data.mine` → `data`; the package itself → `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours in `source`, at the top or inside a function, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            target = _target(node, module, is_package)
            if target == PACKAGE:  # `from skilltrain import tables` imports a part
                names = (alias.name for alias in node.names)
                yield from ((node.lineno, f"{PACKAGE}.{name}" if name in LEVEL else PACKAGE) for name in names)
            elif _is_ours(target):
                yield node.lineno, target
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and _is_ours(str(first.value)):
                yield node.lineno, str(first.value)


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _target(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """One line for every import of `module` that does not point down."""
    own = part_of(module)
    if own not in LEVEL:
        return [f"{module} has no layer: add '{own}' to LAYERS in tests/test_layers.py"]
    found = []
    for line, target in imported_modules(source, module, is_package):
        other = part_of(target)
        if other not in LEVEL:
            found.append(f"{module}, line {line}: imports {target}, which has no layer in tests/test_layers.py")
        elif other != own and LEVEL[other] <= LEVEL[own]:
            relation = "beside" if LEVEL[other] == LEVEL[own] else "above"
            found.append(f"{module}, line {line}: imports {target}, but '{other}' stands {relation} '{own}'")
    return found


def test_every_import_points_down():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        names = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        is_package = names[-1] == "__init__"
        module = ".".join(names[:-1] if is_package else names)
        found += violations(path.read_text(encoding="utf-8"), module, is_package)
    assert not found, "imports that do not point down:\n" + "\n".join(found)


def test_every_layer_is_named_once():
    parts = [part for layer in LAYERS for part in layer]
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from skilltrain.training.loop import train", "imports skilltrain.training.loop, but 'training' stands"),
        ("import skilltrain.cli as c", "'cli' stands above 'models'"),
        ("def f():\n    from skilltrain.data import mine", "line 2: imports skilltrain.data, but 'data' stands above"),
        ("from skilltrain import stages", "'stages' stands above 'models'"),
        ("from ..losses import InfoNCE", "'losses' stands beside 'models'"),
        ("importlib.import_module('skilltrain.export.hub')", "'export' stands above 'models'"),
        ("from skilltrain.toolbox import saw", "skilltrain.toolbox, which has no layer"),
        ("from skilltrain.models.pooling import pool\nfrom .pooling import pool\nfrom . import loading", None),
        ("from skilltrain.version import __version__\nfrom skilltrain.templates import Skill\nimport torch", None),
    ],
)
def test_imports_that_do_not_point_down_are_found(source: str, complaint: str | None):
    found = violations(source, "skilltrain.models.made_up")
    assert len(found) == (complaint is not None) and (complaint or "") in "".join(found)
    assert "add 'toolbox' to LAYERS" in violations(source, "skilltrain.toolbox")[0]


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_what_a_stage_names_is_there_and_stands_above_the_stages(stage: Stage):
    assert {"stage", "out"} <= stage.config.model_fields.keys()
    assert callable(stage.run) and (stage.plan is None or callable(stage.plan))
    assert LEVEL[stage.module.split(".")[0]] > LEVEL["stages"]
