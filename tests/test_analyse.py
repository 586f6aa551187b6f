"""Analyses of an evaluation: stages, changed queries, agents and the structure of skills."""

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
    bundle_features,
    compare_structure,
    mention_features,
    pass_rates,
)
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import RankedStage
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.templates import EncoderTemplate, SkillTemplate

# What rankers let through, and take ---------------------------------------------------------------


def stage(kind, num_passed=None, **rankings):
    """Return a ranked stage; a ranking is a string of one-letter skill ids."""
    ranked = {}
    for query_id, letters in rankings.items():
        ranked[query_id] = [(letter, 0.0) for letter in letters]
    return RankedStage(kind, kind, ranked, 0.0, (), {}, num_passed)


STAGES = {
    "two": (stage("dense", 2, q1="xayz", q2="bxyc"), stage("admit", None, q1="ax", q2="")),
    "one": (stage("lexical", None, q1="a", q2="b"),),
    "none": (stage("dense", 50, q1="ab", q2="ab"), stage("admit", None, q1="", q2="")),
}


@pytest.fixture(scope="module")
def stage_rows():
    """The recalls of all stages; q1 has the gold skill a, q2 has b and c."""
    tasks = []
    for query_id, gold in {"q1": "a", "q2": "bc"}.items():
        relevance = Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))
        tasks.append(task_of(Query(query_id, "text", "", "t", "test"), relevance, {}))
    return stage_recalls(STAGES, Benchmark("b", tuple(tasks)))


def means_of(row):
    return {measure: mean.mean for measure, mean in row["means"].items()}


def test_only_systems_of_several_rankers_have_stages(stage_rows):
    assert [(row["system"], row["stage"], row["num_passed"]) for row in stage_rows] == [
        ("two", "1 dense", 2),
        ("two", "2 admit", 2),
        ("none", "1 dense", 2),
        ("none", "2 admit", 1),
    ]


def test_stage_measures_by_hand(stage_rows):
    # q1 has its gold skill second; q2 has b first and c fourth.
    assert means_of(stage_rows[0]) == pytest.approx(
        {
            "Recall@1": 0.25,
            "Recall@2": 0.75,
            "Precision@1": 0.5,
            "Precision@2": 0.5,
            "MRR@4": 0.75,
            "Hit@2": 1,
        }
    )
    assert means_of(stage_rows[1]) == pytest.approx(
        {
            "Recall@1": 0.5,
            "Recall@2": 0.5,
            "Precision@1": 0.5,
            "Precision@2": 0.25,
            "MRR@2": 0.5,
            "Hit@2": 0.5,
        }
    )


def test_empty_stage_has_measures_of_zero(stage_rows):
    assert set(means_of(stage_rows[-1]).values()) == {0.0}
    assert stage_rows[-1]["means"]["Hit@1"].n == 2


def timed_stage(kind, seconds, gpu_gib):
    """Return a stage with the time of each query in seconds."""
    return RankedStage(kind, kind, {}, 0.0, seconds, {}, gpu_bytes=gpu_gib * 2**30)


@pytest.fixture(scope="module")
def latency_rows():
    stages = [
        timed_stage("lexical", (1.0, 2.0, 3.0, 4.0, 10.0), gpu_gib=0),
        timed_stage("dense", (0.5, 0.5, 0.5, 0.5, 0.0), gpu_gib=1),
        timed_stage("rerank", (0.0, 0.0, 0.0, 0.0, 1.0), gpu_gib=3),
    ]
    return latencies({"mine": stages, "not timed": [RankedStage("x", "x", {}, 0.0, (), {})]})


def test_latencies_are_of_timed_systems(latency_rows):
    stages = ("1 lexical", "2 dense", "3 rerank", "total")
    rows = [(row["system"], row["stage"], row["num"]) for row in latency_rows]

    assert rows == [("mine", stage_name, 5) for stage_name in stages]


def test_percentiles_by_hand(latency_rows):
    keys = ("mean", "p50", "p95", "qps")
    lexical = [latency_rows[0][key] for key in keys]
    total = [latency_rows[-1][key] for key in keys]

    # Sorted 1, 2, 3, 4, 10: the middle is 3. The last but one and the last are at .75 and 1, so .95
    # is .8 of the way from 4 to 10.
    assert lexical == pytest.approx([4, 3, 8.8, 5 / 20])
    # The total is that of each query, not the sum of percentiles.
    assert total == pytest.approx([4.6, 3.5, 4.5 + 0.8 * 6.5, 5 / 23])


def test_gpu_use_by_hand(latency_rows):
    # 1,000 queries hold the GPU for 1,000 x .4 s in the encoder and 1,000 x .2 s in the reranker.
    assert [row["gpu_gib"] for row in latency_rows] == [None, 1, 3, 3]
    assert [row["gpu_seconds"] for row in latency_rows[1:]] == pytest.approx([400, 200, 600])


def skill(num_words, description="pdf"):
    return Skill(f"s{num_words}", "pdf", description, " ".join(["pdf"] * num_words))


# Name | description | body: 4 tokens and the words of the body.
SKILLS = [skill(25), skill(26), skill(27), skill(1, description="pdf " * 200)]


def test_pair_has_room_for_29_tokens(model_folders):
    source = str(model_folders["bert_reranker"])

    row = truncation(RerankConfig(source=source, max_tokens=32), SKILLS)

    assert row == {"model": source, "max_tokens": 29, "whole": 0.25, "num_skills": 4}


def test_text_has_room_for_30_tokens(model_folders):
    row = truncation(DenseConfig(source=str(model_folders["bert"]), max_tokens=32), SKILLS)

    assert row["max_tokens"] == 30
    assert row["whole"] == 0.5


def test_hidden_bodies_do_not_count_as_cut(model_folders):
    template = EncoderTemplate(skill=SkillTemplate(fields="description", description_chars=2000))
    config = EncoderConfig(source=str(model_folders["bert"]), max_tokens=32, template=template)

    assert truncation(config, SKILLS)["whole"] == 0.75


# Queries that changed -----------------------------------------------------------------------------


def test_table_9_of_skillrouter():
    """Hit@1 rises from 65.3% to 74.0% of 150 queries, with an exact p of .0146."""
    query_ids = {}
    baseline = {}
    reranked = {}
    for cell, num, baseline_hit, reranked_hit in (
        ("neither", 33, 0, 0),
        ("broken", 6, 1, 0),
        ("fixed", 19, 0, 1),
        ("both", 92, 1, 1),
    ):
        query_ids[cell] = [f"{cell}{number}" for number in range(num)]
        for query_id in query_ids[cell]:
            baseline[query_id] = {"Hit@1": baseline_hit}
            reranked[query_id] = {"Hit@1": reranked_hit}
    reordered = dict(reversed(reranked.items()))

    row = outcomes(
        SystemResult("SR-Emb", baseline, {}), SystemResult("SR-Rank", reordered, {}), "Hit@1"
    )

    names = {"baseline": "SR-Emb", "system": "SR-Rank", "measure": "Hit@1"}
    assert row == {**names, **query_ids, "p": pytest.approx(0.0146, abs=5e-5)}


# What agents could gain ---------------------------------------------------------------------------

# In percent. The paper prints tenths, computed from coverages with more than three digits.
PRINTED = 0.06
# SkillRouter, table 16: pass rates in percent, estimated from FC@10, Hit@1 and Recall@10 of the
# third row of table 15.
TABLE_16 = {
    "Gemini CLI (Flash)": (40.3, 44.2, 43.6),
    "Claude Code (Opus 4.5)": (34.1, 39.2, 38.4),
    "Codex (GPT-5.2)": (37.9, 41.0, 40.5),
    "Claude Code (Opus 4.6)": (37.8, 40.9, 40.4),
    "Gemini CLI (Pro)": (34.7, 37.7, 37.2),
    "Claude Code (Sonnet 4.5)": (24.8, 28.0, 27.5),
    "Claude Code (Haiku 4.5)": (19.7, 23.4, 22.8),
}
# Table 15: FC@10, Hit@1 and Recall@10 of four pipelines → average over the seven agents.
TABLE_15 = {
    (0.214, 0.314, 0.321): (27.8, 29.4, 29.5),
    (0.534, 0.680, 0.692): (33.0, 35.4, 35.6),
    (0.520, 0.740, 0.704): (32.8, 36.3, 35.8),
    (0.540, 0.760, 0.719): (33.1, 36.7, 36.0),
}


ESTIMATED_FROM = ("FC@10", "Hit@1", "Recall@10")
WITHOUT_COVERAGE = {"nDCG@10": Interval(1, 1, 1, 150)}


@pytest.fixture(scope="module")
def rates():
    """The estimated pass rates of the four pipelines, as rows."""
    means = {"not covered": WITHOUT_COVERAGE}
    for coverages in TABLE_15:
        intervals = [Interval(value, value - 0.1, value + 0.2, 150) for value in coverages]
        means[str(coverages)] = WITHOUT_COVERAGE | dict(zip(ESTIMATED_FROM, intervals, strict=True))
    return pass_rates(means)


def percents(rates, coverages, agent):
    """Return the estimates of one agent with one pipeline, in percent."""
    (row,) = [row for row in rates if (row["system"], row["agent"]) == (str(coverages), agent)]
    return [100 * row["estimates"][name].mean for name in ESTIMATED_FROM]


def test_rates_are_of_four_pipelines(rates):
    assert len({(row["system"], row["agent"]) for row in rates}) == len(rates) == 4 * 8


@pytest.mark.parametrize("coverages", TABLE_15)
def test_table_15_of_skillrouter(rates, coverages):
    expected = TABLE_15[coverages]

    assert percents(rates, coverages, AVERAGE) == pytest.approx(expected, abs=PRINTED)


@pytest.mark.parametrize("agent", TABLE_16)
def test_table_16_of_skillrouter(rates, agent):
    third = (0.520, 0.740, 0.704)

    assert percents(rates, third, agent) == pytest.approx(TABLE_16[agent], abs=PRINTED)


def test_interval_of_rate_follows_coverage(rates):
    row = rates[-1]  # its coverage is .54, with an interval from .44 to .74
    gain = row["with_gold"] - row["without_skills"]
    low = row["without_skills"] + 0.44 * gain
    high = row["without_skills"] + 0.74 * gain

    estimate = row["estimates"]["FC@10"]

    assert estimate.mean == pytest.approx((2 * low + high) / 3)
    assert estimate.low == pytest.approx(low)
    assert estimate.high == pytest.approx(high)
    assert estimate.n == 150


# Structure of skills ------------------------------------------------------------------------------


def skill_of(body, files=None):
    return Skill("id", "name", "", body, files=files)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # `1.` counts as one word, `a/b.py` as three; 14 of 75 characters are code.
        (
            "# Run\n\n1. `x` <https://e.org>\n   - two\n\nChecks\n---\n"
            "```sh\n# no\n- a/b.py\n```\n",
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
        # A fence ends with the quote that holds it.
        ("> ```\n> a\nb", {"code blocks": 1, "code share": 2 / 11}),
        # Four spaces: code by indentation.
        ("    ```\n    a\n    ```\n", {"code blocks": 0, "code share": 0}),
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
def test_body_is_read_as_commonmark(body, expected):
    features = mention_features(skill_of(body))

    assert {name: features[name] for name in expected} == pytest.approx(expected)
    assert mention_features(skill_of(body.replace("\n", "\r\n"))) == features


def num_calls(body):
    """Count the functions that run: a measure of work that no busy machine disturbs."""
    counter = itertools.count()
    profiler = sys.getprofile()
    sys.setprofile(lambda *_: next(counter))
    mention_features(skill_of(body))
    sys.setprofile(profiler)
    return next(counter)


@pytest.mark.parametrize(
    "unit", ["`", "` ", "[", "![", "[a](", "```\n", "> ", "- a\n", "1. ", "<a ", "[a]: b\n"]
)
def test_hostile_text_takes_linear_work(unit):
    num_calls("a")  # the parser is built once

    work = num_calls(unit * (600 // len(unit)))
    work_of_longer = num_calls(unit * (2_400 // len(unit)))

    assert work_of_longer < 6 * work  # four times the text; quadratic would be 16


GOLD = [skill_of(body) for body in ("```\na\n```\n# b c scripts/x.py", "a b", "a scripts/x.py")]
OTHERS = [skill_of(body) for body in ("a", "a b", "a b c d e", "scripts/x.py")]


def test_structure_comparison_by_hand():
    rows = {row["feature"]: row for row in compare_structure(GOLD, OTHERS)}

    words = rows["words"]
    assert (words["gold"], words["num_gold"]) == (4, 3)
    assert (words["others"], words["num_others"]) == (2.5, 4)
    # 6, 2 and 4 words against 1, 2, 5 and 3: 6 is more than all 4; 2 more than one, with one tie;
    # 4 more than three.
    assert words["effect"] == pytest.approx((4 + 1.5 + 3) / 12)
    script = rows["mentions a script"]
    assert (script["gold"], script["others"]) == (2 / 3, 1 / 4)
    assert script["effect"] == pytest.approx((2 * (3 + 0.5) + 0.5 * 3) / 12)
    links = rows["links"]
    assert (links["gold"], links["others"], links["effect"], links["p"]) == (0, 0, 0.5, 1)


@pytest.mark.parametrize(("gold", "other"), [(GOLD, []), ([], OTHERS)])
def test_empty_side_is_not_compared(gold, other):
    with raises("nothing-to-analyse"):
        compare_structure(gold, other)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), (0, 0, 0)),
        (("scripts/run.PY", "b.md"), (1, 1, 0)),
        (("logo.png", "LICENSE"), (0, 0, 1)),
    ],
)
def test_bundled_files_are_features(files, expected):
    features = bundle_features(skill_of("a b", files))

    assert len(features) == 9
    assert tuple(features.values())[-3:] == expected


def test_known_files_replace_mentions():
    gold = [skill_of("scripts/x.py", ("run.sh",)), skill_of("a", ())]
    others = [skill_of("scripts/x.py", ())]

    rows = {row["feature"]: row for row in compare_structure(gold, others)}

    assert len(rows) == 9
    assert (rows["bundles scripts"]["gold"], rows["bundles scripts"]["others"]) == (0.5, 0)


def test_p_is_scipys_adjusted_by_holm():
    gold_counts = range(20, 40)
    other_counts = range(15, 30)
    raw = mannwhitneyu(gold_counts, other_counts, alternative="two-sided").pvalue

    rows = compare_structure(
        [skill_of("# a\n" * count) for count in gold_counts],
        [skill_of("# a\n" * count) for count in other_counts],
    )

    p = {row["feature"]: row["p"] for row in rows}
    # Only headings and words differ, and both alike: Holm multiplies the least p by the number of
    # features.
    assert p.pop("headings") == p.pop("words") == pytest.approx(len(rows) * raw)
    assert set(p.values()) == {1}
