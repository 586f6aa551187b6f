"""The command line: `skilltrain STAGE [RECIPE] [key=value …]`; commands that evaluate, route, compare and export."""

import atexit
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from skilltrain.cli import evaluation, papers, publishing, routing, stages
from skilltrain.cli.app import app
from skilltrain.config import removed_advice
from skilltrain.errors import SkilltrainError, StoppedError, reason_of
from skilltrain.terminal import launched_ranks, print_line
from skilltrain.texts import one_line

__all__ = ["app", "as_program", "evaluation", "main", "papers", "publishing", "routing", "stages"]
_FAULT, _INTERRUPTED, _SIGNALS = 2, 130, 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line as a program (`as_program`)."""

    def program(given: list[str]) -> Any:
        given = given or ["--help"]
        if ":" in given[0]:
            stages.add_stage(given[0])
        command = typer.main.get_command(app)
        return command.main(given, prog_name="skilltrain", standalone_mode=False)

    as_program(program, arguments)


def as_program(run: Callable[[list[str]], Any], arguments: Sequence[str] | None = None) -> None:
    """Run a program with its arguments. Every fault is one line on stderr and exit code 2, a traceback with --debug.

    Ctrl-C ends it with 130, SIGTERM in a training with 143.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack letters of a skill
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    code: Any = 0
    try:
        code = run([argument for argument in given if argument != "--debug"]) or 0
        if code == _INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except (KeyboardInterrupt, Exception) as error:
        if "--debug" in given and not isinstance(
            error, KeyboardInterrupt | typer.TyperException | typer.Abort
        ):
            raise
        message, code = _in_words(error)
        print_line(f"error: {one_line(message)}", style="bold red")
    _exit(code)


def _in_words(error: BaseException) -> tuple[str, int]:
    """(what to tell a person, the exit code); an error that is none of ours says its kind and how to see its place."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted; what was finished is kept", _INTERRUPTED
    if isinstance(error, typer.TyperException):  # a fault in the command line itself
        return f"{_usage_fault(error)} (see skilltrain --help)", _FAULT
    if isinstance(error, SkilltrainError):
        message = f"{error} [{error.code}]"
        return message, _SIGNALS + error.number if isinstance(error, StoppedError) else _FAULT
    if isinstance(error, OSError):
        return f"{error.filename}: {reason_of(error)}" if error.filename else reason_of(
            error
        ), _FAULT
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # Path.expanduser's
        return "there is no home folder, which ~ stands for (set HOME)", _FAULT
    return (
        f"{type(error).__name__}: {error} (unexpected: add --debug to see where it happened)",
        _FAULT,
    )


def _usage_fault(error: typer.TyperException) -> str:
    """Return what is wrong with the command line; a removed name is answered with its replacement."""
    message = error.format_message().rstrip(".")
    given, _, _ = message.partition("Did you mean")
    for word in re.findall(r"(?<=')[\w-]+(?=')|--[\w-]+", given):  # quoted names, options
        message += removed_advice(word)
    return message


def _exit(code: int) -> None:
    """End the process if `code` says that it failed, or if it is one of several ranks.

    A rank leaves without the interpreter's own end: gloo's threads may still let go of a tensor then, which aborts the
    process (exit code -6) after all its work was done, and the launcher takes the whole run for failed.
    """
    if launched_ranks() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)
