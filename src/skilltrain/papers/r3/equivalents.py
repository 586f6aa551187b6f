"""Stage `equivalents`: a chat model judges which skills serve a query as well as its gold skill.

An equivalent is `required` in JUDGEMENTS, with the gold skill as `group`. `evaluate` counts the
gold skill or its first-ranked equivalent, and training never uses equivalents as negatives.
Source: SkillRouter's supplement.
"""

from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from skilltrain.config import InputPath, PoolPath, Seed
from skilltrain.data.llm_stage import ask, questions_of
from skilltrain.llm import LLMConfig, Questions, estimate_cost, read_numbers
from skilltrain.papers.r3.rejections import Group, group_prompt
from skilltrain.records import Judgement, Skill, Verdict, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import (
    JUDGEMENTS,
    RANKINGS,
    read_skills,
    read_table,
    rows_by_query,
    select_judged,
    select_queries,
    texts_of,
    write_queries,
)

_ANSWER_TOKENS = 20  # expected length of an answer, a list of a few numbers


class Equivalents(Stage):
    """Ask a chat model which candidates serve a query as well as its gold skill."""

    example = (
        "queries=runs/queries pool=runs/pool rankings=runs/candidates llm.kind=openai "
        "out=runs/equivalent"
    )
    result = "{num_equivalents} equivalents of {num_golds} gold skills; not judged: {dropped}"
    next_command = "evaluate --benchmark {out} --pool {pool}"

    stage: Literal["equivalents"] = "equivalents"
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    pool: PoolPath
    rankings: InputPath = Field(
        description="RANKINGS of the queries, such as those of the stage candidates"
    )
    llm: LLMConfig = Field(description="the chat model that judges")
    depth: int = Field(
        default=20, ge=1, le=50, description="best candidates that are judged for each gold skill"
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for queries, judgements and dropped")

    def run(self, out: Path) -> Summary:
        """Write QUERIES, JUDGEMENTS with the equivalents, and DROPPED with unjudged gold skills."""
        questions = _questions(self)
        outcome = ask(questions)
        judge = f"llm:{self.llm.model}"

        # A judgement names one gold skill. The groups of a query are sorted by the id of their gold
        # skill. If a skill is in two groups, the later group replaces the judgement of the earlier.
        equivalents: dict[tuple[str, str], Judgement] = {}  # by query id and skill id
        for group, skills in outcome.values:
            query_id = group.query_id
            gold_id = group.skill_id
            for skill in skills:
                equivalents[query_id, skill.skill_id] = Judgement(
                    query_id, skill.skill_id, Verdict.REQUIRED, judge, group=gold_id
                )

        judgements = [*read_table(self.queries, JUDGEMENTS).to_pylist(), *equivalents.values()]
        write_queries(select_queries(self.queries, None), judgements, outcome.dropped, out)
        return {
            "num_golds": len(questions.items),
            "num_equivalents": len(equivalents),
            "dropped": counted(row.filter for row in outcome.dropped),
            **outcome.used,
        }

    def dry_run(self) -> Summary:
        """Estimate the cost. Asks no chat model."""
        return estimate_cost(_questions(self))


def _questions(config: Equivalents) -> Questions[Group, list[Skill]]:
    """Return the questions to the chat model, one for each gold skill with candidates.

    The candidates are the best-ranked skills of the query without a judgement.
    """
    skills = {skill.skill_id: skill for skill in read_skills(config.pool)}
    ranked_ids = _ranked_ids(config.rankings)
    judgements = read_table(config.queries, JUDGEMENTS).to_pylist()
    # The `group` of each judgement. For an equivalent, it is the id of the gold skill.
    group_ids = {(row["query_id"], row["skill_id"]): row["group"] for row in judgements}
    groups = []
    for query, verdicts in select_judged(config.queries, None):
        candidates = []
        for skill_id in ranked_ids.get(query.query_id, ()):
            if skill_id in skills and skill_id not in verdicts:
                candidates.append(skills[skill_id])
        candidates = candidates[: config.depth]
        if not candidates:
            continue

        for skill_id, verdict in sorted(verdicts.items()):
            # Skip the equivalents that an earlier run found. They are required, too, but their
            # `group` is the id of a judged skill, their gold skill.
            is_equivalent = group_ids[query.query_id, skill_id] in verdicts
            is_gold = verdict is Verdict.REQUIRED and not is_equivalent
            if is_gold and skill_id in skills:
                members = (skills[skill_id], *candidates)
                groups.append(Group(query.query_id, lang="", skills=members, request=query.text))

    # 0: the number of words of a new request, which this prompt does not ask for.
    render = partial(group_prompt, "equivalents", 0)
    return questions_of(
        config.llm, groups, render, _read, config.seed, _ANSWER_TOKENS, "judging candidates"
    )


def _ranked_ids(rankings: Path) -> dict[str, list[str]]:
    """Return the distinct skill ids that are ranked for each query, best first, by query id."""
    table = read_table(rankings, RANKINGS).sort_by("rank")
    skill_ids = texts_of(table.column("skill_id"))
    ranked_ids = {}
    for query_id, rows in rows_by_query(table).items():
        ranked_ids[query_id] = list(dict.fromkeys(skill_ids[row] for row in rows))
    return ranked_ids


def _read(group: Group, answer: str) -> list[Skill]:
    """Return the candidates whose numbers an answer lists.

    Raises:
        AnswerError: The answer is no list of numbers, or lists 1, the gold skill.
    """
    # Skills are counted from 1, and number 1 is the gold skill.
    numbers = read_numbers(answer, range(2, len(group.skills) + 1))
    return [skill for number, skill in enumerate(group.skills, 1) if number in numbers]
