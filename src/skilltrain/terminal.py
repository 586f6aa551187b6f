"""What a person sees while work goes on: one console, one kind of progress bar."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
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


def track(items: Iterable[ItemT], description: str, total: int) -> Iterator[ItemT]:
    """Yield `items` under a progress bar."""
    with progress(description, total) as (bar, task):
        for item in items:
            yield item
            bar.advance(task)


def is_main_process() -> bool:
    """Whether this process speaks and writes for all ranks of a run; true outside a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """One plain line to the person at the terminal (stderr, so that stdout stays machine-readable)."""
    if is_main_process():
        console.print(message, markup=False, soft_wrap=True)
