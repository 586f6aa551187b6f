import base64
import hashlib
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from skilltrain.evaluation.benchmarks.benchmark import Benchmark, task_of
from skilltrain.evaluation.comparison import SystemResult
from skilltrain.evaluation.metrics import DEFAULT_MEASURES, Measure, Relevance, parse_measures, per_query
from skilltrain.records import Query, Skill
from skilltrain.report.evaluation import Report, build_report
from skilltrain.report.write import report_markdown, report_page, terminal_table

RELEVANCES = {
    "q1": Relevance(frozenset("a"), {"a": 1.0}),
    "q2": Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}),
    "q3": Relevance(frozenset("c"), {"c": 1.0}),
}
MEASURES = parse_measures(DEFAULT_MEASURES)
EVIL = "</script><img src=http://x.invalid onerror='alert(1)'>\"&|`*"


def benchmark_of(relevances: dict[str, Relevance], text: str = "text of {}", notes: tuple[str, ...] = ()) -> Benchmark:
    tasks = [task_of(Query(q, text.format(q), "", "made", "test"), r, {}) for q, r in relevances.items()]
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
    report = build_report(benchmark or benchmark_of(RELEVANCES), systems, measures, 7, skills or {})
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
    assert base["multi"]["FC@10"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1, "normal": [1.0, 1.0]}
    assert better["multi"]["Recall@10"]["mean"] == 0.5
    assert better["metrics"]["Hit@1"]["n"] == 3
    third, error = 1 / 3, 1.959964 * (1 / 3 * 2 / 3 / 3) ** 0.5
    assert base["metrics"]["Hit@1"]["normal"] == pytest.approx([max(0.0, third - error), third + error], abs=1e-4)
    assert list(better["metrics"]) == list(DEFAULT_MEASURES)


def test_each_system_is_compared_with_the_first_and_the_one_before_once():
    report = report_of(BASE, BETTER, SAME)
    rows = report.to_json()["differences"]
    pairs = [(row["system"], row["baseline"], row["measure"]) for row in rows]
    names = [("better", "base"), ("same", "base"), ("same", "better")]
    assert pairs == [(*pair, measure) for pair in names for measure in ("Hit@1", "MRR@10")]
    assert rows[0]["mean"] == pytest.approx(1 / 3)
    assert rows[1]["mean"] == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)
    assert rows[2] | {"p": 1.0} == rows[2]
    assert rows[4]["mean"] == -rows[0]["mean"]
    assert set(rows[0]) == {
        "system", "baseline", "measure", "mean", "low", "high", "n", "p", "p_holm", "wilcoxon_p", "mcnemar_p",
        "cohens_h", "reading",
    }  # fmt: skip
    assert {row["reading"] for row in rows} == {"not told apart"}
    assert [row["mcnemar_p"] for row in rows[:2]] == [1.0, None]  # one fixed, none broken; MRR is not 0 or 1
    assert report_of(BASE).comparisons == ()


@pytest.mark.parametrize("systems", [(BASE,), (BASE, BETTER)])
def test_an_empty_slice_is_left_out_and_one_that_holds_all_is_shown_once(systems):
    single = {query_id: Relevance(frozenset("a"), {"a": 1.0}) for query_id in RELEVANCES}
    only = report_of(*systems, benchmark=benchmark_of(single))
    assert only.labels == {}
    found = only.to_json()["systems"][0]
    assert found["single"] == found["metrics"] and "multi" not in found
    assert "all, n = 3" in terminal(only, 120) and "single" not in terminal(only, 120)
    assert "single" not in report_markdown(only)
    assert "3 queries (all single)" in report_page(only)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_table_keeps_names_and_intervals_at_any_width(width: int):
    lines = terminal(report_of(BASE, BETTER, system("a much longer name of a system", q1="a")), width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("all, n = 3", "single, n = 2", "multi, n = 1", "FC@10", ".333", "[.00, 1.00]", "base", "better"):
        assert part in text
    assert "…" not in text and "\u202e" not in text


def test_markdown_escapes_names_and_marks_the_best():
    text = report_markdown(report_of(BASE, BETTER, system(EVIL, q1="")))
    assert "| better | **.667** [.00, 1.00] |" in text
    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("| &lt;/script")]
    assert all(line.replace("\\|", "").count("|") in (9, 11) for line in rows)
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
    return report_page(report_of(*systems, benchmark=benchmark, skills=skills, provenance={EVIL: EVIL}))


def check_safe(text: str, num_scripts: int) -> Tags:
    """A well-formed page that asks for nothing; its policy admits its own script and style only."""
    page = Tags(text)
    assert page.open == []
    kinds = [tag for tag, _ in page.tags]
    assert (kinds.count("script"), kinds.count("style"), kinds.count("img")) == (num_scripts, 1, 0)
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"style", "onerror", "onclick", "src", "action"}
    assert {a["href"] for _, a in page.tags if "href" in a and not (a["href"] or "").startswith("#")} == {"data:,"}
    assert "url(" not in text and "@import" not in text
    policy = next(a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("script", "style"):
        content = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy
    return page


def test_html_lists_failures_first_and_then_the_queries_where_systems_differ():
    text = html_of(BASE, BETTER)
    assert text.count('<details class="query">') == 3
    failures, differing = text.split('id="failures"')[1].split('id="differing"')
    assert "1 of 3 queries, the hardest first" in failures
    assert "<b>q3</b>" in failures  # base never finds it, better at rank 2
    assert '<span title="base"><i class="swatch c0"></i>none</span>' in failures
    assert '<span title="better"><i class="swatch c1"></i>2</span>' in failures
    assert "<b>q3</b>" not in differing
    assert differing.index("<b>q2</b>") < differing.index("<b>q1</b>")  # half found, found later


def test_an_alternative_counts_as_gold_on_the_page():
    relevance = Relevance(frozenset("a"), {"a": 1.0}, {"b": "a"})
    ranked = {"q1": ("x", "b", "a")}
    result = SystemResult("one", per_query(ranked, {"q1": relevance}, MEASURES), ranked)
    report = report_of(result, benchmark=benchmark_of({"q1": relevance}))
    assert report.first_ranks == {"one": {"q1": 2}}
    ranking = report_page(report).split("<ol>")[1].split("</ol>")[0]
    assert ranking.count("gold") == 1
    assert 'class="gold" title="b"' in ranking


def test_html_plots_mean_and_interval_in_percent_and_the_recall_curve():
    report, text = report_of(BASE, BETTER), html_of(BASE, BETTER)
    value = report.every.means["better"]["Hit@1"]
    assert f'cx="{value.mean:.2%}"' in text
    assert f'x1="{value.low:.2%}" x2="{value.high:.2%}"' in text
    curve = text.split('class="curve"')[1].split("</figure>")[0]
    # base, all queries: recall at 1, 2, 3 is (0 + 1/2 + 0)/3, (1 + 1 + 0)/3, (1 + 1 + 0)/3; y runs down from 100
    assert 'points="0.00,83.33 63.09,33.33 100.00,33.33"' in curve


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
