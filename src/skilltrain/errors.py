"""Errors that are meant for the user: what is wrong, where, and how to fix it."""

import re
import shlex
from importlib.metadata import requires
from pathlib import Path

_MAX_LOCATION_CHARS = 300  # a longer path would hide the problem


class SkilltrainError(Exception):
    """A fault in the user's input. The command line prints it as one line and exits with code 2.

    Attributes:
        code: Kind of fault, for programs. `docs/reference/errors.md` lists all codes.
        problem: What is wrong.
        where: The file, line, setting or address that is wrong. None: unknown.
        fix: What the user can do.
    """

    def __init__(self, code: str, problem: str, *, where: object = None, fix: str = "") -> None:
        super().__init__(code, problem)  # pickle calls the class with these
        self.code = code
        self.problem = problem
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        location = ""
        if self.where is not None:
            location = f"{str(self.where)[:_MAX_LOCATION_CHARS]}: "
        advice = f" ({self.fix})" if self.fix else ""
        return f"{location}{self.problem}{advice}".replace("\n", " ")


class StoppedError(SkilltrainError):
    """A signal (Ctrl-C, SIGTERM) ended a long run. The same command continues it.

    Attributes:
        number: Number of the signal, such as 15 for SIGTERM.
    """

    def __init__(
        self, code: str, problem: str, *, where: object = None, fix: str = "", number: int = 0
    ) -> None:
        super().__init__(code, problem, where=where, fix=fix)
        self.number = number


class TerminationError(SystemExit):
    """The exit of the process after SIGTERM, which no plug-in has caused."""


def install_command(extra: str) -> str:
    """Return advice for a missing package: how to install an extra.

    A clone installs the extra by its name. Outside of a clone, the advice lists the packages,
    because no package index is known to have skilltrain.

    Args:
        extra: Name of the extra, such as `serve`.
    """
    in_clone = (Path(__file__).parents[2] / "constraints.txt").is_file()
    if in_clone:
        return f"in the clone of skilltrain: pip install -e '.[{extra}]' -c constraints.txt"
    return f"extra {extra}: pip install {shlex.join(requirements_of(extra))}"


def requirements_of(extra: str) -> list[str]:
    """Return the packages of an extra with their versions, such as ["ray>=2.40"]."""
    # The metadata of the installed package have lines such as `ray>=2.40; extra == 'ray'`, or
    # `ray>=2.40; sys_platform == 'linux' and extra == 'ray'`. `pip` reads the other condition.
    ending = re.compile(rf"(;| and) extra == '{re.escape(extra)}'$")
    lines = requires("skilltrain") or []
    return [ending.sub("", line) for line in lines if ending.search(line)]


def reason_of(error: Exception) -> str:
    """Return the message of an error, without the number and the path of a system error."""
    return getattr(error, "strerror", None) or str(error)
