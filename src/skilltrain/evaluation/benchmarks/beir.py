"""Benchmarks in BEIR's form: corpus.jsonl, queries.jsonl and qrels/{split}.tsv."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task, make_benchmark, make_task, name_of, split_files
from skilltrain.evaluation.benchmarks.qrels import Qrel, relevances
from skilltrain.evaluation.benchmarks.rows import NamedRow, Text, read_rows, unique
from skilltrain.files import check_regular
from skilltrain.records import Skill

_HEADER = ["query-id", "corpus-id", "score"]


class _CorpusRow(NamedRow):
    row_id: Text = Field(alias="_id")
    title: str | None = None
    text: str


class _QueryRow(NamedRow):
    row_id: Text = Field(alias="_id")
    text: Text
    metadata: Any = None

    def labels(self) -> dict[str, str]:
        """The texts of `metadata`, whose form BEIR leaves open."""
        facts = self.metadata if isinstance(self.metadata, dict) else {}
        return {str(name): value for name, value in facts.items() if isinstance(value, str)}


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """The benchmark of a BEIR folder (see load_benchmark)."""
    queries = unique("query", read_rows(_QueryRow, folder / "queries.jsonl"))
    corpus = folder / "corpus.jsonl"
    rows = unique("skill", read_rows(_CorpusRow, corpus)) if corpus.exists() else {}
    skills = [Skill(skill_id, name=row.title or "", description="", body=row.text) for skill_id, row in rows.items()]
    tasks: dict[str, Task] = {}
    for part, file in split_files(folder / "qrels", ".tsv", split).items():
        judged = relevances(_tsv_rows(file), queries, rows if corpus.exists() else None)
        for query_id, relevance in judged.items():
            if query_id in tasks:
                what = f"query '{query_id}' is of split {tasks[query_id].query.split} as well"
                raise SkilltrainError(what, where=file, fix="give the split to score")
            row, origin = queries[query_id], name_of(folder)
            tasks[query_id] = make_task(query_id, row.text, relevance, origin=origin, split=part, labels=row.labels())
    return make_benchmark(folder, list(tasks.values()), split, queries, skills)


def _tsv_rows(file: Path) -> Iterator[Qrel]:
    """The rows below the header. Raises SkilltrainError naming the line that is not three columns, one a number."""
    check_regular(file)
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
