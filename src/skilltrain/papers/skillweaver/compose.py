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
        """Positions of the steps by level. Steps of one level can be done at the same time.

        A step that waits for no step is on level 0. Any other step is one level above the highest
        of the steps that it waits for.
        """
        level_by_step = []
        levels = []
        for position, step in enumerate(self.steps):
            level = max((level_by_step[earlier] + 1 for earlier in step.after), default=0)
            level_by_step.append(level)
            # A step only waits for earlier steps, so a new level is always the next one.
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
    """Choose a skill for each step of a task, in the order of the steps.

    The choice for a step depends on the skills that were chosen for earlier steps.

    Args:
        task: The whole task. The words between its steps tell which steps wait for each other.
        texts: The steps in words.
        rankings: Skills retrieved for each step.
        skills: Skills by id.
        alpha: Weight of similarity, 0 to 1. The rest is the weight of compatibility.

    Returns:
        The steps. A step has no skill if no skill fits.
    """
    steps = []
    for text, after, ranking in zip(texts, dependencies(task, texts), rankings, strict=True):
        # BM25 gives every skill the score 0 if it knows no word of a text: no skill fits.
        candidates = ranking if any(score for _, score in ranking) else []
        earlier_skills = [step.skill for step in steps if step.skill]
        skill = _best_skill(candidates, earlier_skills, skills, alpha) if candidates else None
        steps.append(Step(text, after, candidates, skill))
    return tuple(steps)


def _best_skill(
    ranking: Ranking, earlier_skills: Sequence[Skill], skills: Mapping[str, Skill], alpha: float
) -> Skill:
    """Return the skill with the highest total score (equation 4). The first one wins a tie.

    Args:
        ranking: Candidates of a step.
        earlier_skills: Skills chosen for earlier steps.
        skills: Skills by id.
        alpha: Weight of similarity. The rest is the weight of compatibility.
    """
    scores = [score for _, score in ranking]
    lowest = min(scores)
    width = max(scores) - lowest

    def total_score(candidate: tuple[str, float]) -> float:
        # Scale the scores of the step's candidates to 0..1. Equal scores all become 1.
        skill_id, score = candidate
        similarity = (score - lowest) / width if width else 1.0
        if not earlier_skills:
            return similarity
        fit = fmean(compatibility(earlier, skills[skill_id]) for earlier in earlier_skills)
        return alpha * similarity + (1 - alpha) * fit

    best_id, _ = max(ranking, key=total_score)
    return skills[best_id]


def compatibility(earlier: Skill, later: Skill) -> float:
    """Return how well one skill follows another, from 0 to 1.

    The value is the mean of three shares:

    - common categories (Jaccard),
    - common words, relative to the skill with fewer words,
    - kinds of data that the later skill takes and the earlier skill gives.
    """
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
    """Return the categories, words and kinds of data of a skill, from its name and description.

    For example, a skill described as "convert the csv to a chart" takes csv and gives chart.
    """
    text = f"{skill.name}. {skill.description}"
    # A skill may have several categories, separated by commas.
    categories = {name.strip().lower() for name in (skill.category or "").split(",")} - {""}
    # Short Latin words such as "the" tell nothing; a Chinese word is short.
    words = {word for word in words_of(text) if len(word) > 3 or not word.isascii()}
    return _Traits(
        frozenset(categories),
        frozenset(words),
        gives=kinds_in(text, near=GIVES),
        takes=kinds_in(text, near=TAKES),
    )


def plan_lines(plan: Plan, flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """Render a plan as lines, level by level: each step, what it waits for, and its skill.

    Args:
        plan: The plan.
        flags: Findings of the safety screening by skill id. They are shown below the skill.
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
    """Render a step as lines: its number and text, its skill, and the skill's flags.

    Args:
        position: Position of the step in the plan, from 0. The lines count steps from 1.
        step: The step.
        flags: Findings of the safety screening by skill id.
    """
    # Texts of tasks and skills are not trusted. `printable` makes them safe for a terminal.
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
        row = {
            "step": number,
            "text": step.text,
            "depends_on": _count_from_1(step.after),
            "skill_id": step.skill_id,
            "name": step.skill.name if step.skill else None,
            "candidates": candidates,
        }
        steps.append(row)
    # The decompositions of the task that led to the steps.
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
    """Render a plan as a Mermaid flowchart.

    Each step is a box with its text and its skill. An arrow leads to a step from each step that it
    waits for.
    """

    def escape(text: str) -> str:
        """Return a printable text without characters of Mermaid's syntax.

        For example, `a "b"` becomes `a #34;b#34;`, which Mermaid shows as `a "b"`.
        """
        plain = printable(text, _LABEL_CHARS)
        return _MERMAID_SYNTAX.sub(lambda match: f"#{ord(match[0])};", plain)

    lines = ["flowchart TD"]
    for number, step in enumerate(plan.steps, 1):
        skill = escape(step.skill.name) if step.skill else "no skill fits"
        lines.append(f'    s{number}["{number}. {escape(step.text)}<br/>{skill}"]')
        for position in step.after:  # of an earlier step, from 0
            lines.append(f"    s{position + 1} --> s{number}")
    return "\n".join(lines)
