"""Which bodies are alike by their word trigrams, templates left out; and the clusters of a pool."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.config import validate
from skilltrain.data import near_duplicates as module
from skilltrain.data.near_duplicates import (
    Clusters,
    TrigramSets,
    bands_and_rows,
    copies_of,
    jaccard,
    link_near_duplicates,
    near_duplicate_clusters,
    number_values,
    word_trigrams,
)
from skilltrain.records import Skill
from skilltrain.tables import CLUSTERS, SKILLS, read_table, write_table
from skilltrain.workers import WorkersConfig

ONE = WorkersConfig(num=1)


def test_jaccard_of_word_trigrams_worked_by_hand():
    for left, right, value in (
        ("a b c d e", "b c d e f", 0.5),  # abc bcd cde / bcd cde def: 2 shared of 4
        ("# Read the\n\nPDF, twice!", "read THE ｐｄｆ twice", 1),
        ("a b c", "c b a", 0),
        ("a a b", "a b a", 0),
        ("解析文件吧", "解析文件", 2 / 3),
        ("run it", "Run it!", 1),
        ("run it", "run", 0),
        ("", "!!", 0),
    ):
        assert jaccard(word_trigrams(left), word_trigrams(right)) == pytest.approx(value), (
            left,
            right,
        )
    assert word_trigrams("read the pdf").tolist() == [16379468341237586607], (
        "the same in every process"
    )


def test_the_sets_of_a_pool_are_those_of_its_bodies(monkeypatch):
    monkeypatch.setattr("skilltrain.data.near_duplicates._BLOCK", 100)
    bodies = ["a b c d", "", "one", "日本語 text", *("w x y z" for _ in range(300))]
    pool = TrigramSets.of(bodies, WorkersConfig(num=2))
    assert len(pool) == len(bodies) and pool.sizes.tolist()[:4] == [2, 0, 1, 2]
    assert all(pool[at].tolist() == word_trigrams(body).tolist() for at, body in enumerate(bodies))
    assert number_values(["pdf", "git", "pdf", "", "a"]).tolist() == [1, 2, 1, -1, 3]


@given(
    st.lists(
        st.tuples(st.integers(-1, 3), st.lists(st.sampled_from("abcd"), max_size=6)), max_size=12
    ),
    st.integers(1, 3),
)
def test_templates_are_what_counting_by_hand_says(skills, max_names):
    """A name of -1 is none, which counts as one name."""
    pool = TrigramSets.of([" ".join(words) for _, words in skills], ONE)
    names_of = {}
    for position, (name, _) in enumerate(skills):
        for trigram in pool[position].tolist():
            names_of.setdefault(trigram, set()).add(name)
    distinct = pool.without_templates(
        np.array([name for name, _ in skills], dtype=np.int64), max_names
    )
    for position in range(len(skills)):
        expected = [
            trigram for trigram in pool[position].tolist() if len(names_of[trigram]) <= max_names
        ]
        assert distinct[position].tolist() == expected


# Clusters ---------------------------------------------------------------------


def words(seed, count):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(count))


def edited(body, share, seed):
    """`body` with about `share` of its words replaced."""
    generator = random.Random(seed)
    return " ".join(
        word if generator.random() >= share else f"x{generator.random()}" for word in body.split()
    )


def exact_roots(sets, threshold):
    """The lowest position of each connected component, by comparing every pair."""
    roots = list(range(len(sets)))
    for right in range(len(sets)):
        for left in range(right):
            if jaccard(sets[left], sets[right]) >= threshold and roots[left] != roots[right]:
                low, high = sorted((roots[left], roots[right]))
                roots = [low if root == high else root for root in roots]
    return roots


def test_all_pairs_that_exact_comparison_finds_are_found():
    families = [words(seed, 150) for seed in range(8)]
    bodies = [edited(families[n % 8], share, n) for n, share in enumerate(np.linspace(0, 0.25, 96))]
    random.Random(1).shuffle(bodies)
    sets = TrigramSets.of(bodies, ONE)
    exact = exact_roots(sets, 0.6)
    assert 8 < len(set(exact)) < 96
    assert link_near_duplicates(sets, 0.6, ONE) == exact
    tokens = words(4, 140).split()
    chain = TrigramSets.of([" ".join(tokens[start : start + 100]) for start in (0, 20, 40)], ONE)
    assert jaccard(chain[0], chain[2]) < 0.6 and link_near_duplicates(chain, 0.6, ONE) == [0, 0, 0]


def test_a_large_cluster_needs_few_comparisons(monkeypatch):
    compared = []
    monkeypatch.setattr(module, "jaccard", lambda *pair: compared.append(pair) or jaccard(*pair))
    sets = TrigramSets.of([words(0, 100) + f" tail {n}" for n in range(200)], ONE)
    assert set(link_near_duplicates(sets, 0.6, ONE)) == {0}
    assert len(compared) == 199  # of 19,900 pairs


GLYPHS, LARGE = (
    "\U00012000\U00012001 \U00012002 \ue000\ue001 \u200b\u0000 \U0001f600",
    "word other " * 400_000,
)


@pytest.mark.parametrize(
    ("bodies", "threshold", "clusters"),
    [
        (
            [words(1, 200), words(3, 200), words(1, 200) + " and more", words(2, 200)],
            0.6,
            [0, 1, 0, 2],
        ),
        (
            ["", "", "?!", "run", "Run!"],
            0.6,
            [0, 1, 2, 3, 3],
        ),  # empty bodies are no copies of each other
        ([words(1, 50), words(1, 50), words(1, 50) + " more"], 1.0, [0, 0, 1]),
        ([GLYPHS, GLYPHS], 0.6, [0, 0]),
        ([LARGE, LARGE + "end", "word"], 0.3, [0, 0, 1]),
        ([], 0.6, []),
    ],
)
def test_copies_share_a_cluster_and_clusters_are_numbered_by_lowest_id(bodies, threshold, clusters):
    skills = [
        Skill(skill_id, skill_id, "", body) for skill_id, body in zip("abcde", bodies, strict=False)
    ]
    expected = dict(zip("abcde", clusters, strict=False))
    assert near_duplicate_clusters(skills[::-1], threshold) == expected


def test_copies_share_a_cluster_or_a_name_and_three_tenths_of_their_trigrams(tmp_path):
    """Of 9 words a body has 7 trigrams; bodies that share the first 5 words share 3 of 11, the first 6 4 of 10."""
    five, six = "a b c d e p q r s", "a b c d e f p q r"
    named = {
        "gold": ("PDF tools", "a b c d e f g h i"),
        "near": ("pdf-tools", six),
        "far": ("pdf-tools", five),
        "other name": ("x", six),
        "of cluster": ("y", "z"),
        "lone": ("", "a b c d e f g h i"),
    }
    skills = {one: Skill(one, name, "", body) for one, (name, body) in named.items()}
    rows = [{"skill_id": one, "cluster": n} for n, one in enumerate(skills) if one != "of cluster"]
    write_table([*rows, {"skill_id": "of cluster", "cluster": 0}], CLUSTERS, tmp_path)
    assert copies_of(["gold", "lone", "absent"], skills, tmp_path) == {
        "gold": ["near", "of cluster"]
    }


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_lsh_layout_finds_99_percent_at_the_threshold(threshold):
    bands, rows = bands_and_rows(threshold)
    assert bands * rows <= 160 and bands >= 2
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


TEXT = "read the pages of a pdf file and print every one of them to the terminal in order"
TEMPLATE = "Automate {} tasks via Rube MCP. Always search the tools first for current schemas, then plan and execute."
SERVICES = ("brex", "bench", "nasa", "gleap", "zoho", "textit", "wakatime")
POOL = [
    Skill("z/pdf", "pdf", "", TEXT),
    Skill("a/pdf", "pdf-official", "", TEXT + " twice"),
    Skill("m/git", "git", "", "commit all that has changed and push it to the remote"),
    Skill("e/empty", "empty", "", ""),
    *(
        Skill(f"rube/{service}", f"{service}-automation", "", TEMPLATE.format(service))
        for service in SERVICES
    ),
]


def test_the_stage_clusters_copies_in_any_order_on_any_number_of_workers(tmp_path):
    """Siblings of a template are copies by plain trigrams alone."""

    def run(pool=POOL, **changes):
        write_table(pool, SKILLS, tmp_path / "pool.parquet")
        values = {
            "stage": "clusters",
            "pool": tmp_path / "pool.parquet",
            "out": tmp_path,
            "workers": {"num": 1},
        }
        summary = validate(Clusters, values | changes, "recipe").run(tmp_path)
        return summary, {
            row["skill_id"]: row["cluster"] for row in read_table(tmp_path, CLUSTERS).to_pylist()
        }

    summary, clusters = run()
    assert list(clusters) == sorted(skill.skill_id for skill in POOL)
    assert (
        clusters["a/pdf"] == clusters["z/pdf"] == 0 and len(set(clusters.values())) == len(POOL) - 1
    )
    assert summary == {
        "num_skills": 11,
        "num_clusters": 1,
        "num_skills_in_clusters": 2,
        "largest": {"a/pdf": 2},
    }
    summary, plain = run(max_names=None)
    assert summary["largest"] == {"rube/bench": 7, "a/pdf": 2}
    assert run(POOL[::-1], max_names=None, workers={"num": 2})[1] == plain
