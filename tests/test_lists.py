"""Training lists: how many negatives of which source, at which rank, and what is left out and why."""

from collections import Counter

import pytest

from benchmark_folders import write_ours, write_pool
from skilltrain.config import validate
from skilltrain.data.lists import (
    Candidate,
    JudgedSkills,
    Lists,
    build_list,
    sample_negatives,
)
from skilltrain.data.screening import Flag, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill, Verdict
from skilltrain.tables import DROPPED, LISTS, QUERIES, RANKINGS, SKILLS, read_table, write_table

QUOTAS = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}


def settings(**changes):
    values = {"stage": "lists", "pool": "p", "queries": "q", "rankings": "r", "out": "o"}
    return validate(Lists, values | changes, "recipe")


def ranked(source, *skill_ids):
    return [Candidate(skill_id, source, rank) for rank, skill_id in enumerate(skill_ids, 1)]


@pytest.mark.parametrize(
    ("candidates", "quotas", "by_source"),
    [
        ({source: [f"{source}{n}" for n in range(50)] for source in QUOTAS}, QUOTAS, QUOTAS),
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
        # one of quota 0 only helps out
        (
            {"semantic": "a", "lexical": "gh"},
            {"semantic": 2, "lexical": 0},
            {"semantic": 1, "lexical": 1},
        ),
    ],
)
def test_quotas_are_filled_and_sources_help_out_in_their_order(candidates, quotas, by_source):
    entries = [entry for source, found in candidates.items() for entry in ranked(source, *found)]
    chosen = sample_negatives(entries, quotas, "0/q1")

    assert Counter(entry.source for entry in chosen) == by_source
    assert set(chosen) <= set(entries)
    assert len({entry.skill_id for entry in chosen}) == len(chosen)
    assert sample_negatives(entries[::-1], quotas, "0/q1") == chosen


def test_samples_are_uniform_but_of_best_of_the_best_are_taken():
    candidates = ranked("semantic", *"abcdefgh") + ranked("lexical", *"hgfedcba")
    counts = Counter()
    for number in range(2000):
        chosen = sample_negatives(
            candidates, {"semantic": 2, "lexical": 3}, str(number), ["lexical"]
        )
        semantic = [entry.skill_id for entry in chosen if entry.source == "semantic"]
        counts.update(semantic)
        # SkillRouter's lexical negatives: the first three by BM25 that are not semantic ones already.
        lexical = [entry.skill_id for entry in chosen if entry.source == "lexical"]

        assert lexical == [skill_id for skill_id in "hgfedcba" if skill_id not in semantic][:3]

    # Binomial(2000, .25): mean 500, standard deviation 19.
    assert set(counts) == set("abcdefgh")
    assert all(abs(count - 500) < 100 for count in counts.values())


def skills_of(*positives, **judged):
    return JudgedSkills("q1", dict.fromkeys(positives, Verdict.REQUIRED) | judged, positives)


def judged_skills():
    """One gold, two rejected skills and an irrelevant one, all in the pool."""
    judged = {"r1": Verdict.REJECTED, "r2": Verdict.REJECTED, "i1": Verdict.IRRELEVANT}
    return skills_of("g", **judged)._replace(negatives=("i1", "r1", "r2"))


def test_what_a_judge_turned_down_comes_before_what_was_mined_rejections_first():
    mined = ranked("semantic", "r1", *"abc")
    for quotas in ({"semantic": 2, "judged": 2}, {"judged": 2, "semantic": 2}):
        entries = build_list(judged_skills(), mined, settings(quotas=quotas))

        assert {e.skill_id for e in entries if e.source == "judged"} == {"r1", "r2"}
        assert len(entries) == 5
        assert sum(e.source == "semantic" for e in entries) == 2

    three = build_list(judged_skills(), mined, settings(quotas={"judged": 3}))

    assert [e.skill_id for e in three][3] == "i1"
    assert [e.rank for e in three] == [0, 1, 2, 3]


def test_a_reranker_list_holds_judged_skills_at_the_rank_where_they_were_found():
    mined = ranked("encoder", "a", "r1", "b", "g", "c")
    *found, last = build_list(judged_skills(), mined, settings(list_size=4, quotas={"judged": 2}))

    assert found == [
        Candidate("a", "encoder", 1),
        Candidate("r1", "encoder", 2),
        Candidate("g", "encoder", 4),
    ]
    assert (last.skill_id, last.source) == ("r2", "judged")


@pytest.mark.parametrize("verdict", [Verdict.REQUIRED, Verdict.USEFUL])
def test_a_known_positive_is_never_a_negative(verdict):
    candidates = ranked("semantic", "g", "other", "n")
    entries = build_list(
        skills_of("g", other=verdict), candidates, settings(quotas={"semantic": 4})
    )

    assert entries == [Candidate("g", "gold", 0), Candidate("n", "semantic", 3)]


@pytest.mark.parametrize(
    ("golds", "found", "list_size", "added", "dropped"),
    [
        ("g", "agbc", 3, "a1 g2 b3", "a1 g2 b3"),  # at its rank
        ("g", "abcd", 3, "a1 b2 g0", "a1 b2 c3"),  # not retrieved
        (
            "g",
            "abcg",
            3,
            "a1 b2 g4",
            "a1 b2 c3",
        ),  # below the cut: with absent_gold=drop the list goes with it
        ("gh", "ahbc", 4, "a1 h2 b3 g0", "a1 h2 b3 c4"),
        ("gh", "ahbgc", 3, "a1 h2 g4", "a1 h2 b3"),
    ],
)
def test_positives_are_in_a_reranker_list_at_their_ranks_or_left_out(
    golds, found, list_size, added, dropped
):
    for absent_gold, expected in (("add", added), ("drop", dropped)):
        config = settings(list_size=list_size, absent_gold=absent_gold)
        entries = build_list(skills_of(*golds), ranked("encoder", *found), config)

        assert " ".join(f"{entry.skill_id}{entry.rank}" for entry in entries) == expected
        assert all((entry.source == "gold") == (entry.rank == 0) for entry in entries)


def write_rankings(folder, rows):
    names = ("query_id", "skill_id", "rank", "stage", "score")
    write_table(
        [dict(zip(names, (*row, 0.0), strict=True)) for row in rows], RANKINGS, folder / "rankings"
    )


VERDICTS = {
    "q1": {"a": "required", "e": "rejected"},
    "q2": {"c": "required", "b": "required", "d": "useful"},
    "q3": {"gone": "required"},
    "q4": {"a": "required"},
    "q5": {"a": "required"},
}


@pytest.fixture
def folder(tmp_path):
    """q1 has one gold, q2 two golds and a useful skill, q3 a gold outside the pool, q4 no candidates; q5 is of dev."""
    write_pool(tmp_path / "pool", [Skill(s, s, "", s) for s in "abcdefghz"])
    write_queries(tmp_path, VERDICTS)
    of_all = [
        (q, s, rank, "semantic")
        for q in ("q1", "q2", "q3", "q5")
        for rank, s in enumerate("efgh", 1)
    ]
    write_rankings(tmp_path, [*of_all, ("q2", "d", 9, "semantic"), ("q1", "z", 1, "random")])
    return tmp_path


def write_queries(folder, verdicts):
    splits = {"q4": "train", "q3": "train", "q2": "train", "q1": "train", "q5": "dev"}
    write_ours(
        folder / "queries", [(q, f"text {q}", split) for q, split in splits.items()], verdicts
    )


def run(folder, **changes):
    """(the summary, query_id → its list, the rows of DROPPED)."""
    places = {name: folder / name for name in ("pool", "queries", "rankings", "out")}
    summary = settings(**places, **changes).run(folder / "out")
    lists = {row["query_id"]: row for row in read_table(folder / "out", LISTS).to_pylist()}
    return summary, lists, read_table(folder / "out", DROPPED).to_pylist()


def test_together_gives_one_list_a_query_with_verdicts_from_judgements_and_reasons_for_what_is_left_out(
    folder,
):
    summary, lists, rows = run(folder, quotas={"semantic": 4, "random": 1})

    assert list(lists) == ["q1", "q2"]

    q1 = dict(zip(lists["q1"]["skill_ids"], lists["q1"]["verdicts"], strict=True))

    assert q1 == {"a": "required", "e": "rejected"} | dict.fromkeys("fghz", "irrelevant")
    assert lists["q2"]["skill_ids"][:3] == ["b", "c", "d"]
    assert lists["q2"]["verdicts"][:3] == ["required", "required", "useful"]
    assert lists["q1"]["ranks"][lists["q1"]["skill_ids"].index("h")] == 4
    assert lists["q1"]["teacher_scores"] is None
    assert summary == {
        "num_lists": 2,
        "by_source": {"gold": 4, "random": 1, "semantic": 8},
        "by_verdict": {"irrelevant": 8, "rejected": 1, "required": 3, "useful": 1},
        "list_length": {"min": 6, "mean": 6.5, "max": 7},
        "dropped": {"min_negatives": 1, "no_positive": 1, "not_in_pool": 1},
    }
    assert {(row["query_id"], row["skill_id"], row["filter"]) for row in rows} == {
        ("q3", "gone", "not_in_pool"),
        ("q3", "", "no_positive"),
        ("q4", "", "min_negatives"),
    }
    assert [row["reason"] for row in rows if row["query_id"] == "q4"] == [
        "0 negative(s), at least 1 wanted"
    ]
    assert list(run(folder, quotas={"semantic": 4, "random": 1}, min_negatives=5)[1]) == ["q1"]


def test_judged_skills_keep_source_and_verdict_in_the_table(folder):
    write_queries(folder, VERDICTS | {"q1": VERDICTS["q1"] | {"d": "rejected", "gone": "rejected"}})
    summary, lists, rows = run(folder, quotas={"judged": 2, "semantic": 1})

    row = lists["q1"]

    assert {*zip(row["skill_ids"], row["sources"], row["verdicts"], strict=True)} >= {
        ("d", "judged", "rejected"),
        ("e", "judged", "rejected"),
        ("a", "gold", "required"),
    }
    assert summary["by_source"]["judged"] == 2
    assert [d["reason"] for d in rows if (d["query_id"], d["skill_id"]) == ("q1", "gone")] == [
        "judged rejected, not in the pool"
    ]


def test_a_flagged_skill_is_no_positive_and_may_be_a_negative(folder):
    flags = {skill_id: [Flag("locked_archive", "body", 0, 4, "pass", "why")] for skill_id in "ace"}
    write_flags(flags, folder / "pool")

    summary, lists, rows = run(folder, quotas={"semantic": 4})

    assert list(lists) == ["q2"]  # all that q1 and q4 require is flagged
    assert lists["q2"]["skill_ids"][:2] == ["b", "d"]
    assert "c" not in lists["q2"]["skill_ids"]
    assert "e" in lists["q2"]["skill_ids"]

    why = "a positive with the flag locked_archive"
    dropped = {
        (row["query_id"], row["skill_id"], row["reason"])
        for row in rows
        if row["filter"] == "flagged"
    }

    assert dropped == {("q1", "a", why), ("q2", "c", why), ("q4", "a", why)}
    assert summary["dropped"] == {"flagged": 3, "no_positive": 3, "not_in_pool": 1}

    summary, lists, _ = run(folder, quotas={"semantic": 4}, flagged="use")

    assert lists["q1"]["skill_ids"][0] == "a"
    assert "flagged" not in summary["dropped"]


def test_a_list_without_required_gold_in_its_top_is_left_out_with_a_row(folder):
    """q1's gold is third; of q2's c is third, b fifth and the useful d nowhere; q4's is fourth."""
    tops = {"q1": "efa", "q2": "efcgb", "q4": "efga"}
    write_rankings(
        folder,
        [(q, s, rank, "encoder") for q, found in tops.items() for rank, s in enumerate(found, 1)],
    )

    summary, lists, rows = run(folder, list_size=3, absent_gold="drop")

    assert {q: row["skill_ids"] for q, row in lists.items()} == {"q1": [*"efa"], "q2": [*"efc"]}

    dropped = [row for row in rows if row["filter"] == "outside_top"]

    assert [(row["query_id"], row["skill_id"]) for row in dropped] == [
        ("q2", "b"),
        ("q2", "d"),
        ("q4", "a"),
    ]
    assert dropped[0]["reason"] == "a positive outside the top 3"
    assert (summary["num_lists"], summary["by_verdict"]["required"]) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set either 'quotas'"),
        ({"quotas": {"semantic": 1}, "list_size": 20}, "set either 'quotas'"),
        ({"quotas": {"semantic": 0}}, "all 'quotas' are 0"),
        (
            {"quotas": {"semantic": 4}, "best_of": ["lexical"]},
            "best_of: 'lexical' is no source of 'quotas'",
        ),
        (
            {"quotas": {"semantic": 4}, "absent_gold": "drop"},
            "absent_gold: drop needs 'list_size', and no",
        ),
        (
            {"list_size": 9, "quotas": {"judged": 2}, "absent_gold": "drop"},
            "absent_gold: drop needs",
        ),
        ({"list_size": 3}, r"'list_size' takes the top of one ranking.*random, semantic"),
        (
            {"quotas": {"sematic": 4}},
            r"unknown source 'sematic'; the rankings hold: random, semantic",
        ),
        ({"quotas": {"semantic": 4}, "min_negatives": 5}, "rankings: no list is left of 4 queries"),
        (
            {"quotas": {"semantic": 4}, "pool": "other"},
            r"other: 5 ranked skill\(s\) are not in this pool, 'e'",
        ),
    ],
)
def test_what_gives_no_lists_is_refused(folder, changes, message):
    write_pool(folder / "other", [Skill(s, s, "", s) for s in "abcd"])
    places = {
        name: folder / changes.get(name, name) for name in ("pool", "queries", "rankings", "out")
    }

    with pytest.raises(SkilltrainError, match=message):
        settings(**changes | places).run(folder / "out")


def test_the_order_of_the_tables_does_not_matter(folder):
    _, first, _ = run(
        folder, quotas={"semantic": 2, "random": 1, "taxonomy": 1}, seed=3
    )  # no taxonomy was mined
    for name, spec in (("rankings", RANKINGS), ("queries", QUERIES), ("pool", SKILLS)):
        write_table(read_table(folder / name, spec).to_pylist()[::-1], spec, folder / name)

    assert run(folder, quotas={"semantic": 2, "random": 1, "taxonomy": 1}, seed=3)[1] == first
