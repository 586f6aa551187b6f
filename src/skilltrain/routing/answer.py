"""What a router answers: skills, how sure it is of them, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skilltrain.data.screening import Flag
from skilltrain.records import Ranking
from skilltrain.routing.confidence import Evidence


@dataclass(frozen=True)
class Placed:
    """Where a ranker put a skill, and its own score for it. Ranks count from 1."""

    ranker: str
    rank: int
    score: float


@dataclass(frozen=True)
class Why:
    """Why a skill was answered.

    `placed` is by ranker, over the pool where the ranker looks at all of it; `terms` are words of the task that the
    skill holds, those that count most first; `window` is the part of its body (start and end in characters) that an
    encoder with several windows finds nearest to the task.
    """

    placed: tuple[Placed, ...]
    terms: tuple[str, ...]
    window: tuple[int, int] | None


@dataclass(frozen=True)
class RoutedSkill:
    """One skill of an answer; its texts are untrusted.

    `path` is its SKILL.md if that is found, `probability` that it serves the task, None where the router is not
    calibrated. `flags` are what the safety screening finds in it.
    """

    rank: int
    skill_id: str
    name: str
    description: str
    path: Path | None
    score: float
    probability: float | None
    why: Why
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Answer:
    """The best skills for a task, best first.

    `fits` is False where no skill serves the task, as far as a calibrated router can tell. `num_likely` is how many of
    the first skills hold one that does, with the chance that the calibration was asked for (conformal prediction): it
    may be more than there are in `skills`, and is None where the router is not calibrated.
    """

    skills: tuple[RoutedSkill, ...]
    fits: bool
    num_likely: int | None


@dataclass(frozen=True)
class Traced:
    """What each ranker made of a task, by its name (those that are fused, one by one), and the last ranking.

    `most` is the score that a ranker gives at most, where that depends on the task (BM25's).
    """

    found: Mapping[str, Ranking]
    most: Mapping[str, float]
    ranking: Ranking

    def evidence(self) -> Evidence:
        """What a calibration looks at."""
        best = {name: max((score for _, score in ranking), default=0.0) for name, ranking in self.found.items()}
        tops = {name: score / (self.most.get(name, 1.0) or 1.0) for name, score in best.items()}
        return Evidence([score for _, score in self.ranking], tops)

    def placed(self, skill_id: str) -> tuple[Placed, ...]:
        """Where the rankers put a skill."""
        rows = ((name, n, *pair) for name, ranking in self.found.items() for n, pair in enumerate(ranking, 1))
        return tuple(Placed(name, rank, score) for name, rank, other, score in rows if other == skill_id)
