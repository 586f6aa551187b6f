"""Benchmarks with qrels (rows of query, skill and score): BEIR, and SkillRet (Cho et al., 2026).

A skill with a score above 0 is gold, and the score is its gain. A score of 0 or less means not
relevant, as in trec_eval. Queries without a row are not scored.

- BEIR: corpus.jsonl (title as name, text as body), queries.jsonl and qrels/{split}.tsv with its
  header, or qrels/{split}.jsonl as in MTEB. Without corpus.jsonl, the ids are those of the pool to
  evaluate on.
- SkillRet's folder `data`: skills, queries and qrels, each with one file per split. Every split has
  its own pool. The published protocol is split=test.
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
    rows_by_id,
)
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill


class _QueryRow(NamedRow):
    row_id: Text = Field(validation_alias=AliasChoices("_id", "id"))
    text: Text = Field(validation_alias=AliasChoices("text", "query"))
    generator_model: Label = ""
    metadata: Any = None

    def labels(self) -> dict[str, str]:
        """Return the texts in `metadata`, and the model that wrote the query as `generator`.

        BEIR does not say what `metadata` holds, so all other values are ignored.
        """
        metadata = self.metadata if isinstance(self.metadata, dict) else {}
        labels = {str(name): value for name, value in metadata.items() if isinstance(value, str)}
        return labels | {"generator": self.generator_model}


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
        """Return the skill with the whole SKILL.md as its body, as in the released evaluation.

        A skill without SKILL.md and body has its description as the body.
        """
        # The first of these texts that is not blank becomes the body.
        texts = (self.skill_md, self.body, self.description)
        filled = [text for text in texts if text and text.strip()]
        return Skill(
            self.row_id,
            name=self.name or "",
            description=self.description or "",
            body=filled[0] if filled else "",
            category=self.major,
            source=self.repo or "skillret",
            license=self.license,
        )


class _Qrel(Row):
    query_id: Text = Field(validation_alias=AliasChoices("query_id", "query-id"))
    skill_id: Text = Field(validation_alias=AliasChoices("skill_id", "corpus-id"))
    score: float = Field(validation_alias=AliasChoices("relevance", "score"), strict=False)


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """Read a BEIR folder: queries, documents and judgements (qrels).

    The documents become the skills of the pool. A folder without corpus.jsonl has no pool.

    Args:
        folder: Folder with queries.jsonl, qrels/ and perhaps corpus.jsonl.
        split: Split to score; None for all.
    """
    queries = rows_by_id("query", read_rows(_QueryRow, folder / "queries.jsonl"))
    corpus = folder / "corpus.jsonl"
    documents = rows_by_id("skill", read_rows(_Document, corpus)) if corpus.exists() else {}
    tasks: list[Task] = []
    for file in _split_files(folder / "qrels", split):
        rows = _tsv_rows(file) if file.suffix == ".tsv" else read_rows(_Qrel, file)
        tasks += _tasks(file, rows, queries, name_of(folder))
    pool = [
        Skill(row.row_id, row.title or "", description="", body=row.text)
        for row in documents.values()
    ]
    return make_benchmark(folder, tasks, split, query_ids=queries, pool=pool)


def read_skillret(folder: Path, split: str | None) -> Benchmark:
    """Read SkillRet's folder `data`.

    Every split has its own queries, judgements (qrels) and pool of skills.

    Args:
        folder: The folder, with skills/, queries/ and qrels/.
        split: Split to score; None for all.
    """
    tasks: list[Task] = []
    pool: dict[str, Skill] = {}
    # Files of the same split have the same name in the three folders.
    for file in _split_files(folder / "qrels", split):
        skills = rows_by_id("skill", read_rows(_SkillRow, folder / "skills" / file.name))
        queries = rows_by_id("query", read_rows(_QueryRow, folder / "queries" / file.name))
        tasks += _tasks(file, read_rows(_Qrel, file), queries, "skillret")
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}

    # The benchmark lists the queries of other splits as unscored.
    query_files = sorted((folder / "queries").glob("*.jsonl"))
    query_ids = [row.row_id for _, row in read_rows(_QueryRow, *query_files)]
    return make_benchmark(folder, tasks, split, query_ids=query_ids, pool=[*pool.values()])


def _split_files(folder: Path, split: str | None) -> list[Path]:
    """Return the file of a split in `folder`, or the files of all splits if `split` is None.

    The name of a file is its split: `test.tsv` has the split `test`.

    Raises:
        SkilltrainError: There are no files, or there is none for the split.
    """
    paths = [file for file in sorted(folder.glob("*")) if file.suffix in (".tsv", ".jsonl")]
    files = {file.stem: file for file in paths}
    if not files:
        problem = "holds no judgements: no .tsv or .jsonl file"
        raise SkilltrainError("missing-table", problem, where=folder)
    if split is None:
        return [*files.values()]
    if split not in files:
        problem = f"holds no split '{split}'"
        fix = f"its splits are {', '.join(files)}"
        raise SkilltrainError("empty-split", problem, where=folder, fix=fix)
    return [files[split]]


def _tasks(
    file: Path, qrels: Iterable[tuple[str, _Qrel]], queries: Mapping[str, _QueryRow], origin: str
) -> Iterator[Task]:
    """Yield the tasks of one split, in the order of `queries`.

    A task is a query with its judgements. Queries without judgements in this split are left out.

    Args:
        file: File of the judgements. Its name is the split: `test.tsv` has the split `test`.
        qrels: Judgements (query id, skill id, score), each after its file and line for errors.
        queries: Queries by id.
        origin: Name of the benchmark that the queries come from.

    Raises:
        SkilltrainError: A judgement has an unknown query, or a query and a skill repeat.
    """
    # Group the judgements: score by query id, then by skill id.
    scores_by_query: dict[str, dict[str, float]] = {}
    for where, row in qrels:
        if row.query_id not in queries:
            problem = f"query '{row.query_id}' is not among the queries"
            raise SkilltrainError("unknown-query", problem, where=where)
        scores = scores_by_query.setdefault(row.query_id, {})
        if row.skill_id in scores:
            problem = f"query '{row.query_id}' and skill '{row.skill_id}' appear together twice"
            raise SkilltrainError("repeated-id", problem, where=where)
        scores[row.skill_id] = row.score

    for query_id, query_row in queries.items():
        scores = scores_by_query.get(query_id)
        if scores is None:
            continue  # the query belongs to another split
        # A skill is gold if its score is above 0, and its score is its gain in nDCG. The condition
        # also keeps NaN, so that `check_relevance` reports the NaN.
        gains = {skill_id: score for skill_id, score in scores.items() if not score <= 0}
        query = Query(query_id, query_row.text, kind="", origin=origin, split=file.stem)
        yield task_of(query, Relevance(frozenset(gains), gains), query_row.labels(), file)


def _tsv_rows(file: Path) -> Iterator[tuple[str, _Qrel]]:
    """Yield (file and line, row) for the rows below the header `query-id corpus-id score`.

    Columns are separated by tabs, and quotes are ordinary characters.
    """
    check_regular(file)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        for values in reader:
            where = f"{file}, line {reader.line_num}"
            yield where, parse_row(_Qrel, values, where)


BEIR = BenchmarkReader(
    "queries.jsonl", "queries.jsonl and qrels/*.tsv or .jsonl (BEIR, MTEB)", read_beir
)
SKILLRET = BenchmarkReader(
    "queries", "queries/, skills/ and qrels/*.jsonl (SkillRet's data)", read_skillret
)
