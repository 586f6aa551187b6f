"""House rules: sizes, dense code, unsafe calls, leftovers, traces of one machine."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_LINE_CHARS = 100
# Most of each kind of dense code, for 1,000 lines of code.
MAX_DENSITY = {"packed assignments": 2, "dense comprehensions": 3, "assignment expressions": 2.5}
MAX_VAGUE_SHARE = 0.005
# Names that do not say what they hold.
VAGUE_NAMES = frozenset(
    """found one ones own places place asked told said left made given taken kept seen known drawn
    shown begun what whatever whoever them others wanted held parts thing things why before most
    alone passed routed""".split()
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Tokens of code in thousands, by ring. Comments, docstrings and layout are free, and an f-string is
# one token. ROOM lets a contribution pass. A change that needs more raises the budget in the same
# commit and says why.
# The plan was 140, 15 and 22. In the core, plug-ins of ten kinds, provenance, formats, error codes
# and plain code took 11 more. The first hour with one's own skills took 8 more: requests from own
# texts, the Python API, checks of damaged files, screening and the model card in the core;
# calibration, files of skills and their resources in serving. Prompt files, masks, optimisers,
# models with code, trigger evaluations and front matter took 5 more. Lint, routing tests, filters
# and hosts took 2.5 in serving. Tables of SkillFlow, experts' sheets and planners took 3 in
# papers. Then formats of other tools took 4 in the core, the Hub in both directions 2, recipes in
# the wheel and `doctor` 2, the log of use 2, seams for researchers (sums of losses, hooks, groups
# of parameters, projections) 2.5, and readers' verdicts, refusals and a page for each skill 2.
# A dry run that runs several batches took 0.2, and so did refusals of pipes and lost ranks with
# clearer requests from own texts. In papers, profiles of data and a prompt by file took 0.1. Limits
# in tokens, which a pipeline and a program share, and interleaved retrieval took 1.4 there. A rank
# of own-text requests by clarity, with headings and quotations, took 0.4 in the core. Memory plans
# of quantised layers took 0.1 there. A chat model that screens skills took 1.5 there, because its
# findings stay with the texts of a skill in pools and routers. Errors of plug-ins, and checks
# before any work, took 0.8.
BUDGETS = {"core": 181.4, "serving": 23, "papers": 26.6}
ROOM = 1.05
FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # Python 3.12 and newer
FSTRING_END = getattr(tokenize, "FSTRING_END", -1)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "torch"}

# The brackets keep these patterns from matching this file.
REGISTRY = re.compile(
    # A dot may be escaped, as in a regular expression.
    r"py[p]i\\?\.org|python[h]osted\\?\.org|registry\\?\.n[p]mjs\\?\.org"
    r"|deb\\?\.deb[i]an\\?\.org|download\\?\.py[t]orch\\?\.org"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.~}*-])/(?:work|root|farm|home|Users|tmp/venv\d?|opt/(?:wheels|pypi)[\w-]*)/"
)
# Bodies of example skills tell of other machines' paths; that is what skills do.
SAMPLE_SKILLS = "examples/skill_library/"


def broken_rules(source: str) -> list[str]:
    """One line for every house rule that a module breaks."""
    lines = source.splitlines()
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        faults += [f"line {number}: '{match[0]}' left behind" for match in LEFTOVER.finditer(line)]
    for node in ast.walk(ast.parse(source)):
        faults += [
            f"line {node.lineno}: {fault}"
            for fault in _faults(node)
            if isinstance(node, ast.stmt | ast.expr)
        ]
        if isinstance(node, ast.ExceptHandler) and _swallows_everything(node):
            faults.append(f"line {node.lineno}: swallows every exception without a word")
    return faults


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
        yield from (
            f"{node.module}.{a.name} runs code from the file it reads"
            for a in node.names
            if a.name == "load"
        )


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [
        argument.arg
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    ]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command of the command line, whose parameters are its options."""
    return any(
        ast.unparse(decorator).startswith("app.command") for decorator in node.decorator_list
    )


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _swallows_everything(node: ast.ExceptHandler) -> bool:
    every = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
    return every and all(
        isinstance(line, ast.Pass | ast.Continue) or _is_ellipsis(line) for line in node.body
    )


def _is_ellipsis(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and line.value.value is ...
    )


def traces(text: str, path: str) -> list[str]:
    """What in a file of the repository belongs to one machine or one package index only."""
    faults = [f"{path}: names a package index: {match[0]}" for match in REGISTRY.finditer(text)]
    if not path.startswith(SAMPLE_SKILLS):
        faults += [
            f"{path}: path of one machine: {match[0]}" for match in MACHINE_PATH.finditer(text)
        ]
    return faults


def repository_files() -> list[str]:
    """Files that git tracks, or would if they were added."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file())


def count_tokens(source: str) -> int:
    """Return the number of tokens of code in a module."""
    skipped_lines = _docstring_lines(ast.parse(source))
    num_tokens = 0
    fstring_depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start[0] in skipped_lines:
            continue
        if token.type == FSTRING_START:
            num_tokens += fstring_depth == 0
            fstring_depth += 1
        elif token.type == FSTRING_END:
            fstring_depth -= 1
        elif fstring_depth == 0:
            num_tokens += 1
    return num_tokens


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def is_packed_assignment(node: ast.AST) -> bool:
    """Return whether a statement assigns several separate values at once: `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def is_dense_comprehension(node: ast.AST) -> bool:
    """Return whether a comprehension has two loops or contains another comprehension."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    num_comprehensions = sum(isinstance(child, COMPREHENSIONS) for child in ast.walk(node))
    return len(node.generators) > 1 or num_comprehensions > 1


def count_dense_code(source: str) -> Counter[str]:
    """Count each kind of dense code in a module."""
    counts = Counter[str]()
    for node in ast.walk(ast.parse(source)):
        counts["packed assignments"] += is_packed_assignment(node)
        counts["dense comprehensions"] += is_dense_comprehension(node)
        counts["assignment expressions"] += isinstance(node, ast.NamedExpr)
    return counts


def defined_names(source: str) -> list[str]:
    """Return the names of variables, parameters and functions that a module defines."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name.strip("_"))
    return names


def num_code_lines(source: str) -> int:
    """Return the number of lines with code. Docstrings and comments are not code."""
    skipped_lines = _docstring_lines(ast.parse(source))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in skipped_lines:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def ring_of(path: Path) -> str:
    """Return the ring of a module: `serving`, `papers`, or `core` for all others."""
    package = path.relative_to(ROOT / "src" / "skilltrain").parts[0]
    return package if package in BUDGETS else "core"


@pytest.mark.parametrize("ring", BUDGETS)
def test_ring_keeps_its_token_budget(ring: str):
    modules = [path for path in SOURCES if ring_of(path) == ring]

    num_tokens = sum(count_tokens(path.read_text(encoding="utf-8")) for path in modules)

    assert 0 < num_tokens <= BUDGETS[ring] * 1000 * ROOM


@pytest.mark.parametrize("kind", MAX_DENSITY)
def test_source_is_not_dense(kind: str):
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]

    count = sum(count_dense_code(source)[kind] for source in sources)

    num_thousand_lines = sum(map(num_code_lines, sources)) / 1000
    assert count / num_thousand_lines <= MAX_DENSITY[kind]


def test_few_names_are_vague():
    names: list[str] = []
    for path in SOURCES:
        names += defined_names(path.read_text(encoding="utf-8"))

    vague = [name for name in names if name in VAGUE_NAMES]

    assert len(vague) <= MAX_VAGUE_SHARE * len(names), Counter(vague)


@pytest.mark.parametrize("folder", ["src", "tests", "data_pipelines", "benchmarks"])
def test_code_has_no_long_lines(folder: str):
    long_lines: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MAX_LINE_CHARS or "fmt: " + "skip" in line:
                long_lines.append(f"{path.relative_to(ROOT)}:{number}")
    assert long_lines == []


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("a, b = x, y", "packed assignments"),
        ("z = [a for b in c for a in b]", "dense comprehensions"),
        ("z = {a: [c for c in b] for a, b in d}", "dense comprehensions"),
        ("if (a := b): pass", "assignment expressions"),
    ],
)
def test_dense_code_is_counted(source: str, kind: str):
    assert count_dense_code(source) == {kind: 1} | dict.fromkeys(MAX_DENSITY.keys() - {kind}, 0)


@pytest.mark.parametrize("source", ["a, b = f(x)", "z = [a for a in b if a]", "a = b"])
def test_plain_code_is_not_dense(source: str):
    assert count_dense_code(source).total() == 0


def test_defined_names_are_found():
    source = "def _f(a, *, b):\n    for c in a:\n        d = c"

    assert sorted(defined_names(source)) == ["a", "b", "c", "d", "f"]


@pytest.mark.parametrize(
    ("source", "num_tokens"),
    [
        ("x = 1  # a comment", 3),
        ('"""A docstring."""\n\n\ndef f():\n    """Another one."""\n    return 1\n', 7),
        ("x = f'{a + b:>{width}} and {c}'", 3),
        ("x = f'{a}' + b", 5),
    ],
)
def test_tokens_of_code_are_counted(source: str, num_tokens: int):
    assert count_tokens(source) == num_tokens


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "skilltrain"))
)
def test_a_module_keeps_the_house_rules(path: Path):
    assert broken_rules(path.read_text(encoding="utf-8")) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_file_names_a_package_index_or_a_developers_machine():
    faults = []
    for name in repository_files():
        try:
            faults += traces((ROOT / name).read_text(encoding="utf-8"), name)
        except UnicodeDecodeError:
            continue  # a picture or a font
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
            f"line 1: f has {MAX_FUNCTION_LINES + 1} lines",
        ),
        ("def f(a, b, c, d, e, f, *, g, h): ...", "f has 8 parameters"),
        ("x = 1  # " + "TO" + "DO later", "line 1: 'TO" + "DO' left behind"),
        ("try:\n    f()\nexcept Exception:\n    pass", "line 3: swallows every exception"),
        (
            "for x in y:\n    try:\n        f()\n    except:\n        continue",
            "line 4: swallows every exception",
        ),
        ("load(name, trust_remote_code=True)", "line 1: runs code from a model repository"),
        ("load(name, trust_remote_code=flag)", "line 1: runs code from a model repository"),
        ("torch.load(path)", "line 1: torch.load runs code"),
        ("value = pickle.loads(text)", "line 1: pickle.loads runs code"),
        ("from pickle import load", "line 1: pickle.load runs code"),
    ],
)
def test_a_broken_rule_is_found(source: str, complaint: str):
    (fault,) = broken_rules(source)
    assert complaint in fault


@pytest.mark.parametrize(
    "source",
    [
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
    assert traces(f"index-url = {host}", "a.toml") == [
        "a.toml: names a package index: py" + "pi.org"
    ]
    assert traces(f"see '{path}'", "a.md") == [
        "a.md: path of one machine: " + path.removesuffix("main/x.py")
    ]
    assert traces(f"see '{path}'", f"{SAMPLE_SKILLS}a/SKILL.md") == []
    assert traces("runs/work/x src/root/y https://example.com/home/z", "a.md") == []
