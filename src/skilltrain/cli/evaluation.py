"""Commands that compare systems, and variants of training runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python

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
    show,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.stage import parse_recipe
from skilltrain.terminal import console


@app.command(cls=SettingsCommand, rich_help_panel="Evaluate")
def evaluate(
    arguments: Overrides = None,
    encoder: Annotated[
        list[str] | None, typer.Option(help="an encoder to evaluate; may be repeated")
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="a reranker on top of the last encoder (or of BM25)")
    ] = None,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="TREC run, or .json {query_id: \\[skill_id, …]}")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="file to write: means of one predictions file, with a file of values beside it",
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
    # The setting predictions=… is the same as the option.
    has_predictions = bool(values.get("predictions"))

    # Make systems of the models. A pool without models and predictions is ranked by BM25.
    has_models = bool(encoder or reranker)
    if has_models and "systems" in values:
        raise SkilltrainError(
            "conflicting-settings",
            "the recipe lists systems already",
            where=where,
            fix="leave --encoder and --reranker out",
        )
    needs_bm25 = values.get("pool") is not None and not has_predictions
    if "systems" not in values and (has_models or needs_bm25):
        values["systems"] = _systems(encoder or [], reranker)

    # Predictions without a report are only scored.
    if has_predictions and "out" not in values and "systems" not in values:
        _score_predictions(values, scores, is_dry_run)
        return
    if scores is not None:
        raise SkilltrainError(
            "conflicting-settings",
            "--json is for predictions alone",
            fix="leave out=… and systems out, or --json",
        )
    execute(parse_recipe(values, where), is_dry_run)


@app.command(cls=DashedCommand, rich_help_panel="Evaluate")
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
    """Print the means of one predictions file, over all queries and by kind of query.

    Args:
        values: Settings of the stage `evaluate`.
        scores: File to write the means to. The values of each query are written beside it.
        is_dry_run: Whether to print only what would be done.
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
    if scores is not None and scores.resolve() == config.predictions[0].resolve():
        raise SkilltrainError(
            "overwrites-input",
            "--json would overwrite the predictions",
            where=scores,
            fix="name another file",
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
    """Return the settings of the systems to compare.

    The systems are BM25, each encoder, and the reranker after the last encoder, or after BM25 if
    there is no encoder.

    Args:
        encoders: Sources of encoders.
        reranker: Source of a reranker. None: there is no reranker.
    """
    name = "bm25"
    rankers = [{"kind": "lexical"}]
    systems = [{"name": name, "rankers": rankers}]
    for source in encoders:
        name = f"encoder {source}"
        rankers = [{"kind": "dense", "source": source}]
        systems.append({"name": name, "rankers": rankers})
    if reranker is not None:
        rankers = [*rankers, {"kind": "rerank", "source": reranker}]
        systems.append({"name": f"{name} + reranker", "rankers": rankers})
    return systems
