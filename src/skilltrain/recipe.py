"""The entrance of a recipe that is run as a program: `accelerate launch recipes/x.yaml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from skilltrain.cli import main
from skilltrain.config import load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.stages import STAGES


def run(module_name: str, file: str, arguments: Sequence[str] | None = None) -> None:
    """What a recipe's last line calls. Returns at once unless the file is run as a program.

    Spawned workers execute the file again, under another module name.
    """
    if module_name == "__main__":
        main([_command(Path(file)), str(Path(file)), *(sys.argv[1:] if arguments is None else arguments)])


def _command(file: Path) -> str:
    """The command that runs a recipe; what is wrong with a recipe that names no stage, `train` will say."""
    try:
        stage = load_recipe(file).get("stage")
    except SkilltrainError:
        return "train"
    return stage if isinstance(stage, str) and stage in STAGES and STAGES[stage].on_ranks else "train"
