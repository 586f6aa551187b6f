import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.lexical import (
    K1,
    B,
    BM25Index,
    SavedBM25,
    bm25_text,
    english_stemmer,
    read_terms,
    tokenize,
    top_k,
)


def terms(text):
    return list(tokenize(text, english_stemmer()))


def test_words_are_stemmed_and_split_at_separators_and_stop_words_left_out():
    assert terms("The Parsing of read_pdf-files v2.1") == ["pars", "read", "pdf", "file", "v2", "1"]


def test_cjk_becomes_bigrams_and_a_lone_character_stays():
    assert terms("解析PDF文件 树") == ["解析", "pdf", "文件", "树"]
    assert terms("数据分析") == ["数据", "据分", "分析"]


def test_apostrophes_leave_no_fragments_of_stop_words():
    assert terms("don't we've it's John's") == ["john"]


def test_scores_follow_the_formula_worked_by_hand():
    # Two texts of 2 and 1 terms, mean length 1.5; "cat" is in one of them.
    index = BM25Index.build(["cat dog", "dog"])
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 1 / (1 + K1 * (1 - B + B * 2 / 1.5))
    np.testing.assert_allclose(index.scores("cats"), [expected, 0.0], rtol=1e-6)


def test_search_ranks_and_breaks_ties_by_position():
    index = BM25Index.build(["red apple", "green pear", "red apple", "red red apple tree", "red apple"])
    indices, scores = index.search(["apple red", "nothing shared"], 4)
    assert indices.dtype == np.int64 and scores.dtype == np.float32
    assert indices[0].tolist() == [0, 2, 4, 3]
    assert scores[0][0] == scores[0][2]
    assert indices[1].tolist() == [0, 1, 2, 3] and not scores[1].any()


def test_chinese_queries_find_chinese_texts():
    index = BM25Index.build(["天气预报查询", "数据库备份脚本", "weather forecast"])
    assert index.search(["帮我做数据库的备份"], 1)[0].tolist() == [[1]]


def test_more_results_than_texts_gives_all_texts():
    indices, scores = BM25Index.build(["a1", "b2"]).search(["b2"], 10)
    assert indices.tolist() == [[1, 0]] and scores.shape == (1, 2)


def test_empty_text_and_empty_query_are_harmless():
    index = BM25Index.build(["", "cat"])
    assert index.search(["", "cat"], 1)[0].tolist() == [[0], [1]]


def test_no_queries_give_empty_arrays():
    indices, scores = BM25Index.build(["cat"]).search([], 3)
    assert indices.shape == scores.shape == (0, 1)


@pytest.mark.parametrize("texts", [[], ["", " - "], ["the of"]])
def test_nothing_to_index_is_refused(texts):
    with pytest.raises(SkilltrainError, match=r"no text to index|none of the \d texts"):
        BM25Index.build(texts)


def test_bm25_text_holds_name_description_and_whole_body():
    assert bm25_text(Skill("s", "pdf", "reads", "body " * 3)) == "pdf reads body body body "


@given(npst.arrays(np.float32, st.integers(1, 30), elements=st.integers(0, 4).map(float)), st.integers(0, 30))
def test_top_k_is_the_stable_sort(scores, k):
    k = min(k, len(scores))
    assert top_k(scores, k).tolist() == np.argsort(-scores, kind="stable")[:k].tolist()


TEXTS = [
    "red apple, green pear", "数据库备份 backup of red databases", "", "the red red red tree of apples",
    "read_pdf-file", "天气预报 weather", "pear pear", "red apple, green pear",
]  # fmt: skip


def parts_of(texts, size):
    return [read_terms(texts[start : start + size]) for start in range(0, len(texts), size)]


def test_terms_of_texts_are_counted_as_tokenize_gives_them():
    found, place = read_terms(TEXTS), 0
    for text, length in zip(TEXTS, found.lengths, strict=True):
        occurrences = [found.terms[number] for number in found.occurrences[place : place + length]]
        assert sorted(occurrences) == sorted(terms(text))
        place += length
    assert place == len(found.occurrences) and len(set(found.terms)) == len(found.terms)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_index_does_not_depend_on_how_the_texts_were_cut(size):
    whole, cut = BM25Index.build(TEXTS), BM25Index.from_terms(parts_of(TEXTS, size), range(len(TEXTS)))
    for query in ("red apples", "备份 pdf", "nothing"):
        assert whole.scores(query).tolist() == cut.scores(query).tolist()


def test_texts_may_be_read_in_another_order_than_they_are_numbered():
    order = [3, 0, 7, 1, 6, 5, 4, 2]
    index = BM25Index.from_terms(parts_of(TEXTS, 3), order)
    assert index.scores("red pear").tolist() == BM25Index.build([TEXTS[i] for i in order]).scores("red pear").tolist()


def test_a_saved_index_answers_alike_to_the_last_bit(tmp_path):
    queries = ["red apple and apple", "数据库", "", "nothing shared", "weather pdf pear"]
    index = BM25Index.build(TEXTS)
    index.save(tmp_path / "index")
    saved = SavedBM25.open(tmp_path / "index")
    for found, expected in zip(
        saved.search([index.term_ids(query) for query in queries], 20), index.search(queries, 20), strict=True
    ):
        assert found.tolist() == expected.tolist() and found.shape == (5, 8)
