"""The program that commands are added to, and the code that commands share."""

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
    """The program. Its --help lists the commands in the order of their panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        commands: Any = self.commands
        return sorted(commands, key=lambda name: PANELS.index(commands[name].rich_help_panel))


class ExampleCommand(TyperCommand):
    """Command whose --help begins with its examples: the last paragraphs of its docstring."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the examples, and then the rest of the help."""
        paragraphs = (self.help or "").split("\n\nExample: ")
        self.help = paragraphs[0]
        if len(paragraphs) > 1:
            typer.echo("\n  ".join(["Example:", *paragraphs[1:]]))
        super().format_help(ctx, formatter)


class DashedCommand(ExampleCommand):
    """Command whose settings may also be written `--key value`."""

    ignore_unknown_options = True


class App(typer.Typer):
    """Typer app with a group of commands for each paper.

    Attributes:
        papers: Groups of commands by the name of the paper.
    """

    papers: ClassVar[dict[str, typer.Typer]] = {}

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command.

        Args:
            name: Name of the command. `r3 gradients` is added to the group of the paper r3. None:
                the command has the name of the decorated function.
            options: Options of typer.
        """
        options.setdefault("cls", ExampleCommand)
        if name is None or " " not in name:
            return super().command(name, **options)
        paper, _, command = name.partition(" ")
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


def _print_version(is_given: bool) -> None:
    """Print the version and exit, if the option --version is given."""
    if is_given:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Fine-tune the encoder and the reranker that route an agent's task to the right skill."""


# Settings ---------------------------------------------------------------------------------------


def read_settings(stage: str, arguments: Sequence[str] | None) -> tuple[dict[str, Any], object]:
    """Read the settings of a stage from the arguments of a command.

    Args:
        stage: Name of the stage.
        arguments: A recipe file (optional), and settings of the form `key=value`.

    Returns:
        The settings as nested maps, and the name of their source for errors.
    """
    files, overrides = split_arguments(arguments or [])
    if len(files) > 1:
        raise SkilltrainError(
            "unexpected-argument",
            f"more than one recipe: {' '.join(files)}",
            fix="settings have the form key=value",
        )
    if files:
        where = files[0]
        if Path(where).is_dir():
            raise SkilltrainError(
                "unexpected-argument",
                "is a folder, not a recipe",
                where=where,
                fix=f"settings have the form key=value, such as: {load_stage(stage).example}",
            )
        values = load_recipe(Path(where), overrides)
    else:
        where = f"skilltrain {command_of(stage)}"
        values = apply_overrides({}, overrides)
    if values.get("stage", stage) != stage:
        raise SkilltrainError(
            "wrong-stage", f"is a recipe of stage {values['stage']}, not {stage}", where=where
        )
    return {"stage": stage} | values, where


def read_overrides(arguments: Sequence[str] | None) -> list[str]:
    """Read the settings `key=value` from the arguments of a command that takes no recipe there."""
    files, overrides = split_arguments(arguments or [])
    if files:
        raise SkilltrainError(
            "unexpected-argument",
            "is no setting",
            where=files[0],
            fix="settings have the form key=value; put a text with spaces in quotes",
        )
    return overrides


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into recipe files and settings of the form `key=value`.

    A setting may also be written `--key value` or `--key=value`.
    """
    files: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if not equals:
                value = next(remaining, None)
            key = name.replace("-", "_")
            if value is None:
                raise SkilltrainError(
                    "unknown-option",
                    f"--{name} is no option of this command, or has no value",
                    fix=f"a setting is written {key}=VALUE; see --help",
                )
            overrides.append(f"{key}={value}")
            continue

        # The name of a recipe may contain "=".
        is_recipe = argument.endswith((".yaml", ".yml")) and Path(argument).is_file()
        if is_recipe or "=" not in argument:
            files.append(argument)
        else:
            overrides.append(argument)
    return files, overrides


class SettingsCommand(DashedCommand):
    """Command that runs a stage. Its --help lists the settings of the stage."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help with an example, and the settings of each stage of the command."""
        stages = _stages_of(ctx)
        example = f"skilltrain {command_of(stages[0])} {load_stage(stages[0]).example}"
        self.help = f"{self.help}\n\nExample: {example}"
        super().format_help(ctx, formatter)
        for stage in stages:
            fields = "\n".join(describe_fields(load_stage(stage), "", None))
            note = "key=value; --help-all shows those of sections too"
            typer.echo(f"Settings of {stage} ({note}):\n{fields}")


def _stages_of(ctx: typer.Context) -> tuple[str, ...]:
    """Return the stages that a command may run: for `train` two, else that of the same name."""
    command = str(ctx.command.name)
    return ("train_encoder", "train_reranker") if command == "train" else (command,)


def _print_all(ctx: typer.Context, is_given: bool) -> None:
    """Print all settings of the command's stages and exit, if the option --help-all is given."""
    if is_given:
        for stage in _stages_of(ctx):
            fields = "\n".join(describe_fields(load_stage(stage), "", {}))
            note = "key=value; those of lists, marked [], in a recipe"
            typer.echo(f"Settings of {stage} ({note}):\n{fields}")
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_print_all, is_eager=True, help="show all settings and exit"
    ),
]


def describe_fields(
    config_class: type[BaseModel],
    prefix: str,
    paths_by_section: dict[type[BaseModel], str] | None,
) -> Iterator[str]:
    """Describe settings, one per line. The settings of a section follow its line.

    Args:
        config_class: Class of the settings.
        prefix: Path of the section that holds them, such as `training.`. `[]` marks the items of a
            list.
        paths_by_section: Paths of the sections described before, by their class. They are not
            described again. The function adds to them. None: no section is described.
    """
    for name, field in config_class.model_fields.items():
        if name in tags_of(config_class):
            continue

        # Describe the setting in one line.
        sections = sections_of(field)
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            default = f"default {brief(value)}"
        if paths_by_section is None and sections:
            default = "a section, required" if field.is_required() else "a section"
        yield f"  {prefix}{name}: {field.description or ''} ({default})".replace(":  (", ": (")
        if paths_by_section is None:
            continue

        # Describe the settings of each section that it may hold.
        is_list = get_origin(field.annotation) in (list, tuple)
        path = f"{prefix}{name}[]" if is_list else f"{prefix}{name}"
        for section in sections:
            tag = ", ".join(f"{key}={value}" for key, value in tags_of(section).items())
            if section in paths_by_section:
                yield f"  {path}.…: {tag + ': ' if tag else ''}as {paths_by_section[section]}.…"
                continue
            paths_by_section[section] = path
            if tag:
                yield f"  {path} with {tag}:"
            yield from describe_fields(section, f"{path}.", paths_by_section)


def brief(value: Any) -> str:
    """Return a default value as it is written in a recipe, cut to 70 characters."""
    if isinstance(value, str):
        is_plain = value.strip() == value and value.isprintable()
        text = value if is_plain else json.dumps(value)
    else:
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        text = json.dumps(plain, default=str, ensure_ascii=False)
    return shorten(text, 70, "...")


# Output --------------------------------------------------------------------------------


def execute(stage: Stage, is_dry_run: bool, resume: bool = False, as_json: bool = False) -> None:
    """Run a stage and print its result. For a dry run, print what the stage would do instead."""
    if is_dry_run:
        estimates = quietly(dry_run, stage)
        show({"dry_run": estimates} if estimates else {})
    else:
        summary = quietly(run_stage, stage, resume)
        conclude({"out": str(stage.out), **summary}, stage.closing_lines(summary), as_json)


def conclude(summary: dict[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """Print the result of a command, in the main process only.

    Args:
        summary: The result for programs. It is printed with `as_json`.
        lines: The result for a person. It is printed otherwise.
        as_json: Whether the option --json is given.
    """
    if as_json:
        show(summary)
    elif is_main_process():
        for line in lines:
            typer.echo(printable(line))


def quietly(function: Callable[P, ResultT], *arguments: P.args, **options: P.kwargs) -> ResultT:
    """Call a function with stdout redirected to stderr. Only the command's result is for stdout."""
    with redirect_stdout(sys.stderr):
        return function(*arguments, **options)


def show(summary: dict[str, Any]) -> None:
    """Print a result as JSON, in the main process only. An empty result is not printed."""
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
