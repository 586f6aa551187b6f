"""Blocks of work: the same results in the same order in this process, in several, and on Ray."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.workers import WorkersConfig, map_blocks

BLOCKS = [range(10 * start, 10 * start + 3) for start in range(20)]


def shifted_squares(shift: int, block: range) -> tuple[list[int], int]:
    """(the squares, the process that took them); refuses a block of none."""
    if not block:
        raise SkilltrainError("is odd", where="block 20", fix="leave it out")
    return [number * number + shift for number in block], os.getpid()


def die(block: int) -> int:
    os._exit(9)


def check_order_and_fault(workers: WorkersConfig) -> None:
    """Twenty blocks in their order, then the fault of the last one as it is."""
    found: list[tuple[list[int], int]] = []
    with pytest.raises(SkilltrainError, match=r"^block 20: is odd \(leave it out\)$") as caught:
        found.extend(
            map_blocks(partial(shifted_squares, 7), [*BLOCKS, range(0)], workers, "squares")
        )
    assert caught.value.fix == "leave it out"
    assert [squares for squares, _ in found] == [[n * n + 7 for n in block] for block in BLOCKS]
    assert {process == os.getpid() for _, process in found} == {workers.num == 1}


@pytest.mark.parametrize("num", [1, 2])
def test_results_come_in_the_order_of_the_blocks_and_a_users_fault_is_told_as_it_is(
    num: int,
) -> None:
    check_order_and_fault(WorkersConfig(num=num))
    assert list(map_blocks(die, [], WorkersConfig(num=num), "x")) == []


def test_a_worker_that_dies_ends_the_work_with_advice() -> None:
    with pytest.raises(SkilltrainError, match=r"worker process ended.*workers\.num to fewer"):
        list(map_blocks(die, [0, 1], WorkersConfig(num=2), "x"))


@pytest.mark.slow
def test_ray_gives_what_processes_give(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from skilltrain.data.near_duplicates import TrigramSets, link_near_duplicates

    here, there = WorkersConfig(num=1), WorkersConfig(engine="ray", num=2)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(paths)
    )  # where Ray's workers find this file's functions
    bodies = [
        f"restart the pods of service {n // 2} and wait until all of them are ready again"
        for n in range(40)
    ]
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        check_order_and_fault(there)
        one, other = (TrigramSets.of(bodies, workers) for workers in (here, there))
        assert (
            one.trigrams.tolist() == other.trigrams.tolist()
            and one.starts.tolist() == other.starts.tolist()
        )
        roots = link_near_duplicates(one, 0.9, here)
        assert link_near_duplicates(other, 0.9, there) == roots and len(set(roots)) == 20
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, sigterm)  # Ray takes it and keeps it
