import multiprocessing
import resource

import numpy as np
import pytest

from faults import raises
from skilltrain.retrieval.vectors import KEY, VectorCache

FAR = 1 << 120  # a number whose key differs from that of 0 in its last byte


def keys(*numbers):
    """Keys that end in zero bytes, which numpy's texts of bytes leave out."""
    return np.array([number.to_bytes(KEY.itemsize, "little") for number in numbers], KEY)


def vectors(*numbers):
    return np.array([[n % 1000, n % 7, -(n % 11)] for n in numbers], dtype=np.float32)


def opened(folder, model="model"):
    return VectorCache(folder / model)


def filled(folder, *numbers):
    cache = opened(folder)
    cache.add(keys(*numbers), vectors(*numbers))
    return cache


def held(cache, *numbers):
    """The numbers whose vector is there, and right."""
    is_known, rows = cache.read(keys(*numbers))
    if is_known.any():
        assert (rows[is_known] == vectors(*numbers)[is_known]).all()
    return sorted(number for number, known in zip(numbers, is_known, strict=True) if known)


def files(folder):
    return sorted((folder / "model").glob("*.npz"))


def test_what_is_added_is_found_at_once_and_by_the_next_process(tmp_path):
    cache, watching = opened(tmp_path), opened(tmp_path)
    assert held(cache, 1) == []
    cache.add(keys(1, 2), vectors(1, 2))
    cache.add(keys(0, FAR + 2), vectors(0, FAR + 2))
    cache.add(keys(), np.empty((0, 3), np.float32))
    for one in (cache, watching, opened(tmp_path)):
        assert held(one, FAR, 2, FAR + 1, 0, 1, FAR + 2, 256) == [0, 1, 2, FAR + 2]
    assert held(opened(tmp_path, "other"), 1) == [] and len(files(tmp_path)) == 2


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
    assert (
        held(cache, 1, 2, 3) == [] and f"{file} is damaged and not used" in capsys.readouterr().err
    )
    cache.add(keys(2, 3), vectors(2, 3))
    assert held(opened(tmp_path), 1, 2, 3) == [2, 3]


def test_a_full_disk_is_one_clear_line_and_spoils_nothing(tmp_path):
    cache = filled(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with raises("cannot-write"):
            cache.add(keys(*range(100)), vectors(*range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(opened(tmp_path), *range(100)) == [1, 2]
    assert [path.name for path in (tmp_path / "model").iterdir()] == [
        path.name for path in files(tmp_path)
    ]


def fill(folder, numbers):
    for number in numbers:
        filled(folder, number)


def test_two_processes_fill_one_cache_and_many_small_files_become_one(tmp_path):
    cache, context = opened(tmp_path), multiprocessing.get_context("fork")
    workers = [
        context.Process(target=fill, args=(tmp_path, range(start, 100, 2))) for start in (0, 1)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(files(tmp_path)) < 80, "joined meanwhile"
    fill(tmp_path, range(100, 170))
    assert held(opened(tmp_path), *range(200)) == [*range(170)] == held(cache, *range(200))
    assert len(files(tmp_path)) < 64
