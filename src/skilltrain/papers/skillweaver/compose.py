"""Choose a skill for each step of a plan (SkillWeaver, section 4.3, equation 4), and render plans.

The score of a candidate is alpha x similarity + (1 - alpha) x its mean compatibility with the
skills of earlier steps. The similarity is the ranker's score, rescaled to 0..1 over the candidates
of a step, so that any ranker will do. Texts of tasks and skills are untrusted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.evaluation.page import counted
from skilltrain.papers.skillweaver.rules import GIVES, TAKES, Round, dependencies, kinds_in
from skilltrain.records import Query, Ranking, Skill
from skilltrain.texts import printable, words_of

NUM_CANDIDATES = 10  # skills retrieved for a step, the largest cutoff of `plan_measures`
_LABEL_CHARS = 80
_MERMAID_SYNTAX = re.compile(r"[^\w .,:/()'’，。：-]")  # characters that a label escapes


class ComposeConfig(Config):
    """How one skill is chosen for each step."""

    alpha: float = Field(
        default=0.5, ge=0, le=1, description="weight of similarity; 1: compatibility does not count"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a plan.

    Attributes:
        text: The step in words.
        after: Positions of the earlier steps that it waits for.
        candidates: Retrieved skills, best first.
        skill: The chosen skill; None if nothing fits.
    """

    text: str
    after: tuple[int, ...]
    candidates: Ranking
    skill: Skill | None

    @property
    def skill_id(self) -> str | None:
        """Id of the chosen skill."""
        return self.skill.skill_id if self.skill else None


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a task, the rounds that led to them, and notes for the reader."""

    task: Query
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...]
    made_by: str
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> list[list[int]]:
        """Positions of steps that can be done at the same time, level by level."""
        level_of: list[int] = []
        levels: list[list[int]] = []
        for position, step in enumerate(self.steps):
            level = max((level_of[earlier] + 1 for earlier in step.after), default=0)
            level_of.append(level)
            if level == len(levels):
                levels.append([])
            levels[level].append(position)
        return levels


def compose(
    task: str,
    texts: Sequence[str],
    rankings: Sequence[Ranking],
    skills: Mapping[str, Skill],
    alpha: float,
) -> tuple[Step, ...]:
    """Return a step for each text, with one of the skills retrieved for it."""
    steps: list[Step] = []
    for text, after, ranking in zip(texts, dependencies(task, texts), rankings, strict=True):
        # BM25 gives every skill the score 0 if it knows no word of a text: no skill fits.
        candidates = ranking if any(score for _, score in ranking) else []
        earlier = [step.skill for step in steps if step.skill]
        skill = _best_skill(candidates, earlier, skills, alpha) if candidates else None
        steps.append(Step(text, after, candidates, skill))
    return tuple(steps)


def _best_skill(
    ranking: Ranking, earlier: Sequence[Skill], skills: Mapping[str, Skill], alpha: float
) -> Skill:
    """Return the skill with the highest total score; of equal ones the first."""
    scores = [score for _, score in ranking]
    lowest = min(scores)
    width = max(scores) - lowest

    def total(candidate: tuple[str, float]) -> float:
        skill_id, score = candidate
        similarity = (score - lowest) / width if width else 1.0
        if not earlier:
            return similarity
        fit = fmean(compatibility(skill, skills[skill_id]) for skill in earlier)
        return alpha * similarity + (1 - alpha) * fit

    return skills[max(ranking, key=total)[0]]


def compatibility(earlier: Skill, later: Skill) -> float:
    """Return how well one skill follows another, from 0 to 1.

    This is the mean of three shares: common categories (Jaccard), common words, and those kinds of
    data that the later skill takes which the earlier skill gives.
    """
    first = _traits(earlier)
    second = _traits(later)
    all_categories = first.categories | second.categories
    shares = (
        len(first.categories & second.categories) / max(1, len(all_categories)),
        len(first.words & second.words) / max(1, min(len(first.words), len(second.words))),
        len(first.gives & second.takes) / max(1, len(second.takes)),
    )
    return sum(shares) / 3


class _Traits(NamedTuple):
    """Traits of a skill, from its name and description; `gives` and `takes` are kinds of data."""

    categories: frozenset[str]
    words: frozenset[str]
    gives: frozenset[str]
    takes: frozenset[str]


@lru_cache(maxsize=20_000)
def _traits(skill: Skill) -> _Traits:
    # Short Latin words such as "the" tell nothing; a Chinese word is short.
    text = f"{skill.name}. {skill.description}"
    categories = (part.strip().lower() for part in (skill.category or "").split(","))
    words = (word for word in words_of(text) if len(word) > 3 or not word.isascii())
    return _Traits(
        frozenset(categories) - {""},
        frozenset(words),
        gives=kinds_in(text, GIVES),
        takes=kinds_in(text, TAKES),
    )


def plan_lines(plan: Plan, flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """Render a plan as lines, level by level: each step, what it waits for, and its skill."""
    levels = plan.levels
    num_steps = counted(len(plan.steps), "step")
    lines = [f"{num_steps} in {counted(len(levels), 'level')}, made by {plan.made_by}"]
    lines += [f"note: {printable(note)}" for note in plan.notes]
    for number, level in enumerate(levels, 1):
        lines.append(f"level {number}{', side by side' if len(level) > 1 else ''}")
        for position in level:
            step = plan.steps[position]
            line = f"  {position + 1}. {printable(step.text, 100)}"
            if step.after:
                line += f"  (after {', '.join(str(earlier + 1) for earlier in step.after)})"
            lines.append(line)
            if step.skill is None:
                lines.append("     → no skill fits")
                continue
            skill_id = step.skill.skill_id
            lines.append(f"     → {printable(step.skill.name, 60)}  ({printable(skill_id)})")
            for flag in flags.get(skill_id, ()):
                lines.append(f"     !! FLAGGED {flag.rule}: {flag.reason}")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Render a plan as JSON values. Steps are counted from 1."""
    steps = [
        {
            "step": number,
            "text": step.text,
            "depends_on": _from_one(step.after),
            "skill_id": step.skill_id,
            "name": step.skill and step.skill.name,
            "candidates": [
                {"skill_id": skill_id, "score": score} for skill_id, score in step.candidates
            ],
        }
        for number, step in enumerate(plan.steps, 1)
    ]
    return {
        "task": plan.task.text,
        "made_by": plan.made_by,
        "notes": plan.notes,
        "steps": steps,
        "levels": [_from_one(level) for level in plan.levels],
        "rounds": [
            {"steps": row.texts, "hints": row.hints, "jaccard": row.jaccard} for row in plan.rounds
        ],
    }


def _from_one(positions: Sequence[int]) -> list[int]:
    return [position + 1 for position in positions]


def plan_mermaid(plan: Plan) -> str:
    """Render a plan as a Mermaid flowchart."""

    def label(text: str) -> str:
        plain = printable(text, _LABEL_CHARS)
        return _MERMAID_SYNTAX.sub(lambda match: f"#{ord(match[0])};", plain)

    lines = ["flowchart TD"]
    for number, step in enumerate(plan.steps, 1):
        skill = label(step.skill.name) if step.skill else "no skill fits"
        lines.append(f'    s{number}["{number}. {label(step.text)}<br/>{skill}"]')
        lines += [f"    s{earlier} --> s{number}" for earlier in _from_one(step.after)]
    return "\n".join(lines)
