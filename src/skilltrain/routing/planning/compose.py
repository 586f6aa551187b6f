"""Plans: a skill for each step (SkillWeaver, section 4.3, equation 4), and how they are shown.

A candidate's score is alpha x similarity + (1 - alpha) x its mean compatibility with the skills of earlier steps. The
similarity is the ranker's score, stretched from 0 to 1 over a step's candidates, so that any ranker will do. Texts of
tasks and skills are untrusted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.screening import Flag
from skilltrain.records import Query, Ranking, Skill
from skilltrain.report.page import counted
from skilltrain.routing.planning.rules import GIVES, TAKES, Round, dependencies, kinds_in
from skilltrain.texts import printable, words_of

_NOT_PLAIN = re.compile(
    r"[^\w .,:/()'’，。：-]"
)  # what Mermaid could read as its own: written as a number
_LABEL_CHARS = 80


class ComposeConfig(Config):
    """How one skill is chosen for each step."""

    alpha: float = Field(
        default=0.5, ge=0, le=1, description="weight of similarity; 1: compatibility does not count"
    )
    candidates: int = Field(
        default=10, ge=1, description="skills found for a step, of which one is chosen"
    )
    min_score: float | None = Field(
        default=None, description="the least score of a skill that fits; null: any but 0"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A step, those that it waits for (from 0), what was found for it, and the chosen skill; None: nothing fits."""

    text: str
    after: tuple[int, ...]
    candidates: tuple[tuple[str, float], ...]
    skill: Skill | None

    @property
    def skill_id(self) -> str | None:
        return self.skill and self.skill.skill_id


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a task, how they came about round by round, and notes for whoever reads it."""

    task: Query
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...]
    made_by: str
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> list[list[int]]:
        """Which steps (from 0) can be done at once, level after level; no circle, for steps wait for earlier ones."""
        level: list[int] = []
        for step in self.steps:
            level.append(max((level[earlier] + 1 for earlier in step.after), default=0))
        return [
            [place for place, own in enumerate(level) if own == number]
            for number in range(max(level) + 1)
        ]


def compose(
    task: str,
    texts: Sequence[str],
    found: Sequence[Ranking],
    skills: Mapping[str, Skill],
    config: ComposeConfig,
) -> tuple[Step, ...]:
    """A step for each text, with one of the skills that were `found` for it."""
    steps: list[Step] = []
    for text, waits, ranking in zip(texts, dependencies(task, texts), found, strict=True):
        fitting = [
            pair for pair in ranking if config.min_score is None or pair[1] >= config.min_score
        ]
        if not any(score for _, score in fitting):  # BM25 scores 0 where it knows no word of a text
            fitting = []
        before = [step.skill for step in steps if step.skill]
        chosen = skills[_best(fitting, before, skills, config.alpha)] if fitting else None
        steps.append(Step(text, waits, tuple(fitting), chosen))
    return tuple(steps)


def _best(
    ranking: Ranking, before: Sequence[Skill], skills: Mapping[str, Skill], alpha: float
) -> str:
    """The skill with the highest score, of equal ones the first."""
    scores = [score for _, score in ranking]
    low, width = min(scores), max(scores) - min(scores)
    total = {skill_id: (score - low) / width if width else 1.0 for skill_id, score in ranking}
    if before:
        for skill_id, similarity in total.items():
            fit = fmean(compatibility(one, skills[skill_id]) for one in before)
            total[skill_id] = alpha * similarity + (1 - alpha) * fit
    return max(total, key=total.__getitem__)


def compatibility(earlier: Skill, later: Skill) -> float:
    """How well one skill follows another, from 0 to 1: the mean of three shares.

    These are of categories in common (Jaccard), of words in common, and of what the later takes and the earlier gives.
    """
    (ours, words, gives, _), (theirs, others, _, takes) = _traits(earlier), _traits(later)
    categories = len(ours & theirs) / max(1, len(ours | theirs))
    shared = len(words & others) / max(1, min(len(words), len(others)))
    return (categories + shared + len(gives & takes) / max(1, len(takes))) / 3


@lru_cache(maxsize=20_000)
def _traits(skill: Skill) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """(categories, words, kinds of data that it gives, those that it takes) as its name and description tell."""
    said = f"{skill.name}. {skill.description}"
    categories = frozenset(
        part.strip().lower() for part in (skill.category or "").split(",") if part.strip()
    )
    words = frozenset(word for word in words_of(said) if len(word) > 3 or not word.isascii())
    return categories, words, kinds_in(said, GIVES), kinds_in(said, TAKES)


def plan_lines(plan: Plan, flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """The plan as a graph in lines: each step below its level, what it waits for, and its skill."""
    levels = plan.levels
    lines = [
        f"{counted(len(plan.steps), 'step')} in {counted(len(levels), 'level')}, made by {plan.made_by}"
    ]
    lines += [f"note: {printable(note)}" for note in plan.notes]
    for number, level in enumerate(levels, 1):
        lines.append(f"level {number}{', side by side' if len(level) > 1 else ''}")
        for place in level:
            step, skill = plan.steps[place], plan.steps[place].skill
            waits = (
                f"  (after {', '.join(str(other + 1) for other in step.after)})"
                if step.after
                else ""
            )
            named = (
                f"{printable(skill.name, 60)}  ({printable(skill.skill_id)})"
                if skill
                else "no skill fits"
            )
            lines += [f"  {place + 1}. {printable(step.text, 100)}{waits}", f"     → {named}"]
            lines += [
                f"     !! FLAGGED {flag.rule}: {flag.reason}"
                for flag in flags.get(step.skill_id or "", ())
            ]
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; steps count from 1."""
    steps = [
        {
            "step": number,
            "text": step.text,
            "depends_on": [place + 1 for place in step.after],
            "skill_id": step.skill_id,
            "name": step.skill and step.skill.name,
            "candidates": [
                {"skill_id": skill_id, "score": score} for skill_id, score in step.candidates
            ],
        }
        for number, step in enumerate(plan.steps, 1)
    ]
    rounds = [
        {"steps": list(one.texts), "hints": list(one.hints), "jaccard": one.jaccard}
        for one in plan.rounds
    ]
    levels = [[place + 1 for place in level] for level in plan.levels]
    told = {"task": plan.task.text, "made_by": plan.made_by, "notes": list(plan.notes)}
    return told | {"steps": steps, "levels": levels, "rounds": rounds}


def plan_mermaid(plan: Plan) -> str:
    """The plan as a Mermaid flowchart."""

    def label(text: str) -> str:
        return _NOT_PLAIN.sub(lambda found: f"#{ord(found[0])};", printable(text, _LABEL_CHARS))

    lines = ["flowchart TD"]
    for number, step in enumerate(plan.steps, 1):
        skill = label(step.skill.name) if step.skill else "no skill fits"
        lines.append(f'    s{number}["{number}. {label(step.text)}<br/>{skill}"]')
        lines += [f"    s{place + 1} --> s{number}" for place in step.after]
    return "\n".join(lines)
