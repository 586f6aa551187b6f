"""CompSkillBench rebuilt: compound tasks over a list of MCP servers (SkillWeaver, section 5).

python data_pipelines/compskillbench.py SERVERS runs/compskillbench
skilltrain skillweaver plans benchmark=runs/compskillbench/template pool=runs/compskillbench/pool …

SERVERS is a JSON Lines file (name, description, category), or a folder of Markdown lists as TensorBlock publishes them.
It is not the paper's benchmark: the paper's list of 2,228 servers in 49 categories is not published with it, and
neither are its phrases. TensorBlock's has 7,729 in 35; the phrases (compskillbench.yaml) are ours. Made are

    pool               the servers as skills without bodies, in 24 categories; dropped.parquet says what was left out
    template           300 tasks: 150 of 2 steps, 100 of 3, 50 of 4 or 5, each step of another category
    paraphrase, human  the same chains in other words, and as a person would put it
    transfer_category  the template tasks that need one of two categories, and those categories' skills to hold out
    transfer_skill     those that need one of a fifth of the skills, drawn by chance, and these skills

A step's words say what kind of work it is. They never name the gold skill, which is drawn from those whose description
speaks of that work: many others would do, so look at categories (CatR@k) rather than at skills (R@k).
"""

import random
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.config import Config, parse_yaml
from skilltrain.data.pool.skill_file import skill_from_row
from skilltrain.data.query_texts import names_skill
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl, staged_folder
from skilltrain.recipe import run_pipeline
from skilltrain.records import Dropped, Judgement, Query, Skill, Verdict
from skilltrain.tables import DROPPED, JUDGEMENTS, PLANS, QUERIES, SKILLS, write_table
from skilltrain.texts import name_key

_ENTRY = re.compile(r"^- \[(?P<name>[^\]]+)\]\((?P<url>[^)]*)\)\s*[:–-]?\s*(?P<description>.*)$")
_BADGE = re.compile(r"!?\[!?[^\]]*\](?:\([^)]*\))+|https?://\S+|img\.shields\.io\S*")
_LEADING = re.compile(r"[^\w\s&,]+\s*")
STYLES = ("template", "paraphrase", "human")
# A task's steps are joined by each in turn; {0} is the first, {1} the last, {…} what stands between.
JOINS = {
    "template": (
        "First {a}, then {z}.",
        "{A}, and then {z}.",
        "{A}. After that, {z}.",
        "{A} and {z}.",
        "Please {a}, and finally {z}.",
    ),
    "paraphrase": (
        "I need you to {a}; following that, {z}.",
        "Your job is to {a} and to {z}.",
        "{A}. With this at hand, {z}.",
        "Could you {a} as well as {z}?",
    ),
    "human": (
        "{A}? And {z}, please.",
        "So: {a}. Also, {z}. Thanks!",
        "{A} - and while you are at it: {z}.",
        "Quick one. {A}? {Z}? That would help a lot.",
    ),
}


class Pipeline(Config):
    """What this pipeline can be told."""

    servers: Path
    out: Path
    categories: Path = Path(__file__).with_suffix(".yaml")
    sizes: dict[int, int] = Field(
        default={2: 150, 3: 100, 4: 25, 5: 25}, description="steps → tasks"
    )
    min_chars: int = Field(
        default=15, description="of a description without badges; the paper's 15"
    )
    min_skills: int = Field(default=5, description="of a category")
    held_out: list[str] = Field(
        default=["security", "code-execution"], description="the paper's two categories"
    )
    held_out_share: float = Field(default=0.2, description="of the skills")
    seed: int = 0


def rows_of_source(path: Path) -> Iterator[dict[str, Any]]:
    """Yield name, description and category of each server of a JSON Lines file or a folder of Markdown lists."""
    if path.is_file():
        yield from (row for _, row in read_jsonl(path))
        return
    if not any(path.glob("*.md")):
        raise SkilltrainError(
            "unknown-format",
            "is neither a JSON Lines file nor a folder of Markdown lists",
            where=path,
        )
    for file in sorted(path.glob("*.md")):
        category = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                category = _LEADING.sub("", line.removeprefix("## ")).strip()
            elif found := _ENTRY.match(line):
                yield {**found.groupdict(), "category": category}


def clean(pipeline: Pipeline, groups: dict[str, Any]) -> tuple[list[Skill], list[Dropped]]:
    """(the servers as skills of our categories, what was left out and why)."""
    of_source = {name: group for group, entry in groups.items() for name in entry.get("from", ())}
    by_words = {
        group: re.compile(entry["words"], re.I)
        for group, entry in groups.items()
        if "words" in entry
    }
    skills: dict[str, Skill] = {}
    dropped: list[Dropped] = []
    for number, row in enumerate(rows_of_source(pipeline.servers), 1):
        about = _BADGE.sub(" ", str(row.get("description", ""))).strip()
        name, key = str(row.get("name", "")), name_key(str(row.get("name", "")))
        group = next((one for one, words in by_words.items() if words.search(about)), None)
        group = group or of_source.get(str(row.get("category")))
        fault = None
        if len(about) < pipeline.min_chars:
            fault = (
                "short_description",
                f"'{about}' has fewer than {pipeline.min_chars} characters without badges",
            )
        elif group is None:
            fault = "category", f"the category '{row.get('category')}' is not mapped"
        elif key in skills:
            fault = "duplicate", f"has the same name as {skills[key].skill_id}"
        tool = {
            "skill_id": row.get("id") or name,
            "name": name,
            "description": about,
            "category": group,
        }
        skill = (
            Dropped("", name, *fault) if fault else skill_from_row(tool, f"entry {number}", "mcp")
        )
        if isinstance(skill, Dropped):
            dropped.append(skill)
        else:
            skills[key] = skill
    few = {
        group
        for group in groups
        if sum(s.category == group for s in skills.values()) < pipeline.min_skills
    }
    for group in sorted(few):
        print(f"{group}: fewer than {pipeline.min_skills} skills, no task needs it")
    return list(skills.values()), dropped


def draw_chains(
    pipeline: Pipeline, groups: dict[str, Any], skills: list[Skill]
) -> list[list[tuple[list[str], Skill]]]:
    """Tasks as steps of (its words in each style, the gold skill); every step is of another category."""
    draw = random.Random(pipeline.seed)
    fitting: dict[str, list[tuple[list[str], list[Skill]]]] = {}
    for group, entry in groups.items():
        own = [skill for skill in skills if skill.category == group]
        for needs, *words in entry["steps"]:
            pattern = re.compile(needs, re.I)
            able = [
                s
                for s in own
                if pattern.search(s.description) and not any(names_skill(w, s.name) for w in words)
            ]
            if len(own) >= pipeline.min_skills and able:
                fitting.setdefault(group, []).append((words, able))
    chains: list[list[tuple[list[str], Skill]]] = []
    for size, count in pipeline.sizes.items():
        for _ in range(count):
            chosen = [draw.choice(fitting[group]) for group in draw.sample(sorted(fitting), size)]
            chains.append([(words, draw.choice(able)) for words, able in chosen])
    return chains


def task_text(style: str, steps: list[str], join: str) -> str:
    """One request of all steps."""
    comma = {"template": ", ", "paraphrase": ", ", "human": ". Also, "}[style]
    first, last = comma.join(steps[:-1]), steps[-1]
    upper = {"A": first[:1].upper() + first[1:], "Z": last[:1].upper() + last[1:]}
    return join.format(a=first, z=last, **upper)


def write_tasks(folder: Path, style: str, chains: dict[int, list[tuple[list[str], Skill]]]) -> None:
    """Queries, judgements and gold plans of `chains` (number → steps) in a style."""
    place, joins = STYLES.index(style), cycle(JOINS[style])
    queries, judgements, plans = list[Query](), list[Judgement](), list[dict[str, Any]]()
    for number, chain in chains.items():
        query_id, steps = f"comp-{number:03}", [words[place] for words, _ in chain]
        text = task_text(style, steps, next(joins))
        queries.append(Query(query_id, text, "multi", style, "test"))
        for step, (text, (_, skill)) in enumerate(zip(steps, chain, strict=True), 1):
            judgements.append(
                Judgement(query_id, skill.skill_id, Verdict.REQUIRED, "compskillbench")
            )
            waits = [str(step - 1)] if step > 1 else []
            plans.append(
                {
                    "query_id": query_id,
                    "step_id": str(step),
                    "text": text,
                    "depends_on": waits,
                    "skill_id": skill.skill_id,
                }
            )
    for rows, spec in ((queries, QUERIES), (judgements, JUDGEMENTS), (plans, PLANS)):
        write_table(rows, spec, folder)


def run(pipeline: Pipeline) -> dict[str, Any]:
    """Everything into `out`, whole or not at all; what came out, counted."""
    groups = parse_yaml(pipeline.categories.read_text(encoding="utf-8"), pipeline.categories)
    skills, dropped = clean(pipeline, groups)
    chains = dict(enumerate(draw_chains(pipeline, groups, skills), 1))
    draw = random.Random(pipeline.seed + 1)
    away = {
        "transfer_category": [skill for skill in skills if skill.category in pipeline.held_out],
        "transfer_skill": draw.sample(skills, round(pipeline.held_out_share * len(skills))),
    }
    counts: dict[str, Any] = {"skills": len(skills), "dropped": len(dropped), "tasks": len(chains)}
    with staged_folder(pipeline.out) as out:
        write_table(skills, SKILLS, out / "pool")
        write_table(dropped, DROPPED, out / "pool")
        for style in STYLES:
            write_tasks(out / style, style, chains)
        for name, held in away.items():
            ids = {skill.skill_id for skill in held}
            hit = {
                n: chain
                for n, chain in chains.items()
                if any(skill.skill_id in ids for _, skill in chain)
            }
            write_tasks(out / name, "template", hit)
            write_table(held, SKILLS, out / name / "held_out")
            counts[name] = {"tasks": len(hit), "held out": len(held)}
    return counts


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
