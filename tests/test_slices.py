"""Slices: which queries they hold, the means over them, and the labels that define them."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from faults import raises
from skilltrain.metrics.benchmarks.benchmark import task_of
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import Relevance
from skilltrain.metrics.slices import (
    SliceMeans,
    description_length_gaps,
    distinct_slices,
    labels_of,
    means_by_slice,
    quartiles,
)
from skilltrain.records import Query, Skill
from test_comparison import interval

SOURCE = Path(__file__).parents[1] / "src" / "skilltrain"
LABELS = {
    "q1": {"kind": "single", "tier": "hard", "origin": "llm", "id": "1"},
    "q2": {
        "kind": "multi",
        "tier": "easy",
        "origin": "llm",
        "reason": ("low_quality", "scope_mismatch"),
    },
    "q3": {"kind": "single", "origin": "llm", "reason": ("low_quality",)},
}


def system(name: str, hits: list[float], **more: dict[str, float]) -> SystemResult:
    rows = {f"q{number}": {"Hit@1": hit} for number, hit in enumerate(hits, 1)}
    for query_id, values in more.items():
        rows[query_id] |= values
    return SystemResult(name, rows, {})


def query(query_id: str, text: str) -> Query:
    return Query(query_id, text, kind="", origin="llm", split="test")


ONE = system("one", [1, 0, 0], q2={"Set-Compat": 1.0})
TWO = system("two", [1, 1, 0], q2={"Set-Compat": 0.0})


@pytest.fixture
def slices() -> list[SliceMeans]:
    return list(means_by_slice([ONE, TWO], LABELS, ["Hit@1", "Set-Compat"]))


def test_a_slice_holds_the_queries_of_one_value(slices: list[SliceMeans]):
    """Single comes before multi, easy before hard. A query with two reasons is in both slices."""
    query_ids = {(part.label, part.value): part.query_ids for part in slices}

    assert query_ids == {
        ("all", "all"): ("q1", "q2", "q3"),
        ("kind", "single"): ("q1", "q3"),
        ("kind", "multi"): ("q2",),
        ("tier", "easy"): ("q2",),
        ("tier", "hard"): ("q1",),
        ("origin", "llm"): ("q1", "q2", "q3"),
        ("id", "1"): ("q1",),
        ("reason", "low_quality"): ("q2", "q3"),
        ("reason", "scope_mismatch"): ("q2",),
    }
    assert [part.value for part in slices[:4]] == ["all", "single", "multi", "easy"]


def test_a_slice_of_all_queries_is_not_distinct(slices: list[SliceMeans]):
    labels = [part.label for part in distinct_slices(slices)]

    assert "origin" not in labels
    assert labels[:3] == ["all", "kind", "kind"]


def test_means_are_over_the_queries_of_a_slice(slices: list[SliceMeans]):
    every, single, _ = slices[:3]

    assert every.means["two"]["Hit@1"] == interval([1, 1, 0])
    assert single.means["one"]["Hit@1"] == interval([1, 0])


def test_a_measure_without_values_has_no_mean(slices: list[SliceMeans]):
    every, single, multi = slices[:3]

    assert "Set-Compat" not in single.means["one"]
    assert every.partly_defined() == {"Set-Compat": 1}
    assert multi.partly_defined() == {}


def test_the_best_system_has_the_highest_mean(slices: list[SliceMeans]):
    every, single, _ = slices[:3]

    assert every.best("Hit@1") == {"two"}
    assert every.best("Set-Compat") == {"one"}
    assert single.best("Hit@1") == frozenset()  # equal means


# Labels -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "directions", "domains"),
    [
        ("cut the tables in two", ["en"], ("en2en",), ("data-and-science",)),
        (
            "把这些发票按月整理好",
            ["en", "zh"],
            ("zh2en", "zh2zh"),
            ("data-and-science", "media-and-design"),
        ),
        ("pdf ocr batch", ["zh"], ("en2zh",), ("media-and-design",)),
        ("été", ["en"], None, ("data-and-science",)),
        ("x", ["no"], None, None),
    ],
)
def test_labels_come_from_gold_skills(
    text: str,
    gold: list[str],
    directions: tuple[str, ...] | None,
    domains: tuple[str, ...] | None,
):
    skills = {
        "en": Skill("en", "one", "d", "b", category="spreadsheets", lang="en"),
        "zh": Skill("zh", "two", "d", "b", category="video-production", lang="zh"),
        "no": Skill("no", "three", "d", "b", category="odd"),
    }
    relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))

    labels = labels_of([task_of(query("q", text), relevance, {})], skills)["q"]

    assert labels.get("direction") == directions
    assert labels.get("domain") == domains


def test_labels_of_the_benchmark_win():
    skill = Skill("en", "one", "d", "b", category="spreadsheets", lang="en")
    relevance = Relevance(frozenset({"en"}), {"en": 1.0})
    task = task_of(query("q", "cut the tables"), relevance, {"direction": "zh2zh"})

    labels = labels_of([task], {"en": skill})

    assert labels["q"]["direction"] == "zh2zh"


def test_every_category_is_in_one_domain():
    taxonomy = yaml.safe_load((SOURCE / "data/pool/taxonomy.yaml").read_text(encoding="utf-8"))

    domains = yaml.safe_load((SOURCE / "metrics/domains.yaml").read_text(encoding="utf-8"))

    categories = itertools.chain.from_iterable(domains.values())
    assert sorted(entry["name"] for entry in taxonomy) == sorted(categories)
    assert len(domains) == 8


def test_labels_with_many_values_have_no_slices():
    query_ids = [f"q{number}" for number in range(1, 14)]
    labels = {
        query_id: {"tag": str(number), "month": str(number % 12)}
        for number, query_id in enumerate(query_ids)
    }

    slices = means_by_slice([system("one", [1] * 13)], labels, ["Hit@1"])

    assert {part.label for part in slices} == {"all", "month"}  # 13 tags, 12 months


def test_queries_of_a_cluster_are_drawn_together():
    """Of twelve queries for four tasks, the interval is that of four queries, and n is 12."""
    query_ids = [f"q{number}" for number in range(1, 13)]
    clusters = {query_id: f"task {number // 3}" for number, query_id in enumerate(query_ids)}
    clustered = replace(system("one", [*[1] * 6, *[0] * 6]), clusters=clusters)

    (every,) = means_by_slice([clustered], {query_id: {} for query_id in query_ids}, ["Hit@1"])

    mean = every.means["one"]["Hit@1"]
    four_tasks = interval([1, 1, 0, 0])
    twelve_queries = interval([*[1] * 6, *[0] * 6])
    assert mean == replace(four_tasks, n=12)
    assert twelve_queries.high - twelve_queries.low < four_tasks.high - four_tasks.low


@pytest.mark.parametrize(
    ("results", "measures", "code"),
    [
        ([], ["Hit@1"], "nothing-to-score"),
        ([ONE], [], "nothing-to-score"),
        ([ONE, ONE], ["Hit@1"], "repeated-name"),
        ([ONE, system("b", [1, 1])], ["Hit@1"], "not-comparable"),
        ([ONE, system("b", [1, 1, 1])], ["Set-Compat"], "not-a-number"),
    ],
)
def test_incompatible_systems_are_refused(
    results: list[SystemResult], measures: list[str], code: str
):
    with raises(code):
        means_by_slice(results, LABELS, measures)


# Computed labels --------------------------------------------------------------


def test_computed_labels_are_added_to_the_benchmarks():
    gold = Relevance(frozenset({"a", "b"}), {"a": 1.0, "b": 1.0}, alternatives={"c": "b"})
    short = task_of(query("q1", "make a chart"), gold, {"difficulty": "easy", "domain": ""})
    long = task_of(query("q2", "w " * 21), Relevance(frozenset("a"), {"a": 1.0}), {})
    num_words = {"a": 10, "c": 40}  # c replaces b, which the pool lacks
    skills = {
        skill_id: Skill(skill_id, "", "word " * number, "")
        for skill_id, number in num_words.items()
    }

    labels = labels_of([short, long], skills)

    assert labels == {
        "q1": {
            "kind": "multi",
            "origin": "llm",
            "split": "test",
            "difficulty": "easy",
            "query length": "terse",
            "description length": "Q4, 25–25 words",
        },
        "q2": {
            "kind": "single",
            "origin": "llm",
            "split": "test",
            "query length": "long",
            "description length": "Q2, 10–10 words",
        },
    }


def test_unknown_gold_has_no_description_length():
    task = task_of(query("q", "make a chart"), Relevance(frozenset("a"), {"a": 1.0}), {})

    assert "description length" not in labels_of([task], {})["q"]


def test_a_short_chinese_query_is_terse():
    gold = Relevance(frozenset("a"), {"a": 1.0})
    task = task_of(query("q", "把这个表格转换成图表"), gold, {})

    assert labels_of([task], {})["q"]["query length"] == "terse"


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (
            [80, 10, 20, 70, 30, 60, 40, 50],
            [("Q1, 10–20", 2), ("Q2, 30–40", 2), ("Q3, 50–60", 2), ("Q4, 70–80", 2)],
        ),
        ([1, 2, 3, 4, 5], [("Q1, 1–1", 1), ("Q2, 2–2", 1), ("Q3, 3–4", 2), ("Q4, 5–5", 1)]),
        ([5, 5, 5, 5], [("Q3, 5–5", 4)]),
        ([9, 1], [("Q2, 1–1", 1), ("Q4, 9–9", 1)]),
        ([7], [("Q3, 7–7", 1)]),
        ([1, 2, 2, 2, 2, 2, 2, 3], [("Q1, 1–1", 1), ("Q3, 2–2", 6), ("Q4, 3–3", 1)]),
    ],
)
def test_quartiles_are_cut_by_rank(lengths: list[float], expected: list[tuple[str, int]]):
    """Equal lengths stay together."""
    names = list(quartiles({f"q{n}": length for n, length in enumerate(lengths)}).values())

    counts = [(name.removesuffix(" words"), names.count(name)) for name in sorted(set(names))]
    assert counts == expected


# Gaps -------------------------------------------------------------------------

ND = SystemResult("nd", {"a": {"m": 0.0}, "b": {"m": 1.0}, "c": {"m": 0.0}, "d": {}}, {})
FULL = SystemResult("full", {"a": {"m": 1.0}, "b": {"m": 1.0}, "c": {"m": 1.0}, "d": {}}, {})
DESCRIPTION_SLICES = [
    SliceMeans("kind", "multi", ("a", "b"), {}),
    SliceMeans("description length", "Q1, 1–9 words", ("a", "b"), {}),
    SliceMeans("description length", "Q2, 10–20 words", ("c", "d"), {}),
]


def test_gaps_are_mean_differences_by_description_length():
    gap, _ = description_length_gaps([ND, FULL], DESCRIPTION_SLICES, "m")

    assert gap == {
        "baseline": "nd",
        "system": "full",
        "measure": "m",
        "value": "Q1, 1–9 words",
        "difference": Interval(0.5, 0, 1, 2),
    }


def test_gaps_leave_out_undefined_queries():
    _, gap = description_length_gaps([ND, FULL], DESCRIPTION_SLICES, "m")

    assert gap["value"] == "Q2, 10–20 words"
    assert (gap["difference"].mean, gap["difference"].n) == (1, 1)


def test_one_system_has_no_gaps():
    assert description_length_gaps([ND], DESCRIPTION_SLICES, "m") == ()
