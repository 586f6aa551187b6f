"""SkillRet (Cho et al., 2026) as it is published: skills, queries and qrels, one JSON Lines file a split each."""

from collections.abc import Iterator
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, split_files, with_pool
from skilltrain.evaluation.benchmarks.qrels import Qrel, judged_tasks, relevances
from skilltrain.evaluation.benchmarks.rows import Row, Text, parse_row, unique_rows
from skilltrain.files import read_jsonl
from skilltrain.records import Skill

_ORIGIN = "skillret"


class _SkillRow(Row):
    id: Text
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
            skill_id=self.id,
            name=self.name or "",
            description=self.description or "",
            body=body,
            category=self.major,
            source=self.repo or _ORIGIN,
            license=self.license,
        )


class _QueryRow(Row):
    id: Text
    query: Text


class _QrelRow(Row):
    query_id: Text
    skill_id: Text
    relevance: float


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of SkillRet's folder `data` (see load_benchmark)."""
    tasks: list[Task] = []
    pool: dict[str, Skill] = {}
    for name, file in split_files(folder / "qrels", ".jsonl", split).items():
        skills_file, queries_file = folder / "skills" / file.name, folder / "queries" / file.name
        skills = {
            skill_id: row.skill() for skill_id, row in unique_rows(_SkillRow, skills_file, "skill", lambda row: row.id)
        }
        queries = unique_rows(_QueryRow, queries_file, "query", lambda row: row.id)
        texts = {query_id: row.query for query_id, row in queries}
        judged = relevances(_qrels(file), texts.keys(), skills.keys())
        if without := [query_id for query_id in texts if query_id not in judged]:
            raise SkilltrainError(f"query '{without[0]}' ({len(without)} in all) has no row here", where=file)
        tasks += judged_tasks(texts, judged, origin=_ORIGIN, split=name)
        pool |= skills
    _check_unique(tasks, folder)
    return with_pool(folder, tasks, pool.values(), _query_ids(folder))


def _query_ids(folder: Path) -> set[str]:
    """The queries of all splits."""
    files = sorted((folder / "queries").glob("*.jsonl"))
    return {query_id for file in files for query_id, _ in unique_rows(_QueryRow, file, "query", lambda row: row.id)}


def _qrels(file: Path) -> Iterator[Qrel]:
    for line, values in read_jsonl(file):
        where = f"{file}, line {line}"
        row = parse_row(_QrelRow, values, where)
        yield Qrel(row.query_id, row.skill_id, row.relevance, where)


def _check_unique(tasks: list[Task], folder: Path) -> None:
    splits: dict[str, str] = {}
    for task in tasks:
        query_id, split = task.query.query_id, task.query.split
        if (other := splits.setdefault(query_id, split)) != split:
            what = f"query '{query_id}' is of the splits {other} and {split}"
            raise SkilltrainError(what, where=folder, fix="give the split to score")
