"""House rules that a reader should not have to check: sizes, unsafe calls, leftovers, traces of one machine."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
# Lines of Python that each part shall have at most, those of what is planned included: whoever needs more argues for it
# in the same commit. Some parts are still larger: CEILINGS holds their size of today, and only ever falls. It rose
# three times: by 850 lines in all for trainers that hold on real GPUs, late interaction and what users of commands ran
# into; by 150 for a router that opens in two seconds, because it reads BERT itself; and by 5,900 for four features that
# had no code at all (R3's rejections and their gradients; SkillFlow's cascade and agents' trials; SkillWeaver's plans;
# the router's index, abstention, servers, export forms and the way to the Hub) and SkillRouter's own variant. These
# were written side by side in three hours, and gone through as a whole a day later. Those of the modules and of
# llm rose once by 57 lines, for what several parts had each for themselves.
BUDGETS = {
    "(modules)": 1_900, "llm": 950, "losses": 700, "models": 1_400, "retrieval": 1_500, "evaluation": 1_800,
    "data": 4_400, "training": 2_300, "export": 800, "report": 1_000, "routing": 1_600, "ablation": 800, "cli": 500,
}  # fmt: skip
CEILINGS = {
    "(modules)": 2_318, "llm": 1_113, "models": 1_801, "retrieval": 2_070, "data": 5_525, "training": 2_558,
    "report": 1_006, "routing": 3_516, "cli": 858,
}  # fmt: skip
# The aims are 18,000 lines in 150 files, and 16,000 lines of tests; these too only ever fall.
MAX_SOURCE_LINES, MAX_SOURCE_FILES, MAX_TEST_LINES = 24_214, 161, 20_862
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "torch"}

# The brackets keep these patterns from matching this file.
REGISTRY = re.compile(
    r"py[p]i\.org|python[h]osted\.org|registry\.n[p]mjs\.org|deb\.deb[i]an\.org|download\.py[t]orch\.org"
)
MACHINE_PATH = re.compile(r"(?<![\w.~}*-])/(?:work|root|farm|home|Users|tmp/venv\d?|opt/(?:wheels|pypi)[\w-]*)/")
# Bodies of example skills tell of other machines' paths; that is what skills do.
SAMPLE_SKILLS = "examples/skill_library/"


def broken_rules(source: str) -> list[str]:
    """One line for every house rule that a module breaks."""
    lines = source.splitlines()
    found = [f"{len(lines)} lines, at most {MAX_FILE_LINES}"] if len(lines) > MAX_FILE_LINES else []
    for number, line in enumerate(lines, 1):
        found += [f"line {number}: '{match[0]}' left behind" for match in LEFTOVER.finditer(line)]
    for node in ast.walk(ast.parse(source)):
        found += [f"line {node.lineno}: {fault}" for fault in _faults(node) if isinstance(node, ast.stmt | ast.expr)]
        if isinstance(node, ast.ExceptHandler) and _swallows_everything(node):
            found.append(f"line {node.lineno}: swallows every exception without a word")
    return found


def _faults(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        if (count := _num_parameters(node)) > MAX_PARAMETERS and not _is_command(node):
            yield f"{node.name} has {count} parameters, at most {MAX_PARAMETERS}"
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code" and not _is_false(keyword.value):
                yield "runs code from a model repository (trust_remote_code)"
        module, _, name = ast.unparse(node.func).rpartition(".")
        if module in UNPICKLERS and name in {"load", "loads", "Unpickler"}:
            yield f"{module}.{name} runs code from the file it reads"
    elif isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
        yield from (f"{node.module}.{a.name} runs code from the file it reads" for a in node.names if a.name == "load")


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command of the command line, whose parameters are its options."""
    return any(ast.unparse(decorator).startswith("app.command") for decorator in node.decorator_list)


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _swallows_everything(node: ast.ExceptHandler) -> bool:
    every = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
    return every and all(isinstance(line, ast.Pass | ast.Continue) or _is_ellipsis(line) for line in node.body)


def _is_ellipsis(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and line.value.value is ...


def traces(text: str, path: str) -> list[str]:
    """What in a file of the repository belongs to one machine or one package index only."""
    found = [f"{path}: names a package index: {match[0]}" for match in REGISTRY.finditer(text)]
    if not path.startswith(SAMPLE_SKILLS):
        found += [f"{path}: path of one machine: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    return found


def repository_files() -> list[str]:
    """Files that git tracks, or would if they were added."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file())


def num_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_every_part_keeps_its_budget():
    sizes: dict[str, list[Path]] = {name: [] for name in BUDGETS}
    for file in SOURCES:
        part = file.relative_to(ROOT / "src" / "skilltrain").parts
        sizes[part[0] if len(part) > 1 else "(modules)"].append(file)
    lines = {name: num_lines(files) for name, files in sizes.items()}
    assert {name: count for name, count in lines.items() if count > max(BUDGETS[name], CEILINGS.get(name, 0))} == {}
    assert len(SOURCES) <= MAX_SOURCE_FILES and sum(lines.values()) <= MAX_SOURCE_LINES
    assert num_lines((ROOT / "tests").glob("*.py")) <= MAX_TEST_LINES
    assert num_lines([ROOT / "README.md"]) <= 150


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "skilltrain")))
def test_a_module_keeps_the_house_rules(path: Path):
    assert broken_rules(path.read_text(encoding="utf-8")) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_file_names_a_package_index_or_a_developers_machine():
    found = []
    for name in repository_files():
        try:
            found += traces((ROOT / name).read_text(encoding="utf-8"), name)
        except UnicodeDecodeError:
            continue  # a picture or a font
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * (MAX_FILE_LINES + 1), f"{MAX_FILE_LINES + 1} lines"),
        ("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, f"line 1: f has {MAX_FUNCTION_LINES + 1} lines"),
        ("def f(a, b, c, d, e, f, *, g, h): ...", "f has 8 parameters"),
        ("x = 1  # " + "TO" + "DO later", "line 1: 'TO" + "DO' left behind"),
        ("try:\n    f()\nexcept Exception:\n    pass", "line 3: swallows every exception"),
        ("for x in y:\n    try:\n        f()\n    except:\n        continue", "line 4: swallows every exception"),
        ("load(name, trust_remote_code=True)", "line 1: runs code from a model repository"),
        ("load(name, trust_remote_code=flag)", "line 1: runs code from a model repository"),
        ("torch.load(path)", "line 1: torch.load runs code"),
        ("value = pickle.loads(text)", "line 1: pickle.loads runs code"),
        ("from pickle import load", "line 1: pickle.load runs code"),
    ],
)
def test_a_broken_rule_is_found(source: str, complaint: str):
    (found,) = broken_rules(source)
    assert complaint in found


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * MAX_FILE_LINES,
        "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1),
        "class A:\n    def f(self, a, b, c, d, e, f, g): ...",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise Fault from error",
        "load(name, trust_remote_code=False)",
        "json.load(file)",
    ],
)
def test_rules_go_no_further_than_they_say(source: str):
    assert broken_rules(source) == []


def test_traces_of_a_machine_are_found():
    host, path = "https://py" + "pi.org/simple", "/".join(["", "work", "main", "x.py"])
    assert traces(f"index-url = {host}", "a.toml") == ["a.toml: names a package index: py" + "pi.org"]
    assert traces(f"see '{path}'", "a.md") == ["a.md: path of one machine: " + path.removesuffix("main/x.py")]
    assert traces(f"see '{path}'", f"{SAMPLE_SKILLS}a/SKILL.md") == []
    assert traces("runs/work/x src/root/y https://example.com/home/z", "a.md") == []
