"""Choose a skill for each step of a plan (SkillWeaver, section 4.3, equation 4), and render plans.

The score of a candidate is alpha x similarity + (1 - alpha) x its mean compatibility with the
skills of earlier steps. The similarity is the ranker's score, rescaled to 0..1 over the candidates
of a step, so that any ranker will do. Texts of tasks and skills are untrusted.

The compatibility of two skills is the mean of three shares:

- common categories (Jaccard),
- common words, relative to the skill with fewer words,
- kinds of data that the later skill takes and the earlier skill gives.

Notes:
    - BM25 gives every skill the score 0 if it knows no word of a text. Then no skill fits.
    - Short Latin words such as "the" tell nothing about a skill. A Chinese word is always short.
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
    """How a skill is chosen for each step."""

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
    """The plan of a task.

    Attributes:
        task: The task.
        steps: Steps of the plan.
        rounds: Decompositions that led to the steps, the last one included.
        made_by: Kind of the decomposer, or `rules` if a model failed.
        notes: Notes for the reader.
    """

    task: Query
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...]
    made_by: str
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> list[list[int]]:
        """Positions of the steps by level. Steps of one level can be done at the same time."""
        level_by_step = []
        levels = []
        for position, step in enumerate(self.steps):
            level = max((level_by_step[earlier] + 1 for earlier in step.after), default=0)
            level_by_step.append(level)
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
    """Choose a skill for each step of a task. A step has no skill if all its scores are 0.

    Args:
        task: The whole task.
        texts: The steps in words.
        rankings: Skills retrieved for each step.
        skills: Skills by id.
        alpha: Weight of similarity against compatibility.
    """
    steps = []
    for text, after, ranking in zip(texts, dependencies(task, texts), rankings, strict=True):
        scores = [score for _, score in ranking]
        candidates = ranking if any(scores) else []
        earlier_skills = [step.skill for step in steps if step.skill]
        skill = _best_skill(candidates, earlier_skills, skills, alpha) if candidates else None
        steps.append(Step(text, after, candidates, skill))
    return tuple(steps)


def _best_skill(
    ranking: Ranking, earlier_skills: Sequence[Skill], skills: Mapping[str, Skill], alpha: float
) -> Skill:
    """Return the skill with the highest total score. The first one wins a tie.

    Args:
        ranking: Candidates of a step.
        earlier_skills: Skills chosen for earlier steps.
        skills: Skills by id.
        alpha: Weight of similarity against compatibility.
    """
    scores = [score for _, score in ranking]
    lowest = min(scores)
    width = max(scores) - lowest

    def total_score(candidate: tuple[str, float]) -> float:
        skill_id, score = candidate
        similarity = (score - lowest) / width if width else 1.0
        if not earlier_skills:
            return similarity
        fit = fmean(compatibility(earlier, skills[skill_id]) for earlier in earlier_skills)
        return alpha * similarity + (1 - alpha) * fit

    best_id, _ = max(ranking, key=total_score)
    return skills[best_id]


def compatibility(earlier: Skill, later: Skill) -> float:
    """Return how well one skill follows another, from 0 to 1."""
    first = _traits(earlier)
    second = _traits(later)
    num_categories = len(first.categories | second.categories)
    num_words = min(len(first.words), len(second.words))
    shares = (
        len(first.categories & second.categories) / max(1, num_categories),
        len(first.words & second.words) / max(1, num_words),
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
    """Return the traits of a skill."""
    text = f"{skill.name}. {skill.description}"
    categories = {name.strip().lower() for name in (skill.category or "").split(",")} - {""}
    words = {word for word in words_of(text) if len(word) > 3 or not word.isascii()}
    return _Traits(
        frozenset(categories),
        frozenset(words),
        gives=kinds_in(text, GIVES),
        takes=kinds_in(text, TAKES),
    )


def plan_lines(plan: Plan, flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """Render a plan as lines, level by level: each step, what it waits for, and its skill.

    Args:
        plan: The plan.
        flags: Findings of the safety screening by skill id.
    """
    levels = plan.levels
    num_steps = counted(len(plan.steps), "step")
    lines = [f"{num_steps} in {counted(len(levels), 'level')}, made by {plan.made_by}"]
    lines += [f"note: {printable(note)}" for note in plan.notes]
    for number, level in enumerate(levels, 1):
        lines.append(f"level {number}{', side by side' if len(level) > 1 else ''}")
        for position in level:
            lines += _step_lines(position, plan.steps[position], flags)
    return lines


def _step_lines(position: int, step: Step, flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """Render a step as lines: its number and text, its skill, and the skill's flags."""
    line = f"  {position + 1}. {printable(step.text, 100)}"
    if step.after:
        line += f"  (after {', '.join(map(str, _count_from_1(step.after)))})"
    if step.skill is None:
        return [line, "     → no skill fits"]

    skill_id = step.skill.skill_id
    lines = [line, f"     → {printable(step.skill.name, 60)}  ({printable(skill_id)})"]
    for flag in flags.get(skill_id, ()):
        lines.append(f"     !! FLAGGED {flag.rule}: {flag.reason}")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Render a plan as JSON values. Steps are counted from 1."""
    steps = []
    for number, step in enumerate(plan.steps, 1):
        candidates = [{"skill_id": skill_id, "score": score} for skill_id, score in step.candidates]
        steps.append(
            {
                "step": number,
                "text": step.text,
                "depends_on": _count_from_1(step.after),
                "skill_id": step.skill_id,
                "name": step.skill.name if step.skill else None,
                "candidates": candidates,
            }
        )
    rounds = [
        {"steps": row.texts, "hints": row.hints, "jaccard": row.jaccard} for row in plan.rounds
    ]
    return {
        "task": plan.task.text,
        "made_by": plan.made_by,
        "notes": plan.notes,
        "steps": steps,
        "levels": [_count_from_1(level) for level in plan.levels],
        "rounds": rounds,
    }


def _count_from_1(positions: Sequence[int]) -> list[int]:
    """Return numbers that are counted from 1 for positions that are counted from 0."""
    return [position + 1 for position in positions]


def plan_mermaid(plan: Plan) -> str:
    """Render a plan as a Mermaid flowchart."""

    def escape(text: str) -> str:
        """Return a printable text without characters of Mermaid's syntax."""
        plain = printable(text, _LABEL_CHARS)
        return _MERMAID_SYNTAX.sub(lambda match: f"#{ord(match[0])};", plain)

    lines = ["flowchart TD"]
    for number, step in enumerate(plan.steps, 1):
        skill = escape(step.skill.name) if step.skill else "no skill fits"
        lines.append(f'    s{number}["{number}. {escape(step.text)}<br/>{skill}"]')
        for position in step.after:  # of an earlier step, from 0
            lines.append(f"    s{position + 1} --> s{number}")
    return "\n".join(lines)
