"""Trigger evaluations become queries, judgements and no-skill rows, and test a router."""

import json
from xml.etree import ElementTree

import pytest

from faults import raises
from skilltrain.data.trigger_evals import TriggerQuery, read_trigger_evals
from skilltrain.serving.fit import FitConfig, run_fit
from skilltrain.serving.router import Router
from skilltrain.serving.routing_tests import run_routing_tests
from skilltrain.tables import JUDGEMENTS, QUERIES, read_table
from small_library import skilltrain, succeeds, write_library

MERGE = "documents/pdf-merge"
EXTRACT = "documents/pdf-text-extract"
MERGE_ROWS = [("join my pdf files", True), ("read pdf text aloud", False), ("hello", False)]
EXTRACT_ROWS = [("read pdf text aloud", True), ("pdf text of my files", True)]


def write_eval(skills, skill_id, rows):
    """Write the trigger evaluation of a skill from pairs of a query and a truth value."""
    file = skills / skill_id / "evals" / "trigger-eval.json"
    file.parent.mkdir(exist_ok=True)
    values = [{"query": query, "should_trigger": triggers} for query, triggers in rows]
    file.write_text(json.dumps(values))
    return file


@pytest.fixture(scope="module")
def skills(tmp_path_factory):
    """Return a folder of twenty skills, two of which have trigger evaluations."""
    folder = write_library(tmp_path_factory.mktemp("triggers")) / "skills"
    write_eval(folder, MERGE, MERGE_ROWS)
    write_eval(folder, EXTRACT, EXTRACT_ROWS)
    return folder


@pytest.fixture(scope="module")
def router(skills, tmp_path_factory):
    """Return the folder of a BM25 router over the skills."""
    runs = tmp_path_factory.mktemp("router")
    succeeds("pool", f"sources={skills}", f"out={runs}/pool")
    rankers = "rankers=[{kind: lexical}]"
    succeeds("index", f"pool={runs}/pool", rankers, f"out={runs}/router")
    return runs / "router"


def test_folders_share_their_queries(tmp_path):
    for name, triggers in (("a", True), ("b", False)):
        (tmp_path / name / f"skill-{name}").mkdir(parents=True)
        write_eval(tmp_path / name, f"skill-{name}", [("join pdfs", triggers)])

    (query,) = read_trigger_evals(tmp_path / "a", tmp_path / "b")

    assert (query.expected, query.unexpected) == (["skill-a"], ["skill-b"])


def test_repeated_row_counts_once(tmp_path):
    (tmp_path / "skill").mkdir()
    write_eval(tmp_path, "skill", [("join pdfs", True), ("join pdfs", True)])

    (query,) = read_trigger_evals(tmp_path)

    assert query.expected == ["skill"]


def test_contradictory_rows_are_refused(tmp_path):
    (tmp_path / "skill").mkdir()
    write_eval(tmp_path, "skill", [("join pdfs", True), ("join pdfs", False)])

    with raises("invalid-row"):
        read_trigger_evals(tmp_path)


def test_rows_of_two_skills_are_joined(skills):
    queries = read_trigger_evals(skills)

    by_text = {query.text: (query.expected, query.unexpected) for query in queries}
    assert by_text == {
        "join my pdf files": ([MERGE], []),
        "read pdf text aloud": ([EXTRACT], [MERGE]),
        "hello": ([], [MERGE]),
        "pdf text of my files": ([EXTRACT], []),
    }


def test_folder_of_one_skill_is_read(skills):
    queries = read_trigger_evals(skills / MERGE)

    assert queries[0].expected == ["pdf-merge"]


def test_queries_takes_trigger_evals(skills, tmp_path):
    succeeds("pool", f"sources={skills}", f"out={tmp_path}/pool")

    options = [f"pool={tmp_path}/pool", "split=dev", f"out={tmp_path}/queries"]
    succeeds("queries", f"files={skills}", *options)

    texts = read_table(tmp_path / "queries", QUERIES).column("text").to_pylist()
    judgements = read_table(tmp_path / "queries", JUDGEMENTS).to_pylist()
    verdicts = sorted((row["skill_id"], row["verdict"]) for row in judgements)
    unserved = (tmp_path / "queries" / "unserved.jsonl").read_text()
    assert sorted(texts) == ["join my pdf files", "pdf text of my files", "read pdf text aloud"]
    assert verdicts == [
        (MERGE, "irrelevant"),
        (MERGE, "required"),
        (EXTRACT, "required"),
        (EXTRACT, "required"),
    ]
    assert unserved == '{"query": "hello"}\n'


@pytest.mark.usefixtures("few_general_requests")
def test_fit_calibrates_with_no_skill_rows(skills, model_folders, tmp_path):
    base = str(model_folders["bert"])
    out = tmp_path / "router"

    run_fit(FitConfig(skills=skills, queries=(skills,), out=out, base=base, train=False))

    calibration = json.loads((out / "calibration" / "calibration.json").read_text())
    assert calibration["num_queries"] == 3
    assert "unserved" in json.dumps(calibration["figures"])


def test_expected_skills_pass(skills, router):
    outcome = succeeds("test", router, skills)

    assert outcome.out == "4 of 4 queries passed\n"


@pytest.fixture
def wrong_evals(tmp_path):
    """Return a folder whose trigger evaluations expect the wrong skill once."""
    (tmp_path / "skills" / MERGE).mkdir(parents=True)
    write_eval(tmp_path / "skills", MERGE, [("read pdf text aloud", True), ("join pdf", True)])
    return tmp_path / "skills"


def test_wrong_first_skill_fails(router, wrong_evals):
    outcome = skilltrain("test", router, wrong_evals)

    assert outcome.code == 1
    failure = f"expected {MERGE} (rank 3), got {EXTRACT} (ranks: lexical 1; words: "
    assert f"FAILED 'read pdf text aloud': {failure}" in outcome.out
    assert outcome.out.endswith("1 of 2 queries passed\n")


def test_junit_names_the_failure(router, wrong_evals, tmp_path):
    report = tmp_path / "results.xml"

    skilltrain("test", router, wrong_evals, "--junit", report)

    suite = ElementTree.parse(report).getroot()
    cases = {case.attrib["name"]: case for case in suite}
    failures = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
    assert failures == ["read pdf text aloud"]
    assert cases["join pdf"].attrib["classname"] == MERGE


def test_router_knows_its_skills_folder(router):
    outcome = succeeds("test", router, "--json")

    assert json.loads(outcome.out) == {"num_queries": 4, "failures": []}


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (TriggerQuery("join pdf files", "w", ["data/none"]), "does not have the skill"),
        (TriggerQuery("join pdf files", "w", [EXTRACT]), "words: "),
        (TriggerQuery("join pdf files", "w", [], [MERGE]), "words: "),
        (TriggerQuery("zzz", "w", [MERGE]), "no skill fits"),
    ],
)
def test_failure_has_reason(router, query, reason):
    (failure,) = run_routing_tests(Router.load(router), [query])

    assert reason in failure.reason


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("{", "not-json", "trigger-eval.json"),
        ("{}", "invalid-row", "is no list"),
        ("[1]", "invalid-row", "row 1"),
        ('[{"query": "q", "should_trigger": "no"}]', "invalid-row", "should_trigger"),
        ('[{"query": " ", "should_trigger": true}]', "invalid-row", "no visible text"),
    ],
)
def test_broken_trigger_eval_is_refused(tmp_path, text, code, problem):
    file = write_eval(tmp_path, ".", [])
    file.write_text(text)

    with raises(code) as caught:
        read_trigger_evals(tmp_path)

    assert problem in str(caught.value)


def test_folder_without_trigger_evals_is_refused(tmp_path):
    with raises("not-found") as caught:
        read_trigger_evals(tmp_path)

    assert "no trigger evaluation" in str(caught.value)


def test_missing_folder_is_named(router, tmp_path):
    outcome = skilltrain("test", router, tmp_path / "nothere")

    assert outcome.code == 2
    assert outcome.error_line == f"error: {tmp_path}/nothere: no such file or folder [not-found]"
