"""Commands that export a model and push it to the Hugging Face Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skilltrain.cli.app import AsJson, DryRun, app, conclude, quietly
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.texts import visible

ModelForm = Annotated[
    Form | None,
    typer.Option(
        "--form", help="form in which the model is saved, for vLLM, late interaction or a runtime"
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report", help="report of `evaluate`, for the results in the card; may be repeated"
    ),
]
License = Annotated[
    str | None, typer.Option("--license", help="for the model card, e.g. apache-2.0")
]
BaseModel = Annotated[
    str | None,
    typer.Option(help="OWNER/NAME of the base model, if training read it from a folder or package"),
]
PushedFolders = Annotated[
    list[Path],
    typer.Argument(
        help="folder of a finished training run, of `export` or of a router; or folders with "
        "lists, queries, judgements or a pool"
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="existing branch, or refs/pr/NUMBER; default: main")
]
CreatePullRequest = Annotated[
    bool, typer.Option("--create-pr", help="open a pull request, do not write to the branch")
]
if TYPE_CHECKING:
    from skilltrain.export.card import Published
    from skilltrain.export.push import PushOptions


@app.command(rich_help_panel="Publish")
def export(
    run: Annotated[Path, typer.Argument(help="folder of a training run, finished or not")],
    out: Annotated[Path, typer.Option(help="folder to write the model to")],
    checkpoint: Annotated[
        str | None, typer.Option(help="step-N or best; default: the end of the run")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write only the adapter (LoRA), for peft")
    ] = False,
    model_form: ModelForm = None,
    reports: Reports = None,
    repo: Annotated[
        str | None, typer.Option(help="OWNER/NAME on the Hub, for the code in the model card")
    ] = None,
    license_id: License = None,
    base_model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a training run, or of one of its checkpoints, to a folder.

    Example: skilltrain export runs/full/sr_emb_0.6b --checkpoint best --out models/sr_emb

    Example: skilltrain export runs/reranker --form sequence_classification --out models/reranker
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import export_run

    if adapter and (model_form or reports or repo or license_id or base_model):
        raise SkilltrainError(
            "conflicting-settings",
            "an adapter is written as it is, without a card",
            where="--adapter",
            fix="give only --checkpoint and --out",
        )
    published = Published(repo, license_id, reports or (), base_model)
    summary = quietly(export_run, run, out, checkpoint, published, model_form, adapter)
    conclude(summary, [f"{out}: {summary['checkpoint'] or 'the model'} of {run}"], as_json)


@app.command(rich_help_panel="Publish")
def push(
    folders: PushedFolders,
    repo: Annotated[
        str, typer.Option(help="OWNER/NAME on the Hub; a missing repository is created as private")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="let everyone read the repository")
    ] = False,
    into_existing: Annotated[
        bool,
        typer.Option("--into-existing", help="replace a repository that holds only a README.md"),
    ] = False,
    revision: Revision = None,
    tag: Annotated[str | None, typer.Option(help="new tag of the upload, e.g. v1")] = None,
    create_pr: CreatePullRequest = False,
    no_bodies: Annotated[
        bool, typer.Option("--no-bodies", help="send no bodies of skills")
    ] = False,
    model_form: ModelForm = None,
    reports: Reports = None,
    license_id: License = None,
    base_model: BaseModel = None,
    is_dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model, a router or tables to the Hugging Face Hub, with a card.

    For a model, the command first checks that other libraries compute the same scores. The token is
    HF_TOKEN, or the token of `hf auth login`. --dry-run makes the checks, shows the files and the
    card, and sends nothing.

    Example: skilltrain push runs/encoder --repo our-team/sr-emb --license apache-2.0 --dry-run

    Example: skilltrain push runs/router --repo our-team/router --tag v1

    Example: skilltrain push runs/queries runs/lists --repo our-team/skill-lists
    """
    from skilltrain.export.card import Published
    from skilltrain.export.push import PushOptions

    published = Published(repo, license_id, reports or (), base_model)
    options = PushOptions(public, into_existing, revision, tag, create_pr, no_bodies, is_dry_run)
    summary = quietly(_push_folders, folders, published, model_form, options)
    if is_dry_run and not as_json:
        typer.echo(visible(summary["card"]))
    lines = [f"{name}: {size:,} bytes" for name, size in summary["files"].items()]
    if is_dry_run:
        lines.append(f"{repo}: would be pushed; nothing was sent")
    else:
        lines.append(f"{summary['url']}: pushed")
    conclude(summary, lines, as_json)


def _push_folders(
    folders: list[Path], published: "Published", model_form: Form | None, options: "PushOptions"
) -> dict[str, Any]:
    """Push tables, or else a router or a model, and return a summary.

    Args:
        folders: Folders with tables, or a single folder with a router or a model.
        published: Facts for the card.
        model_form: Form of a model, if not the one that training saves.
        options: How to write to the repository.

    Raises:
        SkilltrainError: The options do not go with the content of the folders.
    """
    from skilltrain.export.tables import find_tables, push_tables
    from skilltrain.serving.hub import push_router
    from skilltrain.serving.index import POINTER
    from skilltrain.training.export_run import push_model

    folder, *more_folders = folders
    tables = find_tables(folders)
    is_router = (folder / POINTER).is_file()
    if not tables and more_folders:
        problem = "holds no table; a model or a router is pushed without other folders"
        raise SkilltrainError("conflicting-settings", problem, where=folder)
    if not tables and not is_router:
        if options.no_bodies:
            problem = "--no-bodies is for routers and tables; a model has no bodies of skills"
            raise SkilltrainError("conflicting-settings", problem, where=folder)
        return push_model(folder, published, model_form, options)
    if model_form or published.reports or published.base_model:
        problem = "--form, --report and --base-model are for models"
        raise SkilltrainError("conflicting-settings", problem, where=folder)
    if tables:
        return push_tables(tables, folders, published, options)
    return push_router(folder, published, options)
