"""Read and write runs and judgements (qrels) in the formats of TREC, BEIR and MTEB.

- A run has a line for each ranked skill: `q1 Q0 pdf-merge 1 12.5 bm25`. The columns are query,
  the constant Q0, skill, rank, score, and the name of the system.
- Judgements have a line for each judged skill: `q1 0 pdf-merge 1` in TREC, where the second column
  is not used, and query, skill and score in BEIR. BEIR has a header, and MTEB also JSON Lines and
  parquet.

Columns are separated by tabs, or by white space in a line without a tab.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import LINE_ERRORS, check_regular, numbered_lines, write_text
from skilltrain.metrics.benchmarks.rows import Row, Text, parse_row, read_rows
from skilltrain.records import Ranking

Id = Annotated[Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""Id of a query or a skill. MTEB also has whole numbers."""
# Names of the columns of judgements without a header, by their number.
_QREL_COLUMNS = {
    3: ["query-id", "corpus-id", "score"],
    4: ["query-id", "iteration", "corpus-id", "score"],
}
_RUN_COLUMNS = ["query", "q0", "skill", "rank", "score", "system"]
_QREL_FORM = "write query, skill and score, separated by tabs or spaces"
_RUN_FORM = "a TREC run has query, Q0, skill, rank, score and system; JSON is in a file .json"


class Qrel(Row):
    """The judgement of a skill for a query."""

    query_id: Id = Field(validation_alias=AliasChoices("query_id", "query-id"))
    skill_id: Id = Field(validation_alias=AliasChoices("skill_id", "corpus-id", "corpus_id"))
    score: float = Field(
        validation_alias=AliasChoices("relevance", "score"), strict=False, allow_inf_nan=False
    )


class _RunRow(Row):
    query: Text
    skill: Text
    rank: int = Field(strict=False)
    score: float = Field(strict=False)


def read_qrels(file: Path) -> Iterator[tuple[str, Qrel]]:
    """Yield (file and line, judgement) of .jsonl, .jsonl.gz, .parquet, .tsv and text files.

    Raises:
        SkilltrainError: A row is no judgement.
    """
    if file.suffix.lower() in (".jsonl", ".gz", ".parquet"):
        yield from read_rows(Qrel, file)
        return

    columns: Sequence[str] = ()
    for where, values in _split_lines(file):
        is_header = not {"query-id", "query_id"}.isdisjoint(values)
        if is_header and not columns:
            columns = values
            continue
        columns = columns or _QREL_COLUMNS.get(len(values), ())
        named = _named(columns, values, _QREL_FORM, where)
        yield where, parse_row(Qrel, named, where)


def read_run(file: Path) -> dict[str, list[str]]:
    """Read the rankings of a TREC run.

    As in trec_eval, skills are ordered by their scores. Equal scores keep the order of the ranks.

    Returns:
        Ranked skill ids by query id.

    Raises:
        SkilltrainError: The file is empty, or a line is not of a run.
    """
    rows_by_query: dict[str, list[_RunRow]] = {}
    for where, values in _split_lines(file):
        row = parse_row(_RunRow, _named(_RUN_COLUMNS, values, _RUN_FORM, where), where)
        rows_by_query.setdefault(row.query, []).append(row)
    if not rows_by_query:
        raise SkilltrainError("invalid-predictions", "the run has no line", where=file)

    rankings = {}
    for query_id, rows in rows_by_query.items():
        rows.sort(key=lambda row: (-row.score, row.rank))
        rankings[query_id] = [row.skill for row in rows]
    return rankings


def _named(columns: Sequence[str], values: Sequence[str], form: str, where: str) -> dict[str, str]:
    """Return the values of a line by column, or raise SkilltrainError for another number of them.

    Args:
        columns: Names of the columns.
        values: Values of the line.
        form: The columns in words, for the error.
        where: File and line, for the error.
    """
    if len(values) != len(columns):
        problem = f"has {len(values)} columns"
        raise SkilltrainError("invalid-row", problem, where=where, fix=form)
    return dict(zip(columns, values, strict=True))


def _split_lines(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (file and line, values) of each line that is not blank."""
    check_regular(file)
    try:
        for number, line in numbered_lines(file):
            text = line.decode("utf-8-sig").rstrip("\r\n")
            # Without a separator, `split` divides the text at white space.
            yield f"{file}, line {number}", text.split("\t" if "\t" in text else None)
    except FileNotFoundError as error:
        raise SkilltrainError("not-found", "no such file", where=file) from error
    except LINE_ERRORS as error:
        problem = f"cannot be read: {reason_of(error)}"
        raise SkilltrainError("unreadable-file", problem, where=file) from error


def write_run(rankings: Mapping[str, Ranking], system: str, file: Path) -> None:
    """Write rankings as a TREC run.

    Args:
        rankings: Ranking by query id.
        system: Name of the system, for the last column. White space becomes `_`.
        file: File to write.
    """
    lines = []
    for query_id, ranking in rankings.items():
        for rank, (skill_id, score) in enumerate(ranking, 1):
            lines.append((query_id, "Q0", skill_id, rank, score, "_".join(system.split())))
    _write_lines(lines, file)


def write_qrels(qrels: Iterable[tuple[str, str, int]], file: Path) -> None:
    """Write judgements as TREC does. Each has a query id, a skill id and a score."""
    _write_lines([(query_id, 0, skill_id, score) for query_id, skill_id, score in qrels], file)


def _write_lines(rows: Iterable[tuple[str | float, ...]], file: Path) -> None:
    """Write rows whose values are separated by spaces, as trec_eval expects.

    Raises:
        SkilltrainError: A value has white space.
    """
    lines = []
    for row in rows:
        values = [str(value) for value in row]
        for value in values:
            if value.split() != [value]:
                problem = f"the id {value!r} has white space, which a TREC file cannot hold"
                raise SkilltrainError("invalid-value", problem, where=file, fix="rename it")
        lines.append(" ".join(values) + "\n")
    write_text(file, "".join(lines))
