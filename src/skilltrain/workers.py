"""Run blocks of work on several processes of this machine, or on a Ray cluster.

The results and their order do not depend on where they are computed.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError, install_command
from skilltrain.terminal import track

BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


class WorkersConfig(Config):
    """Settings of the workers. The results do not depend on them."""

    engine: Literal["processes", "ray"] = Field(
        default="processes",
        description="ray: on the cluster of RAY_ADDRESS, or on this machine; needs skilltrain[ray]",
    )
    num: int | None = Field(
        default=None, ge=1, description="workers; null: one per core; 1: this process alone"
    )


def _num_cores() -> int:
    """Return the number of cores that this process may use. A container may limit it."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_blocks(
    function: Callable[[BlockT], ResultT],
    blocks: Sequence[BlockT],
    workers: WorkersConfig,
    description: str,
) -> Iterator[ResultT]:
    """Call a function on blocks of work in several processes, and show the progress.

    Args:
        function: A top-level function or a partial of one, because it is pickled.
        blocks: Arguments of the function.
        workers: Where to run the function.
        description: Label of the progress bar.

    Yields:
        Results of the function, in the order of `blocks`.

    Raises:
        SkilltrainError: A worker raised it, or a worker process ended early.
    """
    if not blocks:
        return
    # More processes than blocks would have nothing to do.
    num_processes = min(workers.num or _num_cores(), len(blocks))
    if workers.engine == "ray":
        results = _run_on_ray(function, blocks, num_cores=workers.num)
    elif num_processes > 1:
        results = _run_in_processes(function, blocks, num_processes)
    else:
        results = map(function, blocks)
    yield from track(results, description, len(blocks))


def _run_in_processes(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num_processes: int
) -> Iterator[ResultT]:
    """Yield `function(block)` for each block, computed in processes of this machine."""
    # The processes share the cores, so each may use only its part of the threads.
    num_threads = max(1, _num_cores() // num_processes)
    # Processes are spawned. A forked process may hang if torch or faiss have started threads.
    spawn = get_context("spawn")
    executor = ProcessPoolExecutor(
        num_processes, mp_context=spawn, initializer=_limit_threads, initargs=(num_threads,)
    )
    try:
        yield from executor.map(function, blocks)
    except BrokenProcessPool as error:
        raise SkilltrainError(
            "worker-failed",
            "a worker process ended before its work was done",
            fix="if memory ran out, set workers.num to fewer",
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _limit_threads(num_threads: int) -> None:
    """Limit the threads of a worker. Libraries read these variables when they are loaded."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(num_threads)


def _run_on_ray(
    function: Callable[[BlockT], ResultT], blocks: Sequence[BlockT], num_cores: int | None
) -> Iterator[ResultT]:
    """Yield `function(block)` for each block, computed by Ray.

    Args:
        function: The function.
        blocks: Arguments of the function.
        num_cores: Cores of this machine. None: all cores. The cluster that RAY_ADDRESS names
            decides itself.

    Raises:
        SkilltrainError: Ray is not installed, a worker raised it, or Ray failed.
    """
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError as error:
        raise SkilltrainError(
            "missing-package", "workers.engine ray needs Ray", fix=install_command("ray")
        ) from error

    _start_ray(ray, num_cores)

    def call(block: Any) -> Any:  # Ray does not accept partials
        return function(block)

    task: Any = ray.remote(call)
    get: Any = ray.get
    try:
        # Start all tasks before waiting for the first result.
        yield from map(get, [task.remote(block) for block in blocks])
    except RayTaskError as error:
        # Ray wraps the error of a worker. Raise the worker's own error, if it is for the user.
        if isinstance(error.cause, SkilltrainError):
            raise error.cause from error
        raise
    except RayError as error:
        raise SkilltrainError(
            "worker-failed", f"Ray gave up: {' '.join(str(error).split())[:300]}"
        ) from error


def _start_ray(ray: Any, num_cores: int | None) -> None:
    """Start Ray on `num_cores` cores of this machine (None: all), or connect to its cluster."""
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        num_cores = None  # the cluster decides
    elif num_cores is None:
        num_cores = _num_cores()
    ray.init(
        num_cpus=num_cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
