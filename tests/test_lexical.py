"""BM25: terms, scores, search and fields."""

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
def test_terms_are_stems_or_bigrams(text, terms):
    assert [stem for _, stem in Vocabulary().words_and_stems(text)] == terms


def test_scores_by_hand():
    # Two texts of 2 and 1 terms, mean length 1.5; "cat" is in one of them.
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 1 / (1 + K1 * (1 - B + B * 2 / 1.5))

    scores = BM25Index(["cat dog", "dog"]).scores("cats")

    np.testing.assert_allclose(scores, [expected, 0.0], rtol=1e-6)


def test_settings_of_ranker_replace_constants():
    pool = [Skill("a", "cat dog", "", ""), Skill("b", "dog", "", "")]
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    ranker = LexicalConfig(k1=0.9, b=0.4).ranker(pool, {})

    ranking = ranker.rank([Query("q", "cats", "", "", "")], None, 1)["q"]

    expected = idf * 1 / (1 + 0.9 * (1 - 0.4 + 0.4 * 2 / 1.5))
    assert ranking == [("a", pytest.approx(expected, rel=1e-6))]


@pytest.mark.parametrize("query", ["red tree", "pear", "fig plum apple", "nothing"])
def test_updated_index_equals_new_one(tmp_path, query):
    BM25Index(["red apple tree", "", "green pear", "red red plum", "green pear"]).save(tmp_path)
    texts = ["a new fig tree", "green pear", "red red plum", "red apple tree", ""]

    updated = BM25Index(texts, BM25Index.load(tmp_path))

    np.testing.assert_array_equal(updated.scores(query), BM25Index(texts).scores(query))


def test_only_texts_with_term_score():
    index = BM25Index(["a new fig tree", "green pear", "red red plum", "red apple tree", ""])

    assert np.flatnonzero(index.scores("plum")).tolist() == [2]


def test_matching_words_are_ordered_by_weight():
    index = BM25Index(["red apples on a tree", "tree", "trees"])

    words = index.matching_words("The Tree with APPLE, reds and pears; red", 0)

    assert words == ["reds", "apple", "tree"]


def test_highest_possible_score_by_hand():
    index = BM25Index(["red apples on a tree", "tree", "trees"])

    score = index.highest_possible_score("the apple tree zebra")

    # ln(1 + (3 - 1 + .5) / 1.5) for apples, ln(1 + .5 / 3.5) for trees, and ln(1 + 3.5 / .5) for
    # the word that no text has.
    assert score == pytest.approx(math.log(8 / 3) + math.log(8 / 7) + math.log(8))


@pytest.fixture(scope="module")
def search_index():
    return BM25Index(
        ["red apple", "", "red apple", "red red apple tree", "数据库备份脚本", "red apple"]
    )


def test_search_breaks_ties_by_position(search_index):
    indices, scores = search_index.search(["apple red"], 4)

    assert indices.dtype == np.int64
    assert scores.dtype == np.float32
    assert indices[0].tolist() == [0, 2, 5, 3]
    assert scores[0][0] == scores[0][2]


def test_query_without_known_terms_scores_zero(search_index):
    indices, scores = search_index.search(["nothing shared", ""], 4)

    assert indices.tolist() == [[0, 1, 2, 3]] * 2
    assert not scores.any()


def test_search_ranks_chinese_texts(search_index):
    indices, _ = search_index.search(["帮我做数据库的备份"], 4)

    assert indices[0][0] == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [("full", "dabc"), ("nd", "bacd"), ("name", "abcd"), ("description", "bacd"), ("body", "dabc")],
)
def test_fields_limit_search(fields, expected):
    pool = [
        Skill("a", "cat", "dog", ""),
        Skill("b", "", "cat", "dog"),
        Skill("c", "dog", "", ""),
        Skill("d", "dog", "", "cat cat cat"),
    ]
    ranker = LexicalConfig(fields=fields).ranker(pool, {})

    ranking = ranker.rank([Query("q", "cats", "", "", "")], None, 4)["q"]

    assert "".join(skill_id for skill_id, _ in ranking) == expected


@pytest.mark.parametrize("texts", [[], ["", " - "], ["the of"]])
def test_empty_index_is_refused(texts):
    with raises("empty-text"):
        BM25Index(texts)


@given(
    npst.arrays(np.float32, st.integers(1, 30), elements=st.integers(0, 4).map(float)),
    st.integers(0, 30),
)
def test_top_k_is_stable_sort(scores, k):
    k = min(k, len(scores))
    assert top_k(scores, k).tolist() == np.argsort(-scores, kind="stable")[:k].tolist()
