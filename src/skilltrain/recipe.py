"""The entrance of a recipe that is run as a program, `accelerate launch recipes/x.yaml`, and of data pipelines."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skilltrain.cli import as_program, main
from skilltrain.cli.app import split_arguments
from skilltrain.config import ConfigT, apply_overrides, load_recipe, validate
from skilltrain.errors import SkilltrainError
from skilltrain.stage import load_stage


def run(module_name: str, file: str, arguments: Sequence[str] | None = None) -> None:
    """What a recipe's last line calls. Returns at once unless the file is run as a program.

    Spawned workers execute the file again, under another module name.
    """
    if module_name == "__main__":
        main(
            [
                _command(Path(file)),
                str(Path(file)),
                *(sys.argv[1:] if arguments is None else arguments),
            ]
        )


def _command(file: Path) -> str:
    """Return the command that runs a recipe on every rank. What is wrong with a recipe, `train` will say."""
    try:
        stage = str(load_recipe(file).get("stage"))
        return stage if load_stage(stage).on_ranks else "train"
    except SkilltrainError:
        return "train"


def run_pipeline(
    pipeline: type[ConfigT],
    run: Callable[[ConfigT], Any],
    about: str | None,
    arguments: Sequence[str] | None = None,
) -> None:
    """What the last line of a program of data_pipelines/ calls: the command line as its settings, faults in one line.

    Words are the settings in their order, `key=value` is any of them; what is none of them goes into the list
    `settings`, where the pipeline has one. What `run` returns is printed as JSON. Without arguments, prints `about`.
    """

    def program(given: list[str]) -> None:
        if not given or given == ["--help"]:
            print(about)
            return
        words, settings = split_arguments(given)
        names = [*pipeline.model_fields]
        if len(words) > len(names):
            raise SkilltrainError(
                "unexpected-argument",
                "is a word too many",
                where=words[len(names)],
                fix="settings are written key=value",
            )
        others = [
            one
            for one in settings
            if "settings" in names and one.partition("=")[0].split(".")[0] not in names
        ]
        named: dict[str, Any] = dict(zip(names, words, strict=False)) | (
            {"settings": others} if others else {}
        )
        values = apply_overrides(named, [one for one in settings if one not in others])
        found = run(validate(pipeline, values, "the command line"))
        if found is not None:
            print(json.dumps(found, indent=1, ensure_ascii=False, default=str))

    as_program(program, arguments)
