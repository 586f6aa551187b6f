"""What a router's scores are worth: the calibrator by hand-worked numbers, and the stage on a small library."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults import raises
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.bootstrap import share
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query
from skilltrain.serving.answer import Calibrator, Trace
from skilltrain.serving.calibrate import (
    assign_folds,
    bound,
    calibration_error,
    fit_logistic,
    fit_out_of_fold,
    risk_coverage,
)
from skilltrain.serving.router import Router
from small_library import QUERIES, skilltrain, succeeds

RANKERS = "[{kind: lexical}]"


def traced(scores, **tops):
    """What a router made of a task: skills of these scores, and rankers that gave these at most."""
    found = {name: [("x", top), ("y", top - 1)] for name, top in tops.items()}
    return Trace(found, {}, [(f"s{number}", score) for number, score in enumerate(scores)])


def test_features_are_score_lead_and_tops():
    rows = traced([3.0, 2.5, 1.0], lexical=9.0, dense=0.5).features(["dense", "lexical"])

    assert rows.tolist() == [[3.0, 0.5, 0.5, 9.0], [2.5, -0.5, 0.5, 9.0], [1.0, -2.0, 0.5, 9.0]]
    assert traced([3.0], lexical=9.0).features(["lexical"]).tolist() == [[3.0, 0.0, 9.0]]
    assert traced([], lexical=0.0).features(["lexical"]).shape == (0, 3)
    assert Trace({"bm25": [("s", 6.0)], "none": []}, {"bm25": 24.0}, []).top_scores(
        ["bm25", "none"]
    ) == [0.25, 0.0]


def test_a_calibrator_follows_its_formula():
    calibrator = Calibrator(
        rankers=("a",),
        weights=(1.0, 2.0, 0.5),
        intercept=-3.0,
        threshold=0.6,
        least=(0.5,),
        miss=0.5,
    )
    task = traced([2.0, 1.0], a=1.0)  # logits 2 + 2 + .5 - 3 = 1.5 and 1 - 2 + .5 - 3 = -3.5

    assert calibrator.probabilities(task) == pytest.approx(
        [1 / (1 + np.exp(-1.5)), 1 / (1 + np.exp(3.5))]
    )
    assert calibrator.fits(task)
    assert calibrator.num_likely(task) == 1
    assert not calibrator.fits(traced([9.0, 1.0], a=0.4))
    assert not calibrator.fits(traced([0.0, 0.0], a=1.0))
    assert not calibrator.fits(traced([], a=0.0))
    assert calibrator.probabilities(traced([2e3, 1e3, -2e3], a=1.0)).tolist() == [
        1,
        0,
        0,
    ]  # and no overflow


def test_a_fit_gives_the_frequencies_and_no_feature_a_weight_below_zero():
    rows = np.array([[0.0, 1.0]] * 40 + [[1.0, 0.0]] * 40)
    labels = np.array([True] * 10 + [False] * 30 + [True] * 30 + [False] * 10)
    weights, intercept = fit_logistic(rows, labels)

    logits = rows @ weights + intercept

    assert weights[1] == 0
    assert weights[0] > 0
    assert 1 / (1 + np.exp(-logits[[0, -1]])) == pytest.approx([0.25, 0.75], abs=0.03)


def test_a_bound_is_the_conformal_quantile_and_is_reached_as_often_as_was_asked():
    cases = {(9, 0.9): 0.1, (19, 0.9): 0.2, (20, 0.9): 0.2, (8, 0.9): 0.0, (9, 0.5): 0.5}
    found = {(num, level): bound(np.arange(num, 0, -1) / 10, level) for num, level in cases}

    assert found == pytest.approx(cases)

    draw = np.random.default_rng(0)
    reached = [draw.random() >= bound(draw.random(50), 0.8) for _ in range(4000)]

    assert np.mean(reached) == pytest.approx(0.8, abs=0.02)  # three standard errors


def test_calibration_error_risk_and_shares_by_hand():
    sure = np.array([0.9] * 5 + [0.3] * 5)
    right = np.array([True, True, True, False, False] + [True] * 5)

    bins = [(0.3, 1.0)] * 5 + [(0.9, 1.0)] * 3 + [(0.9, 0.0)] * 2  # ten bins of one answer

    assert calibration_error(sure, right) == pytest.approx(np.mean([abs(p - ok) for p, ok in bins]))

    points = dict(risk_coverage(sure, right))

    assert points[0.1] == 0
    assert points[0.5] == 0.4
    assert points[1.0] == 0.2

    none = share([False] * 30)

    assert (none.mean, none.low, none.n) == (0, 0, 30)
    assert none.high == pytest.approx(0.1135, abs=1e-3)
    with raises("nothing-to-score"):
        share([])


@pytest.fixture(scope="module")
def folders(library, tmp_path_factory):
    """A folder with a library's pool, queries, clusters and router."""
    folder = shutil.copytree(library, tmp_path_factory.mktemp("calibrate") / "library")
    succeeds("pool", f"sources={folder}/skills", f"out={folder}/pool")
    succeeds(
        "queries", f"files={folder}/queries/all.jsonl", f"pool={folder}/pool", f"out={folder}/asked"
    )
    succeeds("clusters", f"pool={folder}/pool", f"out={folder}/clusters")
    succeeds("index", f"pool={folder}/pool", f"rankers={RANKERS}", f"out={folder}/router")
    lines = [json.dumps({"query": text}) for text in ("walk my dog at noon", "what is love")]
    (folder / "unserved.jsonl").write_text("\n".join(lines))
    return folder


def calibrate(folder, out, *settings):
    given = (
        f"queries={folder}/asked",
        "split=null",
        f"clusters={folder}/clusters",
        "folds=3",
        *settings,
    )
    return ("calibrate", f"router={folder}/router", *given, f"out={out}")


def test_a_calibrated_router_says_when_no_skill_fits(folders, tmp_path):
    out = tmp_path / "calibration"
    line = calibrate(folders, out, f"unserved={folders}/unserved.jsonl", "answered=0.6")

    found = json.loads(succeeds(*line, "--json").out)

    assert found["num_queries"] == len(QUERIES)
    assert found["right"]["n"] == found["falsely_answered"]["n"] == 16
    assert found["unserved"]["n"] == 2
    assert found["right"]["mean"] > 0.5
    assert found["falsely_answered"]["mean"] < found["answered"]["mean"]
    assert 0 <= found["calibration_error"] <= 1
    assert found["risk_coverage"][-1][0] == 1

    shutil.copytree(folders / "router", tmp_path / "router")
    succeeds("index", f"calibration={out}", f"out={tmp_path}/router")
    router = Router.load(tmp_path / "router")
    whole = router.trace("merge pdf files").ranking
    left = router.trace("merge pdf files", {whole[0][0]})

    assert left.ranking[0][0] == left.rankings_by_ranker["lexical"][0][0] == whole[1][0]
    assert len(left.ranking) == len(whole) - 1

    good, bad = (
        router.route("merge pdf files into one document"),
        router.route("walk my dog at noon"),
    )

    assert good.fits
    assert not bad.fits
    assert good.num_likely is not None
    assert good.num_likely >= 1

    sure = [routed.probability for routed in good.skills]

    assert sure == sorted(sure, reverse=True)
    assert sure[0] > bad.skills[0].probability

    one, nine = (router.route("merge pdf files", k).skills[0].probability for k in (1, 9))

    assert one == nine

    router.update([skill for skill in router.skills.values() if "contract" not in skill.skill_id])

    assert router.route("walk my dog at noon").fits is False, "a calibration outlives its pool"

    shown = succeeds("route", "walk my dog at noon", "--router", tmp_path / "router").out

    assert shown.startswith("No skill fits")


def test_a_calibration_of_other_rankers_is_refused_or_dropped(folders, tmp_path):
    out, router = tmp_path / "calibration", tmp_path / "router"
    succeeds(*calibrate(folders, out))
    line = ("index", f"pool={folders}/pool", f"out={router}")

    other = skilltrain(
        *line, "rankers=[{kind: lexical, fields: name}]", f"calibration={out}"
    ).error_line

    assert "of other rankers or models (run skilltrain calibrate on this router)" in other

    succeeds(*line, f"rankers={RANKERS}", f"calibration={out}")

    assert Router.load(router).route("merge pdf files").num_likely is not None

    succeeds(*line, "rankers=[{kind: lexical, fields: name}]")

    assert Router.load(router).route("merge pdf files").num_likely is None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["folds=99"], "cannot be cut into 99 folds"),
        (["unserved={tmp}/text.jsonl"], "text.jsonl, line 1: query: "),
        (["answered=1.5"], "answered: must be less than 1"),
        (["split=nowhere"], "holds no query of split 'nowhere'"),
        (["router={tmp}"], "holds no router"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(folders, tmp_path, settings, complaint):
    (tmp_path / "text.jsonl").write_text('{"text": "x"}')
    given = [text.replace("{tmp}", str(tmp_path)) for text in settings]

    assert complaint in skilltrain(*calibrate(folders, tmp_path / "out", *given)).error_line


# Folds --------------------------------------------------------------------------------------------


def tasks_of(golds):
    """One task per set of gold skills."""
    return [
        Task(
            Query(str(number), "", "", "", ""),
            Relevance(frozenset(f"s{skill}" for skill in gold), {}),
        )
        for number, gold in enumerate(golds)
    ]


@given(
    st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=40),
    st.integers(0, 5),
)
def test_queries_of_one_skill_share_a_fold(golds, seed):
    try:
        folds = assign_folds(tasks_of(golds), 3, seed)
    except SkilltrainError as error:
        assert "cannot be cut into 3 folds" in str(error)
        return

    assert set(folds.tolist()) == {0, 1, 2}
    for gold, fold in zip(golds, folds, strict=True):
        for other_gold, other_fold in zip(golds, folds, strict=True):
            assert not gold & other_gold or fold == other_fold


def test_each_case_is_judged_by_the_other_folds():
    cases = ["a", "b", "c", "d"]

    fitted = fit_out_of_fold("".join, cases, np.array([0, 1, 0, 2]))

    assert fitted == ["bd", "acd", "bd", "abc"]
