import multiprocessing

import numpy as np
import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.vector_cache import KEY_BYTES, VectorCache


def key(number):
    return number.to_bytes(KEY_BYTES, "big")


def vectors(*numbers):
    return np.array([[n, n + 0.5, -n] for n in numbers], dtype=np.float32)


def held(cache, *numbers):
    return {int.from_bytes(k, "big"): v.tolist() for k, v in cache.get([key(n) for n in numbers]).items()}


def test_what_is_added_is_found_by_the_next_process(tmp_path):
    cache = VectorCache.open(tmp_path, "model")
    assert cache.get([key(1)]) == {}
    cache.add([key(1), key(2)], vectors(1, 2))
    cache.add([key(3)], vectors(3))
    for one in (cache, VectorCache.open(tmp_path, "model")):
        assert held(one, 3, 1, 9) == {3: [3, 3.5, -3], 1: [1, 1.5, -1]}
    assert VectorCache.open(tmp_path, "other").get([key(1)]) == {}


@pytest.mark.parametrize(("file", "cut"), [("keys", 5), ("vectors", 7), ("keys", KEY_BYTES), ("vectors", 12)])
def test_a_torn_tail_is_ignored_and_overwritten(tmp_path, file, cut):
    VectorCache.open(tmp_path, "model").add([key(1), key(2)], vectors(1, 2))
    torn = tmp_path / f"model.{file}"
    torn.write_bytes(torn.read_bytes()[:-cut])
    cache = VectorCache.open(tmp_path, "model")
    assert held(cache, 1, 2) == {1: [1, 1.5, -1]}
    cache.add([key(3), key(2)], vectors(3, 2))
    assert held(VectorCache.open(tmp_path, "model"), 1, 2, 3) == {1: [1, 1.5, -1], 2: [2, 2.5, -2], 3: [3, 3.5, -3]}


def test_vectors_without_keys_are_overwritten(tmp_path):
    VectorCache.open(tmp_path, "model").add([key(1)], vectors(1))
    with (tmp_path / "model.vectors").open("ab") as file:  # killed between vectors and keys
        file.write(vectors(7, 8).tobytes())
    VectorCache.open(tmp_path, "model").add([key(2)], vectors(2))
    assert held(VectorCache.open(tmp_path, "model"), 1, 2) == {1: [1, 1.5, -1], 2: [2, 2.5, -2]}


def test_a_lost_vectors_file_is_an_empty_cache(tmp_path):
    VectorCache.open(tmp_path, "model").add([key(1)], vectors(1))
    (tmp_path / "model.vectors").unlink()
    cache = VectorCache.open(tmp_path, "model")
    assert cache.get([key(1)]) == {}
    cache.add([key(2)], vectors(2))
    assert held(VectorCache.open(tmp_path, "model"), 1, 2) == {2: [2, 2.5, -2]}


def test_two_open_caches_append_after_one_another(tmp_path):
    one, two = VectorCache.open(tmp_path, "model"), VectorCache.open(tmp_path, "model")
    one.add([key(1), key(2)], vectors(1, 2))
    two.add([key(2), key(3)], vectors(2, 3))
    one.add([key(4)], vectors(4))
    assert sorted(held(VectorCache.open(tmp_path, "model"), 1, 2, 3, 4)) == [1, 2, 3, 4]
    assert held(two, 2, 3) == {2: [2, 2.5, -2], 3: [3, 3.5, -3]}
    assert (tmp_path / "model.keys").stat().st_size == 4 * KEY_BYTES


def fill(folder, numbers):
    cache = VectorCache.open(folder, "model")
    for number in numbers:
        cache.add([key(number)], vectors(number))


def test_two_processes_share_a_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(tmp_path, range(start, 120, 2))) for start in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = held(VectorCache.open(tmp_path, "model"), *range(120))
    assert found == {n: [n, n + 0.5, -n] for n in range(120)}


def test_an_impossible_folder_and_a_broken_header_are_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SkilltrainError, match="cannot make the vector cache"):
        VectorCache.open(tmp_path / "file", "model")
    (tmp_path / "model.json").write_text("")
    with pytest.raises(SkilltrainError, match="is not JSON"):
        VectorCache.open(tmp_path, "model")
