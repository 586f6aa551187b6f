"""Imports point down only: the layers of CONTRIBUTING.md, checked over every module of src/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from skilltrain.stages import STAGES

PACKAGE = "skilltrain"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Top to bottom. A part is a package or a module directly below skilltrain; parts on one level do not import each other.
LAYERS = (
    ("__init__", "__main__", "recipe"),
    ("cli",),
    ("api",),
    ("papers", "serving"),
    ("evaluation",),
    ("training",),
    ("export",),
    ("data",),
    ("retrieval",),
    ("models", "losses", "metrics"),
    ("templates", "llm"),
    ("tables", "stages"),
    ("records",),
    ("runs", "workers"),
    ("terminal", "distributed"),
    ("config",),
    ("files",),
    ("errors", "texts", "version"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str:
    """`skilltrain.data.mine` → `data`; the package itself → `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours in `source`, at the top or inside a function; ours are absolute."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [f"{PACKAGE}.(relative)"]
        elif (
            isinstance(node, ast.ImportFrom) and node.module == PACKAGE
        ):  # `from skilltrain import tables`: a part
            names = [
                f"{PACKAGE}.{alias.name}" if alias.name in LEVEL else PACKAGE
                for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
        ):
            names = [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def violations(source: str, module: str) -> list[str]:
    """One line for every import of `module` that does not point down."""
    own = part_of(module)
    if own not in LEVEL:
        return [f"{module} has no layer: add '{own}' to LAYERS in tests/test_layers.py"]
    found = []
    for line, target in imported_modules(source):
        other = part_of(target)
        if other not in LEVEL:
            found.append(
                f"{module}, line {line}: imports {target}, which has no layer in tests/test_layers.py"
            )
        elif other != own and LEVEL[other] <= LEVEL[own]:
            relation = "beside" if LEVEL[other] == LEVEL[own] else "above"
            found.append(
                f"{module}, line {line}: imports {target}, but '{other}' stands {relation} '{own}'"
            )
    return found


def test_every_import_points_down():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        names = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        module = ".".join(names).removesuffix(".__init__")
        found += violations(path.read_text(encoding="utf-8"), module)
    assert not found, "imports that do not point down:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "from skilltrain.training.loop import train",
            "imports skilltrain.training.loop, but 'training' stands",
        ),
        ("import skilltrain.cli as c", "'cli' stands above 'models'"),
        (
            "def f():\n    from skilltrain.data import mine",
            "line 2: imports skilltrain.data, but 'data' stands above",
        ),
        ("from skilltrain import stages", "'stages' stands above 'models'"),
        ("from skilltrain.losses import InfoNCE", "'losses' stands beside 'models'"),
        ("from . import loading", "which has no layer"),
        ("importlib.import_module('skilltrain.export.hub')", "'export' stands above 'models'"),
        ("from skilltrain.toolbox import saw", "skilltrain.toolbox, which has no layer"),
        ("import skilltrain.models.pooling\nfrom skilltrain.models.pooling import pool", None),
        (
            "from skilltrain.version import __version__\nfrom skilltrain.templates import Skill\nimport torch",
            None,
        ),
    ],
)
def test_imports_that_do_not_point_down_are_found(source: str, complaint: str | None):
    found = violations(source, "skilltrain.models.made_up")
    assert len(found) == (complaint is not None) and (complaint or "") in "".join(found)
    assert "add 'toolbox' to LAYERS" in violations(source, "skilltrain.toolbox")[0]


def test_stages_import_what_stands_above_them():
    assert [
        name
        for name, stage in STAGES.items()
        if LEVEL[stage.module.split(".")[0]] <= LEVEL["stages"]
    ] == []
