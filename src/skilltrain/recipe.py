"""Run a recipe file (`accelerate launch recipes/x.yaml`) or a data pipeline as a program."""

import json
import re
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
    """Run a recipe file. The last line of the file calls this function.

    Args:
        module_name: The file's `__name__`. Spawned workers execute the file again under another
            name, and nothing is run then.
        file: The recipe file.
        arguments: Overrides. None: the arguments of the program.
    """
    if module_name != "__main__":
        return
    if arguments is None:
        arguments = sys.argv[1:]
    path = Path(file)
    main([_command(path), str(path), *arguments])


def _command(file: Path) -> str:
    """Return the command that runs a recipe on every rank.

    It is `train` for a faulty recipe, too. That command reports the fault.
    """
    try:
        stage = str(load_recipe(file).get("stage"))
        return stage if load_stage(stage).on_ranks else "train"
    except SkilltrainError:
        return "train"


def run_pipeline(
    settings_class: type[ConfigT],
    run: Callable[[ConfigT], Any],
    about: str | None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run a program of data_pipelines/ with settings from the command line.

    Args:
        settings_class: Class of the program's settings.
        run: The program. Its result is printed as JSON.
        about: Help text. It is printed if there are no arguments.
        arguments: Arguments of the program. None: those of the process.
    """

    def program(program_arguments: list[str]) -> None:
        """Read the settings from the arguments, run the program and print its result."""
        if not program_arguments or program_arguments == ["--help"]:
            print(about)
            return
        values = _read_values([*settings_class.model_fields], program_arguments)
        result = run(validate(settings_class, values, "the command line"))
        if result is not None:
            print(json.dumps(result, indent=1, ensure_ascii=False, default=str))

    as_program(program, arguments)


def _read_values(names: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the settings `names` in the arguments of a command.

    Arguments without `=` are the first settings. The setting `settings`, if it exists, gets all
    arguments `key=value` with other keys.
    """
    words, overrides = split_arguments(arguments)
    if len(words) > len(names):
        first_excess_word = words[len(names)]
        fix = "settings are written key=value"
        raise SkilltrainError(
            "unexpected-argument", "is a word too many", where=first_excess_word, fix=fix
        )
    values: dict[str, Any] = dict(zip(names, words, strict=False))

    if "settings" in names:
        unknown = [override for override in overrides if _first_key(override) not in names]
        overrides = [override for override in overrides if override not in unknown]
        if unknown:
            values["settings"] = unknown
    return apply_overrides(values, overrides)


def _first_key(override: str) -> str:
    """Return `section` of `section.key=value`."""
    return re.split("[.=]", override)[0]
