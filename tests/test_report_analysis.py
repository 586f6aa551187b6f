"""The analyses of a report on the page, in Markdown and in JSON, and measures that some queries have no value of."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from invented_report import invented
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import parse_measures
from skilltrain.records import Skill
from skilltrain.report.evaluation import Report
from skilltrain.report.page import axis_around, axis_of, axis_over, duration, number, p_equals, p_value, plain, signed
from skilltrain.report.write import report_markdown, report_page, write_report
from skilltrain.routing.field_attention import FIELDS
from skilltrain.texts import visible
from test_report import BASE, BETTER, RELEVANCES, SAME, Tags, check_safe, report_of, system, terminal

PARTS = ("differences", "flows", "slices", "speed", "agents", "attention", "structure", "queries")


@pytest.fixture(scope="module")
def small() -> Report:
    """Every section, of a few queries with hostile texts."""
    return invented(12, hostile=True)


@pytest.fixture(scope="module")
def small_page(small: Report) -> str:
    """Its page."""
    return report_page(small)


def outcome(**cells: list[str]) -> dict[str, Any]:
    """A row of `outcomes` of two systems."""
    row: dict[str, Any] = {"baseline": "base", "system": "better", "measure": "Hit@1", "p": 1.0}
    return row | {name: cells.get(name, []) for name in ("both", "fixed", "broken", "neither")}


def with_analysis(**parts: list[dict[str, Any]]) -> str:
    """The page of two systems with some analyses."""
    return report_page(report_of(BASE, BETTER, analysis=parts))


def test_the_page_has_a_part_for_each_analysis_and_is_well_formed(small_page: str):
    tags = check_safe(small_page, num_scripts=1)
    assert [a["href"] for tag, a in tags.tags if tag == "a"] == [f"#{part}" for part in PARTS]
    assert [a["id"] for tag, a in tags.tags if tag == "section" and "id" in a] == list(PARTS)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b]", small_page)
    assert "[U+202E]evil[U+2066][U+200B]" in small_page
    ids = [a["id"] for _, a in tags.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_every_picture_has_words(small_page: str):
    pictures = [a for tag, a in Tags(small_page).tags if tag == "svg" and "viewbox" not in a]
    assert len(pictures) > 50
    assert all(a.get("aria-label") if a.get("role") == "img" else a.get("aria-hidden") == "true" for a in pictures)


def test_markdown_and_json_hold_the_same_analyses(small: Report, tmp_path: Path):
    write_report(small, tmp_path)
    saved = json.loads((tmp_path / "metrics.json").read_text())["analysis"]
    assert list(saved) == [
        "outcomes",
        "pass_rates",
        "stages",
        "unserved",
        "truncation",
        "latencies",
        "structure",
        "attention",
    ]
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
    rows = [line for line in markdown.split("## Latency")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_fixed_and_broken_queries_are_counted_and_listed():
    shown = with_analysis(outcomes=[outcome(both=["q1"], fixed=["q3"], neither=["q2"])])
    assert '<rect class="fixed" x="33.33%" width="33.33%"' in shown
    assert "McNemar’s p = 1" in shown and "broken <b>0</b>" in shown
    assert re.findall(r"<summary>(\d.*?)</summary>", shown) == ["1 query fixed"]


def test_a_changed_query_is_listed_with_what_stood_on_top():
    changed = {"outcomes": [outcome(fixed=["q1"], broken=["q2"], neither=["q3"])]}
    shown = report_page(report_of(BASE, BETTER, analysis=changed, skills={"x": Skill("x", "Ex", "", "")}))
    assert '<b>q1</b><p dir="auto">text of q1</p>' in shown
    assert re.search(r"<bdi>Ex</bdi> \(gold at 2\)\s*<i>→</i>\s*<bdi>a</bdi> \(gold\)", shown)


def test_attention_is_drawn_against_the_share_of_tokens():
    layers = [dict(zip(FIELDS, row, strict=True)) for row in ((0.1, 0.2, 0.7), (0.3, 0.2, 0.5))]
    overall, tokens = (dict(zip(FIELDS, row, strict=True)) for row in ((0.2, 0.2, 0.6), (0.05, 0.15, 0.8)))
    found = {"overall": overall, "tokens": tokens}
    model = {"model": "m", "layers": layers, "groups": {"middle": overall}, "pairs": [found], **found}
    shown = with_analysis(attention=[model])
    assert '<polyline class="name" points="0.00,90.00 100.00,70.00"/>' in shown
    assert '<polyline class="name expected" points="0.00,95.00 100.00,95.00"/>' in shown
    assert "name <b>.200</b> <small>.050 of the tokens, × 4.0</small>" in shown
    assert "middle layers name .200 description .200 body .600; body in one pair .600 .600 .600" in shown
    assert "100.00,90.00" in with_analysis(attention=[model | {"layers": layers[:1], "groups": {}}])


def report_with(measure: str, base: dict[str, float], better: dict[str, float], names=("Hit@1",)) -> Report:
    """Two systems with Hit@1 and one more measure, for some queries only."""
    rows = {
        name: {q: {"Hit@1": hit if q == "q1" else 0.0} | ({measure: more[q]} if q in more else {}) for q in RELEVANCES}
        for name, hit, more in (("base", 0.0, base), ("better", 1.0, better))
    }
    results = [SystemResult(name, values, {}) for name, values in rows.items()]
    return report_of(*results, measures=parse_measures([*names, measure]))


def test_a_measure_without_values_for_some_queries_says_over_how_many_it_is():
    report = report_with("Set-Compat", {"q2": 1.0}, {"q2": 0.0})
    markdown = report_markdown(report)
    assert "| system | Hit@1 | Set-Compat (n = 1) |" in markdown
    assert "| Set-Compat (n = 0) |" in markdown.split("## Kind: single")[1]
    assert "Set-Compat is over the 1 queries that have a value of it" in markdown
    content = report_page(report)
    assert "Set-Compat <small>n = 1</small>" in content
    assert "Over the 1 of 3 queries that have a value." in content
    assert "Set-Compat@k" not in content
    assert "n = 1" in terminal(report, 80)


def test_a_measure_that_no_query_has_a_value_of_is_a_dash_everywhere():
    report = report_with("Set-Compat", {}, {})
    assert "<td>–</td>" in report_page(report)
    assert "| base | .000 [.00, .00] | – |" in report_markdown(report)
    assert report_with("Set-Compat", {}, {}, names=()).comparisons == ()


def test_systems_are_compared_over_the_queries_that_have_a_value():
    (found,) = report_with("Set-Compat", {"q2": 0.5, "q3": 0.0}, {"q2": 1.0, "q3": 0.5}, names=()).comparisons
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
    assert said.startswith("better has the highest Hit@1, .667 [.00, 1.00]: not told apart from base (difference .333")
    assert [report_of(BASE).title(), report_of(BASE, BETTER).title()] == [
        "base on 3 queries",
        "base and better on 3 queries",
    ]
    assert small.title() == "5 systems on 12 queries"


def test_axes_have_round_ends_and_hold_all_values():
    assert axis_over([0.52, 0.88]).ticks == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert axis_over([0, 1]).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert axis_over([0.5, 0.5]).ticks == (0.5, 0.51)
    assert axis_over([4.1, 2_370], logarithmic=True).ticks == (1, 10, 100, 1_000, 10_000)
    assert axis_over([12, 45], logarithmic=True).ticks == (10, 20, 50)
    assert axis_over([10, 10], logarithmic=True).ticks == (10, 20)
    assert axis_around(0.5, [0.68, 0.39]).ticks == (0.3, 0.5, 0.7)
    assert axis_of((1, 10, 100), logarithmic=True).place(10) == pytest.approx(50)
    assert axis_of((0.2, 0.4)).place(0.3) == pytest.approx(50)
    assert axis_of((0.2, 0.4)).place(math.inf) == 100


def test_numbers_are_short():
    assert [p_value(p) for p in (None, 0.00004, 0.0234, 0.99996, 1)] == ["–", "<.0001", ".0234", "1", "1"]
    assert [p_equals(p) for p in (0.00004, 0.0234, None)] == ["p < .0001", "p = .0234", "p = –"]
    assert [signed(value) for value in (0.1, -0.1, 0.0, 0.0001)] == ["+.100", "-.100", ".000", ".000"]
    assert [duration(value) for value in (0.00042, 0.012, 0.412, 1.3)] == [".42 ms", "12.0 ms", "412 ms", "1.30 s"]
    assert [number(value) for value in (1240.4, 12.5, 0.042, 3)] == ["1,240", "12.5", ".04", "3"]
    assert visible("a\u202e\ud800\u2028\x1b b\u3000c\n\u200d") == "a[U+202E][U+D800][U+2028][U+001B] b\u3000c\n\u200d"
    assert plain("1. <a|b>_") == "1\\. &lt;a\\|b>\\_"
