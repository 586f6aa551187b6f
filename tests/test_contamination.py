import re
import unicodedata
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skilltrain.data.contamination import (
    BenchmarkIndex,
    ContaminationLimits,
    Gold,
    HeldOut,
    NgramIndex,
    ngrams,
    open_benchmarks,
)
from skilltrain.data.near_duplicates import jaccard, word_trigrams
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Dropped, Query, Skill
from skilltrain.tables import JUDGEMENTS, QUERIES, SKILLS, rows_of, write_table
from skilltrain.texts import CJK, words_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def plainly(text):
    return re.findall(rf"[{CJK}]|[^\W_{CJK}]+", unicodedata.normalize("NFKC", text).lower())


# Whether a capital sigma becomes a final one depends on what follows beyond the word: not compared.
@given(st.text(st.characters(exclude_characters="Σ")) | st.text("aZ9_ -.é中文\u0301\u2028\uff21ß", max_size=30))
@example("Read_PDF-file 2.0, naïve ﬁle…中文a字")
@example("\x00\x1c\x85 a\u00a0b\ufffd")
def test_the_fast_way_to_words_finds_what_the_rule_says(text):
    assert words_of(text) == plainly(text)


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=8), max_size=5), st.lists(st.sampled_from("abcd"), max_size=8)
)
def test_an_index_counts_what_two_texts_share(texts, words):
    counts = [len({*ngrams(one, 3)} & {*ngrams(words, 3)}) for one in texts]
    assert NgramIndex(texts, 3).shared(ngrams(words, 3)) == [(at, count) for at, count in enumerate(counts) if count]


def task(text, task_id="t1"):
    return Task(Query(task_id, text, "single", "test", "test"), Relevance(frozenset({"gt/g"}), {"gt/g": 1.0}))


def overlaps(asked, text, **limits):
    """(task id, value, reason) of what stands against `text`."""
    held_out = HeldOut("bench", tuple(task(one, f"t{number}") for number, one in enumerate(asked, 1)), ())
    found = BenchmarkIndex([held_out], ContaminationLimits(**limits)).query_matches(text)
    return [(match.reason.split()[-4], match.value, match.reason) for match in found]


def words(letters):
    """A query whose words are named by letters, so that n-grams can be counted by eye."""
    return " ".join(f"w{letter}" for letter in letters)


def test_the_same_words_are_the_same_query_however_they_are_written():
    ((task_id, value, reason),) = overlaps(["Merge: these PDFs!"], "merge these\npdfs")
    assert (task_id, value, reason) == ("t1", 1.0, "the same words as task t1 of benchmark bench")
    assert [one[0] for one in overlaps(["a b", "x", "A, b"], "a b")] == ["t1", "t3"]


def test_a_query_without_words_is_like_no_other():
    assert overlaps(["", "—", "merge these pdfs now"], "\U0001f600") == []
    assert overlaps(["—"], "merge these pdfs now") == []


def test_the_share_of_the_benchmarks_ngrams_decides():
    asked = words("abcdefghijkl")  # 12 words, 5 of the 8-grams
    ((_, value, reason),) = overlaps([asked], words("abcdefghij") + " and other words that follow")  # 3 of them
    assert value == 0.6 and reason == "60% of the 8-grams in common with task t1 of benchmark bench"
    assert overlaps([asked], words("abcdefghi") + " and other words that follow") == []  # 2 of them
    assert overlaps([asked], words("abcdefghi"), query_overlap=0.4) != []


def test_a_short_query_is_one_ngram_and_a_very_short_one_is_compared_whole():
    inside = "hello, please merge these four pdfs for me today, thank you very much in advance dear friend"
    assert [one[1] for one in overlaps(["Merge these four PDFs"], inside)] == [1.0]
    assert overlaps(["Merge these PDFs"], inside.replace("four ", "")) == []
    assert overlaps(["Merge these five PDFs"], inside) == []


def test_an_excerpt_of_a_long_query_is_found_but_not_a_phrase_of_it():
    asked = words(LETTERS)  # 19 of the 8-grams
    ((_, value, _),) = overlaps([asked], words(LETTERS[5:21]))  # 16 words, all 9 of its 8-grams
    assert value == 1.0
    assert overlaps([asked], words(LETTERS[5:20])) == []  # 15 words, 8 of the task's 19
    ((_, value, _),) = overlaps([asked], words(LETTERS[5:20]) + " y z", query_overlap=0.5)  # 8 of its own 10
    assert value == 0.8
    ((_, value, _),) = overlaps([words(LETTERS)], " ".join([words(LETTERS[:20])] * 20), query_overlap=0.65)
    assert value == 13 / 19  # the repetition has 13 + 7 n-grams, the task fewer


def test_chinese_queries_are_compared_by_characters():
    asked = "请帮我把这些合同按日期整理成表格"  # 16 characters, 9 of the 8-grams
    ((_, value, _),) = overlaps([asked], "你好，请帮我把这些合同按日期整理")  # its first 13 characters: 6 of them
    assert value == 6 / 9
    assert overlaps([asked], "请帮我把这些照片按地点整理成相册") == []


@given(st.lists(st.sampled_from(["a", "b", "c", "中"]), max_size=24), st.integers(4, 8))
def test_a_query_of_a_benchmark_is_always_found(letters, ngram):
    text = " ".join(letters)
    assert overlaps([text], text, ngram=ngram, query_overlap=1) or not letters


def skill(skill_id, name="", body=""):
    return Skill(skill_id, name or skill_id, "d", body)


BENCH = {
    "gt/pdf": skill("gt/pdf", "PDF Tools", words("abcdefgh")),
    "gt/log": skill("gt/log", "log search", words("mnopqrst")),
}


@pytest.fixture
def bench(tmp_path):
    """skills, golds of each task, split → folder of a benchmark in our own tables."""

    def write(golds=(("gt/pdf",), ("gt/pdf", "gt/log")), splits=("test", "test"), name="bench"):
        queries = [Query(f"t{n}", f"do the task number {n} now", "single", "test", s) for n, s in enumerate(splits, 1)]
        write_table(rows_of(queries), QUERIES, tmp_path / name)
        rows = [
            {"query_id": f"t{n}", "skill_id": s, "verdict": "required", "judge": "test"}
            for n, several in enumerate(golds, 1) for s in several
        ]  # fmt: skip
        write_table(rows, JUDGEMENTS, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def pool_of(tmp_path):
    """skills → folder of a pool."""

    def write(*skills):
        write_table(rows_of(skills), SKILLS, tmp_path / "pool")
        return tmp_path / "pool"

    return write


@pytest.fixture
def index_of(bench, pool_of):
    """limits → the gold skills of BENCH, ready to be compared."""

    def build(**limits):
        held_out = open_benchmarks([bench()], pool_of(*BENCH.values()), need_golds=True)
        return BenchmarkIndex(held_out, ContaminationLimits(**limits))

    return build


def matches(index, one):
    return [(match.filter, match.value, match.other_id) for match in index.skill_matches(one)]


def test_a_namesake_is_found_by_its_name_alone(index_of):
    index = index_of()
    (match,) = index.skill_matches(skill("x", "pdf_tools", "another body altogether"))
    reason = "same name as gold skill gt/pdf of benchmark bench (task t1 and 1 more)"
    assert match == Dropped("", "x", "name", reason, 1.0, "bench", "gt/pdf")
    assert index.skill_matches(skill("x", "pdf", "another body altogether")) == []
    assert matches(index_of(name=False), skill("x", "pdf tools", "another")) == []


def test_the_gold_skill_itself_is_found_whatever_its_texts_are(index_of):
    index = index_of()
    assert matches(index, skill("gt/log", "renamed", "")) == [("name", 1.0, "gt/log")]
    assert [one.reason for one in index.skill_matches(BENCH["gt/log"])] == [
        "is gold skill gt/log of benchmark bench (task t2)",
        "body overlap 1.000 with gold skill gt/log of benchmark bench (task t2)",
    ]


def test_bodies_are_compared_by_trigrams(index_of):
    # abcdefgh has 6 trigrams; the copy shares 5 of them and has 2 of its own.
    copy = skill("x", "x", words("abcdefgxy"))
    assert matches(index_of(), copy) == [("jaccard", 5 / 8, "gt/pdf")]
    assert matches(index_of(jaccard=5 / 8), copy) == [("jaccard", 5 / 8, "gt/pdf")]
    assert matches(index_of(jaccard=0.63), copy) == []
    assert matches(index_of(jaccard=None), copy) == []
    assert matches(index_of(jaccard=0.1), skill("x", "x", words("abc"))) == [("jaccard", 1 / 6, "gt/pdf")]


def test_names_without_letters_and_empty_bodies_equal_nothing(monkeypatch, index_of):
    monkeypatch.setitem(BENCH, "gt/pdf", skill("gt/pdf", "--", ""))
    assert index_of().skill_matches(skill("x", " - ", "")) == []


@given(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=5), st.text("abc ", max_size=30))
def test_the_index_finds_what_comparing_every_pair_finds(bodies, body):
    golds = [Gold(skill(f"g{at}", body=text), "bench", ("t",)) for at, text in enumerate(bodies)]
    index = BenchmarkIndex([HeldOut("bench", (), tuple(golds))], ContaminationLimits(name=False))
    found = {match.other_id: match.value for match in index.skill_matches(skill("x", body=body))}
    own = word_trigrams(body)
    values = {f"g{at}": jaccard(word_trigrams(text), own) for at, text in enumerate(bodies)}
    assert found == {skill_id: value for skill_id, value in values.items() if value >= 0.6}


def test_of_each_benchmark_and_ground_the_strongest_stands(bench, pool_of):
    first, second = bench(name="one"), bench(golds=(("gt/log",), ("gt/log",)), name="two")
    benchmarks = open_benchmarks([first, second], pool_of(*BENCH.values()), need_golds=True)
    index = BenchmarkIndex(benchmarks, ContaminationLimits())
    positives = [skill("p1", "PDF tools", words("abcdefgxy")), skill("p2", "other", words("abcdefgh"))]
    of_skills = [match for one in positives for match in index.skill_matches(one)]
    found = index.contaminations("q", "Do the task number 2 now!", of_skills)
    assert [(one.skill_id, one.filter, one.source, one.value) for one in found] == [
        ("", "query_overlap", "one", 1.0),
        ("", "query_overlap", "two", 1.0),
        ("p1", "name", "one", 1.0),
        ("p2", "jaccard", "one", 1.0),
    ]
    assert index.contaminations("q", "another one", []) == []


def test_queries_to_train_on_are_no_benchmark(bench, pool_of):
    (held_out,) = open_benchmarks([bench(splits=("train", "dev"))], pool_of(*BENCH.values()), need_golds=True)
    assert [one.query.query_id for one in held_out.tasks] == ["t2"]
    assert Counter(gold.task_ids for gold in held_out.golds) == {("t2",): 2}


def test_benchmarks_of_one_name_are_told_apart_by_their_paths(bench, tmp_path, pool_of):
    paths = [bench(name="a/queries"), bench(name="b/queries"), bench(name="c")]
    names = [one.name for one in open_benchmarks(paths, pool_of(), need_golds=False)]
    assert names == [str(tmp_path / "a/queries"), str(tmp_path / "b/queries"), "c"]
