"""Training lists: negatives of each source, their ranks, and what is dropped."""

import string
from collections import Counter
from typing import NamedTuple

import pytest

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import validate
from skilltrain.data.lists import (
    Candidate,
    JudgedSkills,
    Lists,
    build_list,
    sample_negatives,
)
from skilltrain.data.screening import Flag, write_flags
from skilltrain.records import Skill, Verdict
from skilltrain.tables import DROPPED, LISTS, QUERIES, RANKINGS, SKILLS, read_table, write_table

QUOTAS = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}


MANY_CANDIDATES = {
    "semantic": string.ascii_lowercase,
    "lexical": string.ascii_uppercase,
    "taxonomy": string.digits,
    "random": string.punctuation,
}


def settings(**changes):
    values = {"stage": "lists", "pool": "p", "queries": "q", "rankings": "r", "out": "o"}
    return validate(Lists, values | changes, "recipe")


def ranked(source, *skill_ids):
    """Return candidates of a source, the best first."""
    return [Candidate(skill_id, source, rank) for rank, skill_id in enumerate(skill_ids, 1)]


@pytest.mark.parametrize(
    ("candidates", "quotas", "by_source"),
    [
        (MANY_CANDIDATES, QUOTAS, QUOTAS),
        # taxonomy has none: its two come from semantic, which has six for four
        (
            {"semantic": "abcdef", "lexical": "ghijkl", "random": "z"},
            QUOTAS,
            {"semantic": 6, "lexical": 3, "random": 1},
        ),
        ({"semantic": "abcd", "lexical": "ghij"}, QUOTAS, {"semantic": 4, "lexical": 4}),
        (
            {"semantic": "abcd", "lexical": "abcdef"},
            {"semantic": 4, "lexical": 3},
            {"semantic": 4, "lexical": 2},
        ),
        ({"semantic": "a", "lexical": "gh", "random": "xyz"}, {"semantic": 3}, {"semantic": 1}),
        # a source of quota 0 only fills gaps
        (
            {"semantic": "a", "lexical": "gh"},
            {"semantic": 2, "lexical": 0},
            {"semantic": 1, "lexical": 1},
        ),
    ],
)
def test_sources_fill_missing_quotas_in_order(candidates, quotas, by_source):
    entries = []
    for source, skill_ids in candidates.items():
        entries += ranked(source, *skill_ids)

    sample = sample_negatives(entries, quotas, "0/q1")

    assert Counter(entry.source for entry in sample) == by_source
    assert set(sample) <= set(entries)
    assert len({entry.skill_id for entry in sample}) == len(sample)
    assert sample_negatives(entries[::-1], quotas, "0/q1") == sample


def ids_of(entries, source):
    return [entry.skill_id for entry in entries if entry.source == source]


def test_sampling_is_uniform_except_for_top_sources():
    candidates = ranked("semantic", *"abcdefgh") + ranked("lexical", *"hgfedcba")
    counts = Counter()

    for seed in range(2000):
        sample = sample_negatives(candidates, {"semantic": 2, "lexical": 3}, str(seed), ["lexical"])

        semantic = ids_of(sample, "semantic")
        counts.update(semantic)
        # SkillRouter's lexical negatives: the first three by BM25 that are not semantic ones.
        other_ids = [skill_id for skill_id in "hgfedcba" if skill_id not in semantic]
        assert ids_of(sample, "lexical") == other_ids[:3]

    # Binomial(2000, .25): mean 500, standard deviation 19.
    assert set(counts) == set("abcdefgh")
    assert all(abs(count - 500) < 100 for count in counts.values())


def skills_of(*positives, **judged):
    """Return the judged skills of a query: required positives, and verdicts by skill id."""
    return JudgedSkills("q1", dict.fromkeys(positives, Verdict.REQUIRED) | judged, positives)


def judged_skills():
    """Return one gold, two rejected skills and an irrelevant one, all in the pool."""
    judged = {"r1": Verdict.REJECTED, "r2": Verdict.REJECTED, "i1": Verdict.IRRELEVANT}
    return skills_of("g", **judged)._replace(negatives=("i1", "r1", "r2"))


@pytest.mark.parametrize("quotas", [{"semantic": 2, "judged": 2}, {"judged": 2, "semantic": 2}])
def test_judged_negatives_come_before_mined_ones(quotas):
    mined = ranked("semantic", "r1", *"abc")

    entries = build_list(judged_skills(), mined, settings(quotas=quotas))

    assert len(entries) == 5
    assert set(ids_of(entries, "judged")) == {"r1", "r2"}
    assert len(ids_of(entries, "semantic")) == 2


def test_rejected_skills_come_before_irrelevant_ones():
    mined = ranked("semantic", "r1", *"abc")

    entries = build_list(judged_skills(), mined, settings(quotas={"judged": 3}))

    assert entries[3].skill_id == "i1"
    assert [entry.rank for entry in entries] == [0, 1, 2, 3]


def test_judged_skills_keep_rank_in_reranker_list():
    mined = ranked("encoder", "a", "r1", "b", "g", "c")
    config = settings(list_size=4, quotas={"judged": 2})

    *retrieved, last = build_list(judged_skills(), mined, config)

    assert retrieved == [
        Candidate("a", "encoder", 1),
        Candidate("r1", "encoder", 2),
        Candidate("g", "encoder", 4),
    ]
    assert (last.skill_id, last.source) == ("r2", "judged")


@pytest.mark.parametrize("verdict", [Verdict.REQUIRED, Verdict.USEFUL])
def test_positive_is_never_a_negative(verdict):
    candidates = ranked("semantic", "g", "other", "n")
    skills = skills_of("g", other=verdict)

    entries = build_list(skills, candidates, settings(quotas={"semantic": 4}))

    assert entries == [Candidate("g", "gold", 0), Candidate("n", "semantic", 3)]


@pytest.mark.parametrize(
    ("golds", "ranking", "list_size", "with_add", "with_drop"),
    [
        ("g", "agbc", 3, "a1 g2 b3", "a1 g2 b3"),  # at its rank
        ("g", "abcd", 3, "a1 b2 g0", "a1 b2 c3"),  # not retrieved
        # below the cut: with absent_gold=drop the list goes with it
        ("g", "abcg", 3, "a1 b2 g4", "a1 b2 c3"),
        ("gh", "ahbc", 4, "a1 h2 b3 g0", "a1 h2 b3 c4"),
        ("gh", "ahbgc", 3, "a1 h2 g4", "a1 h2 b3"),
    ],
)
def test_absent_gold_adds_or_drops_positives(golds, ranking, list_size, with_add, with_drop):
    for absent_gold, expected in (("add", with_add), ("drop", with_drop)):
        config = settings(list_size=list_size, absent_gold=absent_gold)

        entries = build_list(skills_of(*golds), ranked("encoder", *ranking), config)

        assert " ".join(f"{entry.skill_id}{entry.rank}" for entry in entries) == expected
        assert all((entry.source == "gold") == (entry.rank == 0) for entry in entries)


def write_rankings(folder, rows):
    """Write rankings from (query, skill, rank, stage)."""
    names = ("query_id", "skill_id", "rank", "stage")
    table = [{**dict(zip(names, row, strict=True)), "score": 0.0} for row in rows]
    write_table(table, RANKINGS, folder / "rankings")


VERDICTS = {
    "q1": {"a": "required", "e": "rejected"},
    "q2": {"c": "required", "b": "required", "d": "useful"},
    "q3": {"gone": "required"},
    "q4": {"a": "required"},
    "q5": {"a": "required"},
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a pool, queries, judgements and rankings.

    q1 has one gold skill, q2 two and a useful one, q3 one outside the pool; q4 has no candidates,
    and q5 is a dev query.
    """
    write_pool(tmp_path / "pool", [Skill(s, s, "", s) for s in "abcdefghz"])
    write_queries(tmp_path, VERDICTS)
    rows = []
    for query_id in ("q1", "q2", "q3", "q5"):
        rows += [(query_id, skill_id, rank, "semantic") for rank, skill_id in enumerate("efgh", 1)]
    write_rankings(tmp_path, [*rows, ("q2", "d", 9, "semantic"), ("q1", "z", 1, "random")])
    return tmp_path


def write_queries(folder, verdicts):
    splits = {"q4": "train", "q3": "train", "q2": "train", "q1": "train", "q5": "dev"}
    queries = [(query_id, f"text {query_id}", split) for query_id, split in splits.items()]
    write_ours(folder / "queries", queries, verdicts)


class Result(NamedTuple):
    """The summary of the stage, its lists by query id and its dropped rows."""

    summary: dict
    lists: dict
    dropped: list


def run(folder, **changes):
    """Run the stage lists on this folder."""
    paths = {name: folder / name for name in ("pool", "queries", "rankings", "out")}
    summary = settings(**paths, **changes).run(folder / "out")
    lists = {row["query_id"]: row for row in read_table(folder / "out", LISTS).to_pylist()}
    return Result(summary, lists, read_table(folder / "out", DROPPED).to_pylist())


@pytest.fixture
def result(folder):
    return run(folder, quotas={"semantic": 4, "random": 1})


def test_lists_have_verdicts_from_judgements(result):
    first, second = result.lists.values()

    assert list(result.lists) == ["q1", "q2"]
    verdicts = dict(zip(first["skill_ids"], first["verdicts"], strict=True))
    assert verdicts == {"a": "required", "e": "rejected"} | dict.fromkeys("fghz", "irrelevant")
    assert first["ranks"][first["skill_ids"].index("h")] == 4
    assert first["teacher_scores"] is None
    assert second["skill_ids"][:3] == ["b", "c", "d"]
    assert second["verdicts"][:3] == ["required", "required", "useful"]


def test_summary_counts_lists(result):
    assert result.summary == {
        "num_lists": 2,
        "by_source": {"gold": 4, "random": 1, "semantic": 8},
        "by_verdict": {"irrelevant": 8, "rejected": 1, "required": 3, "useful": 1},
        "list_length": {"min": 6, "mean": 6.5, "max": 7},
        "dropped": {"min_negatives": 1, "no_positive": 1, "not_in_pool": 1},
    }


def test_dropped_queries_have_reasons(result):
    assert {(row["query_id"], row["skill_id"], row["filter"]) for row in result.dropped} == {
        ("q3", "gone", "not_in_pool"),
        ("q3", "", "no_positive"),
        ("q4", "", "min_negatives"),
    }
    reasons = [row["reason"] for row in result.dropped if row["query_id"] == "q4"]
    assert reasons == ["0 negative(s), at least 1 wanted"]


def test_min_negatives_drops_short_lists(folder):
    result = run(folder, quotas={"semantic": 4, "random": 1}, min_negatives=5)

    assert list(result.lists) == ["q1"]


def test_judged_skills_keep_source_with_verdict(folder):
    verdicts = VERDICTS["q1"] | {"d": "rejected", "gone": "rejected"}
    write_queries(folder, VERDICTS | {"q1": verdicts})

    summary, lists, dropped = run(folder, quotas={"judged": 2, "semantic": 1})

    columns = [lists["q1"][name] for name in ("skill_ids", "sources", "verdicts")]
    assert {*zip(*columns, strict=True)} >= {
        ("d", "judged", "rejected"),
        ("e", "judged", "rejected"),
        ("a", "gold", "required"),
    }
    assert summary["by_source"]["judged"] == 2
    rows = [row for row in dropped if row["query_id"] == "q1" and row["skill_id"] == "gone"]
    assert [row["reason"] for row in rows] == ["judged rejected, not in the pool"]


@pytest.fixture
def flagged_folder(folder):
    """The folder with flags on a, c and e; all that q1 and q4 require is flagged."""
    flags = {skill_id: [Flag("locked_archive", "body", 0, 4, "pass", "why")] for skill_id in "ace"}
    write_flags(flags, folder / "pool")
    return folder


def test_flagged_skill_is_no_positive(flagged_folder):
    summary, lists, dropped = run(flagged_folder, quotas={"semantic": 4})

    assert list(lists) == ["q2"]
    assert lists["q2"]["skill_ids"][:2] == ["b", "d"]
    assert "c" not in lists["q2"]["skill_ids"]
    assert summary["dropped"] == {"flagged": 3, "no_positive": 3, "not_in_pool": 1}
    reason = "a positive with the flag locked_archive"
    rows = [row for row in dropped if row["filter"] == "flagged"]
    assert {(row["query_id"], row["skill_id"], row["reason"]) for row in rows} == {
        ("q1", "a", reason),
        ("q2", "c", reason),
        ("q4", "a", reason),
    }


def test_flagged_skill_may_be_negative(flagged_folder):
    result = run(flagged_folder, quotas={"semantic": 4})

    assert "e" in result.lists["q2"]["skill_ids"]


def test_flagged_skills_can_be_used(flagged_folder):
    result = run(flagged_folder, quotas={"semantic": 4}, flagged="use")

    assert result.lists["q1"]["skill_ids"][0] == "a"
    assert "flagged" not in result.summary["dropped"]


def test_gold_outside_top_drops_list(folder):
    """q1 has its gold skill third; q2 has c third, b fifth and no d; q4 has its own fourth."""
    rows = []
    for query_id, ranking in {"q1": "efa", "q2": "efcgb", "q4": "efga"}.items():
        rows += [(query_id, skill_id, rank, "encoder") for rank, skill_id in enumerate(ranking, 1)]
    write_rankings(folder, rows)

    summary, lists, dropped = run(folder, list_size=3, absent_gold="drop")

    skill_ids = {query_id: row["skill_ids"] for query_id, row in lists.items()}
    assert skill_ids == {"q1": [*"efa"], "q2": [*"efc"]}
    assert summary["num_lists"] == 2
    assert summary["by_verdict"]["required"] == 2
    rows = [row for row in dropped if row["filter"] == "outside_top"]
    pairs = [(row["query_id"], row["skill_id"]) for row in rows]
    assert pairs == [("q2", "b"), ("q2", "d"), ("q4", "a")]
    assert rows[0]["reason"] == "a positive outside the top 3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set either 'quotas'"),
        ({"quotas": {"semantic": 1}, "list_size": 20}, "set either 'quotas'"),
        ({"quotas": {"semantic": 0}}, "all 'quotas' are 0"),
        ({"quotas": {"semantic": 4}, "best_of": ["lexical"]}, "'lexical' is no source of 'quotas'"),
        ({"quotas": {"semantic": 4}, "absent_gold": "drop"}, "absent_gold: drop needs"),
        (
            {"list_size": 9, "quotas": {"judged": 2}, "absent_gold": "drop"},
            "absent_gold: drop needs",
        ),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with raises("invalid-setting") as error:
        settings(**changes)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"list_size": 3}, "conflicting-settings"),
        ({"quotas": {"sematic": 4}}, "unknown-source"),
        ({"quotas": {"semantic": 4}, "min_negatives": 5}, "nothing-left"),
    ],
)
def test_rankings_without_lists_are_refused(folder, changes, code):
    with raises(code):
        run(folder, **changes)


def test_empty_lists_name_sources_of_rankings(folder):
    with raises("nothing-left") as error:
        run(folder, quotas={"semantic": 4}, min_negatives=5)

    assert "(the rankings hold: random, semantic; rankings," in str(error.value)


def test_pool_without_ranked_skills_is_refused(folder):
    write_pool(folder / "pool", [Skill(s, s, "", s) for s in "abcd"])

    with raises("unknown-skill"):
        run(folder, quotas={"semantic": 4})


def test_order_of_tables_does_not_matter(folder):
    quotas = {"semantic": 2, "random": 1, "taxonomy": 1}  # no taxonomy was mined
    expected = run(folder, quotas=quotas, seed=3).lists
    for name, spec in (("rankings", RANKINGS), ("queries", QUERIES), ("pool", SKILLS)):
        write_table(read_table(folder / name, spec).to_pylist()[::-1], spec, folder / name)

    assert run(folder, quotas=quotas, seed=3).lists == expected
