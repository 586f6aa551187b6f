"""Blocks of work on several processes of this machine, or on a Ray cluster, with the same results in the same order."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import track

BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


class WorkersConfig(Config):
    """Who computes. The results do not depend on it."""

    engine: Literal["processes", "ray"] = Field(
        default="processes",
        description="ray: on the cluster of RAY_ADDRESS, or on this machine; needs skilltrain[ray]",
    )
    num: int | None = Field(
        default=None, ge=1, description="workers; null: one per core; 1: this process alone"
    )


def _num_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1


def map_blocks(
    function: Callable[[BlockT], ResultT],
    blocks: Sequence[BlockT],
    workers: WorkersConfig,
    description: str,
) -> Iterator[ResultT]:
    """Yield `function(block)` for each block, in the order of `blocks`, under a progress bar.

    `function` is a top-level function (or a partial of one). A SkilltrainError of a worker is raised here.
    """
    if not blocks:
        return
    num = min(workers.num or _num_cores(), len(blocks))
    in_turn = _in_processes(function, blocks, num) if num > 1 else map(function, blocks)
    results = _on_ray(function, blocks, workers.num) if workers.engine == "ray" else in_turn
    yield from track(results, description, len(blocks))


def _in_processes(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num_workers: int
) -> Iterator[ResultT]:
    threads = max(1, _num_cores() // num_workers)
    # Not forked: a fork of a process in which torch or faiss have started threads may hang.
    executor = ProcessPoolExecutor(num_workers, get_context("spawn"), _limit_threads, (threads,))
    try:
        yield from executor.map(function, blocks)
    except BrokenProcessPool as error:
        fix = "if memory ran out, set workers.num to fewer"
        raise SkilltrainError("a worker process ended before its work was done", fix=fix) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _limit_threads(threads: int) -> None:
    """Share the cores among the workers, before the libraries that read this are loaded."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def _on_ray(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num: int | None
) -> Iterator[ResultT]:
    """The results from the cluster that RAY_ADDRESS names, or from one of `num` cores on this machine."""
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError as error:
        raise SkilltrainError(
            "workers.engine ray needs Ray", fix="pip install 'skilltrain[ray]'"
        ) from error
    if not ray.is_initialized():
        cores = None if os.environ.get("RAY_ADDRESS") else num or _num_cores()
        ray.init(
            num_cpus=cores,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def call(block: Any) -> Any:  # for Ray takes no partial
        return function(block)

    task: Any = ray.remote(call)
    get: Any = ray.get
    try:
        yield from map(get, [task.remote(block) for block in blocks])
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, SkilltrainError) else error from error
    except RayError as error:
        raise SkilltrainError(f"Ray gave up: {' '.join(str(error).split())[:300]}") from error
