from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.config import validate
from skilltrain.data.lists import Entry, ListPlan, ListsConfig, build_list, run_lists, sample_negatives
from skilltrain.data.screening import Flag, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill, Verdict
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    LISTS,
    QUERIES,
    RANKINGS,
    SKILLS,
    read_table,
    rows_of,
    write_table,
)

QUOTAS = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}


def settings(**changes):
    values = {"stage": "lists", "pool": "p", "queries": "q", "rankings": "r", "out": "o"}
    return validate(ListsConfig, values | changes, "recipe")


def ranked(source, *skill_ids):
    return [Entry(skill_id, source, rank) for rank, skill_id in enumerate(skill_ids, 1)]


def plan(*positives, **judged):
    return ListPlan("q1", dict.fromkeys(positives, Verdict.REQUIRED) | judged, positives)


def plenty():
    return [entry for source in QUOTAS for entry in ranked(source, *(f"{source}{n}" for n in range(50)))]


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
        ({"semantic": "abcd", "lexical": "abcdef"}, {"semantic": 4, "lexical": 3}, {"semantic": 4, "lexical": 2}),
        ({"semantic": "a", "lexical": "gh", "random": "xyz"}, {"semantic": 3}, {"semantic": 1}),
        # one of quota 0 only helps out
        ({"semantic": "a", "lexical": "gh"}, {"semantic": 2, "lexical": 0}, {"semantic": 1, "lexical": 1}),
    ],
)
def test_quotas_are_filled_and_sources_help_out_in_their_order(candidates, quotas, by_source):
    entries = [entry for source, found in candidates.items() for entry in ranked(source, *found)]
    chosen = sample_negatives(entries, quotas, "0/q1")
    assert Counter(entry.source for entry in chosen) == by_source and set(chosen) <= set(entries)
    assert len({entry.skill_id for entry in chosen}) == len(chosen)


@given(st.permutations(plenty()[:30] + plenty()[50:80]), st.text(max_size=5))
def test_samples_do_not_depend_on_the_order_of_rows(candidates, key):
    expected = sample_negatives(plenty()[:30] + plenty()[50:80], QUOTAS, key)
    assert sample_negatives(candidates, QUOTAS, key) == expected


def test_samples_are_uniform_and_change_with_the_key():
    candidates = ranked("semantic", *"abcde")
    counts = Counter(
        entry.skill_id for n in range(2000) for entry in sample_negatives(candidates, {"semantic": 2}, str(n))
    )
    # Binomial(2000, .4): mean 800, standard deviation 22.
    assert set(counts) == set("abcde") and all(abs(count - 800) < 110 for count in counts.values())


JUDGEMENTS_OF_PLAN = {"r1": "rejected", "r2": "rejected", "i1": "irrelevant"}


def judged_plan():
    """One gold, two rejected skills and an irrelevant one, all in the pool."""
    return plan("g", **{s: Verdict(v) for s, v in JUDGEMENTS_OF_PLAN.items()})._replace(turned_down=("i1", "r1", "r2"))


def test_what_a_judge_turned_down_comes_before_what_was_mined_rejections_first():
    mined = ranked("semantic", "r1", *"abc")
    for quotas in ({"semantic": 2, "judged": 2}, {"judged": 2, "semantic": 2}):
        entries = build_list(judged_plan(), mined, settings(quotas=quotas))
        assert {(e.skill_id, e.source) for e in entries if e.source == "judged"} == {("r1", "judged"), ("r2", "judged")}
        assert len(entries) == 5 and sum(e.source == "semantic" for e in entries) == 2
    three = build_list(judged_plan(), mined, settings(quotas={"judged": 3}))
    assert [e.skill_id for e in three][3] == "i1" and [e.rank for e in three] == [0, 1, 2, 3]


def test_a_reranker_list_holds_judged_skills_at_the_rank_where_they_were_found():
    mined = ranked("encoder", "a", "r1", "b", "g", "c")
    entries = build_list(judged_plan(), mined, settings(list_size=4, quotas={"judged": 2}))
    assert [(e.skill_id, e.source, e.rank) for e in entries][:3] == [
        ("a", "encoder", 1), ("r1", "encoder", 2), ("g", "encoder", 4),
    ]  # fmt: skip
    assert (entries[3].skill_id, entries[3].source) == ("r2", "judged") and len(entries) == 4


def test_the_best_of_a_source_are_taken_where_it_says_so():
    """SkillRouter's lexical negatives: the first three by BM25 that are not semantic ones already."""
    candidates = ranked("semantic", *"abcdefgh") + ranked("lexical", *"hgfedcba")
    for number in range(20):
        chosen = sample_negatives(candidates, {"semantic": 4, "lexical": 3}, f"k{number}", ["lexical"])
        semantic = {entry.skill_id for entry in chosen if entry.source == "semantic"}
        lexical = [entry.skill_id for entry in chosen if entry.source == "lexical"]
        assert lexical == [skill_id for skill_id in "hgfedcba" if skill_id not in semantic][:3]


@pytest.mark.parametrize("verdict", [Verdict.REQUIRED, Verdict.USEFUL])
def test_a_known_positive_is_never_a_negative(verdict):
    candidates = ranked("semantic", "g", "other", "n")
    entries = build_list(plan("g", other=verdict), candidates, settings(quotas={"semantic": 4}))
    assert [entry.skill_id for entry in entries] == ["g", "n"] and entries[0] == Entry("g", "gold", 0)


@pytest.mark.parametrize(
    ("golds", "found", "list_size", "added", "dropped"),
    [
        ("g", "agbc", 3, "a1 g2 b3", "a1 g2 b3"),  # at its rank
        ("g", "abcd", 3, "a1 b2 g0", "a1 b2 c3"),  # not retrieved
        ("g", "abcg", 3, "a1 b2 g4", "a1 b2 c3"),  # below the cut: with absent_gold=drop the list goes with it
        ("gh", "ahbc", 4, "a1 h2 b3 g0", "a1 h2 b3 c4"),
        ("gh", "ahbgc", 3, "a1 h2 g4", "a1 h2 b3"),
    ],
)
def test_positives_are_in_a_reranker_list_at_their_ranks_or_left_out(golds, found, list_size, added, dropped):
    for absent_gold, expected in (("add", added), ("drop", dropped)):
        config = settings(list_size=list_size, absent_gold=absent_gold)
        entries = build_list(plan(*golds), ranked("encoder", *found), config)
        assert " ".join(f"{entry.skill_id}{entry.rank}" for entry in entries) == expected
        assert all((entry.source == "gold") == (entry.rank == 0) for entry in entries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set either 'quotas'"),
        ({"quotas": {"semantic": 1}, "list_size": 20}, "set either 'quotas'"),
        ({"quotas": {"semantic": 0}}, "all 'quotas' are 0"),
        ({"quotas": {"semantic": -1}}, "quotas.semantic"),
        ({"list_size": 1}, "list_size"),
        ({"quotas": {"semantic": 4}, "best_of": ["lexical"]}, "best_of: 'lexical' is no source of 'quotas'"),
        ({"quotas": {"semantic": 4}, "absent_gold": "drop"}, "absent_gold: drop needs 'list_size', and no"),
        ({"list_size": 9, "quotas": {"judged": 2}, "absent_gold": "drop"}, "absent_gold: drop needs"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(SkilltrainError, match=message):
        settings(**changes)


def write_rankings(folder, rows):
    names = ("query_id", "skill_id", "rank", "stage")
    write_table(
        [dict(zip(names, row, strict=True)) | {"score": 0.0} for row in rows], RANKINGS, folder / "rankings.parquet"
    )


@pytest.fixture
def folder(tmp_path):
    """q1 has one gold, q2 two golds and a useful skill, q3 a gold outside the pool, q4 no candidates."""
    write_table(rows_of(Skill(s, s, "", s) for s in "abcdefghz"), SKILLS, tmp_path / "pool.parquet")
    (tmp_path / "queries").mkdir()
    queries = [Query(f"q{n}", f"text {n}", "single", "human", "train") for n in (4, 3, 2, 1)]
    write_table(rows_of([*queries, Query("q5", "dev", "single", "human", "dev")]), QUERIES, tmp_path / "queries")
    judged = [
        ("q1", "a", "required"), ("q1", "e", "rejected"), ("q2", "c", "required"), ("q2", "b", "required"),
        ("q2", "d", "useful"), ("q3", "gone", "required"), ("q4", "a", "required"), ("q5", "a", "required"),
    ]  # fmt: skip
    names = ("query_id", "skill_id", "verdict")
    write_table(
        [dict(zip(names, row, strict=True)) | {"judge": "human"} for row in judged], JUDGEMENTS, tmp_path / "queries"
    )
    write_rankings(
        tmp_path,
        [(q, s, rank, "semantic") for q in ("q1", "q2", "q3", "q5") for rank, s in enumerate("efgh", 1)]
        + [("q2", "d", 9, "semantic"), ("q1", "z", 1, "random")],
    )
    (tmp_path / "out").mkdir()
    return tmp_path


def run(folder, **changes):
    places = {"pool": folder / "pool.parquet", "queries": folder / "queries", "rankings": folder / "rankings.parquet"}
    return run_lists(settings(**places, out=folder / "out", **changes), folder / "out")


def lists_of(folder):
    return {row["query_id"]: row for row in read_table(folder / "out", LISTS).to_pylist()}


def test_together_gives_one_list_a_query_with_verdicts_from_judgements(folder):
    summary = run(folder, quotas={"semantic": 4, "random": 1})
    lists = lists_of(folder)
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


def test_judged_skills_keep_source_and_verdict_in_the_table(folder):
    rows = read_table(folder / "queries", JUDGEMENTS).to_pylist()
    more = [{"query_id": "q1", "skill_id": s, "verdict": "rejected", "judge": "llm"} for s in ("d", "gone")]
    write_table([*rows, *more], JUDGEMENTS, folder / "queries")
    summary = run(folder, quotas={"judged": 2, "semantic": 1})
    row = lists_of(folder)["q1"]
    assert {*zip(row["skill_ids"], row["sources"], row["verdicts"], strict=True)} >= {
        ("d", "judged", "rejected"), ("e", "judged", "rejected"), ("a", "gold", "required"),
    }  # fmt: skip
    assert summary["by_source"]["judged"] == 2
    dropped = read_table(folder / "out", DROPPED).to_pylist()
    assert [d["reason"] for d in dropped if (d["query_id"], d["skill_id"]) == ("q1", "gone")] == [
        "judged rejected, not in the pool"
    ]


def test_what_is_left_out_has_a_reason(folder):
    run(folder, quotas={"semantic": 4})
    dropped = {(row["query_id"], row["filter"]): row for row in read_table(folder / "out", DROPPED).to_pylist()}
    assert set(dropped) == {("q3", "not_in_pool"), ("q3", "no_positive"), ("q4", "min_negatives")}
    assert dropped["q3", "not_in_pool"]["skill_id"] == "gone"
    assert dropped["q4", "min_negatives"]["reason"] == "0 negative(s), at least 1 wanted"


def flag(folder, *skill_ids):
    flags = {skill_id: [Flag("locked_archive", "body", 0, 4, "pass", "why")] for skill_id in skill_ids}
    write_flags(flags, folder)


def test_a_flagged_skill_is_no_positive_and_may_be_a_negative(folder):
    flag(folder, "a", "c", "e")
    summary = run(folder, quotas={"semantic": 4})
    lists = lists_of(folder)
    assert list(lists) == ["q2"]  # all that q1 and q4 require is flagged
    assert lists["q2"]["skill_ids"][:2] == ["b", "d"] and "c" not in lists["q2"]["skill_ids"]
    assert "e" in lists["q2"]["skill_ids"]
    dropped = [row for row in read_table(folder / "out", DROPPED).to_pylist() if row["filter"] == "flagged"]
    assert sorted((row["query_id"], row["skill_id"]) for row in dropped) == [("q1", "a"), ("q2", "c"), ("q4", "a")]
    assert {row["reason"] for row in dropped} == {"a positive with the flag locked_archive"}
    assert summary["dropped"] == {"flagged": 3, "no_positive": 3, "not_in_pool": 1}
    summary = run(folder, quotas={"semantic": 4}, flagged="use")
    assert lists_of(folder)["q1"]["skill_ids"][0] == "a" and "flagged" not in summary["dropped"]


def test_more_negatives_wanted_than_there_are(folder):
    with pytest.raises(SkilltrainError, match=r"rankings.parquet: no list is left of 4 queries"):
        run(folder, quotas={"semantic": 4}, min_negatives=5)
    run(folder, quotas={"semantic": 4, "random": 1}, min_negatives=5)
    assert list(lists_of(folder)) == ["q1"]


def test_a_list_without_required_gold_in_its_top_is_left_out_with_a_row(folder):
    """q1's gold is third; of q2's c is third, b fifth and the useful d nowhere; q4's is fourth."""
    tops = {"q1": "efa", "q2": "efcgb", "q4": "efga"}
    write_rankings(folder, [(q, s, rank, "encoder") for q, found in tops.items() for rank, s in enumerate(found, 1)])
    summary = run(folder, list_size=3, absent_gold="drop")
    assert {q: row["skill_ids"] for q, row in lists_of(folder).items()} == {"q1": [*"efa"], "q2": [*"efc"]}
    dropped = [row for row in read_table(folder / "out", DROPPED).to_pylist() if row["filter"] == "outside_top"]
    assert [(row["query_id"], row["skill_id"]) for row in dropped] == [("q2", "b"), ("q2", "d"), ("q4", "a")]
    assert dropped[0]["reason"] == "a positive outside the top 3"
    assert (summary["num_lists"], summary["by_verdict"]["required"]) == (2, 2)


def test_rankings_that_do_not_fit_the_settings_or_the_pool_are_refused(folder):
    with pytest.raises(SkilltrainError, match=r"'list_size' takes the top of one ranking.*random, semantic"):
        run(folder, list_size=3)
    with pytest.raises(SkilltrainError, match=r"unknown source 'sematic'; the rankings hold: random, semantic"):
        run(folder, quotas={"sematic": 4})
    assert run(folder, quotas={"semantic": 4, "taxonomy": 2})["num_lists"] == 2  # of a source that was switched off
    write_rankings(folder, [("q1", "stranger", 1, "semantic")])
    with pytest.raises(SkilltrainError, match=r"pool.parquet: 1 ranked skill\(s\) are not in this pool"):
        run(folder, quotas={"semantic": 1})


def test_the_order_of_the_tables_does_not_matter(folder):
    run(folder, quotas={"semantic": 2, "random": 1}, seed=3)
    first = read_table(folder / "out", LISTS)
    for name, spec in (("rankings.parquet", RANKINGS), ("queries", QUERIES), ("pool.parquet", SKILLS)):
        write_table(read_table(folder / name, spec).to_pylist()[::-1], spec, folder / name)
    run(folder, quotas={"semantic": 2, "random": 1}, seed=3)
    assert read_table(folder / "out", LISTS).equals(first)
