"""Run stages: check the output folder and the inputs, run the stage, and write the record.

Only training runs can be unfinished. The output of any other stage appears whole or not at all.

Notes:
    - A stage with `on_ranks` is run by every process, and writes its results outside the folder. It
      is run again even if its folder holds the finished run, and writes the results that are
      missing.
    - A stage with `in_place` updates its folder. It is always run, and has no record.
    - The commit of the checkout is read before a run, because it may change during the run.
    - Other processes do not check that the settings of a finished run have not changed. The main
      process does.
    - A training run that fails before its first checkpoint leaves no folder behind.
    - An unfinished run has no summary in its record.
    - The record is written before the recipe, because a folder without a record holds no run.
    - A run.json of another program counts as no record.
    - Of a run's output, checkpoints and provenance have no influence on the fingerprint.
    - The keys of a map of inputs are the paths. A model is named by a folder, a Hub id or a
      package, and only a folder is an input.
"""

import shutil
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from skilltrain.config import Config, InputMark, to_yaml
from skilltrain.errors import SkilltrainError, TerminationError
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

RUN_FILE = "run.json"
RECIPE_FILE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
# Settings that may change when a training run is resumed, because no weight depends on them.
FREE_TO_CHANGE = ("save_every", "keep_checkpoints", "stop_grad_norm", "trackers")
# Command that makes an input, by the input's setting. An error quotes it between back quotes. The
# comment at the top of a recipe may give another command.
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

    The resolved recipe and a record of the run are written into the folder too. A folder that
    already holds the same finished run is left as it is.

    Args:
        stage: The stage.
        resume: Whether to resume an unfinished training run. None: resume if there is one.

    Raises:
        SkilltrainError: An input is missing, or the folder holds something else.
    """
    out = stage.out
    if resume is None:
        resume = run_state(out) == "begun"
    # In a distributed run, only the main process checks the folder and writes the record.
    if not is_main_process():
        return _run_on_other_rank(stage, resume)
    check_inputs(stage)
    _check_output_path(stage)
    with _cleanup_at_sigterm():
        return _run_on_main_rank(stage, resume)


def _run_on_main_rank(stage: Stage, resume: bool) -> Summary:
    """Run a stage in the main process, unless its folder holds the finished run."""
    out = stage.out
    if stage.in_place:
        return stage.run(out)

    identity = _identity(stage)
    is_training = isinstance(stage, TrainingStage)
    if is_training:
        # A killed training run may have left temporary files.
        remove_leftovers(out)
    summary = _finished_run(out, comparable_identity(identity), is_training and resume)
    if summary is None:
        return _run_and_record(stage, identity, resume)
    # A stage with `on_ranks` has its results in another folder, and writes missing results.
    if stage.on_ranks:
        return stage.run(out)
    say(f"{out}: already holds this run; nothing to do (to run it again, delete the folder)")
    return summary


@contextmanager
def _cleanup_at_sigterm() -> Iterator[None]:
    """Exit at SIGTERM as after an error, so that temporary files are removed."""
    # Only the main thread may handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_process(number: int, _: object) -> None:
        """Raise the exit with the code that shells give to a process that a signal has ended."""
        raise TerminationError(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, exit_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def check_output(stage: Stage) -> None:
    """Raise SkilltrainError if the output folder holds something else, or is inside the skills."""
    _check_output_path(stage)
    _finished_run(stage.out, comparable_identity(_identity(stage)), resume=False)


def _identity(stage: Stage) -> dict[str, Any]:
    """Return the recipe of a stage, and the fingerprints of its inputs and plug-ins."""
    paths = input_paths(stage)
    return {
        "recipe": stage.model_dump(mode="json", exclude={"out"}),
        "inputs": {key: input_fingerprint(path) for key, path in paths.items()},
        "plugins": plugin_fingerprints(stage),
    }


def _run_and_record(stage: Stage, identity: dict[str, Any], resume: bool) -> Summary:
    """Run a stage, and write the record of the run into its folder.

    Args:
        stage: The stage.
        identity: Recipe, inputs and plug-ins of the run.
        resume: Whether a training run continues from its newest checkpoint.
    """
    # Read the commit now, because the checkout may change during the run. The value is cached, and
    # `_write_record` uses it.
    checkout_commit()
    record = {"format": RUN.number, **identity}
    if isinstance(stage, TrainingStage):
        return _train(stage, record, resume)
    # The folder gets its final name only if the stage succeeds.
    with staged_folder(stage.out) as staged:
        summary = stage.run(staged)
        _write_record(staged, stage, record | {"finished": True, "summary": summary})
    return summary


def _run_on_other_rank(stage: Stage, resume: bool) -> Summary:
    """Run a stage in a process that is not the main one, and write no record.

    Args:
        stage: The stage.
        resume: Whether a training run continues from its newest checkpoint.

    Raises:
        SkilltrainError: The stage runs in the main process only.
    """
    # Every process runs a stage with `on_ranks`. The stage trains nothing, so it cannot resume.
    if stage.on_ranks:
        return stage.run(stage.out)
    if not isinstance(stage, TrainingStage):
        raise SkilltrainError(
            "one-process",
            f"the stage {stage.stage} runs in one process",
            fix="run it without accelerate launch",
        )
    # A finished run is not run again. The main process checks that its settings are the same.
    record = record_of(stage.out)
    if record.get("finished"):
        return record["summary"]
    return stage.run(stage.out, resume)


def _train(stage: TrainingStage, record: dict[str, Any], resume: bool) -> Summary:
    """Train in the output folder, and write the record before and after the training.

    If a new run fails before its first checkpoint, its folder is deleted.

    Args:
        stage: The stage.
        record: Record of the run, without `finished` and `summary`.
        resume: Whether to continue from the newest checkpoint.
    """
    out = stage.out
    with locked(out):
        # A folder without a record holds no run yet.
        is_new = not (out / RUN_FILE).is_file()
        try:
            out.mkdir(parents=True, exist_ok=True)
            # With this record, a run that is stopped can be found and resumed.
            _write_record(out, stage, record | {"finished": False})
            summary = stage.run(out, resume)
        except BaseException:
            # Without a checkpoint there is nothing to resume.
            if is_new and not any(out.glob(f"{CHECKPOINTS}/step-*[0-9]")):
                shutil.rmtree(out, ignore_errors=True)
            raise
        _write_record(out, stage, record | {"finished": True, "summary": summary})
    return summary


def dry_run(stage: Stage) -> Summary:
    """Print the resolved recipe and return what the stage would do; {} in other processes.

    All processes of a launched training run measure together.
    """
    say(to_yaml(stage))
    check_inputs(stage)
    summary = stage.dry_run()
    return summary if is_main_process() else {}


class _Record(BaseModel):
    """Types of the values in a run's record."""

    recipe: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    finished: bool = False
    summary: dict[str, Any] = {}


def record_of(folder: Path) -> dict[str, Any]:
    """Return the record that `run_stage` wrote in `folder`. Empty: the folder holds no run.

    A run.json that another program wrote counts as no record.
    """
    file = folder / RUN_FILE
    if not file.is_file():
        return {}
    record = read_json(file)
    try:
        _Record.model_validate(record)
    except ValidationError:
        return {}
    for key in ("recipe", "summary"):  # an unfinished run has no summary
        record.setdefault(key, {})
    return record


def run_state(folder: Path) -> Literal["done", "begun", "to run"]:
    """Return the state of the run in `folder`. Only a training run can be `begun`."""
    record = record_of(folder)
    if not record:
        return "to run"
    return "done" if record.get("finished") else "begun"


def input_fingerprint(path: Path) -> str:
    """Return a SHA-256 of the files of an input.

    If the input is the output of a run, its checkpoints, its absolute paths and its provenance do
    not count.

    Raises:
        SkilltrainError: A file or folder is missing or cannot be read.
    """
    try:
        # The path is a file, or a folder that no run has written.
        if not (path / RUN_FILE).is_file():
            return fingerprint(path)
        fingerprints = {
            entry.name: fingerprint(entry)
            for entry in path.iterdir()
            if entry.name not in (CHECKPOINTS, LOCAL_FILE, RUN_FILE)
        }
        # The record without its provenance: facts about the code and the machine.
        fingerprints[RUN_FILE] = repr(record_of(path) | {"provenance": None})
        return sha256(repr(sorted(fingerprints.items())).encode()).hexdigest()
    except OSError as error:
        raise SkilltrainError(
            "unreadable-file", f"cannot be read: {error.strerror}", where=path
        ) from error


def input_paths(config: Config) -> dict[str, Path]:
    """Return the files and folders that a stage reads, by the key of their setting.

    A setting is an input if its type is marked, such as `InputPath`. A key such as `encoder.source`
    leads into a section, and `sources.0` into a list.

    Args:
        config: Settings of a stage, or of a section of its recipe.
    """
    paths = {}
    unused = config.unused_settings()
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        # Each item of a list has a key of its own: `sources.0`, `sources.1`.
        items = {name: value}
        if isinstance(value, list | tuple | dict):
            items = {f"{name}.{number}": item for number, item in enumerate(value)}
        for key, item in items.items():
            if key in unused:
                continue  # this run does not read it
            if isinstance(item, Config):
                for inner_key, path in input_paths(item).items():
                    paths[f"{key}.{inner_key}"] = path
            elif is_input(field) and isinstance(item, Path):
                paths[key] = item
            elif is_input(field) and isinstance(item, str):
                # A model is named by a folder, a Hub id or a package. Only a folder is an input.
                folder = Path(item).expanduser()
                if folder.is_dir():
                    paths[key] = folder
    return paths


def is_input(field: FieldInfo) -> bool:
    """Return whether a setting names something that the stage reads."""
    return any(map(_holds_input_mark, (field.annotation, *field.metadata)))


def _holds_input_mark(annotation: Any) -> bool:
    """Return whether an annotation is an InputMark or has one among its arguments."""
    return isinstance(annotation, InputMark) or any(map(_holds_input_mark, get_args(annotation)))


def check_inputs(config: Config, pending: Collection[Path] = ()) -> None:
    """Raise SkilltrainError for the first missing input, with a hint on how to make it.

    Args:
        config: Settings of a stage.
        pending: Output folders of runs that come before this stage. They will make the inputs
            inside these folders.
    """
    for key, path in input_paths(config).items():
        is_pending = any(map(path.is_relative_to, pending))
        if is_pending or path.exists():
            continue
        # The last part of a key such as `data.lists` tells what kind of input is missing.
        _, _, setting = key.rpartition(".")
        fix = f"it is the setting {key}"
        if setting in _MADE_BY:
            command = _MADE_BY[setting]
            fix = f"made by `skilltrain {command}`, or as the recipe's first lines say"
        raise SkilltrainError("not-found", "no such file or folder", where=path, fix=fix)


def _check_output_path(stage: Stage) -> None:
    """Check that a stage does not write where it reads.

    Raises:
        SkilltrainError: The output is inside a folder of skills, or an input is inside the
            temporary folder.
    """
    out = stage.out
    # A stage writes into this temporary folder, which is renamed to `out` at the end.
    staging = staging_path(out).resolve()
    for key, path in input_paths(stage).items():
        # The next run would read the output of this run as skills.
        if key.startswith("sources.") and out.resolve().is_relative_to(path.resolve()):
            problem = f"is inside {path}, from which the command reads skills"
            raise SkilltrainError(
                "overwrites-input", problem, where=out, fix="name a folder outside"
            )
        if path.resolve().is_relative_to(staging):
            raise SkilltrainError(
                "overwrites-input",
                f"lies where the stage writes before it names the folder {out.name}",
                where=path,
            )


def _finished_run(out: Path, identity: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """Return the summary of the run in `out` if it is finished. None: the stage has to run.

    Args:
        out: Output folder of the stage.
        identity: The parts of the record that must be equal in both runs, by their key.
        resume: Whether an unfinished run in `out` may be resumed.

    Raises:
        SkilltrainError: `out` is a file or holds something else, or `resume` does not fit its run.
    """
    is_folder = out.is_dir()
    if out.exists() and not is_folder:
        raise SkilltrainError("output-exists", "is a file; the output is a folder", where=out)
    if not is_folder or not any(out.iterdir()):
        if resume:
            raise SkilltrainError(
                "no-run", "holds no run to resume", where=out, fix="leave --resume out"
            )
        return None

    # Check that the folder holds the same run.
    record = record_of(out)
    if "finished" not in record:
        raise SkilltrainError(
            "output-exists",
            "the output folder is not empty and holds no run",
            where=out,
            fix=_ANOTHER_FOLDER,
        )
    RUN.check(record, out, "delete the folder, and give the same command again")
    old_identity = comparable_identity({key: record.get(key) for key in identity})
    difference = _first_difference(old_identity, identity)
    if difference:
        section, _, key = difference.partition(".")
        subject = f"the source of the plug-in {key}"
        if section == "recipe":
            subject = key
        elif section == "inputs":
            subject = f"the content of {key}"
        raise SkilltrainError(
            "other-run",
            f"the output folder holds another run: {subject} differs",
            where=out,
            fix=_ANOTHER_FOLDER,
        )

    if record["finished"]:
        return record["summary"]
    if not resume:
        with locked(out):  # raises an error of its own if a process still writes the run
            raise SkilltrainError(
                "unfinished-run",
                "holds an unfinished run",
                where=out,
                fix="add --resume, or delete the folder",
            )
    return None


def comparable_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a run without the settings that do not change its results.

    These settings are `workers`, and the names in FREE_TO_CHANGE in the section `training`.

    Args:
        identity: Parts of a run's record by their key. One of them is `recipe`.
    """
    if not isinstance(identity["recipe"], dict):
        return identity
    recipe = {key: value for key, value in identity["recipe"].items() if key != "workers"}
    training = recipe.get("training")
    if isinstance(training, dict):
        recipe["training"] = {
            key: value for key, value in training.items() if key not in FREE_TO_CHANGE
        }
    return identity | {"recipe": recipe}


def _first_difference(old: Any, new: Any, path: str = "") -> str:
    """Return the path of the first value that differs in two nested dicts.

    For example, {"recipe": {"seed": 1}} and {"recipe": {"seed": 2}} differ in `recipe.seed`.

    Args:
        old: A value of one run's identity.
        new: The same value of the other run.
        path: Path of both values.

    Returns:
        The path, or "" if all values are equal.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return "" if old == new else path
    # The union has the keys of both dicts. A missing key counts as None.
    for key in new | old:
        key_path = f"{path}.{key}" if path else str(key)
        difference = _first_difference(old.get(key), new.get(key), key_path)
        if difference:
            return difference
    return ""


def _write_record(folder: Path, config: Config, record: dict[str, Any]) -> None:
    """Write the record and the recipe of a run."""
    # The record comes first, because a folder without a record holds no run.
    write_json(folder / RUN_FILE, record | {"provenance": provenance_of(config)})
    write_text(folder / RECIPE_FILE, to_yaml(config))
