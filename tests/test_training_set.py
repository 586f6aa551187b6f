"""Tables of lists become a training set with gains, texts and known positives."""

import math
import shutil

import pytest
import yaml

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import to_yaml, validate
from skilltrain.records import Query, Skill, Verdict
from skilltrain.runs import input_paths
from skilltrain.tables import LISTS, QUERIES, write_table
from skilltrain.training.train import TrainReranker, load_data
from skilltrain.training.training_set import ListsSource, load_training_set

SKILL_IDS = "abcde"


def make_list(query_id, **verdicts):
    """Make a row of LISTS from the verdict of each skill."""
    return {
        "query_id": query_id,
        "skill_ids": list(verdicts),
        "verdicts": list(verdicts.values()),
        "sources": ["x"] * len(verdicts),
        "ranks": [0] * len(verdicts),
        "teacher_scores": None,
    }


LIST_ROWS = [
    make_list("q1", a="required", b="useful", c="irrelevant"),
    make_list("q2#1", d="required", a="rejected"),
    make_list("q2#2", e="required", b="irrelevant"),
]
VERDICTS = {
    "q1": {"a": "required", "b": "useful", "e": "useful", "d": "rejected"},
    "q2#1": {"d": "required", "e": "required"},
    "q2#2": {"d": "required", "e": "required"},
}
QUERY_ROWS = [(query_id, f"text of {query_id}", "train") for query_id in VERDICTS]
POOL = [Skill(s, f"name {s}", "d", "b") for s in SKILL_IDS]


@pytest.fixture
def build(tmp_path):
    """A function that writes tables and returns the settings that read them."""

    def write(lists=LIST_ROWS, judgements=VERDICTS, **settings):
        write_pool(tmp_path, POOL)
        write_table(lists, LISTS, tmp_path)
        write_ours(tmp_path, QUERY_ROWS, judgements)
        return validate(ListsSource, {"pool": tmp_path, "lists": tmp_path} | settings, "recipe")

    return write


def test_lists_are_read_with_gains(build):
    data = load_training_set(build())

    first, second, third = data.lists
    assert (first.query_id, first.query) == ("q1", "text of q1")
    assert first.skill_ids == ("a", "b", "c")
    assert first.gains == (1.0, 0.5, 0.0)
    assert first.positives == {"a", "b", "e"}
    assert second.gains == (1.0, 0.0)
    assert second.positives == third.positives == {"d", "e"}
    assert sorted(data.skills) == list(SKILL_IDS)


@pytest.mark.parametrize(
    ("changed", "expected", "is_positive"),
    [
        ({}, (2, 1, 0, -1.5), (True, True, False, False)),
        ({"rejected": 1.5, "useful": 1}, (2, 0, 0, 0.5), (True, False, False, False)),
    ],
)
def test_gains_are_relative_to_irrelevant_skill(build, changed, expected, is_positive):
    row = make_list("q1", a="required", b="useful", c="irrelevant", d="rejected")
    gains = {"required": 3, "useful": 2, "irrelevant": 1, "rejected": -0.5}

    (training_list,) = load_training_set(build(lists=[row], gains=gains | changed)).lists

    assert training_list.gains == expected
    assert training_list.is_positive == is_positive
    assert training_list.verdicts == tuple(Verdict)


def test_judged_skills_are_known_positives(build):
    (training_list,) = load_training_set(build(lists=LIST_ROWS[:1])).lists

    assert training_list.positives == {"a", "b", "e"}


def test_contradiction_of_equal_queries_is_refused(build, tmp_path):
    """One list rejects a skill that is required for the same text."""
    lists = [
        make_list("q1", a="required", b="rejected"),
        make_list("q2#1", b="required", c="irrelevant"),
    ]
    verdicts = {"q1": {"a": "required"}, "q2#1": {"b": "required"}}
    source = build(lists=lists, judgements=verdicts)
    assert len(load_training_set(source).lists) == 2, "the texts differ"

    queries = [Query(query_id, "same", "single", "t", "train") for query_id in verdicts]
    write_table(queries, QUERIES, tmp_path)

    with raises("invalid-list"):
        load_training_set(source)


def test_folders_of_lists_have_weights(build, tmp_path):
    other = tmp_path.parent / "other"
    build()
    shutil.copytree(tmp_path, other)
    build(lists=LIST_ROWS[:1])
    lists = {str(tmp_path): 1.0, str(other): 0.5}

    source = validate(ListsSource, {"pool": str(tmp_path), "lists": lists}, "recipe")

    weights = [training_list.weight for training_list in load_training_set(source).lists]
    assert weights == [1.0, 0.5, 0.5, 0.5]
    assert validate(ListsSource, yaml.safe_load(to_yaml(source)), "recipe") == source
    assert [*input_paths(source).values()] == [tmp_path, tmp_path, other]


@pytest.mark.parametrize(
    ("lists", "code"),
    [
        ([], "no-list"),
        ([make_list("q1", a="irrelevant", b="rejected")], "invalid-list"),
        ([make_list("q1")], "invalid-list"),
        ([make_list("q1", a="required", b="required")], "invalid-list"),
        ([make_list("q9", a="required", b="rejected")], "invalid-list"),
        ([make_list("q1", a="required", b="good")], "invalid-value"),
        (
            [make_list("q1", a="required", b="rejected") | {"verdicts": ["required"]}],
            "invalid-list",
        ),
        ([make_list("q1", a="required", b="rejected") | {"skill_ids": ["b", "b"]}], "invalid-list"),
        ([make_list("q1", a="required", x="rejected", y="rejected")], "unknown-skill"),
        (
            [make_list("q1", a="required", b="rejected") | {"teacher_scores": [math.nan, 1.0]}],
            "invalid-list",
        ),
    ],
)
def test_unusable_list_is_refused(build, lists, code):
    with raises(code):
        load_training_set(build(lists=lists))


SENSIBLE = {"required": 1, "useful": 0.5, "irrelevant": 0, "rejected": 0}
NO_ORDER = "gains: required must be worth more than irrelevant and rejected"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gains": {"required": 1, "useful": 1, "irrelevant": 0}},
            "gains: no value for 'rejected'",
        ),
        ({"gains": dict.fromkeys(SENSIBLE, 0)}, NO_ORDER),
        ({"gains": {**dict.fromkeys(SENSIBLE, 1), "rejected": -1}}, NO_ORDER),
        ({"gains": SENSIBLE | {"rejected": math.nan}}, "gains.rejected: must be a finite number"),
        ({"gains": SENSIBLE | {"rejected": math.inf}}, "gains.rejected: must be a finite number"),
        ({"lists": {"a": 1.0, "b": 0}}, "lists: the weight of b must be > 0, found 0"),
        ({"lists": {"a": -0.5}}, "lists: the weight of a must be > 0, found -0.5"),
        ({"lists": {}}, "lists: no folder is named"),
    ],
)
def test_wrong_gains_or_weights_are_refused(settings, message):
    with raises("invalid-setting") as error:
        validate(ListsSource, {"pool": "p", "lists": "l"} | settings, "recipe")

    assert str(error.value).startswith(f"recipe: {message}")


def test_near_duplicates_share_a_cluster(build):
    without = load_training_set(build())
    clustered = load_training_set(build(), 0.6)

    assert without.clusters == {}
    assert clustered.clusters == dict.fromkeys(SKILL_IDS, 0)  # all bodies are one word


def test_only_skills_of_the_lists_are_kept(build):
    data = load_training_set(build(max_lists=1))

    assert len(data.lists) == 1
    assert sorted(data.skills) == ["a", "b", "c"]


def test_lists_with_too_few_negatives_are_counted(runs, capsys):
    settings = {
        "stage": "train_reranker",
        "model": {"source": "nowhere"},
        "data": {"pool": str(runs / "pool"), "lists": str(runs / "encoder_lists")},
        "training": {"num_negatives": 50},
        "out": "out",
    }
    config = validate(TrainReranker, settings, "a test")

    num_lists = len(load_data(config).lists)

    line = f"{num_lists} of {num_lists} lists have fewer negatives than training.num_negatives=50"
    assert line in capsys.readouterr().err.replace("\n", " ")
