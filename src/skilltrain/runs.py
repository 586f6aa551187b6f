"""What a run is: its folder, its record, and how a stage is run so that a folder never holds half of one."""

import shutil
from collections.abc import Collection, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from skilltrain.config import Config, InputMark, to_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.files import (
    LOCAL_FILE,
    fingerprint,
    locked,
    read_json,
    remove_leftovers,
    staged_folder,
    staging_path,
    write_json,
    write_text,
)
from skilltrain.formats import RUN
from skilltrain.provenance import checkout_commit, plugin_fingerprints, provenance_of
from skilltrain.stage import Stage, Summary, TrainingStage
from skilltrain.terminal import is_main_process, say

RUN_FILE, RECIPE_FILE, CHECKPOINTS = "run.json", "recipe.yaml", "checkpoints"
# What may change between a training and its resumption, because no update of a weight depends on it.
FREE_TO_CHANGE = ("save_every", "keep_checkpoints", "stop_grad_norm", "trackers")
_MADE_BY = {
    "pool": "pool",
    "queries": "queries` or `skilltrain synthesize",
    "rankings": "mine`, `skilltrain filter` or `skilltrain candidates",
    "lists": "lists",
    "clusters": "clusters",
}
_ANOTHER_FOLDER = "choose another out=…, or delete the folder"


def run_stage(stage: Stage, resume: bool | None = False) -> Summary:
    """Run a stage into its folder `out` and return its summary.

    The resolved recipe and the fingerprints of the inputs are kept beside the output. A folder that already holds this
    very run is left as it is; one that holds another is refused.

    Args:
        resume: Whether an unfinished training run goes on. None: if there is one.
    """
    out = stage.out
    if resume is None:
        resume = run_state(out) == "begun"
    if not is_main_process():
        return _run_on_other_rank(stage, resume)
    check_inputs(stage)
    if stage.in_place:
        return stage.run(out)
    read = input_paths(stage)
    _check_place(out, read.values())
    inputs = {key: input_fingerprint(path) for key, path in read.items()}
    identity = {"recipe": stage.model_dump(mode="json", exclude={"out"}), "inputs": inputs}
    identity["plugins"] = plugin_fingerprints(stage)
    trains = isinstance(stage, TrainingStage)
    if trains:
        remove_leftovers(out)
    summary = _finished_run(out, what_matters(identity), resume and trains)
    if summary is not None:
        if stage.on_ranks:
            return stage.run(out)
        say(f"{out}: already holds this run; nothing to do (to run it again, delete the folder)")
        return summary
    checkout_commit()  # of the code that runs; it may change until the record is written
    record = {"format": RUN.number, **identity}
    if isinstance(stage, TrainingStage):
        return _train(stage, record, resume)
    with staged_folder(out) as staged:
        summary = stage.run(staged)
        _write_record(staged, stage, record | {"finished": True, "summary": summary})
    return summary


def _run_on_other_rank(stage: Stage, resume: bool) -> Summary:
    if stage.on_ranks:
        return stage.run(stage.out)
    if not isinstance(stage, TrainingStage):
        raise SkilltrainError(
            "one-process",
            f"the stage {stage.stage} runs in one process",
            fix="run it without accelerate launch",
        )
    # The main process leaves a finished run as it is, or refuses it.
    record = record_of(stage.out)
    return record["summary"] if record.get("finished") else stage.run(stage.out, resume)


def _train(stage: TrainingStage, record: dict[str, Any], resume: bool) -> Summary:
    """Train, and keep the checkpoints. A run that fails before its first checkpoint leaves nothing behind."""
    out = stage.out
    with locked(out):
        is_new = not (out / RUN_FILE).is_file()
        try:
            out.mkdir(parents=True, exist_ok=True)
            _write_record(out, stage, record | {"finished": False})
            summary = stage.run(out, resume)
        except BaseException:
            if is_new and not any(out.glob(f"{CHECKPOINTS}/step-*[0-9]")):
                shutil.rmtree(out, ignore_errors=True)
            raise
        _write_record(out, stage, record | {"finished": True, "summary": summary})
    return summary


def dry_run(stage: Stage) -> Summary:
    """Print the resolved recipe, and return what the stage would do with it. One process does so and writes nothing."""
    if not is_main_process():
        return {}
    say(to_yaml(stage))
    check_inputs(stage)
    return stage.dry_run()


def record_of(folder: Path) -> dict[str, Any]:
    """What the run in `folder` says of itself (recipe, inputs, finished, summary); empty where none has left a word."""
    found = read_json(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    return found if isinstance(found, dict) else {}


def run_state(folder: Path) -> Literal["done", "begun", "to run"]:
    """How far the run in `folder` is; `begun` only for a training: other runs appear whole or not at all."""
    record = record_of(folder)
    return "to run" if not record else "done" if record.get("finished") else "begun"


def input_fingerprint(path: Path) -> str:
    """A SHA-256; a run's checkpoints and where it was computed do not count: its results stay what they are."""
    try:
        if not (path / RUN_FILE).is_file():
            return fingerprint(path)
        parts = {
            part.name: fingerprint(part)
            for part in path.iterdir()
            if part.name not in (CHECKPOINTS, LOCAL_FILE, RUN_FILE)
        }
        parts[RUN_FILE] = repr(record_of(path) | {"provenance": None})
        return sha256(repr(sorted(parts.items())).encode()).hexdigest()
    except OSError as error:
        raise SkilltrainError(
            "unreadable-file", f"cannot be read: {error.strerror}", where=path
        ) from error


def input_paths(config: BaseModel) -> dict[str, Path]:
    """Key → path of every set field annotated `InputPath`, or a list or map of them, and of each model's folder.

    Sections and lists are included.
    """
    found: dict[str, Path] = {}
    for name, field in type(config).model_fields.items():
        reads = is_input(field)
        value = getattr(config, name)
        is_several = isinstance(value, list | tuple) or (reads and isinstance(value, dict))
        items = enumerate(value) if is_several else [(None, value)]
        for number, item in items:
            place = name if number is None else f"{name}.{number}"
            if isinstance(item, BaseModel):
                found |= {f"{place}.{key}": path for key, path in input_paths(item).items()}
            elif reads and isinstance(item, Path):
                found[place] = item
            elif reads and isinstance(item, str) and (folder := Path(item).expanduser()).is_dir():
                found[place] = folder
    return found


def is_input(field: FieldInfo) -> bool:
    """Return whether a setting names something that the stage reads."""
    return any(map(_is_marked, (field.annotation, *field.metadata)))


def _is_marked(part: Any) -> bool:
    """Whether a part of a setting's type, or one within it, is an InputMark."""
    return isinstance(part, InputMark) or any(map(_is_marked, get_args(part)))


def check_inputs(config: BaseModel, pending: Collection[Path] = ()) -> None:
    """Raise SkilltrainError for the first input path that is not there, with the command that makes such a thing.

    Paths inside the folders of `pending` runs need not be there yet.
    """
    for key, path in input_paths(config).items():
        if not path.exists() and not any(map(path.is_relative_to, pending)):
            maker = _MADE_BY.get(key.rpartition(".")[2])
            fix = (
                f"made by `skilltrain {maker}`, or as the recipe's first lines say" if maker else ""
            )
            raise SkilltrainError("not-found", "no such file or folder", where=path, fix=fix)


def _check_place(out: Path, read: Iterable[Path]) -> None:
    """Raise SkilltrainError for an `out` without a name, and for an input that the stage would empty first."""
    if out.name in ("", ".."):
        raise SkilltrainError(
            "invalid-output-name",
            "is no name for an output folder",
            where=out,
            fix="give out=… a name",
        )
    staged = staging_path(out).resolve()
    if emptied := [path for path in read if path.resolve().is_relative_to(staged)]:
        raise SkilltrainError(
            "overwrites-input",
            f"lies where the stage writes before it names the folder {out.name}",
            where=emptied[0],
        )


def _finished_run(out: Path, identity: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The summary of the same run, if `out` holds it, finished. Raises SkilltrainError if `out` is not free."""
    if out.exists() and not out.is_dir():
        raise SkilltrainError("output-exists", "is a file; the output is a folder", where=out)
    if not out.is_dir() or not any(out.iterdir()):
        if resume:
            raise SkilltrainError(
                "no-run", "holds no run to resume", where=out, fix="leave --resume out"
            )
        return None
    found = record_of(out)
    if "finished" not in found:
        raise SkilltrainError(
            "output-exists",
            "the output folder is not empty and holds no run",
            where=out,
            fix=_ANOTHER_FOLDER,
        )
    RUN.check(found, out, "delete the folder, and give the same command again")
    if changed := _first_difference(
        what_matters({key: found.get(key) for key in identity}), identity
    ):
        section, _, key = changed.partition(".")
        nouns = {"recipe": key, "inputs": f"the content of {key}"}
        what = f"{nouns.get(section, f'the source of the plug-in {key}')} differs"
        raise SkilltrainError(
            "other-run",
            f"the output folder holds another run: {what}",
            where=out,
            fix=_ANOTHER_FOLDER,
        )
    if found["finished"]:
        return found["summary"]
    if not resume:
        raise SkilltrainError(
            "unfinished-run",
            "holds an unfinished run",
            where=out,
            fix="add --resume, or delete the folder",
        )
    return None


def what_matters(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run without who computes it and without the settings of a training that are free to change."""
    if not isinstance(identity["recipe"], dict):
        return identity
    recipe = {key: value for key, value in identity["recipe"].items() if key != "workers"}
    if isinstance(training := recipe.get("training"), dict):
        recipe["training"] = {
            key: value for key, value in training.items() if key not in FREE_TO_CHANGE
        }
    return identity | {"recipe": recipe}


def _first_difference(old: Any, new: Any, path: str = "") -> str:
    """The key path of the first value that differs; empty if none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        found = (
            _first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            for key in keys
        )
        return next(filter(None, found), "")
    return "" if old == new else path


def _write_record(folder: Path, config: Config, record: dict[str, Any]) -> None:
    """Write run.json first: a folder that a kill leaves without it would be taken for somebody else's."""
    write_json(folder / RUN_FILE, record | {"provenance": provenance_of(config)})
    write_text(folder / RECIPE_FILE, to_yaml(config))
