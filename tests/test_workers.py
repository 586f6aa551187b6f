"""Blocks of work: the same results in the same order in this process, in several, and on Ray."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from skilltrain.data.near_duplicates import TrigramSets, link_near_duplicates
from skilltrain.errors import SkilltrainError
from skilltrain.workers import WorkersConfig, map_blocks

ENGINES = [WorkersConfig(num=1), WorkersConfig(num=2)]


def shifted_squares(shift: int, block: range) -> list[int]:
    return [number * number + shift for number in block]


def note_process(folder: Path, block: int) -> int:
    (folder / f"{os.getpid()}-{block}").touch()
    return block


def refuse_third(block: int) -> int:
    if block == 2:
        raise SkilltrainError("is odd", where=f"block {block}", fix="leave it out")
    return block


def die(block: int) -> int:
    os._exit(9)


@pytest.mark.parametrize("workers", ENGINES, ids=str)
def test_results_come_in_the_order_of_the_blocks(workers: WorkersConfig) -> None:
    blocks = [range(10 * start, 10 * start + 3) for start in range(20)]
    found = list(map_blocks(partial(shifted_squares, 7), blocks, workers, "squares"))
    assert found == [[n * n + 7 for n in block] for block in blocks]
    assert found[19][2] == 192 * 192 + 7
    assert list(map_blocks(refuse_third, [], workers, "x")) == []


def test_one_worker_is_this_process_and_more_are_others(tmp_path: Path) -> None:
    assert list(map_blocks(partial(note_process, tmp_path), [0, 1], WorkersConfig(num=1), "x")) == [0, 1]
    assert {file.name for file in tmp_path.iterdir()} == {f"{os.getpid()}-0", f"{os.getpid()}-1"}
    assert list(map_blocks(partial(note_process, tmp_path), [2, 3], WorkersConfig(num=2), "x")) == [2, 3]
    assert not (tmp_path / f"{os.getpid()}-2").exists()


@pytest.mark.parametrize("workers", ENGINES, ids=str)
def test_a_users_fault_in_a_worker_is_told_as_it_is(workers: WorkersConfig) -> None:
    with pytest.raises(SkilltrainError, match=r"^block 2: is odd \(leave it out\)$") as caught:
        list(map_blocks(refuse_third, range(8), workers, "x"))
    assert caught.value.fix == "leave it out"


def test_a_worker_that_dies_ends_the_work_with_advice() -> None:
    with pytest.raises(SkilltrainError, match=r"worker process ended.*workers\.num to fewer"):
        list(map_blocks(die, [0, 1], WorkersConfig(num=2), "x"))


@pytest.fixture(scope="module")
def on_ray() -> Iterator[WorkersConfig]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # where Ray's workers find this file's functions
        yield WorkersConfig(engine="ray", num=2)
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_what_processes_give(on_ray: WorkersConfig) -> None:
    blocks = [range(10 * start, 10 * start + 3) for start in range(6)]
    here = list(map_blocks(partial(shifted_squares, 7), blocks, WorkersConfig(num=1), "squares"))
    assert list(map_blocks(partial(shifted_squares, 7), blocks, on_ray, "squares")) == here
    with pytest.raises(SkilltrainError, match=r"^block 2: is odd \(leave it out\)$"):
        list(map_blocks(refuse_third, range(4), on_ray, "x"))
    bodies = [f"restart the pods of service {n // 2} and wait until all of them are ready again" for n in range(40)]
    here = TrigramSets.of(bodies, ENGINES[0])
    there = TrigramSets.of(bodies, on_ray)
    assert here.trigrams.tolist() == there.trigrams.tolist() and here.starts.tolist() == there.starts.tolist()
    roots = link_near_duplicates(here, 0.9, ENGINES[0])
    assert link_near_duplicates(there, 0.9, on_ray) == roots and len(set(roots)) == 20
