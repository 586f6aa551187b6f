"""The report as JSON, Markdown, page and terminal table: its figures by hand, and hostile texts that stay texts."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from invented_report import invented
from skilltrain.evaluation.page import (
    Axis,
    axis_around,
    axis_over,
    duration,
    escape_markdown,
    number,
    p_equals,
    p_value,
    signed,
)
from skilltrain.evaluation.report import ANALYSES, Report, build_report
from skilltrain.evaluation.write import report_markdown, report_page, terminal_table, write_report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import (
    DEFAULT_MEASURES,
    Measure,
    Relevance,
    parse_measures,
    per_query,
)
from skilltrain.papers.skillrouter.field_attention import FIELDS
from skilltrain.records import Query, Skill
from skilltrain.texts import visible

RELEVANCES = {
    "q1": Relevance(frozenset("a"), {"a": 1.0}),
    "q2": Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}),
    "q3": Relevance(frozenset("c"), {"c": 1.0}),
}
MEASURES = parse_measures(DEFAULT_MEASURES)
EVIL = "</script><img src=http://x.invalid onerror='alert(1)'>\"&|`*"


def benchmark_of(
    relevances: dict[str, Relevance], text: str = "text of {}", notes: tuple[str, ...] = ()
) -> Benchmark:
    tasks = [
        task_of(Query(q, text.format(q), "", "made", "test"), r, {}) for q, r in relevances.items()
    ]
    return Benchmark("bench", tuple(tasks), notes=notes)


def system(name: str, **rankings: str) -> SystemResult:
    ranked = {query_id: tuple(ranking) for query_id, ranking in rankings.items()}
    return SystemResult(name, per_query(ranked, RELEVANCES, MEASURES), ranked)


def report_of(
    *systems: SystemResult,
    measures: tuple[Measure, ...] = MEASURES,
    benchmark: Benchmark | None = None,
    skills: dict[str, Skill] | None = None,
    **more: Any,
) -> Report:
    """`more`: notes, provenance, analysis."""
    report = build_report(benchmark or benchmark_of(RELEVANCES), systems, measures, skills or {})
    return replace(report, **more)


def terminal(report: Report, width: int) -> str:
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_table(report, width))
    return capture.get()


BASE = system("base", q1="xa", q2="ab", q3="xyz")
BETTER = system("better", q1="ax", q2="ax", q3="xc")
SAME = system("same", q1="xa", q2="ab", q3="xyz")


def test_metrics_json_holds_means_by_slice_worked_by_hand():
    base, better = report_of(BASE, BETTER).to_json()["systems"]
    assert base["name"] == "base"
    assert base["metrics"]["Hit@1"]["mean"] == pytest.approx(1 / 3)
    assert base["metrics"]["MRR@10"]["mean"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert base["single"]["MRR@10"]["mean"] == pytest.approx(1 / 4)
    assert base["multi"]["FC@10"] == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "n": 1,
    }
    assert better["multi"]["Recall@10"]["mean"] == 0.5
    assert better["metrics"]["Hit@1"]["n"] == 3
    assert list(better["metrics"]) == list(DEFAULT_MEASURES)


def test_each_system_is_compared_with_the_first_and_the_one_before_once():
    report = report_of(BASE, BETTER, SAME)
    rows = report.to_json()["differences"]
    pairs = [(row["system"], row["baseline"], row["measure"]) for row in rows]
    names = [("better", "base"), ("same", "base"), ("same", "better")]
    assert pairs == [(*pair, measure) for pair in names for measure in ("Hit@1", "MRR@10")]
    means = [row["difference"]["mean"] for row in rows]
    assert means[:2] == pytest.approx([1 / 3, (1 / 2 + 0 + 1 / 2) / 3])
    assert rows[2] | {"p": 1.0} == rows[2]
    assert means[4] == -means[0]
    assert set(rows[0]) == {
        "system",
        "baseline",
        "measure",
        "difference",
        "p",
        "p_holm",
        "num_better",
        "num_worse",
        "reading",
    }
    assert {row["reading"] for row in rows} == {"not told apart"}
    assert [(row["num_better"], row["num_worse"], row["p"]) for row in rows[:2]] == [
        (1, 0, 1.0),  # Hit@1: one fixed, none broken
        (2, 0, 0.5),
    ]
    assert report_of(BASE).comparisons == ()


def test_an_empty_slice_is_left_out_and_one_that_holds_all_is_shown_once():
    single = {query_id: Relevance(frozenset("a"), {"a": 1.0}) for query_id in RELEVANCES}
    only = report_of(BASE, BETTER, benchmark=benchmark_of(single))
    assert only.labels == {}
    found = only.to_json()["systems"][0]
    assert found["single"] == found["metrics"] and "multi" not in found
    assert "all, n = 3" in terminal(only, 120) and "single" not in terminal(only, 120)
    assert "single" not in report_markdown(only)
    assert "3 queries (all single)" in report_page(only)


def test_the_terminal_table_keeps_names_and_intervals_at_any_width():
    for width in (60, 80, 120):
        text = terminal(
            report_of(BASE, BETTER, system("a much longer name of a system", q1="a")), width
        )
        assert max(map(len, text.splitlines())) <= width
        for part in (
            "all, n = 3",
            "single, n = 2",
            "multi, n = 1",
            "FC@10",
            ".333",
            "[.00, 1.00]",
            "base",
            "better",
        ):
            assert part in text
        assert "…" not in text


def test_markdown_escapes_names_and_marks_the_best():
    text = report_markdown(report_of(BASE, BETTER, system(EVIL, q1="")))
    assert "| better | **.667** [.00, 1.00] |" in text
    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("| &lt;/script")]
    assert all(line.replace("\\|", "").count("|") in (9, 10) for line in rows)
    assert "## Kind: single (n = 2)" in text
    assert "| better | base | Hit@1 | 1 | not told apart | +.333 [.00, 1.00] |" in text


SHAPES = {"line", "circle", "polyline", "polygon", "rect"}


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "input", *SHAPES}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in SHAPES:
            assert self.open.pop() == tag


def html_of(*systems: SystemResult) -> str:
    skills = {skill_id: Skill(skill_id, f"{skill_id}: {EVIL}", "", "") for skill_id in "abcxyz"}
    benchmark = benchmark_of(RELEVANCES, f"{{}} {EVIL}\ud800")
    return report_page(
        report_of(*systems, benchmark=benchmark, skills=skills, provenance={EVIL: EVIL})
    )


def check_safe(text: str, num_scripts: int) -> Tags:
    """A well-formed page that asks for nothing; its policy admits its own script and style only."""
    page = Tags(text)
    assert page.open == []
    kinds = [tag for tag, _ in page.tags]
    assert (kinds.count("script"), kinds.count("style"), kinds.count("img")) == (num_scripts, 1, 0)
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"style", "onerror", "onclick", "src", "action"}
    assert {
        a["href"] for _, a in page.tags if "href" in a and not (a["href"] or "").startswith("#")
    } == {"data:,"}
    assert "url(" not in text and "@import" not in text
    policy = next(
        a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("script", "style"):
        content = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert (
            f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            in policy
        )
    return page


def test_html_plots_means_and_recall_and_lists_failures_first():
    text = html_of(BASE, BETTER)
    listed = text.split('id="queries"')[1]
    assert (
        "The hardest queries come first: in 1 of 3 queries no system puts a gold skill first."
        in listed
    )
    # base never finds q3, better at rank 2; q1 is found later than q2
    assert re.findall(r'<details class="query"><summary><b>(..)</b>', listed) == ["q3", "q1", "q2"]
    first = listed.split("</summary>")[0]
    assert '<span title="base"><i class="swatch c0"></i>none</span>' in first
    assert '<span title="better"><i class="swatch c1"></i>2</span>' in first
    value = report_of(BASE, BETTER).every.means["better"]["Hit@1"]
    assert (
        f'cx="{value.mean:.2%}"' in text and f'x1="{value.low:.2%}" x2="{value.high:.2%}"' in text
    )
    curve = text.split('class="curve"')[1].split("</figure>")[0]
    # base, all queries: recall at 1, 2, 3 is (0 + 1/2 + 0)/3, (1 + 1 + 0)/3, (1 + 1 + 0)/3; y runs down from 100
    assert 'points="0.00,83.33 63.09,33.33 100.00,33.33"' in curve


def test_an_alternative_counts_as_gold_on_the_page():
    relevance = Relevance(frozenset("a"), {"a": 1.0}, {"b": "a"})
    ranked = {"q1": ("x", "b", "a")}
    result = SystemResult("one", per_query(ranked, {"q1": relevance}, MEASURES), ranked)
    report = report_of(result, benchmark=benchmark_of({"q1": relevance}))
    assert report.first_ranks == {"one": {"q1": 2}}
    ranking = report_page(report).split("<ol>")[1].split("</ol>")[0]
    assert ranking.count("gold") == 1
    assert 'class="gold" title="b"' in ranking


def test_every_slice_stands_in_json_markdown_and_page():
    tasks = benchmark_of(RELEVANCES).tasks
    hard = [
        task_of(task.query, task.relevance, {"tier": tier})
        for task, tier in zip(tasks, ("easy", EVIL, EVIL), strict=True)
    ]
    report = report_of(BASE, BETTER, benchmark=Benchmark("b", tuple(hard)))
    slices = {(row["label"], row["value"]): row for row in report.to_json()["slices"]}
    assert slices["tier", EVIL]["num_queries"] == 2
    assert slices["tier", EVIL]["systems"]["better"]["Hit@1"]["mean"] == 0.5
    assert "## Tier: easy (n = 1)" in report_markdown(report)
    page = report_page(report)
    assert "<h3>Tier</h3>" in page and "easy, n = 1" in page and "<img" not in page


# Analyses, measures without values, notes and numbers -------------------------

PARTS = ("differences", "flows", "slices", "speed", "agents", "attention", "structure", "queries")


@pytest.fixture(scope="module")
def small() -> Report:
    """Every section, of a few queries with hostile texts."""
    return invented(12)


def outcome(**cells: list[str]) -> dict[str, Any]:
    """A row of `outcomes` of two systems."""
    row: dict[str, Any] = {"baseline": "base", "system": "better", "measure": "Hit@1", "p": 1.0}
    return row | {name: cells.get(name, []) for name in ("both", "fixed", "broken", "neither")}


def with_analysis(**parts: list[dict[str, Any]]) -> str:
    """The page of two systems with some analyses."""
    return report_page(report_of(BASE, BETTER, analysis=parts))


def test_the_page_has_a_part_for_each_analysis_and_words_for_every_picture(small: Report):
    page = report_page(small)
    tags = check_safe(page, num_scripts=1)
    assert [a["href"] for tag, a in tags.tags if tag == "a"] == [f"#{part}" for part in PARTS]
    assert [a["id"] for tag, a in tags.tags if tag == "section" and "id" in a] == list(PARTS)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b]", page)
    assert "[U+202E]evil[U+2066][U+200B]" in page
    ids = [a["id"] for _, a in tags.tags if "id" in a]
    assert len(ids) == len(set(ids))
    pictures = [a for tag, a in tags.tags if tag == "svg" and "viewbox" not in a]
    assert len(pictures) > 50
    assert all(
        a.get("aria-label") if a.get("role") == "img" else a.get("aria-hidden") == "true"
        for a in pictures
    )


def test_markdown_and_json_hold_the_same_analyses(small: Report, tmp_path: Path):
    write_report(small, tmp_path)
    saved = json.loads((tmp_path / "metrics.json").read_text())["analysis"]
    assert tuple(saved) == ANALYSES
    assert saved["outcomes"][0]["fixed"] == small.analysis["outcomes"][0]["fixed"]
    assert len(saved["attention"][1]["layers"]) == 28 and len(saved["attention"][1]["pairs"]) == 400
    markdown = report_markdown(small)
    for title in (
        "Fixed and broken",
        "Latency",
        "Gap by description length",
        "Description length: Q1",
        "Estimated pass rates",
        "Structure of",
    ):
        assert f"## {title}" in markdown
    assert "| total | 4.56 ms | 4.10 ms | 6.56 ms | 220 | – | – | 75 |" in markdown
    assert "| code share of the body | .21 | .09 | .68 | <.0001 | more |" in markdown
    assert re.search(r"\| rerank \| 458 ms \| 412 ms .* \| 3.50 \| 412 \| 75 \|", markdown)
    assert re.search(r"\| early \|.*\n\| middle \|.*\n\| late \|", markdown)
    assert "Share of the body in one pair: lowest, middle and highest ." in markdown
    assert "| links | 1 | 3 | .39 | .0008 | less |" in markdown
    assert "<img" not in markdown and "\u202e" not in markdown
    rows = [
        line
        for line in markdown.split("## Latency")[1].split("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_fixed_and_broken_queries_are_counted_and_listed_with_what_stood_on_top():
    shown = with_analysis(outcomes=[outcome(both=["q1"], fixed=["q3"], neither=["q2"])])
    assert '<rect class="fixed" x="33.33%" width="33.33%"' in shown
    assert "exact p = 1" in shown and "broken <b>0</b>" in shown
    assert re.findall(r"<summary>(\d.*?)</summary>", shown) == ["1 query fixed"]
    changed = {"outcomes": [outcome(fixed=["q1"], broken=["q2"], neither=["q3"])]}
    shown = report_page(
        report_of(BASE, BETTER, analysis=changed, skills={"x": Skill("x", "Ex", "", "")})
    )
    assert '<b>q1</b><p dir="auto">text of q1</p>' in shown
    assert re.search(r"<bdi>Ex</bdi> \(gold at 2\)\s*<i>→</i>\s*<bdi>a</bdi> \(gold\)", shown)


def test_attention_is_drawn_against_the_share_of_tokens():
    layers = [dict(zip(FIELDS, row, strict=True)) for row in ((0.1, 0.2, 0.7), (0.3, 0.2, 0.5))]
    overall, tokens = (
        dict(zip(FIELDS, row, strict=True)) for row in ((0.2, 0.2, 0.6), (0.05, 0.15, 0.8))
    )
    found = {"overall": overall, "tokens": tokens}
    model = {
        "model": "m",
        "layers": layers,
        "groups": {"middle": overall},
        "pairs": [found],
        **found,
    }
    shown = with_analysis(attention=[model])
    assert '<polyline class="name" points="0.00,90.00 100.00,70.00"/>' in shown
    assert '<polyline class="name expected" points="0.00,95.00 100.00,95.00"/>' in shown
    assert "name <b>.200</b> <small>.050 of the tokens, × 4.0</small>" in shown
    assert (
        "middle layers name .200 description .200 body .600; body in one pair .600 .600 .600"
        in shown
    )
    assert "100.00,90.00" in with_analysis(attention=[model | {"layers": layers[:1], "groups": {}}])


def report_with(
    measure: str, base: dict[str, float], better: dict[str, float], names=("Hit@1",)
) -> Report:
    """Two systems with Hit@1 and one more measure, for some queries only."""
    rows = {
        name: {
            q: {"Hit@1": hit if q == "q1" else 0.0} | ({measure: more[q]} if q in more else {})
            for q in RELEVANCES
        }
        for name, hit, more in (("base", 0.0, base), ("better", 1.0, better))
    }
    results = [SystemResult(name, values, {}) for name, values in rows.items()]
    return report_of(*results, measures=parse_measures([*names, measure]))


def test_a_measure_without_values_for_some_queries_says_over_how_many_it_is():
    report = report_with("Set-Compat", {"q2": 1.0}, {"q2": 0.0})
    markdown, page = report_markdown(report), report_page(report)
    assert "| system | Hit@1 | Set-Compat (n = 1) |" in markdown
    assert "| Set-Compat (n = 0) |" in markdown.split("## Kind: single")[1]
    assert "Set-Compat is the mean over the 1 queries that have a value" in markdown
    assert "Set-Compat <small>n = 1</small>" in page and "Set-Compat@k" not in page
    assert "Mean over the 1 of 3 queries that have a value." in page
    assert "n = 1" in terminal(report, 80)
    report = report_with("Set-Compat", {}, {})
    assert "<td>–</td>" in report_page(
        report
    ) and "| base | .000 [.00, .00] | – |" in report_markdown(report)
    assert report_with("Set-Compat", {}, {}, names=()).comparisons == ()
    (found,) = report_with(
        "Set-Compat", {"q2": 0.5, "q3": 0.0}, {"q2": 1.0, "q3": 0.5}, names=()
    ).comparisons
    assert (found.measure, found.difference.mean, found.difference.n) == ("Set-Compat", 0.5, 2)


def test_notes_and_provenance_stand_in_every_form_and_begin_no_list():
    notes, provenance = ("- one <b>note</b>", "3) another"), {"Pool": "pool, 3 skills"}
    report = report_of(system("+ reranker", q1="a"), notes=notes, provenance=provenance)
    assert report.to_json()["notes"] == ["- one <b>note</b>", "3) another"]
    shown = report_markdown(report)
    assert "- \\- one &lt;b>note&lt;/b>" in shown and "- 3\\) another" in shown
    assert "\n\\+ reranker: Hit@1" in shown and "- Pool: pool, 3 skills" in shown
    page = report_page(report)
    assert '<p class="under">- one &lt;b&gt;note&lt;/b&gt;</p>' in page
    assert "<dt>Pool</dt><dd>pool, 3 skills</dd>" in page


def test_the_first_sentence_says_what_the_comparison_allows(small: Report):
    assert report_of(BASE).headline() == "base: Hit@1 .333 [.00, 1.00]."
    assert report_of(BASE, SAME).headline().startswith("All systems have the same Hit@1, .333")
    said = report_of(BASE, BETTER).headline()
    assert said.startswith(
        "better has the highest Hit@1, .667 [.00, 1.00]: not told apart from base (difference .333"
    )
    titles = ["base on 3 queries", "base and better on 3 queries"]
    assert [report_of(BASE).title(), report_of(BASE, BETTER).title()] == titles
    assert small.title() == "5 systems on 12 queries"


def test_axes_have_round_ends_and_hold_all_values():
    assert axis_over([0.52, 0.88]).ticks == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert axis_over([0, 1]).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert axis_over([0.5, 0.5]).ticks == (0.5, 0.51)
    assert axis_over([4.1, 2_370], logarithmic=True).ticks == (1, 10, 100, 1_000, 10_000)
    assert axis_over([12, 45], logarithmic=True).ticks == (10, 100)
    assert axis_over([10, 10], logarithmic=True).ticks == (10, 100)
    assert axis_around(0.5, [0.68, 0.39]).ticks == (0.3, 0.5, 0.7)
    assert Axis((1, 10, 100), logarithmic=True).position(10) == pytest.approx(50)
    assert Axis((0.2, 0.4)).position(0.3) == pytest.approx(50)
    assert Axis((0.2, 0.4)).position(math.inf) == 100


def test_numbers_are_short():
    assert [p_value(p) for p in (0.00004, 0.0234, 0.99996, 1)] == [
        "<.0001",
        ".0234",
        "1",
        "1",
    ]
    assert [p_equals(p) for p in (0.00004, 0.0234)] == ["p < .0001", "p = .0234"]
    assert [signed(value) for value in (0.1, -0.1, 0.0, 0.0001)] == [
        "+.100",
        "-.100",
        ".000",
        ".000",
    ]
    assert [duration(value) for value in (0.00042, 0.012, 0.412, 1.3)] == [
        ".42 ms",
        "12.0 ms",
        "412 ms",
        "1.30 s",
    ]
    assert [number(value) for value in (1240.4, 12.5, 0.042, 3)] == ["1,240", "12.5", ".04", "3"]
    assert (
        visible("a\u202e\ud800\u2028\x1b b\u3000c\n\u200d")
        == "a[U+202E][U+D800][U+2028][U+001B] b\u3000c\n\u200d"
    )
    assert escape_markdown("1. <a|b>_") == "1\\. &lt;a\\|b>\\_"
