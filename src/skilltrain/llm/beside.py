"""Asynchronous work for a caller that is not: it goes on in a thread while the caller takes what comes."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def run_beside(work: Callable[[Callable[[ItemT], None]], Coroutine[Any, Any, None]]) -> Generator[ItemT, None, None]:
    """Yield what `work` hands to the function that it is given, as it comes; then raise what it raised, if anything.

    The work has an event loop of its own, so that it runs in a notebook too, where one is running already. A caller
    that stops early cancels it.
    """
    items: queue.SimpleQueue[ItemT | _End] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(work(items.put))

    def run() -> None:
        error: BaseException | None = None
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as caught:
            error = caught
        items.put(_End(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
