"""Answers of a router: skills, why they were chosen, and how certain the router is.

The probability that a skill serves a task is a logistic function of a few features (Platt, 1999). A
higher feature never lowers it. Only two features differ between the skills of one task: the score
and the lead. So probabilities fall with rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.formats import CALIBRATION
from skilltrain.metrics.refusal import Logistic, score_features
from skilltrain.records import Ranking
from skilltrain.texts import visible


@dataclass(frozen=True)
class RankerScore:
    """Rank (from 1) and score of a skill in the ranking of one ranker."""

    ranker: str
    rank: int
    score: float


@dataclass(frozen=True)
class Explanation:
    """Why a skill was chosen.

    Attributes:
        placed: Rank and score by each ranker that found the skill. If a ranker ranks both the whole
            pool and a few candidates, its ranking of the pool counts.
        terms: Words of the task that the skill contains, most important first.
        window: Start and end of the part of the body that is most similar to the task.
    """

    placed: tuple[RankerScore, ...]
    terms: tuple[str, ...]
    window: tuple[int, int] | None

    def __str__(self) -> str:
        text = "ranks: " + ", ".join(f"{entry.ranker} {entry.rank}" for entry in self.placed)
        if self.terms:
            text += f"; words: {', '.join(self.terms)}"
        return text


@dataclass(frozen=True)
class RoutedSkill:
    """One skill of an answer. Its texts are untrusted.

    Attributes:
        path: Absolute path of its SKILL.md, if the router knows the file.
        folder: Absolute path of the folder of `path`, which may hold scripts and other files.
        score: Score of the last ranker.
        probability: Probability that the skill serves the task. None without a calibration.
        why: Why the skill was chosen.
        flags: First finding of each rule of the safety screening.
    """

    rank: int
    skill_id: str
    name: str
    description: str
    path: Path | None
    folder: Path | None
    score: float
    probability: float | None
    why: Explanation
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Answer:
    """The best skills for a task.

    Attributes:
        skills: Best skills first.
        fits: Whether any skill serves the task. Without a calibration, whether there is any skill.
        num_likely: Number of skills, from the first on, that contain one that serves the task, with
            the certainty that the calibration was asked for (conformal prediction). It may exceed
            `len(skills)`, and is None without a calibration.
    """

    skills: tuple[RoutedSkill, ...]
    fits: bool
    num_likely: int | None

    def _repr_html_(self) -> str:
        """Return a table of the skills, which notebooks show. Texts of skills are escaped."""
        # Only a router with a calibration sets `num_likely` and the probabilities of skills.
        has_probabilities = self.num_likely is not None
        number = "probability" if has_probabilities else "score"
        rows = [f"<tr><th>rank</th><th>skill</th><th>{number}</th><th>description</th></tr>"]
        for skill in self.skills:
            value = f"{skill.probability if has_probabilities else skill.score:.3f}"
            cells = [str(skill.rank), skill.skill_id, value, skill.description]
            row = "".join(f"<td>{escape(visible(cell))}</td>" for cell in cells)
            rows.append(f"<tr>{row}</tr>")
        note = "" if self.fits else "<p>No skill fits. These are the nearest.</p>"
        return f"{note}<table>{''.join(rows)}</table>"


@dataclass(frozen=True)
class Trace:
    """Rankings of all rankers for one task.

    Attributes:
        rankings_by_ranker: Ranking by each ranker. Rankers that are fused have one each.
        max_score_by_ranker: Highest score that a ranker can give for this task, where it depends on
            the task. BM25's depends on the length of the task.
        ranking: Final ranking.
    """

    rankings_by_ranker: Mapping[str, Ranking]
    max_score_by_ranker: Mapping[str, float]
    ranking: Ranking

    def ranker_scores(self, skill_id: str) -> tuple[RankerScore, ...]:
        """Return rank and score of a skill by each ranker that found it."""
        entries = []
        for ranker, ranking in self.rankings_by_ranker.items():
            # Rankers count from 1. A ranker that did not find the skill adds no entry.
            for rank, (ranked_id, score) in enumerate(ranking, 1):
                if ranked_id == skill_id:
                    entries.append(RankerScore(ranker, rank, score))
        return tuple(entries)

    def top_scores(self, rankers: Sequence[str]) -> list[float]:
        """Return the best score of each ranker, scaled so that long tasks do not score higher.

        BM25 gives higher scores to longer tasks. Its best score is divided by the square root of
        the highest score that is possible for the task.

        Args:
            rankers: Names of rankers whose rankings the trace holds.
        """
        top_scores: list[float] = []
        for ranker in rankers:
            scores = [score for _, score in self.rankings_by_ranker[ranker]]
            top_score = max(scores, default=0.0)
            # Only BM25 has an entry here. The scores of other rankers are divided by 1.
            max_score = self.max_score_by_ranker.get(ranker, 1.0)
            has_words = max_score > 0  # BM25 cannot score a task without words
            if has_words:
                top_score /= max_score**0.5
            top_scores.append(top_score)
        return top_scores

    def features(self, rankers: Sequence[str]) -> np.ndarray:
        """Return the features of each skill of the final ranking, [skill, feature].

        They are its score and lead (see `score_features`), and `top_scores(rankers)`.

        Args:
            rankers: Names of the rankers whose top scores are features.
        """
        scores = score_features([score for _, score in self.ranking])
        # Top scores belong to the task, so all skills have the same ones: [skill, ranker].
        top_scores = np.tile(self.top_scores(rankers), (len(scores), 1))
        return np.column_stack([scores, top_scores])


class Calibrator(Config):
    """Turns the scores of a trace into probabilities, and decides whether a skill fits.

    Features are score, lead, and the top scores of `rankers` (see `Trace.features`).

    Attributes:
        rankers: Rankers whose top scores are features.
        serves: Probability that a certain skill serves a task, from the skill's features.
        miss: Highest value of 1 - probability for a skill of the likely set.
        fits: Probability that any skill serves a task, from the features of the first skill.
        threshold: Lowest probability of any skill for which a task is answered.
    """

    rankers: tuple[str, ...]
    serves: Logistic
    miss: float = Field(ge=0, le=1)
    fits: Logistic
    threshold: float = Field(ge=0, le=1)

    @model_validator(mode="after")
    def _one_weight_for_each_feature(self) -> "Calibrator":
        """Check that both logistic functions have a weight for each feature."""
        num_features = 2 + len(self.rankers)  # score, lead, and the top score of each ranker
        # A file may hold any number of weights, but each feature needs one.
        for logistic in (self.serves, self.fits):
            num_weights = len(logistic.weights)
            if num_weights != num_features:
                problem = f"{len(self.rankers)} rankers need {num_features} weights"
                raise ValueError(f"{problem}, and there are {num_weights}")
        return self

    def probabilities(self, trace: Trace) -> np.ndarray:
        """Return the probability of each skill of the final ranking that it serves the task."""
        return self.serves.probabilities(trace.features(self.rankers))

    def fit_probability(self, trace: Trace) -> float:
        """Return the probability that any skill serves the task. It is 0 without a skill."""
        return self.fits.first_probability(trace.features(self.rankers))

    def answers(self, trace: Trace) -> bool:
        """Return whether the router answers the task, because some skill probably serves it."""
        return bool(trace.ranking) and self.fit_probability(trace) >= self.threshold

    def num_likely(self, trace: Trace) -> int:
        """Return the size of the likely set; see `Answer.num_likely`."""
        is_likely = 1 - self.probabilities(trace) <= self.miss
        return int(np.count_nonzero(is_likely))


class Calibration(Config):
    """Calibration of an index, as the stage `calibrate` writes it.

    Attributes:
        system: Rankers that were calibrated.
        models: Fingerprints of their models.
        calibrator: Fitted calibrator.
        num_queries: Number of queries that it was fitted to.
        figures: Metrics of the calibration.
        format: Number of the format. Features of another format have other values.
    """

    system: list[dict[str, Any]]
    models: dict[str, str]
    calibrator: Calibrator
    num_queries: int = Field(ge=1)
    figures: dict[str, Any]
    format: int = CALIBRATION.number
