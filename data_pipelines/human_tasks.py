"""Collect compound tasks in people's own words, for a benchmark of `skilltrain skillweaver plans`.

python data_pipelines/human_tasks.py runs/compskillbench/template runs/compskillbench/pool ada.csv
python data_pipelines/human_tasks.py … ada.csv out=runs/human

The first command writes a sheet with a row for each task: what its steps are to do, and an empty
column `request`. A person writes there how they would ask for all of it, without the name of a
skill. The second command reads the sheet and writes a benchmark of the requests. Rows without a
request are left out. So are requests that name a skill of the task; dropped.parquet has the reason.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.pool.read import read_pool
from skilltrain.data.query_texts import names_skill
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.recipe import run_pipeline
from skilltrain.records import Dropped, Query, Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, PLANS, QUERIES, read_table, write_table
from skilltrain.texts import one_line

COLUMNS = ["query_id", "steps", "request"]


class Pipeline(Config):
    """Settings of this pipeline."""

    benchmark: Path = Field(description="folder of tasks with steps")
    pool: Path = Field(description="skills of the tasks")
    sheet: Path = Field(description="CSV file to write, or to read if there is `out`")
    out: Path | None = Field(default=None, description="folder of the benchmark to write")


def write_sheet(pipeline: Pipeline) -> dict[str, Any]:
    """Write the sheet without requests. Return the number of rows."""
    if pipeline.sheet.exists():
        fix = "read it with out=FOLDER, or name another sheet"
        raise SkilltrainError("output-exists", "exists already", where=pipeline.sheet, fix=fix)
    tasks = load_benchmark(pipeline.benchmark).tasks
    with pipeline.sheet.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for task in tasks:
            steps = "; ".join(step.text for step in task.steps)
            writer.writerow([task.query.query_id, steps, ""])
    return {"num_rows": len(tasks)}


def read_requests(sheet: Path) -> Iterator[tuple[str, str]]:
    """Yield the query id and the request of each row that has a request."""
    with sheet.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            problem = f"a sheet has the columns {', '.join(COLUMNS)}"
            raise SkilltrainError("wrong-columns", problem, where=sheet)
        for row in reader:
            request = one_line(row["request"] or "")
            if request:
                yield row["query_id"], request


def read_sheet(pipeline: Pipeline, out: Path) -> dict[str, Any]:
    """Write the benchmark of a sheet's requests. Return counts."""
    tasks = {task.query.query_id: task for task in load_benchmark(pipeline.benchmark).tasks}
    skills = {skill.skill_id: skill for skill in read_pool(pipeline.pool)}
    queries = []
    dropped = []
    for query_id, request in read_requests(pipeline.sheet):
        if query_id not in tasks:
            problem = f"the benchmark has no task '{query_id}'"
            raise SkilltrainError("unknown-query", problem, where=pipeline.sheet)
        name = named_skill(request, tasks[query_id], skills)
        if name is None:
            queries.append(Query(query_id, request, "multi", "human", "test"))
        else:
            dropped.append(Dropped(query_id, "", "names_skill", f"names the skill {name}"))
    if not queries:
        raise SkilltrainError("empty-benchmark", "has no request", where=pipeline.sheet)

    write_table(dropped, DROPPED, out)
    write_benchmark(queries, pipeline.benchmark, out)
    return {"num_tasks": len(queries), "num_dropped": len(dropped)}


def write_benchmark(queries: list[Query], benchmark: Path, out: Path) -> None:
    """Write queries with the judgements and plans that they have in another benchmark."""
    write_table(queries, QUERIES, out)
    query_ids = {query.query_id for query in queries}
    for spec in (JUDGEMENTS, PLANS):
        rows = read_table(benchmark, spec).to_pylist()
        write_table([row for row in rows if row["query_id"] in query_ids], spec, out)


def named_skill(request: str, task: Task, skills: Mapping[str, Skill]) -> str | None:
    """Return the name of a gold skill that a request names, if any."""
    for step in task.steps:
        name = skills[step.skill_id].name
        if names_skill(request, name):
            return name
    return None


def run(pipeline: Pipeline) -> dict[str, Any]:
    """Write the sheet, or the benchmark of a filled sheet."""
    if pipeline.out is None:
        return write_sheet(pipeline)
    with staged_folder(pipeline.out) as out:
        return read_sheet(pipeline, out)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
