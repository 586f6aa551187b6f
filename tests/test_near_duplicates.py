import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.config import validate
from skilltrain.data import near_duplicates as module
from skilltrain.data.near_duplicates import (
    ClustersConfig,
    TrigramSets,
    bands_and_rows,
    copies_of,
    jaccard,
    link_near_duplicates,
    near_duplicate_clusters,
    numbered,
    run_clusters,
    word_trigrams,
)
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.tables import CLUSTERS, SKILLS, read_table, rows_of, write_table
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
    code = "from skilltrain.data.near_duplicates import word_trigrams; print(word_trigrams('read the pdf').tolist())"
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
    monkeypatch.setattr("skilltrain.data.near_duplicates._BLOCK", 100)
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


HUB = "automate {} tasks via the hub"  # 4 trigrams, one of them the same in all
NAMES = np.array([0, 1, 2, 3, 3, 4])
HUB_SERVICES = ["brex", "bench", "nasa", "gleap", "gleap", "zoho"]


HUB_POOL = TrigramSets.of([HUB.format(service) for service in HUB_SERVICES], ONE)


def test_what_stands_under_many_names_is_left_out():
    distinct = HUB_POOL.without_templates(NAMES, 4)
    assert HUB_POOL.sizes.tolist() == [4] * 6
    assert distinct.sizes.tolist() == [2] * 6  # "tasks via the" and "via the hub" stand under five names
    assert jaccard(HUB_POOL[0], HUB_POOL[1]) == pytest.approx(2 / 6)
    assert jaccard(distinct[0], distinct[1]) == 0.0
    distinct = HUB_POOL.without_templates(NAMES, 5)
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


# Clusters -----------------------------------------------------------------------------------------------------------


def skill(skill_id, body):
    return Skill(skill_id, skill_id, "", body)


def words(seed, count):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(count))


def edited(body, share, seed):
    """`body` with about `share` of its words replaced."""
    generator = random.Random(seed)
    return " ".join(word if generator.random() >= share else f"x{generator.random()}" for word in body.split())


def exact_roots(sets, threshold):
    """The lowest position of each connected component, by comparing every pair."""
    roots = list(range(len(sets)))
    for right in range(len(sets)):
        for left in range(right):
            if jaccard(sets[left], sets[right]) >= threshold and roots[left] != roots[right]:
                low, high = sorted((roots[left], roots[right]))
                roots = [low if root == high else root for root in roots]
    return roots


def test_copies_share_a_cluster_and_clusters_are_numbered_by_lowest_id():
    text = words(1, 200)
    skills = [skill("d", words(2, 200)), skill("a", text), skill("c", text + " and more"), skill("b", words(3, 200))]
    assert near_duplicate_clusters(skills, 0.6) == {"a": 0, "b": 1, "c": 0, "d": 2}


def test_copies_share_a_cluster_or_a_name_and_three_tenths_of_their_trigrams(tmp_path):
    """Of 9 words a body has 7 trigrams; bodies that share the first 5 words share 3 of 11, the first 6 4 of 10."""
    five, six = "a b c d e p q r s", "a b c d e f p q r"
    named = {"gold": ("PDF tools", "a b c d e f g h i"), "near": ("pdf-tools", six), "far": ("pdf-tools", five),
             "other name": ("x", six), "of cluster": ("y", "z"), "lone": ("", "a b c d e f g h i")}  # fmt: skip
    skills = {one: Skill(one, name, "", body) for one, (name, body) in named.items()}
    rows = [{"skill_id": one, "cluster": n} for n, one in enumerate(skills) if one != "of cluster"]
    write_table([*rows, {"skill_id": "of cluster", "cluster": 0}], CLUSTERS, tmp_path)
    assert copies_of(["gold", "lone", "absent"], skills, tmp_path) == {"gold": ["near", "of cluster"]}


def test_a_chain_of_pairs_is_one_cluster():
    tokens = words(4, 140).split()
    chain = [" ".join(tokens[start : start + 100]) for start in (0, 20, 40)]
    sets = TrigramSets.of(chain, ONE)
    assert jaccard(sets[0], sets[2]) < 0.6
    assert link_near_duplicates(sets, 0.6, ONE) == [0, 0, 0]


def test_all_pairs_that_exact_comparison_finds_are_found():
    families = [words(seed, 150) for seed in range(8)]
    bodies = [edited(families[n % 8], share, n) for n, share in enumerate(np.linspace(0, 0.25, 96))]
    random.Random(1).shuffle(bodies)
    sets = TrigramSets.of(bodies, ONE)
    exact = exact_roots(sets, 0.6)
    assert 8 < len(set(exact)) < 96
    assert link_near_duplicates(sets, 0.6, ONE) == exact


def test_a_large_cluster_needs_few_comparisons(monkeypatch):
    compared = []
    monkeypatch.setattr(module, "jaccard", lambda *pair: compared.append(pair) or jaccard(*pair))
    sets = TrigramSets.of([words(0, 100) + f" tail {n}" for n in range(400)], ONE)
    assert set(link_near_duplicates(sets, 0.6, ONE)) == {0}
    assert len(compared) == 399  # of 79,800 pairs


def test_empty_bodies_are_no_copies_of_each_other():
    assert near_duplicate_clusters([skill("a", ""), skill("b", "")], 0.6) == {"a": 0, "b": 1}
    assert near_duplicate_clusters([skill("a", "?!"), skill("b", "run"), skill("c", "Run!")], 0.6) == {
        "a": 0,
        "b": 1,
        "c": 1,
    }
    assert near_duplicate_clusters([], 0.6) == {}
    skills = [skill("a", words(1, 50)), skill("b", words(1, 50)), skill("c", words(1, 50) + " more")]
    assert near_duplicate_clusters(skills, 1.0) == {"a": 0, "b": 0, "c": 1}
    with pytest.raises(SkilltrainError, match="near-duplicate threshold"):
        near_duplicate_clusters([], 1.5)


def test_a_body_of_20_mb_and_one_in_no_known_script_are_read():
    large = "word other " * 1_900_000
    glyphs = "\U00012000\U00012001 \U00012002 \ue000\ue001 \u200b\u0000 \U0001f600"
    assert near_duplicate_clusters([skill("a", glyphs), skill("b", glyphs)], 0.6) == {"a": 0, "b": 0}
    clusters = near_duplicate_clusters([skill("a", large), skill("b", large + "end"), skill("c", "word")], 0.3)
    assert clusters == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_lsh_layout_finds_99_percent_at_the_threshold(threshold):
    bands, rows = bands_and_rows(threshold)
    assert bands * rows <= 160 and bands >= 2
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


# The stage -----------------------------------------------------------------------------------------------------------

TEXT = "read the pages of a pdf file and print every one of them to the terminal in order"
TEMPLATE = "Automate {} tasks via Rube MCP. Always search the tools first for current schemas, then plan and execute."
SERVICES = ("brex", "bench", "nasa", "gleap", "zoho", "textit", "wakatime")
POOL = [
    Skill("z/pdf", "pdf", "", TEXT),
    Skill("a/pdf", "pdf-official", "", TEXT + " twice"),
    Skill("m/git", "git", "", "commit all that has changed and push it to the remote"),
    Skill("e/empty", "empty", "", ""),
    *(Skill(f"rube/{service}", f"{service}-automation", "", TEMPLATE.format(service)) for service in SERVICES),
]


@pytest.fixture
def settings(tmp_path):
    write_table(rows_of(POOL), SKILLS, tmp_path / "pool.parquet")
    (tmp_path / "out").mkdir()

    def make(**changes):
        values = {"stage": "clusters", "pool": tmp_path / "pool.parquet", "out": tmp_path / "out"}
        values["workers"] = {"num": 1}
        return validate(ClustersConfig, values | changes, "recipe")

    return make


def clusters_of(out):
    table = read_table(out, CLUSTERS)
    return dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))


def test_plain_trigrams_put_a_template_into_one_cluster_in_any_order_on_any_number_of_workers(settings, tmp_path):
    assert run_clusters(settings(max_names=None), tmp_path / "out")["largest"] == {"rube/bench": 7, "a/pdf": 2}
    expected = clusters_of(tmp_path / "out")
    write_table(rows_of(POOL[::-1]), SKILLS, tmp_path / "pool.parquet")
    run_clusters(settings(max_names=None, workers={"num": 2}), tmp_path / "out")
    assert clusters_of(tmp_path / "out") == expected


def test_copies_share_a_cluster_and_siblings_of_a_template_do_not(settings, tmp_path):
    summary = run_clusters(settings(), tmp_path / "out")
    clusters = clusters_of(tmp_path / "out")
    assert list(clusters) == sorted(skill.skill_id for skill in POOL)
    assert clusters["a/pdf"] == clusters["z/pdf"] == 0
    assert len(set(clusters.values())) == len(POOL) - 1
    assert summary == {
        "num_skills": 11, "num_without_trigrams": 1, "num_clusters": 1, "num_skills_in_clusters": 2,
        "largest": {"a/pdf": 2},
    }  # fmt: skip
