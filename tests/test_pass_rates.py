import math

import pytest

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analysis.pass_rates import AGENTS, AVERAGE, Agent, are_known, average, estimate, pass_rates
from skilltrain.evaluation.benchmarks.benchmark import make_task
from skilltrain.evaluation.metrics import Relevance
from skilltrain.evaluation.results import SystemResult
from skilltrain.evaluation.statistics.bootstrap import Interval, interval

PRINTED = 0.06  # percent: the paper prints tenths, and computed from coverages with more than three digits

# SkillRouter, table 16: with FC@10 .520, Hit@1 .740 and Recall@10 .704, in percent.
TABLE_16 = {
    "Gemini CLI (Flash)": (40.3, 44.2, 43.6),
    "Claude Code (Opus 4.5)": (34.1, 39.2, 38.4),
    "Codex (GPT-5.2)": (37.9, 41.0, 40.5),
    "Claude Code (Opus 4.6)": (37.8, 40.9, 40.4),
    "Gemini CLI (Pro)": (34.7, 37.7, 37.2),
    "Claude Code (Sonnet 4.5)": (24.8, 28.0, 27.5),
    "Claude Code (Haiku 4.5)": (19.7, 23.4, 22.8),
    AVERAGE: (32.8, 36.3, 35.8),
}


def share(value: float) -> Interval:
    return Interval(value, value, value, 150)


def scored(name: str, **columns: list[float]) -> SystemResult:
    names = {"hit": "Hit@1", "recall": "Recall@10", "full": "FC@10", "ndcg": "nDCG@10"}
    rows = [dict(zip((names[key] for key in columns), row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return SystemResult(name=name, per_query={f"q{i}": row for i, row in enumerate(rows)}, rankings={})


@pytest.mark.parametrize("agent", [*AGENTS, average(AGENTS)], ids=lambda agent: agent.name)
def test_table_16_of_skillrouter(agent: Agent):
    found = [100 * estimate(agent, share(coverage)).mean for coverage in (0.520, 0.740, 0.704)]
    assert found == pytest.approx(TABLE_16[agent.name], abs=PRINTED)


@pytest.mark.parametrize(
    ("coverages", "percent"),
    [((0.314, 0.321, 0.214), (29.4, 29.5, 27.8)), ((0.680, 0.692, 0.534), (35.4, 35.6, 33.0)),
     ((0.740, 0.704, 0.520), (36.3, 35.8, 32.8)), ((0.760, 0.719, 0.540), (36.7, 36.0, 33.1))],
)  # fmt: skip
def test_table_15_of_skillrouter(coverages: tuple[float, ...], percent: tuple[float, ...]):
    """Hit@1, Recall@10 and FC@10 of four pipelines, averaged over the seven agents."""
    found = [100 * estimate(average(AGENTS), share(coverage)).mean for coverage in coverages]
    assert found == pytest.approx(percent, abs=PRINTED)


def test_the_interval_of_the_coverage_is_mapped():
    """Coverage .5 [.25, .75] between .2 and .6."""
    helped = estimate(Agent("helped by skills", 0.2, 0.6), Interval(0.5, 0.25, 0.75, 9))
    assert [helped.mean, helped.low, helped.high, helped.n] == pytest.approx([0.4, 0.3, 0.5, 9])
    harmed = estimate(Agent("harmed by skills", 0.6, 0.2), Interval(0.5, 0.25, 0.5, 9))
    assert [harmed.mean, harmed.low, harmed.high] == pytest.approx([0.4, 0.4, 0.5])


def test_every_system_and_agent_has_a_row():
    full = scored("full", hit=[1, 0, 1, 1], recall=[0.5, 0, 1, 0.5], full=[0, 0, 1, 0], ndcg=[1, 1, 1, 1])
    hits = scored("hits", hit=[0, 0, 0, 1])
    agents = (Agent("a", 0.2, 0.4), Agent("b", 0.0, 1.0))
    found = pass_rates([full, hits], agents, seed=4)
    assert [(row.system, row.agent) for row in found] == [
        (system, agent) for system in ("full", "hits") for agent in ("a", "b", AVERAGE)
    ]
    first, second, mean, *rest = found
    assert [list(row.estimates) for row in (first, rest[0])] == [["Hit@1", "Recall@10", "FC@10"], ["Hit@1"]]
    assert {name: value.mean for name, value in first.estimates.items()} == pytest.approx(
        {"Hit@1": 0.35, "Recall@10": 0.3, "FC@10": 0.25}
    )
    assert second.estimates["Hit@1"] == interval([1, 0, 1, 1], seed=4)  # from 0 to 1: the coverage itself
    assert (mean.without_skills, mean.with_gold) == pytest.approx((0.1, 0.7))
    assert mean.estimates["FC@10"].mean == pytest.approx((0.25 + 0.25) / 2)


def test_one_agent_has_no_average_and_no_coverage_no_row():
    only = Agent("only", 0.1, 0.3)
    (row,) = pass_rates([scored("one", hit=[1, 0])], [only], seed=0)
    assert (row.agent, row.without_skills, row.with_gold) == ("only", 0.1, 0.3)
    assert pass_rates([scored("one", ndcg=[1, 0])], [only], seed=0) == ()
    assert pass_rates([scored("one", hit=[1, 0])], [], seed=0) == ()
    assert pass_rates([], AGENTS, seed=0) == ()


@pytest.mark.parametrize("rate", [31.3, -0.1, math.nan])
def test_percentages_are_refused(rate: float):
    with pytest.raises(SkilltrainError, match=r"agent a: a pass rate is a share between 0 and 1, .*by 100"):
        Agent("a", rate, 0.5)


def test_bad_systems_are_refused():
    with pytest.raises(SkilltrainError, match="different query sets compared"):
        pass_rates([scored("one", hit=[1, 0]), scored("two", hit=[1])], AGENTS, seed=0)
    with pytest.raises(SkilltrainError, match="system one: 1 values are not finite"):
        pass_rates([scored("one", hit=[1, math.nan])], AGENTS, seed=0)


def test_the_agents_are_known_for_skillsbench_alone():
    gold = Relevance(frozenset("a"), {"a": 1.0})
    ours, theirs = (make_task("q", "do", gold, origin=origin, split="test") for origin in ("llm", "skillsbench"))
    assert are_known([theirs]) and not are_known([theirs, ours])
