"""A command's --help with the settings of its stage; --help-all also tells those of sections within sections."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

from skilltrain.config import sections_of, tags_of
from skilltrain.stages import STAGES


class SettingsCommand(TyperCommand):
    """A command named like its stage, whose --help lists the stage's settings; the stage is imported only then."""

    def get_help(self, ctx: Any) -> str:
        """The usual help, then the settings of the first level and an example."""
        stage = STAGES[str(self.name)]
        super().get_help(ctx)
        fields = "\n".join(_describe_fields(stage.config, "", None))
        settings = f"\nSettings (key=value; --help-all shows those of sections too):\n{fields}"
        return f"{settings}\n\nExample:\n  skilltrain {self.name} {stage.example}" if stage.example else settings


def _print_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        fields = "\n".join(_describe_fields(STAGES[str(ctx.command.name)].config, "", {}))
        typer.echo(f"Settings (key=value; those of lists, marked [], in a recipe):\n{fields}")
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_print_all, is_eager=True, help="show all settings and exit")
]


def _describe_fields(
    config_class: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str] | None
) -> Iterator[str]:
    """The settings of a section, one a line, each followed by those of its own sections; `[]` marks a list's items.

    A class of settings is told once: `seen` maps it to the place where it was. None: the first level alone.
    """
    for name, field in config_class.model_fields.items():
        if name in tags_of(config_class):
            continue
        sections = sections_of(field.annotation)
        value = _brief(field.get_default(call_default_factory=True, validated_data={}))
        default = "required" if field.is_required() else f"default {value}"
        if seen is None and sections:
            default = "a section, required" if field.is_required() else "a section"
        yield f"  {prefix}{name}: {field.description or ''} ({default})".replace(":  (", ": (")
        if seen is None:
            continue
        place = f"{prefix}{name}{'[]' if get_origin(field.annotation) in (list, tuple) else ''}"
        for section in sections:
            tag = ", ".join(f"{key}={value}" for key, value in tags_of(section).items())
            if section in seen:
                yield f"  {place}.…: {tag + ': ' if tag else ''}as {seen[section]}.…"
                continue
            seen[section] = place
            if tag:
                yield f"  {place} with {tag}:"
            yield from _describe_fields(section, f"{place}.", seen)


def _brief(value: Any) -> str:
    """A default as YAML could say it, cut to a line."""
    if isinstance(value, str):
        text = value if value.strip() == value and value.isprintable() else json.dumps(value)
    else:
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        text = json.dumps(plain, default=str, ensure_ascii=False)
    return text if len(text) <= 70 else text[:67] + "..."
