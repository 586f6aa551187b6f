"""Calibration of a router's scores: by hand, and as a stage on a small library."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_folders import jsonl
from faults import raises
from skilltrain.config import validate
from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import read_unserved
from skilltrain.metrics.bootstrap import share
from skilltrain.metrics.measures import Relevance
from skilltrain.metrics.refusal import (
    Logistic,
    assign_folds,
    calibration_error,
    fit_logistic,
    fit_out_of_fold,
    limit_refusals,
    risk_coverage,
)
from skilltrain.records import Query
from skilltrain.serving.answer import Calibrator, Trace
from skilltrain.serving.calibrate import GENERAL_REQUESTS, bound
from skilltrain.serving.router import Router
from skilltrain.tables import SKILLS, write_table
from small_library import QUERIES, skilltrain, succeeds

RANKERS = "[{kind: lexical}]"


def traced(scores, **top_scores):
    """Return a trace of skills with these scores; each ranker gave its top score at most."""
    rankings = {name: [("x", top), ("y", top - 1)] for name, top in top_scores.items()}
    return Trace(rankings, {}, [(f"s{number}", score) for number, score in enumerate(scores)])


@pytest.mark.parametrize(
    ("trace", "rankers", "features"),
    [
        (
            traced([3.0, 2.5, 1.0], lexical=9.0, dense=0.5),
            ["dense", "lexical"],
            [[3.0, 0.5, 0.5, 9.0], [2.5, -0.5, 0.5, 9.0], [1.0, -2.0, 0.5, 9.0]],
        ),
        (traced([3.0], lexical=9.0), ["lexical"], [[3.0, 0.0, 9.0]]),
        (traced([], lexical=0.0), ["lexical"], []),
    ],
)
def test_features_are_score_lead_top_scores(trace, rankers, features):
    rows = trace.features(rankers)

    assert rows.tolist() == features
    assert rows.shape == (len(features), 2 + len(rankers))


def test_top_score_is_divided_by_root_of_highest():
    trace = Trace({"bm25": [("s", 6.0)], "none": []}, {"bm25": 16.0}, [])

    assert trace.top_scores(["bm25", "none"]) == [1.5, 0.0]


def test_long_request_has_top_score_of_short_one():
    """A request of four times as many words must not look as if no skill served it."""
    short = Trace({"bm25": [("s", 6.0)]}, {"bm25": 16.0}, [])
    long = Trace({"bm25": [("s", 12.0)]}, {"bm25": 64.0}, [])

    assert short.top_scores(["bm25"]) == long.top_scores(["bm25"])


CALIBRATOR = Calibrator(
    rankers=("a",),
    serves=Logistic(weights=(1.0, 2.0, 0.5), intercept=-3.0),
    miss=0.5,
    fits=Logistic(weights=(0.1, 0.1, 4.0), intercept=-3.0),
    threshold=0.6,
)


def test_probabilities_by_hand():
    # The logits are 2 + 2 + .5 - 3 = 1.5 and 1 - 2 + .5 - 3 = -3.5.
    trace = traced([2.0, 1.0], a=1.0)

    probabilities = CALIBRATOR.probabilities(trace)

    assert probabilities == pytest.approx([1 / (1 + np.exp(-1.5)), 1 / (1 + np.exp(3.5))])
    assert CALIBRATOR.num_likely(trace) == 1


def test_extreme_logits_do_not_overflow():
    assert CALIBRATOR.probabilities(traced([2e3, 1e3, -2e3], a=1.0)).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("trace", "fits"),
    [
        (traced([2.0, 1.0], a=1.0), True),  # the logit is .2 + .1 + 4 - 3
        (traced([2.0, 1.0], a=0.5), False),
        (traced([9.0, 1.0], a=0.5), True),
        (traced([], a=9.0), False),
    ],
)
def test_fit_has_weights_of_its_own(trace, fits):
    assert CALIBRATOR.answers(trace) == fits


def test_fit_follows_frequencies():
    rows = np.array([[0.0, 1.0]] * 40 + [[1.0, 0.0]] * 40)
    labels = np.array([True] * 10 + [False] * 30 + [True] * 30 + [False] * 10)

    function = fit_logistic(rows, labels)

    # No weight is below zero.
    assert function.weights[0] > 0
    assert function.weights[1] == 0
    assert function.probabilities(rows[[0, -1]]) == pytest.approx([0.25, 0.75], abs=0.03)


SERVED = np.arange(21) / 20  # 0, .05, .1 up to 1


def test_refusals_are_limited():
    threshold = limit_refusals(SERVED, np.zeros(10), max_refused=0.05)

    assert threshold == 0.05  # refuses one of 21


def test_general_requests_raise_the_threshold():
    general = np.array([0.0, 0.0, 0.0, 0.08, 0.1])

    threshold = limit_refusals(SERVED, general, max_refused=0.05)

    assert threshold == 0.1  # answers one of five; .08 would answer two


def test_refusals_are_limited_for_answered_general_requests():
    threshold = limit_refusals(SERVED, np.ones(10), max_refused=0.05)

    assert threshold == pytest.approx(0.15)  # refuses three of 21


def test_general_requests_are_distinct():
    requests = [query.text for query in read_unserved(GENERAL_REQUESTS)]

    assert len(set(requests)) == len(requests) == 200
    assert sum(any("\u4e00" <= char <= "\u9fff" for char in text) for text in requests) >= 40


@pytest.mark.parametrize(
    "changes",
    [
        {"serves": {"weights": (1.0,), "intercept": 0.0}},
        {"serves": {"weights": (1.0,) * 9, "intercept": 0.0}},
        {"serves": {"weights": (1.0, 2.0, -0.5), "intercept": 0.0}},
        {"serves": {"weights": (1.0, 2.0, 1e308), "intercept": 0.0}},
        {"serves": {"weights": (1.0, 2.0, float("nan")), "intercept": 0.0}},
        {"fits": {"weights": (1.0, 2.0), "intercept": 0.0}},
        {"fits": {"weights": (1.0, 2.0, 0.5), "intercept": 1e308}},
        {"threshold": 1.5},
        {"threshold": -0.1},
        {"miss": 2.0},
    ],
)
def test_unusable_calibrator_is_refused(changes):
    with raises("invalid-setting"):
        validate(Calibrator, CALIBRATOR.model_dump() | changes, "calibrator")


@pytest.mark.parametrize(
    ("num_scores", "level", "expected"),
    [(9, 0.9, 0.1), (19, 0.9, 0.2), (20, 0.9, 0.2), (8, 0.9, 0.0), (9, 0.5, 0.5)],
)
def test_bound_is_conformal_quantile(num_scores, level, expected):
    scores = np.arange(num_scores, 0, -1) / 10

    assert bound(scores, level) == pytest.approx(expected)


def test_bound_is_reached_at_its_level():
    rng = np.random.default_rng(0)

    is_reached = [rng.random() >= bound(rng.random(50), 0.8) for _ in range(4000)]

    assert np.mean(is_reached) == pytest.approx(0.8, abs=0.02)  # three standard errors


PROBABILITIES = np.array([0.9] * 5 + [0.3] * 5)
IS_RIGHT = np.array([True, True, True, False, False] + [True] * 5)


def test_calibration_error_by_hand():
    # Ten bins of one answer: five of |.3 - 1|, three of |.9 - 1| and two of |.9 - 0|.
    expected = (5 * 0.7 + 3 * 0.1 + 2 * 0.9) / 10

    error = calibration_error(PROBABILITIES, IS_RIGHT)

    assert error.mean == pytest.approx(expected)
    assert error.low <= error.mean <= error.high
    assert error.n == 10


def test_risk_by_coverage_by_hand():
    points = dict(risk_coverage(PROBABILITIES, IS_RIGHT))

    assert points[0.1] == 0
    assert points[0.5] == 0.4
    assert points[1.0] == 0.2


def test_share_of_none_by_hand():
    interval = share([False] * 30)

    assert (interval.mean, interval.low, interval.n) == (0, 0, 30)
    assert interval.high == pytest.approx(0.1135, abs=1e-3)


def test_share_needs_values():
    with raises("nothing-to-score"):
        share([])


@pytest.fixture(scope="module")
def folders(library, tmp_path_factory):
    """A folder with a library's pool, queries, clusters and router."""
    folder = shutil.copytree(library, tmp_path_factory.mktemp("calibrate") / "library")
    pool = f"pool={folder}/pool"
    succeeds("pool", f"sources={folder}/skills", f"out={folder}/pool")
    succeeds("queries", f"files={folder}/queries/all.jsonl", pool, f"out={folder}/requests")
    succeeds("clusters", pool, f"out={folder}/clusters")
    succeeds("index", pool, f"rankers={RANKERS}", f"out={folder}/router")
    rows = [{"query": text} for text in ("walk my dog at noon", "merge two lanes")]
    (folder / "unserved.jsonl").write_text(jsonl(*rows))
    return folder


def calibrate(folder, out, *settings):
    """Return the command that calibrates the router on all queries."""
    inputs = (
        f"router={folder}/router",
        f"queries={folder}/requests",
        f"clusters={folder}/clusters",
    )
    return ("calibrate", *inputs, "split=null", "folds=3", *settings, f"out={out}")


@pytest.fixture(scope="module")
def calibration(folders, tmp_path_factory):
    """The folder of a calibration with unserved queries, and its summary."""
    out = tmp_path_factory.mktemp("calibration") / "out"
    unserved = f"unserved={folders}/unserved.jsonl"
    outcome = succeeds(*calibrate(folders, out, unserved, "answered=0.6"), "--json")
    return out, json.loads(outcome.out)


@pytest.fixture(scope="module")
def router_folder(folders, calibration, tmp_path_factory):
    """A router with this calibration."""
    folder = shutil.copytree(folders / "router", tmp_path_factory.mktemp("routers") / "router")
    succeeds("index", f"calibration={calibration[0]}", f"out={folder}")
    return folder


@pytest.fixture
def router(router_folder):
    return Router.load(router_folder)


def test_calibration_scores_all_queries(calibration):
    _, summary = calibration

    assert summary["num_queries"] == len(QUERIES)
    assert summary["right"]["n"] == summary["falsely_answered"]["n"] == 16
    assert summary["unserved"]["n"] == 2
    assert summary["right"]["mean"] > 0.5
    assert summary["falsely_answered"]["mean"] < summary["answered"]["mean"]
    assert 0 <= summary["calibration_error"]["mean"] <= 1
    assert summary["risk_coverage"][-1][0] == 1


def test_few_queries_are_warned_of(folders, tmp_path):
    outcome = succeeds(*calibrate(folders, tmp_path / "out"))

    assert "16 queries to calibrate with; at least 100 are advised" in " ".join(outcome.err.split())


def test_threshold_of_zero_is_warned_of(folders, tmp_path):
    outcome = succeeds(*calibrate(folders, tmp_path / "out", "answered=0.99"))

    assert "the threshold is 0" in " ".join(outcome.err.split())


def test_unserved_requests_change_the_fit(folders, calibration, tmp_path):
    succeeds(*calibrate(folders, tmp_path / "out", "answered=0.6"))

    without = json.loads((tmp_path / "out" / "calibration.json").read_text())
    with_file = json.loads((calibration[0] / "calibration.json").read_text())
    assert without["calibrator"]["fits"] != with_file["calibrator"]["fits"]


def test_number_of_queries_is_limited(folders, tmp_path):
    outcome = succeeds(*calibrate(folders, tmp_path / "out", "max_queries=12"), "--json")

    assert json.loads(outcome.out)["num_queries"] == 12


def test_passages_of_queries_are_masked(folders, tmp_path):
    """Queries cut from skills must not find their own words in these skills."""
    masked = tmp_path / "masked"
    skills = [replace(skill, body="x") for skill in read_pool(folders / "skills")]
    write_table(skills, SKILLS, masked)

    outcome = succeeds(*calibrate(folders, tmp_path / "out", f"masked_pool={masked}"), "--json")

    masked_summary = json.loads(outcome.out)
    plain = json.loads(succeeds(*calibrate(folders, tmp_path / "plain"), "--json").out)
    assert masked_summary["right"] != plain["right"]


def test_fewer_passages_than_requests_are_refused(folders, tmp_path):
    """Passages are easier, so a threshold that refuses as many would refuse too many requests."""
    succeeds(*calibrate(folders, tmp_path / "requests"))
    succeeds(*calibrate(folders, tmp_path / "passages", f"masked_pool={folders}/pool"))

    requests = json.loads((tmp_path / "requests" / "calibration.json").read_text())
    passages = json.loads((tmp_path / "passages" / "calibration.json").read_text())
    assert passages["calibrator"]["fits"] == requests["calibrator"]["fits"]
    assert passages["calibrator"]["threshold"] < requests["calibrator"]["threshold"]


def test_router_with_other_skills_leaves_the_first_alone(router):
    skills = [skill for skill in router.skills.values() if "contract" not in skill.skill_id]

    other = router.with_skills(skills)

    assert len(other.skills) == len(router.skills) - 1
    assert other.trace("merge pdf files").ranking[0][0] == "documents/pdf-merge"


@pytest.mark.parametrize(
    ("key", "value"),
    [("rankers", ["dense"]), ("rankers", ["fuse"]), ("weights", [1.0]), ("least", [])],
)
def test_calibration_that_cannot_be_applied_is_refused(folders, calibration, tmp_path, key, value):
    file = tmp_path / "calibration" / "calibration.json"
    shutil.copytree(calibration[0], file.parent)
    values = json.loads(file.read_text())
    values["calibrator"][key] = value
    file.write_text(json.dumps(values))

    outcome = skilltrain("index", f"calibration={file.parent}", f"out={folders}/router")

    assert outcome.code == 2
    assert "calibrat" in outcome.error_line


def test_changed_calibration_of_router_is_refused(router_folder, tmp_path):
    folder = shutil.copytree(router_folder, tmp_path / "router")
    (file,) = folder.glob("index-*/index.json")
    values = json.loads(file.read_text())
    values["calibration"]["calibrator"]["rankers"] = ["dense"]
    file.write_text(json.dumps(values))

    with raises("damaged-router"):
        Router.load(folder)


def test_calibration_of_older_format_is_left_out(router_folder, tmp_path, capsys):
    folder = shutil.copytree(router_folder, tmp_path / "router")
    (file,) = folder.glob("index-*/index.json")
    values = json.loads(file.read_text())
    del values["calibration"]["format"]
    file.write_text(json.dumps(values))

    answer = Router.load(folder).route("merge pdf files")

    assert answer.num_likely is None
    assert "calibrate this router again" in capsys.readouterr().err


def test_trace_leaves_out_skills(router):
    whole = router.trace("merge pdf files").ranking

    trace = router.trace("merge pdf files", {whole[0][0]})

    assert len(trace.ranking) == len(whole) - 1
    assert trace.ranking[0][0] == trace.rankings_by_ranker["lexical"][0][0] == whole[1][0]


def test_router_says_whether_skills_fit(router):
    served = router.route("merge pdf files into one document")
    unserved = router.route("merge my dog")

    assert served.fits
    assert served.num_likely is not None
    assert served.num_likely >= 1
    assert not unserved.fits
    probabilities = [skill.probability for skill in served.skills]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[0] > unserved.skills[0].probability


def test_probability_does_not_depend_on_k(router):
    short, long = (router.route("merge pdf files", k).skills for k in (1, 9))

    assert short[0].probability == long[0].probability


def test_calibration_survives_update_of_pool(router):
    router.update([skill for skill in router.skills.values() if "contract" not in skill.skill_id])

    assert router.route("walk my dog at noon").fits is False


def test_command_says_that_no_skill_fits(router_folder):
    outcome = succeeds("route", "walk my dog at noon", "--router", router_folder)

    assert outcome.out.startswith("No skill fits")


OTHER_RANKERS = "rankers=[{kind: lexical, fields: name}]"


def test_calibration_of_other_rankers_is_refused(folders, calibration, tmp_path):
    command = ("index", f"pool={folders}/pool", f"out={tmp_path}/router", OTHER_RANKERS)

    line = skilltrain(*command, f"calibration={calibration[0]}").error_line

    assert "of other rankers or models (run skilltrain calibrate on this router)" in line


def test_other_rankers_drop_calibration(folders, calibration, tmp_path):
    command = ("index", f"pool={folders}/pool", f"out={tmp_path}/router")
    succeeds(*command, f"rankers={RANKERS}", f"calibration={calibration[0]}")
    assert Router.load(tmp_path / "router").route("merge pdf files").num_likely is not None

    succeeds(*command, OTHER_RANKERS)

    assert Router.load(tmp_path / "router").route("merge pdf files").num_likely is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("unserved={tmp}/text.jsonl", "text.jsonl, line 1: query: "),
        ("answered=1.5", "answered: must be less than 1"),
        ("split=nowhere", "holds no query of split 'nowhere'"),
        ("router={tmp}", "holds no router"),
    ],
)
def test_invalid_calibration_is_refused(folders, tmp_path, setting, message):
    (tmp_path / "text.jsonl").write_text('{"text": "x"}')
    setting = setting.replace("{tmp}", str(tmp_path))

    assert message in skilltrain(*calibrate(folders, tmp_path / "out", setting)).error_line


# Folds --------------------------------------------------------------------------------------------


def tasks_of(golds):
    """Return one task for each set of gold skills."""
    tasks = []
    for number, gold in enumerate(golds):
        relevance = Relevance(frozenset(map(str, gold)), {})
        tasks.append(Task(Query(str(number), "", "", "", ""), relevance))
    return tasks


@given(
    st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=40),
    st.integers(0, 5),
)
def test_queries_of_one_skill_share_fold(golds, seed):
    try:
        folds = assign_folds(tasks_of(golds), 3, seed)
    except SkilltrainError as error:
        assert error.code == "cannot-calibrate"
        return

    assert set(folds.tolist()) in ({0, 1}, {0, 1, 2})
    rows = list(zip(golds, folds, strict=True))
    for (gold, fold), (other_gold, other_fold) in itertools.combinations(rows, 2):
        assert fold == other_fold or not gold & other_gold


def test_queries_of_one_author_share_fold():
    authors = ["anna", "ben", "cleo", "anna", "ben", "cleo"]
    golds = [{f"{author}/{number}"} for number, author in enumerate(authors)]

    folds = assign_folds(tasks_of(golds), 3, seed=0)

    assert sorted(folds[:3].tolist()) == [0, 1, 2]
    assert folds[3:].tolist() == folds[:3].tolist()


def test_few_authors_are_split_by_skill():
    folds = assign_folds(tasks_of([{"anna/1"}, {"anna/2"}, {"anna/3"}]), 3, seed=0)

    assert sorted(folds.tolist()) == [0, 1, 2]


def test_few_groups_make_few_folds():
    folds = assign_folds(tasks_of([{1}, {2}, {2, 3}]), 5, seed=0)

    assert sorted(folds.tolist()) in ([0, 0, 1], [0, 1, 1])


def test_queries_for_one_skill_are_refused():
    with raises("cannot-calibrate"):
        assign_folds(tasks_of([{1}, {1}]), 5, seed=0)


def test_cases_are_judged_by_other_folds():
    cases = ["a", "b", "c", "d"]

    fitted = fit_out_of_fold("".join, cases, np.array([0, 1, 0, 2]))

    assert fitted == ["bd", "acd", "bd", "abc"]
