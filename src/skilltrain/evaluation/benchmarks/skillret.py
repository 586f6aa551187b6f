"""SkillRet (Cho et al., 2026) as it is published: skills, queries and qrels, one JSON Lines file a split each."""

from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, make_task, split_files
from skilltrain.evaluation.benchmarks.qrels import Qrel, relevances
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, Text, read_rows, unique
from skilltrain.records import Skill

_ORIGIN = "skillret"


class _SkillRow(NamedRow):
    name: str | None = None
    description: str | None = None
    body: str | None = None
    skill_md: str | None = None
    major: str | None = None
    repo: str | None = None
    license: str | None = None

    def skill(self) -> Skill:
        """The released evaluation embeds name, description and the whole SKILL.md (the description where none is)."""
        body = next((text for text in (self.skill_md, self.body, self.description) if text and text.strip()), "")
        return Skill(
            skill_id=self.row_id,
            name=self.name or "",
            description=self.description or "",
            body=body,
            category=self.major,
            source=self.repo or _ORIGIN,
            license=self.license,
        )


class _QueryRow(NamedRow):
    query: Text
    generator_model: Label = ""


class _QrelRow(Row):
    query_id: Text
    skill_id: Text
    relevance: float


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of SkillRet's folder `data` (see load_benchmark)."""
    tasks: dict[str, Task] = {}
    pool: dict[str, Skill] = {}
    for name, file in split_files(folder / "qrels", ".jsonl", split).items():
        skills = unique("skill", read_rows(_SkillRow, folder / "skills" / file.name))
        queries = unique("query", read_rows(_QueryRow, folder / "queries" / file.name))
        rows = (Qrel(row.query_id, row.skill_id, row.relevance, where) for where, row in read_rows(_QrelRow, file))
        judged = relevances(rows, queries, skills)
        if without := [query_id for query_id in queries if query_id not in judged]:
            raise SkilltrainError(f"query '{without[0]}' ({len(without)} in all) has no row here", where=file)
        for query_id, relevance in judged.items():
            if query_id in tasks:
                what = f"query '{query_id}' is of the splits {tasks[query_id].query.split} and {name}"
                raise SkilltrainError(what, where=folder, fix="give the split to score")
            row = queries[query_id]
            labels = {"generator": row.generator_model}
            tasks[query_id] = make_task(query_id, row.query, relevance, origin=_ORIGIN, split=name, labels=labels)
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}
    return make_benchmark(folder, list(tasks.values()), split, _query_ids(folder), list(pool.values()))


def _query_ids(folder: Path) -> set[str]:
    """The queries of all splits."""
    files = sorted((folder / "queries").glob("*.jsonl"))
    return {query_id for file in files for query_id in unique("query", read_rows(_QueryRow, file))}
