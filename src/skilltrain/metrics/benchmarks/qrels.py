"""Benchmarks that give a score to a query and a skill, row by row: BEIR's form, and SkillRet (Cho et al., 2026).

What scores above 0 is gold, and its gain is the score; 0 or less says not relevant, as trec_eval reads it. Queries
without a row are not scored.
BEIR: corpus.jsonl (title as name, text as body), queries.jsonl and qrels/{split}.tsv with its header; without
corpus.jsonl the ids are those of a pool that is given.
SkillRet's folder `data`: skills, queries and qrels, each with a file per split. A split has a pool of its own: give
split=test for the published protocol.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import check_regular
from skilltrain.metrics.benchmarks.benchmark import (
    Benchmark,
    BenchmarkReader,
    Task,
    make_benchmark,
    name_of,
    task_of,
)
from skilltrain.metrics.benchmarks.rows import (
    Label,
    NamedRow,
    Row,
    Text,
    parse_row,
    read_rows,
    unique,
)
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill


class _QueryRow(NamedRow):
    row_id: Text = Field(validation_alias=AliasChoices("_id", "id"))
    text: Text = Field(validation_alias=AliasChoices("text", "query"))
    generator_model: Label = ""
    metadata: Any = None

    def labels(self) -> dict[str, str]:
        """The model that wrote it, and the texts of `metadata`, whose form BEIR leaves open."""
        facts = self.metadata if isinstance(self.metadata, dict) else {}
        texts = {str(name): value for name, value in facts.items() if isinstance(value, str)}
        return {**texts, "generator": self.generator_model}


class _Document(NamedRow):
    row_id: Text = Field(alias="_id")
    title: str | None = None
    text: str


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
        body = next(
            (
                text
                for text in (self.skill_md, self.body, self.description)
                if text and text.strip()
            ),
            "",
        )
        name, about, source = self.name or "", self.description or "", self.repo or "skillret"
        return Skill(
            self.row_id, name, about, body, category=self.major, source=source, license=self.license
        )


class _Qrel(Row):
    query_id: Text = Field(validation_alias=AliasChoices("query_id", "query-id"))
    skill_id: Text = Field(validation_alias=AliasChoices("skill_id", "corpus-id"))
    score: float = Field(validation_alias=AliasChoices("relevance", "score"), strict=False)


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a BEIR folder."""
    queries = unique("query", read_rows(_QueryRow, folder / "queries.jsonl"))
    corpus, origin = folder / "corpus.jsonl", name_of(folder)
    documents = unique("skill", read_rows(_Document, corpus)) if corpus.exists() else {}
    tasks: list[Task] = []
    for file in _split_files(folder / "qrels", ".tsv", split):
        tasks += _tasks(file, _tsv_rows(file), queries, origin)
    pool = [
        Skill(row.row_id, row.title or "", description="", body=row.text)
        for row in documents.values()
    ]
    return make_benchmark(folder, tasks, split, queries, pool)


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of SkillRet's folder `data`."""
    tasks: list[Task] = []
    pool: dict[str, Skill] = {}
    for file in _split_files(folder / "qrels", ".jsonl", split):
        skills = unique("skill", read_rows(_SkillRow, folder / "skills" / file.name))
        queries = unique("query", read_rows(_QueryRow, folder / "queries" / file.name))
        tasks += _tasks(file, read_rows(_Qrel, file), queries, "skillret")
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}
    of_all_splits = read_rows(_QueryRow, *sorted((folder / "queries").glob("*.jsonl")))
    return make_benchmark(
        folder, tasks, split, [row.row_id for _, row in of_all_splits], list(pool.values())
    )


def _split_files(folder: Path, suffix: str, split: str | None) -> list[Path]:
    """The file of a split in `folder`, or of each."""
    files = {file.stem: file for file in sorted(folder.glob(f"*{suffix}"))}
    if split not in (None, *files):
        raise SkilltrainError(
            "empty-split",
            f"holds no split '{split}'",
            where=folder,
            fix=f"its splits are {', '.join(files)}",
        )
    return [file for name, file in files.items() if split in (None, name)]


def _tasks(
    file: Path, qrels: Iterable[tuple[str, _Qrel]], queries: Mapping[str, _QueryRow], origin: str
) -> Iterator[Task]:
    """Yield the tasks of a split's `file`, in the order of `queries`."""
    scores: dict[str, dict[str, float]] = {}
    for where, row in qrels:
        if row.query_id not in queries:
            raise SkilltrainError(
                "unknown-query", f"query '{row.query_id}' is not among the queries", where=where
            )
        if row.skill_id in scores.setdefault(row.query_id, {}):
            fault = f"query '{row.query_id}' and skill '{row.skill_id}' appear together twice"
            raise SkilltrainError("repeated-id", fault, where=where)
        scores[row.query_id][row.skill_id] = row.score
    for query_id in (query_id for query_id in queries if query_id in scores):
        # NaN is kept here, and refused with the task
        gains = {skill_id: score for skill_id, score in scores[query_id].items() if not score <= 0}
        query = Query(query_id, queries[query_id].text, kind="", origin=origin, split=file.stem)
        yield task_of(query, Relevance(frozenset(gains), gains), queries[query_id].labels(), file)


def _tsv_rows(file: Path) -> Iterator[tuple[str, _Qrel]]:
    """Yield (file and line, row) of what stands below the header `query-id corpus-id score`."""
    check_regular(file)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        for values in reader:
            where = f"{file}, line {reader.line_num}"
            yield where, parse_row(_Qrel, values, where)


BEIR = BenchmarkReader("queries.jsonl", "queries.jsonl and qrels/*.tsv (BEIR)", read_beir)
SKILLRET = BenchmarkReader(
    "queries", "queries/, skills/ and qrels/*.jsonl (SkillRet's data)", read_skillret
)
