"""Messages and progress bars for the person at the terminal."""

import logging
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
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
_SLOW_ITEM_SECONDS = 1  # work with such items may take minutes
_MAX_LINE_CHARS = 2000  # the error of a library may quote a whole file


@contextmanager
def progress(
    description: str, total: int | None, done: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Show the progress of some work. Nothing is shown for a single item.

    A terminal shows a bar with the remaining time, and a note below it. A notebook shows the same
    if ipywidgets is installed. A log file gets a plain line about every 30 seconds. It also gets a
    line after the first item, if the first item takes more than a second.

    Args:
        description: Label of the bar.
        total: Number of items. None: unknown.
        done: Number of items completed before, for example by a run that is resumed.

    Yields:
        A function to call with the number of completed items and a note.
    """
    if total == 1:
        yield lambda completed, note: None
        return
    # In a notebook, rich redraws a bar in a widget.
    has_widgets = console.is_jupyter and find_spec("ipywidgets") is not None
    if not ((console.is_terminal or has_widgets) and is_main_process()):
        yield _plain_progress(description, total, done)
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    # By default rich estimates the speed over 30 seconds, which is too short for slow steps.
    bar = Progress(*columns, console=console, speed_estimate_period=math.inf)
    task = bar.add_task(description, total=total, completed=done)
    note_line = Text(style="dim")

    def show(completed: int, note: str) -> None:
        bar.update(task, completed=completed)
        note_line.plain = note

    with Live(Group(bar, note_line), console=console, refresh_per_second=4):
        yield show


def _plain_progress(
    description: str, total: int | None, num_before: int
) -> Callable[[int, str], None]:
    """Return a function that prints the progress as a plain line, for a log file.

    The function is called with the number of completed items and a note. It prints a line at most
    every 30 seconds, and also after the first item, if that item takes more than a second.

    Args:
        description: First word of the line.
        total: Number of items. None: unknown.
        num_before: Number of items that were completed before the start.
    """
    start_time = time.monotonic()
    last_line_time = start_time
    is_first_item = True

    def show(completed: int, note: str) -> None:
        """Print a line such as `mining 20/80 (25%)  eta 0:01:30`, if enough time has passed.

        Args:
            completed: Number of completed items, with those before the start.
            note: Text for the end of the line.
        """
        nonlocal last_line_time, is_first_item
        now = time.monotonic()
        # Report a slow first item soon, so that the user sees how long the work will take.
        pause = _SLOW_ITEM_SECONDS if is_first_item else _SECONDS_BETWEEN_LINES
        is_first_item = False
        if now - last_line_time < pause:
            return
        last_line_time = now

        # Without a total, there is no percentage and no remaining time.
        if total is None:
            say(f"{description} {completed:,}  {note}")
            return

        # Estimate the remaining time from the items completed since the start.
        remaining = "-:--:--"  # unknown
        num_since_start = completed - num_before
        if num_since_start > 0:
            seconds_per_item = (now - start_time) / num_since_start
            remaining = timedelta(seconds=round(seconds_per_item * (total - completed)))
        # An empty total of 0 must not divide by 0.
        percent = 100 * completed // max(1, total)
        say(f"{description} {completed:,}/{total:,} ({percent}%)  eta {remaining}  {note}")

    return show


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
    """Print a message to stderr, from the main process only.

    Stdout is for results, which programs may read. If the terminal is closed or the disk is full,
    the message is lost and the work goes on.
    """
    if is_main_process():
        with suppress(OSError, ValueError):
            print_line(message)


def print_line(message: str, style: str = "") -> None:
    """Print a message on stderr, without characters that could control a terminal.

    A control character, for example, is shown as its code, such as `[U+001B]`. Lines of more than
    2,000 characters are cut. On a terminal, lines are wrapped between words, never inside a path.
    In a log file they are not wrapped.
    """
    lines = [shorten(line, _MAX_LINE_CHARS) for line in visible(message).split("\n")]

    if console.is_terminal:
        wrapper = textwrap.TextWrapper(
            console.width, break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapper.fill(line) for line in lines]

    # `soft_wrap=True` keeps rich from wrapping the lines again.
    console.print("\n".join(lines), style=style, markup=False, emoji=False, soft_wrap=True)
