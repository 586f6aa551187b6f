"""The program that commands are added to, and their common code: settings, --help, output."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, get_origin

import typer
from pydantic import BaseModel
from typer.core import TyperCommand, TyperGroup

from skilltrain.config import apply_overrides, load_recipe, sections_of, tags_of
from skilltrain.errors import SkilltrainError
from skilltrain.runs import dry_run, run_stage
from skilltrain.stage import Stage, command_of, load_stage
from skilltrain.terminal import is_main_process
from skilltrain.texts import printable, shorten
from skilltrain.version import __version__

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

PANELS = ("Start here", "Data", "Train", "Evaluate", "Publish", "Use", "Papers", "Plug-ins")
PAPERS = {
    "r3": "R3: what a chat model rejects, as negatives.",
    "skillrouter": "SkillRouter: distractors for a harder pool.",
    "skillflow": "SkillFlow: skills in folders for agents, and what the agents did with them.",
    "skillweaver": "SkillWeaver: plans for compound tasks.",
}


class Program(TyperGroup):
    """The program. Its --help lists the commands by panel."""

    def list_commands(self, ctx: Any) -> list[str]:
        commands: Any = self.commands
        return sorted(commands, key=lambda name: PANELS.index(commands[name].rich_help_panel))


class ExampleCommand(TyperCommand):
    """Command whose --help begins with its examples: the last paragraphs of its docstring."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.help, *examples = (self.help or "").split("\n\nExample: ")
        if examples:
            typer.echo("\n  ".join(["Example:", *examples]))
        super().format_help(ctx, formatter)


class App(typer.Typer):
    """Typer app. A command named `r3 gradients` is added to the group of the paper r3."""

    papers: ClassVar[dict[str, typer.Typer]] = {}

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        paper, _, command = (name or "").rpartition(" ")
        options.setdefault("cls", ExampleCommand)
        if not paper:
            return super().command(name, **options)
        return self.papers[paper].command(command, **options)


app = App(
    cls=Program,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for _paper, _help in PAPERS.items():
    app.papers[_paper] = typer.Typer(rich_markup_mode="rich")
    app.add_typer(app.papers[_paper], name=_paper, help=_help, rich_help_panel="Papers")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="RECIPE.yaml (optional) and key=value settings")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print what the command would do, and do nothing")
]
DASHED_SETTINGS: dict[str, Any] = {"ignore_unknown_options": True}
"""Typer settings of commands whose settings may also be written `--key value`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="version")
    ] = False,
) -> None:
    """Fine-tune the encoder and the reranker that route an agent's task to the right skill."""


# Settings ---------------------------------------------------------------------------------------


def read_settings(stage: str, arguments: Sequence[str] | None) -> tuple[dict[str, Any], object]:
    """Read the settings of a stage from a recipe, if one is given, and key=value arguments.

    Returns:
        Settings, and the location that errors in them name.
    """
    files, overrides = split_arguments(arguments or [])
    if len(files) > 1:
        raise SkilltrainError(
            "unexpected-argument",
            f"more than one recipe: {' '.join(files)}",
            fix="settings have the form key=value",
        )
    values = load_recipe(Path(files[0]), overrides) if files else apply_overrides({}, overrides)
    where = files[0] if files else f"skilltrain {command_of(stage)}"
    if values.get("stage", stage) != stage:
        raise SkilltrainError(
            "wrong-stage", f"is a recipe of stage {values['stage']}, not {stage}", where=where
        )
    return {"stage": stage} | values, where


def read_overrides(arguments: Sequence[str] | None) -> list[str]:
    """Read the key=value settings of a command that takes no recipe here."""
    files, overrides = split_arguments(arguments or [])
    if files:
        raise SkilltrainError(
            "unexpected-argument",
            "is no setting",
            where=files[0],
            fix="settings have the form key=value",
        )
    return overrides


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into recipe files and key=value settings.

    A setting may also be written `--key value` or `--key=value`.
    """
    files: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        # A file's name may hold "=".
        is_recipe = argument.endswith((".yaml", ".yml")) and Path(argument).is_file()
        if argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if not equals:
                value = next(remaining, None)
            key = name.replace("-", "_")
            if value is None:
                problem = f"--{name} is no option of this command, or has no value"
                fix = f"a setting is written {key}=VALUE; see --help"
                raise SkilltrainError("unknown-option", problem, fix=fix)
            overrides.append(f"{key}={value}")
        elif is_recipe or "=" not in argument:
            files.append(argument)
        else:
            overrides.append(argument)
    return files, overrides


class SettingsCommand(ExampleCommand):
    """Command named after its stage. Its --help imports the stage and lists its settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        name = str(self.name)
        stage = load_stage(name)
        self.help = f"{self.help}\n\nExample: skilltrain {command_of(name)} {stage.example}"
        super().format_help(ctx, formatter)
        fields = "\n".join(describe_fields(stage, "", None))
        typer.echo(f"Settings (key=value; --help-all shows those of sections too):\n{fields}")


def _print_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        fields = "\n".join(describe_fields(load_stage(str(ctx.command.name)), "", {}))
        typer.echo(f"Settings (key=value; those of lists, marked [], in a recipe):\n{fields}")
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_print_all, is_eager=True, help="show all settings and exit"
    ),
]


def describe_fields(
    config_class: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str] | None
) -> Iterator[str]:
    """Describe settings, one per line. The settings of a section follow it.

    Args:
        config_class: Class of the settings.
        prefix: Path of the section, such as `training.`. `[]` marks the items of a list.
        seen: Path of each section that has been described, by its class. Such a section is not
            described again. None: sections are not described.
    """
    for name, field in config_class.model_fields.items():
        if name in tags_of(config_class):
            continue
        sections = sections_of(field)
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            default = f"default {brief(value)}"
        if seen is None and sections:
            default = "a section, required" if field.is_required() else "a section"
        yield f"  {prefix}{name}: {field.description or ''} ({default})".replace(":  (", ": (")
        if seen is None:
            continue
        is_list = get_origin(field.annotation) in (list, tuple)
        path = f"{prefix}{name}[]" if is_list else f"{prefix}{name}"
        for section in sections:
            tag = ", ".join(f"{key}={value}" for key, value in tags_of(section).items())
            if section in seen:
                yield f"  {path}.…: {tag + ': ' if tag else ''}as {seen[section]}.…"
                continue
            seen[section] = path
            if tag:
                yield f"  {path} with {tag}:"
            yield from describe_fields(section, f"{path}.", seen)


def brief(value: Any) -> str:
    """Return a value as YAML, shortened to one line."""
    if isinstance(value, str):
        text = value if value.strip() == value and value.isprintable() else json.dumps(value)
    else:
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        text = json.dumps(plain, default=str, ensure_ascii=False)
    return shorten(text, 70, "...")


# Output --------------------------------------------------------------------------------


def execute(stage: Stage, is_dry_run: bool, resume: bool = False, as_json: bool = False) -> None:
    """Run a stage and print its result, or print what it would do."""
    if is_dry_run:
        estimates = quietly(dry_run, stage)
        show({"dry_run": estimates} if estimates else {})
    else:
        summary = quietly(run_stage, stage, resume)
        conclude({"out": str(stage.out), **summary}, stage.closing_lines(summary), as_json)


def conclude(summary: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """Print `lines`, or the summary as JSON. Of several processes only one prints."""
    if as_json:
        show(summary)
    elif is_main_process():
        for line in lines:
            typer.echo(printable(line))


def quietly(function: Callable[P, ResultT], *arguments: P.args, **options: P.kwargs) -> ResultT:
    """Call a function with stdout redirected to stderr. Stdout is for the command's result."""
    with redirect_stdout(sys.stderr):
        return function(*arguments, **options)


def show(summary: dict[str, Any]) -> None:
    """Print a result as JSON. Of several processes only one prints."""
    if summary and is_main_process():
        typer.echo(json_text(summary))


def json_text(value: Any) -> str:
    """Return a value as JSON. Characters that could control a terminal are escaped as \\uXXXX."""
    is_utf = "utf" in (sys.stdout.encoding or "utf").lower()
    text = json.dumps(value, ensure_ascii=not is_utf, indent=1)
    return "".join(
        letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
        for letter in text
    )
