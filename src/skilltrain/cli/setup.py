"""Commands for the start: the recipes that ship, and what the machine can do with them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from skilltrain.cli.app import AsJson, ExampleCommand, app, conclude, quietly, show
from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import plugin_paths
from skilltrain.stage import (
    SHIPPED_RECIPES,
    command_of,
    copy_recipe,
    is_stage,
    list_recipes,
    schema_of,
)

# Files that recipes name, and that an installed package does not have.
_REPOSITORY_FILE = re.compile(r"\b(?:data_pipelines|examples|launch)/[\w./-]*\w")
_StageName = Annotated[
    str | None, typer.Argument(help="only recipes of this stage, e.g. train_encoder")
]
_recipes = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)
app.add_typer(_recipes, name="recipes", rich_help_panel="Start here")


@_recipes.callback()
def recipes(context: typer.Context) -> None:
    """List or copy the recipes that ship, or print the JSON Schema of recipes."""
    if context.invoked_subcommand is None:
        list_shipped()


@_recipes.command("list", cls=ExampleCommand)
def list_shipped(
    stage: _StageName = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="list the recipes of this folder instead")
    ] = None,
) -> None:
    """List the recipes that ship: name, stage, and the model and the loss of a training run.

    Example: skilltrain recipes list train_encoder
    """
    _check_stage(stage)
    folder = folder or SHIPPED_RECIPES
    for recipe in list_recipes(folder):
        if stage in (None, recipe.facts[0]):
            name = recipe.path.relative_to(folder).with_suffix("").as_posix()
            typer.echo(f"{name}  {'  '.join(recipe.facts)}\n    {recipe.about}")


@_recipes.command("copy", cls=ExampleCommand)
def copy(
    name: Annotated[str, typer.Argument(help="name of the recipe, e.g. tiny/sr_emb_minilm")],
    to: Annotated[Path, typer.Argument(help="folder to copy to")] = Path("recipes"),
) -> None:
    """Copy a recipe to a folder, with the recipe that it is based on.

    Example: skilltrain recipes copy sr_emb_0.6b
    """
    copies = copy_recipe(name, to)
    for file in copies:
        typer.echo(file)
    missing_files = _missing_repository_files(copies)
    if missing_files:
        typer.echo(f"names files of the repository, not in this folder: {', '.join(missing_files)}")
    # The grids in `ablations` have no stage. The command `ablate` runs them.
    stage = load_recipe(copies[0]).get("stage", "ablate")
    typer.echo(f"next: skilltrain {command_of(stage)} {copies[0]} --dry-run")


@_recipes.command("schema", cls=ExampleCommand)
def schema(stage: _StageName = None) -> None:
    """Print the JSON Schema of recipes, with which an editor checks a recipe.

    Example: skilltrain recipes schema train_encoder > train_encoder.schema.json
    """
    _check_stage(stage)
    show(schema_of([stage] if stage else plugin_paths("stage")))


def _check_stage(stage: str | None) -> None:
    """Raise SkilltrainError if a stage is given and does not exist."""
    if stage is not None and not is_stage(stage):
        problem = f"unknown stage {stage!r}; allowed: {', '.join(plugin_paths('stage'))}"
        raise SkilltrainError("unknown-stage", problem, where="skilltrain recipes")


def _missing_repository_files(recipes: Sequence[Path]) -> list[str]:
    """Return the files of the repository that recipes name and the current folder lacks.

    For example, `launch/tiny_data.sh`, which makes the data of the tiny recipes.
    """
    names: set[str] = set()
    for recipe in recipes:
        names.update(_REPOSITORY_FILE.findall(recipe.read_text(encoding="utf-8")))
    return sorted(name for name in names if not Path(name).exists())


@app.command(rich_help_panel="Start here")
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, the device, the memory, and which recipes fit.

    Example: skilltrain doctor --json
    """
    from skilltrain.doctor import examine_machine

    facts = quietly(examine_machine)
    libraries = [f"{name} {version}" for name, version in facts["libraries"].items()]
    lines = [
        f"skilltrain {facts['skilltrain']}, Python {facts['python']}, {facts['system']}",
        ", ".join(libraries),
    ]
    for extra, command in facts["missing_extras"].items():
        lines.append(f"extra {extra} is missing: {command}")
    lines.append(f"device: {facts['device']}")
    lines.append(f"memory: {facts['free_memory_gib']} GiB free")
    for folder, free_gib in facts["free_disk_gib"].items():
        lines.append(f"cache: {folder}, {free_gib} GiB free")
    lines.append("recipes, with the memory of weights and optimiser; activations take more:")
    for row in facts["recipes"]:
        size = "" if row["state_gib"] is None else f"{row['state_gib']} GiB, "
        lines.append(f"- {row['recipe']}: {size}{row['verdict']}")
    conclude(facts, lines, as_json)
