"""Benchmarks in BEIR's form: corpus.jsonl, queries.jsonl and qrels/{split}.tsv."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, name_of, split_files, with_pool
from skilltrain.evaluation.benchmarks.qrels import Qrel, judged_tasks, relevances
from skilltrain.evaluation.benchmarks.rows import Row, Text, unique_rows
from skilltrain.records import Skill

_HEADER = ["query-id", "corpus-id", "score"]


class _CorpusRow(Row):
    row_id: Text = Field(alias="_id")
    title: str | None = None
    text: str


class _QueryRow(Row):
    row_id: Text = Field(alias="_id")
    text: Text


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a BEIR folder (see load_benchmark)."""
    texts = {
        query_id: row.text
        for query_id, row in unique_rows(_QueryRow, folder / "queries.jsonl", "query", lambda row: row.row_id)
    }
    corpus = folder / "corpus.jsonl"
    rows = unique_rows(_CorpusRow, corpus, "skill", lambda row: row.row_id) if corpus.exists() else ()
    skills = [Skill(skill_id, name=row.title or "", description="", body=row.text) for skill_id, row in rows]
    known = {skill.skill_id for skill in skills} if corpus.exists() else None
    tasks: dict[str, Task] = {}
    for name, file in split_files(folder / "qrels", ".tsv", split).items():
        judged = relevances(_tsv_rows(file), texts.keys(), known)
        for task in judged_tasks(texts, judged, origin=name_of(folder), split=name):
            if (other := tasks.setdefault(task.query.query_id, task)) is not task:
                what = f"query '{task.query.query_id}' is of split {other.query.split} as well"
                raise SkilltrainError(what, where=file, fix="give the split to score")
    if not tasks:
        raise SkilltrainError("holds no query to score", where=folder)
    return with_pool(folder, tasks.values(), skills, texts)


def _tsv_rows(file: Path) -> Iterator[Qrel]:
    """The rows below the header. Raises SkilltrainError naming the line that is not three columns, one a number."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise SkilltrainError(f"cannot be read: {error}", where=file) from error
    if lines[0].rstrip("\r").split("\t") != _HEADER:
        what = f"the first line is not the header {', '.join(_HEADER)}, between tabs"
        raise SkilltrainError(what, where=f"{file}, line 1")
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        where, cells = f"{file}, line {number}", line.rstrip("\r").split("\t")
        if len(cells) != 3 or not all(cells):
            raise SkilltrainError(f"expected query-id, corpus-id and score between tabs, found {cells}", where=where)
        try:
            yield Qrel(cells[0], cells[1], float(cells[2]), where)
        except ValueError as error:
            raise SkilltrainError(f"the score of query '{cells[0]}' is no number: '{cells[2]}'", where=where) from error
