"""The cache of vectors on the disk: several processes, damaged files, a full disk."""

import multiprocessing
import resource

import numpy as np
import pytest

from faults import raises
from skilltrain.retrieval.vectors import KEY, VectorCache

FAR = 1 << 120  # its key differs from that of 0 only in the last bytes


def keys(*numbers):
    """Make keys that end in zero bytes, which numpy drops from byte strings."""
    return np.array([number.to_bytes(KEY.itemsize, "little") for number in numbers], KEY)


def vectors(*numbers):
    """Make a vector for each number, shape (len(numbers), 3)."""
    return np.array([[n % 1000, n % 7, -(n % 11)] for n in numbers], dtype=np.float32)


def opened(folder, model="model"):
    return VectorCache(folder / model)


def filled(folder, *numbers):
    """Open the cache and add the vectors of these numbers."""
    cache = opened(folder)
    cache.add(keys(*numbers), vectors(*numbers))
    return cache


def cached_numbers(cache, *numbers):
    """Return the numbers whose vectors are in the cache. Checks the vectors."""
    is_cached, rows = cache.read(keys(*numbers))
    if is_cached.any():
        assert (rows[is_cached] == vectors(*numbers)[is_cached]).all()
    pairs = zip(numbers, is_cached, strict=True)
    return sorted(number for number, is_present in pairs if is_present)


def files(folder):
    return sorted((folder / "model").glob("*.npz"))


def test_added_vectors_are_read_by_every_cache(tmp_path):
    cache = opened(tmp_path)
    open_cache = opened(tmp_path)
    assert cached_numbers(open_cache, 1) == []

    cache.add(keys(1, 2), vectors(1, 2))
    cache.add(keys(0, FAR + 2), vectors(0, FAR + 2))
    cache.add(keys(), np.empty((0, 3), np.float32))

    for reader in (cache, open_cache, opened(tmp_path)):
        numbers = cached_numbers(reader, FAR, 2, FAR + 1, 0, 1, FAR + 2, 256)
        assert numbers == [0, 1, 2, FAR + 2]
    assert cached_numbers(opened(tmp_path, "other"), 1) == []
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "vector", "key"])
def test_damaged_file_is_not_used(tmp_path, capsys, damage):
    filled(tmp_path, 1, 2, 3)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "empty":
        data.clear()
    elif damage == "cut":
        del data[-13:]
    else:
        changed = vectors(2) if damage == "vector" else keys(2)
        data[data.index(changed.tobytes()) + 1] ^= 4
    file.write_bytes(data)

    cache = opened(tmp_path)

    assert cached_numbers(cache, 1, 2, 3) == []
    assert f"{file} is damaged and not used" in capsys.readouterr().err
    cache.add(keys(2, 3), vectors(2, 3))
    assert cached_numbers(opened(tmp_path), 1, 2, 3) == [2, 3]


def test_full_disk_damages_no_file(tmp_path):
    cache = filled(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with raises("cannot-write"):
            cache.add(keys(*range(100)), vectors(*range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert cached_numbers(opened(tmp_path), *range(100)) == [1, 2]
    assert sorted((tmp_path / "model").iterdir()) == files(tmp_path)


def fill(folder, numbers):
    """Add each vector in a file of its own."""
    for number in numbers:
        filled(folder, number)


def test_two_processes_fill_one_cache(tmp_path):
    cache = opened(tmp_path)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=fill, args=(tmp_path, range(start, 100, 2))) for start in (0, 1)
    ]

    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert [worker.exitcode for worker in workers] == [0, 0]
    assert cached_numbers(cache, *range(200)) == [*range(100)]
    assert cached_numbers(opened(tmp_path), *range(200)) == [*range(100)]
    assert len(files(tmp_path)) < 80, "small files are joined"


def test_small_files_are_joined(tmp_path):
    fill(tmp_path, range(170))

    assert cached_numbers(opened(tmp_path), *range(200)) == [*range(170)]
    assert len(files(tmp_path)) < 64
