"""Measures of a plan, task by task (SkillWeaver, section 5.3).

The i-th planned step is compared with the i-th gold step. A gold step without a planned step counts
as missed. Where a benchmark does not say which skill does which step, these measures are absent.
Every measure is a share of the steps or skills of one task; means over tasks are taken elsewhere.

An alternative of a gold skill counts like the gold skill. The oracle is the skills retrieved for
the texts of the gold steps: if it finds a skill that no planned step finds, the planned steps are
at fault, else the retriever.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.records import Skill

CUTOFFS = (1, 5, 10)
MEANINGS = {
    "DA": "decomposition accuracy: 1 if the plan has as many steps as the gold plan",
    "DA±1": "1 if these numbers of steps differ by at most one",
    "steps": "number of planned steps",
    "R@k": "share of the gold steps whose skill is among the first k skills retrieved for the "
    "planned step at the same position",
    "CatR@k": "R@k, where every skill in the category of the gold skill is a hit",
    "Chain exact": "1 if the chosen skills are the gold skills, step by step",
    "Chain category (share)": "share of the gold steps whose chosen skill has the category of "
    "the gold skill (the paper's section 5.3)",
    "Chain category (all)": "1 if that share is 1 and DA is 1 (the caption of the paper's table 2)",
    "Skill R@k": "share of the gold skills among the first k skills retrieved for any planned step",
    "Chosen": "share of the gold skills that are chosen for some step",
    "Step R@k": "share of the gold steps whose own first hit is among the first k skills "
    "retrieved for any planned step",
    "Oracle R@1": "R@1 if the plan consists of the texts of the gold steps",
    "Oracle CatR@1": "CatR@1 if the plan consists of the texts of the gold steps",
    "Oracle Skill R@10": "Skill R@10 if the plan consists of the texts of the gold steps",
    "Lost in composition": "share of the gold skills that were retrieved for a planned step, "
    "but not chosen",
    "Lost in decomposition": "share of the gold skills that were retrieved for no planned step, "
    "but for the text of a gold step",
    "Lost in retrieval": "share of the gold skills that were retrieved neither for a planned step "
    "nor for the text of a gold step, at the same depth",
    "Context saved": "1 - tokens of the chosen skills / tokens of all skills",
}
SkillsByStep = Sequence[Sequence[str]]
"""Ids of the skills retrieved for each step, best first."""


def measure_names() -> tuple[str, ...]:
    """Return the names of all measures in order, with their cutoffs.

    For example, `R@k` becomes `R@1`, `R@5` and `R@10`.
    """
    names = []
    for name in MEANINGS:
        if name.endswith("@k"):
            names += [f"{name[:-1]}{k}" for k in CUTOFFS]
        else:
            names.append(name)
    return tuple(names)


def plan_values(
    task: Task,
    retrieved: SkillsByStep,
    chosen: Sequence[str | None],
    oracle: SkillsByStep,
    skills: Mapping[str, Skill],
    tokens: Mapping[str, int],
) -> dict[str, float]:
    """Measure the plan of one task.

    Args:
        task: The task with its gold steps (the steps of a right plan) and its gold skills (the
            skills that the task needs).
        retrieved: Skills retrieved for each planned step.
        chosen: Id of the skill chosen for each planned step; None for no skill.
        oracle: Skills retrieved for each gold step, with the step's text as the query.
        skills: All skills by id.
        tokens: Number of tokens by skill id.

    Returns:
        Value by measure, for the measures that are defined for the task.
    """
    num_steps = len(retrieved)
    num_gold = len(task.steps)
    chosen_ids = {skill_id for skill_id in chosen if skill_id}
    # Only the chosen skills need to be in the agent's context, instead of all skills.
    num_tokens = sum(tokens[skill_id] for skill_id in chosen_ids)
    values = {
        "steps": float(num_steps),
        "Context saved": 1 - num_tokens / max(1, sum(tokens.values())),
    }
    values |= _gold_values(task, retrieved, chosen_ids, oracle)
    if task.steps:
        # DA, decomposition accuracy: is the number of steps right?
        values["DA"] = float(num_steps == num_gold)
        values["DA±1"] = float(abs(num_steps - num_gold) <= 1)
        # A gold step is a hit if the best skill for its text is in the top k of any planned step.
        for k in CUTOFFS:
            top_ids = _top_ids(retrieved, k)
            is_hit = [bool(skill_ids) and skill_ids[0] in top_ids for skill_ids in oracle]
            values[f"Step R@{k}"] = fmean(is_hit)

    gold = gold_chain(task)  # gold skill of each step, which all further measures need
    if not gold:
        return values

    # Compare the planned steps with the gold steps at the same positions.
    categories = {skill_id: skill.category for skill_id, skill in skills.items()}
    for k in CUTOFFS:
        values[f"R@{k}"] = _recall(gold, retrieved, k)
        values[f"CatR@{k}"] = category_recall(gold, retrieved, k, categories)
    chosen_by_step = [[skill_id] if skill_id else [] for skill_id in chosen]
    share = category_recall(gold, chosen_by_step, 1, categories)
    return values | {
        "Chain exact": float([*chosen] == gold),
        "Chain category (share)": share,
        "Chain category (all)": float(share == 1 and num_steps == num_gold),
        "Oracle R@1": _recall(gold, oracle, 1),
        "Oracle CatR@1": category_recall(gold, oracle, 1, categories),
    }


def gold_chain(task: Task) -> list[str]:
    """Return the gold skill of each step; empty if it is not known for every step."""
    gold = [step.skill_id for step in task.steps]
    return gold if all(gold) else []


def _gold_values(
    task: Task, retrieved: SkillsByStep, chosen_ids: set[str], oracle: SkillsByStep
) -> dict[str, float]:
    """Compute the shares of gold skills that each stage of planning finds or loses.

    A gold skill is a skill that the task needs. The stages are decomposition, retrieval and
    composition (the choice of a skill for each step).

    Args:
        task: The task with its gold steps and gold skills.
        retrieved: Skills retrieved for each planned step.
        chosen_ids: Skills chosen for any step.
        oracle: Skills retrieved for each gold step, with the step's text as the query.

    Returns:
        Share of the gold skills by measure.
    """
    # An alternative of a gold skill counts like the gold skill.
    accepted_ids = {gold_id: {gold_id} for gold_id in sorted(task.relevance.gold)}
    for skill_id, gold_id in task.relevance.alternatives.items():
        accepted_ids[gold_id].add(skill_id)

    def gold_among(skill_ids: set[str]) -> set[str]:
        """Return the gold skills that are among the given skills."""
        return {gold_id for gold_id, accepted in accepted_ids.items() if accepted & skill_ids}

    # The gold skills that count for each measure. A skill is lost in composition if a planned step
    # found it, but no step chose it.
    retrieved_gold = gold_among(_top_ids(retrieved, k=None))  # at any rank
    chosen_gold = gold_among(chosen_ids)
    gold_by_measure = {f"Skill R@{k}": gold_among(_top_ids(retrieved, k)) for k in CUTOFFS}
    gold_by_measure["Chosen"] = chosen_gold
    gold_by_measure["Lost in composition"] = retrieved_gold - chosen_gold
    if task.steps:
        # Skills that no planned step found. If the text of a gold step finds the skill, the planned
        # steps are at fault (decomposition), else the retriever.
        oracle_gold = gold_among(_top_ids(oracle, k=None))  # at any rank
        missed_gold = set(accepted_ids) - retrieved_gold
        gold_by_measure["Oracle Skill R@10"] = gold_among(_top_ids(oracle, k=10))
        gold_by_measure["Lost in decomposition"] = missed_gold & oracle_gold
        gold_by_measure["Lost in retrieval"] = missed_gold - oracle_gold
    return {name: len(gold) / len(accepted_ids) for name, gold in gold_by_measure.items()}


def _top_ids(skills_by_step: SkillsByStep, k: int | None) -> set[str]:
    """Return the first `k` skills (None: all) of all steps together."""
    return set().union(*(skill_ids[:k] for skill_ids in skills_by_step))


def _recall(gold: Sequence[str], skills_by_step: SkillsByStep, k: int) -> float:
    """Return the share of gold steps whose skill is among the first `k` skills of the same step.

    A gold step without a step at its position counts as missed.
    """
    pairs = zip(gold, skills_by_step, strict=False)
    return sum(gold_id in skill_ids[:k] for gold_id, skill_ids in pairs) / len(gold)


def category_recall(
    gold: Sequence[str], skills_by_step: SkillsByStep, k: int, categories: Mapping[str, str | None]
) -> float:
    """Return the share of gold steps whose category is among the first `k` skills of the same step.

    Steps are compared by position. A gold step without a step at its position counts as missed.

    Args:
        gold: Gold skill of each step.
        skills_by_step: Ids of the skills of each planned step, best first.
        k: Number of skills of a step that count.
        categories: Category by skill id. None never hits.
    """
    num_hits = 0
    for gold_id, skill_ids in zip(gold, skills_by_step, strict=False):
        step_categories = {categories[skill_id] for skill_id in skill_ids[:k]}
        # A skill without a category has the category None, which must not match another None.
        num_hits += categories[gold_id] in step_categories - {None}
    return num_hits / len(gold)
