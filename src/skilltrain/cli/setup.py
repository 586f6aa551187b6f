"""Commands for the start: the recipes that ship, and what the machine can do with them."""

import re
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
from skilltrain.texts import visible

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
        # The first fact is the recipe's stage. Without a given stage, all recipes are listed.
        if stage in (None, recipe.facts[0]):
            name = recipe.path.relative_to(folder).with_suffix("").as_posix()
            # Names and comments of a stranger's recipes may hold codes that control a terminal.
            typer.echo(visible(f"{name}  {'  '.join(recipe.facts)}\n    {recipe.about}"))


@_recipes.command("copy", cls=ExampleCommand)
def copy(
    name: Annotated[str, typer.Argument(help="name of the recipe, e.g. tiny/sr_emb_minilm")],
    to: Annotated[Path, typer.Argument(help="folder to copy to")] = Path("recipes"),
) -> None:
    """Copy a recipe to a folder, with the recipe that it is based on.

    Example: skilltrain recipes copy sr_emb_0.6b
    """
    copies = copy_recipe(name, to)
    # Paths of repository files that the recipes mention, such as `launch/tiny_data.sh`. An
    # installed package does not have these files.
    names: set[str] = set()
    for file in copies:
        typer.echo(file)
        names.update(_REPOSITORY_FILE.findall(file.read_text(encoding="utf-8")))
    missing_files = sorted(name for name in names if not Path(name).exists())
    if missing_files:
        typer.echo(f"names files of the repository, not in this folder: {', '.join(missing_files)}")
    # The first copy is the recipe itself, and a second copy is its base. Recipes in the folder
    # `ablations` have no stage, because the command `ablate` runs them.
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


@app.command(rich_help_panel="Start here")
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, the device, the memory, and which recipes fit.

    Example: skilltrain doctor --json
    """
    from skilltrain.doctor import examine_machine

    facts = quietly(examine_machine)
    lines: list[str] = []
    for name, value in facts.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [f"{label}, {key}: {item}" for key, item in value.items()]
        else:
            lines.append(f"{label}: {value}")
    conclude(facts, lines, as_json)
