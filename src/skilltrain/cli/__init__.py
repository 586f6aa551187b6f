"""The command line: `skilltrain STAGE [RECIPE] [key=value …]`; commands that evaluate, route, compare and export."""

import atexit
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from skilltrain.cli import evaluation, routing, serving, stages, tables
from skilltrain.cli.app import app
from skilltrain.errors import SkilltrainError, StoppedError, reason_of
from skilltrain.terminal import print_line
from skilltrain.texts import one_line

__all__ = ["app", "evaluation", "main", "routing", "serving", "stages", "tables"]
_FAULT, _INTERRUPTED, _SIGNALS = 2, 130, 128
_STOPPED = "interrupted; what was finished is kept"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Every fault is one line on stderr and exit code 2, a traceback only with --debug.

    Ctrl-C ends it with 130, SIGTERM in a training with 143.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack letters of a skill
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    command = typer.main.get_command(app)
    code: Any = 0
    try:
        kept = [argument for argument in given if argument != "--debug"]
        code = command.main(kept or ["--help"], prog_name="skilltrain", standalone_mode=False) or 0
    except typer.TyperException as error:  # a fault in the command line itself
        code = _fail(f"{error.format_message().rstrip('.')} (see skilltrain --help)")
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(_STOPPED, _INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        code = _fail(_in_words(error), _SIGNALS + error.number if isinstance(error, StoppedError) else _FAULT)
    else:
        if code == _INTERRUPTED:  # what typer makes of Ctrl-C
            _fail(_STOPPED, _INTERRUPTED)
    _exit(code)


def _in_words(error: Exception) -> str:
    """What to tell a person; of an error that is none of ours, its kind and how to see where it comes from."""
    if isinstance(error, SkilltrainError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {reason_of(error)}" if error.filename else reason_of(error)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # Path.expanduser's
        return "there is no home folder, which ~ stands for (set HOME)"
    return f"{type(error).__name__}: {error} (unexpected: add --debug to see where it happened)"


def _fail(message: str, code: int = _FAULT) -> int:
    print_line(f"error: {one_line(message)}", style="bold red")
    return code


def _exit(code: int) -> None:
    """End the process if `code` says that it failed, or if it is one of several ranks.

    A rank leaves without the interpreter's own end: gloo's threads may still let go of a tensor then, which aborts the
    process (exit code -6) after all its work was done, and the launcher takes the whole run for failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)
