"""Stages and commands of this package and, by name or import path, of other packages."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from skilltrain.cli import app
from skilltrain.errors import SkilltrainError
from skilltrain.stage import (
    SHIPPED_RECIPES,
    STAGES,
    command_of,
    copy_recipe,
    load_stage,
    parse_recipe,
)
from small_library import skilltrain, succeeds

ROOT = Path(__file__).parents[1]
MODULE = '''
from pathlib import Path
from typing import Literal

from pydantic import Field

from skilltrain.config import InputPath
from skilltrain.stage import Stage, Summary


class CountLines(Stage):
    """Count the lines of a file."""

    example = "file=README.md out=runs/lines"
    result = "{num_lines} lines"
    next_command = "show {out}"

    stage: Literal["count_lines"]
    file: InputPath = Field(description="text file")
    out: Path = Field(description="folder to write: lines.txt")

    def run(self, out: Path) -> Summary:
        num_lines = len(self.file.read_text().splitlines())
        (out / "lines.txt").write_text(str(num_lines))
        return {"num_lines": num_lines}


def greet(name: str, times: int = 1):
    """Greet somebody."""
    print("hello " * times + name)
'''
ENTRY_POINTS = """[skilltrain.plugins]
stage.count_lines = other_package:CountLines
command.greet = other_package:greet
command.broken = module_that_is_gone:run
"""


@pytest.fixture(scope="module")
def other_package(tmp_path_factory) -> Path:
    """A folder with an installed package that has a stage and a command."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "other_package.py").write_text(MODULE)
    info = folder / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def run_program(other_package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(other_package), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "skilltrain", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("stage", ["count_lines", "other_package:CountLines"])
def test_stage_of_another_package_runs(other_package: Path, tmp_path, stage: str):
    file = other_package / "other_package.py"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"stage: {stage}\nfile: {file}\nout: {tmp_path}/out\n")

    done = run_program(other_package, stage, recipe)

    num_lines = len(MODULE.splitlines())
    assert done.stdout.splitlines() == [
        f"{tmp_path}/out: {num_lines} lines",
        f"next: skilltrain show {tmp_path}/out",
    ]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["recipe"]["stage"], record["summary"]) == (stage, {"num_lines": num_lines})


def test_help_lists_plugins_without_importing_them(other_package: Path):
    text = run_program(other_package, "--help").stdout
    fault = run_program(other_package, "broken")

    panel = text.partition("Plug-ins")[2]
    assert all(f" {name} " in panel for name in ("count_lines", "greet", "broken"))
    assert (
        "error: cannot import module_that_is_gone:run: ModuleNotFoundError: No module"
        in fault.stderr
    )


def test_help_of_another_packages_stage_has_its_settings(other_package: Path):
    text = run_program(other_package, "count_lines", "--help").stdout

    assert text.startswith("Example:\n  skilltrain count_lines file=README.md out=runs/lines\n")
    assert "  file: text file (required)" in text


def test_command_of_another_package_runs(other_package: Path):
    done = run_program(other_package, "greet", "Ada", "--times", "2")
    fault = run_program(other_package, "greet")

    assert done.stdout == "hello hello Ada\n"
    assert (fault.returncode, fault.stderr) == (
        2,
        "error: Missing argument 'name' (see skilltrain greet --help)\n",
    )


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("json:loads", "json:loads is no stage: no class derived from skilltrain.stage.Stage"),
        ("skilltrain.stage:Stage", "the stage skilltrain.stage:Stage has no field 'out'"),
        ("nowhere:Mine", "cannot import nowhere:Mine: ModuleNotFoundError: No module"),
        ("mime", "recipe: stage: unknown stage 'mime'; allowed: pool, screen, queries, "),
        (["mine"], "recipe: stage: unknown stage ['mine']; allowed: pool, screen, queries, "),
    ],
)
def test_what_is_no_stage_is_refused(stage: Any, fault: str):
    with pytest.raises(SkilltrainError) as raised:
        parse_recipe({"stage": stage}, "recipe")

    assert str(raised.value).startswith(fault)


def test_program_has_few_commands_in_panels():
    program: Any = typer.main.get_command(app)

    assert len(program.commands) <= 33
    panels = [command.rich_help_panel for command in program.commands.values()]
    assert {*panels} == {"Start here", "Data", "Train", "Evaluate", "Publish", "Use", "Papers"}


@pytest.mark.parametrize(
    "command",
    [
        "r3 rejections",
        "r3 rewrite",
        "r3 equivalents",
        "r3 gradients",
        "skillrouter distractors",
        "skillflow provision",
        "skillflow agents",
        "skillweaver plan",
        "skillweaver plans",
    ],
)
def test_command_of_a_paper_is_in_its_group(command: str):
    old_name = command.split()[1]

    text = succeeds(*command.split(), "--help").out
    line = skilltrain(old_name).error_line

    assert text.startswith(f"Example:\n  skilltrain {command} ")
    assert f"No such command '{old_name}'" in line
    assert f"(removed: use skilltrain {command})" in line


def test_a_papers_recipe_is_sent_to_its_command(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stage: rewrite\nqueries: q\npool: p\nllm: {kind: openai}\nout: o\n")

    line = skilltrain("train", recipe).error_line

    assert f"is a recipe of stage rewrite (run: skilltrain r3 rewrite {recipe})" in line


@pytest.mark.parametrize("name", STAGES)
def test_stage_says_what_comes_next(name: str):
    stage = load_stage(name)

    for command in {command_of(name), stage.next_command.split(" ")[0]} - {""}:
        assert "--help" in succeeds(*command.split(), "--help").out


def test_generated_pages_are_current():
    pages = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["pages"]()

    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/write_reference.py"


def test_path_of_base_may_be_quoted(monkeypatch, tmp_path: Path):
    (tmp_path / "base file.yaml").write_text("stage: pool\n")
    (tmp_path / "mine.yaml").write_text('based_on: "base file.yaml"  # the base\n')
    monkeypatch.setattr("skilltrain.stage.SHIPPED_RECIPES", tmp_path)

    copies = copy_recipe("mine", tmp_path / "copies")

    assert [copy.name for copy in copies] == ["mine.yaml", "base file.yaml"]


def test_every_shipped_recipe_is_copied(tmp_path: Path):
    """The base of each recipe is in the folder of recipes, too. Otherwise the copy fails."""
    recipes = [file.relative_to(SHIPPED_RECIPES) for file in SHIPPED_RECIPES.rglob("*.yaml")]

    for recipe in recipes:
        copies = copy_recipe(str(recipe), tmp_path)
        assert copies[0] == tmp_path / recipe
