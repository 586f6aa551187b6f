"""Benchmarks with qrels (rows of query, skill and score): BEIR, and SkillRet (Cho et al., 2026).

A skill with a score above 0 is gold, and the score is its gain. A score of 0 or less means not
relevant, as in trec_eval. Queries without a row are not scored.

- BEIR and MTEB: corpus.jsonl (title as name, text as body), queries.jsonl and qrels/{split}.tsv, or
  qrels/{split}.jsonl. The repositories of MTEB on the Hub have folders of parquet files instead:
  corpus, queries, and qrels or data. Without a corpus, the ids are those of the pool to evaluate
  on.
- SkillRet's folder `data`: skills, queries and qrels, each with one file per split. Every split has
  its own pool. The published protocol is split=test.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from skilltrain.errors import SkilltrainError
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
    Text,
    read_rows,
    rows_by_id,
)
from skilltrain.metrics.benchmarks.trec import Id, read_qrels
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill

# Ending of the name of a parquet file on the Hub, as in `test-00000-of-00001.parquet`.
_SHARD = re.compile(r"-\d+-of-\d+$")


class QueryRow(NamedRow):
    """A query."""

    row_id: Id = Field(validation_alias=AliasChoices("_id", "id"))
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
    row_id: Id = Field(validation_alias=AliasChoices("_id", "id"))
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


def read_beir(folder: Path, split: str | None) -> Benchmark:
    """Read a BEIR folder: queries, documents and judgements (qrels).

    The documents become the skills of the pool. A folder without corpus.jsonl has no pool.

    Args:
        folder: Folder with queries.jsonl, qrels/ and perhaps corpus.jsonl.
        split: Split to score; None for all.
    """
    queries = read_beir_queries(folder, split)
    documents = rows_by_id("skill", read_rows(_Document, *beir_files(folder, "corpus", split)))
    pool = [
        Skill(row.row_id, row.title or "", description="", body=row.text)
        for row in documents.values()
    ]
    tasks = [*beir_tasks(folder, queries, split)]
    return make_benchmark(folder, tasks, split, query_ids=queries, pool=pool)


def read_beir_queries(folder: Path, split: str | None = None) -> dict[str, QueryRow]:
    """Read the queries of a BEIR folder by id."""
    return rows_by_id("query", read_rows(QueryRow, *beir_files(folder, "queries", split)))


def beir_tasks(
    folder: Path, queries: Mapping[str, QueryRow], split: str | None = None
) -> Iterator[Task]:
    """Yield the judged queries of a BEIR folder, also those without a relevant skill.

    Args:
        folder: Folder with qrels/, or with data/ as in older repositories of MTEB.
        queries: Queries by id.
        split: The split; None for all.
    """
    qrels = folder / "qrels"
    if not qrels.exists() and (folder / "data").exists():
        qrels = folder / "data"
    for file in _split_files(qrels, split):
        yield from _tasks(file, queries, name_of(folder))


def beir_files(folder: Path, name: str, split: str | None = None) -> list[Path]:
    """Return the files of the corpus or the queries of a BEIR folder.

    Args:
        folder: The folder.
        name: `corpus` or `queries`.
        split: Split whose files are returned, if each file belongs to a split; None for all files.

    Returns:
        The .jsonl file of BEIR, or the parquet files of MTEB.
    """
    file = folder / f"{name}.jsonl"
    if file.exists():
        return [file]
    files = sorted((folder / name).glob("*.parquet"))
    files_of_split = [file for file in files if _split_of(file) == split]
    # If no file is named after the split, the files hold the texts of all splits.
    return files_of_split or files


def _split_of(file: Path) -> str:
    """Return the split that the name of a file gives.

    For example, `test.tsv` and `test-00000-of-00001.parquet` have the split `test`.
    """
    return _SHARD.sub("", file.stem)


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
        queries = rows_by_id("query", read_rows(QueryRow, folder / "queries" / file.name))
        tasks += _tasks(file, queries, "skillret")
        pool |= {skill_id: row.skill() for skill_id, row in skills.items()}

    # The benchmark lists the queries of other splits as unscored.
    query_files = sorted((folder / "queries").glob("*.jsonl"))
    query_ids = [row.row_id for _, row in read_rows(QueryRow, *query_files)]
    return make_benchmark(folder, tasks, split, query_ids=query_ids, pool=[*pool.values()])


def _split_files(folder: Path, split: str | None) -> list[Path]:
    """Return the files with the judgements of a split.

    A file holds judgements of one split, and is named after this split, as in `test.tsv`.

    Args:
        folder: Folder of the files.
        split: The split; None for all.

    Raises:
        SkilltrainError: There are no files, or there is none for the split.
    """
    suffixes = (".tsv", ".txt", ".jsonl", ".parquet")
    files = [file for file in sorted(folder.glob("*")) if file.suffix in suffixes]
    if not files:
        problem = "holds no judgements: no .tsv, .txt, .jsonl or .parquet file"
        raise SkilltrainError("missing-table", problem, where=folder)
    # The split None selects every file.
    files_of_split = [file for file in files if split in (None, _split_of(file))]
    if not files_of_split:
        problem = f"holds no split '{split}'"
        fix = f"its splits are {', '.join(map(_split_of, files))}"
        raise SkilltrainError("empty-split", problem, where=folder, fix=fix)
    return files_of_split


def _tasks(file: Path, queries: Mapping[str, QueryRow], origin: str) -> Iterator[Task]:
    """Yield the tasks of one split, in the order of `queries`.

    A task is a query with its judgements. Queries without judgements in this split are left out.

    Args:
        file: File of the judgements. Its name is the split: `test.tsv` has the split `test`.
        queries: Queries by id.
        origin: Name of the benchmark that the queries come from.

    Yields:
        A task for each query with judgements: its gold skills, and the gain of each judged skill.

    Raises:
        SkilltrainError: A judgement has an unknown query, or a pair of query and skill appears
            twice.
    """
    # Group the judgements: score by query id, then by skill id.
    scores_by_query: dict[str, dict[str, float]] = {}
    # `where` is the file and the line, for errors.
    for where, row in read_qrels(file):
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
        # A skill is gold if its score is above 0, and its score is its gain in nDCG.
        gains = {skill_id: max(score, 0.0) for skill_id, score in scores.items()}
        gold = frozenset(skill_id for skill_id, gain in gains.items() if gain)
        query = Query(query_id, query_row.text, kind="", origin=origin, split=_split_of(file))
        yield task_of(query, Relevance(gold, gains), query_row.labels(), file)


BEIR = BenchmarkReader(
    "queries.jsonl", "queries.jsonl and qrels/*.tsv or .jsonl (BEIR, MTEB)", read_beir
)
MTEB = BenchmarkReader(
    "corpus", "corpus/, queries/ and qrels/ with parquet files (MTEB)", read_beir
)
SKILLRET = BenchmarkReader(
    "queries", "queries/, skills/ and qrels/*.jsonl (SkillRet's data)", read_skillret
)
