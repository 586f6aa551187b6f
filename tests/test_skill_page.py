"""The page of a report that counts right and wrong requests skill by skill."""

import pytest

from headless_chromium import CHROMIUM, browser
from invented_report import invented
from skilltrain.evaluation.report import Report, build_report
from skilltrain.evaluation.skill_page import first_skills, skill_page
from skilltrain.evaluation.write import write_report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import Relevance, parse_measures, per_query
from skilltrain.records import Query, Skill

GOLD = {"q1": "a", "q2": "a", "q3": "a", "q4": "b", "q5": "b"}
RANKINGS = {"q1": ["a"], "q2": ["b"], "q3": ["b", "a"], "q4": ["b"], "q5": []}


@pytest.fixture
def report() -> Report:
    """A report of one system: of three requests for a, two go to b; one for b has no answer."""
    tasks = []
    for query_id, skill_id in GOLD.items():
        relevance = Relevance(frozenset([skill_id]), {skill_id: 1.0})
        tasks.append(task_of(Query(query_id, "words", "", "", ""), relevance, {}))
    benchmark = Benchmark("bench", tuple(tasks))
    measures = parse_measures(["Hit@1"])
    values = per_query(RANKINGS, benchmark.relevances, measures)
    skills = {"a": Skill("a", "Apple & <b>", "", ""), "b": Skill("b", "Bread", "", "")}
    return build_report(benchmark, [SystemResult("mine", values, RANKINGS)], measures, skills)


def test_first_skills_are_counted(report: Report):
    rows = first_skills(report, report.results[0])

    assert rows == [("a", {"b": 2, "a": 1}), ("b", {"b": 1, "": 1})]


def test_request_counts_for_each_gold_skill(report: Report):
    task = task_of(
        Query("q1", "words", "", "", ""), Relevance(frozenset("ab"), {"a": 1.0, "b": 1.0}), {}
    )
    benchmark = Benchmark("bench", (task,))
    values = per_query({"q1": ["b"]}, benchmark.relevances, parse_measures(["Hit@1"]))
    result = SystemResult("mine", values, {"q1": ["b"]})
    multi = build_report(benchmark, [result], parse_measures(["Hit@1"]), {})

    rows = first_skills(multi, result)

    assert sorted(rows) == [("a", {"a": 1}), ("b", {"b": 1})]


def test_skill_may_be_called_nothing():
    relevance = Relevance(frozenset(["nothing"]), {"nothing": 1.0})
    task = task_of(Query("q1", "words", "", "", ""), relevance, {})
    result = SystemResult("mine", {"q1": {"Hit@1": 0.0}}, {"q1": []})
    report = build_report(Benchmark("b", (task,)), [result], parse_measures(["Hit@1"]), {})

    page = skill_page(report)

    assert first_skills(report, result) == [("nothing", {"": 1})]
    assert "<bdi>nothing</bdi> 1" in page


def test_page_escapes_names(report: Report):
    page = skill_page(report)

    assert "Apple &amp; &lt;b&gt;" in page
    assert "<bdi>Bread</bdi> 2" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_report_leads_to_skills(tmp_path):
    write_report(invented(24), tmp_path)

    with browser(tmp_path / "skills.html") as page:
        num_tables = page.run("document.querySelectorAll('table').length")
        width = page.run("document.documentElement.scrollWidth - innerWidth")

        page.check_quiet()
    assert num_tables == len(invented(24).systems)
    assert width <= 0
    assert 'href="skills.html"' in (tmp_path / "report.html").read_text()
