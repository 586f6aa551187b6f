"""Near-duplicates are bodies that share word trigrams. Clusters of a pool hold them."""

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

ONE_WORKER = WorkersConfig(num=1)


@pytest.mark.parametrize(
    ("first", "second", "similarity"),
    [
        ("a b c d e", "b c d e f", 0.5),  # abc bcd cde / bcd cde def: 2 of 4 are shared
        ("# Read the\n\nPDF, twice!", "read THE ｐｄｆ twice", 1),
        ("a b c", "c b a", 0),
        ("a a b", "a b a", 0),
        ("解析文件吧", "解析文件", 2 / 3),
        ("run it", "Run it!", 1),
        ("run it", "run", 0),
        ("", "!!", 0),
    ],
)
def test_jaccard_of_word_trigrams(first, second, similarity):
    assert jaccard(word_trigrams(first), word_trigrams(second)) == pytest.approx(similarity)


def test_trigrams_are_equal_in_every_process():
    assert word_trigrams("read the pdf").tolist() == [16379468341237586607]


def test_trigram_sets_equal_those_of_single_bodies(monkeypatch):
    monkeypatch.setattr("skilltrain.data.near_duplicates._BLOCK", 100)
    bodies = ["a b c d", "", "one", "日本語 text", *("w x y z" for _ in range(300))]

    sets = TrigramSets.of(bodies, WorkersConfig(num=2))

    assert len(sets) == len(bodies)
    assert sets.sizes.tolist()[:4] == [2, 0, 1, 2]
    for position, body in enumerate(bodies):
        assert sets[position].tolist() == word_trigrams(body).tolist()


def test_equal_values_have_equal_numbers():
    assert number_values(["pdf", "git", "pdf", "", "a"]).tolist() == [1, 2, 1, -1, 3]


@given(
    st.lists(
        st.tuples(st.integers(-1, 3), st.lists(st.sampled_from("abcd"), max_size=6)), max_size=12
    ),
    st.integers(1, 3),
)
def test_trigrams_of_many_names_are_dropped(skills, max_names):
    """Skills without a name (-1) count as one name."""
    sets = TrigramSets.of([" ".join(words) for _, words in skills], ONE_WORKER)
    names = np.array([name for name, _ in skills], dtype=np.int64)
    names_by_trigram = {}
    for position, name in enumerate(names):
        for trigram in sets[position].tolist():
            names_by_trigram.setdefault(trigram, set()).add(name)

    distinct = sets.without_templates(names, max_names)

    for position in range(len(skills)):
        trigrams = sets[position].tolist()
        expected = [t for t in trigrams if len(names_by_trigram[t]) <= max_names]
        assert distinct[position].tolist() == expected


# Clusters ---------------------------------------------------------------------


def words(seed, count):
    """Return random words."""
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(count))


def edited(body, share, seed):
    """Replace about `share` of the words."""
    generator = random.Random(seed)
    new_words = []
    for word in body.split():
        stays = generator.random() >= share
        new_words.append(word if stays else f"x{generator.random()}")
    return " ".join(new_words)


def exact_roots(sets, threshold):
    """Return the lowest position of each one's connected component. Compares all pairs."""
    roots = list(range(len(sets)))
    for second in range(len(sets)):
        for first in range(second):
            is_linked = jaccard(sets[first], sets[second]) >= threshold
            if is_linked and roots[first] != roots[second]:
                low, high = sorted((roots[first], roots[second]))
                roots = [low if root == high else root for root in roots]
    return roots


def test_links_equal_exact_comparison():
    families = [words(seed, 150) for seed in range(8)]
    shares = np.linspace(0, 0.25, 96)
    bodies = [edited(families[n % 8], share, n) for n, share in enumerate(shares)]
    random.Random(1).shuffle(bodies)
    sets = TrigramSets.of(bodies, ONE_WORKER)

    roots = link_near_duplicates(sets, 0.6, ONE_WORKER)

    assert 8 < len(set(roots)) < 96
    assert roots == exact_roots(sets, 0.6)


def test_links_join_chains():
    tokens = words(4, 140).split()
    bodies = [" ".join(tokens[start : start + 100]) for start in (0, 20, 40)]
    sets = TrigramSets.of(bodies, ONE_WORKER)
    assert jaccard(sets[0], sets[2]) < 0.6

    assert link_near_duplicates(sets, 0.6, ONE_WORKER) == [0, 0, 0]


def test_large_cluster_needs_few_comparisons(monkeypatch):
    pairs = []
    monkeypatch.setattr(module, "jaccard", lambda *pair: pairs.append(pair) or jaccard(*pair))
    sets = TrigramSets.of([words(0, 100) + f" tail {n}" for n in range(200)], ONE_WORKER)

    roots = link_near_duplicates(sets, 0.6, ONE_WORKER)

    assert set(roots) == {0}
    assert len(pairs) == 199  # of 19,900


GLYPHS = "\U00012000\U00012001 \U00012002 \ue000\ue001 \u200b\u0000 \U0001f600"
LARGE = "word other " * 400_000


@pytest.mark.parametrize(
    ("bodies", "threshold", "clusters"),
    [
        (
            [words(1, 200), words(3, 200), words(1, 200) + " and more", words(2, 200)],
            0.6,
            [0, 1, 0, 2],
        ),
        # Empty bodies are no near-duplicates of each other.
        (["", "", "?!", "run", "Run!"], 0.6, [0, 1, 2, 3, 3]),
        ([words(1, 50), words(1, 50), words(1, 50) + " more"], 1.0, [0, 0, 1]),
        ([GLYPHS, GLYPHS], 0.6, [0, 0]),
        ([LARGE, LARGE + "end", "word"], 0.3, [0, 0, 1]),
        ([], 0.6, []),
    ],
)
def test_clusters_are_numbered_by_lowest_id(bodies, threshold, clusters):
    skills = [
        Skill(skill_id, skill_id, "", body) for skill_id, body in zip("abcde", bodies, strict=False)
    ]

    clusters_by_skill = near_duplicate_clusters(skills[::-1], threshold)

    assert clusters_by_skill == dict(zip("abcde", clusters, strict=False))


def test_copies_share_cluster_or_name(tmp_path):
    """A copy is in the cluster, or has the name and at least .3 of the trigrams.

    A body of 9 words has 7 trigrams. Two bodies with the same first five words share 3 of 11
    trigrams, with the same first six words 4 of 10.
    """
    five_words = "a b c d e p q r s"
    six_words = "a b c d e f p q r"
    skills = [
        Skill("gold", "PDF tools", "", "a b c d e f g h i"),
        Skill("near", "pdf-tools", "", six_words),
        Skill("far", "pdf-tools", "", five_words),
        Skill("other name", "x", "", six_words),
        Skill("of cluster", "y", "", "z"),
        Skill("lone", "", "", "a b c d e f g h i"),
    ]
    clusters = {skill.skill_id: n for n, skill in enumerate(skills)}
    clusters["of cluster"] = clusters["gold"]
    rows = [{"skill_id": skill_id, "cluster": n} for skill_id, n in clusters.items()]
    write_table(rows, CLUSTERS, tmp_path)
    pool = {skill.skill_id: skill for skill in skills}

    copies = copies_of(["gold", "lone", "absent"], pool, tmp_path)

    assert copies == {"gold": ["near", "of cluster"]}


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_lsh_finds_99_percent_at_threshold(threshold):
    bands, rows = bands_and_rows(threshold)

    assert bands >= 2
    assert bands * rows <= 160
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


TEXT = "read the pages of a pdf file and print every one of them to the terminal in order"
TEMPLATE = (
    "Automate {} tasks via Rube MCP. "
    "Always search the tools first for current schemas, then plan and execute."
)
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


def run_clusters(folder, pool=POOL, **changes):
    """Run the stage. Returns its summary and the cluster of each skill."""
    write_table(pool, SKILLS, folder / "pool.parquet")
    values = {
        "stage": "clusters",
        "pool": folder / "pool.parquet",
        "out": folder,
        "workers": {"num": 1},
    }
    summary = validate(Clusters, values | changes, "recipe").run(folder)
    rows = read_table(folder, CLUSTERS).to_pylist()
    return summary, {row["skill_id"]: row["cluster"] for row in rows}


def test_stage_clusters_copies(tmp_path):
    summary, clusters = run_clusters(tmp_path)

    assert list(clusters) == sorted(skill.skill_id for skill in POOL)
    assert clusters["a/pdf"] == clusters["z/pdf"] == 0
    assert len(set(clusters.values())) == len(POOL) - 1
    assert summary == {
        "num_skills": 11,
        "num_clusters": 1,
        "num_skills_in_clusters": 2,
        "largest": {"a/pdf": 2},
    }


def test_skills_of_template_are_copies_without_max_names(tmp_path):
    summary, _ = run_clusters(tmp_path, max_names=None)

    assert summary["largest"] == {"rube/bench": 7, "a/pdf": 2}


def test_order_or_workers_do_not_change_clusters(tmp_path):
    _, clusters = run_clusters(tmp_path, max_names=None)

    _, reversed_clusters = run_clusters(tmp_path, POOL[::-1], max_names=None, workers={"num": 2})

    assert reversed_clusters == clusters
