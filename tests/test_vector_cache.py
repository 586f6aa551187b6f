import multiprocessing
import os
import resource
import shutil
import time

import numpy as np
import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.vector_block import KEY
from skilltrain.retrieval.vector_cache import VectorCache


def key(number):
    return number.to_bytes(KEY.itemsize, "big")


def vectors(*numbers):
    return np.array([[n, n + 0.5, -n] for n in numbers], dtype=np.float32)


def opened(folder, model="model", dim=3):
    return VectorCache.open(folder, model, dim)


def filled(folder, *numbers):
    cache = opened(folder)
    cache.add([key(n) for n in numbers], vectors(*numbers))
    return cache


def held(cache, *numbers):
    return {int.from_bytes(k, "big"): v.tolist() for k, v in cache.get([key(n) for n in numbers]).items()}


def expected(*numbers):
    return {n: [n, n + 0.5, -n] for n in numbers}


def files(folder):
    return sorted((folder / "model").glob("*.vectors"))


def test_what_is_added_is_found_by_the_next_process(tmp_path):
    cache = opened(tmp_path)
    assert cache.get([key(1)]) == {}
    cache.add([key(1), key(2)], vectors(1, 2))
    cache.add([key(3)], vectors(3))
    cache.add([], vectors())
    for one in (cache, opened(tmp_path)):
        assert held(one, 3, 1, 9) == expected(1, 3)
        assert one.places([key(9), key(2)])[:, 0].tolist()[0] == -1
    assert opened(tmp_path, "other").get([key(1)]) == {}


def test_keys_of_any_bytes_are_told_apart(tmp_path):
    keys = [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), b"ab" + bytes(14), b"ab" + bytes(13) + b"\1", b"\xff" * 16]
    cache = opened(tmp_path)
    for number, one in enumerate(keys[:-1]):
        assert one not in cache.get(keys)
        cache.add([one], vectors(number))
    assert {k: v[0] for k, v in opened(tmp_path).get(keys).items()} == {k: n for n, k in enumerate(keys[:-1])}


def test_many_vectors_in_any_order_with_repeats(tmp_path):
    cache, numbers = opened(tmp_path), np.random.default_rng(0).permutation(3000)
    for start in range(0, 3000, 700):
        cache.add([key(int(n)) for n in numbers[start : start + 700]], vectors(*numbers[start : start + 700]))
    wanted = [5, 2999, 5, 4000, 17]
    for one in (cache, opened(tmp_path)):
        places = one.places([key(n) for n in wanted])
        assert (places[:, 0] >= 0).tolist() == [True, True, True, False, True]
        known, found = np.flatnonzero(places[:, 0] >= 0), {}
        for some, rows in one.read(places[known]):
            found |= {int(known[n]): row[0] for n, row in zip(some, rows, strict=True)}
        assert found == {0: 5, 1: 2999, 2: 5, 4: 17}


def test_a_cut_file_keeps_the_vectors_that_are_left(tmp_path):
    filled(tmp_path, 1, 2, 3)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-13])  # one number of the second vector and the whole third
    cache = opened(tmp_path)
    assert held(cache, 1, 2, 3) == expected(1)
    cache.add([key(2), key(3)], vectors(2, 3))
    assert held(opened(tmp_path), 1, 2, 3) == expected(1, 2, 3)


@pytest.mark.parametrize("left", [0, 7, 40])
def test_a_file_without_a_whole_head_is_told_of_and_not_used(tmp_path, capsys, left):
    filled(tmp_path, 1, 2)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:left])
    assert held(opened(tmp_path), 1, 2) == {}
    assert "is damaged and not used" in capsys.readouterr().err


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(bytes(data))


def test_a_changed_key_or_checksum_spoils_the_file(tmp_path, capsys):
    filled(tmp_path, 1, 2)
    flip(files(tmp_path)[0], 25)
    assert held(opened(tmp_path), 1, 2) == {} and "is damaged" in capsys.readouterr().err


def test_a_changed_vector_is_found_out_and_only_it_is_lost(tmp_path, capsys):
    filled(tmp_path, 1, 2, 3)
    flip(files(tmp_path)[0], -13)  # in the second vector
    cache = opened(tmp_path)
    assert held(cache, 1, 2, 3) == expected(1, 3)
    assert "vectors in it are damaged" in capsys.readouterr().err
    assert (cache.places([key(2)]) == -1).all()
    assert held(opened(tmp_path), 1, 2, 3) == expected(1, 3)  # the file was written anew
    assert "damaged" not in capsys.readouterr().err and len(files(tmp_path)) == 1
    cache.add([key(2)], vectors(2))
    assert held(opened(tmp_path), 1, 2, 3) == expected(1, 2, 3)


def test_a_file_that_is_gone_is_no_fault(tmp_path, capsys):
    cache = filled(tmp_path, 1, 2)
    cache.add([key(3)], vectors(3))
    for file in files(tmp_path):
        file.unlink()
    filled(tmp_path, 2)
    assert held(cache, 1, 2, 3) == {}
    assert held(cache, 1, 2, 3) == expected(2)  # it has looked again
    assert capsys.readouterr().err == ""


def test_vectors_of_another_width_are_not_used(tmp_path, capsys):
    filled(tmp_path, 1)
    assert opened(tmp_path, dim=4).get([key(1)]) == {}
    assert "is damaged and not used" in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_to_can_be_read(tmp_path, monkeypatch):
    filled(tmp_path, 1, 2)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert held(opened(tmp_path), 1, 2) == expected(1, 2)


def test_many_small_files_become_one(tmp_path):
    cache, watching = opened(tmp_path), opened(tmp_path)
    for number in range(63):
        cache.add([key(number)], vectors(number))
    watching.refresh()
    assert len(files(tmp_path)) == 63
    cache.add([key(63), key(64)], vectors(63, 64))
    assert len(files(tmp_path)) == 1
    for one in (cache, opened(tmp_path)):
        assert held(one, *range(70)) == expected(*range(65))
    assert held(watching, *range(65)) == {}  # its files are gone
    assert held(watching, *range(65)) == expected(*range(65))


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path):
    filled(tmp_path, 1)
    old, new = (tmp_path / "model" / f".{name}.vectors.x.partial" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half")
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    assert held(opened(tmp_path), 1) == expected(1)
    assert not old.exists() and new.exists()


def test_a_full_disk_is_one_clear_line_and_spoils_nothing(tmp_path):
    cache = filled(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(SkilltrainError, match=r"vectors: cannot write: .*what was written before is kept"):
            cache.add([key(n) for n in range(100)], vectors(*range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(opened(tmp_path), *range(100)) == expected(1, 2)
    assert [path.name for path in (tmp_path / "model").iterdir()] == [path.name for path in files(tmp_path)]
    cache.add([key(3)], vectors(3))
    assert held(opened(tmp_path), 1, 2, 3) == expected(1, 2, 3)


def fill(folder, numbers):
    cache = opened(folder)
    for number in numbers:
        cache.add([key(number)], vectors(number))


def test_two_processes_fill_one_cache_and_join_its_files_meanwhile(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(tmp_path, range(start, 400, 2))) for start in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert held(opened(tmp_path), *range(400)) == expected(*range(400))


def test_caches_of_two_machines_are_one_when_their_files_lie_together(tmp_path):
    filled(tmp_path / "one", 1, 2)
    filled(tmp_path / "two", 2, 3)
    for file in files(tmp_path / "two"):
        shutil.copy(file, tmp_path / "one" / "model")
    assert held(opened(tmp_path / "one"), 1, 2, 3) == expected(1, 2, 3)


def test_an_impossible_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SkilltrainError, match="cannot make the vector cache"):
        opened(tmp_path / "file")
