"""Every error has a code, and docs/reference/errors.md explains every code."""

import ast
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from skilltrain import errors
from skilltrain.errors import SkilltrainError, StoppedError, requirements_of

ROOT = Path(__file__).parents[1]
CLASSES = ("SkilltrainError", "StoppedError")
CODE = re.compile(r"[a-z]+(-[a-z]+)*")
ROW = re.compile(r"^\| `([^`]+)` \| [^|]+\. \| [^|]+\. \|$", re.MULTILINE)


def error_calls(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield every call that makes an error, with the function around it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CLASSES:
                yield function, node


def assigned_texts(function: ast.AST, name: str, tables: dict[str, list[str]]) -> list[str]:
    """Return the texts assigned to a variable of a function, also by `TABLE.get(key, text)`."""
    texts: list[str] = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != name:
            continue
        if isinstance(node.value, ast.Constant):
            texts.append(str(node.value.value))
        elif isinstance(node.value, ast.Call):
            default = node.value.args[-1]
            assert isinstance(default, ast.Constant)
            table = ast.unparse(node.value.func).removesuffix(".get")
            texts += [*tables[table], str(default.value)]
    return texts


def text_tables(tree: ast.Module) -> dict[str, list[str]]:
    """Return the values of a module's constant dictionaries of texts, by name."""
    tables: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            values = [value.value for value in node.value.values if isinstance(value, ast.Constant)]
            tables[ast.unparse(node.targets[0])] = [str(value) for value in values]
    return tables


def codes_of(function: ast.AST, call: ast.Call, tables: dict[str, list[str]]) -> list[str]:
    """Return the codes that a call may have; none for the code of an error that is raised again."""
    code = call.args[0]
    if isinstance(code, ast.Constant):
        return [str(code.value)]
    if isinstance(code, ast.Name):
        texts = assigned_texts(function, code.id, tables)
        assert texts, ast.unparse(call)
        return texts
    assert ast.unparse(code) == "error.code", ast.unparse(call)
    return []


def codes_of_source() -> set[str]:
    codes: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function, call in error_calls(tree):
            codes.update(codes_of(function, call, text_tables(tree)))
    return codes


def codes_of_page() -> list[str]:
    return ROW.findall((ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8"))


def test_the_page_explains_every_code():
    explained = codes_of_page()

    assert explained == sorted(codes_of_source())


def test_codes_are_words_with_hyphens():
    codes = codes_of_source()

    assert [code for code in codes if not CODE.fullmatch(code)] == []


def test_message_leaves_code_out():
    error = SkilltrainError("not-found", "no such file", where="runs/pool", fix="name another")

    assert str(error) == "runs/pool: no such file (name another)"


def test_long_location_does_not_hide_problem():
    error = SkilltrainError("not-found", "no such file", where="deep/" * 900)

    assert str(error).endswith(": no such file")
    assert len(str(error)) < 400


def test_a_signal_keeps_its_number():
    error = StoppedError("interrupted", "stopped", number=signal.SIGTERM)

    assert (error.code, error.number) == ("interrupted", signal.SIGTERM)


def test_a_signal_survives_pickling():
    error = StoppedError("interrupted", "stopped", where="runs/x", number=signal.SIGTERM)

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301

    assert (copy.number, copy.where) == (signal.SIGTERM, "runs/x")


def test_requirement_may_have_second_marker(monkeypatch):
    lines = ["a>=1; extra == 'x'", "b>=2; sys_platform == 'linux' and extra == 'x'", "c>=3"]
    monkeypatch.setattr(errors, "requires", lambda name: lines)

    assert requirements_of("x") == ["a>=1", "b>=2; sys_platform == 'linux'"]
