"""Messages and progress bars for the person at the terminal.

A terminal shows a bar with the remaining time, and a note below it. A log file gets a plain line
about every 30 seconds, and after the first item if that item takes more than a second.

Notes:
    - By default rich estimates the speed over 30 seconds, which is too short for slow steps.
    - Stdout is for results, which programs may read. If the terminal is closed or the disk is full,
      a message is lost and the work goes on.
    - On a terminal, lines are wrapped between words, never inside a path, and rich must not wrap
      them again. In a log file they are not wrapped.
"""

import logging
import math
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
ShowProgress = Callable[[int, str], None]
"""Function that shows the number of completed items and a note."""
_SECONDS_BETWEEN_LINES = 30
_SLOW_ITEM_SECONDS = 1  # work with such items may take minutes
_MAX_LINE_CHARS = 2000  # the error of a library may quote a whole file


@contextmanager
def progress(description: str, total: int | None, done: int = 0) -> Iterator[ShowProgress]:
    """Show the progress of some work. Nothing is shown for a single item.

    Args:
        description: Label of the bar.
        total: Number of items. None: unknown.
        done: Number of items completed before, for example by a resumed run.

    Yields:
        A function that shows the number of completed items and a note.
    """
    if total == 1:
        yield lambda completed, note: None
    elif console.is_terminal and is_main_process():
        with _progress_bar(description, total, done) as show:
            yield show
    else:
        yield _plain_progress(description, total, done)


@contextmanager
def _progress_bar(description: str, total: int | None, done: int) -> Iterator[ShowProgress]:
    """Show a progress bar in a terminal, with a note below it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, speed_estimate_period=math.inf)
    task = bar.add_task(description, total=total, completed=done)
    note_line = Text(style="dim")

    def show(completed: int, note: str) -> None:
        bar.update(task, completed=completed)
        note_line.plain = note

    with Live(Group(bar, note_line), console=console, refresh_per_second=4):
        yield show


def _plain_progress(description: str, total: int | None, num_before: int) -> ShowProgress:
    """Return a function that prints the progress as a plain line, for a log file.

    Args:
        description: First word of the line.
        total: Number of items. None: unknown.
        num_before: Number of items completed before the start.
    """
    start_time = time.monotonic()
    last_line_time = start_time
    is_first_item = True

    def show(completed: int, note: str) -> None:
        """Print a line if it is time for one."""
        nonlocal last_line_time, is_first_item
        now = time.monotonic()
        pause = _SLOW_ITEM_SECONDS if is_first_item else _SECONDS_BETWEEN_LINES
        is_first_item = False
        if now - last_line_time < pause:
            return
        last_line_time = now
        state = f"{completed:,}"
        if total is not None:
            percent = 100 * completed // max(1, total)
            eta = _remaining_time(now - start_time, completed - num_before, total - completed)
            state = f"{completed:,}/{total:,} ({percent}%)  eta {eta}"
        say(f"{description} {state}  {note}")

    return show


def _remaining_time(seconds: float, num_completed: int, num_left: int) -> str:
    """Estimate the time for the items left from the seconds for the completed items."""
    if num_completed <= 0:
        return "-:--:--"
    seconds_per_item = seconds / num_completed
    return str(timedelta(seconds=round(seconds_per_item * num_left)))


def track(items: Iterable[ItemT], description: str, total: int | None) -> Iterator[ItemT]:
    """Yield `items`, and show how many have been processed.

    Args:
        items: The items.
        description: Label of the progress bar.
        total: Number of items. None: unknown.
    """
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


def ranks_on_machine() -> int:
    """Return the number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process is the one that prints and writes. It is the first rank of a run.

    Outside a distributed run it is true.
    """
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Print a message to stderr, from the main process only."""
    if is_main_process():
        with suppress(OSError, ValueError):
            print_line(message)


def print_line(message: str, style: str = "") -> None:
    """Print a message on stderr, without characters that could control a terminal.

    Lines of more than 2,000 characters are cut.
    """
    lines = [shorten(line, _MAX_LINE_CHARS) for line in visible(message).split("\n")]
    if console.is_terminal:
        wrapper = textwrap.TextWrapper(
            console.width, break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapper.fill(line) for line in lines]
    console.print("\n".join(lines), style=style, markup=False, emoji=False, soft_wrap=True)
