import multiprocessing
import resource

import numpy as np
import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.vectors import KEY, VectorCache


def keys(*numbers):
    return np.array([number.to_bytes(KEY.itemsize, "big") for number in numbers], KEY)


def vectors(*numbers):
    return np.array([[n, n + 0.5, -n] for n in numbers], dtype=np.float32)


def opened(folder, model="model"):
    return VectorCache.open(folder, model)


def filled(folder, *numbers):
    cache = opened(folder)
    cache.add(keys(*numbers), vectors(*numbers))
    return cache


def held(cache, *numbers):
    """The numbers whose vector is there, and right."""
    found = []
    for positions, rows in cache.read(keys(*numbers)):
        assert (rows == vectors(*numbers)[positions]).all()
        found += [numbers[position] for position in positions]
    assert {*numbers} - {*found} == {numbers[position] for position in cache.missing(keys(*numbers))}
    return sorted({*found})


def files(folder):
    return sorted((folder / "model").glob("*.parquet"))


def test_what_is_added_is_found_at_once_and_by_the_next_process(tmp_path):
    cache, watching = opened(tmp_path), opened(tmp_path)
    assert held(cache, 1) == []
    cache.add(keys(1, 2), vectors(1, 2))
    cache.add(keys(3), vectors(3))
    cache.add(keys(), np.empty((0, 3), np.float32))
    for one in (cache, watching, opened(tmp_path)):
        assert held(one, 3, 1, 9, 2) == [1, 2, 3]
    assert held(opened(tmp_path, "other"), 1) == [] and len(files(tmp_path)) == 2


def test_keys_of_any_bytes_are_told_apart(tmp_path):
    some = [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), b"ab" + bytes(14), b"ab" + bytes(13) + b"\1", b"\xff" * 16]
    cache = opened(tmp_path)
    for number, one in enumerate(some[:-1]):
        cache.add(np.array([one], KEY), vectors(number))
        assert cache.missing(np.array(some, KEY)).tolist() == [*range(number + 1, 6)]
    found = {int(place): rows[0, 1] for (place,), rows in opened(tmp_path).read(np.array(some, KEY))}
    assert found == {0: 0.5, 1: 1.5, 2: 2.5, 3: 3.5, 4: 4.5}


@pytest.mark.parametrize("damage", ["empty", "cut", "vector", "key"])
def test_a_damaged_file_is_told_of_and_not_used(tmp_path, capsys, damage):
    filled(tmp_path, 1, 2, 3)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    at = {"vector": data.index(vectors(2).tobytes()), "key": data.index(keys(2).tobytes())}
    if damage in at:
        data[at[damage] + 1] ^= 4
    file.write_bytes(bytes(data[: {"empty": 0, "cut": -13}.get(damage)]))
    cache = opened(tmp_path)
    assert held(cache, 1, 2, 3) == [] and f"{file} is damaged and not used" in capsys.readouterr().err
    cache.add(keys(2, 3), vectors(2, 3))
    assert held(opened(tmp_path), 1, 2, 3) == [2, 3]


def test_many_small_files_become_one_when_the_cache_is_opened(tmp_path):
    cache = opened(tmp_path)
    for number in range(64):
        cache.add(keys(number), vectors(number))
    assert len(files(tmp_path)) == 64
    assert held(opened(tmp_path), *range(70)) == [*range(64)] == held(cache, *range(70))
    assert len(files(tmp_path)) == 1


def test_a_full_disk_is_one_clear_line_and_spoils_nothing(tmp_path):
    cache = filled(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(SkilltrainError, match=r"vectors: cannot write: .*what was written before is kept"):
            cache.add(keys(*range(100)), vectors(*range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(opened(tmp_path), *range(100)) == [1, 2]
    assert [path.name for path in (tmp_path / "model").iterdir()] == [path.name for path in files(tmp_path)]


def test_an_impossible_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SkilltrainError, match="cannot make the vector cache"):
        opened(tmp_path / "file")


def fill(folder, numbers):
    for number in numbers:
        filled(folder, number)


def test_two_processes_fill_one_cache_and_join_its_files_meanwhile(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(tmp_path, range(start, 200, 2))) for start in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert held(opened(tmp_path), *range(200)) == [*range(200)] and len(files(tmp_path)) < 130
