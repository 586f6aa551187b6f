import pytest

from skilltrain.evaluation.analysis import AGENTS, AVERAGE, Agent, average, estimate, pass_rates
from skilltrain.evaluation.bootstrap import Interval

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
    means = {"full": {"Hit@1": share(0.75), "Recall@10": share(0.5), "FC@10": share(0.25), "nDCG@10": share(1)},
             "hits": {"Hit@1": Interval(0.25, 0.0, 0.75, 4)}, "none": {"nDCG@10": share(1)}}  # fmt: skip
    found = pass_rates(means, (Agent("a", 0.2, 0.4), Agent("b", 0.0, 1.0)))
    assert [(row.system, row.agent) for row in found] == [
        (system, agent) for system in ("full", "hits") for agent in ("a", "b", AVERAGE)
    ]
    first, _, mean, _, whole, _ = found
    assert {name: value.mean for name, value in first.estimates.items()} == pytest.approx(
        {"Hit@1": 0.35, "Recall@10": 0.3, "FC@10": 0.25}
    )
    assert whole.estimates == {"Hit@1": Interval(0.25, 0.0, 0.75, 4)}  # from 0 to 1: the coverage itself
    assert (mean.without_skills, mean.with_gold) == pytest.approx((0.1, 0.7))
    assert mean.estimates["FC@10"].mean == pytest.approx((0.25 + 0.25) / 2)
