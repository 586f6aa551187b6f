"""What a person sees while work goes on: one console, one kind of progress line."""

import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from skilltrain.texts import visible

console = Console(stderr=True, highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 120  # a log file has no width of its own; tables need this much
ItemT = TypeVar("ItemT")
_SECONDS_BETWEEN_LINES = 30
_BETWEEN_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # a path can be copied whole
_MAX_CHARS = 2000  # of a line; what a library says of a file may hold all of the file


@contextmanager
def progress(description: str, total: int | None, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Show how far a work is, of which `done` is done already; yields show(completed, note).

    In a terminal a line that is redrawn, the note below it; elsewhere (a batch job's log) a line about every 30
    seconds. Nothing for a single item.
    """
    shown = Progress(description, total, done, time.monotonic)
    if total == 1:
        yield lambda completed, note: None
    elif not (console.is_terminal and is_main_process()):
        yield shown.say
    else:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda completed, note: live.update(Text(f"{shown.line(completed)}\n{note}".strip(), style="dim"))


def track(items: Iterable[ItemT], description: str, total: int | None) -> Iterator[ItemT]:
    """Yield `items` while their progress is shown."""
    with progress(description, total) as show:
        for number, item in enumerate(items, 1):
            yield item
            show(number, "")


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress is shown within: for what is timed, or done once for each query."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


class Progress:
    """How far a work is, in a line, with how long what is left will take at the pace of all that was done here."""

    def __init__(self, description: str, total: int | None, done: int, clock: Callable[[], float]) -> None:
        self.description, self.total, self.done_before, self.clock = description, total, done, clock
        self.started = self.last_time = clock()

    def line(self, completed: int) -> str:
        """The line when `completed` are done, those of before included."""
        if self.total is None:
            return f"{self.description} {completed:,}"
        done = completed - self.done_before
        left = (self.clock() - self.started) / done * (self.total - completed) if done else None
        eta = "-:--:--" if left is None else timedelta(seconds=round(left))
        return f"{self.description} {completed:,}/{self.total:,} ({100 * completed // max(1, self.total)}%)  eta {eta}"

    def say(self, completed: int, note: str) -> None:
        """Say the line if 30 seconds have passed since the last."""
        if self.clock() - self.last_time >= _SECONDS_BETWEEN_LINES:
            self.last_time = self.clock()
            say(f"{self.line(completed)}  {note}")


def is_main_process() -> bool:
    """Whether this process speaks and writes for all ranks of a run; true outside a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Plain lines to the person at the terminal (stderr, so that stdout stays machine-readable)."""
    if is_main_process():
        print_line(message)


def print_line(message: str, style: str = "") -> None:
    """One line on stderr; a terminal breaks it between words alone, a log file not at all."""
    message = on_terminal(message)
    if console.is_terminal:
        lines = (textwrap.fill(line, console.width, **_BETWEEN_WORDS) for line in message.splitlines())
        message = "\n".join(lines)
    console.print(message, style=style, markup=False, emoji=False, soft_wrap=True)


def on_terminal(text: str) -> str:
    """Text that may quote strangers as a terminal may show it: no line without end, no character that steers it."""
    lines = visible(text).split("\n")
    return "\n".join(line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…" for line in lines)
