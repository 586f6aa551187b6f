"""What a plan is worth, task by task (SkillWeaver, section 5.3).

Predicted and gold steps are compared place by place: the i-th predicted step answers for the i-th gold step, and a gold
step without one is missed. Where a benchmark does not say which skill does which step, measures by place are not
defined, and their keys are absent. Everything is a share of one task's steps or skills first, then a mean over tasks.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.records import Skill

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
Found = Sequence[Sequence[str]]
"""The ids found for each step, best first."""


def measure_names() -> tuple[str, ...]:
    """All measures in order, with their cutoffs."""
    cut = [
        [f"{name[:-1]}{k}" for k in CUTOFFS] if name.endswith("@k") else [name] for name in MEANINGS
    ]
    return tuple(chain.from_iterable(cut))


def plan_values(
    task: Task,
    found: Found,
    chosen: Sequence[str | None],
    oracle: Found,
    skills: Mapping[str, Skill],
    tokens: Mapping[str, int],
) -> dict[str, float]:
    """Measure → value of one task, where it is defined.

    `found` and `chosen` (None for no skill) are of each planned step, `oracle` is found for the gold steps' own words;
    `tokens` are of all `skills`.
    """
    num, num_gold = len(found), len(task.steps)
    used = sum(tokens[one] for one in {*chosen} if one)
    values = {"steps": float(num), "Context saved": 1 - used / max(1, sum(tokens.values()))}
    values |= _of_needs(task, found, chosen, oracle)
    if task.steps:
        values |= {"DA": float(num == num_gold), "DA±1": float(abs(num - num_gold) <= 1)}
        values |= {
            f"Step R@{k}": fmean(bool({*own[:1]} & _seen(found, k)) for own in oracle)
            for k in CUTOFFS
        }
    gold = [step.skill_id for step in task.steps]
    if not gold or not all(gold):
        return values
    kinds = {one: skill.category for one, skill in skills.items()}
    picked = [[one] if one else [] for one in chosen]
    for k in CUTOFFS:
        values |= {
            f"R@{k}": _by_place(gold, found, k),
            f"CatR@{k}": _by_place(gold, found, k, kinds),
        }
    share = _by_place(gold, picked, 1, kinds)
    return values | {
        "Chain exact": float([*chosen] == gold),
        "Chain category (share)": share,
        "Chain category (all)": float(share == 1 and num == num_gold),
        "Oracle R@1": _by_place(gold, oracle, 1),
        "Oracle CatR@1": _by_place(gold, oracle, 1, kinds),
    }


def _of_needs(
    task: Task, found: Found, chosen: Sequence[str | None], oracle: Found
) -> dict[str, float]:
    """What became of each gold skill, or of any of its alternatives."""
    needs = {skill_id: {skill_id} for skill_id in sorted(task.relevance.gold)}
    for skill_id, need in task.relevance.alternatives.items():
        needs[need].add(skill_id)

    def share(ids: set[str], *without: set[str]) -> float:
        """Of the needs, those that `ids` meet and nothing of `without` does."""
        return fmean(
            bool(need & ids) and not any(need & other for other in without)
            for need in needs.values()
        )

    picked, seen, by_oracle = (
        {one for one in chosen if one},
        _seen(found, None),
        _seen(oracle, None),
    )
    values = {f"Skill R@{k}": share(_seen(found, k)) for k in CUTOFFS}
    values |= {"Chosen": share(picked), "Lost in composition": share(seen, picked)}
    if task.steps:
        values["Oracle Skill R@10"] = share(_seen(oracle, 10))
        values["Lost in decomposition"] = share(by_oracle, picked, seen)
        values["Lost in retrieval"] = share({*chain(*needs.values())}, picked, seen, by_oracle)
    return values


def _seen(found: Found, k: int | None) -> set[str]:
    return {skill_id for own in found for skill_id in own[:k]}


def _by_place(
    gold: Sequence[str], found: Found, k: int, kinds: Mapping[str, str | None] | None = None
) -> float:
    """The share of `gold` among the first `k` found at their place; with `kinds`, of their categories."""
    hits = 0
    for one, own in zip(gold, found, strict=False):
        hits += (
            one in own[:k]
            if kinds is None
            else kinds[one] in {kinds[other] for other in own[:k]} - {None}
        )
    return hits / len(gold)
