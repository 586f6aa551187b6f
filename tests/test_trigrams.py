import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.trigrams import TrigramSets, jaccard, numbered, word_trigrams
from skilltrain.workers import WorkersConfig

ONE = WorkersConfig(num=1)


def sets(*texts):
    return [word_trigrams(text) for text in texts]


@pytest.mark.parametrize(
    ("left", "right", "value"),
    [
        ("a b c d e", "b c d e f", 0.5),  # abc bcd cde / bcd cde def: 2 shared of 4
        ("# Read the\n\nPDF, twice!", "read THE ｐｄｆ twice", 1),
        ("a b c", "c b a", 0),
        ("a a b", "a b a", 0),
        ("解析文件吧", "解析文件", 2 / 3),
        ("run it", "Run it!", 1),
        ("run it", "run", 0),
        ("", "!!", 0),
    ],
)
def test_jaccard_of_word_trigrams_worked_by_hand(left, right, value):
    assert jaccard(*sets(left, right)) == pytest.approx(value)


def test_trigrams_are_the_same_in_every_process():
    code = "from skilltrain.data.trigrams import word_trigrams; print(word_trigrams('read the pdf').tolist())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(sets("read the pdf")[0].tolist())


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_jaccard_agrees_with_python_sets(left, right):
    def grams(tokens):
        width = min(3, len(tokens))
        return {tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)} if width else set()

    expected = len(grams(left) & grams(right)) / max(1, len(grams(left) | grams(right)))
    assert jaccard(*sets(" ".join(left), " ".join(right))) == pytest.approx(expected)


@pytest.mark.parametrize("workers", [ONE, WorkersConfig(num=2)], ids=str)
def test_the_sets_of_a_pool_are_those_of_its_bodies(workers, monkeypatch):
    monkeypatch.setattr("skilltrain.data.trigrams._BLOCK", 100)
    bodies = ["a b c d", "", "one", "日本語 text", *("w x y z" for _ in range(300))]
    pool = TrigramSets.of(bodies, workers)
    assert len(pool) == len(bodies) and pool.sizes.tolist()[:4] == [2, 0, 1, 2]
    for position, body in enumerate(bodies):
        assert pool[position].tolist() == sets(body)[0].tolist()


def test_an_empty_pool_and_empty_bodies_have_no_trigrams():
    assert len(TrigramSets.of([], ONE)) == 0
    hollow = TrigramSets.of(["", "!"], ONE)
    assert hollow.sizes.tolist() == [0, 0] and len(hollow[1]) == 0
    assert hollow.without_templates(np.array([0, 1]), 1).sizes.tolist() == [0, 0]


TEMPLATE = "automate {} tasks via the hub"  # 4 trigrams, one of them the same in all
NAMES = np.array([0, 1, 2, 3, 3, 4])
SERVICES = ["brex", "bench", "nasa", "gleap", "gleap", "zoho"]


POOL = TrigramSets.of([TEMPLATE.format(service) for service in SERVICES], ONE)


def test_what_stands_under_many_names_is_left_out():
    distinct = POOL.without_templates(NAMES, 4)
    assert POOL.sizes.tolist() == [4] * 6
    assert distinct.sizes.tolist() == [2] * 6  # "tasks via the" and "via the hub" stand under five names
    assert jaccard(POOL[0], POOL[1]) == pytest.approx(2 / 6)
    assert jaccard(distinct[0], distinct[1]) == 0.0
    distinct = POOL.without_templates(NAMES, 5)
    assert distinct.sizes.tolist() == [4] * 6  # six skills, five names: copies under one name count once
    assert jaccard(distinct[3], distinct[4]) == 1.0


def test_skills_without_a_name_count_as_one_name():
    pool = TrigramSets.of(["a b c", "a b c", "a b c d"], ONE)
    names = np.array([-1, -1, 0])
    assert pool.without_templates(names, 2).sizes.tolist() == [1, 1, 2]
    assert pool.without_templates(names, 1).sizes.tolist() == [0, 0, 1]


@given(st.lists(st.tuples(st.integers(-1, 3), st.lists(st.sampled_from("abcd"), max_size=6)), max_size=12),
       st.integers(1, 3))  # fmt: skip
def test_templates_are_what_counting_by_hand_says(skills, max_names):
    pool = TrigramSets.of([" ".join(words) for _, words in skills], ONE)
    names_of = {}
    for position, (name, _) in enumerate(skills):
        for trigram in pool[position].tolist():
            names_of.setdefault(trigram, set()).add(name)
    distinct = pool.without_templates(np.array([name for name, _ in skills], dtype=np.int64), max_names)
    for position in range(len(skills)):
        expected = [trigram for trigram in pool[position].tolist() if len(names_of[trigram]) <= max_names]
        assert distinct[position].tolist() == expected


def test_equal_values_get_one_number_and_empty_ones_none():
    assert numbered(["pdf", "git", "pdf", "", "a"]).tolist() == [1, 2, 1, -1, 3]
