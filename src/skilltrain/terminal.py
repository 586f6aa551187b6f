"""What a person sees while work goes on: one console, one kind of progress bar."""

import logging
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from skilltrain.texts import shortened, visible

console = Console(stderr=True, highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 120  # a log file has no width of its own; tables need this much
log = logging.getLogger("skilltrain")
ItemT = TypeVar("ItemT")
_SECONDS_BETWEEN_LINES = 30
_BETWEEN_WORDS: Any = {
    "break_long_words": False,
    "break_on_hyphens": False,
}  # a path can be copied whole
_MAX_CHARS = 2000  # of a line; what a library says of a file may hold all of the file


@contextmanager
def progress(
    description: str, total: int | None, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Show how far a work is, of which `done` is done already; yields show(completed, note).

    In a terminal a bar with the remaining time, the note below it; elsewhere (a batch job's log) a plain line now and
    then. Nothing for a single item.
    """
    if total == 1:
        yield lambda completed, note: None
    elif not (console.is_terminal and is_main_process()):
        yield _plain_progress(description, total, done)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        # By default rich looks back 30 seconds, so it says nothing where a step takes longer.
        bar, line = (
            Progress(*columns, console=console, speed_estimate_period=float("inf")),
            Text(style="dim"),
        )
        task = bar.add_task(description, total=total, completed=done)

        def show(completed: int, note: str) -> None:
            bar.update(task, completed=completed)
            line.plain = note

        with Live(Group(bar, line), console=console, refresh_per_second=4):
            yield show


def _plain_progress(description: str, total: int | None, done: int) -> Callable[[int, str], None]:
    """show(completed, note) that says a line about every 30 seconds: how far it is, and how long what is left takes."""
    started = last = time.monotonic()

    def show(completed: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES:
            return
        last, new = now, completed - done
        if total is None:
            say(f"{description} {completed:,}  {note}")
            return
        left = (
            timedelta(seconds=round((now - started) / new * (total - completed)))
            if new
            else "-:--:--"
        )
        say(
            f"{description} {completed:,}/{total:,} ({100 * completed // max(1, total)}%)  eta {left}  {note}"
        )

    return show


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


def launched_ranks() -> int:
    """How many processes the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process speaks and writes for all ranks of a run; true outside a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Plain lines to the person at the terminal (stderr, so that stdout stays machine-readable), by one process.

    A closed terminal, a full disk or a lack of file descriptors raises nothing: work goes on without the line.
    """
    if is_main_process():
        with suppress(OSError, ValueError):
            print_line(message)


def print_line(message: str, style: str = "") -> None:
    """One line on stderr; a terminal breaks it between words alone, a log file not at all.

    What it quotes of strangers steers no terminal (`visible`), and no line is without end.
    """
    lines = [shortened(line, _MAX_CHARS) for line in visible(message).split("\n")]
    if console.is_terminal:
        lines = [textwrap.fill(line, console.width, **_BETWEEN_WORDS) for line in lines]
    console.print("\n".join(lines), style=style, markup=False, emoji=False, soft_wrap=True)
