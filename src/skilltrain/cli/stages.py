"""Commands that run stages, trainings and grids of them, list recipes and export models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

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
from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.stages import STAGES, list_recipes, parse_recipe, schema_of
from skilltrain.texts import visible

AsForm = Annotated[
    Form | None,
    typer.Option(
        "--form", help="what else than the plain folder: for vLLM, late interaction, a runtime"
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option("--report", help="report of `evaluate` for the card's results; may be repeated"),
]
License = Annotated[
    str | None, typer.Option("--license", help="for the model card, e.g. apache-2.0")
]


def _add_stage(stage: str) -> None:
    @app.command(stage, cls=SettingsCommand, help=STAGES[stage].about, context_settings=AS_WRITTEN)
    def run_stage(
        arguments: Overrides = None,
        only_plan: DryRun = False,
        as_json: AsJson = False,
        help_all: HelpAll = False,
    ) -> None:
        execute(parse_recipe(*settings_of(stage, arguments)), only_plan, as_json=as_json)


for _stage in STAGES.values():
    if _stage.example:
        _add_stage(_stage.name)


@app.command(context_settings=AS_WRITTEN)
def train(
    file: Annotated[Path, typer.Argument(help="a recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    only_plan: DryRun = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train an encoder or a reranker.

    Its settings: skilltrain recipes --schema train_encoder (or train_reranker)

    Example: skilltrain train recipes/tiny/sr_emb_minilm.yaml training.seed=7 out=runs/emb7
    """
    execute(_training(file, overrides), only_plan, resume, as_json)


def _training(file: Path, overrides: Sequence[str] | None) -> Any:
    config = parse_recipe(load_recipe(file, only_settings(overrides)), file)
    if not STAGES[config.stage].trains:
        fix = f"run: skilltrain {config.stage} {file}"
        raise SkilltrainError(f"is a recipe of stage {config.stage}", where=file, fix=fix)
    return config


@app.command()
def recipes(
    stage: Annotated[
        str | None, typer.Argument(help="list recipes of this stage only, e.g. train_encoder")
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="where the recipes are")] = Path("recipes"),
    schema: Annotated[
        bool, typer.Option("--schema", help="print what a recipe may hold, as JSON Schema")
    ] = False,
) -> None:
    """List the recipes of a folder, or print what a recipe may hold, as JSON Schema.

    Example: skilltrain recipes --schema train_encoder > train_encoder.schema.json
    """
    if stage is not None and stage not in STAGES:
        raise SkilltrainError(
            f"unknown stage {stage!r}; allowed: {', '.join(STAGES)}", where="skilltrain recipes"
        )
    if schema:
        show(schema_of([stage] if stage else [*STAGES]))
        return
    for found in list_recipes(folder):
        if stage in (None, found.facts[0]):
            typer.echo(f"{found.path}  {'  '.join(found.facts)}\n    {found.about}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a training, finished or not")],
    out: Annotated[Path, typer.Option(help="folder to write the model to")],
    checkpoint: Annotated[
        str | None, typer.Option(help="step-N or best; else what the run ended with")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the adapter (LoRA) alone, for peft")
    ] = False,
    form: AsForm = None,
    reports: Reports = None,
    repo: Annotated[
        str | None, typer.Option(help="OWNER/NAME on the Hub, for the model card's programs")
    ] = None,
    license_id: License = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a training run, or of one of its checkpoints, as a folder of its own.

    Example: skilltrain export runs/full/sr_emb_0.6b --checkpoint best --out models/sr_emb

    Example: skilltrain export runs/full/sr_rank_0.6b --form sequence_classification --out models/sr_rank_vllm
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import export_run

    if adapter and any((form, reports, repo, license_id)):
        what = "an adapter is written as it is, without a card"
        raise SkilltrainError(what, where="--adapter", fix="give only --checkpoint and --out")
    published = Published(repo, license_id, reports or ())
    summary = quietly(export_run, run, out, checkpoint, published, form, adapter)
    conclude(summary, [f"{out}: {summary['checkpoint'] or 'the model'} of {run}"], as_json)


@app.command()
def push(
    run: Annotated[
        Path, typer.Argument(help="folder of a finished training, or one that `export` wrote")
    ],
    repo: Annotated[
        str, typer.Option(help="OWNER/NAME on the Hub; made if it is not there, and private")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="everyone may read the repository")
    ] = False,
    into_existing: Annotated[
        bool,
        typer.Option("--into-existing", help="replace a repository that holds only a README.md"),
    ] = False,
    form: AsForm = None,
    reports: Reports = None,
    license_id: License = None,
    only_plan: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model with its card to the Hugging Face Hub, after a check that others open it with the same scores.

    The token is HF_TOKEN, or that of `hf auth login`. --dry-run checks all, shows files and card, and asks no server.

    Example: skilltrain push runs/encoder --repo our-team/sr-emb --license apache-2.0 --dry-run
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import push_model

    published = Published(repo, license_id, reports or ())
    summary = quietly(push_model, run, published, form, public, into_existing, only_plan)
    if only_plan and not as_json:
        typer.echo(visible(summary["card"]))
    lines = [f"{name}: {size:,} bytes" for name, size in summary["files"].items()]
    if only_plan:
        lines.append(f"{repo}: would be pushed; nothing was sent")
    else:
        lines.append(f"{summary['url']}: pushed")
    conclude(summary, lines, as_json)


@app.command(context_settings=AS_WRITTEN)
def gradients(
    file: Annotated[Path, typer.Argument(help="a recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="batches of the training to look at")
    ] = 20,
) -> None:
    """Take a loss's gradient apart: what becomes of the push away from rejected skills, beside everything else.

    Trains nothing. A trained model is looked at with model.source=FOLDER.

    Example: skilltrain gradients recipes/r3_emb_0.6b.yaml --batches 50 out=runs/gradients
    """
    from skilltrain.papers.r3.loss_gradients import measure_gradients, write_gradients

    config = _training(file, overrides)
    if config.out.exists():
        raise SkilltrainError("exists already", where=config.out, fix="name another folder: out=…")
    found = quietly(measure_gradients, config, num_batches)
    write_gradients(found, config, num_batches)
    lost = ", ".join(
        f"{row.survival:.2f} at the {row.at}" for row in found if row.part == "rejected"
    )
    conclude(
        {},
        [f"{config.out}/gradients.html: of the rejections' gradient survive {lost}"],
        as_json=False,
    )


@app.command(context_settings=AS_WRITTEN)
def ablate(
    grid: Annotated[Path, typer.Argument(help="a file of recipes/ablations, or one like it")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value settings of the grid")
    ] = None,
    only_plan: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run every cell of a grid of variants and seeds, and compare the variants, with 95% intervals.

    Steps that cells share run once; run again, what is finished is left as it is, and what was killed goes on.

    Example: skilltrain ablate recipes/ablations/filter.yaml seeds='[1, 2, 3]'
    """
    from skilltrain.evaluation.ablate import plan_ablation, run_ablation

    if only_plan:
        show(quietly(plan_ablation, grid, only_settings(overrides)))
        return
    found = quietly(run_ablation, grid, only_settings(overrides))
    conclude(
        found, [f"{found['out']}/ablation.html: {found['num_cells']} cells, compared"], as_json
    )
