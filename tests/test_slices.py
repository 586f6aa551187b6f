"""Results by slice: which queries a slice holds, means over them, and queries that are drawn together."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import task_of
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import Relevance
from skilltrain.metrics.slices import (
    SliceMeans,
    distinct_slices,
    gaps,
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


ONE, TWO = (
    system("one", [1, 0, 0], q2={"Set-Compat": 1.0}),
    system("two", [1, 1, 0], q2={"Set-Compat": 0.0}),
)


def test_a_slice_holds_the_queries_of_one_value():
    """Single before multi, easy before hard; a query with two reasons is in the slices of both."""
    found = means_by_slice([ONE, TWO], LABELS, ["Hit@1", "Set-Compat"])
    assert {(part.label, part.value): part.query_ids for part in found} == {
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
    assert [part.label for part in distinct_slices(found)].count(
        "origin"
    ) == 0  # it is all queries once more
    every, single, multi = found[:3]
    assert every.means["two"]["Hit@1"] == interval([1, 1, 0])
    assert single.means["one"] == {
        "Hit@1": interval([1, 0])
    }  # Set-Compat is defined for none of them
    assert every.partial() == {"Set-Compat": 1} and multi.partial() == {}
    assert every.best("Hit@1") == {"two"} and single.best("Hit@1") == frozenset()
    assert every.best("Set-Compat") == {"one"}


def test_direction_and_domain_come_from_the_query_and_its_gold_skills():
    skills = {
        "en": Skill("en", "one", "d", "b", category="spreadsheets", lang="en"),
        "zh": Skill("zh", "two", "d", "b", category="video-production", lang="zh"),
        "no": Skill("no", "three", "d", "b", category="odd"),
    }
    texts = {
        "cut the tables in two": ["en"],
        "把这些发票按月整理好": ["en", "zh"],
        "pdf ocr batch": ["zh"],
        "été": ["en"],
        "x": ["no"],
    }
    tasks = [
        task_of(query(t, t), Relevance(frozenset(g), dict.fromkeys(g, 1.0)), {})
        for t, g in texts.items()
    ]
    found = [(one.get("direction"), one.get("domain")) for one in labels_of(tasks, skills).values()]
    data, media = ("data-and-science",), ("media-and-design",)
    assert found == [
        (("en2en",), data),
        (("zh2en", "zh2zh"), data + media),
        (("en2zh",), media),
        (None, data),
        (None, None),
    ]
    told = task_of(
        query("q", "cut the tables"),
        Relevance(frozenset({"en"}), {"en": 1.0}),
        {"direction": "zh2zh"},
    )
    assert labels_of([told], skills)["q"]["direction"] == "zh2zh"  # what the benchmark says stands


def test_every_category_of_the_taxonomy_is_in_one_super_domain():
    taxonomy = yaml.safe_load((SOURCE / "data/pool/taxonomy.yaml").read_text(encoding="utf-8"))
    domains = yaml.safe_load((SOURCE / "metrics/domains.yaml").read_text(encoding="utf-8"))
    assert sorted(entry["name"] for entry in taxonomy) == sorted(
        name for of in domains.values() for name in of
    )
    assert len(domains) == 8


def test_a_label_of_many_values_makes_no_slices_and_two_pools_of_one_task_are_drawn_together():
    """Thirteen queries, twelve of which are four tasks: their interval is that of four, and n still says twelve."""
    labels = {
        f"q{n}": {"tag": str(n), "month": str(n % 12), "task": str(n < 13)} for n in range(1, 14)
    }
    clusters = {f"q{n}": f"task {(n - 1) // 3}" for n in range(1, 13)}
    found = means_by_slice(
        [replace(system("one", [*[1] * 6, *[0] * 7]), clusters=clusters)], labels, ["Hit@1"]
    )
    assert {part.label for part in found} == {"all", "month", "task"}
    (twelve,) = (
        part.means["one"]["Hit@1"] for part in found if (part.label, part.value) == ("task", "True")
    )
    four, apart = interval([1, 1, 0, 0]), interval([*[1] * 6, *[0] * 6])
    assert (twelve.mean, twelve.low, twelve.high, twelve.n) == (0.5, four.low, four.high, 12)
    assert apart.high - apart.low < four.high - four.low


@pytest.mark.parametrize(
    ("results", "measures", "message"),
    [
        ([], ["Hit@1"], "needs at least one system, one query and one measure"),
        ([ONE], [], "needs at least one system, one query and one measure"),
        ([ONE, ONE], ["Hit@1"], "system one: another system has the same name"),
        ([ONE, system("b", [1, 1])], ["Hit@1"], "system b: .*first 'q3'"),
        (
            [ONE, system("b", [1, 1, 1])],
            ["Set-Compat"],
            "system b: 1 values are missing or .*Set-Compat of query 'q2'",
        ),
    ],
)
def test_systems_that_do_not_fit_together_are_refused(
    results: list[SystemResult], measures: list[str], message: str
):
    with pytest.raises(SkilltrainError, match=message):
        means_by_slice(results, LABELS, measures)


# ---- computed labels


def test_computed_labels_stand_beside_those_of_the_benchmark():
    gold = Relevance(frozenset({"a", "b"}), {"a": 1.0, "b": 1.0}, alternatives={"c": "b"})
    short = task_of(query("q1", "make a chart"), gold, {"difficulty": "easy", "domain": ""})
    long = task_of(query("q2", "w " * 21), Relevance(frozenset("a"), {"a": 1.0}), {})
    skills = {
        skill_id: Skill(skill_id, "", "word " * length, "")
        for skill_id, length in {"a": 10, "c": 40}.items()
    }
    assert labels_of([short, long], skills) == {
        "q1": {
            "kind": "multi",
            "origin": "llm",
            "split": "test",
            "difficulty": "easy",
            "query length": "terse",
            "description length": "Q2, 25–25 words",
        },  # c stands in for b, which the pool lacks
        "q2": {
            "kind": "single",
            "origin": "llm",
            "split": "test",
            "query length": "long",
            "description length": "Q1, 10–10 words",
        },
    }
    assert "description length" not in labels_of([short], {})["q1"]
    chinese = task_of(query("q3", "把这个表格转换成图表"), gold, {})
    assert labels_of([chinese], {})["q3"]["query length"] == "terse"


def cut(lengths: list[float]) -> list[tuple[str, int]]:
    """(name, queries) of each part."""
    found = list(
        quartiles({f"q{number}": length for number, length in enumerate(lengths)}).values()
    )
    return sorted((name.removesuffix(" words"), found.count(name)) for name in set(found))


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        (
            [80, 10, 20, 70, 30, 60, 40, 50],
            [("Q1, 10–20", 2), ("Q2, 30–40", 2), ("Q3, 50–60", 2), ("Q4, 70–80", 2)],
        ),
        ([1, 2, 3, 4, 5], [("Q1, 1–1", 1), ("Q2, 2–2", 1), ("Q3, 3–4", 2), ("Q4, 5–5", 1)]),
        ([5, 5, 5, 5], [("Q1, 5–5", 4)]),
        ([9, 1], [("Q1, 1–1", 1), ("Q2, 9–9", 1)]),
        ([7], [("Q1, 7–7", 1)]),
        ([1, 2, 2, 2, 2, 2, 2, 3], [("Q1, 1–1", 1), ("Q2, 2–2", 6), ("Q3, 3–3", 1)]),
    ],
)
def test_quartiles_are_cut_by_rank_and_equal_lengths_stay_together(
    lengths: list[float], parts: list[tuple[str, int]]
):
    assert cut(lengths) == parts


def test_gaps_are_means_of_differences_in_each_part_and_leave_out_what_has_no_value():
    """SkillRouter's gap: full minus nd, by the length of descriptions."""
    nd = SystemResult("nd", {"a": {"m": 0.0}, "b": {"m": 1.0}, "c": {"m": 0.0}, "d": {}}, {})
    full = SystemResult("full", {"a": {"m": 1.0}, "b": {"m": 1.0}, "c": {"m": 1.0}, "d": {}}, {})
    parts = [
        SliceMeans("kind", "multi", ("a", "b"), {}),
        SliceMeans("description length", "Q1, 1–9 words", ("a", "b"), {}),
        SliceMeans("description length", "Q2, 10–20 words", ("c", "d"), {}),
    ]
    one, two = gaps([nd, full], parts, "m")
    assert tuple(one[key] for key in ("baseline", "system", "measure", "value")) == (
        "nd",
        "full",
        "m",
        "Q1, 1–9 words",
    )
    assert one["difference"] == Interval(0.5, 0, 1, 2)
    assert (two["value"], two["difference"].mean, two["difference"].n) == ("Q2, 10–20 words", 1, 1)
    assert gaps([nd], parts, "m") == ()
