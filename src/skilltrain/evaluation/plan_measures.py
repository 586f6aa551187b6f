"""What a plan is worth, task by task (SkillWeaver, section 5.3).

Predicted and gold steps are compared place by place: the i-th predicted step answers for the i-th gold step, and a gold
step without one is missed. Where a benchmark does not say which skill does which step, measures by place are not
defined, and their keys are absent. Everything is a share of one task's steps or skills first, then a mean over tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from skilltrain.evaluation.benchmarks.benchmark import Task

CUTOFFS = (1, 5, 10)
MEANINGS = {
    "DA": "1 if as many steps are planned as the gold plan has",
    "DA±1": "1 if the numbers differ by one at most",
    "steps": "how many steps are planned",
    "R@k": "share of the gold steps whose skill is among the first k found for the planned step at their place",
    "CatR@k": "the same for any skill of the gold skill's category",
    "Chain exact": "1 if the chosen skills are the gold skills, step by step",
    "Chain category (share)": "share of the gold steps with a chosen skill of their category (the paper's section 5.3)",
    "Chain category (all)": "1 if that share is 1 and DA is 1 (the caption of the paper's table 2)",
    "Skill R@k": "share of the gold skills among the first k found for any planned step",
    "Chosen": "share of the gold skills that are chosen for some step",
    "Step R@k": "share of the gold steps whose own first hit is among the first k found for some planned step",
    "Oracle R@1": "R@1 with the gold steps' own words as the plan",
    "Oracle CatR@1": "CatR@1 with the gold steps' own words as the plan",
    "Oracle Skill R@10": "Skill R@10 with the gold steps' own words as the plan",
    "Lost in composition": "share of the gold skills that were found for a planned step, and not chosen",
    "Lost in decomposition": "share found for no planned step, yet for a gold step's own words",
    "Lost in retrieval": "share found for neither, to the same depth",
    "Context saved": "1 - tokens of the chosen skills / tokens of all skills",
}


def measure_names() -> tuple[str, ...]:
    """All measures in order, with their cutoffs."""
    cut = [[f"{name[:-1]}{k}" for k in CUTOFFS] if name.endswith("@k") else [name] for name in MEANINGS]
    return tuple(chain.from_iterable(cut))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was planned for a task: the ids found for each step, best first, and the one chosen, None for none."""

    found: Sequence[Sequence[str]]
    chosen: Sequence[str | None]


def plan_values(
    task: Task,
    outcome: Outcome,
    oracle: Sequence[Sequence[str]],
    categories: Mapping[str, str | None],
    tokens: Mapping[str, int],
) -> dict[str, float]:
    """Measure → value of one task, where it is defined.

    `oracle` has what is found for the gold steps' own words, `categories` and `tokens` are of all skills.
    """
    gold_ids = [step.skill_id for step in task.steps]
    num, num_gold = len(outcome.found), len(gold_ids)
    used = sum(tokens[one] for one in {*outcome.chosen} - {None} if one)
    values = {"steps": float(num), "Context saved": 1 - used / max(1, sum(tokens.values()))}
    values |= _of_needs(task, outcome, oracle)
    if not task.steps:
        return values
    values |= {"DA": float(num == num_gold), "DA±1": float(abs(num - num_gold) <= 1)}
    first = [set(own[:1]) for own in oracle]
    values |= {f"Step R@{k}": _share([bool(one & _seen(outcome.found, k)) for one in first]) for k in CUTOFFS}
    if not all(gold_ids):
        return values
    kinds = [categories.get(one) for one in gold_ids]
    for k in CUTOFFS:
        values[f"R@{k}"] = _by_place(gold_ids, [own[:k] for own in outcome.found])
        values[f"CatR@{k}"] = _by_place(kinds, [[categories[one] for one in own[:k]] for own in outcome.found])
    chosen = [[] if one is None else [one] for one in outcome.chosen]
    share = _by_place(kinds, [[categories[one] for one in own] for own in chosen])
    values["Chain exact"] = float([*outcome.chosen] == gold_ids)
    values |= {"Chain category (share)": share, "Chain category (all)": float(share == 1 and num == num_gold)}
    values["Oracle R@1"] = _by_place(gold_ids, [own[:1] for own in oracle])
    values["Oracle CatR@1"] = _by_place(kinds, [[categories[one] for one in own[:1]] for own in oracle])
    return values


def _of_needs(task: Task, outcome: Outcome, oracle: Sequence[Sequence[str]]) -> dict[str, float]:
    """What became of each gold skill, or of any of its alternatives."""
    needs = {skill_id: {skill_id} for skill_id in sorted(task.relevance.gold)}
    for skill_id, need in task.relevance.alternatives.items():
        needs[need].add(skill_id)
    seen = {k: _seen(outcome.found, k) for k in CUTOFFS}
    values = {f"Skill R@{k}": _share([bool(need & seen[k]) for need in needs.values()]) for k in CUTOFFS}
    chosen = [bool(need & {*outcome.chosen}) for need in needs.values()]
    found = [bool(need & _seen(outcome.found, None)) for need in needs.values()]
    by_oracle = [bool(need & _seen(oracle, None)) for need in needs.values()]
    fates = list(zip(chosen, found, by_oracle, strict=True))
    values["Chosen"] = _share(chosen)
    values["Lost in composition"] = _share([not c and f for c, f, _ in fates])
    if task.steps:
        values["Oracle Skill R@10"] = _share([bool(need & _seen(oracle, 10)) for need in needs.values()])
        values["Lost in decomposition"] = _share([not c and not f and o for c, f, o in fates])
        values["Lost in retrieval"] = _share([not (c or f or o) for c, f, o in fates])
    return values


def _seen(found: Sequence[Sequence[str]], k: int | None) -> set[str]:
    return {skill_id for own in found for skill_id in own[:k]}


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


def _by_place(wanted: Sequence[str | None], found: Sequence[Sequence[str | None]]) -> float:
    """The share of `wanted` that stand in what was found at their place."""
    hits = sum(one is not None and one in own for one, own in zip(wanted, found, strict=False))
    return hits / len(wanted)
