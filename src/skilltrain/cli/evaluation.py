"""Commands that compare systems, and variants of training runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from skilltrain.cli.app import (
    DASHED_SETTINGS,
    AsJson,
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
    show,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.stage import parse_recipe
from skilltrain.terminal import console


@app.command(cls=SettingsCommand, context_settings=DASHED_SETTINGS, rich_help_panel="Evaluate")
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
            "--json",
            help="file for the means of one predictions file; values by query go beside it",
        ),
    ] = None,
    is_dry_run: DryRun = False,
    help_all: HelpAll = False,
) -> None:
    """Compare systems on a benchmark, with 95% intervals, or score predictions of other software.

    Example: skilltrain evaluate --benchmark bench --predictions predictions.json --json scores.json
    """
    values, where = read_settings("evaluate", arguments)
    if predictions:
        values["predictions"] = [str(file) for file in predictions]
        if scores is not None and scores.resolve() in {file.resolve() for file in predictions}:
            raise SkilltrainError(
                "overwrites-input",
                "--json would overwrite the predictions",
                where=scores,
                fix="name another file",
            )
    has_models = bool(encoder or reranker)
    if has_models and "systems" in values:
        raise SkilltrainError(
            "conflicting-settings",
            "the recipe lists systems already",
            where=where,
            fix="leave --encoder and --reranker out",
        )
    # A pool without models and predictions is ranked by BM25.
    needs_bm25 = values.get("pool") is not None and not predictions
    if "systems" not in values and (has_models or needs_bm25):
        values["systems"] = _systems(encoder or [], reranker)
    if predictions and "out" not in values and "systems" not in values:
        _score_predictions(values, scores, is_dry_run)
    elif scores is not None:
        raise SkilltrainError(
            "conflicting-settings",
            "--json is for predictions alone",
            fix="leave out=… and systems out, or --json",
        )
    else:
        execute(parse_recipe(values, where), is_dry_run)


@app.command(context_settings=DASHED_SETTINGS, rich_help_panel="Evaluate")
def ablate(
    grid: Annotated[Path, typer.Argument(help="a file like those in recipes/ablations")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value settings of the grid")
    ] = None,
    is_dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run variants with several seeds, and compare the variants, with 95% intervals.

    Steps that cells share run once. The same command continues a grid that was stopped.

    Example: skilltrain ablate recipes/ablations/filter.yaml seeds='[1, 2, 3]'
    """
    from skilltrain.evaluation.ablate import dry_run_ablation, run_ablation

    if is_dry_run:
        show(quietly(dry_run_ablation, grid, read_overrides(overrides)))
        return
    summary = quietly(run_ablation, grid, read_overrides(overrides))
    line = f"{summary['out']}/ablation.html: {summary['num_cells']} cells, compared"
    conclude(summary, [line], as_json)


def _score_predictions(values: dict[str, Any], scores: Path | None, is_dry_run: bool) -> None:
    """Print the means of one predictions file, overall and by kind of query.

    If `scores` is a file, the means are written to it, and the values by query beside it.
    """
    from skilltrain.evaluation.evaluate import PREDICTION_MEASURES, score_predictions
    from skilltrain.evaluation.write import terminal_table, write_per_query

    config: Any = parse_recipe(
        {"measures": PREDICTION_MEASURES} | values | {"out": "."}, "skilltrain evaluate"
    )
    if len(config.predictions) > 1:
        raise SkilltrainError(
            "conflicting-settings",
            "several predictions files are compared in a report",
            fix="add out=… for its folder",
        )
    if "analysis" in values:
        raise SkilltrainError(
            "conflicting-settings",
            "analyses are part of a report",
            where="analysis",
            fix="add out=… for its folder",
        )
    if is_dry_run:
        show({"dry_run": config.dry_run()})
        return
    report = quietly(score_predictions, config)
    console.print(terminal_table(report, console.width))
    sections = to_jsonable_python(report.sections(report.systems[0]))
    if scores is not None:
        write_json(scores, sections)
        write_per_query(report, scores.with_name(f"{scores.stem}.per_query.jsonl"))
    show(sections)


def _systems(encoders: Sequence[str], reranker: str | None) -> list[dict[str, Any]]:
    """Return BM25, each encoder, and the reranker after the last encoder (or BM25) as systems."""
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
