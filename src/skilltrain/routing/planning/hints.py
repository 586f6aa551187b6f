"""Skill-Aware Decomposition: what was found for the steps goes back to the model as hints (SkillWeaver, section 4.4).

A round is a set of steps, the hints found for them, and how much these are the hints of the round before (Jaccard). The
paper stops above .6, which its own rounds (.32, .47, .52) never reach: there, the number of rounds is what stops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Query, Ranking, Skill
from skilltrain.routing.planning.rules import Draft

Find = Callable[[Sequence[str], int], list[Ranking]]
"""(texts, how many) → the skills that are found for each text."""


class HintsConfig(Config):
    """Hints for a chat model that writes steps; other decomposers take none."""

    count: int = Field(default=15, ge=1, description="skills named to the model (H)")
    rounds: int = Field(default=1, ge=0, description="how often it plans anew at most (T); 0: without hints")
    stop_above: float = Field(default=0.6, ge=0, le=1, description="Jaccard of two rounds' hints that ends it (tau)")
    show: Literal["names", "described"] = Field(default="names", description="what the model sees of a hint")
    description_chars: int = Field(default=140, ge=1, description="how much of a description, where it is shown")


@dataclass(frozen=True, slots=True)
class Round:
    """The steps of a round, the hints found for them, and their Jaccard with those of the round before."""

    draft: Draft
    hints: tuple[str, ...] = ()
    jaccard: float | None = None


def refine(
    config: HintsConfig,
    tasks: Sequence[Query],
    first: Mapping[str, Draft],
    redraft: Callable[[Sequence[Query], Mapping[str, Sequence[str]]], Mapping[str, Draft]],
    find: Find,
) -> dict[str, tuple[Round, ...]]:
    """query_id → every round, the last one to be used.

    `redraft` plans tasks anew with hints (query_id → skill ids); a task that it gives no steps for keeps those it has.
    """
    rounds = {query_id: [Round(draft)] for query_id, draft in first.items()}
    active = [task for task in tasks if task.query_id in first]
    for number in range(config.rounds + 1):
        going: list[Query] = []
        for task, hints in zip(active, _hints(config.count, rounds, active, find), strict=True):
            own = rounds[task.query_id]
            alike = jaccard(hints, own[-2].hints) if number else None
            own[-1] = replace(own[-1], hints=hints, jaccard=alike)
            going += [task] if hints and (alike is None or alike <= config.stop_above) else []
        if number == config.rounds or not going:
            break
        drafts = redraft(going, {task.query_id: rounds[task.query_id][-1].hints for task in going})
        active = [task for task in going if task.query_id in drafts]
        for task in active:
            rounds[task.query_id].append(Round(drafts[task.query_id]))
    return {query_id: tuple(own) for query_id, own in rounds.items()}


def _hints(
    count: int, rounds: Mapping[str, Sequence[Round]], tasks: Sequence[Query], find: Find
) -> list[tuple[str, ...]]:
    """The hints of each task: every step's first skill comes before any step's second, `count` in all."""
    texts = [rounds[task.query_id][-1].draft.texts for task in tasks]
    found = iter(find([text for own in texts for text in own], count) if texts else [])
    hints: list[tuple[str, ...]] = []
    for own in texts:
        rankings = [next(found) for _ in own]
        by_rank = [row[place][0] for place in range(count) for row in rankings if place < len(row)]
        hints.append(tuple(dict.fromkeys(by_rank))[:count])
    return hints


def jaccard(one: Sequence[str], other: Sequence[str]) -> float:
    """How much two sets have in common, from 0 to 1; two empty ones are 0."""
    return len({*one} & {*other}) / max(1, len({*one} | {*other}))


def hint_lines(config: HintsConfig, skill_ids: Sequence[str], skills: Mapping[str, Skill]) -> list[str]:
    """What the model sees of hints."""
    found = [skills[skill_id] for skill_id in skill_ids]
    if config.show == "names":
        return [", ".join(untrusted_line(skill.name) for skill in found)]
    return [described(skill, config.description_chars) for skill in found]


def described(skill: Skill, max_chars: int) -> str:
    """A skill on one line, fit for a prompt."""
    return f"{untrusted_line(skill.name)}: {untrusted_line(skill.description, max_chars)}"
