"""What a person sees while work goes on: one console, one kind of progress bar."""

import logging
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from skilltrain.texts import visible

console = Console(stderr=True, highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 120  # a log file has no width of its own; tables need this much
log = logging.getLogger("skilltrain")
ItemT = TypeVar("ItemT")
_SECONDS_BETWEEN_LINES = 30
_BETWEEN_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # a path can be copied whole
_MAX_CHARS = 2000  # of a line; what a library says of a file may hold all of the file


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f}/s" if task.speed else "", style="dim")


class _RemainingColumn(ProgressColumn):
    """rich's own looks back 30 seconds, so it says nothing where a step takes longer."""

    def __init__(self, done_before: int) -> None:
        super().__init__()
        self._done_before = done_before

    def render(self, task: Task) -> Text:
        done, left = int(task.completed) - self._done_before, int((task.total or 0) - task.completed)
        return Text(_eta(task.elapsed or 0, done, left) if left >= 0 else "", style="cyan")


@contextmanager
def progress(description: str, total: int | None, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Show how far a work is, of which `done` is done already; yields show(completed, note).

    In a terminal a bar with rate and remaining time, the note below it; elsewhere (a batch job's log) a plain line
    now and then. Nothing for a single item.
    """
    if total == 1:
        yield lambda completed, note: None
        return
    if not (console.is_terminal and is_main_process()):
        yield PlainProgress(description, total, done, time.monotonic).show
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeElapsedColumn(),
        _RemainingColumn(done),
    )  # fmt: skip
    bar, line = Progress(*columns, console=console), Text(style="dim")
    task = bar.add_task(description, total=total, completed=done)

    def show(completed: int, note: str) -> None:
        bar.update(task, completed=completed)
        line.plain = note

    with Live(Group(bar, line), console=console, refresh_per_second=4):
        yield show


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


class PlainProgress:
    """One line about every 30 seconds."""

    def __init__(self, description: str, total: int | None, done: int, clock: Callable[[], float]) -> None:
        self.description, self.total, self.done_before, self.clock = description, total, done, clock
        self.started = self.last_time = clock()

    def show(self, completed: int, note: str) -> None:
        """Say how far it is, and how long it will take, if it is time to."""
        now = self.clock()
        if now - self.last_time < _SECONDS_BETWEEN_LINES:
            return
        self.last_time = now
        if self.total is None:
            say(f"{self.description} {completed:,}  {note}")
            return
        eta = _eta(now - self.started, completed - self.done_before, self.total - completed)
        share = 100 * completed // max(1, self.total)
        say(f"{self.description} {completed:,}/{self.total:,} ({share}%)  {eta}  {note}")


def _eta(seconds: float, done: int, left: int) -> str:
    """How long what is left will take, at the pace of all that was done in `seconds`."""
    return f"eta {timedelta(seconds=round(seconds / done * left))}" if done else "eta -:--:--"


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
