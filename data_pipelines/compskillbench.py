"""Rebuild CompSkillBench: compound tasks over a list of MCP servers (SkillWeaver, section 5).

python data_pipelines/compskillbench.py SERVERS runs/compskillbench
skilltrain skillweaver plans benchmark=runs/compskillbench/template pool=runs/compskillbench/pool …

SERVERS is a JSON Lines file (name, description, category), or a folder of Markdown lists as
TensorBlock publishes them. This is not the paper's benchmark. The paper uses 2,228 servers in 49
categories and does not publish the list or its phrases. TensorBlock's list has 7,729 servers in 35
categories, and the phrases (compskillbench.yaml) are ours. The pipeline writes these folders:

    pool               the servers as skills without bodies, in 24 categories; dropped.parquet lists
                       the servers that were left out, with reasons
    template           300 tasks: 150 of 2 steps, 100 of 3, and 50 of 4 or 5. Each step of a task
                       has another category.
    paraphrase, human  the same tasks in other words, and as a person would write them
    transfer_category  the template tasks that need one of two categories, and these categories'
                       skills, which are to be held out
    transfer_skill     the template tasks that need a skill of a random fifth, and these skills
    people             with sheet=FILE: the tasks in a person's own words

The file sheet.csv has a row for each task, with its steps and an empty column `request`. A person
writes there how they would ask for all of it, without the name of a skill. Then the same command
with another folder and sheet=FILE also writes `people`. Rows without a request are left out, and
requests that name a skill of their task, with the reason in people/dropped.parquet.

A step says what kind of work it is. It never names its gold skill, which is drawn from the skills
whose description mentions that work. Many others would serve as well, so look at categories
(CatR@k) rather than at skills (R@k).
"""

import csv
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from skilltrain.texts import name_key, one_line, spreadsheet_cell

_ENTRY = re.compile(r"^- \[(?P<name>[^\]]+)\]\((?P<url>[^)]*)\)\s*[:–-]?\s*(?P<description>.*)$")
_BADGE = re.compile(r"!?\[!?[^\]]*\](?:\([^)]*\))+|https?://\S+|img\.shields\.io\S*")
_LEADING = re.compile(r"[^\w\s&,]+\s*")  # emoji in front of a heading
STYLES = ("template", "paraphrase", "human")
SHEET = "sheet.csv"
SHEET_COLUMNS = ["query_id", "steps", "request"]
# Sentences that join the steps of a task, used in turn. {a} is all steps but the last, {z} is the
# last. {A} and {Z} are the same with a capital letter.
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
    """Settings of this pipeline."""

    servers: Path
    out: Path
    categories: Path = Field(
        default=Path(__file__).with_suffix(".yaml"),
        description="words, sources and steps of each category",
    )
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
    sheet: Path | None = Field(default=None, description="filled sheet of an earlier run")
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a task: its text in each style, and the skill that does it."""

    texts: list[str]
    skill: Skill


Task = list[Step]


def read_servers(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the name, description and category of each server.

    Args:
        path: A JSON Lines file, or a folder of Markdown lists.
    """
    if path.is_file():
        yield from (row for _, row in read_jsonl(path))
        return
    if not any(path.glob("*.md")):
        problem = "is neither a JSON Lines file nor a folder of Markdown lists"
        raise SkilltrainError("unknown-format", problem, where=path)

    for file in sorted(path.glob("*.md")):
        category = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = _ENTRY.match(line)
            if line.startswith("## "):
                category = _LEADING.sub("", line.removeprefix("## ")).strip()
            elif entry:
                yield {**entry.groupdict(), "category": category}


class Categories:
    """The categories of compskillbench.yaml.

    Attributes:
        entries: Settings of each category by its name: the words of its descriptions (`words`), the
            source's categories that belong to it (`from`), and its steps.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._by_source_category: dict[str, str] = {}
        for name, entry in entries.items():
            if "words" in entry:
                self._patterns[name] = re.compile(entry["words"], re.I)
            for source_category in entry.get("from", ()):
                self._by_source_category[source_category] = name

    def category_of(self, description: str, source_category: object) -> str | None:
        """Return the first category whose words are in a description, else that of the source."""
        for name, pattern in self._patterns.items():
            if pattern.search(description):
                return name
        return self._by_source_category.get(str(source_category))


def read_skills(pipeline: Pipeline, categories: Categories) -> tuple[list[Skill], list[Dropped]]:
    """Read the servers as skills of our categories.

    Returns:
        The skills, and the servers that were left out, with reasons.
    """
    skills: dict[str, Skill] = {}  # by the key of their name
    dropped: list[Dropped] = []
    for number, row in enumerate(read_servers(pipeline.servers), 1):
        name = str(row.get("name", ""))
        key = name_key(name)
        description = _BADGE.sub(" ", str(row.get("description", ""))).strip()
        category = categories.category_of(description, row.get("category"))

        if len(description) < pipeline.min_chars:
            reason = (
                f"'{description}' has fewer than {pipeline.min_chars} characters without badges"
            )
            dropped.append(Dropped("", name, "short_description", reason))
            continue
        if category is None:
            reason = f"the category '{row.get('category')}' is not mapped"
            dropped.append(Dropped("", name, "category", reason))
            continue
        if key in skills:
            reason = f"has the same name as {skills[key].skill_id}"
            dropped.append(Dropped("", name, "duplicate", reason))
            continue

        tool = {
            "skill_id": row.get("id") or name,
            "name": name,
            "description": description,
            "category": category,
        }
        skill = skill_from_row(tool, f"entry {number}", "mcp")
        if isinstance(skill, Dropped):
            dropped.append(skill)
        else:
            skills[key] = skill

    for category in sorted(categories.entries):
        num_skills = sum(skill.category == category for skill in skills.values())
        if num_skills < pipeline.min_skills:
            print(f"{category}: fewer than {pipeline.min_skills} skills, no task needs it")
    return list(skills.values()), dropped


def sample_tasks(pipeline: Pipeline, categories: Categories, skills: list[Skill]) -> list[Task]:
    """Sample tasks. The steps of a task have different categories."""
    rng = random.Random(pipeline.seed)

    # Collect the steps that some skill can do, without a step that names the skill.
    steps_by_category: dict[str, list[tuple[list[str], list[Skill]]]] = {}
    for category, entry in categories.entries.items():
        members = [skill for skill in skills if skill.category == category]
        if len(members) < pipeline.min_skills:
            continue
        for needed_words, *texts in entry["steps"]:
            able = [skill for skill in members if _can_do(skill, needed_words, texts)]
            if able:
                steps_by_category.setdefault(category, []).append((texts, able))

    tasks: list[Task] = []
    for num_steps, num_tasks in pipeline.sizes.items():
        for _ in range(num_tasks):
            names = rng.sample(sorted(steps_by_category), num_steps)
            chosen = [rng.choice(steps_by_category[name]) for name in names]
            tasks.append([Step(texts, rng.choice(able)) for texts, able in chosen])
    return tasks


def _can_do(skill: Skill, needed_words: str, texts: list[str]) -> bool:
    """Return whether a skill's description has the words of a step, and no text names the skill."""
    if not re.search(needed_words, skill.description, re.I):
        return False
    return not any(names_skill(text, skill.name) for text in texts)


def task_text(style: str, steps: list[str], join: str) -> str:
    """Return one request for all steps.

    Args:
        style: Style of the request.
        steps: Texts of the steps.
        join: Sentence with the placeholders of `JOINS`.
    """
    separator = ". Also, " if style == "human" else ", "
    first = separator.join(steps[:-1])
    last = steps[-1]
    first_capital = first[:1].upper() + first[1:]
    last_capital = last[:1].upper() + last[1:]
    return join.format(a=first, z=last, A=first_capital, Z=last_capital)


def write_sheet(file: Path, tasks: Mapping[int, Task]) -> None:
    """Write a sheet in which people can put tasks in their own words."""
    with file.open("w", encoding="utf-8-sig", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(SHEET_COLUMNS)
        for number, task in tasks.items():
            steps = "; ".join(step.texts[0] for step in task)
            writer.writerow([query_id_of(number), spreadsheet_cell(steps), ""])


def read_sheet(file: Path) -> dict[str, str]:
    """Return the requests of a sheet by query id. Rows without a request are left out."""
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        reader = csv.DictReader(opened)
        if not set(SHEET_COLUMNS) <= set(reader.fieldnames or ()):
            problem = f"a sheet has the columns {', '.join(SHEET_COLUMNS)}"
            raise SkilltrainError("wrong-columns", problem, where=file)
        requests = {row["query_id"]: one_line(row["request"] or "") for row in reader}
    return {query_id: request for query_id, request in requests.items() if request}


def write_people(folder: Path, file: Path, tasks: Mapping[int, Task]) -> int:
    """Write the tasks in the words of a sheet. Return their number."""
    requests = read_sheet(file)
    unknown = requests.keys() - set(map(query_id_of, tasks))
    if unknown:
        problem = f"there is no task '{min(unknown)}'"
        raise SkilltrainError("unknown-query", problem, where=file)

    usable: dict[int, Task] = {}
    dropped: list[Dropped] = []
    for number, task in tasks.items():
        request = requests.get(query_id_of(number), "")
        names = [step.skill.name for step in task if names_skill(request, step.skill.name)]
        if names:
            reason = f"names the skill {names[0]}"
            dropped.append(Dropped(query_id_of(number), "", "names_skill", reason))
        elif request:
            usable[number] = task
    write_tasks(folder, "people", usable, requests)
    write_table(dropped, DROPPED, folder)
    return len(usable)


def query_id_of(number: int) -> str:
    """Return the query id of the task with a number."""
    return f"comp-{number:03}"


def write_tasks(
    folder: Path, style: str, tasks: Mapping[int, Task], requests: Mapping[str, str] | None = None
) -> None:
    """Write QUERIES, JUDGEMENTS and the gold PLANS of tasks in one style.

    Args:
        folder: Folder of the tables.
        style: Style of the texts.
        tasks: Tasks by number.
        requests: Text of each task by query id. None: texts of the style.
    """
    style_index = STYLES.index(style) if requests is None else 0
    joins = cycle(JOINS[STYLES[style_index]])
    queries: list[Query] = []
    judgements: list[Judgement] = []
    plans: list[dict[str, Any]] = []
    for number, task in tasks.items():
        query_id = query_id_of(number)
        texts = [step.texts[style_index] for step in task]
        text = task_text(style, texts, next(joins)) if requests is None else requests[query_id]
        queries.append(Query(query_id, text, "multi", style, "test"))
        for step_number, (step_text, step) in enumerate(zip(texts, task, strict=True), 1):
            skill_id = step.skill.skill_id
            judgements.append(Judgement(query_id, skill_id, Verdict.REQUIRED, "compskillbench"))
            plans.append(
                {
                    "query_id": query_id,
                    "step_id": str(step_number),
                    "text": step_text,
                    "depends_on": [str(step_number - 1)] if step_number > 1 else [],
                    "skill_id": skill_id,
                }
            )
    write_table(queries, QUERIES, folder)
    write_table(judgements, JUDGEMENTS, folder)
    write_table(plans, PLANS, folder)


def run(pipeline: Pipeline) -> dict[str, Any]:
    """Write all folders into `out`, completely or not at all. Return counts."""
    entries = parse_yaml(pipeline.categories.read_text(encoding="utf-8"), pipeline.categories)
    categories = Categories(entries)
    skills, dropped = read_skills(pipeline, categories)
    tasks = dict(enumerate(sample_tasks(pipeline, categories, skills), 1))

    rng = random.Random(pipeline.seed + 1)
    num_held_out = round(pipeline.held_out_share * len(skills))
    held_out_skills = {
        "transfer_category": [skill for skill in skills if skill.category in pipeline.held_out],
        "transfer_skill": rng.sample(skills, num_held_out),
    }
    counts: dict[str, Any] = {"skills": len(skills), "dropped": len(dropped), "tasks": len(tasks)}
    with staged_folder(pipeline.out) as out:
        write_table(skills, SKILLS, out / "pool")
        write_table(dropped, DROPPED, out / "pool")
        write_sheet(out / SHEET, tasks)
        if pipeline.sheet is not None:
            counts["people"] = write_people(out / "people", pipeline.sheet, tasks)
        for style in STYLES:
            write_tasks(out / style, style, tasks)
        for name, held_out in held_out_skills.items():
            skill_ids = {skill.skill_id for skill in held_out}
            affected = {
                number: task
                for number, task in tasks.items()
                if any(step.skill.skill_id in skill_ids for step in task)
            }
            write_tasks(out / name, "template", affected)
            write_table(held_out, SKILLS, out / name / "held_out")
            counts[name] = {"tasks": len(affected), "held out": len(held_out)}
    return counts


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
