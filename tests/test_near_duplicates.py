import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.data.near_duplicates import TrigramReader, bands_and_rows, jaccard, near_duplicate_clusters
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill


def skill(skill_id, body):
    return Skill(skill_id, skill_id, "", body)


def sets(*bodies):
    reader = TrigramReader([skill(str(n), body) for n, body in enumerate(bodies)])
    return [reader[n] for n in range(len(bodies))]


def words(seed, count):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(count))


def test_jaccard_of_word_trigrams_worked_by_hand():
    # abc bcd cde / bcd cde def: 2 shared of 4.
    left, right = sets("a b c d e", "b c d e f")
    assert len(left) == len(right) == 3
    assert jaccard(left, right) == 0.5


def test_case_layout_width_and_punctuation_do_not_matter():
    left, right = sets("# Read the\n\nPDF, twice!", "read THE ｐｄｆ twice")
    assert jaccard(left, right) == 1.0


def test_the_order_of_words_matters():
    left, right = sets("a b c", "c b a")
    assert jaccard(left, right) == 0.0
    assert jaccard(*sets("a a b", "a b a")) == 0.0


def test_cjk_characters_are_words():
    left, right = sets("解析文件吧", "解析文件")
    assert len(left) == 3 and jaccard(left, right) == pytest.approx(2 / 3)


def test_short_bodies_compare_whole_and_empty_ones_resemble_nothing():
    assert jaccard(*sets("run it", "Run it!")) == 1.0
    assert jaccard(*sets("run it", "run")) == 0.0
    assert jaccard(*sets("", "!!")) == 0.0


def test_trigrams_are_the_same_in_every_process():
    code = (
        "from skilltrain.data.near_duplicates import TrigramReader; from skilltrain.records import Skill; "
        "print(TrigramReader([Skill('a', 'a', '', 'read the pdf')])[0].tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(sets("read the pdf")[0].tolist())


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_jaccard_agrees_with_python_sets(left, right):
    def grams(tokens):
        width = min(3, len(tokens))
        return {tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)} if width else set()

    expected = len(grams(left) & grams(right)) / max(1, len(grams(left) | grams(right)))
    assert jaccard(*sets(" ".join(left), " ".join(right))) == pytest.approx(expected)


def test_copies_share_a_cluster_and_clusters_are_numbered_by_lowest_id():
    text = words(1, 200)
    skills = [skill("d", words(2, 200)), skill("a", text), skill("c", text + " and more"), skill("b", words(3, 200))]
    assert near_duplicate_clusters(skills, 0.6) == {"a": 0, "b": 1, "c": 0, "d": 2}


def test_clusters_do_not_depend_on_order():
    base = [words(n // 3, 120) + f" tail {n}" for n in range(30)]
    skills = [skill(f"s{n:02}", body) for n, body in enumerate(base)]
    expected = near_duplicate_clusters(skills, 0.6)
    assert expected == {f"s{n:02}": n // 3 for n in range(30)}
    random.Random(0).shuffle(skills)
    assert near_duplicate_clusters(skills, 0.6) == expected


def test_a_chain_of_pairs_is_one_cluster():
    tokens = words(4, 140).split()
    chain = [" ".join(tokens[start : start + 100]) for start in (0, 20, 40)]
    left, _, right = sets(*chain)
    assert jaccard(left, right) < 0.6
    clusters = near_duplicate_clusters([skill(str(n), body) for n, body in enumerate(chain)], 0.6)
    assert set(clusters.values()) == {0}


def test_empty_bodies_are_no_copies_of_each_other():
    assert near_duplicate_clusters([skill("a", ""), skill("b", "")], 0.6) == {"a": 0, "b": 1}
    assert near_duplicate_clusters([], 0.6) == {}


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_lsh_layout_finds_99_percent_at_the_threshold(threshold):
    bands, rows = bands_and_rows(threshold)
    assert bands * rows <= 128 and bands >= 2
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


@pytest.mark.parametrize("threshold", [0, -1, 1.5])
def test_a_threshold_outside_its_range_is_refused(threshold):
    with pytest.raises(SkilltrainError, match="near-duplicate threshold"):
        near_duplicate_clusters([], threshold)
