"""Stage `equivalents`: which other skills serve a query as well as its gold skill, by a chat model's judgement.

Their rows of JUDGEMENTS are `required`, with the gold skill as `group`: `evaluate` takes whichever of them a ranking
puts first for that gold skill, and no training takes them for negatives. SkillRouter's supplement judges its pool so.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data import counted
from skilltrain.data.asking import ask, questions_of
from skilltrain.data.rejections import Group, group_prompt
from skilltrain.llm import LLMConfig, Questions, cost_of, read_list
from skilltrain.records import Skill, Verdict
from skilltrain.tables import (
    JUDGEMENTS,
    RANKINGS,
    read_skills,
    read_table,
    read_verdicts,
    rows_by_query,
    select_queries,
    texts_of,
    write_queries,
)


class EquivalentsConfig(Config):
    """Have a chat model say which candidates serve a query as well as its gold skill."""

    stage: Literal["equivalents"] = "equivalents"
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    rankings: InputPath = Field(description="RANKINGS of the queries, such as those of the stage candidates")
    llm: LLMConfig = Field(description="who judges, kind openai or smollm2")
    depth: int = Field(default=20, ge=1, le=50, description="candidates judged for each gold skill, the best first")
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for queries, judgements and dropped")


def run_equivalents(config: EquivalentsConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS with what was found, and DROPPED; gold skills that could not be judged are in that."""
    asked = ask(_questions(config))
    gold_of = {(one.query_id, skill.skill_id): one.skill_id for one, found in asked.values for skill in found}
    verdict = {"verdict": str(Verdict.REQUIRED), "judge": f"llm:{config.llm.model}"}
    rows = [{"query_id": q, "skill_id": s, "group": gold, **verdict} for (q, s), gold in gold_of.items()]
    judged = read_table(config.queries, JUDGEMENTS).to_pylist()
    write_queries(select_queries(config.queries, None), [*judged, *rows], asked.dropped, out)
    dropped = counted(row.filter for row in asked.dropped)
    num_asked = len(asked.values) + len(asked.dropped)
    return {"num_golds": num_asked, "num_equivalents": len(rows), "dropped": dropped, **asked.used}


def plan_equivalents(config: EquivalentsConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    return cost_of(_questions(config))


def _questions(config: EquivalentsConfig) -> Questions[Group, list[Skill]]:
    skills = {skill.skill_id: skill for skill in read_skills(config.pool)}
    verdicts, rankings = read_verdicts(config.queries), read_table(config.rankings, RANKINGS)
    rows, ranked = rows_by_query(rankings), texts_of(rankings.column("skill_id"))
    judged_rows = read_table(config.queries, JUDGEMENTS).to_pylist()
    found_before = {(r["query_id"], r["skill_id"]) for r in judged_rows if r["group"] in verdicts[r["query_id"]]}
    groups: list[Group] = []
    for query in select_queries(config.queries, None):
        judged, own = verdicts.get(query.query_id, {}), rows[query.query_id].tolist() if query.query_id in rows else []
        near = [s for s in dict.fromkeys(ranked[row] for row in own) if s in skills and s not in judged][: config.depth]
        required = {s for s in judged if judged[s] is Verdict.REQUIRED and (query.query_id, s) not in found_before}
        for gold in sorted(required & skills.keys() if near else ()):
            shown = tuple(skills[skill_id] for skill_id in (gold, *near))
            groups.append(Group(query.query_id, "", shown, query.text))
    prompt = partial(group_prompt, "equivalents", 0)
    return questions_of(config.llm, groups, prompt, config.seed, _read, 20, "judging candidates")


def _read(group: Group, answer: str) -> list[Skill]:
    """The skills whose numbers an answer lists. Raises ValueError where it is no list of numbers from 2."""
    numbers, skills = read_list(answer), group.skills
    if numbers is None or any(type(one) is not int or not 2 <= one <= len(skills) for one in numbers):
        raise ValueError(f"it is not a JSON list of numbers from 2 to {len(skills)}")
    return [skill for number, skill in enumerate(skills, 1) if number in numbers]
