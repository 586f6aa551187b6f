"""Blocks of work give the same results in one process, in several and on Ray."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from faults import raises
from skilltrain.data.near_duplicates import TrigramSets, link_near_duplicates
from skilltrain.errors import SkilltrainError
from skilltrain.workers import WorkersConfig, map_blocks

BLOCKS = [range(10 * start, 10 * start + 3) for start in range(20)]


def shift_squares(shift: int, block: range) -> tuple[list[int], int]:
    """Return the shifted squares and the id of this process. Refuses an empty block."""
    if not block:
        raise SkilltrainError("invalid-row", "is odd", where="block 20", fix="leave it out")
    return [number * number + shift for number in block], os.getpid()


SHIFTED_SQUARES = [shift_squares(7, block)[0] for block in BLOCKS]


def die(block: int) -> int:
    os._exit(9)


def check_order(workers: WorkersConfig) -> set[int]:
    """Check that results are in the order of the blocks. Returns the ids of the processes."""
    results = list(map_blocks(partial(shift_squares, 7), BLOCKS, workers, "squares"))

    assert [squares for squares, _ in results] == SHIFTED_SQUARES
    return {process_id for _, process_id in results}


def check_fault(workers: WorkersConfig) -> None:
    """Check that the fault of the last block is raised after all other results."""
    results: list[tuple[list[int], int]] = []

    with raises("invalid-row") as error:
        results.extend(
            map_blocks(partial(shift_squares, 7), [*BLOCKS, range(0)], workers, "squares")
        )

    assert str(error.value) == "block 20: is odd (leave it out)"
    assert error.value.fix == "leave it out"
    assert [squares for squares, _ in results] == SHIFTED_SQUARES


def test_one_worker_is_this_process():
    process_ids = check_order(WorkersConfig(num=1))

    assert process_ids == {os.getpid()}


def test_two_workers_are_other_processes():
    process_ids = check_order(WorkersConfig(num=2))

    assert os.getpid() not in process_ids


@pytest.mark.parametrize("num", [1, 2])
def test_fault_of_worker_is_raised_unchanged(num: int):
    check_fault(WorkersConfig(num=num))


@pytest.mark.parametrize("num", [1, 2])
def test_no_blocks_give_no_results(num: int):
    assert list(map_blocks(die, [], WorkersConfig(num=num), "x")) == []


def test_dead_worker_ends_work_with_advice():
    with raises("worker-failed"):
        list(map_blocks(die, [0, 1], WorkersConfig(num=2), "x"))


@pytest.fixture
def ray_workers(monkeypatch) -> Iterator[WorkersConfig]:
    """Two workers on a local Ray cluster."""
    ray = pytest.importorskip("ray")
    # Ray's workers import the functions of this file.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    sigterm_handler = signal.getsignal(signal.SIGTERM)

    yield WorkersConfig(engine="ray", num=2)

    ray.shutdown()
    signal.signal(signal.SIGTERM, sigterm_handler)  # Ray replaces it for good


@pytest.mark.slow
def test_ray_gives_what_processes_give(ray_workers: WorkersConfig):
    local_workers = WorkersConfig(num=1)
    bodies = [
        f"restart the pods of service {number // 2} and wait until all of them are ready again"
        for number in range(40)
    ]

    process_ids = check_order(ray_workers)
    check_fault(ray_workers)
    local_sets = TrigramSets.of(bodies, local_workers)
    ray_sets = TrigramSets.of(bodies, ray_workers)
    local_roots = link_near_duplicates(local_sets, 0.9, local_workers)
    ray_roots = link_near_duplicates(ray_sets, 0.9, ray_workers)

    assert os.getpid() not in process_ids
    assert ray_sets.trigrams.tolist() == local_sets.trigrams.tolist()
    assert ray_sets.starts.tolist() == local_sets.starts.tolist()
    assert ray_roots == local_roots
    assert len(set(local_roots)) == 20
