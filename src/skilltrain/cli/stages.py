"""Commands that run stages, and show tables and training lists."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skilltrain.cli.app import (
    AsJson,
    DashedCommand,
    DryRun,
    HelpAll,
    Overrides,
    SettingsCommand,
    app,
    conclude,
    execute,
    quietly,
    read_overrides,
    read_settings,
)
from skilltrain.config import load_recipe
from skilltrain.data import DataForm
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.plugins import load_plugin, plugin_paths
from skilltrain.stage import STAGES, TrainingStage, command_of, parse_recipe
from skilltrain.terminal import console, print_line
from skilltrain.texts import printable

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CELL_CHARS = 1000  # of a value that is shown; enough for every reason
_MIN_COLUMN_CHARS = 16  # of a column of a table that is easy to read
_EMPTY = (None, "", [])
# Panel of a stage's command, by the package of the stage.
_PANELS = {"data": "Data", "evaluation": "Data", "serving": "Use", "papers": "Papers"}
# Stages whose commands have further options. They are not added by `add_stage`.
_SPECIAL_STAGES = ("train_encoder", "train_reranker", "evaluate")


def add_stage(name: str) -> None:
    """Add the command of a stage to the program.

    Args:
        name: Name of the stage, or its import path.
    """
    panel = "Plug-ins"
    summary = "Run this stage of another package."
    if name in STAGES:
        path, summary = STAGES[name]
        panel = _PANELS[path.split(".")[1]]

    @app.command(
        command_of(name),
        cls=SettingsCommand,
        help=summary,
        rich_help_panel=panel,
    )
    def run_stage(
        arguments: Overrides = None,
        is_dry_run: DryRun = False,
        as_json: AsJson = False,
        help_all: HelpAll = False,
    ) -> None:
        execute(parse_recipe(*read_settings(name, arguments)), is_dry_run, as_json=as_json)


def _add_command(name: str) -> None:
    """Add a command of another package to the program. The package is imported when it runs.

    Args:
        name: Name of the plug-in, which is a function or a typer app.
    """

    @app.command(
        name,
        cls=DashedCommand,
        help="Run this command of another package.",
        add_help_option=False,
        context_settings={"allow_extra_args": True},
        rich_help_panel="Plug-ins",
    )
    def run_command(context: typer.Context) -> Any:
        """Import the plug-in and run it with the remaining arguments."""
        plugin = load_plugin("command", name)
        plugin_app = plugin
        if not isinstance(plugin, typer.Typer):
            plugin_app = typer.Typer()
            plugin_app.command()(plugin)
        command = typer.main.get_command(plugin_app)
        return command.main(context.args, prog_name=f"skilltrain {name}", standalone_mode=False)


for _name in plugin_paths("stage"):
    if _name not in _SPECIAL_STAGES:
        add_stage(_name)
for _name in plugin_paths("command"):
    _add_command(_name)


@app.command(cls=SettingsCommand, rich_help_panel="Train")
def train(
    file: Annotated[Path, typer.Argument(help="recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    is_dry_run: DryRun = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run in `out` from its newest checkpoint")
    ] = False,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> None:
    """Train an encoder or a reranker."""
    # Settings in sections, such as training.seed, stand in the recipe or are overrides.
    execute(training_of(file, overrides), is_dry_run, resume, as_json)


def training_of(file: Path, overrides: Sequence[str] | None) -> TrainingStage:
    """Return the training stage of a recipe.

    Args:
        file: The recipe.
        overrides: Settings of the form `key=value`.

    Raises:
        SkilltrainError: The recipe is of another stage.
    """
    stage = parse_recipe(load_recipe(file, read_overrides(overrides)), file)
    if not isinstance(stage, TrainingStage):
        raise SkilltrainError(
            "wrong-stage",
            f"is a recipe of stage {stage.stage}",
            where=file,
            fix=f"run: skilltrain {command_of(stage.stage)} {file}",
        )
    return stage


@app.command("inspect", rich_help_panel="Data")
def inspect_lists(
    lists: Annotated[Path, typer.Argument(help="folder that the stage lists or queries wrote")],
    out: Annotated[
        Path | None, typer.Option(help="page to write; default: LISTS.html beside the folder")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(help="the pool, if it has moved since the lists were made")
    ] = None,
    max_lists: Annotated[
        int,
        typer.Option(min=1, help="largest number of lists to show; if there are more, a sample"),
    ] = 200,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about training lists or queries: what will be learned, and what not.

    Lists have counts, checks and a sample on the page. Queries are all on the page.

    Example: skilltrain inspect runs/encoder_lists --out lists.html
    """
    from skilltrain.evaluation import inspect_data

    # A folder of lists holds queries too.
    if (lists / "queries.parquet").is_file() and not (lists / "lists.parquet").is_file():
        summary = quietly(inspect_data.inspect_queries, lists, out)
        conclude(summary, [f"{summary['page']}: {summary['num_queries']:,} queries"], as_json)
        return
    summary = quietly(inspect_data.inspect_lists, lists, out, pool, max_lists)
    findings = [f"{check} {count:,}" for check, count in summary["worth_a_look"].items()]
    text = ", ".join(findings) if findings else "nothing"
    line = f"{summary['page']}: {summary['num_lists']:,} lists; worth a look: {text}"
    conclude(summary, [line], as_json)


@app.command("export-data", rich_help_panel="Data")
def export_training_data(
    source: Annotated[
        Path,
        typer.Argument(
            help="folder of lists, queries or rankings; with --to lists a .jsonl, .csv or .parquet "
            "file of texts"
        ),
    ],
    to: Annotated[
        DataForm,
        typer.Option(
            help="pairs, triplets, tuples (one positive and all negatives): sentence-transformers; "
            "trec: runs and qrels; beir: a BEIR folder; lists: texts as lists for training"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder to write")],
    pool: Annotated[
        Path | None, typer.Option(help="SKILLS table; default: the one in the source")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write training data in the form of another tool, or read such data as lists.

    Example: skilltrain export-data runs/lists --to triplets --pool runs/pool --out runs/triplets

    Example: skilltrain export-data triplets.csv --to lists --out runs/lists
    """
    from skilltrain.data.export_data import export_data

    # `to="lists"` is the opposite direction: it reads texts of another tool, and writes our lists.
    summary = quietly(export_data, source, to, out, pool)
    # The summary holds the number of lines by file, or the numbers of lists and texts.
    counts = ", ".join(f"{name} {count:,}" for name, count in summary.items())
    conclude({"out": str(out), **summary}, [f"{out}: {counts}"], as_json)


@app.command("show", rich_help_panel="Data")
def show_table(
    file: Annotated[Path, typer.Argument(help="a .parquet file of any stage")],
    where: Annotated[
        list[str] | None, typer.Argument(help="column=value: show only rows with this value")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="number of rows to show")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="print all matching rows, one JSON object per line")
    ] = False,
) -> None:
    """Show the first rows of a table, or the first rows that have certain values.

    Example: skilltrain show runs/pool/dropped.parquet filter=duplicate
    """
    table = _read_parquet(file)
    value_by_column = dict(argument.split("=", 1) for argument in read_overrides(where))
    matching = _matching_rows(table, value_by_column, file)

    if as_json:
        for row in matching:
            typer.echo(json.dumps(row, default=str))
        return
    print_line(f"{file}: {len(matching):,} of {table.num_rows:,} rows, {table.num_columns} columns")
    if matching:
        _print_rows(matching[:rows])


def _read_parquet(file: Path) -> "pa.Table":
    """Read a parquet file. Raises SkilltrainError if the file is missing or cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        tables = ", ".join(path.name for path in sorted(file.glob("*.parquet")))
        fix = f"its tables: {tables or 'none'}" if file.is_dir() else ""
        problem = "is a folder, not a .parquet file" if fix else "no such file"
        raise SkilltrainError("not-found", problem, where=file, fix=fix)
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(
            "not-parquet", f"cannot be read as parquet: {reason_of(error)}", where=file
        ) from error


def _matching_rows(
    table: "pa.Table", value_by_column: dict[str, str], file: Path
) -> list[dict[str, Any]]:
    """Return the rows of a table that have a given value in each given column.

    In a column of lists, the value must be in the row's list.

    Args:
        table: The table.
        value_by_column: Value of each column, as text.
        file: File of the table, for errors.
    """
    import pyarrow as pa

    unknown = value_by_column.keys() - set(table.column_names)
    if unknown:
        fix = f"its columns: {', '.join(table.column_names)}"
        raise SkilltrainError("missing-column", f"no column '{min(unknown)}'", where=file, fix=fix)
    matching = table.to_pylist()
    for name, value in value_by_column.items():
        if pa.types.is_list(table.schema.field(name).type):
            matching = [row for row in matching if value in map(_text, row[name] or ())]
        else:
            matching = [row for row in matching if value == _text(row[name])]
    return matching


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table as wide as the terminal. Columns without a value are left out.

    If the columns would be too narrow to read, each row is printed as a table of names and values.

    Args:
        rows: Value by column, for each row.
    """
    names = [name for name in rows[0] if any(row[name] not in _EMPTY for row in rows)]
    out = Console(highlight=False, width=console.width)
    if len(names) * _MIN_COLUMN_CHARS <= out.width:
        table = Table(box=box.SIMPLE_HEAD)
        for name in names:
            table.add_column(_cell(name))
        for row in rows:
            table.add_row(*[_cell(row[name]) for name in names])
        out.print(table)
        return

    for row in rows:
        table = Table(show_header=False, box=box.SIMPLE_HEAD)
        for name in names:
            table.add_row(_cell(name), _cell(row[name]))
        out.print(table)


def _cell(value: Any) -> Text:
    """Return a value as one line of a table, cut to 1,000 characters."""
    return Text("" if value is None else printable(_text(value), _MAX_CELL_CHARS))


def _text(value: Any) -> str:
    """Return a value of a table as text. Lists and numbers are written as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
