"""Imports point down only: rings and their layers, checked over every module of src/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "skilltrain"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Top to bottom. A part is a package or a module directly below skilltrain. Parts of one layer do
# not import each other. The outermost parts (api, cli, __init__) import everything; papers and
# serving are rings of their own; the rest is core.
LAYERS = (
    ("__init__", "__main__", "recipe"),
    ("cli",),
    ("api", "doctor", "testing"),
    ("papers", "serving"),
    ("evaluation",),
    ("training",),
    ("export",),
    ("data",),
    ("retrieval",),
    ("models", "losses", "metrics"),
    ("templates", "llm"),
    ("tables",),
    ("records",),
    ("runs", "workers"),
    ("stage", "provenance"),
    ("terminal", "distributed"),
    ("config",),
    ("arguments", "files", "plugins", "formats"),
    ("errors", "texts", "version"),
)
LEVEL = {}
for _level, _names in enumerate(LAYERS):
    LEVEL |= dict.fromkeys(_names, _level)
# What the code of a training step must not load: chat models, and the screening of skills.
NOT_IN_TRAINING = ("skilltrain.llm", "skilltrain.data.screening", "skilltrain.papers")


def module_name(path: Path) -> str:
    names = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(names).removesuffix(".__init__")


MODULES = {module_name(path): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def part_of(module: str) -> str:
    """`skilltrain.data.mine` → `data`; the package itself → `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the module of every import of ours, inside functions too."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [f"{PACKAGE}.(relative)"]
        elif isinstance(node, ast.ImportFrom):
            names = [_imported_from(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(item.value) for item in node.args[:1] if isinstance(item, ast.Constant)]
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name


def _imported_from(module: str, name: str) -> str:
    """Return `module.name` if that is a module of ours, otherwise `module`."""
    full_name = f"{module}.{name}"
    return full_name if full_name in MODULES else module


def violations(source: str, module: str) -> list[str]:
    """Return one line for every import of `module` that does not point down."""
    part = part_of(module)
    if part not in LEVEL:
        return [f"{module} has no layer: add '{part}' to LAYERS in tests/test_layers.py"]
    faults: list[str] = []
    for line, target in imported_modules(ast.parse(source)):
        other = part_of(target)
        if other not in LEVEL:
            fault = f"imports {target}, which has no layer in tests/test_layers.py"
        elif part == other == "papers" and _paper_of(module) != _paper_of(target):
            fault = f"imports {target}, which belongs to another paper"
        elif other != part and LEVEL[other] <= LEVEL[part]:
            relation = "beside" if LEVEL[other] == LEVEL[part] else "above"
            fault = f"imports {target}, but '{other}' stands {relation} '{part}'"
        else:
            continue
        faults.append(f"{module}, line {line}: {fault}")
    return faults


def _paper_of(module: str) -> str:
    return ".".join(module.split(".")[2:3])


def loaded_modules(module: str) -> set[str]:
    """Return our modules that importing `module` loads, by the imports at the top of modules."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in MODULES:
            continue
        loaded.add(name)
        waiting.append(name.rpartition(".")[0])
        tree = ast.parse(MODULES[name])
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                waiting += [target for _, target in imported_modules(statement)]
    return loaded


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Return the nodes that can be reached from themselves."""
    return [node for node in edges if node in _reachable(node, edges)]


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [*edges[start]]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += edges.get(node, ())
    return reached


def test_every_import_points_down():
    faults: list[str] = []
    for module in sorted(MODULES):
        faults += violations(MODULES[module], module)

    assert not faults, "imports that do not point down:\n" + "\n".join(faults)


def test_modules_form_no_cycle():
    edges = {}
    for module, source in MODULES.items():
        targets = {target for _, target in imported_modules(ast.parse(source))}
        edges[module] = targets - {module, PACKAGE}

    assert cycles(edges) == []


@pytest.mark.parametrize("module", ["skilltrain.training.loop", "skilltrain.training.steps"])
def test_training_loads_no_chat_model(module: str):
    loaded = loaded_modules(module)

    assert len(loaded) > 20
    assert [name for name in sorted(loaded) if name.startswith(NOT_IN_TRAINING)] == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from skilltrain.training.loop import train", "'training' stands above 'models'"),
        ("import skilltrain.cli as c", "'cli' stands above 'models'"),
        ("def f():\n    from skilltrain.data import mine", "line 2: imports skilltrain.data.mine"),
        ("from skilltrain import api", "'api' stands above 'models'"),
        ("from skilltrain.losses import InfoNCE", "'losses' stands beside 'models'"),
        ("from . import loading", "which has no layer"),
        ("importlib.import_module('skilltrain.export.push')", "'export' stands above 'models'"),
        ("from skilltrain.papers.r3.rewrite import x", "'papers' stands above 'models'"),
        ("from skilltrain.toolbox import saw", "skilltrain.toolbox, which has no layer"),
    ],
)
def test_upward_import_is_reported(source: str, fault: str):
    (line,) = violations(source, "skilltrain.models.made_up")

    assert fault in line


@pytest.mark.parametrize(
    "source",
    [
        "import skilltrain.models.pooling\nfrom skilltrain.models.pooling import pool",
        "from skilltrain.version import __version__\nimport skilltrain.templates",
        "import torch",
    ],
)
def test_downward_import_is_allowed(source: str):
    assert violations(source, "skilltrain.models.made_up") == []


def test_import_of_another_paper_is_reported():
    (line,) = violations("import skilltrain.papers.r3.rewrite", "skilltrain.papers.skillflow.x")

    assert "belongs to another paper" in line


def test_unknown_part_is_reported():
    (line,) = violations("", "skilltrain.toolbox")

    assert "add 'toolbox' to LAYERS" in line


def test_cycle_is_reported():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
