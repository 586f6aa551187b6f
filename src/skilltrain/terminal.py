"""Messages and progress bars for the person at the terminal."""

import logging
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

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

from skilltrain.texts import shorten, visible

console = Console(stderr=True, highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 120  # for tables in log files, which have no width of their own
log = logging.getLogger("skilltrain")
ItemT = TypeVar("ItemT")
_SECONDS_BETWEEN_LINES = 30
_MAX_LINE_CHARS = 2000  # the error of a library may quote a whole file


@contextmanager
def progress(
    description: str, total: int | None, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Show the progress of some work. Nothing is shown for a single item.

    A terminal shows a bar with the remaining time, and a note below it. A log file gets a plain
    line about every 30 seconds.

    Args:
        description: Label of the bar.
        total: Number of items. None: unknown.
        done: Number of items completed before, for example by a run that is resumed.

    Yields:
        A function to call with the number of completed items and a note.
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
        # By default rich estimates the speed over 30 seconds, which is too short for slow steps.
        bar = Progress(*columns, console=console, speed_estimate_period=float("inf"))
        note_line = Text(style="dim")
        task = bar.add_task(description, total=total, completed=done)

        def show(completed: int, note: str) -> None:
            bar.update(task, completed=completed)
            note_line.plain = note

        with Live(Group(bar, note_line), console=console, refresh_per_second=4):
            yield show


def _plain_progress(description: str, total: int | None, done: int) -> Callable[[int, str], None]:
    """Return a function that prints the progress and the remaining time every 30 seconds."""
    start_time = time.monotonic()
    last_time = start_time

    def show(completed: int, note: str) -> None:
        nonlocal last_time
        now = time.monotonic()
        if now - last_time < _SECONDS_BETWEEN_LINES:
            return
        last_time = now
        if total is None:
            say(f"{description} {completed:,}  {note}")
            return

        percent = 100 * completed // max(1, total)
        remaining = "-:--:--"
        if completed > done:
            seconds_per_item = (now - start_time) / (completed - done)
            remaining = timedelta(seconds=round(seconds_per_item * (total - completed)))
        say(f"{description} {completed:,}/{total:,} ({percent}%)  eta {remaining}  {note}")

    return show


def track(items: Iterable[ItemT], description: str, total: int | None) -> Iterator[ItemT]:
    """Yield `items`, and show how many have been processed."""
    with progress(description, total) as show:
        for number, item in enumerate(items, 1):
            yield item
            show(number, "")


@contextmanager
def without_bars() -> Iterator[None]:
    """Show nothing on the console within the block, for example while it is timed."""
    was_quiet = console.quiet
    console.quiet = True
    try:
        yield
    finally:
        console.quiet = was_quiet


def launched_ranks() -> int:
    """Return the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process prints and writes for all ranks of a run.

    True outside a distributed run.
    """
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Print a message to stderr, from the main process only.

    stdout is kept for output that programs read. If the message cannot be printed, because the
    terminal is closed or the disk is full, nothing is raised and the work goes on.
    """
    if is_main_process():
        with suppress(OSError, ValueError):
            print_line(message)


def print_line(message: str, style: str = "") -> None:
    """Print a message on stderr, made safe for a terminal.

    Long lines are cut. A terminal wraps the others between words only, so that a path can be
    copied. A log file does not wrap them.
    """
    lines = [shorten(line, _MAX_LINE_CHARS) for line in visible(message).split("\n")]
    if console.is_terminal:
        wrapper = textwrap.TextWrapper(
            console.width, break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapper.fill(line) for line in lines]
    console.print("\n".join(lines), style=style, markup=False, emoji=False, soft_wrap=True)
