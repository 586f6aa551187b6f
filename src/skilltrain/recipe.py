"""Recipes: every stage's settings in one union, and the one way in which a stage runs."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from skilltrain import __version__
from skilltrain.config import Config, input_paths, load_recipe, to_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import fingerprint, read_json, write_json, write_text
from skilltrain.stages import STAGES
from skilltrain.terminal import is_main_process, say

RUN_FILE, RECIPE_FILE, CHECKPOINTS = "run.json", "recipe.yaml", "checkpoints"
# What may change between a training and its resumption, for no update of a weight depends on it.
FREE_TO_CHANGE = ("save_every", "keep_checkpoints", "stop_grad_norm", "trackers", "project")


def parse_recipe(values: dict[str, Any], where: object) -> Any:
    """The settings of the stage that `values` name. Raises SkilltrainError for an unknown stage or any other fault."""
    name = values.get("stage")
    if not isinstance(name, str) or name not in STAGES:
        found = "missing key 'stage'" if name is None else f"stage: unknown stage {name!r}"
        raise SkilltrainError(f"{found}; allowed: {', '.join(STAGES)}", where=where)
    config_class, _ = STAGES[name].load()
    return validate(config_class, values, where)


def run_recipe(config: Any, resume: bool) -> dict[str, Any]:
    """Run a stage into its `out` folder and return its summary.

    A data stage writes into a folder beside `out` that is renamed when all is done; training writes checkpoints into
    `out` itself. The resolved recipe and the fingerprints of its inputs are saved beside the output. A folder that
    already holds this very run is left as it is; one that holds another is refused.
    """
    stage, out = STAGES[config.stage], config.out
    _, function = stage.load()
    if not is_main_process():
        if stage.on_ranks:
            return function(config, out)
        if not stage.trains:
            raise SkilltrainError(
                f"the stage {config.stage} runs in one process", fix="run it without accelerate launch"
            )
        return _summary_in(out) or function(config, out, resume)
    inputs = {key: input_fingerprint(path) for key, path in paths_read(config).items()}
    identity = {"recipe": config.model_dump(mode="json", exclude={"out"}), "inputs": inputs}
    if (done := _finished_run(out, what_matters(identity), resume and stage.trains)) is not None:
        if stage.on_ranks:
            return function(config, out)
        say(f"{out}: already holds this run; nothing to do")
        return done
    record = {"skilltrain": __version__, **identity}
    return _train(config, function, record, resume) if stage.trains else _produce(config, function, record)


def _train(config: Any, function: Callable[..., dict[str, Any]], record: dict[str, Any], resume: bool) -> Any:
    """The summary of a training; its checkpoints stay, and one that fails before the first leaves nothing behind."""
    out = config.out
    is_new = not (out / RUN_FILE).is_file()
    out.mkdir(parents=True, exist_ok=True)
    _write_record(out, config, record | {"finished": False})
    try:
        summary = function(config, out, resume)
    except BaseException:
        if is_new and not any(out.glob(f"{CHECKPOINTS}/step-*")):
            shutil.rmtree(out, ignore_errors=True)
        raise
    _write_record(out, config, record | {"finished": True, "summary": summary})
    return summary


def _produce(config: Any, function: Callable[..., dict[str, Any]], record: dict[str, Any]) -> Any:
    """The summary of a data stage, whose folder appears whole or not at all."""
    partial = config.out.with_name(f".{config.out.name}.partial")
    with _alone(partial):
        try:
            summary = function(config, partial)
            _write_record(partial, config, record | {"finished": True, "summary": summary})
            partial.rename(config.out)  # takes the place of an empty folder
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return summary


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an emptied folder; the system takes it back when the process ends, however it ends.

    Raises SkilltrainError where another process holds it, or has just renamed the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(lock, folder):
            fix = "wait for it, or name another out"
            raise SkilltrainError("another process is writing this very folder", where=folder, fix=fix)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield
    finally:
        os.close(lock)


def _locked(lock: int, folder: Path) -> bool:
    """Whether the lock of the open folder is ours, and the folder still stands under its name."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return folder.is_dir() and os.path.samestat(os.fstat(lock), folder.stat())


def paths_read(config: Config) -> dict[str, Path]:
    """Key path → what the stage reads: its input paths, and the model folders that its settings name."""
    return input_paths(config) | _model_folders(config.model_dump(mode="json"))


def _model_folders(values: Any, path: str = "") -> dict[str, Path]:
    """Key path → every folder under a key `source` of settings; Hub ids and packages keep to one content by name."""
    found: dict[str, Path] = {}
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        place = f"{path}.{key}" if path else str(key)
        if key == "source" and isinstance(value, str):
            found |= {place: folder} if (folder := Path(value).expanduser()).is_dir() else {}
        else:
            found |= _model_folders(value, place)
    return found


def input_fingerprint(path: Path) -> str:
    """A SHA-256; a run's checkpoints do not count: they come and go while its model stays what it is."""
    try:
        if not (path / RUN_FILE).is_file():
            return fingerprint(path)
        parts = {part.name: fingerprint(part) for part in path.iterdir() if part.name != CHECKPOINTS}
        return sha256(repr(sorted(parts.items())).encode()).hexdigest()
    except OSError as error:
        raise SkilltrainError(f"cannot be read: {error.strerror}", where=path) from error


def _summary_in(out: Path) -> dict[str, Any] | None:
    """The summary of the finished run in `out`, which the main process leaves as it is (or refuses to touch)."""
    record = read_json(out / RUN_FILE) if (out / RUN_FILE).is_file() else None
    return record["summary"] if isinstance(record, dict) and record.get("finished") else None


def _finished_run(out: Path, identity: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The summary of the same run, if `out` holds it, finished. Raises SkilltrainError if `out` is not free."""
    if out.name in ("", ".."):
        raise SkilltrainError("is no name for an output folder", where=out, fix="give out=… a name")
    if out.exists() and not out.is_dir():
        raise SkilltrainError("is a file; the output is a folder", where=out)
    if not out.is_dir() or not any(out.iterdir()):
        if resume:
            raise SkilltrainError("holds no run to resume", where=out, fix="leave --resume out")
        return None
    fix = "choose another out=…, or delete the folder"
    found = read_json(out / RUN_FILE) if (out / RUN_FILE).is_file() else None
    if not isinstance(found, dict) or not found.keys() >= {*identity, "finished"}:
        raise SkilltrainError("the output folder is not empty and holds no run", where=out, fix=fix)
    if changed := _first_difference(what_matters({key: found[key] for key in identity}), identity):
        section, _, key = changed.partition(".")
        what = f"{key} differs" if section == "recipe" else f"the content of {key} differs"
        raise SkilltrainError(f"the output folder holds another run: {what}", where=out, fix=fix)
    if found["finished"]:
        return found["summary"]
    if not resume:
        raise SkilltrainError("holds an unfinished run", where=out, fix="add --resume, or delete the folder")
    return None


def what_matters(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run without who computes it and without the settings of a training that are free to change."""
    if not isinstance(identity["recipe"], dict):
        return identity
    recipe = {key: value for key, value in identity["recipe"].items() if key != "workers"}
    if isinstance(training := recipe.get("training"), dict):
        recipe["training"] = {key: value for key, value in training.items() if key not in FREE_TO_CHANGE}
    return identity | {"recipe": recipe}


def _first_difference(old: Any, new: Any, path: str = "") -> str:
    """The key path of the first value that differs; empty if none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        found = (_first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key)) for key in keys)
        return next(filter(None, found), "")
    return "" if old == new else path


def _write_record(folder: Path, config: Config, record: dict[str, Any]) -> None:
    write_text(folder / RECIPE_FILE, to_yaml(config))
    write_json(folder / RUN_FILE, record)


def schema_of(stages: Sequence[str]) -> dict[str, Any]:
    """The JSON Schema of a recipe of any of `stages`, for an editor."""
    schemas = [STAGES[stage].load()[0].model_json_schema() for stage in stages]
    line = {"type": "string", "description": "the line that makes the file valid Python; not a setting"}
    definitions: dict[str, Any] = {}
    for schema in schemas:
        schema["properties"] = {"recipe": line} | schema["properties"]
        definitions |= schema.pop("$defs", {})
    any_of = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **any_of, "$defs": definitions}


@dataclass(frozen=True)
class Listed:
    """One recipe of a folder, in the words of `skilltrain recipes`; base and loss are empty where there is none."""

    path: Path
    stage: str
    base: str
    loss: str
    about: str


def list_recipes(folder: Path) -> list[Listed]:
    """The recipes below `folder`, those of the folder itself first. Raises SkilltrainError where there is none."""
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    found = [listed for file in files if (listed := _listed(file)) is not None]
    if not found:
        what = "holds no recipe" if folder.is_dir() else "no such folder"
        fix = "recipes come with the repository, not with the installed package: clone it, or give --dir"
        raise SkilltrainError(what, where=folder, fix=fix)
    return found


def _listed(file: Path) -> Listed | None:
    """What a file says of itself; None if it is no recipe."""
    try:
        values = load_recipe(file)
    except SkilltrainError as error:
        say(f"not listed: {error}")
        return None
    stage = values.get("stage")
    if not isinstance(stage, str) or stage not in STAGES:
        return None
    model, loss = ("", "")
    if STAGES[stage].trains:
        config = parse_recipe(values, file)
        model, loss = config.model.source, config.loss.name
    comments = (line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return Listed(file, stage, model, loss, next(comments, ""))


def dry_run(config: Any) -> dict[str, Any]:
    """Print the resolved recipe; what the stage would do with it, found by one process that writes nothing."""
    if not is_main_process():
        return {}
    say(to_yaml(config))
    for path in input_paths(config).values():
        if not path.exists():
            raise SkilltrainError("no such file or folder", where=path)
    return STAGES[config.stage].load_plan()(config)


def run(module_name: str, file: str, arguments: Sequence[str] | None = None) -> None:
    """What a recipe's last line calls, so that `accelerate launch recipes/x.yaml` trains it.

    Returns at once unless the file is run as a program: spawned workers execute it again.
    """
    if module_name != "__main__":
        return
    from skilltrain.cli import main

    main([_command(Path(file)), str(Path(file)), *(sys.argv[1:] if arguments is None else arguments)])


def _command(file: Path) -> str:
    """The command that runs a recipe; what is wrong with a recipe that names no stage, `train` will say."""
    try:
        stage = load_recipe(file).get("stage")
    except SkilltrainError:
        return "train"
    return stage if isinstance(stage, str) and stage in STAGES and STAGES[stage].on_ranks else "train"
