"""Write the reference pages of stages and commands: `python docs/write_reference.py`."""

import types
import typing
from collections import defaultdict
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal

import typer
import typer.cli
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from skilltrain.cli.app import app, brief
from skilltrain.config import sections_of
from skilltrain.runs import is_input
from skilltrain.stage import STAGES, Stage, command_of, load_stage

FOLDER = Path(__file__).with_name("reference")
STAGES_INTRODUCTION = """\
# Stages and settings

A stage reads tables or models and writes one folder, `out`. Its settings are written `key=value`
on the command line, or in a recipe. `skilltrain COMMAND --help-all` also lists the settings within
sections, and `skilltrain recipes schema STAGE` prints the JSON Schema of a recipe.

This page is written by `python docs/write_reference.py`.
"""
COMMANDS_INTRODUCTION = """\
# Commands

`skilltrain COMMAND --help` shows an example and the settings. Commands that run a stage take its
[settings](stages.md) as `key=value`. `--debug` after any command shows the traceback of an error.

This page is written by `python docs/write_reference.py`.

"""
TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {FOLDER / "stages.md": stages_page(), FOLDER / "commands.md": commands_page()}


def commands_page() -> str:
    """Return the page of all commands, as typer documents them."""
    program = typer.main.get_command(app)
    context = typer.Context(program, info_name="skilltrain")
    text = typer.cli.get_docs_for_click(obj=program, ctx=context, name="skilltrain")
    # The list of all commands cuts their help; each command has a section of its own.
    first_command = text.index("\n## ") + 1
    return COMMANDS_INTRODUCTION + text[first_command:].rstrip() + "\n"


def stages_page() -> str:
    """Return the page of all stages with their settings."""
    sections_by_panel: defaultdict[str, list[str]] = defaultdict(list)
    for name in STAGES:
        sections_by_panel[panel_of(name)].append(stage_section(name, load_stage(name)))
    parts = [STAGES_INTRODUCTION]
    for panel, sections in sections_by_panel.items():
        parts += [f"## {panel}\n", *sections]
    return "\n".join(parts)


def panel_of(name: str) -> str:
    """Return the panel of `skilltrain --help` that shows the command of a stage, or its paper."""
    program: Any = typer.main.get_command(app)
    return program.commands[command_of(name).split()[0]].rich_help_panel


def stage_section(name: str, stage: type[Stage]) -> str:
    """Return the section of the page about one stage."""
    inputs = [f"`{key}`" for key, field in stage.model_fields.items() if is_input(field)]
    reads = f"Reads {', '.join(inputs)}; writes `out`." if inputs else "Writes `out`."
    rows = [
        setting_row(key, stage.model_fields[key]) for key in stage.model_fields if key != "stage"
    ]
    lines = [
        f"### {name}\n",
        cleandoc(stage.__doc__ or ""),
        f"\n{reads}\n",
        f"```\nskilltrain {command_of(name)} {stage.example}\n```\n",
        "| Setting | Type | Default | Meaning |\n|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def setting_row(key: str, field: FieldInfo) -> str:
    """Return the row of one setting in the table of its stage."""
    default = "required"
    if not field.is_required():
        default = brief(field.get_default(call_default_factory=True, validated_data={}))
        default = "see `--help-all`" if sections_of(field) and len(default) > 40 else f"`{default}`"
    cells = [f"`{key}`", type_text(field.annotation), default, field.description or ""]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_text(annotation: Any) -> str:
    """Return the type of a setting in words: `path or null`."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if annotation is types.NoneType:
        return "null"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_text, arguments)))
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return "map"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return TYPE_NAMES.get(annotation, str(annotation))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
