import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.analysis import Analysis
from skilltrain.evaluation.analysis.outcomes import Outcomes
from skilltrain.evaluation.benchmarks.benchmark import Slice
from skilltrain.evaluation.metrics import DEFAULT_MEASURES, Relevance, parse_measures, per_query
from skilltrain.evaluation.report.contents import Report, ReportTexts
from skilltrain.evaluation.report.markdown import markdown_table
from skilltrain.evaluation.report.report import build_report, write_report
from skilltrain.evaluation.report.terminal_table import terminal_table
from skilltrain.evaluation.results import SystemResult

RELEVANCES = {
    "q1": Relevance(frozenset("a"), {"a": 1.0}),
    "q2": Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}),
    "q3": Relevance(frozenset("c"), {"c": 1.0}),
}
SLICES: dict[str, Slice] = {"q1": "single", "q2": "multi", "q3": "single"}
MEASURES = parse_measures(DEFAULT_MEASURES)
EVIL = "</script><img src=http://x.invalid onerror='alert(1)'>\"&|`*"


def system(name: str, **rankings: str) -> SystemResult:
    ranked = {query_id: tuple(ranking) for query_id, ranking in rankings.items()}
    return SystemResult(name, per_query(ranked, RELEVANCES, MEASURES), ranked)


def report_of(*systems: SystemResult) -> Report:
    return build_report("bench", systems, SLICES, MEASURES, seed=7)


BASE = system("base", q1="xa", q2="ab", q3="xyz")
BETTER = system("better", q1="ax", q2="ax", q3="xc")
SAME = system("same", q1="xa", q2="ab", q3="xyz")
BASE_ELSEWHERE = system("elsewhere", q1="ya", q2="ab", q3="zyx")


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
def test_an_empty_slice_is_left_out_and_one_that_holds_all_is_shown_once(tmp_path: Path, systems):
    only = build_report("b", systems, dict.fromkeys(SLICES, "single"), MEASURES, seed=0)
    assert only.sections() == {"all": 3}
    found = only.to_json()["systems"][0]
    assert found["single"] == found["metrics"] and "multi" not in found
    console = Console(width=120, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_table(only))
    assert "all, n = 3" in capture.get() and "single" not in capture.get()
    assert "## Single" not in markdown_table(only)
    write_report(only, tmp_path, None)
    page = (tmp_path / "report.html").read_text()
    assert "3 queries (all single)" in page and 'class="view single"' not in page and 'class="switch"' not in page
    assert 'name="section" id="show-all" checked' in page, "which report.css and report.js ask for"


def test_the_best_mean_stands_out_unless_all_are_equal():
    report = report_of(BASE, BETTER)
    assert report.is_best("all", "better", "Hit@1")
    assert not report.is_best("all", "base", "Hit@1")
    assert not report_of(BASE, SAME).is_best("all", "base", "Hit@1")
    assert not report_of(BASE).is_best("all", "base", "Hit@1")


def test_terminal_table_fits_120_columns_and_shows_mean_over_interval():
    console = Console(width=120, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal_table(report_of(BASE, BETTER, system(EVIL * 2, q1="a"))))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for part in ("all, n = 3", "single, n = 2", "multi, n = 1", "R@50", "FC@10", ".333", "[.00, 1.00]"):
        assert part in text
    assert "…" not in text


def test_markdown_escapes_names_and_marks_the_best():
    text = markdown_table(report_of(BASE, BETTER, system(EVIL, q1="")))
    assert "| better | **.667** [.00, 1.00] |" in text
    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("| &lt;/script")]
    assert all(line.replace("\\|", "").count("|") in (9, 11) for line in rows)
    assert "## Single (n = 2)" in text
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


def html_of(tmp_path: Path, *systems: SystemResult, texts: bool = True) -> str:
    names = {skill_id: f"{skill_id}: {EVIL}" for skill_id in "abcxyz"}
    gold = {query_id: relevance.gold for query_id, relevance in RELEVANCES.items()}
    queries = {query_id: f"{query_id} {EVIL}\ud800" for query_id in RELEVANCES}
    report = build_report(EVIL, systems, SLICES, MEASURES, seed=7)
    write_report(report, tmp_path, ReportTexts(queries, names, gold) if texts else None)
    return (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("texts", [True, False])
def test_html_is_well_formed_escaped_and_asks_for_nothing(tmp_path: Path, texts: bool):
    page = Tags(text := html_of(tmp_path, BASE, BETTER, system(EVIL, q1="a"), texts=texts))
    assert page.open == []
    kinds = [tag for tag, _ in page.tags]
    assert "img" not in kinds
    assert kinds.count("script") == 1
    assert "style" not in {name for _, attributes in page.tags for name in attributes}
    targets = [a["href"] or "" for _, a in page.tags if "href" in a]
    assert targets == ["data:,", "#differences", "#queries"]
    assert {target[1:] for target in targets[1:]} <= {a.get("id") for _, a in page.tags}
    assert not [a for _, a in page.tags if "src" in a]
    assert "url(" not in text
    assert "@import" not in text


def test_html_policy_admits_its_own_script_and_style_only(tmp_path: Path):
    text = html_of(tmp_path, BASE)
    policy = next(a["content"] or "" for tag, a in Tags(text).tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_html_lists_failures_first_and_then_the_queries_where_systems_differ(tmp_path: Path):
    text = html_of(tmp_path, BASE, BETTER)
    listed = [a["class"] for tag, a in Tags(text).tags if tag == "details"]
    assert listed == ["query single", "query multi", "query single"]
    failures, differing = text.split('id="failures"')[1].split('id="differing"')
    assert "1 of 3 queries, the hardest first" in failures
    assert "<b>q3</b>" in failures  # base never finds it, better at rank 2
    assert '<span title="base"><i class="swatch c0"></i>none</span>' in failures
    assert '<span title="better"><i class="swatch c1"></i>2</span>' in failures
    assert "<b>q3</b>" not in differing
    assert differing.index("<b>q2</b>") < differing.index("<b>q1</b>")  # half found, found later
    assert "<details" not in html_of(tmp_path, BASE, BASE_ELSEWHERE, texts=False)


def test_html_names_what_stood_on_top_and_marks_the_gold(tmp_path: Path):
    failures = html_of(tmp_path, BASE, BETTER).split('id="failures"')[1].split('id="differing"')[0]
    wanted, base, better = failures.split("<h4>")[1:4]
    assert wanted.startswith("Gold") and 'class=gold title="c"' in wanted
    assert "class=gold" not in base
    assert [part.split('"')[0] for part in better.split('title="')[1:]] == ["x", "c"]
    assert 'class=gold title="c"' in better


def test_an_alternative_counts_as_gold_on_the_page(tmp_path: Path):
    relevance = Relevance(frozenset("a"), {"a": 1.0}, {"b": "a"})
    ranked = {"q1": ("x", "b", "a")}
    result = SystemResult("one", per_query(ranked, {"q1": relevance}, MEASURES), ranked)
    texts = ReportTexts({"q1": "text"}, {}, {"q1": relevance.gold}, {"q1": relevance.alternatives})
    assert texts.first_rank(result, "q1") == 2
    write_report(build_report("b", [result], {"q1": "single"}, MEASURES, seed=0), tmp_path, texts)
    ranking = (tmp_path / "report.html").read_text().split("<ol>")[1].split("</ol>")[0]
    assert ranking.count("class=gold") == 1
    assert 'class=gold title="b"' in ranking


def test_html_plots_mean_and_interval_in_percent_and_the_recall_curve(tmp_path: Path):
    report = report_of(BASE, BETTER)
    value = report.summaries["better"]["all"]["Hit@1"]
    text = html_of(tmp_path, BASE, BETTER)
    assert f'cx="{value.mean:.2%}"' in text
    assert f'x1="{value.low:.2%}" x2="{value.high:.2%}"' in text
    curve = text.split('class="curve"')[1].split("</figure>")[0]
    # base, all queries: recall at 1, 2, 3 is (0 + 1/2 + 0)/3, (1 + 1 + 0)/3, (1 + 1 + 0)/3; y runs down from 100
    assert 'points="0.00,83.33 63.09,33.33 100.00,33.33"' in curve
    assert "curve" not in html_of(tmp_path, BASE, texts=False).split("</style>")[1]


def test_per_query_values_are_written_for_every_system(tmp_path: Path):
    write_report(report_of(BASE, BETTER), tmp_path, None)
    rows = [json.loads(line) for line in (tmp_path / "per_query.jsonl").read_text().splitlines()]
    assert [(row["system"], row["query_id"], row["slice"]) for row in rows[:4]] == [
        ("base", "q1", "single"), ("base", "q2", "multi"), ("base", "q3", "single"), ("better", "q1", "single"),
    ]  # fmt: skip
    assert rows[0]["MRR@10"] == 0.5
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert saved["systems"][1]["metrics"]["Hit@1"]["mean"] == pytest.approx(2 / 3)
    assert (tmp_path / "report.md").read_text() == markdown_table(report_of(BASE, BETTER))


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path):
    for name in ("one", "two"):
        write_report(report_of(BASE, BETTER), tmp_path / name, None)
    for file in ("metrics.json", "report.md", "report.html", "per_query.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_systems_that_cannot_stand_side_by_side_are_refused():
    with pytest.raises(SkilltrainError, match="two systems are named 'base'"):
        report_of(BASE, BETTER, BASE)
    with pytest.raises(SkilltrainError, match=r"system part: its queries are not the benchmark's: 2 .* first 'q2'"):
        report_of(BASE, SystemResult("part", {"q1": BASE.per_query["q1"]}, {}))
    without = SystemResult("odd", {query_id: {"Hit@1": 1.0} for query_id in SLICES}, {})
    for order in ((BASE, without), (without, BASE)):
        with pytest.raises(SkilltrainError, match=r"system odd: query q1 has no value of MRR@10, but has one in base"):
            report_of(*order)
    outcome = Outcomes("base", "gone", "Hit@1", ("q1",), (), (), (), 1.0)
    with pytest.raises(SkilltrainError, match="analysis is of a system 'gone'"):
        build_report("b", [BASE], SLICES, MEASURES, 0, Analysis(outcomes=(outcome,)))
    outcome = Outcomes("base", "same", "Hit@1", ("q1",), ("q9",), (), (), 1.0)
    with pytest.raises(SkilltrainError, match="analysis is of a query 'q9'"):
        build_report("b", [BASE, SAME], SLICES, MEASURES, 0, Analysis(outcomes=(outcome,)))
    with pytest.raises(SkilltrainError, match="at least one system"):
        report_of()
    with pytest.raises(SkilltrainError, match="a measure is named twice"):
        build_report("b", [BASE], SLICES, [*MEASURES, MEASURES[0]], seed=0)
