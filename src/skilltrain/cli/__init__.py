"""The command line: `skilltrain STAGE [RECIPE] [key=value …]`, and shortcuts for evaluating and routing."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from skilltrain import __version__
from skilltrain.cli import ablation, evaluation, routing, stages
from skilltrain.cli.app import app
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import console

__all__ = ["ablation", "app", "evaluation", "main", "routing", "stages"]
_INTERRUPTED = 130


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's fault is one line on stderr and exit code 2, a traceback only with --debug.

    Ctrl-C ends it with 130.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    command = typer.main.get_command(app)
    code: Any = 0
    try:
        kept = [argument for argument in given if argument != "--debug"]
        code = command.main(kept or ["--help"], prog_name="skilltrain", standalone_mode=False)
    except (SkilltrainError, OSError) as error:
        if debug:
            raise
        _fail(str(error))
    except typer.TyperException as error:  # a fault in the command line itself
        _fail(f"{error.format_message()} (see skilltrain --help)")
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # what typer makes of Ctrl-C
        _fail("interrupted; what was finished is kept", _INTERRUPTED)
    if code:
        sys.exit(code)


def _fail(message: str, code: int = 2) -> NoReturn:
    line = " ".join(message.splitlines())
    console.print(f"error: {line}", style="bold red", markup=False, emoji=False, soft_wrap=True)
    sys.exit(code)
