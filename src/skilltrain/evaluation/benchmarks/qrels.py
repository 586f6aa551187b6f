"""Benchmarks that give a score to a query and a skill, row by row: BEIR's form, and SkillRet (Cho et al., 2026).

What scores above 0 is gold, and its gain is the score; 0 or less says not relevant, as trec_eval reads it.
BEIR: corpus.jsonl (title as name, text as body), queries.jsonl and qrels/{split}.tsv with its header. Queries without
a row are not scored; without corpus.jsonl the ids are those of a pool that is given.
SkillRet's folder `data`: skills, queries and qrels, each with a file a split. A split has a pool of its own, so give
split=test for the published protocol: all splits at once are ranked over all their skills.
"""

import csv
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, name_of, task_of
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, Text, parse_row, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import check_regular
from skilltrain.records import Query, Skill


class _Document(NamedRow):
    row_id: Text = Field(alias="_id")
    title: str | None = None
    text: str


class _BeirQuery(NamedRow):
    row_id: Text = Field(alias="_id")
    text: Text
    metadata: Any = None

    def labels(self) -> dict[str, str]:
        """The texts of `metadata`, whose form BEIR leaves open."""
        facts = self.metadata if isinstance(self.metadata, dict) else {}
        return {str(name): value for name, value in facts.items() if isinstance(value, str)}


class _SkillRetSkill(NamedRow):
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
        name, about, source = self.name or "", self.description or "", self.repo or "skillret"
        return Skill(self.row_id, name, about, body, category=self.major, source=source, license=self.license)


class _SkillRetQuery(NamedRow):
    text: Text = Field(alias="query")
    generator_model: Label = ""


class _Qrel(Row):
    query_id: Text = Field(validation_alias=AliasChoices("query_id", "query-id"))
    skill_id: Text = Field(validation_alias=AliasChoices("skill_id", "corpus-id"))
    score: float = Field(validation_alias=AliasChoices("relevance", "score"), strict=False)


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a BEIR folder."""
    queries = unique("query", read_rows(_BeirQuery, folder / "queries.jsonl"))
    corpus, origin = folder / "corpus.jsonl", name_of(folder)
    documents = unique("skill", read_rows(_Document, corpus)) if corpus.exists() else None
    tasks: list[Task] = []
    for part, file in _split_files(folder / "qrels", ".tsv", split).items():
        for query_id, gains in _gains(_tsv_rows(file), queries, documents).items():
            row = queries[query_id]
            query = Query(query_id, row.text, kind="", origin=origin, split=part)
            tasks.append(task_of(query, Relevance(frozenset(gains), gains), row.labels(), file))
    pool = [Skill(row.row_id, row.title or "", description="", body=row.text) for row in (documents or {}).values()]
    return make_benchmark(folder, tasks, split, queries, pool)


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of SkillRet's folder `data`."""
    tasks: list[Task] = []
    pool: dict[str, Skill] = {}
    for part, file in _split_files(folder / "qrels", ".jsonl", split).items():
        skills = unique("skill", read_rows(_SkillRetSkill, folder / "skills" / file.name))
        queries = unique("query", read_rows(_SkillRetQuery, folder / "queries" / file.name))
        judged = _gains(read_rows(_Qrel, file), queries, skills)
        for query_id, row in queries.items():
            gains = judged.get(query_id, {})
            query = Query(query_id, row.text, kind="", origin="skillret", split=part)
            labels = {"generator": row.generator_model}
            tasks.append(task_of(query, Relevance(frozenset(gains), gains), labels, file))
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}
    of_all_splits = read_rows(_SkillRetQuery, *sorted((folder / "queries").glob("*.jsonl")))
    return make_benchmark(folder, tasks, split, [row.row_id for row in of_all_splits], list(pool.values()))


def _split_files(folder: Path, suffix: str, split: str | None) -> dict[str, Path]:
    """split → its file in `folder`, of one split or of all."""
    files = {file.name.removesuffix(suffix): file for file in sorted(folder.glob(f"*{suffix}"))}
    if split not in (None, *files):
        raise SkilltrainError(f"holds no split '{split}'", where=folder, fix=f"its splits are {', '.join(files)}")
    return {name: file for name, file in files.items() if split in (None, name)}


def _gains(
    qrels: Iterable[_Qrel], query_ids: Collection[str], skill_ids: Collection[str] | None
) -> dict[str, dict[str, float]]:
    """query_id → skill_id → gain above 0, in the order of `query_ids`; `skill_ids` is the published pool, if any."""
    scores: dict[str, dict[str, float]] = {}
    for row in qrels:
        fault = None
        if row.query_id not in query_ids:
            fault = f"query '{row.query_id}' is not among the queries"
        elif skill_ids is not None and row.skill_id not in skill_ids:
            fault = f"skill '{row.skill_id}' of query '{row.query_id}' is not among the benchmark's own skills"
        elif row.skill_id in scores.get(row.query_id, ()):
            fault = f"query '{row.query_id}' and skill '{row.skill_id}' appear together twice"
        if fault:
            raise SkilltrainError(fault, where=row.where)
        scores.setdefault(row.query_id, {})[row.skill_id] = row.score
    judged = {query_id: scores[query_id] for query_id in query_ids if query_id in scores}
    # NaN is kept here, and refused with the task
    return {one: {skill_id: score for skill_id, score in row.items() if not score <= 0} for one, row in judged.items()}


def _tsv_rows(file: Path) -> Iterator[_Qrel]:
    """Yield the rows below the header `query-id corpus-id score`."""
    check_regular(file)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        for values in reader:
            yield parse_row(_Qrel, values, f"{file}, line {reader.line_num}")
