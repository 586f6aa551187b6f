"""What a router answers: skills, why these, and how sure it may be of them.

A skill's probability is a logistic function (Platt, 1999) of a few features, none of which may lower it when it rises.
Within a task only the skill's own score and its lead differ, so that probabilities fall with rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.records import Ranking


@dataclass(frozen=True)
class Placed:
    """Where a ranker put a skill, and its own score for it. Ranks count from 1."""

    ranker: str
    rank: int
    score: float


@dataclass(frozen=True)
class Why:
    """Why a skill was answered.

    `placed` is by ranker, over the pool where it looks at all of it; `terms` are words of the task that the skill
    holds, those that count most first; `window` is the part of its body (start, end) that is nearest to the task.
    """

    placed: tuple[Placed, ...]
    terms: tuple[str, ...]
    window: tuple[int, int] | None

    def __str__(self) -> str:
        ranks = ", ".join(f"{placed.ranker} {placed.rank}" for placed in self.placed)
        return f"ranks: {ranks}" + (f"; words: {', '.join(self.terms)}" if self.terms else "")


@dataclass(frozen=True)
class RoutedSkill:
    """One skill of an answer. Its texts are untrusted; `flags` has the first find of each rule of the screening."""

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
    """The best skills for a task, and whether any `fits`, as far as a calibrated router can tell.

    `num_likely` of the first skills hold one that serves the task, with the chance that the calibration was asked for
    (conformal prediction); it may be more than there are in `skills`, and is None without a calibration.
    """

    skills: tuple[RoutedSkill, ...]
    fits: bool
    num_likely: int | None


@dataclass(frozen=True)
class Traced:
    """What each ranker made of a task, by its name (those that are fused, one by one), and the last ranking.

    `most` is the score that a ranker gives at most, where that depends on the task, as BM25's does on its length.
    """

    found: Mapping[str, Ranking]
    most: Mapping[str, float]
    ranking: Ranking

    def placed(self, skill_id: str) -> tuple[Placed, ...]:
        """Where the rankers put a skill."""
        rows = (
            (name, n, *pair)
            for name, ranking in self.found.items()
            for n, pair in enumerate(ranking, 1)
        )
        return tuple(
            Placed(name, rank, score) for name, rank, other, score in rows if other == skill_id
        )

    def tops(self, rankers: Sequence[str]) -> list[float]:
        """The best score that each of `rankers` gave, as a share of its most."""
        best = {
            name: max((score for _, score in self.found[name]), default=0.0) for name in rankers
        }
        return [best[name] / (self.most.get(name, 1.0) or 1.0) for name in rankers]

    def rows(self, rankers: Sequence[str]) -> Float64[np.ndarray, "skill feature"]:
        """For each ranked skill its score, its lead over the best of the others, and the tops of `rankers`."""
        scores = np.array([score for _, score in self.ranking])
        leads = scores - scores[:1]
        leads[:1] = -leads[1:2].sum()  # the first one's over the second, 0 where there is none
        return np.column_stack([scores, leads, np.tile(self.tops(rankers), (len(scores), 1))])


class Calibrator(Config):
    """Probabilities of a router's answers, and what follows from them.

    `weights` are of score, lead and the tops of `rankers`. A task is answered where the first skill's probability is
    `threshold` at least, and no top is below its `least`: of a task unlike all that skills serve, too, some skill
    stands out among the others. `miss` is the most that 1 - probability may be of a skill in the likely set.
    """

    rankers: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    threshold: float
    least: tuple[float, ...]
    miss: float

    def probabilities(self, traced: Traced) -> Float64[np.ndarray, " skill"]:
        """The probability of each ranked skill that it serves the task."""
        logits = traced.rows(self.rankers) @ np.array(self.weights) + self.intercept
        return (1 + np.tanh(logits / 2)) / 2  # the logistic function, without overflow

    def fits(self, traced: Traced) -> bool:
        """Whether any skill serves the task."""
        is_like = all(
            top >= least for top, least in zip(traced.tops(self.rankers), self.least, strict=True)
        )
        return is_like and bool(max(self.probabilities(traced), default=-1.0) >= self.threshold)

    def num_likely(self, traced: Traced) -> int:
        """How many of the first skills hold one that serves the task, with the chance that was asked for."""
        return int(np.count_nonzero(1 - self.probabilities(traced) <= self.miss))


class Calibration(Config):
    """What the stage calibrate writes, and an index holds: a calibrator, and the rankers and models that it is for."""

    system: list[dict[str, Any]]
    models: dict[str, str]
    calibrator: Calibrator
    num_queries: int
    figures: dict[str, Any]
