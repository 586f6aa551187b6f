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

    A recipe file is YAML, and a Python program as well, so that `accelerate launch` can run it.

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
    """Return the command that runs a recipe on every rank (process of a distributed run).

    A stage that every rank runs has a command of its own, with the name of the stage. For any other
    stage and for a faulty recipe, the command is `train`, which reports the fault.
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

    The result of `run` is printed as JSON. An error is printed in one line.

    Args:
        settings_class: Class of the program's settings. An argument without `=` sets the first
            setting, a second one the second setting, and so on. If the class has a field
            `settings`, this field gets all arguments `key=value` with unknown keys, as texts.
        run: The program.
        about: Help text. It is printed if there are no arguments.
        arguments: Arguments of the program. None: those of the process.
    """

    def program(program_arguments: list[str]) -> None:
        """Read the settings from the arguments, run the program and print its result."""
        if not program_arguments or program_arguments == ["--help"]:
            print(about)
            return
        # `words` are the arguments without `=`. They set the first settings in order.
        words, overrides = split_arguments(program_arguments)
        names = [*settings_class.model_fields]
        if len(words) > len(names):
            # The error begins with the word: `WORD: is a word too many`.
            raise SkilltrainError(
                "unexpected-argument",
                "is a word too many",
                where=words[len(names)],
                fix="settings are written key=value",
            )
        values: dict[str, Any] = dict(zip(names, words, strict=False))

        # If there is a field `settings`, give it the overrides with an unknown key.
        if "settings" in names:
            known_overrides = []
            unknown_overrides = []
            for override in overrides:
                first_key = re.split("[.=]", override)[0]  # `section` of `section.key=value`
                if first_key in names:
                    known_overrides.append(override)
                else:
                    unknown_overrides.append(override)
            if unknown_overrides:
                values["settings"] = unknown_overrides
            overrides = known_overrides

        values = apply_overrides(values, overrides)
        result = run(validate(settings_class, values, "the command line"))
        if result is not None:
            print(json.dumps(result, indent=1, ensure_ascii=False, default=str))

    as_program(program, arguments)
