"""Stage `equivalents`: which other skills serve a query as well as its gold skill, by a chat model's judgement.

Their rows of JUDGEMENTS are `required`, with the gold skill as `group`: `evaluate` takes whichever of them a ranking
puts first for that gold skill, and no training takes them for negatives. SkillRouter's supplement judges its pool so.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.asking import ask, questions_of
from skilltrain.data.rejections import Group, group_prompt
from skilltrain.llm import LLMConfig, Questions, estimate_cost, read_numbers
from skilltrain.records import Judgement, Skill, Verdict, counted
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


class EquivalentsConfig(Config):
    """Have a chat model say which candidates serve a query as well as its gold skill."""

    stage: Literal["equivalents"] = "equivalents"
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    rankings: InputPath = Field(
        description="RANKINGS of the queries, such as those of the stage candidates"
    )
    llm: LLMConfig = Field(description="the chat model that judges")
    depth: int = Field(
        default=20, ge=1, le=50, description="candidates judged for each gold skill, the best first"
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for queries, judgements and dropped")


def run_equivalents(config: EquivalentsConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS with what was found, and DROPPED; gold skills that could not be judged are in that."""
    asked = ask(_questions(config))
    gold_of = {
        (one.query_id, skill.skill_id): one.skill_id
        for one, skills in asked.values
        for skill in skills
    }
    judge = f"llm:{config.llm.model}"
    found = [Judgement(*ids, Verdict.REQUIRED, judge, group=gold) for ids, gold in gold_of.items()]
    judged = read_table(config.queries, JUDGEMENTS).to_pylist()
    write_queries(select_queries(config.queries, None), [*judged, *found], asked.dropped, out)
    dropped = counted(row.filter for row in asked.dropped)
    num_asked = len(asked.values) + len(asked.dropped)
    return {"num_golds": num_asked, "num_equivalents": len(found), "dropped": dropped, **asked.used}


def plan_equivalents(config: EquivalentsConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    return estimate_cost(_questions(config))


def _questions(config: EquivalentsConfig) -> Questions[Group, list[Skill]]:
    skills = {skill.skill_id: skill for skill in read_skills(config.pool)}
    judgements = read_table(config.queries, JUDGEMENTS)
    rankings = read_table(config.rankings, RANKINGS).sort_by("rank")
    rows, ranked = rows_by_query(rankings), texts_of(rankings.column("skill_id"))
    gold_of = {(row["query_id"], row["skill_id"]): row["group"] for row in judgements.to_pylist()}
    groups: list[Group] = []
    for query, judged in select_judged(config.queries, None):
        found = dict.fromkeys(ranked[row] for row in rows.get(query.query_id, ()))
        near = [s for s in found if s in skills and s not in judged][: config.depth]
        # A required skill whose group is another one was found before: it is no gold skill.
        required = {
            s
            for s in judged
            if judged[s] is Verdict.REQUIRED and gold_of[query.query_id, s] not in judged
        }
        for gold in sorted(required & skills.keys() if near else ()):
            shown = tuple(skills[skill_id] for skill_id in (gold, *near))
            groups.append(Group(query.query_id, "", shown, query.text))
    prompt = partial(group_prompt, "equivalents", 0)
    return questions_of(config.llm, groups, prompt, _read, config.seed, 20, "judging candidates")


def _read(group: Group, answer: str) -> list[Skill]:
    """The skills whose numbers an answer lists. Raises AnswerError where it is no list of numbers from 2."""
    numbers = read_numbers(answer, range(2, len(group.skills) + 1))
    return [skill for number, skill in enumerate(group.skills, 1) if number in numbers]
