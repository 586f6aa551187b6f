"""Blocks of work on several processes of this machine, or on a Ray cluster, with the same results in the same order."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import track

BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")
_WAITING = 4  # blocks handed out a worker: enough that none idles, few enough that finished ones do not pile up


class WorkersConfig(Config):
    """Who computes. The results do not depend on it."""

    engine: Literal["processes", "ray"] = Field(
        default="processes",
        description="processes: of this machine; ray: Ray Data (pip install 'skilltrain[ray]'), on the cluster of "
        "RAY_ADDRESS or on this machine; its nodes must see the same files under the same paths",
    )
    num: int | None = Field(default=None, ge=1, description="workers; null: one a core; 1 with processes: no other")


def num_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1


def map_blocks(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], workers: WorkersConfig, description: str
) -> Iterator[ResultT]:
    """Yield `function(block)` for each block, in the order of `blocks`, under a progress bar.

    `function` is a top-level function (or a partial of one) that answers alike for the same block wherever it runs;
    what all blocks share it reads from files, for every block is sent with its arguments alone. A SkilltrainError of
    a worker is raised here; so is one if a worker dies.
    """
    if not blocks:
        return
    if workers.engine == "ray":
        results = _on_ray(function, blocks, workers.num)
    elif min(workers.num or num_cores(), len(blocks)) <= 1:
        results = map(function, blocks)
    else:
        results = _in_processes(function, blocks, min(workers.num or num_cores(), len(blocks)))
    yield from track(results, description, len(blocks))


def _in_processes(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num_workers: int
) -> Iterator[ResultT]:
    threads = max(1, num_cores() // num_workers)
    # Not forked: a fork of a process in which torch or faiss have started threads may hang.
    executor = ProcessPoolExecutor(num_workers, get_context("spawn"), _limit_threads, (threads,))
    waiting: deque[Future[ResultT]] = deque()
    try:
        for block in blocks:
            waiting.append(executor.submit(function, block))
            if len(waiting) >= _WAITING * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        fix = "if memory ran out, set workers.num to fewer"
        raise SkilltrainError("a worker process ended before its work was done", fix=fix) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _limit_threads(threads: int) -> None:
    """Share the cores among the workers, before the libraries that read this are loaded."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


@dataclass(frozen=True)
class _Answer:
    """A result or a user's fault, as a thing that Ray Data does not take apart (arrays would come back as lists)."""

    result: Any
    fault: SkilltrainError | None


def _on_ray(function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num: int | None) -> Iterator[ResultT]:
    try:
        import ray
        from ray.data import DataContext, TaskPoolStrategy
        from ray.exceptions import RayError
    except ImportError as error:
        raise SkilltrainError("workers.engine ray needs Ray", fix="pip install 'skilltrain[ray]'") from error
    if not ray.is_initialized():
        _join_cluster(num)
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of every execution

    def work(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": _Answer(function(blocks[row["id"]]), None)}
        except SkilltrainError as fault:
            return {"answer": _Answer(None, fault)}

    positions = ray.data.range(len(blocks), override_num_blocks=len(blocks))
    try:
        for row in positions.map(work, compute=TaskPoolStrategy(num)).iter_rows():
            if row["answer"].fault is not None:
                raise row["answer"].fault
            yield row["answer"].result
    except RayError as error:
        raise SkilltrainError(f"Ray gave up: {' '.join(str(error).split())[:300]}") from error


def _join_cluster(num: int | None) -> None:
    """The cluster that RAY_ADDRESS names, or one of `num` cores on this machine that ends with this process."""
    import ray

    cores = None if os.environ.get("RAY_ADDRESS") else num or num_cores()
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
