"""What a person sees while work goes on: one console, one kind of progress bar."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

console = Console(stderr=True, highlight=False)
if not console.is_terminal:
    console.width = 120  # a log file has no width of its own; tables need this much
log = logging.getLogger("skilltrain")
ItemT = TypeVar("ItemT")


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f}/s" if task.speed else "", style="dim")


@contextmanager
def progress(description: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    """A bar with count, rate, elapsed and remaining time on stderr; yields (progress, task id)."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(),
        TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not (console.is_terminal and is_main_process())) as bar:
        yield bar, bar.add_task(description, total=total, note="")


def track(items: Iterable[ItemT], description: str, total: int | None) -> Iterator[ItemT]:
    """Yield `items` under a progress bar."""
    with progress(description, total) as (bar, task):
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bar is drawn within: for what is timed, or done once a query."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


@contextmanager
def long_progress(description: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """For work of minutes to days, of which `done` is done already; yields show(completed, note).

    In a terminal a bar with the note below it; elsewhere (a batch job's log) a plain line now and then.
    """
    if not (console.is_terminal and is_main_process()):
        yield PlainProgress(description, total, done, time.monotonic).show
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("eta"),
        TimeRemainingColumn(),
    )  # fmt: skip
    bar, line = Progress(*columns, console=console), Text(style="dim")
    task = bar.add_task(description, total=total, completed=done)

    def show(completed: int, note: str) -> None:
        bar.update(task, completed=completed)
        line.plain = note

    with Live(Group(bar, line), console=console, refresh_per_second=4):
        yield show


class PlainProgress:
    """One line about every 30 seconds, and at each tenth of the way where these are further apart than 5 seconds."""

    def __init__(self, description: str, total: int, done: int, clock: Callable[[], float]) -> None:
        self.description, self.total, self.done_before, self.clock = description, total, done, clock
        self.started = self.last_time = clock()
        self.last_tenth = 10 * done // max(1, total)

    def show(self, completed: int, note: str) -> None:
        """Say how far it is, and how long it will take, if it is time to."""
        now, tenth = self.clock(), 10 * completed // max(1, self.total)
        if now - self.last_time < (5 if tenth > self.last_tenth else 30):
            return
        self.last_time, self.last_tenth = now, tenth
        share = f"{100 * completed // max(1, self.total)}%"
        done = completed - self.done_before
        seconds = (now - self.started) / done * (self.total - completed) if done else 0
        eta = f"  eta {timedelta(seconds=round(seconds))}" if done else ""
        say(f"{self.description} {completed:,}/{self.total:,} ({share}){eta}  {note}")


def is_main_process() -> bool:
    """Whether this process speaks and writes for all ranks of a run; true outside a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """One plain line to the person at the terminal (stderr, so that stdout stays machine-readable)."""
    if is_main_process():
        console.print(message, markup=False, emoji=False, soft_wrap=True)
