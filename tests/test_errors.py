"""Every error has a code, and docs/errors.md explains every code."""

import ast
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from skilltrain.errors import SkilltrainError, StoppedError

ROOT = Path(__file__).parents[1]
CLASSES = ("SkilltrainError", "StoppedError")
CODE = re.compile(r"[a-z]+(-[a-z]+)*")
ROW = re.compile(r"^\| `([^`]+)` \| [^|]+\. \| [^|]+\. \|$", re.MULTILINE)


def error_calls(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield every call that makes an error, with the function around it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CLASSES:
                yield function, node


def assigned_texts(function: ast.AST, name: str) -> list[str]:
    """Return the texts that a function assigns to a variable."""
    texts: list[str] = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if ast.unparse(node.targets[0]) == name:
            texts.append(str(node.value.value))
    return texts


def codes_of(function: ast.AST, call: ast.Call) -> list[str]:
    """Return the codes that a call may have; none for the code of an error that is raised again."""
    code = call.args[0]
    if isinstance(code, ast.Constant):
        return [str(code.value)]
    if isinstance(code, ast.Name):
        texts = assigned_texts(function, code.id)
        assert texts, ast.unparse(call)
        return texts
    assert ast.unparse(code) == "error.code", ast.unparse(call)
    return []


def codes_of_source() -> set[str]:
    codes: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for function, call in error_calls(ast.parse(path.read_text(encoding="utf-8"))):
            codes.update(codes_of(function, call))
    return codes


def codes_of_page() -> list[str]:
    return ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))


def test_the_page_explains_every_code():
    explained = codes_of_page()

    assert explained == sorted(codes_of_source())


def test_codes_are_words_with_hyphens():
    codes = codes_of_source()

    assert [code for code in codes if not CODE.fullmatch(code)] == []


def test_the_message_leaves_the_code_out():
    error = SkilltrainError("not-found", "no such file", where="runs/pool", fix="name another")

    assert str(error) == "runs/pool: no such file (name another)"


def test_a_signal_keeps_its_number():
    error = StoppedError("interrupted", "stopped", number=signal.SIGTERM)

    assert (error.code, error.number) == ("interrupted", signal.SIGTERM)
