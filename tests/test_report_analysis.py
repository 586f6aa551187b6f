"""The analyses of a report on the page, in Markdown and in JSON, and measures that some queries have no value of."""

import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from invented_report import invented
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.analysis.attention import FieldAttention, FieldShares
from skilltrain.evaluation.analysis.latency import StageLatency
from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.benchmarks.benchmark import Slice
from skilltrain.evaluation.metrics import parse_measures
from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.flows import flows
from skilltrain.evaluation.report.inside import attention
from skilltrain.evaluation.report.markdown import markdown_table
from skilltrain.evaluation.report.marks import Axis, axis_of_shares, axis_of_times, text
from skilltrain.evaluation.report.numbers import duration, number, p_equals, p_value, signed
from skilltrain.evaluation.report.page import page
from skilltrain.evaluation.report.report import build_report, write_report
from skilltrain.evaluation.report.speed import speed
from skilltrain.evaluation.report.terminal_table import terminal_table
from test_report import BASE, BETTER, MEASURES, RELEVANCES, SAME, SLICES, Tags, report_of, system

PARTS = ("differences", "flows", "speed", "lengths", "agents", "attention", "structure", "queries")


@pytest.fixture(scope="module")
def small() -> tuple[Report, ReportTexts]:
    """Every section, of a few queries with hostile texts."""
    return invented(12, hostile=True)


def with_analysis(analysis: Analysis) -> Report:
    return build_report("bench", [BASE, BETTER], SLICES, MEASURES, 7, analysis)


def test_the_page_has_a_part_for_each_analysis_and_is_well_formed(small: tuple[Report, ReportTexts]):
    for texts in (small[1], None):
        tags = Tags(content := page(small[0], texts))
        assert tags.open == []
        assert [a["href"] for tag, a in tags.tags if tag == "a"] == [f"#{part}" for part in PARTS]
        assert [a["id"] for tag, a in tags.tags if tag == "section" and "id" in a] == list(PARTS)
        assert "img" not in {tag for tag, _ in tags.tags}
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b]", content)
        assert "[U+202E]evil[U+2066][U+200B]" in content
        ids = [a["id"] for _, a in tags.tags if "id" in a]
        assert len(ids) == len(set(ids))


def test_every_picture_has_words(small: tuple[Report, ReportTexts]):
    pictures = [a for tag, a in Tags(page(*small)).tags if tag == "svg" and "viewbox" not in a]
    assert len(pictures) > 50
    assert all(a.get("aria-label") if a.get("role") == "img" else a.get("aria-hidden") == "true" for a in pictures)


def test_markdown_and_json_hold_the_same_analyses(small: tuple[Report, ReportTexts], tmp_path: Path):
    report = small[0]
    write_report(report, tmp_path, None)
    saved = json.loads((tmp_path / "metrics.json").read_text())["analysis"]
    assert list(saved) == ["outcomes", "quartiles", "pass_rates", "latencies", "structure", "attention"]
    assert saved["outcomes"][0]["fixed"] == list(report.analysis.outcomes[0].fixed)
    assert saved["quartiles"][0]["means"][report.results[0].name]["n"] == 3
    assert len(saved["attention"][1]["layers"]) == 28
    markdown = markdown_table(report)
    for title in ("Fixed and broken", "Latency", "By length of description", "Estimated pass rates", "Structure of"):
        assert f"## {title}" in markdown
    assert "| total | 4.10 ms | 6.56 ms | 244 | 75 |" in markdown
    assert "| code share of the body | .21 | .09 | .68 | <.0001 | more |" in markdown
    assert "| links | 1 | 3 | .39 | .0008 | less |" in markdown
    assert "<img" not in markdown and "\u202e" not in markdown
    assert len({line.replace("\\|", "").count("|") for line in table_of(markdown, "## Latency")}) == 1


def table_of(markdown: str, title: str) -> list[str]:
    return [line for line in markdown.split(title)[1].split("\n## ")[0].splitlines() if line.startswith("|")]


def test_what_was_not_analysed_takes_no_room():
    content = page(report_of(BASE), None)
    assert not [part for part in PARTS if f'id="{part}"' in content and part != "queries"]
    assert report_of(BASE).to_json()["analysis"]["latencies"] == ()


def test_a_flow_is_as_thick_as_its_queries_and_lists_the_changed_ones():
    # 4 queries of 174 pixels and a gap of 34: 43.5 pixels a query
    outcome = Outcomes("base", "better", "Hit@1", ("q1", "q2"), ("q3",), (), ("q4",), 1.0)
    slices: dict[str, Slice] = {**SLICES, "q4": "single"}
    rows = [
        type(result)(result.name, {**result.per_query, "q4": result.per_query["q3"]}, result.rankings)
        for result in (BASE, BETTER)
    ]
    report = build_report("b", rows, slices, MEASURES, 0, Analysis(outcomes=(outcome,)))
    shown = flows(report, None)
    bands = dict(re.findall(r'<path class="(\w+)" d="M0,[\d.]+ C.*? v([\d.]+)', shown))
    assert bands == {"both": "87.00", "neither": "43.50", "fixed": "43.50"}
    # fixed leaves the wrong of the left, below 87 pixels of right and the gap, for the right of the right
    assert 'class="fixed" d="M0,121.00 C45,121.00 55,87.00 100,87.00' in shown
    assert "1 fixed, 0 broken of 4 queries; McNemar’s p = 1" in shown
    assert re.findall(r"<summary>(.*?)</summary>", shown) == ["1 query fixed"]
    assert "broken <tspan>" not in shown


def test_a_changed_query_is_listed_with_what_stood_on_top():
    outcome = Outcomes("base", "better", "Hit@1", (), ("q1",), ("q2",), ("q3",), 1.0)
    texts = ReportTexts({q: f"text of {q}" for q in SLICES}, {"x": "Ex"}, {q: r.gold for q, r in RELEVANCES.items()})
    shown = flows(with_analysis(Analysis(outcomes=(outcome,))), texts)
    assert '<b>q1</b><p dir="auto">text of q1</p>' in shown
    assert "<bdi>Ex</bdi> (gold at 2) <i>→</i> <bdi>a</bdi> (gold)" in shown


def test_the_front_passes_by_what_is_slower_and_not_better():
    rows = (StageLatency("base", "total", 0.01, 0.02, 100, 3), StageLatency("better", "total", 0.1, 0.2, 10, 3))
    shown = speed(with_analysis(Analysis(latencies=rows)))
    # Hit@1 .333 and .667 on an axis from 0 to 1; 10 and 100 ms on one from 10 to 100
    assert '<polyline class="front" points="0.00,66.67 100.00,66.67 100.00,33.33 100,33.33"/>' in shown
    slower = (StageLatency("base", "total", 0.1, 0.2, 10, 3), StageLatency("better", "total", 0.01, 0.02, 100, 3))
    shown = speed(with_analysis(Analysis(latencies=slower)))
    assert '<polyline class="front" points="0.00,33.33 100,33.33"/>' in shown


def test_attention_is_drawn_against_the_share_of_tokens():
    layers = (FieldShares(0.1, 0.2, 0.7), FieldShares(0.3, 0.2, 0.5))
    model = FieldAttention("m", layers, FieldShares(0.2, 0.2, 0.6), FieldShares(0.05, 0.15, 0.8), 9)
    shown = attention(with_analysis(Analysis(attention=(model,))))
    assert '<polyline class="name" points="0.00,90.00 100.00,70.00"/>' in shown
    assert '<polyline class="name expected" points="0.00,95.00 100.00,95.00"/>' in shown
    assert "name <b>.200</b> <small>.050 of the tokens, × 4.0</small>" in shown
    one = FieldAttention("m", layers[:1], layers[0], layers[0], 9)
    assert "100.00,90.00" in attention(with_analysis(Analysis(attention=(one,))))


def test_a_measure_without_values_for_some_queries_says_over_how_many_it_is():
    report = report_with("Set-Compat", {"q2": 1.0}, {"q2": 0.0})
    row = report.summaries["base"]["all"]["Set-Compat"]
    assert (row.mean, row.n) == (1.0, 1)
    assert "Set-Compat" not in report.summaries["base"]["single"]
    assert report.partial("all") == {"Set-Compat": 1}
    assert report.partial("multi") == {}
    assert report.is_best("all", "base", "Set-Compat")
    markdown = markdown_table(report)
    assert "| system | Hit@1 | Set-Compat (n = 1) |" in markdown
    assert "| Set-Compat (n = 0) |" in markdown.split("## Single")[1]
    assert "Set-Compat is over the 1 queries that have a value of it" in markdown
    content = page(report, None)
    assert "Set-Compat <small>n = 1</small>" in content
    assert "Over the 1 of 3 queries that have a value." in content
    assert "Set-Compat@k" not in content
    console = Console(width=120, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_table(report))
    assert "Set-Compat: n = 1" in capture.get()


def report_with(measure: str, base: dict[str, float], better: dict[str, float]) -> Report:
    """Two systems with Hit@1 and one more measure, for some queries only."""
    results = [system(name, q1=ranking) for name, ranking in (("base", "x"), ("better", "a"))]
    rows = [
        type(result)(
            result.name,
            {q: {"Hit@1": v["Hit@1"]} | ({measure: more[q]} if q in more else {}) for q, v in result.per_query.items()},
            result.rankings,
        )
        for result, more in zip(results, (base, better), strict=True)
    ]
    return build_report("b", rows, SLICES, parse_measures(["Hit@1", measure]), 0)


def test_a_measure_that_no_query_has_a_value_of_is_a_dash_everywhere():
    report = report_with("Set-Compat", {}, {})
    assert report.partial("all") == {"Set-Compat": 0}
    assert "<td>–</td>" in page(report, None)
    assert "| base | .000 [.00, .00] | – |" in markdown_table(report)


def test_systems_are_compared_over_the_queries_that_have_a_value():
    before, after = {"q2": 0.5, "q3": 0.0}, {"q2": 1.0, "q3": 0.5}
    named = report_with("Set-Compat", before, after)
    alone = build_report("b", named.results, SLICES, parse_measures(["Set-Compat", "FC@10"][:1]), 0)
    (found,) = alone.comparisons
    assert (found.measure, found.difference.mean, found.difference.n) == ("Set-Compat", 0.5, 2)
    assert {c.measure for c in named.comparisons} == {"Hit@1"}
    none = build_report("b", report_with("Set-Compat", {}, {}).results, SLICES, parse_measures(["Set-Compat"]), 0)
    assert none.comparisons == ()


def test_notes_stand_in_every_form_and_begin_no_list():
    result = system("+ reranker", q1="a")
    report = build_report("b", [result], SLICES, MEASURES, 0, notes=["- one <b>note</b>", "3) another"])
    assert report.to_json()["notes"] == ["- one <b>note</b>", "3) another"]
    shown = markdown_table(report)
    assert "- \\- one &lt;b>note&lt;/b>" in shown and "- 3\\) another" in shown
    assert "\n\\+ reranker: Hit@1" in shown
    assert "<p>- one &lt;b&gt;note&lt;/b&gt;</p>" in page(report, None)


def test_a_measure_is_held_by_the_same_queries_in_every_system():
    with pytest.raises(
        SkilltrainError, match="system better: query q2 has no value of Set-Compat, but has one in base"
    ):
        report_with("Set-Compat", {"q2": 1.0}, {})


def test_the_means_of_predictions_are_of_one_system():
    saved = report_of(BASE).predictions_json()
    assert list(saved) == ["all", "single", "multi"]
    assert saved["all"]["Hit@1"]["mean"] == pytest.approx(1 / 3)
    assert saved["multi"]["FC@10"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    only = build_report("b", [BASE], dict.fromkeys(SLICES, "single"), MEASURES, seed=0)
    assert list(only.predictions_json()) == ["all", "single"]
    with pytest.raises(SkilltrainError, match="holds 2 systems"):
        report_of(BASE, BETTER).predictions_json()


def test_the_first_sentence_says_what_the_comparison_allows():
    assert report_of(BASE).headline() == "base: Hit@1 .333 [.00, 1.00]."
    assert report_of(BASE, SAME).headline().startswith("All systems have the same Hit@1, .333")
    said = report_of(BASE, BETTER).headline()
    assert said.startswith("better has the highest Hit@1, .667 [.00, 1.00]: not told apart from base (difference .333")
    assert invented()[0].headline() in page(*invented()).replace("&amp;", "&")


def test_the_word_follows_holm():
    report, _ = invented()
    words = {c.p_holm < 0.05: {"above", "below"} for c in report.comparisons} | {False: {"not told apart"}}
    readings = [(row["p_holm"], row["p"], row["reading"]) for row in report.to_json()["differences"]]
    assert all(word in words[p_holm < 0.05] for p_holm, _, word in readings)
    assert any(p < 0.05 <= p_holm for p_holm, p, _ in readings)  # an uncorrected p would have said more
    assert {word for *_, word in readings} == {"above", "not told apart"}


def test_500_queries_make_a_page_of_a_few_megabytes():
    report, texts = invented(500)
    content = page(report, texts)
    assert len(content.encode()) < 4_000_000
    assert content.count('<details class="query') <= 1_000


def test_axes_have_round_ends_and_hold_all_values():
    assert axis_of_shares([0.52, 0.88]).ticks == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert axis_of_shares([0, 1]).ticks == (0, 0.25, 0.5, 0.75, 1)
    assert axis_of_shares([0.5, 0.5]).ticks == (0.5, 0.55)
    assert axis_of_times([4.1, 2_370]).ticks == (1, 10, 100, 1_000, 10_000)
    assert axis_of_times([12, 45]).ticks == (10, 20, 50)
    assert axis_of_times([10, 10]).ticks == (10, 20)
    assert Axis((1, 10, 100), logarithmic=True).place(10) == pytest.approx(50)
    assert Axis((0.2, 0.4)).place(0.3) == pytest.approx(50)
    assert Axis((0.2, 0.4)).place(math.inf) == 100


def test_numbers_are_short():
    assert [p_value(p) for p in (None, 0.00004, 0.0234, 0.99996, 1)] == ["–", "<.0001", ".0234", "1", "1"]
    assert [p_equals(p) for p in (0.00004, 0.0234, None)] == ["p < .0001", "p = .0234", "p = –"]
    assert [signed(value) for value in (0.1, -0.1, 0.0, 0.0001)] == ["+.100", "-.100", ".000", ".000"]
    assert [duration(value) for value in (0.00042, 0.012, 0.412, 1.3)] == [".42 ms", "12.0 ms", "412 ms", "1.30 s"]
    assert [number(value) for value in (1240.4, 12.5, 0.042, 3)] == ["1,240", "12.5", ".04", "3"]
    assert text("<a\u202e\ud800>") == "&lt;a[U+202E]?&gt;"
