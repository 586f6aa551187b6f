"""Commands that compare systems, and grids of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from skilltrain.cli.app import (
    AS_WRITTEN,
    AsJson,
    DryRun,
    HelpAll,
    Overrides,
    SettingsCommand,
    app,
    conclude,
    execute,
    only_settings,
    quietly,
    settings_of,
    show,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.stage import parse_recipe
from skilltrain.terminal import console


@app.command(cls=SettingsCommand, context_settings=AS_WRITTEN, rich_help_panel="Evaluate")
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
    is_dry_run: DryRun = False,
    help_all: HelpAll = False,
) -> None:
    """Compare systems on a benchmark, with 95% intervals; or score predictions that other software made.

    Example: skilltrain evaluate --benchmark bench --predictions predictions.json --json scores.json
    """
    values, where = settings_of("evaluate", arguments)
    if predictions:
        values["predictions"] = [str(file) for file in predictions]
        if scores is not None and scores.resolve() in {file.resolve() for file in predictions}:
            raise SkilltrainError(
                "overwrites-input",
                "--json would overwrite the predictions",
                where=scores,
                fix="name another file",
            )
    named = encoder or reranker
    if named and "systems" in values:
        raise SkilltrainError(
            "conflicting-settings",
            "the recipe lists systems already",
            where=where,
            fix="leave --encoder and --reranker out",
        )
    if "systems" not in values and (named or (values.get("pool") is not None and not predictions)):
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


@app.command(context_settings=AS_WRITTEN, rich_help_panel="Evaluate")
def ablate(
    grid: Annotated[Path, typer.Argument(help="a file of recipes/ablations, or one like it")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value settings of the grid")
    ] = None,
    is_dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run every cell of a grid of variants and seeds, and compare the variants, with 95% intervals.

    Steps that cells share run once; run again, what is finished is left as it is, and what was killed goes on.

    Example: skilltrain ablate recipes/ablations/filter.yaml seeds='[1, 2, 3]'
    """
    from skilltrain.evaluation.ablate import dry_run_ablation, run_ablation

    if is_dry_run:
        show(quietly(dry_run_ablation, grid, only_settings(overrides)))
        return
    found = quietly(run_ablation, grid, only_settings(overrides))
    conclude(
        found, [f"{found['out']}/ablation.html: {found['num_cells']} cells, compared"], as_json
    )


def _score_predictions(values: dict[str, Any], scores: Path | None, is_dry_run: bool) -> None:
    """Print the means of one predictions file, by section; with `scores` they go there too, and each query's beside."""
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
