import math
import shutil

import pytest
import yaml

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import to_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill, Verdict
from skilltrain.runs import input_paths
from skilltrain.tables import LISTS, QUERIES, write_table
from skilltrain.training.training_set import ListsSource, load_training_set

SKILL_IDS = "abcde"


def a_list(query_id, **verdicts):
    return {
        "query_id": query_id,
        "skill_ids": list(verdicts),
        "verdicts": list(verdicts.values()),
        "sources": ["x"] * len(verdicts),
        "ranks": [0] * len(verdicts),
        "teacher_scores": None,
    }


LISTS_OF_TEST = [
    a_list("q1", a="required", b="useful", c="irrelevant"),
    a_list("q2#1", d="required", a="rejected"),
    a_list("q2#2", e="required", b="irrelevant"),
]
JUDGEMENTS_OF_TEST = {
    "q1": {"a": "required", "b": "useful", "e": "useful", "d": "rejected"},
    "q2#1": {"d": "required", "e": "required"},
    "q2#2": {"d": "required", "e": "required"},
}
QUERIES_OF_TEST = [(query_id, f"text of {query_id}", "train") for query_id in JUDGEMENTS_OF_TEST]
POOL = [Skill(s, f"name {s}", "d", "b") for s in SKILL_IDS]


@pytest.fixture
def build(tmp_path):
    def write(lists=LISTS_OF_TEST, judgements=JUDGEMENTS_OF_TEST, **settings):
        write_pool(tmp_path, POOL)
        write_table(lists, LISTS, tmp_path)
        write_ours(tmp_path, QUERIES_OF_TEST, judgements)
        return validate(ListsSource, {"pool": tmp_path, "lists": tmp_path} | settings, "recipe")

    return write


def test_lists_come_with_gains_texts_and_all_known_positives(build):
    data = load_training_set(build())
    one, two, three = data.lists
    assert (one.query_id, one.query, one.skill_ids) == ("q1", "text of q1", ("a", "b", "c"))
    assert one.gains == (1.0, 0.5, 0.0) and one.positives == {"a", "b", "e"}
    assert two.gains == (1.0, 0.0) and two.positives == three.positives == {"d", "e"}
    assert sorted(data.skills) == list(SKILL_IDS)


def test_gains_count_from_that_of_an_irrelevant_skill_and_verdicts_name_the_positives(build):
    lists = [a_list("q1", a="required", b="useful", c="irrelevant", d="rejected")]
    gains = {"required": 3, "useful": 2, "irrelevant": 1, "rejected": -0.5}
    (one,) = load_training_set(build(lists=lists, gains=gains)).lists
    assert one.gains == (2, 1, 0, -1.5) and one.is_positive == (True, True, False, False)
    assert one.verdicts == tuple(Verdict) and one.positives == {"a", "b", "e"}
    (one,) = load_training_set(
        build(lists=lists, gains=gains | {"rejected": 1.5, "useful": 1})
    ).lists
    assert one.gains == (2, 0, 0, 0.5) and one.is_positive == (True, False, False, False)


def test_a_rejected_skill_that_another_list_of_the_same_text_calls_an_answer(build, tmp_path):
    twice = (
        Query("q1", "same", "single", "t", "train"),
        Query("q2#1", "same", "single", "t", "train"),
    )
    lists = [a_list("q1", a="required", b="rejected"), a_list("q2#1", b="required", c="irrelevant")]
    source = build(lists=lists, judgements={"q1": {"a": "required"}, "q2#1": {"b": "required"}})
    assert len(load_training_set(source).lists) == 2  # of two texts
    write_table(twice, QUERIES, tmp_path)
    with raises("invalid-list"):
        load_training_set(source)


def test_several_folders_of_lists_with_weights(build, tmp_path):
    build()
    shutil.copytree(tmp_path, tmp_path.parent / "other")
    lists = {str(tmp_path): 1.0, str(tmp_path.parent / "other"): 0.5}
    source = build(lists=LISTS_OF_TEST[:1])
    source = validate(ListsSource, {"pool": str(tmp_path), "lists": lists}, "recipe")
    assert [one.weight for one in load_training_set(source).lists] == [1.0, 0.5, 0.5, 0.5]
    assert validate(ListsSource, yaml.safe_load(to_yaml(source)), "recipe") == source
    assert [*input_paths(source).values()] == [tmp_path, tmp_path, tmp_path.parent / "other"]


@pytest.mark.parametrize(
    ("lists", "code"),
    [
        ([], "no-list"),
        ([a_list("q1", a="irrelevant", b="rejected")], "invalid-list"),
        ([a_list("q1")], "invalid-list"),
        ([a_list("q1", a="required", b="required")], "invalid-list"),
        ([a_list("q9", a="required", b="rejected")], "invalid-list"),
        ([a_list("q1", a="required", b="good")], "invalid-list"),
        ([a_list("q1", a="required", b="rejected") | {"verdicts": ["required"]}], "invalid-list"),
        ([a_list("q1", a="required", b="rejected") | {"skill_ids": ["b", "b"]}], "invalid-list"),
        ([a_list("q1", a="required", x="rejected", y="rejected")], "unknown-skill"),
    ],
)
def test_a_list_that_cannot_be_trained_on_is_named(build, lists, code):
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
        ({"gains": SENSIBLE | {"rejected": math.nan}}, r"gains\.rejected: .*finite number"),
        ({"gains": SENSIBLE | {"rejected": math.inf}}, r"gains\.rejected: .*finite number"),
        ({"lists": {"a": 1.0, "b": 0}}, "lists: the weight of b must be > 0, found 0"),
        ({"lists": {"a": -0.5}}, "lists: the weight of a must be > 0, found -0.5"),
        ({"lists": {}}, "lists: no folder is named"),
    ],
)
def test_gains_and_weights_that_make_no_sense_are_refused_in_one_line(settings, message):
    with pytest.raises(SkilltrainError, match=f"^recipe: {message}"):
        validate(ListsSource, {"pool": "p", "lists": "l"} | settings, "recipe")


def test_near_duplicates_share_a_cluster(build):
    without = load_training_set(build())
    clustered = load_training_set(build(), 0.6)

    assert without.clusters == {}
    assert clustered.clusters == dict.fromkeys(SKILL_IDS, 0)  # all bodies are one word


def test_only_skills_of_the_lists_are_kept(build):
    data = load_training_set(build(max_lists=1))

    assert len(data.lists) == 1
    assert sorted(data.skills) == ["a", "b", "c"]
