"""Benchmarks that give a score to a query and a skill, row by row: BEIR's form, and SkillRet (Cho et al., 2026).

What scores above 0 is gold, and its gain is the score; 0 or less says not relevant, as trec_eval reads it.
BEIR: corpus.jsonl (title as name, text as body), queries.jsonl and qrels/{split}.tsv with its header. Queries without
a row are not scored; without corpus.jsonl the ids are those of a pool that is given.
SkillRet's folder `data`: skills, queries and qrels, each with a file a split. A split has a pool of its own, so give
split=test for the published protocol: all splits at once are ranked over all their skills.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, make_task, name_of, split_files
from skilltrain.evaluation.benchmarks.rows import Label, NamedRow, Row, Text, read_rows, unique
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import check_regular
from skilltrain.records import Skill

_HEADER = ["query-id", "corpus-id", "score"]


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

    def labels(self) -> dict[str, str]:
        return {"generator": self.generator_model}


_Queries = Mapping[str, _BeirQuery] | Mapping[str, _SkillRetQuery]


class _Qrel(Row):
    query_id: Text
    skill_id: Text
    score: float = Field(alias="relevance")


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a BEIR folder."""
    queries = unique("query", read_rows(_BeirQuery, folder / "queries.jsonl"))
    corpus = folder / "corpus.jsonl"
    documents = unique("skill", read_rows(_Document, corpus)) if corpus.exists() else None
    tasks: dict[str, Task] = {}
    for part, file in split_files(folder / "qrels", ".tsv", split).items():
        judged = _relevances(_tsv_rows(file), queries, documents)
        _add_tasks(tasks, judged, queries, name_of(folder), file, part)
    pool = [Skill(row.row_id, row.title or "", description="", body=row.text) for row in (documents or {}).values()]
    return make_benchmark(folder, list(tasks.values()), split, queries, pool)


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of SkillRet's folder `data`."""
    tasks: dict[str, Task] = {}
    pool: dict[str, Skill] = {}
    for part, file in split_files(folder / "qrels", ".jsonl", split).items():
        skills = unique("skill", read_rows(_SkillRetSkill, folder / "skills" / file.name))
        queries = unique("query", read_rows(_SkillRetQuery, folder / "queries" / file.name))
        judged = _relevances(read_rows(_Qrel, file), queries, skills)
        if without := [query_id for query_id in queries if query_id not in judged]:
            raise SkilltrainError(f"query '{without[0]}' ({len(without)} in all) has no row here", where=file)
        _add_tasks(tasks, judged, queries, "skillret", file, part)
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}
    files = sorted((folder / "queries").glob("*.jsonl"))
    of_all_splits = [query_id for file in files for query_id in unique("query", read_rows(_SkillRetQuery, file))]
    return make_benchmark(folder, list(tasks.values()), split, of_all_splits, list(pool.values()))


def _add_tasks(
    tasks: dict[str, Task], judged: Mapping[str, Relevance], queries: _Queries, origin: str, file: Path, split: str
) -> None:
    for query_id, relevance in judged.items():
        if query_id in tasks:
            what = f"query '{query_id}' is of split {tasks[query_id].query.split} as well"
            raise SkilltrainError(what, where=file, fix="give the split to score")
        row = queries[query_id]
        tasks[query_id] = make_task(query_id, row.text, relevance, origin=origin, split=split, labels=row.labels())


def _relevances(
    qrels: Iterable[tuple[str, _Qrel]], query_ids: Collection[str], skill_ids: Collection[str] | None
) -> dict[str, Relevance]:
    """query_id → relevance, for the judged ones of `query_ids`; `skill_ids` is the published pool, None without one."""
    scores: dict[str, dict[str, float]] = {}
    first: dict[str, str] = {}  # query_id → file and line of its first row
    for where, row in qrels:
        fault = None
        if row.query_id not in query_ids:
            fault = f"query '{row.query_id}' is not among the queries"
        elif skill_ids is not None and row.skill_id not in skill_ids:
            fault = f"skill '{row.skill_id}' of query '{row.query_id}' is not among the benchmark's own skills"
        elif not math.isfinite(row.score):
            fault = f"the score of query '{row.query_id}' is {row.score}, no number"
        elif row.skill_id in scores.get(row.query_id, ()):
            fault = f"query '{row.query_id}' and skill '{row.skill_id}' stand together twice"
        if fault:
            raise SkilltrainError(fault, where=where)
        first.setdefault(row.query_id, where)
        scores.setdefault(row.query_id, {})[row.skill_id] = row.score
    found: dict[str, Relevance] = {}
    for query_id in filter(scores.__contains__, query_ids):
        gains = {skill_id: score for skill_id, score in scores[query_id].items() if score > 0}
        found[query_id] = Relevance(frozenset(gains), gains)
        if not gains:
            raise SkilltrainError(f"query '{query_id}' has no skill with a score above 0", where=first[query_id])
    return found


def _tsv_rows(file: Path) -> Iterator[tuple[str, _Qrel]]:
    """The rows below the header."""
    check_regular(file)
    try:
        header, *lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise SkilltrainError(f"cannot be read: {error}", where=file) from error
    if header.split("\t") != _HEADER:
        what = f"the first line is not the header {', '.join(_HEADER)}, between tabs"
        raise SkilltrainError(what, where=f"{file}, line 1")
    for number, line in ((number, line) for number, line in enumerate(lines, 2) if line.strip()):
        where, cells = f"{file}, line {number}", line.split("\t")
        if len(cells) != 3 or not all(cells):
            raise SkilltrainError(f"expected query-id, corpus-id and score between tabs, found {cells}", where=where)
        try:
            yield where, _Qrel(query_id=cells[0], skill_id=cells[1], relevance=float(cells[2]))
        except ValueError as error:
            raise SkilltrainError(f"the score of query '{cells[0]}' is no number: '{cells[2]}'", where=where) from error
