"""Fitted weights of a fuse ranker: worked by hand, checked against their conditions, read back, and refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_folders import write_ours, write_pool, write_rankings
from skilltrain.api import evaluate, run
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import SystemConfig, check_systems
from skilltrain.retrieval.rankers import WEIGHTS_FILE, FuseConfig, open_ranker
from skilltrain.routing.fusion import Scored, fit_weights, folds_of
from skilltrain.routing.router import Router

FIELDS = ("full", "name", "description", "body")
POOL = [
    Skill("s1", "alpha", "reads invoices", "sum the columns of an invoice"),
    Skill("s2", "", "merges tables", "join two tables by a key"),
    Skill("s3", "gamma", "", "draw a chart of the sums"),
    Skill("s4", "delta", "cuts audio clips", ""),
    Skill("s5", "join", "deploys pods", "write a manifest and wait"),
    Skill("s6", "chart", "reviews contracts", "list clauses on payment"),
]
TEXTS = {
    "q1": ("sum an invoice", "s1"),
    "q2": ("join tables by key", "s2"),
    "q3": ("draw a chart", "s3"),
    "q4": ("cuts audio", "s4"),
    "q5": ("wait for pods", "s5"),
    "q6": ("clauses on payment", "s6"),
}


def scored(scores, gold):
    return Scored(
        [str(place) for place in range(len(gold))], np.array(scores, float), np.array(gold, bool)
    )


def test_weights_by_hand():
    """Of two candidates a z-score gives ±1, so that gold at the top in 3 of 4 queries asks for σ(2w) = 3/4."""
    right, wrong = scored([[1, -1], [-1, 1]], [1, 0]), scored([[1, -1], [-1, 1]], [0, 1])
    nowhere = scored([[1, -1], [-1, 1]], [0, 0])  # has no say
    assert fit_weights([right, right, right, wrong, nowhere]) == pytest.approx(
        [math.log(3) / 2, 0], abs=2e-3
    )
    # Three candidates, two of them gold: the shares are halves, and the leg that parts gold from the rest is taken.
    two = [scored([[0.5, 0.5, -1], [1, -1, 0]], [1, 1, 0])] * 3 + [
        scored([[0.5, 0.5, -1], [1, -1, 0]], [0, 0, 1])
    ]
    first, second = fit_weights(two)
    assert second == 0 and 2 / (2 + math.exp(-1.5 * first)) == pytest.approx(3 / 4, abs=2e-3)
    for lost, message in (
        (nowhere, "no gold skill of 1 queries"),
        (scored([[1, -1]], [0, 1]), "every weight would"),
    ):
        with pytest.raises(SkilltrainError, match=message):
            fit_weights([lost])


@given(
    st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=40),
    st.integers(0, 5),
)
def test_queries_of_one_skill_stand_in_one_fold(golds, seed):
    tasks = [
        Task(Query(str(n), "", "", "", ""), Relevance(frozenset(map(str, gold)), {}))
        for n, gold in enumerate(golds)
    ]
    try:
        groups, folds = folds_of(tasks, 3, seed)
    except SkilltrainError as error:
        assert "cannot be cut into 3 folds" in str(error)
        return
    assert set(folds.tolist()) == {0, 1, 2}
    for one, one_group, one_fold in zip(golds, groups, folds, strict=True):
        for other, other_group, other_fold in zip(golds, groups, folds, strict=True):
            assert not one & other or (one_group == other_group and one_fold == other_fold)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pool of which some skills lack fields, queries about them, and saved rankings by faulty legs."""
    folder = tmp_path_factory.mktemp("fusion")
    write_pool(folder / "pool", POOL)
    asked = [(query_id, text, "train") for query_id, (text, _) in TEXTS.items()]
    write_ours(
        folder / "queries",
        asked,
        {query_id: {gold: "required"} for query_id, (_, gold) in TEXTS.items()},
    )
    legs = {
        "lacking": {query_id: [("s1", 1.0), ("s2", 0.0)] for query_id in list(TEXTS)[1:]},
        "constant": {query_id: [("s1", 2.0), ("s2", 2.0)] for query_id in TEXTS},
        "infinite": {query_id: [("s1", math.inf), ("s2", 0.0)] for query_id in TEXTS},
        "foreign": {query_id: [("elsewhere", 1.0), ("s2", 0.0)] for query_id in TEXTS},
        "one": {
            query_id: [(gold, 1.0), ("s5", 0.5), ("s6", 0.1)]
            for query_id, (_, gold) in [*TEXTS.items()][:3]
        },
        "two": {
            query_id: [(gold, 9.0), ("s1", 0.5), ("s2", 0.1)]
            for query_id, (_, gold) in [*TEXTS.items()][3:]
        },
    }
    for name, rankings in legs.items():
        write_rankings(folder / name, {name: rankings})
    return folder


def lexical(*fields):
    return [{"kind": "lexical", "fields": one} for one in fields]


def fused(legs, **settings):
    return {"kind": "fuse", "of": legs, **settings}


def recipe(folder, out, legs, **changed):
    system = {"name": "hybrid", "rankers": [fused(legs)]}
    return {
        "stage": "fusion",
        "pool": folder / "pool",
        "queries": folder / "queries",
        "split": "train",
        "folds": 3,
        "system": system,
        "out": out,
    } | changed


@pytest.fixture(scope="module")
def fitted(folder):
    """The summary of a fit of four lexical legs, and its folder."""
    return run(recipe(folder, folder / "fitted", lexical(*FIELDS))), folder / "fitted"


def test_what_is_written_is_what_a_fuse_ranker_reads(folder, fitted, tmp_path):
    summary, out = fitted
    file = json.loads((out / WEIGHTS_FILE).read_text())
    assert list(summary["weights"].values()) == pytest.approx(file["weights"], abs=1e-4)
    assert min(file["weights"]) == 0 and file["num_queries"] == 6 and file["folds"] == 3
    assert [leg["fields"] for leg in file["legs"]] == list(FIELDS) and set(
        file["fingerprints"]
    ) == {"pool", "queries"}
    assert file["figures"]["3 lexical description"]["Hit@1"]["n"] == 6
    assert {"fitted", "equal weights", "fitted - equal weights"} < set(summary["cross_validated"])
    given = {"file": out, "folder": out / WEIGHTS_FILE, "numbers": file["weights"]}
    systems = [
        {"name": name, "rankers": [fused(lexical(*FIELDS), weights=weights)]}
        for name, weights in given.items()
    ]
    benchmark = {
        "stage": "evaluate",
        "benchmark": folder / "queries",
        "pool": folder / "pool",
        "systems": systems,
    }
    evaluate({**benchmark, "out": tmp_path / "report"})
    ranked = json.loads((tmp_path / "report" / "run.json").read_text())["summary"]["systems"]
    assert ranked["file"] == ranked["folder"] == ranked["numbers"] and ranked["file"]["Hit@1"] == 1
    fuse = fused(lexical(*FIELDS), weights=str(out))
    run({"stage": "index", "pool": folder / "pool", "rankers": [fuse], "out": tmp_path / "router"})
    assert Router.load(tmp_path / "router").route("merges tables", 1).skills[0].skill_id == "s2"


def test_legs_that_order_candidates_and_rankings_made_fold_by_fold_are_fitted(folder, tmp_path):
    """A model for each part of the queries is one leg; the weights are then used with one that saw them all."""
    rankers = [{"kind": "lexical", "keep": 3}, fused(lexical("full", "body"))]
    summary = run(
        recipe(folder, tmp_path / "behind", [], system={"name": "two", "rankers": rankers})
    )
    assert (
        set(summary["weights"]) == {"1 lexical", "2 lexical body"}
        and summary["num_without_gold"] == 0
    )
    saved = {"kind": "saved", "rankings": [str(folder / "one"), str(folder / "two")]}
    summary = run(recipe(folder, tmp_path / "out", [*lexical("full"), saved]))
    assert summary["weights"]["2 saved"] > 0
    config = validate(
        FuseConfig, fused(lexical("full", "name"), weights=str(tmp_path / "out")), "test"
    )
    assert len(open_ranker(config, POOL, {}).weights) == 2


@pytest.mark.parametrize(
    ("leg", "changed", "message"),
    [
        ("lacking", {}, "leg 2 saved: ranks nothing for 1 of 6 queries, first 'q1'"),
        ("constant", {}, "leg 2 saved: gives all candidates of a query the same score"),
        ("infinite", {}, "leg 2 saved: gives query 'q1' scores that are no numbers"),
        ("foreign", {}, "1 of its 2 ranked skills are not in the pool, first 'elsewhere'"),
        ("one one", {}, "query 'q1' is ranked in an earlier table as well"),
        ("one", {"folds": 7}, "6 queries for 6 unrelated gold skills cannot be cut into 7 folds"),
        (
            "one",
            {"system": {"name": "x", "rankers": lexical("full")}},
            "the last ranker of the system must be a fuse",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(folder, tmp_path, leg, changed, message):
    legs = [
        *lexical("full"),
        {"kind": "saved", "rankings": [str(folder / name) for name in leg.split()]},
    ]
    with pytest.raises(SkilltrainError, match=message):
        run(recipe(folder, tmp_path / "out", legs, **changed))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"of": lexical(*FIELDS[:2])}, "2 rankers are fused, and it holds 4 weights of 4"),
        (
            {},
            {"of": lexical(*FIELDS[::-1])},
            "weight 1 was fitted for lexical, and ranker 1 is lexical body",
        ),
        ({}, {"method": "rrf"}, "fitted weights are for the method z, not rrf"),
        ({"weights": [1, 1, 1, -0.5]}, {}, "weights.3: .* greater than or equal to 0"),
        (None, {}, "weights.json: no such file"),
    ],
)
def test_weights_of_other_legs_and_files_that_hold_none_are_refused_in_one_line(
    fitted, tmp_path, change, settings, message
):
    if isinstance(change, dict):
        change = json.loads((fitted[1] / WEIGHTS_FILE).read_text()) | change
    if change is not None:
        (tmp_path / WEIGHTS_FILE).write_text(json.dumps(change))
    values = fused(lexical(*FIELDS), weights=str(tmp_path / WEIGHTS_FILE)) | settings
    with pytest.raises(SkilltrainError, match=message) as raised:
        check_systems([validate(SystemConfig, {"name": "x", "rankers": [values]}, "test")])
    assert "\n" not in str(raised.value)
