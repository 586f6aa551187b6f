"""From a training run to a model folder: at its end, and later from any of its checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from skilltrain.config import load_recipe, validate
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.card import RunRecord, model_card
from skilltrain.export.folder import copy_model, save_adapter, save_encoder, save_reranker
from skilltrain.export.forms import write_form
from skilltrain.export.published import Published
from skilltrain.files import read_json, staged_folder, write_text
from skilltrain.models.adapters import merge_adapter
from skilltrain.models.encoder import Encoder, EncoderSettings
from skilltrain.models.loading import stored_settings
from skilltrain.models.reranker import Reranker, RerankerSettings
from skilltrain.runs import CHECKPOINTS, RECIPE_FILE, RUN_FILE
from skilltrain.training.checkpoint import best_checkpoint, checkpoints, load_weights
from skilltrain.training.settings import TrainConfig, TrainEncoderConfig, TrainRerankerConfig, load_model

_CONFIGS: dict[str, type[TrainEncoderConfig] | type[TrainRerankerConfig]] = {
    "train_encoder": TrainEncoderConfig,
    "train_reranker": TrainRerankerConfig,
}


def save_trained(
    config: TrainConfig,
    checkpoint: Path,
    out: Path,
    summary: Mapping[str, Any],
    exported: str | None = None,
    interpolate: float | None = None,
) -> None:
    """Load the model as training did, with the checkpoint's weights, and save it with its card, its adapter merged.

    `exported` names a checkpoint that is not what the run ended with; `interpolate` is the share of its weights in a
    mean with those that training started from. On the CPU: the GPU may still hold the model.
    """
    model = load_model(config, torch.device("cpu"))
    load_weights(model, "model", checkpoint)
    if interpolate is not None:
        _mix_with_base(model, config, interpolate)
    base, recipe = config.model.source, config.model_dump(mode="json")
    card = model_card(RunRecord(model.settings, base, recipe, summary, exported, interpolate, run=config.out))
    if isinstance(model, Encoder):
        if config.adapter is not None:
            model.backbone = merge_adapter(model.backbone)
        save_encoder(model.eval(), out, base, card, interpolate)
    else:
        if config.adapter is not None:
            model.network = merge_adapter(model.network)
        save_reranker(model.eval(), out, base, card, interpolate)


def _mix_with_base(model: Encoder | Reranker, config: TrainConfig, share: float) -> None:
    """Make the trained weights of `model` (1 - share) x those that training started from + share x themselves.

    What continued training forgets comes back, at little cost to what it learnt: WiSE-FT, Wortsman et al. 2022,
    equation 1. Raises SkilltrainError for a base that lacks the reranker's head.
    """
    try:
        base = load_model(config, torch.device("cpu"), new_head=False).state_dict()
    except SkilltrainError as error:
        what = f"its base has another architecture, and cannot be interpolated with it: {error.what}"
        raise SkilltrainError(what, where=config.model.source, fix="export without --interpolate") from error
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.lerp(base[name].float(), value.float(), share))


def export_run(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    interpolate: float | None = None,
    published: Published = Published(),  # noqa: B008
    form: Form | None = None,
) -> dict[str, Any]:
    """Write the model of the training in the folder `run` to the folder `out`; says which one that was.

    `checkpoint` is step-N or best; without it a finished run's own model is copied, and an unfinished run's newest
    checkpoint is used. With `interpolate` the model lies between its base and the checkpoint (WiSE-FT). `form` is
    another than the one that training saves. Raises SkilltrainError if there is no such run or checkpoint, nothing to
    interpolate with, no such form of the model, `out` is not empty, or a report that is `published` is of another
    model.
    """
    published.check()
    config, summary = _read(run)
    if published.reports and not (summary and checkpoint is None and interpolate is None):
        what = "a report is of the model that the run ended with"
        raise SkilltrainError(what, where="--report", fix="leave out --report, or --checkpoint and --interpolate")
    if interpolate is not None:
        _check_interpolation(interpolate, config, run)
        checkpoint = checkpoint or summary.get("checkpoint")
    found = None if summary and checkpoint is None else _checkpoint(run / CHECKPOINTS, checkpoint)
    _check_free(out)
    with staged_folder(out) as staged:
        exported = None
        if found is None:
            copy_model(run, staged)
        else:
            if interpolate is not None or summary.get("checkpoint") != found.name:
                summary, exported = {}, found.name  # its figures are not the run's
            save_trained(config, found, staged, summary, exported, interpolate)
        if form is not None:
            write_form(staged, form)
        is_encoder = isinstance(config, TrainEncoderConfig)
        kind, settings = ("encoder", EncoderSettings) if is_encoder else ("reranker", RerankerSettings)
        own, recipe = settings.model_validate(stored_settings(staged, kind)), config.model_dump(mode="json")
        record = RunRecord(own, config.model.source, recipe, summary, exported, interpolate, form, run)
        write_text(staged / "README.md", model_card(record, published))
    return {"out": str(out), "stage": config.stage, "checkpoint": found.name if found else summary.get("checkpoint")}


def export_adapter(run: Path, out: Path, checkpoint: str | None = None) -> dict[str, Any]:
    """Write the adapter (LoRA) of the training in the folder `run`, not merged, to the folder `out`; see `export_run`.

    Without `checkpoint` it is that of the run's model, or of an unfinished run's newest checkpoint.
    """
    config, summary = _read(run)
    if config.adapter is None:
        raise SkilltrainError("trained all weights, no adapter", where=run, fix="export without --adapter")
    found = _checkpoint(run / CHECKPOINTS, checkpoint or summary.get("checkpoint"))
    _check_free(out)
    model = load_model(config, torch.device("cpu"))
    load_weights(model, "model", found)
    with staged_folder(out) as staged:
        save_adapter(model, staged, config.model.source)
    return {"out": str(out), "stage": config.stage, "checkpoint": found.name}


def _read(run: Path) -> tuple[TrainConfig, Mapping[str, Any]]:
    """(settings, summary) of a run; the summary is empty while the run is not finished."""
    if not (run / RUN_FILE).is_file():
        what = f"holds no run: it has no {RUN_FILE}" if run.is_dir() else "no such folder"
        raise SkilltrainError(what, where=run, fix="give the folder that a training wrote to (its out=…)")
    recipe, record = load_recipe(run / RECIPE_FILE), read_json(run / RUN_FILE)
    if (stage := recipe.get("stage")) not in _CONFIGS:
        raise SkilltrainError(f"is a run of stage {stage}, which trains no model", where=run)
    return validate(_CONFIGS[stage], recipe, run / RECIPE_FILE), record["summary"] if record["finished"] else {}


def _checkpoint(folder: Path, name: str | None) -> Path:
    """The checkpoint of that name in `folder`; the newest without a name."""
    found = {path.name: path for path in checkpoints(folder)}
    if not found:
        raise SkilltrainError("holds no checkpoint", where=folder, fix="train for longer, or lower training.save_every")
    chosen = best_checkpoint(folder) if name == "best" else found.get(name or [*found][-1])
    if chosen is None:
        what = "no checkpoint was marked as best" if name == "best" else f"no checkpoint '{name}'"
        raise SkilltrainError(f"{what}; there are {', '.join(found)}", where=folder)
    return chosen


def _check_interpolation(share: float, config: TrainConfig, run: Path) -> None:
    if not 0 <= share <= 1:
        raise SkilltrainError(f"must be a share from 0 (the base) to 1 (the trained model), found {share}",
                              where="--interpolate")  # fmt: skip
    if config.adapter is not None:
        what = "trained an adapter (LoRA), and only runs that trained all weights can be interpolated"
        raise SkilltrainError(what, where=run, fix="train without adapter, or export without --interpolate")


def _check_free(out: Path) -> None:
    if out.name in ("", ".."):
        raise SkilltrainError("is no name for an output folder", where=out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        fix = "choose another --out, or delete it"
        raise SkilltrainError("the output exists, and is no empty folder", where=out, fix=fix)
