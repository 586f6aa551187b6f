"""What agents could gain from a system's rankings: the coverage mixture of SkillRouter, appendix H, equation 4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.benchmarks.skillrouter import ORIGIN
from skilltrain.evaluation.bootstrap import Interval

COVERAGES = ("Hit@1", "Recall@10", "FC@10")  # an agent that takes the first, reads ten, or needs all among ten
AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class PassRate:
    """The share of tasks that `agent` may pass with a system's rankings, for each of COVERAGES."""

    system: str
    agent: str
    without_skills: float
    with_gold: float
    estimates: dict[str, Interval]


class Agent(NamedTuple):
    """The shares of tasks that an agent passes without skills, and with the gold skills."""

    name: str
    without_skills: float
    with_gold: float


# SkillsBench's leaderboard (84 tasks, 5 trials each) as SkillRouter prints it: appendix H, table 16.
AGENTS = (
    Agent("Gemini CLI (Flash)", 0.313, 0.487),
    Agent("Claude Code (Opus 4.5)", 0.220, 0.453),
    Agent("Codex (GPT-5.2)", 0.306, 0.447),
    Agent("Claude Code (Opus 4.6)", 0.306, 0.445),
    Agent("Gemini CLI (Pro)", 0.276, 0.412),
    Agent("Claude Code (Sonnet 4.5)", 0.173, 0.318),
    Agent("Claude Code (Haiku 4.5)", 0.110, 0.277),
)


def are_known(tasks: Sequence[Task]) -> bool:
    """Whether AGENTS speak of these tasks: all are SkillsBench's."""
    return all(task.query.origin == ORIGIN for task in tasks)


def pass_rates(means: Mapping[str, Mapping[str, Interval]], agents: Sequence[Agent] = AGENTS) -> tuple[PassRate, ...]:
    """What `means` (system → measure → mean) let expect of each agent and their average, if skills found were used."""
    found: list[PassRate] = []
    for system, row in means.items():
        coverages = {name: row[name] for name in COVERAGES if name in row}
        for agent in (*agents, average(agents)) if coverages else ():
            estimates = {name: estimate(agent, value) for name, value in coverages.items()}
            found.append(PassRate(system, agent.name, agent.without_skills, agent.with_gold, estimates))
    return tuple(found)


def average(agents: Sequence[Agent]) -> Agent:
    """The agent whose pass rates, and so whose estimates, are the means of all."""
    return Agent(AVERAGE, fmean(agent.without_skills for agent in agents), fmean(agent.with_gold for agent in agents))


def estimate(agent: Agent, coverage: Interval) -> Interval:
    """Without skills + coverage x (with gold - without), at the mean and the ends (turned round if skills harm)."""
    gain = agent.with_gold - agent.without_skills
    mean, low, high = (agent.without_skills + share * gain for share in (coverage.mean, coverage.low, coverage.high))
    return Interval(mean, min(low, high), max(low, high), coverage.n)
