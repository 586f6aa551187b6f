"""The command line `skilltrain COMMAND [RECIPE] [key=value …]`. Each stage has a command."""

import atexit
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

# These modules add their commands to `app`.
from skilltrain.cli import (  # noqa: F401
    authors,
    evaluation,
    papers,
    publishing,
    routing,
    setup,
    stages,
)
from skilltrain.cli.app import app
from skilltrain.config import removed_advice
from skilltrain.errors import SkilltrainError, StoppedError, reason_of
from skilltrain.plugins import LOADED, plugin_fault, plugin_paths
from skilltrain.terminal import launched_ranks, print_line
from skilltrain.texts import one_line

# Messages of libraries, as exceptions of several types, if a process gets no more memory.
_NO_MEMORY = re.compile(
    "allocate memory|unable to allocate|failed to map segment|bad_alloc|CUDA out of memory", re.I
)
# Messages of gloo and NCCL if another process of a distributed run is gone. A test causes the
# message of gloo. That of NCCL is from reports of others, and was never seen here.
_LOST_RANK = re.compile("Connection (closed|reset) by peer|remote process exit")
# Exit codes.
_FAULT = 2
_INTERRUPTED = 130
_SIGNAL = 128  # plus the number of the signal


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments of the program. None: those of the process.
    """

    def run(words: list[str]) -> Any:
        """Run a command, and return its exit code or None."""
        if not words:
            words = ["--help"]
        if ":" in words[0]:  # the import path of a stage
            stages.add_stage(words[0])
        command = typer.main.get_command(app)
        return command.main(words, prog_name="skilltrain", standalone_mode=False)

    as_program(run, arguments)


def as_program(run: Callable[[list[str]], Any], arguments: Sequence[str] | None = None) -> None:
    """Run a program, and end the process with an exit code if the program fails.

    An error is printed as one line on stderr, and the exit code is 2. With --debug it is raised
    instead. After Ctrl-C the exit code is 130, and after SIGTERM in a stage it is 143. A plug-in
    that exits with code 0 has a fault, unless it is a command.

    Args:
        run: The program. It gets the arguments without --debug, and returns an exit code or None.
        arguments: Arguments of the program. None: those of the process.
    """
    # A terminal may not be able to show all characters of a skill.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    words = list(sys.argv[1:] if arguments is None else arguments)
    code: Any = 0
    try:
        code = run([word for word in words if word != "--debug"]) or 0
        if code == _INTERRUPTED:  # typer returns it for Ctrl-C
            raise KeyboardInterrupt
    except (KeyboardInterrupt, SystemExit, Exception) as raised:
        error = _original_error(raised)
        # A program may exit by itself, and so may a command of a plug-in. But if another plug-in
        # exits with code 0, the run looks finished although it is not. So this is a fault.
        commands = plugin_paths("command").keys() & words
        if isinstance(error, SystemExit) and (error.code or commands or not plugin_fault(error)):
            raise
        is_expected = isinstance(
            error, KeyboardInterrupt | SystemExit | typer.TyperException | typer.Abort
        )
        if "--debug" in words and not is_expected:
            raise
        code = _exit_code(error)
        print_line(f"error: {one_line(_message(error))}", style="bold red")
    _exit(code)


def _original_error(raised: BaseException) -> BaseException:
    """Return the EOFError that typer has replaced by Abort, or else the raised error itself.

    typer raises Abort for Ctrl-C, but also for an EOFError, which means that a file is damaged.
    """
    if isinstance(raised, typer.Abort) and isinstance(raised.__cause__, EOFError):
        return raised.__cause__
    return raised


def _exit_code(error: BaseException) -> int:
    """Return the exit code of the process after an error."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _INTERRUPTED
    if isinstance(error, StoppedError):
        return _SIGNAL + error.number
    return _FAULT


def _message(error: BaseException) -> str:
    """Return the message of an error as the user reads it, with the code of a SkilltrainError."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted; what was finished is kept"
    if isinstance(error, typer.TyperException):  # the command line itself is wrong
        # For errors in its arguments, typer names the command, such as `skilltrain fit`.
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "skilltrain"
        return f"{_usage_fault(error)} (see {command} --help)"
    # A SkilltrainError may say that a model is damaged, although its cause is a lack of memory.
    # Then the user reads the message about memory.
    if isinstance(error, SkilltrainError) and not _is_lack_of_memory(error.__cause__):
        return f"{error} [{error.code}]"
    if _is_lack_of_memory(error) or _is_lack_of_memory(error.__cause__):
        return "memory ran out (close other programs, or lower token_budget, max_tokens or workers)"
    fault = plugin_fault(error)
    if fault:
        return _message(fault)
    if isinstance(error, OSError):
        reason = reason_of(error)
        # A longer path would hide the reason.
        return f"{str(error.filename)[:300]}: {reason}" if error.filename else reason
    if launched_ranks() > 1 and _LOST_RANK.search(str(error)):
        return "another process of this run has ended (see its error; --resume continues the run)"
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        # Path.expanduser raised it.
        return "there is no home folder, which ~ stands for (set HOME)"
    if "Symlink loop" in str(error):
        # Path.resolve raised it.
        return f"{error} (use a folder that is not a link to itself)"
    if isinstance(error, UnicodeEncodeError):
        # Python represents bytes that are not UTF-8 as surrogates, and Arrow cannot encode these.
        return "a file or folder name is not valid UTF-8 (rename it)"
    advice = "unexpected: add --debug to see where it happened"
    # A wrong value from a plug-in may make our own code fail. Then no line of the plug-in is in
    # the traceback, so name all plug-ins.
    if LOADED:
        advice += f"; plug-ins in use: {', '.join(plugin.label for plugin in LOADED.values())}"
    return f"{type(error).__name__}: {error} ({advice})"


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out, by its type or by its message."""
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


def _usage_fault(error: typer.TyperException) -> str:
    """Return what is wrong with the command line, with advice for names that were removed."""
    message = error.format_message().rstrip(".")
    fault, _, _ = message.partition("Did you mean")
    quoted_names_or_options = re.findall(r"(?<=')[\w-]+(?=')|--[\w-]+", fault)
    return message + "".join(map(removed_advice, quoted_names_or_options))


def _exit(code: int) -> None:
    """End the process if it failed or is one of several ranks.

    A rank skips the shutdown of the interpreter. During the shutdown, a thread of gloo may free a
    tensor. This aborts the process with exit code -6, and the launcher reports a finished run as
    failed.
    """
    if launched_ranks() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)
