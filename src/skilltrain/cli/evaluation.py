"""Commands that compare systems and agents, and one that shows the rows of a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.table import Table

from skilltrain.cli.app import (
    AS_WRITTEN,
    AsJson,
    DryRun,
    HelpAll,
    Overrides,
    SettingsCommand,
    app,
    execute,
    only_settings,
    quietly,
    settings_of,
    show,
)
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import write_json
from skilltrain.stages import parse_recipe
from skilltrain.terminal import console
from skilltrain.texts import printable

_CELL_CHARS = 60


@app.command(cls=SettingsCommand, context_settings=AS_WRITTEN)
def evaluate(
    arguments: Overrides = None,
    encoder: Annotated[
        list[str] | None, typer.Option(help="an encoder to evaluate; may be repeated")
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="a reranker on top of the last encoder (or of BM25)")
    ] = None,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="JSON {query_id: \\[skill_id, …]} to score")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            "--json", help="file for the means of one predictions file, with queries beside it"
        ),
    ] = None,
    only_plan: DryRun = False,
    help_all: HelpAll = False,
) -> None:
    """Compare systems on a benchmark, with 95% intervals; or score predictions that other software made.

    Example: skilltrain evaluate --benchmark bench --pool runs/pool --encoder runs/encoder out=runs/report

    Example: skilltrain evaluate --benchmark bench --predictions predictions.json --json scores.json
    """
    values, where = settings_of("evaluate", arguments)
    if predictions:
        values["predictions"] = [str(file) for file in predictions]
        if scores is not None and scores.resolve() in {file.resolve() for file in predictions}:
            raise SkilltrainError(
                "--json would overwrite the predictions", where=scores, fix="name another file"
            )
    named = encoder or reranker
    if named and "systems" in values:
        raise SkilltrainError(
            "the recipe lists systems already",
            where=where,
            fix="leave --encoder and --reranker out",
        )
    if "systems" not in values and (named or (values.get("pool") is not None and not predictions)):
        values["systems"] = _systems(encoder or [], reranker)
    if predictions and "out" not in values and "systems" not in values:
        _score_predictions(values, scores, only_plan)
    elif scores is not None:
        raise SkilltrainError(
            "--json is for predictions alone", fix="leave out=… and systems out, or --json"
        )
    else:
        execute(parse_recipe(values, where), only_plan)


@app.command()
def agents(
    trials: Annotated[
        Path, typer.Argument(help="JSON Lines: condition, task, trial, passed; used, retrieved, …")
    ],
    benchmark: Annotated[
        Path | None, typer.Option(help="the tasks, to count gold skills among the retrieved")
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(help="the condition in which agents had the gold skills")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare what agents did under several conditions, each with the first: no skills, gold skills, skills found.

    Example: skilltrain agents trials.jsonl --benchmark bench --ceiling gold
    """
    from skilltrain.evaluation.page import p_equals, signed_interval
    from skilltrain.metrics.benchmarks.load import load_benchmark
    from skilltrain.papers.skillflow.agent_results import CHIEF, agent_results, read_trials

    relevances = load_benchmark(benchmark).relevances if benchmark else {}
    found = agent_results(read_trials(trials), relevances, ceiling)
    if as_json:
        show(asdict(found))
        return
    table = Table(
        "", *map(printable, found.means), title="means over tasks, 95% bootstrap intervals"
    )
    for measure in dict.fromkeys(measure for row in found.means.values() for measure in row):
        table.add_row(measure, *(str(row.get(measure, "–")) for row in found.means.values()))
    console.print(table)
    for c in found.comparisons:
        difference, p = signed_interval(c.difference), p_equals(c.p_holm)
        typer.echo(
            printable(
                f"{c.system} - {c.baseline}: {CHIEF} {difference}, {p} after Holm, {c.reading}"
            )
        )
    for name, share in found.of_ceiling.items():
        typer.echo(printable(f"{name}: {share:.1%} of {ceiling}'s {CHIEF}"))


def _score_predictions(values: dict[str, Any], scores: Path | None, only_plan: bool) -> None:
    """Print the means of one predictions file, by section; with `scores` they go there too, and each query's beside."""
    from skilltrain.evaluation.evaluate import PREDICTION_MEASURES, plan_evaluate, score_predictions
    from skilltrain.evaluation.write import terminal_table, write_per_query

    config = parse_recipe(
        {"measures": PREDICTION_MEASURES} | values | {"out": "."}, "skilltrain evaluate"
    )
    if len(config.predictions) > 1:
        raise SkilltrainError(
            "several predictions files are compared in a report", fix="add out=… for its folder"
        )
    if "analysis" in values:
        raise SkilltrainError(
            "analyses are part of a report", where="analysis", fix="add out=… for its folder"
        )
    if only_plan:
        show({"plan": plan_evaluate(config)})
        return
    report = quietly(score_predictions, config)
    console.print(terminal_table(report, console.width))
    sections = to_jsonable_python(report.sections(report.systems[0]))
    if scores is not None:
        write_json(scores, sections)
        write_per_query(report, scores.with_name(f"{scores.stem}.per_query.jsonl"))
    show(sections)


def _systems(encoders: Sequence[str], reranker: str | None) -> list[dict[str, Any]]:
    """BM25, each encoder, and the reranker on the last of them."""
    systems: list[dict[str, Any]] = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}]
    systems += [
        {"name": f"encoder {source}", "rankers": [{"kind": "dense", "source": source}]}
        for source in encoders
    ]
    if reranker is not None:
        last = systems[-1]
        rankers = [*last["rankers"], {"kind": "rerank", "source": reranker}]
        systems.append({"name": f"{last['name']} + reranker", "rankers": rankers})
    return systems


@app.command("show")
def show_table(
    file: Annotated[Path, typer.Argument(help="a .parquet file of any stage")],
    where: Annotated[
        list[str] | None, typer.Argument(help="column=value: only rows whose column holds value")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="how many rows to show")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="print all matching rows, one JSON object per line")
    ] = False,
) -> None:
    """Show the columns and the first rows of a table, or those rows that hold certain values.

    Example: skilltrain show runs/pool/dropped.parquet filter=duplicate
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        fix = (
            f"its tables: {', '.join(path.name for path in sorted(file.glob('*.parquet')))}"
            if file.is_dir()
            else ""
        )
        raise SkilltrainError("no such file", where=file, fix=fix)
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise SkilltrainError(
            f"cannot be read as parquet: {reason_of(error)}", where=file
        ) from error
    wanted = dict(item.split("=", 1) for item in only_settings(where))
    if unknown := wanted.keys() - set(table.column_names):
        fix = f"its columns: {', '.join(table.column_names)}"
        raise SkilltrainError(f"no column '{min(unknown)}'", where=file, fix=fix)
    matching = [row for batch in table.to_batches() for row in batch.to_pylist()]
    for name, value in wanted.items():
        is_list = pa.types.is_list(table.schema.field(name).type)
        matching = [
            row for row in matching if value in (row[name] if is_list else [_text(row[name])])
        ]
    if as_json:
        for row in matching:
            typer.echo(json.dumps(row, default=str))
        return
    console.print(
        f"{file}: {len(matching):,} of {table.num_rows:,} rows, {table.num_columns} columns",
        markup=False,
    )
    for row in islice(matching, rows):
        typer.echo("")
        for name, value in row.items():
            typer.echo(f"{printable(name):>14}  {printable(_text(value), _CELL_CHARS)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
