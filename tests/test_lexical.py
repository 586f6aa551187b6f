import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from faults import raises
from skilltrain.records import Query, Skill
from skilltrain.retrieval.lexical import K1, B, BM25Index, LexicalConfig, Vocabulary, top_k


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The Parsing of read_pdf-files v2.1", ["pars", "read", "pdf", "file", "v2", "1"]),
        ("解析PDF文件 树", ["解析", "pdf", "文件", "树"]),
        ("数据分析", ["数据", "据分", "分析"]),
        ("don't we've it's John's", ["john"]),  # no fragments of stop words
    ],
)
def test_terms_are_stems_and_cjk_bigrams(text, terms):
    assert [stem for _, stem in Vocabulary().words_and_stems(text)] == terms


def test_scores_follow_the_formula_worked_by_hand():
    # Two texts of 2 and 1 terms, mean length 1.5; "cat" is in one of them.
    index = BM25Index(["cat dog", "dog"])
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))

    expected = idf * 1 / (1 + K1 * (1 - B + B * 2 / 1.5))

    np.testing.assert_allclose(index.scores("cats"), [expected, 0.0], rtol=1e-6)


def test_an_index_built_on_another_is_the_one_built_anew(tmp_path):
    texts = ["red apple tree", "", "green pear", "red red plum", "green pear"]
    (tmp_path / "old").mkdir()
    BM25Index(texts).save(tmp_path / "old")
    now = ["a new fig tree", "green pear", texts[3], texts[0], ""]

    built, anew = BM25Index(now, BM25Index.load(tmp_path / "old")), BM25Index(now)

    for query in ("red tree", "pear", "fig plum apple", "nothing"):
        np.testing.assert_array_equal(built.scores(query), anew.scores(query))
    assert built.scores("plum")[2] > 0
    assert not built.scores("plum")[[0, 1, 3, 4]].any()


def test_matched_words_are_those_of_the_query_in_order_of_weight():
    index = BM25Index(["red apples on a tree", "tree", "trees"])

    assert index.matching_words("The Tree with APPLE, reds and pears; red", 0) == [
        "reds",
        "apple",
        "tree",
    ]
    # ln(1 + (3 - 1 + .5) / 1.5) for apples, ln(1 + .5 / 3.5) for trees, ln(1 + 3.5 / .5) for the word of no text
    assert index.highest_possible_score("the apple tree zebra") == pytest.approx(
        math.log(8 / 3) + math.log(8 / 7) + math.log(8)
    )


def test_search_ranks_and_breaks_ties_by_position():
    index = BM25Index(
        ["red apple", "", "red apple", "red red apple tree", "数据库备份脚本", "red apple"]
    )
    indices, scores = index.search(["apple red", "nothing shared", "", "帮我做数据库的备份"], 4)

    assert indices.dtype == np.int64
    assert scores.dtype == np.float32
    assert indices[0].tolist() == [0, 2, 5, 3]
    assert scores[0][0] == scores[0][2]
    assert indices[1:3].tolist() == [[0, 1, 2, 3]] * 2
    assert not scores[1:3].any()
    assert indices[3][0] == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [("full", "dabc"), ("nd", "bacd"), ("name", "abcd"), ("description", "bacd"), ("body", "dabc")],
)
def test_fields_are_searched_alone_and_a_skill_may_lack_them(fields, expected):
    pool = [
        Skill("a", "cat", "dog", ""),
        Skill("b", "", "cat", "dog"),
        Skill("c", "dog", "", ""),
        Skill("d", "dog", "", "cat cat cat"),
    ]
    found = (
        LexicalConfig(fields=fields)
        .ranker(pool, {})
        .rank([Query("q", "cats", "", "", "")], None, 4)["q"]
    )

    assert "".join(skill_id for skill_id, _ in found) == expected


@pytest.mark.parametrize("texts", [[], ["", " - "], ["the of"]])
def test_nothing_to_index_is_refused(texts):
    with raises("empty-text"):
        BM25Index(texts)


@given(
    npst.arrays(np.float32, st.integers(1, 30), elements=st.integers(0, 4).map(float)),
    st.integers(0, 30),
)
def test_top_k_is_the_stable_sort(scores, k):
    k = min(k, len(scores))
    assert top_k(scores, k).tolist() == np.argsort(-scores, kind="stable")[:k].tolist()
