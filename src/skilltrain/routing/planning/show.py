"""A plan for people and programs: lines for a terminal, JSON, and a Mermaid flowchart. Texts are untrusted."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skilltrain.data.screening import Flag
from skilltrain.records import Skill
from skilltrain.routing.planning.compose import Plan
from skilltrain.texts import printable

_NOT_PLAIN = re.compile(r"[^\w .,:/()'’，。：-]")  # what could end a label or begin a tag in Mermaid
_LABEL_CHARS = 80


def plan_lines(plan: Plan, skills: Mapping[str, Skill], flags: Mapping[str, Sequence[Flag]]) -> list[str]:
    """The plan as a graph in lines: each step below its level, what it waits for, and its skill."""
    num, levels = len(plan.steps), plan.levels
    lines = [f"{num} step{'s' * (num != 1)} in {len(levels)} level{'s' * (len(levels) != 1)}, made by {plan.made_by}"]
    lines += [f"note: {printable(note)}" for note in plan.notes]
    for number, level in enumerate(levels, 1):
        together = ", side by side" if len(level) > 1 else ""
        lines.append(f"level {number}{together}")
        for place in level:
            step = plan.steps[place]
            waits = f"  (after {', '.join(str(other + 1) for other in step.after)})" if step.after else ""
            lines.append(f"  {place + 1}. {printable(step.text, 100)}{waits}")
            skill = skills[step.skill_id] if step.skill_id else None
            named = f"{printable(skill.name, 60)}  ({printable(skill.skill_id)})" if skill else "no skill fits"
            lines.append(f"     → {named}")
            lines += [f"     !! FLAGGED {flag.rule}: {flag.reason}" for flag in flags.get(step.skill_id or "", ())]
    return lines


def plan_json(plan: Plan, skills: Mapping[str, Skill]) -> dict[str, Any]:
    """The plan as JSON values; steps count from 1."""
    steps = [
        {"step": number, "text": step.text, "depends_on": [place + 1 for place in step.after],
         "skill_id": step.skill_id, "name": skills[step.skill_id].name if step.skill_id else None,
         "candidates": [{"skill_id": skill_id, "score": score} for skill_id, score in step.candidates]}
        for number, step in enumerate(plan.steps, 1)
    ]  # fmt: skip
    rounds = [{"steps": list(one.draft.texts), "hints": list(one.hints), "jaccard": one.jaccard} for one in plan.rounds]
    levels = [[place + 1 for place in level] for level in plan.levels]
    return {"task": plan.task.text, "made_by": plan.made_by, "notes": list(plan.notes), "steps": steps,
            "levels": levels, "rounds": rounds}  # fmt: skip


def plan_mermaid(plan: Plan, skills: Mapping[str, Skill]) -> str:
    """The plan as a Mermaid flowchart."""
    lines = ["flowchart TD"]
    for number, step in enumerate(plan.steps, 1):
        skill = _label(skills[step.skill_id].name) if step.skill_id else "no skill fits"
        lines.append(f'    s{number}["{number}. {_label(step.text)}<br/>{skill}"]')
        lines += [f"    s{place + 1} --> s{number}" for place in step.after]
    return "\n".join(lines)


def _label(text: str) -> str:
    """A text on one line, with all that Mermaid could read as its own written as numbers."""
    return _NOT_PLAIN.sub(lambda found: f"#{ord(found[0])};", printable(text, _LABEL_CHARS))
