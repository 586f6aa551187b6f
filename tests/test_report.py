"""The report as JSON, Markdown, page and terminal table: hand-calculated metrics, hostile texts."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from invented_report import SYSTEMS, invented
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
    """Make a benchmark with one task for each relevance. `text` is formatted with the query id."""
    tasks = []
    for query_id, relevance in relevances.items():
        query = Query(query_id, text.format(query_id), "", "made", "test")
        tasks.append(task_of(query, relevance, {}))
    return Benchmark("bench", tuple(tasks), notes=notes)


def system(name: str, **rankings: str) -> SystemResult:
    """Make a system's result. A ranking is a string of one-letter skill ids."""
    ranked = {query_id: tuple(ranking) for query_id, ranking in rankings.items()}
    return SystemResult(name, per_query(ranked, RELEVANCES, MEASURES), ranked)


def report_of(
    *systems: SystemResult,
    measures: tuple[Measure, ...] = MEASURES,
    benchmark: Benchmark | None = None,
    skills: dict[str, Skill] | None = None,
    **fields: Any,
) -> Report:
    """Make a report. `fields` are its notes, provenance or analysis."""
    report = build_report(benchmark or benchmark_of(RELEVANCES), systems, measures, skills or {})
    return replace(report, **fields)


def terminal(report: Report, width: int, print_groups: bool = True) -> str:
    """Return the table as a terminal of this width prints it."""
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_table(report, width, print_groups))
    return capture.get()


BASE = system("base", q1="xa", q2="ab", q3="xyz")
BETTER = system("better", q1="ax", q2="ax", q3="xc")
SAME = system("same", q1="xa", q2="ab", q3="xyz")


def test_json_means_equal_hand_calculation():
    base, better = report_of(BASE, BETTER).to_json()["systems"]

    assert base["name"] == "base"
    assert base["metrics"]["Hit@1"]["mean"] == pytest.approx(1 / 3)
    assert base["metrics"]["MRR@10"]["mean"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert base["single"]["MRR@10"]["mean"] == pytest.approx(1 / 4)
    assert base["multi"]["FC@10"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    assert better["multi"]["Recall@10"]["mean"] == 0.5
    assert better["metrics"]["Hit@1"]["n"] == 3
    assert list(better["metrics"]) == list(DEFAULT_MEASURES)


def test_systems_are_compared_pairwise():
    """A system is compared with the first system and with the previous one."""
    rows = report_of(BASE, BETTER, SAME).to_json()["differences"]

    num_measures = len(DEFAULT_MEASURES)
    assert [(row["system"], row["baseline"]) for row in rows[::num_measures]] == [
        ("better", "base"),
        ("same", "base"),
        ("same", "better"),
    ]
    assert [row["measure"] for row in rows] == [*DEFAULT_MEASURES] * 3


def test_main_measures_share_holm_correction():
    """Twelve queries, which the first system ranks right and the other two rank wrong."""
    right = {f"q{number}": ("a",) for number in range(12)}
    relevances = {query_id: Relevance(frozenset("a"), {"a": 1.0}) for query_id in right}
    names = ("Hit@1", "MRR@10", "Recall@5", "nDCG@5")
    results = []
    for name, rankings in (("right", right), ("wrong", {}), ("empty", {})):
        values = per_query(rankings, relevances, parse_measures(names))
        results.append(SystemResult(name, values, rankings))

    report = report_of(*results, measures=parse_measures(names), benchmark=benchmark_of(relevances))

    # Of the three pairs, two differ in each measure: (right, wrong) and (right, empty).
    p = 2 / 2**12
    by_measure = {row.measure: row.p_holm / p for row in report.comparisons[: len(names)]}
    # Two main measures share six comparisons, and the other measures have three each.
    assert by_measure == pytest.approx({"Hit@1": 6, "MRR@10": 6, "Recall@5": 3, "nDCG@5": 3})
    assert "Differences of the other measures" in report_page(report)
    assert "comparisons by Hit@1, MRR@10 together" in report_markdown(report)


def test_differences_equal_hand_calculation():
    rows = report_of(BASE, BETTER, SAME).to_json()["differences"]

    rows_by_pair = [rows[start : start + 2] for start in range(0, len(rows), len(DEFAULT_MEASURES))]
    (hit, reciprocal_rank), (same_hit, _), (worse_hit, _) = rows_by_pair
    assert hit.keys() == {
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
    assert hit["difference"]["mean"] == pytest.approx(1 / 3)
    assert (hit["num_better"], hit["num_worse"], hit["p"]) == (1, 0, 1.0)
    assert reciprocal_rank["difference"]["mean"] == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)
    assert (reciprocal_rank["num_better"], reciprocal_rank["num_worse"]) == (2, 0)
    assert reciprocal_rank["p"] == 0.5
    assert same_hit["p"] == 1.0
    assert worse_hit["difference"]["mean"] == -hit["difference"]["mean"]
    assert {row["reading"] for row in rows} == {"not told apart"}


def test_single_system_has_no_comparison():
    assert report_of(BASE).comparisons == ()


def test_slice_of_all_queries_is_not_repeated():
    relevances = dict.fromkeys(RELEVANCES, Relevance(frozenset("a"), {"a": 1.0}))

    report = report_of(BASE, BETTER, benchmark=benchmark_of(relevances))

    assert report.labels == {}
    metrics = report.to_json()["systems"][0]
    assert metrics["single"] == metrics["metrics"]
    assert "multi" not in metrics, "an empty slice is left out"
    table = terminal(report, 120)
    assert "all, n = 3" in table
    assert "single" not in table
    assert "single" not in report_markdown(report)
    assert "3 queries (all single)" in report_page(report)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_terminal_table_fits_any_width(width: int):
    report = report_of(BASE, BETTER, system("a much longer name of a system", q1="a"))

    text = terminal(report, width)

    assert max(map(len, text.splitlines())) <= width
    for column in ("all, n = 3", "FC@10", "base", "better"):
        assert column in text
    assert ".333" in text
    assert "[.00, 1.00]" in text
    assert "…" not in text, "no text is cut"


@pytest.fixture
def two_kinds() -> Report:
    """A report of 10 queries for one skill and 9 queries for two."""
    relevances = {f"q{n}": RELEVANCES["q1" if n < 10 else "q2"] for n in range(19)}
    rankings = dict.fromkeys(relevances, ("a",))
    result = SystemResult("base", per_query(rankings, relevances, MEASURES), rankings)
    return report_of(result, benchmark=benchmark_of(relevances))


def test_terminal_leaves_out_small_groups(two_kinds):
    table = terminal(two_kinds, 120)

    assert "all, n = 19" in table
    assert "single, n = 10" in table
    assert "multi" not in table


def test_terminal_may_leave_out_all_groups(two_kinds):
    table = terminal(two_kinds, 120, print_groups=False)

    assert "all, n = 19" in table
    assert "single" not in table


def test_markdown_marks_best_system():
    text = report_markdown(report_of(BASE, BETTER))

    assert "| better | **.667** [.00, 1.00] |" in text
    assert "## Kind: single (n = 2, too few to compare systems)" in text
    assert "| better | base | Hit@1 | 1 | not told apart | +.333 [.00, 1.00] |" in text


def test_markdown_escapes_names():
    text = report_markdown(report_of(BASE, BETTER, system(EVIL, q1="")))

    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("| &lt;/script")]
    assert all(line.replace("\\|", "").count("|") in (9, 10) for line in rows)


SHAPES = {"line", "circle", "polyline", "polygon", "rect"}


class Tags(HTMLParser):
    """The tags of a page. Checks that every tag is closed."""

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
    """Return the page of a report whose texts are hostile."""
    skills = {skill_id: Skill(skill_id, f"{skill_id}: {EVIL}", "", "") for skill_id in "abcxyz"}
    benchmark = benchmark_of(RELEVANCES, f"{{}} {EVIL}\ud800")
    report = report_of(*systems, benchmark=benchmark, skills=skills, provenance={EVIL: EVIL})
    return report_page(report)


def check_safe(text: str, num_scripts: int) -> Tags:
    """Check that a page is well-formed, loads nothing and runs only its own script."""
    page = Tags(text)
    assert page.open == []
    kinds = [tag for tag, _ in page.tags]
    assert kinds.count("script") == num_scripts
    assert kinds.count("style") == 1
    assert kinds.count("img") == 0

    # No attribute runs code or loads a file.
    for _, attributes in page.tags:
        assert not attributes.keys() & {"style", "onerror", "onclick", "src", "action"}
        address = attributes.get("href") or "#"
        assert address in {"data:,", "skills.html"} or address.startswith("#")
    assert "url(" not in text
    assert "@import" not in text

    # The policy admits the script and the style by their hashes.
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    (policy,) = [meta["content"] or "" for meta in metas if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    return page


def test_page_lists_hardest_queries_first():
    listed = html_of(BASE, BETTER).split('id="queries"')[1]

    assert (
        "The hardest queries come first: in 1 of 3 queries no system puts a gold skill first."
        in listed
    )
    # base never finds q3, better at rank 2. The gold skill of q1 comes later than that of q2.
    assert re.findall(r'<details class="query"><summary><b>(..)</b>', listed) == ["q3", "q1", "q2"]
    first = listed.split("</summary>")[0]
    assert '<span title="base"><i class="swatch c0"></i>none</span>' in first
    assert '<span title="better"><i class="swatch c1"></i>2</span>' in first


def test_page_plots_means():
    value = report_of(BASE, BETTER).overall.means["better"]["Hit@1"]

    page = html_of(BASE, BETTER)

    assert f'cx="{value.mean:.2%}"' in page
    assert f'x1="{value.low:.2%}" x2="{value.high:.2%}"' in page


def test_page_draws_only_chief_measure_openly():
    """The plots of other measures repeat the table, so they do not precede the recall curve."""
    first_section = html_of(BASE, BETTER).split("</section>")[0]

    drawn_openly, _, folded = first_section.partition("Plots of the other measures")

    assert re.findall(r"<figcaption>([^<]*)", drawn_openly) == ["Hit@1", "Recall@k "]
    assert re.findall(r"<figcaption>([^<]*)", folded) == list(DEFAULT_MEASURES[1:])


def test_page_explains_measures_in_table():
    page = html_of(BASE, BETTER)

    assert '<abbr title="1 if a gold skill stands in the top k">Hit@1</abbr>' in page
    assert re.search('<abbr title="full coverage: 1 if all gold[^"]*">FC@10</abbr>', page)
    assert '<a href="#measures">' in page


def test_page_plots_no_small_slices(full_report: Report):
    """A mean over two queries says nothing, even with an interval."""
    kinds = report_page(full_report).split("<h3>Kind</h3>")[1].split("<details")[0]

    # Nine queries have one gold skill and three have several.
    assert "<svg" not in kinds
    assert "Too few queries for a plot: single, n = 9; multi, n = 3." in kinds


def test_page_plots_slices_of_ten_queries():
    kinds = report_page(invented(24)).split("<h3>Kind</h3>")[1].split("<details")[0]

    assert kinds.count("single, n = 18 .") == len(SYSTEMS)
    assert "Too few queries for a plot: multi, n = 6." in kinds


def test_page_says_how_long_terse_queries_are():
    texts = {"q1": "word " * 20, "q2": "word " * 20, "q3": "word " * 21}
    tasks = []
    for query_id, text in texts.items():
        query = Query(query_id, text, "", "made", "test")
        tasks.append(task_of(query, RELEVANCES[query_id], {}))

    page = report_page(report_of(BASE, BETTER, benchmark=Benchmark("b", tuple(tasks))))

    assert "A terse query has at most 20 words." in page
    assert "Too few queries for a plot: terse, n = 2; long, n = 1." in page


def test_page_plots_recall():
    curve = html_of(BASE, BETTER).split('class="curve"')[1].split("</figure>")[0]

    # Recall of base at 1, 2 and 3 is (0 + 1/2 + 0)/3, (1 + 1 + 0)/3 and (1 + 1 + 0)/3.
    # y is 100 at recall 0.
    assert 'points="0.00,83.33 63.09,33.33 100.00,33.33"' in curve


def test_alternative_is_gold_on_page():
    relevance = Relevance(frozenset("a"), {"a": 1.0}, {"b": "a"})
    ranked = {"q1": ("x", "b", "a")}
    result = SystemResult("one", per_query(ranked, {"q1": relevance}, MEASURES), ranked)
    report = report_of(result, benchmark=benchmark_of({"q1": relevance}))

    ranking = report_page(report).split("<ol>")[1].split("</ol>")[0]

    assert report.first_ranks == {"one": {"q1": 2}}
    assert ranking.count("gold") == 1
    assert 'class="gold" title="b"' in ranking


def test_every_format_shows_slices():
    tiers = {"q1": "easy", "q2": EVIL, "q3": EVIL}
    tasks = [
        task_of(task.query, task.relevance, {"tier": tiers[task.query.query_id]})
        for task in benchmark_of(RELEVANCES).tasks
    ]
    report = report_of(BASE, BETTER, benchmark=Benchmark("b", tuple(tasks)))

    slices = {(row["label"], row["value"]): row for row in report.to_json()["slices"]}
    page = report_page(report)

    assert slices["tier", EVIL]["num_queries"] == 2
    assert slices["tier", EVIL]["systems"]["better"]["Hit@1"]["mean"] == 0.5
    assert "## Tier: easy (n = 1, too few to compare systems)" in report_markdown(report)
    assert "<h3>Tier</h3>" in page
    assert "easy, n = 1" in page
    assert "<img" not in page


# Analyses, measures without values, notes and numbers -------------------------

SECTIONS = (
    "differences",
    "flows",
    "slices",
    "unserved",
    "speed",
    "agents",
    "attention",
    "structure",
    "queries",
)


@pytest.fixture(scope="module")
def full_report() -> Report:
    """A report of twelve queries with every section and hostile texts."""
    return invented(12)


def outcome(**query_ids: list[str]) -> dict[str, Any]:
    """Make a row of `outcomes` of two systems: query ids by what happens to them."""
    row: dict[str, Any] = {"baseline": "base", "system": "better", "measure": "Hit@1", "p": 1.0}
    return row | {"both": [], "fixed": [], "broken": [], "neither": [], **query_ids}


def page_with(**analysis: list[dict[str, Any]]) -> str:
    """Return the page of two systems with these analyses."""
    return report_page(report_of(BASE, BETTER, analysis=analysis))


@pytest.fixture(scope="module")
def full_page(full_report: Report) -> str:
    return report_page(full_report)


def test_page_has_section_for_each_analysis(full_page: str):
    tags = check_safe(full_page, num_scripts=1).tags

    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert links == [f"#{section}" for section in SECTIONS] + ["skills.html", "#measures"]
    sections = [attributes.get("id") for tag, attributes in tags if tag == "section"]
    assert [section for section in sections if section is not None] == list(SECTIONS)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_page_shows_bidirectional_marks(full_page: str):
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b]", full_page)
    assert "[U+202E]evil[U+2066][U+200B]" in full_page


def test_every_picture_has_a_text(full_page: str):
    tags = Tags(full_page).tags

    pictures = [
        attributes for tag, attributes in tags if tag == "svg" and "viewbox" not in attributes
    ]
    assert len(pictures) > 40
    for attributes in pictures:
        if attributes.get("role") == "img":
            assert attributes.get("aria-label")
        else:
            assert attributes.get("aria-hidden") == "true"


def test_json_holds_every_analysis(full_report: Report, tmp_path):
    write_report(full_report, tmp_path)

    analysis = json.loads((tmp_path / "metrics.json").read_text())["analysis"]

    assert tuple(analysis) == ANALYSES
    assert analysis["outcomes"][0]["fixed"] == full_report.analysis["outcomes"][0]["fixed"]
    assert len(analysis["attention"][1]["layers"]) == 28
    assert len(analysis["attention"][1]["pairs"]) == 400


def test_markdown_holds_every_analysis(full_report: Report):
    markdown = report_markdown(full_report)

    for title in (
        "Fixed and broken",
        "Latency",
        "Differences by description length",
        "Description length: Q1",
        "Estimated pass rates",
        "Structure of",
    ):
        assert f"## {title}" in markdown
    assert "| total | 4.56 ms | 4.10 ms | 6.56 ms | 220 | – | – | 75 |" in markdown
    assert "| code share of the body | .21 | .09 | .68 | <.0001 | more |" in markdown
    assert re.search(r"\| rerank \| 458 ms \| 412 ms .* \| 3.50 \| 412 \| 75 \|", markdown)
    assert re.search(r"\| early \|.*\n\| middle \|.*\n\| late \|", markdown)
    assert "Share of the body in single pairs: lowest, median and highest ." in markdown
    assert "exceeds its share of the tokens in 400 of 400 pairs. Standard" in markdown
    assert "its length in tokens: .25 (Pearson's r). metrics.json" in markdown
    assert "| links | 1 | 3 | .39 | .0008 | less |" in markdown
    assert "<img" not in markdown
    assert "\u202e" not in markdown


def test_markdown_rows_have_equal_lengths(full_report: Report):
    section = report_markdown(full_report).split("## Latency")[1].split("\n## ")[0]

    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


def test_page_counts_fixed_queries():
    page = page_with(outcomes=[outcome(both=["q1"], fixed=["q3"], neither=["q2"])])

    assert '<rect class="fixed" x="33.33%" width="33.33%"' in page
    assert "exact p = 1" in page
    assert "broken <b>0</b>" in page
    assert re.findall(r"<summary>(\d.*?)</summary>", page) == ["1 query fixed"]


def test_page_names_limit_of_refusals(monkeypatch):
    monkeypatch.setattr("skilltrain.evaluation.write.MAX_REFUSED", 0.25)

    page = report_page(invented(4))

    assert "refuses at most 25% of" in page


def test_page_shows_first_skills_of_fixed_query():
    analysis = {"outcomes": [outcome(fixed=["q1"], broken=["q2"], neither=["q3"])]}
    skills = {"x": Skill("x", "Ex", "", "")}

    page = report_page(report_of(BASE, BETTER, analysis=analysis, skills=skills))

    assert '<b>q1</b><p dir="auto">text of q1</p>' in page
    assert re.search(
        r"<bdi>Ex</bdi> \(first gold skill at rank 2\)\s*<i>→</i>\s*<bdi>a</bdi> \(gold\)", page
    )


def attention_shares(name: float, description: float, body: float) -> dict[str, float]:
    """Return the share of each field."""
    return dict(zip(FIELDS, (name, description, body), strict=True))


def test_page_draws_attention_against_tokens():
    shares = {
        "overall": attention_shares(0.2, 0.2, 0.6),
        "tokens": attention_shares(0.05, 0.15, 0.8),
    }
    model = {
        "model": "m",
        "layers": [attention_shares(0.1, 0.2, 0.7), attention_shares(0.3, 0.2, 0.5)],
        "groups": {"middle": shares["overall"]},
        "pairs": [shares],
        **shares,
    }

    page = page_with(attention=[model])

    assert '<polyline class="name" points="0.00,90.00 100.00,70.00"/>' in page
    assert '<polyline class="name expected" points="0.00,95.00 100.00,95.00"/>' in page
    assert "name <b>.200</b> <small>.050 of the tokens, × 4.0</small>" in page
    assert (
        "middle layers name .200 description .200 body .600; "
        "share of the body in single pairs .600 .600 .600"
    ) in page

    one_layer = model | {"layers": model["layers"][:1], "groups": {}}
    assert "100.00,90.00" in page_with(attention=[one_layer])


def report_with_compatibility(
    base: dict[str, float], better: dict[str, float], names: tuple[str, ...] = ("Hit@1",)
) -> Report:
    """Make a report with Set-Compat for some queries only.

    Args:
        base: Set-Compat by query id of the first system.
        better: Set-Compat by query id of the second system, which alone solves q1.
        names: The other measures of the report.
    """
    results = []
    for name, hit, compatibility in (("base", 0.0, base), ("better", 1.0, better)):
        rows = {query_id: {"Hit@1": 0.0} for query_id in RELEVANCES}
        rows["q1"]["Hit@1"] = hit
        for query_id, value in compatibility.items():
            rows[query_id]["Set-Compat"] = value
        results.append(SystemResult(name, rows, {}))
    return report_of(*results, measures=parse_measures([*names, "Set-Compat"]))


def test_partial_measure_names_number_of_queries():
    report = report_with_compatibility({"q2": 1.0}, {"q2": 0.0})

    markdown = report_markdown(report)
    page = report_page(report)

    assert "| system | Hit@1 | Set-Compat (n = 1) |" in markdown
    assert "| Set-Compat (n = 0) |" in markdown.split("## Kind: single")[1]
    assert "Set-Compat is the mean over the 1 queries that have a value" in markdown
    assert "Set-Compat <small>n = 1</small>" in page
    assert "Set-Compat@k" not in page
    assert "Mean over the 1 of 3 queries that have a value." in page
    assert "n = 1" in terminal(report, 80)


def test_measure_without_values_is_a_dash():
    report = report_with_compatibility({}, {})

    assert "<td>–</td>" in report_page(report)
    assert "| base | .000 [.00, .00] | – |" in report_markdown(report)
    assert report_with_compatibility({}, {}, names=()).comparisons == ()


def test_partial_measure_is_compared():
    report = report_with_compatibility({"q2": 0.5, "q3": 0.0}, {"q2": 1.0, "q3": 0.5}, names=())

    (comparison,) = report.comparisons

    assert comparison.measure == "Set-Compat"
    assert (comparison.difference.mean, comparison.difference.n) == (0.5, 2)


def test_every_format_escapes_notes():
    """Text of a note or a name does not begin a Markdown list."""
    report = report_of(
        system("+ reranker", q1="a"),
        notes=("- one <b>note</b>", "3) another"),
        provenance={"Pool": "pool, 3 skills"},
    )

    markdown = report_markdown(report)
    page = report_page(report)

    assert report.to_json()["notes"] == ["- one <b>note</b>", "3) another"]
    assert "- \\- one &lt;b>note&lt;/b>" in markdown
    assert "- 3\\) another" in markdown
    assert "\n\\+ reranker: Hit@1" in markdown
    assert "- Pool: pool, 3 skills" in markdown
    assert '<p class="under">- one &lt;b&gt;note&lt;/b&gt;</p>' in page
    assert "<dt>Pool</dt><dd>pool, 3 skills</dd>" in page


def test_headline_of_equal_systems():
    assert report_of(BASE).headline() == "base: Hit@1 .333 [.00, 1.00]."
    assert report_of(BASE, SAME).headline().startswith("All systems have the same Hit@1, .333")


def test_headline_says_what_may_be_chance():
    report = report_of(BASE, BETTER)

    headline = report.headline()

    best = "better has the highest mean Hit@1, .667 [.00, 1.00]"
    assert headline == f"{best}, but its difference to base may be chance."


def test_headline_of_first_system():
    """The other system is compared with the best one, which is the first."""
    report = report_of(replace(BETTER, name="first"), BASE)

    headline = report.headline()

    assert headline.endswith("but its difference to base may be chance.")


def test_headline_names_worse_systems():
    report = report_of(BASE, BETTER)
    comparisons = tuple(replace(row, reading="above") for row in report.comparisons)

    headline = replace(report, comparisons=comparisons).headline()

    assert headline.endswith(", significantly more than base.")


def test_title_names_up_to_two_systems(full_report: Report):
    assert report_of(BASE).title() == "base on 3 queries"
    assert report_of(BASE, BETTER).title() == "base and better on 3 queries"
    assert full_report.title() == "5 systems on 12 queries"


def test_axes_have_round_ends():
    assert axis_over([0.52, 0.88]).ticks == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert axis_over([0, 1]).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert axis_over([0.5, 0.5]).ticks == (0.5, 0.51)
    assert axis_over([4.1, 2_370], logarithmic=True).ticks == (1, 10, 100, 1_000, 10_000)
    assert axis_over([12, 45], logarithmic=True).ticks == (10, 100)
    assert axis_over([10, 10], logarithmic=True).ticks == (10, 100)
    assert axis_around(0.5, [0.68, 0.39]).ticks == (0.3, 0.5, 0.7)


def test_axis_maps_values_to_percent():
    assert Axis((1, 10, 100), logarithmic=True).position(10) == pytest.approx(50)
    assert Axis((0.2, 0.4)).position(0.3) == pytest.approx(50)
    assert Axis((0.2, 0.4)).position(math.inf) == 100


def test_numbers_are_short():
    assert [p_value(p) for p in (0.00004, 0.0234, 0.99996, 1)] == ["<.0001", ".0234", "1", "1"]
    assert [p_equals(p) for p in (0.00004, 0.0234)] == ["p < .0001", "p = .0234"]
    assert [signed(value) for value in (0.1, -0.1, 0.0001)] == ["+.100", "-.100", ".000"]
    assert [duration(value) for value in (0.00042, 0.012)] == [".42 ms", "12.0 ms"]
    assert [duration(value) for value in (0.412, 1.3)] == ["412 ms", "1.30 s"]
    assert [number(value) for value in (1240.4, 12.5, 0.042, 3)] == ["1,240", "12.5", ".04", "3"]


def test_hidden_characters_are_shown():
    text = visible("a\u202e\ud800\u2028\x1b b\u3000c\n\u200d")

    assert text == "a[U+202E][U+D800][U+2028][U+001B] b\u3000c\n\u200d"


def test_markdown_characters_are_escaped():
    assert escape_markdown("1. <a|b>_") == "1\\. &lt;a\\|b>\\_"
