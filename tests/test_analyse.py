"""The analyses of an evaluation by hand: rankers one by one, changed queries, agents, the structure of skills."""

import itertools
import sys

import pytest
from scipy.stats import mannwhitneyu

from faults import raises
from skilltrain.evaluation.analyse import (
    latencies,
    outcomes,
    stage_recalls,
    truncation,
)
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import Relevance
from skilltrain.models.encoder import EncoderConfig
from skilltrain.papers.skillrouter.analyses import (
    AVERAGE,
    compare_structure,
    pass_rates,
    structure_features,
)
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.templates import EncoderTemplate, SkillTemplate

# What rankers let through, and take ---------------------------------------------------------------


def stage(kind, num_passed=None, **rankings):
    ranked = {
        query_id: [(letter, 0.0) for letter in letters] for query_id, letters in rankings.items()
    }
    return RankedStage(kind, kind, ranked, 0.0, (), {}, num_passed)


def test_recall_passes_from_ranker_to_ranker():
    gold = {"q1": "a", "q2": "bc"}
    tasks = [
        task_of(
            Query(query_id, "text", "", "t", "test"),
            Relevance(frozenset(ids), dict.fromkeys(ids, 1.0)),
            {},
        )
        for query_id, ids in gold.items()
    ]
    stages = {
        "two": (stage("dense", 2, q1="xayz", q2="bxyc"), stage("admit", None, q1="ax", q2="")),
        "one": (stage("lexical", None, q1="a", q2="b"),),
        "none": (stage("dense", 50, q1="ab", q2="ab"), stage("admit", None, q1="", q2="")),
    }

    rows = stage_recalls(stages, Benchmark("b", tuple(tasks)))

    assert [(row["system"], row["stage"], row["num_passed"]) for row in rows] == [
        ("two", "1 dense", 2),
        ("two", "2 admit", 2),
        ("none", "1 dense", 2),
        ("none", "2 admit", 1),
    ]

    first, second, _, empty = (
        {name: mean.mean for name, mean in row["means"].items()} for row in rows
    )

    assert first == pytest.approx(
        {
            # q1 has a second; q2 has b first and c fourth
            "Recall@1": 0.25,
            "Recall@2": 0.75,
            "Precision@1": 0.5,
            "Precision@2": 0.5,
            "MRR@4": 0.75,
            "Hit@2": 1,
        }
    )
    assert second == pytest.approx(
        {
            "Recall@1": 0.5,
            "Recall@2": 0.5,
            "Precision@1": 0.5,
            "Precision@2": 0.25,
            "MRR@2": 0.5,
            "Hit@2": 0.5,
        }
    )
    assert set(empty.values()) == {0.0}
    assert rows[-1]["means"]["Hit@1"].n == 2


def test_percentiles_rates_and_the_gpu_by_hand():
    """Total is of queries, not of percentiles; the GPU's seconds are of those rankers that use it."""
    timed = {
        "lexical": ((1.0, 2.0, 3.0, 4.0, 10.0), 0),
        "dense": ((0.5, 0.5, 0.5, 0.5, 0.0), 2**30),
        "rerank": ((0.0, 0.0, 0.0, 0.0, 1.0), 3 * 2**30),
    }
    stages = [
        RankedStage(kind, kind, {}, 0.0, alone, {}, gpu_bytes=used)
        for kind, (alone, used) in timed.items()
    ]

    rows = latencies({"mine": stages, "not timed": [RankedStage("x", "x", {}, 0.0, (), {})]})

    assert [(row["system"], row["stage"], row["num"]) for row in rows] == [
        ("mine", name, 5) for name in ("1 lexical", "2 dense", "3 rerank", "total")
    ]

    # Sorted 1, 2, 3, 4, 10: the middle is 3; .95 of the way from the first to the last is .8 of the way from 4 to 10.
    found = [[row[key] for key in ("mean", "p50", "p95", "qps")] for row in rows]

    assert found[0] == pytest.approx([4, 3, 8.8, 5 / 20])
    assert found[3] == pytest.approx([4.6, 3.5, 4.5 + 0.8 * 6.5, 5 / 23])
    # 1,000 queries hold the card for 1,000 x .4 s in the encoder and 1,000 x .2 s in the reranker.
    assert [row["gpu_gib"] for row in rows] == [None, 1, 3, 3]
    assert [row["gpu_seconds"] for row in rows[1:]] == pytest.approx([400, 200, 600])


def skill(num_words, description="pdf"):
    return Skill(f"s{num_words}", "pdf", description, " ".join(["pdf"] * num_words))


def test_a_skill_is_whole_where_neither_characters_nor_tokens_cut_it(model_folders):
    # name | description | body: 4 tokens and the words of the body; a pair takes 3 of 32, a text 2.
    skills = [skill(25), skill(26), skill(27), skill(1, description="pdf " * 200)]
    source = str(model_folders["bert_reranker"])

    pair = truncation(RerankConfig(source=source, max_tokens=32), skills)

    assert pair == {"model": source, "max_tokens": 29, "whole": 0.25, "num_skills": 4}

    text = truncation(DenseConfig(source=str(model_folders["bert"]), max_tokens=32), skills)

    assert (text["max_tokens"], text["whole"]) == (30, 0.5)

    described = EncoderTemplate(skill=SkillTemplate(fields="description", description_chars=2000))
    short = truncation(
        EncoderConfig(source=str(model_folders["bert"]), max_tokens=32, template=described), skills
    )

    assert short["whole"] == 0.75, "bodies do not count for a model that sees none"


# Queries that changed -----------------------------------------------------------------------------


def with_hits(name: str, hits: dict[str, float]) -> SystemResult:
    return SystemResult(name, {query_id: {"Hit@1": hit} for query_id, hit in hits.items()}, {})


def test_table_9_of_skillrouter():
    """Of 150 queries 92 both, 19 fixed, 6 broken, 33 neither: 65.3% becomes 74.0%, exact p = .0146."""
    cells = {"both": (92, 1, 1), "fixed": (19, 0, 1), "broken": (6, 1, 0), "neither": (33, 0, 0)}
    ids = {cell: [f"{cell}{i}" for i in range(num)] for cell, (num, *_) in cells.items()}
    before, after = (
        {query_id: {"Hit@1": row[side]} for cell, row in cells.items() for query_id in ids[cell]}
        for side in (1, 2)
    )
    ranked = (
        SystemResult("SR-Emb", before, {}),
        SystemResult("SR-Rank", dict(reversed(after.items())), {}),
    )

    names = {"baseline": "SR-Emb", "system": "SR-Rank", "measure": "Hit@1"}

    assert outcomes(*ranked, "Hit@1") == {**names, **ids, "p": pytest.approx(0.0146, abs=5e-5)}


# What agents could gain ---------------------------------------------------------------------------

PRINTED = 0.06  # percent: the paper prints tenths, and computed from coverages with more than three digits
# SkillRouter, table 16: with FC@10, Hit@1 and Recall@10 of table 15's third row, in percent.
TABLE_16 = {
    "Gemini CLI (Flash)": (40.3, 44.2, 43.6),
    "Claude Code (Opus 4.5)": (34.1, 39.2, 38.4),
    "Codex (GPT-5.2)": (37.9, 41.0, 40.5),
    "Claude Code (Opus 4.6)": (37.8, 40.9, 40.4),
    "Gemini CLI (Pro)": (34.7, 37.7, 37.2),
    "Claude Code (Sonnet 4.5)": (24.8, 28.0, 27.5),
    "Claude Code (Haiku 4.5)": (19.7, 23.4, 22.8),
}
# Table 15: FC@10, Hit@1 and Recall@10 of four pipelines, and the average over the seven agents.
TABLE_15 = {
    (0.214, 0.314, 0.321): (27.8, 29.4, 29.5),
    (0.534, 0.680, 0.692): (33.0, 35.4, 35.6),
    (0.520, 0.740, 0.704): (32.8, 36.3, 35.8),
    (0.540, 0.760, 0.719): (33.1, 36.7, 36.0),
}


def test_tables_15_and_16_of_skillrouter():
    measures = ("FC@10", "Hit@1", "Recall@10")
    means = {
        str(coverages): {"nDCG@10": Interval(1, 1, 1, 150)}
        | {
            name: Interval(value, value - 0.1, value + 0.2, 150)
            for name, value in zip(measures, coverages, strict=True)
        }
        for coverages in TABLE_15
    }
    found = pass_rates({**means, "not covered": {"nDCG@10": Interval(1, 1, 1, 150)}})
    averages = {(str(coverages), AVERAGE): percent for coverages, percent in TABLE_15.items()}
    expected = averages | {
        (str((0.520, 0.740, 0.704)), agent): row for agent, row in TABLE_16.items()
    }

    rows = {(row["system"], row["agent"]): row for row in found}

    assert len(found) == len(rows) == 4 * 8

    for key, percent in expected.items():
        estimates = rows[key]["estimates"]
        assert [100 * estimates[name].mean for name in measures] == pytest.approx(
            percent, abs=PRINTED
        ), key
    last = found[-1]
    gain = last["with_gold"] - last["without_skills"]
    low, high = (last["without_skills"] + end * gain for end in (0.440, 0.740))

    assert last["estimates"]["FC@10"] == Interval(
        pytest.approx((2 * low + high) / 3), pytest.approx(low), pytest.approx(high), 150
    )


# Structure of skills ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # `1.` and `a/b.py` count as one word and three; 14 of 75 characters are code.
        (
            "# Run\n\n1. `x` <https://e.org>\n   - two\n\nChecks\n---\n```sh\n# no\n- a/b.py\n```\n",
            {
                "words": 13,
                "headings": 2,
                "ordered items": 1,
                "unordered items": 1,
                "inline code per 100 words": 100 / 13,
                "links": 1,
                "code blocks": 1,
                "code share": 14 / 75,
            },
        ),
        (
            "> ```\n> a\nb",
            {"code blocks": 1, "code share": 2 / 11},
        ),  # a fence ends with the quote that holds it
        (
            "    ```\n    a\n    ```\n",
            {"code blocks": 0, "code share": 0},
        ),  # four spaces: code by indentation
        ("#no\n\n####### no\n\n\\# no\n\n#\n\n  ## yes ##\n", {"headings": 2}),
        ("text\n2. no item\n\n2. item\n- c\n+ d\n", {"ordered items": 1, "unordered items": 2}),
        ("[a](b) ![c](d) [e] [f][g] `` a`b `` and `c and \\d`\n\n[e]: /url\n", {"links": 2}),
        ("<!-- # no\n- no -->\n", {"headings": 0, "unordered items": 0}),
        ("", {"words": 0, "code share": 0, "inline code per 100 words": 0}),
        ("run `scripts/a-b/run_all.sh`", {"mentions a script": 1, "mentions a reference file": 0}),
        (
            "my/scripts/run.py ./references/api.v2.md",
            {"mentions a script": 1, "mentions a reference file": 1},
        ),
        (
            "postscripts/run.py, scripts/x and reference.md",
            {"mentions a script": 0, "mentions a reference file": 0},
        ),
        ("script/x.ts, reference/y.yml", {"mentions a script": 1, "mentions a reference file": 1}),
    ],
)
def test_bodies_are_read_as_commonmark(body, expected):
    found = structure_features(body)

    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert structure_features(body.replace("\n", "\r\n")) == found


def test_hostile_text_costs_work_in_proportion_to_its_length():
    def num_calls(body):
        """How many functions ran: a measure of work that no busy machine disturbs."""
        count, before = itertools.count(), sys.getprofile()
        sys.setprofile(lambda *_: next(count))
        structure_features(body)
        sys.setprofile(before)
        return next(count)

    num_calls("a")  # the parser is built once
    for unit in ("`", "` ", "[", "![", "[a](", "```\n", "> ", "- a\n", "1. ", "<a ", "[a]: b\n"):
        few, many = (num_calls(unit * (length // len(unit))) for length in (600, 2_400))
        assert many < 6 * few, unit  # four times the text; quadratic would be 16


def test_comparison_worked_by_hand():
    gold = ["```\na\n```\n# b c scripts/x.py", "a b", "a scripts/x.py"]
    others = ["a", "a b", "a b c d e", "scripts/x.py"]
    compared = {row["feature"]: row for row in compare_structure(gold, others)}

    words, script, links = (compared[name] for name in ("words", "mentions a script", "links"))

    assert (words["gold"], words["others"], words["num_gold"], words["num_others"]) == (
        4,
        2.5,
        3,
        4,
    )
    # gold 6, 2, 4 against 1, 2, 5, 3: 6 has more than all 4; 2 more than one, one tie; 4 more than three
    assert words["effect"] == pytest.approx((4 + 1.5 + 3) / 12)
    assert (script["gold"], script["others"]) == (2 / 3, 1 / 4)
    assert script["effect"] == pytest.approx((2 * (3 + 0.5) + 0.5 * 3) / 12)
    assert (links["gold"], links["others"], links["effect"], links["p"]) == (0, 0, 0.5, 1)
    for sides in ((gold, []), ([], others)):
        with raises("nothing-to-analyse"):
            compare_structure(*sides)


def test_p_is_scipys_adjusted_by_holm():
    gold, others = ["# a\n" * n for n in range(20, 40)], ["# a\n" * n for n in range(15, 30)]
    compared = compare_structure(gold, others)
    raw = mannwhitneyu([*range(20, 40)], [*range(15, 30)], alternative="two-sided").pvalue

    found = {row["feature"]: row["p"] for row in compared}

    # headings and words differ alike, and they alone: Holm multiplies the least p by the number of features
    assert found["headings"] == found["words"] == pytest.approx(len(compared) * raw)
    assert {p for name, p in found.items() if name not in ("headings", "words")} == {1}
