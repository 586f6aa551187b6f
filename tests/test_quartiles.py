import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.quartiles import quartiles
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import interval


def scored(name: str, values: dict[str, float]) -> SystemResult:
    return SystemResult(name=name, per_query={q: {"m": value} for q, value in values.items()}, rankings={})


def cut(lengths: list[float]) -> list[tuple[int, float, float, int]]:
    """(number, shortest, longest, queries) of each part."""
    by_query = {f"q{i}": length for i, length in enumerate(lengths)}
    found = quartiles([scored("one", dict.fromkeys(by_query, 1.0))], by_query, "m", seed=0)
    return [(part.number, part.shortest, part.longest, part.means["one"].n) for part in found]


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([80, 10, 20, 70, 30, 60, 40, 50], [(1, 10, 20, 2), (2, 30, 40, 2), (3, 50, 60, 2), (4, 70, 80, 2)]),
        ([1, 2, 3, 4, 5], [(1, 1, 1, 1), (2, 2, 2, 1), (3, 3, 4, 2), (4, 5, 5, 1)]),
        ([5, 5, 5, 5], [(1, 5, 5, 4)]),
        ([9, 1], [(1, 1, 1, 1), (2, 9, 9, 1)]),
        ([7], [(1, 7, 7, 1)]),
        ([1, 2, 2, 2, 2, 2, 2, 3], [(1, 1, 1, 1), (2, 2, 2, 6), (3, 3, 3, 1)]),
        ([1.5, 1.5, 1.5, 2, 3, 4, 4, 4], [(1, 1.5, 1.5, 3), (2, 2, 2, 1), (3, 3, 3, 1), (4, 4, 4, 3)]),
    ],
)
def test_parts_by_rank(lengths: list[float], parts: list[tuple[int, float, float, int]]):
    assert cut(lengths) == parts


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_parts_hold_every_query_once_and_equal_lengths_together(lengths: list[int]):
    parts = cut([float(length) for length in lengths])
    assert [number for number, *_ in parts] == list(range(1, len(parts) + 1))
    assert sum(num for *_, num in parts) == len(lengths)
    assert all(low[2] < high[1] for low, high in pairwise(parts))
    assert len(parts) <= min(4, len(set(lengths)))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 60))
def test_distinct_lengths_give_parts_of_one_size(num: int):
    sizes = [part[3] for part in cut([float(i) for i in range(num)])]
    assert max(sizes) - min(sizes) <= 1


def test_means_are_those_of_the_parts_queries():
    lengths = {"a": 1.0, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7, "h": 8, "unused": 9}
    values = dict(zip("abcdefgh", [1.0, 0, 0.5, 0.5, 0, 0, 1, 0.25], strict=True))
    one, two = scored("one", values), scored("two", {q: 1 - value for q, value in reversed(values.items())})
    found = quartiles([one, two], lengths, "m", seed=3)
    assert [part.means["one"].mean for part in found] == [0.5, 0.5, 0, 0.625]
    assert [part.means["two"].mean for part in found] == [0.5, 0.5, 1, 0.375]
    assert found[3].means["one"] == interval([1, 0.25], seed=3)
    assert {part.measure for part in found} == {"m"}
    assert quartiles([], lengths, "m", seed=3) == ()


def test_bad_lengths_and_systems_are_refused():
    one = scored("one", {"a": 1, "b": 0})
    with pytest.raises(SkilltrainError, match="1 queries have no description length, first 'b'"):
        quartiles([one], {"a": 3}, "m", seed=0)
    for odd in (math.nan, math.inf, -1.0):
        with pytest.raises(SkilltrainError, match="query b: a description length is a finite number from 0"):
            quartiles([one], {"a": 3, "b": odd}, "m", seed=0)
    with pytest.raises(SkilltrainError, match="different query sets compared"):
        quartiles([one, scored("two", {"a": 1})], {"a": 3, "b": 4}, "m", seed=0)
    with pytest.raises(SkilltrainError, match="no value of measure 'Hit@1'"):
        quartiles([one], {"a": 3, "b": 4}, "Hit@1", seed=0)
