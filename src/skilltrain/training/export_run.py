"""Exports the model of a training run to a folder, and pushes it to the Hugging Face Hub."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skilltrain.config import load_recipe, validate
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.card import Published, RunRecord, model_card, rename_model
from skilltrain.export.forms import open_model, write_form
from skilltrain.export.push import PushOptions, check_round_trip, push_files
from skilltrain.files import staged_folder, write_text
from skilltrain.formats import RUN as RUN_FORMAT
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.saving import copy_model, listed_files
from skilltrain.runs import CHECKPOINTS, RECIPE_FILE, RUN_FILE, record_of
from skilltrain.stage import load_stage
from skilltrain.texts import shorten
from skilltrain.training.checkpoint import best_checkpoint, checkpoints
from skilltrain.training.train import Train, save_trained


def export_run(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    published: Published = Published(),  # noqa: B008
    form: Form | None = None,
    adapter_only: bool = False,
) -> dict[str, Any]:
    """Write the model of a training run to the folder `out`.

    Args:
        run: Folder of a training run, finished or not.
        out: Folder to write. It must be empty or not exist.
        checkpoint: `step-N` or `best`. None: the final model of a finished run, or the newest
            checkpoint of an unfinished run.
        published: Facts for the model card that the run does not know.
        form: Form of the model, if not the one that training saves.
        adapter_only: Whether to write only the adapter (LoRA), without a card.

    Returns:
        `out`, `stage`, and `checkpoint`, the name of the checkpoint with these weights.

    Raises:
        SkilltrainError: The run has no such checkpoint, form, adapter or report.
    """
    config, summary = _read_run(run)
    is_final_model = bool(summary) and checkpoint is None
    if published.reports and not is_final_model:
        fault = "a report is about the final model of a finished run"
        fix = "leave out --report or --checkpoint"
        raise SkilltrainError("conflicting-settings", fault, where="--report", fix=fix)
    if adapter_only and config.adapter is None:
        fault = "trained all weights, no adapter"
        raise SkilltrainError("conflicting-settings", fault, where=run, fix="leave out --adapter")

    final_checkpoint = summary.get("checkpoint")  # None for an unfinished run
    checkpoint_name = final_checkpoint
    with staged_folder(out) as staged:
        if is_final_model and not adapter_only:
            copy_model(run, staged)
        else:
            # If both names are None, `_find_checkpoint` takes the newest checkpoint.
            source = _find_checkpoint(run, name=checkpoint or final_checkpoint)
            checkpoint_name = source.name
            if checkpoint_name != final_checkpoint:
                summary = {}  # it describes the final model
            save_trained(config, source, staged, summary, adapter_only)
        if form is not None:
            write_form(staged, form)

        # Write the model card. It names the checkpoint, unless this is the final one.
        if not adapter_only:
            # The card needs only the shapes of the weights, so the model is on the device meta.
            model = open_model(staged, "meta", runs_code=config.model.trust_remote_code)
            recipe = config.model_dump(mode="json")
            card_name = None if checkpoint_name == final_checkpoint else checkpoint_name
            record = RunRecord(model.settings, recipe, summary, card_name, form, run, model)
            write_text(staged / "README.md", model_card(record, published))
    return {"out": str(out), "stage": config.stage, "checkpoint": checkpoint_name}


def _read_run(run: Path) -> tuple[Train, Mapping[str, Any]]:
    """Return the settings and the summary of a run. The summary of an unfinished run is empty.

    Raises:
        SkilltrainError: The folder holds no training run, or another release wrote it.
    """
    record = record_of(run)
    if not record:
        fault = f"holds no record of a training run: {RUN_FILE}"
        fix = "give the folder that a training wrote to (its out=…)"
        raise SkilltrainError("no-run", fault, where=run, fix=fix)
    file = run / RECIPE_FILE
    RUN_FORMAT.check(record, run, fix=f"train again: skilltrain train {file} out=…")
    # Load the settings with the class of the run's stage, `TrainEncoder` or `TrainReranker`.
    recipe = load_recipe(file)
    name = str(recipe.get("stage"))
    stage = load_stage(name)
    if not issubclass(stage, Train):
        fault = f"is a run of stage {name}, which trains no model"
        raise SkilltrainError("wrong-stage", fault, where=run)
    config = validate(stage, recipe, file)
    summary = record["summary"] if record["finished"] else {}
    return config, summary


def _find_checkpoint(run: Path, name: str | None) -> Path:
    """Return the folder of a checkpoint.

    Args:
        run: Folder of a training run.
        name: `step-N`, `best`, or None for the newest.

    Raises:
        SkilltrainError: There is no such checkpoint.
    """
    folder = run / CHECKPOINTS
    paths = {path.name: path for path in checkpoints(folder)}  # by name, oldest first
    if not paths:
        fix = "train for longer, or lower training.save_every"
        raise SkilltrainError("no-checkpoint", "holds no checkpoint", where=folder, fix=fix)

    if name is None:
        name = [*paths][-1]
    path = best_checkpoint(folder) if name == "best" else paths.get(name)
    if path is None:
        fault = f"no checkpoint '{shorten(name, 40)}'; there are {', '.join(paths)}"
        raise SkilltrainError("no-checkpoint", fault, where=folder)
    return path


def push_model(
    run: Path,
    published: Published,
    form: Form | None = None,
    options: PushOptions = PushOptions(),  # noqa: B008
) -> dict[str, Any]:
    """Upload a model to the repository `published.repo` on the Hub.

    This is one commit, which deletes all other files of the repository.

    Args:
        run: Folder of a finished training run, or one that `export_run` wrote.
        published: Facts for the model card that the run does not know.
        form: Form of the model, if not the one that training saves.
        options: How to write to the repository.

    Returns:
        `url` (None if nothing was sent), `files` (size in bytes by name) and `card`.

    Raises:
        SkilltrainError: The model would not work elsewhere, holds a secret, or the Hub refuses it.
    """
    assert published.repo is not None
    if not run.is_dir():
        raise SkilltrainError("not-found", "no such folder", where=run)
    record = record_of(run)  # empty for an export
    # An export is uploaded unchanged, so `form` and facts for the card are refused for an export.
    # `has_options` stands for these; the parameter `options` is allowed.
    has_options = bool(form or published.license or published.reports or published.base_model)
    _check_pushable(run, record, has_options=has_options)

    # Export a run, or copy an export, and upload the files.
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        folder = Path(scratch) / "model"
        if record:
            export_run(run, folder, published=published, form=form)
        else:
            copy_model(run, folder)
            rename_model(folder / "README.md", published.repo)
        check_round_trip(folder)
        paths = {name: folder / name for name in listed_files(folder)}
        return push_files(paths, published, options)


def _check_pushable(run: Path, record: Mapping[str, Any], has_options: bool) -> None:
    """Check that a folder can be pushed: a finished run, or an export.

    Args:
        run: The folder.
        record: Record of the run; empty for an export.
        has_options: Whether the user gives a form, a licence, a base model or reports. An export
            cannot take them, because it already has its form and its model card.

    Raises:
        SkilltrainError: The folder cannot be pushed.
    """
    if record and not record.get("finished"):
        fault = "this training has not finished"
        fix = "continue it with --resume, or export a checkpoint and push that"
        raise SkilltrainError("unfinished-run", fault, where=run, fix=fix)
    # An export of only the adapter lacks some of these files.
    for name in (CHECKPOINT_FILE, "config.json", "README.md"):
        if not (run / name).is_file():
            fault = f"holds no model to push: no {name}"
            fix = "give the folder of a finished training run, of an export (without --adapter), "
            fix += "of a router or of tables"
            raise SkilltrainError("not-a-model", fault, where=run, fix=fix)
    if not record and has_options:
        fault = "is an export, which is pushed unchanged"
        fix = "give --form, --license, --base-model and --report to `skilltrain export`"
        raise SkilltrainError("conflicting-settings", fault, where=run, fix=fix)
